"""Which tensors are quantised."""

from __future__ import annotations

from farflung.formats.selection import Selection, is_quantised


def test_projections_are_quantised_and_nothing_else() -> None:
    at = "model.layers.3."
    yes = [f"{at}self_attn.{p}_proj.weight" for p in "qkvo"] + [
        f"{at}mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    ]
    no = [
        "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", f"{at}input_layernorm.weight",
        f"{at}self_attn.q_norm.weight", f"{at}self_attn.q_proj.bias", f"{at}mlp.gate_proj.bias",
    ]  # fmt: skip
    assert all(map(is_quantised, yes))
    assert not any(map(is_quantised, no))


def test_excluded_names_are_not_taken() -> None:
    up = "model.layers.{}.mlp.up_proj.weight"
    some = Selection(("model.layers.0.*", "*.layers.1?.mlp.*"))
    assert [some.takes(up.format(i)) for i in (0, 1, 10, 100)] == [False, True, False, True]
    assert not some.takes("model.layers.3.mlp.up_proj.bias")
    assert not Selection(("MODEL.*",)).takes("lm_head.weight")
    assert Selection(("MODEL.*",)).takes(up.format(0))
    assert Selection().takes(up.format(0))
