"""Replies of SGLang and vLLM: what is read from a good one, and that each known way of going wrong is refused."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farflung.core.errors import Corrupt
from farflung.engines.replies import Reply, Span, read_sglang, read_vllm

FOLDER = Path(__file__).parents[2] / "examples" / "replies"
SGLANG = json.loads((FOLDER / "sglang.json").read_text())
VLLM = json.loads((FOLDER / "vllm.json").read_text())["choices"][0]
DRAWN = [39342, 56295, 129581, 131261, 25091, 87793]

Change = Callable[[Any], Any]


def sglang(change: Change) -> dict[str, Any]:
    reply = copy.deepcopy(SGLANG)
    change(reply["meta_info"])
    return reply


def vllm(change: Change) -> dict[str, Any]:
    choice = copy.deepcopy(VLLM)
    change(choice)
    return choice


def put(*path: Any, to: Any) -> Change:
    """Set the value at a path of keys and indices."""

    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return change


def as_sets(reply: Reply) -> list[dict[int, float]]:
    rows = [reply.supports.rows(t, t + 1) for t in range(len(reply.ids))]
    return [dict(zip(row.ids.tolist(), row.logprobs.tolist(), strict=True)) for row in rows]


def test_both_engines_replies_are_read_to_the_same_arrays() -> None:
    first, second = read_sglang(SGLANG), read_vllm(VLLM)
    for reply in (first, second):
        assert reply.ids.tolist() == DRAWN
        assert reply.ids.dtype == np.int32
        assert reply.logprobs.dtype == np.float32
        assert reply.finish == "length"
        assert reply.spans == (Span("17", 0, 4), Span("18", 4, 6))
        assert reply.supports.sizes.tolist() == [3, 4, 1, 2, 3, 1]
        totals = np.add.reduceat(np.exp(reply.supports.logprobs), reply.supports.offsets[:-1])
        assert np.allclose(totals, 1, atol=1e-6)
    assert as_sets(first) == as_sets(second)
    assert first.logprobs.tolist() == second.logprobs.tolist()
    assert [row[token] for row, token in zip(as_sets(first), DRAWN, strict=True)] == first.logprobs.tolist()


def test_only_ids_and_the_masks_own_numbers_are_used() -> None:
    other = copy.deepcopy(SGLANG)
    del other["text"]
    for triple in other["meta_info"]["output_token_logprobs"]:
        triple[0] -= 3.0  # before top-k and top-p, or before temperature: another distribution
    assert as_sets(read_sglang(other)) == as_sets(read_sglang(SGLANG))
    del other["meta_info"]["output_token_logprobs"]
    assert as_sets(read_sglang(other)) == as_sets(read_sglang(SGLANG))


def test_what_was_drawn_before_an_abort_is_kept() -> None:
    assert read_sglang(sglang(put("finish_reason", to={"type": "abort", "message": "Aborted"}))).finish == "abort"
    assert len(read_vllm({**VLLM, "finish_reason": "abort"}).ids) == 6
    empty = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_versions": []}}
    assert len(read_sglang(empty).supports) == 0
    nothing = {"token_ids": [], "finish_reason": "abort", "logprobs": None, "weight_versions": []}
    assert len(read_vllm(nothing).supports) == 0


def test_a_mask_replaces_the_proof_that_no_candidate_is_missing() -> None:
    full = vllm(only_candidates)
    full["sampling_mask"] = copy.deepcopy(SGLANG["meta_info"]["output_token_sampling_mask"])
    assert as_sets(read_vllm(full)) == as_sets(read_vllm(VLLM))
    full["sampling_mask"][1] = full["sampling_mask"][1][:-1]
    with pytest.raises(Corrupt, match=r"row 1: sampling_mask and log-probabilities disagree on \[6390\]"):
        read_vllm(full)


MASK, VALUES = "output_token_sampling_mask", "output_token_sampling_logprobs"

SGLANG_WRONG: dict[str, tuple[Change, str]] = {
    "a router dropped the mask": (lambda m: m.pop(MASK), f"{MASK} is missing"),
    "a router dropped the log-probabilities": (lambda m: m.pop(VALUES), f"{VALUES} is missing"),
    "mode selected": (
        put(VALUES, to=[-1.9, -0.4, 0.0, -0.1, -0.5, 0.0]),
        "row 0 of .* is -1.9: not the candidates'",
    ),
    "a row too few": (lambda m: (m[MASK].pop(), m[VALUES].pop()), f"{MASK} has 5 rows for 6 tokens"),
    "rows shifted by one": (
        lambda m: (m[MASK].insert(0, m[MASK].pop()), m[VALUES].insert(0, m[VALUES].pop())),
        "row 0's sampled token 39342 is 0 times among its candidates",
    ),
    "ids of another sequence": (put("output_token_logprobs", 3, 1, to=7), "row 3 of output_token_logprobs"),
    "a candidate without its number": (lambda m: m[VALUES][1].pop(), "row 1 has 4 candidates and 3 log-prob"),
    "NaN as null": (put(VALUES, 4, 2, to=None), "row 4 has log-probability None"),
    "NaN": (put(VALUES, 4, 2, to=float("nan")), "row 4 has log-probability nan"),
    "not renormalised": (put(VALUES, 3, 0, to=-0.3), "row 3's probabilities sum to 0.80"),
    "more than one": (put(VALUES, 5, 0, to=0.1), "row 5's candidate 87793 has log-probability 0.1"),
    "a sum above one": (put(VALUES, 3, 0, to=0.0), "row 3's probabilities sum to 1.06"),
    "log-probability 0 everywhere": (put(VALUES, 0, to=[0.0, 0.0, 0.0]), "row 0's probabilities sum to 3.00"),
    "a candidate twice": (put(MASK, 1, 3, to=5851), "row 1 names candidate 5851 twice"),
    "the sampled token not among them": (put(MASK, 1, 0, to=7), "row 1's sampled token 56295 is 0 times"),
    "no candidates": (lambda m: (m[MASK][2].clear(), m[VALUES][2].clear()), "row 2's sampled token 129581 is 0 times"),
    "a fraction for an id": (put(MASK, 1, 3, to=6390.0), "row 1 has 6390.0, which is no token id"),
    "a negative id": (put(MASK, 1, 3, to=-1), "row 1 has -1, which is no token id"),
    "part of a stream": (put("finish_reason", to=None), "finish_reason is None: this generation is not finished"),
    "a version missing": (lambda m: m["weight_versions"].pop(), "weight_versions cover 4 of 6 tokens"),
    "versions overlap": (put("weight_versions", 1, "start", to=3), "weight_versions go from token 4 to 3..6"),
}


@pytest.mark.parametrize("name", SGLANG_WRONG)
def test_sglang_replies_that_are_no_record_of_q_are_refused(name: str) -> None:
    change, said = SGLANG_WRONG[name]
    with pytest.raises(Corrupt, match=said) as caught:
        read_sglang(sglang(change))
    assert str(caught.value).startswith("SGLang reply")
    assert ("return_sampling_mask" in caught.value.mend) == (name.startswith("a router") or name == "mode selected")


def raw(choice: dict[str, Any], outside: float) -> None:
    """What ``raw_logprobs`` sends: every listed token with its log-probability over the vocabulary."""
    for entry in choice["logprobs"]["content"]:
        listed = entry["top_logprobs"]
        inside = [each for each in listed if each["logprob"] > -9999]
        for each in inside:
            each["logprob"] += float(np.log1p(-outside))
        for each in listed:
            if each not in inside:
                each["logprob"] = float(np.log(outside / len(listed)))
        entry["logprob"] = listed[0]["logprob"]


def only_candidates(choice: dict[str, Any]) -> None:
    for entry in choice["logprobs"]["content"]:
        entry["top_logprobs"] = [each for each in entry["top_logprobs"] if each["logprob"] > -9999]


VLLM_WRONG: dict[str, tuple[Change, str]] = {
    "log-probabilities were not asked for": (put("logprobs", to=None), "logprobs is missing"),
    "raw log-probabilities": (lambda c: raw(c, 0.2), "row 0: all 5 listed tokens could have been drawn"),
    "raw ones that nearly sum to one": (lambda c: raw(c, 1e-4), "row 0: all 5 listed tokens could have been drawn"),
    "no more asked for than top_k": (only_candidates, "row 0: all 3 listed tokens could have been drawn"),
    "the sampled token alone": (
        lambda c: [entry["top_logprobs"].clear() for entry in c["logprobs"]["content"]],
        "row 0: all 0 listed tokens could have been drawn",
    ),
    "text mode, without ids": (lambda c: c["logprobs"]["content"][2].pop("token_id"), "row 2: token_id is missing"),
    "a row too few": (lambda c: c["logprobs"]["content"].pop(), "logprobs has 5 rows for 6 tokens"),
    "rows shifted by one": (
        lambda c: c["logprobs"]["content"].insert(0, c["logprobs"]["content"].pop()),
        "row 0: log-probabilities of token 87793; 39342 was drawn",
    ),
    "the sampled token at the floor": (
        put("logprobs", "content", 3, "logprob", to=-9999.0),
        "row 3: sampled token 131261 has log-probability -9999.0: none was recorded",
    ),
    "another number for the sampled token": (
        put("logprobs", "content", 3, "logprob", to=-0.17),
        "row 3's sampled token has log-probability -0.17",
    ),
    "a candidate's NaN at the floor": (
        put("logprobs", "content", 0, "top_logprobs", 1, "logprob", to=-9999.0),
        "row 0's probabilities sum to 0.30",
    ),
    "a candidate without its number": (
        put("logprobs", "content", 0, "top_logprobs", 1, "logprob", to=None),
        "row 0: logprob is missing",
    ),
    "a candidate twice": (
        put("logprobs", "content", 0, "top_logprobs", 1, "token_id", to=101976),
        "row 0: top_logprobs lists a token twice",
    ),
    "a mask of other length": (put("sampling_mask", to=[[1]]), "sampling_mask has 1 rows for 6 tokens"),
    "no tokens": (lambda c: (c["token_ids"].clear(), c["weight_versions"].clear()), "token_ids is empty"),
    "part of a stream": (put("finish_reason", to=None), "finish_reason is None: this generation is not finished"),
    "a version missing": (lambda c: c["weight_versions"].pop(), "weight_versions cover 4 of 6 tokens"),
}


@pytest.mark.parametrize("name", VLLM_WRONG)
def test_vllm_replies_that_are_no_record_of_q_are_refused(name: str) -> None:
    change, said = VLLM_WRONG[name]
    with pytest.raises(Corrupt, match=said) as caught:
        read_vllm(vllm(change))
    assert str(caught.value).startswith("vLLM reply")
    badly_asked = "could have been drawn" in said or said == "logprobs is missing"
    assert ("processed_logprobs" in caught.value.mend) == badly_asked


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON tree."""
    items = list(data.items()) if isinstance(data, dict) else list(enumerate(data)) if isinstance(data, list) else []
    return [(data, key) for key, _ in items] + [place for _, value in items for place in places(value)]


@pytest.mark.parametrize(("read", "good"), [(read_sglang, SGLANG), (read_vllm, VLLM)], ids=["sglang", "vllm"])
def test_whatever_one_value_becomes_nothing_but_corrupt_is_raised(read: Callable[[Any], Reply], good: Any) -> None:
    chance = random.Random(0)
    strange = [None, True, -1, 7, 1 << 40, 10**400, 0.5, float("nan"), float("-inf"), "x", [], [None], {}, [[1]]]
    for index in range(len(places(good))):
        for value in chance.sample(strange, 5):
            spoilt = copy.deepcopy(good)
            container, key = places(spoilt)[index]
            container[key] = value
            try:
                reply = read(spoilt)
            except Corrupt:
                continue
            reply.supports.check(reply.ids, reply.logprobs)
