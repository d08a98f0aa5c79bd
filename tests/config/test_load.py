"""A recipe that is wrong gets one error: the key, its place, what was expected, the nearest valid key."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflung.config import Recipe, dump_recipe, load_recipe
from farflung.core.errors import BadInput

TWO_POOLS = '[[pools]]\nname = "a"\n\n[[pools]]\nname = "b"\ncapacity = 3\n'


def load(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return load_recipe(path, overrides)


def refusal(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> str:
    with pytest.raises(BadInput) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value).replace(f"{tmp_path}/", "")


def test_an_empty_recipe_is_the_default(tmp_path: Path) -> None:
    assert load(tmp_path, "") == Recipe()


def test_a_dumped_recipe_is_complete_and_reads_back(tmp_path: Path) -> None:
    recipe = load(tmp_path, TWO_POOLS, ("train.lr", "1e-6"), ("run.max_staleness", "4"))
    assert Recipe.model_validate(dump_recipe(recipe)) == recipe


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("[train]\nlrr = 3\n", "recipe.toml:2", ("unknown key 'train.lrr'", "did you mean 'lr'?")),
        ("[trian]\nlr = 1e-3\n", "recipe.toml:1", ("unknown key 'trian'", "did you mean 'train'?")),
        ("\nlr = 1e-3\n", "recipe.toml:2", ("unknown key 'lr'", "did you mean 'train.lr'?")),
        (TWO_POOLS.replace("capacity", "capcity"), "recipe.toml:6", ("unknown key 'pools.b.capcity'", "'capacity'")),
        ('[[pools]]\nkv = "fp8"\n', "recipe.toml:1", ("'pools.0.name' is missing",)),
        ("[train]\nlr = -1\n", "recipe.toml:2", ("train.lr should be greater than 0, not -1",)),
        ("[train]\nlr = inf\n", "recipe.toml:2", ("train.lr should be a finite number",)),
        ("[train]\nweight_decay = nan\n", "recipe.toml:2", ("train.weight_decay should be a finite number",)),
        ("[sampling]\ntemperature = inf\n", "recipe.toml:2", ("sampling.temperature should be a finite number",)),
        ("[sampling]\ntop_p = nan\n", "recipe.toml:2", ("sampling.top_p should be a finite number",)),
        ("[run]\nminutes = inf\n", "recipe.toml:2", ("run.minutes should be a finite number",)),
        ("[agent]\ncommand_seconds = inf\n", "recipe.toml:2", ("agent.command_seconds should be a finite number",)),
        ('train.lr = "fast"\n', "recipe.toml:1", ('train.lr should be a valid number, not "fast"',)),
        ('[run]\nupdates = "3"\n', "recipe.toml:2", ('run.updates should be a valid integer, not "3"',)),
        (
            '[train]\nweight = "grpo"\n',
            "recipe.toml:2",
            ("train.weight should be 'none', 'is', 'tis', 'mis',", 'not "grpo"'),
        ),
        ("train = 3\n", "recipe.toml:1", ("train should be a table, not 3",)),
        ("[train\n", "recipe.toml", ("not TOML", "line 1")),
        ("[train]\nband = [5.0, 1.0]\n", "recipe.toml", ("train.band is [5.0, 1.0]; it needs 0 < low < high",)),
        (
            "[train]\nclip_range = [1.0, 1.0]\n",
            "recipe.toml",
            ("train.clip_range is [1.0, 1.0]; it needs 0 <= low < high",),
        ),
        ("[train]\ngeometric_mask = [2.0, 1.0]\n", "recipe.toml", ("train.geometric_mask is [2.0, 1.0]; it needs",)),
        ('[train]\nweight = "none"\ngspo = [1.5, 0.1]\n', "recipe.toml", ("train.gspo is [1.5, 0.1]; it needs",)),
        ("[train]\ngspo = [3e-4, 4e-4]\n", "recipe.toml", ('train.weight must be "none", not "mis"',)),
        (TWO_POOLS.replace('"b"', '"a"'), "recipe.toml", ("different names",)),
        ("[train]\nbetas = [0.9, 1.0]\n", "recipe.toml", ("train.betas are [0.9, 1.0]", "below 1")),
        ("[run]\nbuffer_batches = 0.5\n", "recipe.toml:2", ("should be greater than or equal to 1, not 0.5",)),
        ('[run]\nname = "../x"\n', "recipe.toml:2", ("run.name should", 'not "../x"')),
        ('[run]\nname = ""\n', "recipe.toml:2", ("run.name should",)),
        ('[[pools]]\nname = "-a b"\n', "recipe.toml:2", ('not "-a b"',)),
    ],
)
def test_a_wrong_recipe_names_key_place_and_expectation(
    tmp_path: Path, text: str, place: str, expected: tuple[str, ...]
) -> None:
    said = refusal(tmp_path, text)
    assert said.startswith(f"{place}: ")
    for part in expected:
        assert part in said


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("trian.lr", "1", "--trian.lr: unknown key 'trian'\n  did you mean 'train'?"),
        ("train.lrr", "1", "--train.lrr: unknown key 'train.lrr'\n  did you mean 'lr'?"),
        ("run.updates", "3.5", "--run.updates: run.updates should be a valid integer, not 3.5"),
        ("pools.c.kv", "fp8", "--pools.c.kv: no entry 'c'\n  valid entries: a, b"),
        ("pools.kv", "fp8", "--pools.kv: a list needs an entry's name or number before the key\n  entries: a, b"),
        ("pools.b.capacity.x", "fp8", "--pools.b.capacity.x: pools.1.capacity is not a table"),
    ],
)
def test_a_wrong_override_names_its_flag(tmp_path: Path, key: str, value: str, expected: str) -> None:
    assert refusal(tmp_path, TWO_POOLS, (key, value)).startswith(expected)


def test_the_update_is_centred_mis_over_tokens_unless_said_otherwise(tmp_path: Path) -> None:
    train = load(tmp_path, "").train
    assert (train.weight, train.band, train.centering, train.std) == ("mis", (0.5, 5.0), True, False)
    assert (train.baseline, train.aggregation) == ("group", "token")
    assert {train.gspo, train.geometric_mask, train.opsm, train.staleness_mask} == {None}


def test_guards_are_set_and_unset(tmp_path: Path) -> None:
    text = '[train]\nweight = "none"\ngspo = [3e-4, 4e-4]\n'
    assert load(tmp_path, text).train.gspo == (3e-4, 4e-4)
    assert load(tmp_path, text, ("train.gspo", "none"), ("train.opsm", "0.1")).train.opsm == 0.1


def test_overrides_are_read_as_toml_and_by_what_the_key_wants(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        TWO_POOLS + "[run]\nminutes = 3\n",
        ("train.lr", "1e-6"),
        ("train.betas", "[0.9, 0.95]"),
        ("run.sync", "true"),
        ("run.name", "2026"),
        ("run.minutes", "none"),
        ("pools.b.weights", "nvfp4"),
        ("pools.0.capacity", "7"),
    )
    assert recipe.train.lr == 1e-6
    assert recipe.train.betas == (0.9, 0.95)
    assert recipe.run.sync is True
    assert recipe.run.name == "2026"
    assert recipe.run.minutes is None
    assert [(p.name, p.weights, p.capacity) for p in recipe.pools] == [("a", "bf16", 7), ("b", "nvfp4", 3)]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read the recipe"):
        load_recipe(tmp_path / "nowhere.toml")


words = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12)


@given(section=words, key=words)
def test_an_unknown_key_is_never_accepted(tmp_path_factory: pytest.TempPathFactory, section: str, key: str) -> None:
    known = section in Recipe.model_fields and key in getattr(type(getattr(Recipe(), section)), "model_fields", {})
    if not known:
        with pytest.raises(BadInput):
            load(tmp_path_factory.getbasetemp(), f"[{section}]\n{key} = 1\n")
