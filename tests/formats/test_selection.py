"""Which tensors are quantised."""

from __future__ import annotations

from farflung.formats.selection import is_quantised


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
