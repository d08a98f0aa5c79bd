"""Snapshots and sections: what of a trainer's tensors goes into which format."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from farflung.core.errors import BadInput
from farflung.core.sampling import WeightFormat
from farflung.formats.checkpoint import from_tensors
from farflung.formats.selection import Selection
from farflung.weights import Shard, Subscriber
from farflung.weights.elements import from_bits
from farflung.weights.streams import (
    NATIVE,
    SHARED,
    Section,
    Snapshot,
    check_formats,
    schema_of,
    sections,
    split,
    stream_sections,
)
from tests.weights.parts import (
    DOWN,
    EMBED,
    HEAD,
    NORM,
    QUERY,
    RUN,
    MemoryStore,
    Policy,
    copy,
    in_format,
    publish,
    same,
    step,
    walk,
    weights,
)

ALL = Selection()
FORMATS = ("bf16", "fp8", "mxfp4", "nvfp4")


def tensors(*parts: Section) -> Policy:
    return {
        name: from_bits(run.bits, run.type.kind, run.type.shape) for part in parts for name, run in part.runs.items()
    }


def snapshot(policy: Policy) -> Snapshot:
    return Snapshot.of(policy, selection=ALL)


def test_a_snapshot_is_a_copy_rounded_to_nearest_even() -> None:
    policy = {"w": torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.5e38])}
    taken = Snapshot.of(policy)
    policy["w"][:] = 0
    assert tensors(Section(taken.runs))["w"].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, float("inf")]


def test_tensors_in_the_same_memory_are_tied_to_the_first() -> None:
    policy = weights()
    policy["view"] = policy[EMBED][:20]
    policy["empty"], policy["void"] = torch.zeros(0), torch.zeros(0)
    taken = Snapshot.of(policy)
    assert taken.tied == {HEAD: EMBED}
    assert set(taken.runs) == set(policy) - {HEAD}


def test_matrices_that_are_quantised_have_scales_under_each_name_and_are_not_tied() -> None:
    policy = weights()
    other = QUERY.replace("layers.0", "layers.1")
    policy[other] = policy[QUERY]
    taken = snapshot(policy)
    assert taken.tied == {HEAD: EMBED}
    made = sections(taken, ("fp8",), ALL, {})
    assert same(tensors(made[SHARED], made["fp8"]) | {HEAD: policy[EMBED].bfloat16()}, in_format(policy, "fp8")[0])


@pytest.mark.parametrize("format", FORMATS)
def test_a_stream_is_the_shared_section_and_the_formats_own(format: str) -> None:
    """What quantise gives with the last form, bit for bit, and what a checkpoint's reader understands."""
    before: dict[str, Section] = {}
    last = None
    for policy in walk(3, size=0.05):
        made = sections(snapshot(policy), ("bf16", format) if format != "bf16" else ("bf16",), ALL, before)
        held, last = in_format(policy, format, last)
        found = tensors(*(made[name] for name in stream_sections(format))) | {HEAD: policy[EMBED].bfloat16()}
        assert same(found, held)
        assert set(made[SHARED].runs) == {EMBED, NORM, "scale"}
        for name in (QUERY, DOWN):
            rows, columns = policy[name].shape
            read = from_tensors(found, name, cast(WeightFormat, format), rows, columns)
            assert torch.equal(read.dequantise(), last[name].dequantise())
        before = made


def test_scales_are_kept_from_the_last_version() -> None:
    policy, formats = weights(), ("fp8", "nvfp4")
    first = sections(snapshot(policy), formats, ALL, {})
    policy[QUERY] *= 0.9
    kept, fresh = sections(snapshot(policy), formats, ALL, first), sections(snapshot(policy), formats, ALL, {})
    for format, name in (("fp8", f"{QUERY}_scale_inv"), ("nvfp4", f"{QUERY}_scale_2")):
        scales = [made[format].runs[name].bits.tobytes() for made in (first, kept, fresh)]
        assert scales[0] == scales[1] != scales[2]


def test_excluded_matrices_stay_bf16_and_shared() -> None:
    policy = weights()
    selection = Selection(("*.mlp.*",))
    made = sections(Snapshot.of(policy, selection=selection), ("bf16", "nvfp4"), selection, {})
    assert set(made[SHARED].runs) == {EMBED, DOWN, NORM, "scale"}
    assert set(made["bf16"].runs) == {QUERY}
    assert set(made["nvfp4"].runs) == {QUERY, f"{QUERY}_scale", f"{QUERY}_scale_2"}


@pytest.mark.parametrize("change", ["shape", "excluded before", "a vector before"])
def test_a_matrix_without_a_last_form_of_its_shape_is_quantised_anew(change: str) -> None:
    policy = weights()
    earlier, selection = copy(policy), ALL
    if change == "shape":
        earlier[QUERY] = torch.randn(8, 16)
    elif change == "a vector before":
        earlier[QUERY] = torch.randn(8)
    else:
        selection = Selection(("*.self_attn.*",))
    before = sections(Snapshot.of(earlier, selection=selection), ("bf16", "fp8", "nvfp4"), selection, {})
    if change == "excluded before":  # as a resumed publisher finds it, which looks through its own selection
        before = {format: Section(before[SHARED].runs | before[format].runs) for format in before}
    made = sections(snapshot(policy), ("bf16", "fp8", "nvfp4"), ALL, before)
    fresh = sections(snapshot(policy), ("bf16", "fp8", "nvfp4"), ALL, {})
    for format in made:
        own = {name: run for name, run in made[format].runs.items() if name.startswith(QUERY)}
        assert same(
            tensors(Section(own)), {name: t for name, t in tensors(fresh[format]).items() if name.startswith(QUERY)}
        )


@pytest.mark.parametrize("format", [*FORMATS, NATIVE])
def test_an_image_splits_into_the_sections_it_was_made_of(format: str) -> None:
    store, policy = MemoryStore(), step(weights(), 1)
    if format == NATIVE:
        policy |= {f"{QUERY}_scale_inv": torch.ones(1, 1), "codes": torch.zeros(4, dtype=torch.uint8)}
    publish(store, [policy], formats=(format,), exclude=("*.q_proj.*",))
    subscriber = Subscriber(store, RUN, format=format)
    subscriber.fetch(0)
    selection = Selection(("*.q_proj.*",))
    taken = Snapshot.of(policy, native=format == NATIVE, selection=None if format == NATIVE else selection)
    made = sections(taken, (format,), selection, {})
    assert subscriber.image is not None
    found = split(subscriber.image, format, selection)
    assert set(found) == set(stream_sections(format))
    for name, section in found.items():
        assert list(section.runs) == list(made[name].runs)
        assert same(tensors(section), tensors(made[name]))
        assert section.pieces == made[name].pieces


def test_native_keeps_every_type() -> None:
    policy = {
        "a": torch.randn(3),
        "b": torch.randn(3).bfloat16(),
        "c": torch.randn(3).half(),
        "d": torch.randn(3).to(torch.float8_e4m3fn),
        "e": torch.randn(3).to(torch.float8_e5m2),
        "f": torch.tensor([1, 2, 255], dtype=torch.uint8),
    }
    made = sections(Snapshot.of(policy, native=True), (NATIVE,), ALL, {})
    assert set(made) == {NATIVE}
    assert same(tensors(made[NATIVE]), policy)


def test_a_shard_is_the_run_of_elements_that_it_holds() -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    taken = Snapshot.of({"w": Shard(whole[2:5], 2, (6, 4))})
    run = taken.runs["w"]
    assert (run.start, run.size, run.type.shape) == (8, 12, (6, 4))
    section = Section(taken.runs)
    assert [(piece.start, piece.size) for piece in section.pieces] == [(8, 12)]
    assert section.bits(section.pieces[0]).tobytes() == run.bits.tobytes()
    with pytest.raises(BadInput, match="tensor w: 12 of its 24 elements are here"):
        schema_of([section], {})
    assert schema_of([Section(Snapshot.of({"w": Shard(whole, 0, (6, 4))}).runs)], {}).nbytes == 48


@pytest.mark.parametrize(
    ("start", "shape"), [(4, (6, 4)), (-1, (6, 4)), (0, (6, 5)), (0, (6,)), (0, ()), (0, (2, 4)), (0, (3, 2, 2))]
)
def test_a_shard_that_does_not_lie_in_its_tensor_is_refused(start: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match=r"tensor w: rows of shape \(3, 4\)"):
        Snapshot.of({"w": Shard(torch.ones(3, 4), start, shape)})


def test_what_cannot_be_published_is_refused() -> None:
    with pytest.raises(BadInput, match="no tensors"):
        Snapshot.of({})
    with pytest.raises(BadInput, match=r"tensor ids: it has type torch\.int64"):
        Snapshot.of({"ids": torch.ones(3, dtype=torch.int64)})
    with pytest.raises(BadInput, match=r"tensor ids: its type is int64"):
        Snapshot.of({"ids": torch.ones(3, dtype=torch.int64)}, native=True)
    diverged = weights()
    diverged[QUERY][1, 2] = float("nan")
    with pytest.raises(BadInput, match=f"{QUERY} holds NaN or infinity"):
        sections(snapshot(diverged), ("fp8",), ALL, {})
    part = snapshot({QUERY: Shard(torch.ones(3, 4), 0, (6, 4))})
    with pytest.raises(BadInput, match=f"tensor {QUERY}: rows 0 to 3 of 6 do not end where blocks"):
        sections(part, ("fp8",), ALL, {})


@pytest.mark.parametrize("formats", [(), ("fp4",), ("bf16", "bf16"), ("bf16", "native"), ("bf16", "BF16")])
def test_formats_are_known_ones_each_once_or_native_alone(formats: tuple[str, ...]) -> None:
    assert check_formats(["nvfp4", "bf16"]) == ("nvfp4", "bf16")
    assert check_formats(["native"]) == ("native",)
    with pytest.raises(BadInput, match=r"formats: cannot publish in .*\n.*native alone"):
        check_formats(formats)
