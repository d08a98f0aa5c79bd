"""Every argument that a loss can be given wrongly gets one clear error; what is narrow or not finite shows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from farflung.core.errors import BadInput
from farflung.corrections import (
    Clipped,
    Guards,
    Masked,
    Plain,
    Supports,
    Weight,
    candidate_loss,
    centred_loss,
    vocabulary_loss,
)

ONE = Supports(torch.tensor([0, 1]), torch.tensor([0.5, 0.5]).log(), torch.tensor([0, 2]))
TOP = dataclasses.replace(ONE, kind="top_k")


NAN, INF = float("nan"), float("inf")
GUARDED: dict[str, object] = {"guards": Guards(opsm=0.1), "sequences": torch.tensor([0])}
AGED: dict[str, object] = {"guards": Guards(max_staleness=1), "sequences": torch.tensor([0])}

UPDATE: list[tuple[dict[str, object], str]] = [
    ({"denominator": 0}, "denominator is 0; it must be finite and above 0: a batch needs action tokens"),
    ({"denominator": NAN}, "denominator is nan"),
    ({"denominator": INF}, "denominator is inf"),
    ({"denominator": [1.0]}, "denominator is a list, not a number"),
    ({"denominator": torch.zeros(1)}, r"denominator\[0\] is 0.0; .* a batch needs action tokens"),
    ({"denominator": torch.tensor(NAN)}, "denominator is nan"),
    ({"denominator": torch.zeros(0)}, r"denominator has shape \[0\], not \[1\]"),
    ({"denominator": torch.ones(1, 1)}, r"denominator has shape \[1, 1\], not \[1\]"),
    ({"denominator": torch.ones(1, device="meta")}, "denominator is on meta"),
    ({"denominator": torch.tensor(True)}, "denominator is torch.bool"),
    ({"temperature": 0.0}, "temperature is 0"),
    ({"temperature": -1.0}, "temperature is -1"),
    ({"temperature": NAN}, "temperature is nan"),
    ({"temperature": INF}, "temperature is inf"),
    ({"temperature": None}, "temperature is None, not a number"),
    ({"temperature": torch.tensor(1.0)}, "temperature is a Tensor, not a number"),
    ({"weight": None}, "weight is None, not a function"),
    ({"weight": "mis"}, "weight is a str, not a function"),
    ({"sampled": torch.tensor([1.0])}, "sampled is torch.float32"),
    ({"sampled": torch.tensor([True])}, "sampled is torch.bool"),
    ({"sampled": torch.tensor([[0]])}, r"sampled has shape \[1, 1\]"),
    ({"sampled": [0]}, "sampled is a list, not a tensor"),
    ({"advantages": torch.ones(2)}, r"advantages has shape \[2\], not \[1\]"),
    ({"advantages": torch.ones(1, 1)}, r"advantages has shape \[1, 1\], not \[1\]"),
    ({"advantages": torch.tensor(1.0)}, r"advantages has shape \[\], not \[1\]"),
    ({"advantages": [1.0]}, "advantages is a list, not a tensor"),
    ({"advantages": torch.tensor([NAN])}, r"advantages\[0\] is nan; it must be finite"),
    ({"advantages": torch.tensor([INF])}, r"advantages\[0\] is inf; it must be finite"),
    ({"advantages": torch.tensor([1])}, "advantages is torch.int64"),
    ({"advantages": torch.ones(1, device="meta")}, "advantages is on meta, what it belongs to on cpu"),
    ({"supports": None}, "supports is None, not Supports"),
]

MODEL: list[tuple[dict[str, object], str]] = [
    ({"hidden": torch.ones(1, 3)}, r"hidden is \(1, 3\) and head \(3, 2\): their widths differ"),
    ({"hidden": torch.ones(1, 1, 2)}, r"hidden has shape \[1, 1, 2\], not \[any, any\]"),
    ({"hidden": torch.ones(1, 2, dtype=torch.complex64)}, "hidden is torch.complex64"),
    ({"hidden": torch.ones(1, 2, dtype=torch.int64)}, "hidden is torch.int64"),
    ({"head": torch.ones(3, 2, device="meta")}, "head is on meta, what it belongs to on cpu"),
    ({"bias": torch.ones(2)}, r"bias has shape \[2\], not \[3\]"),
    ({"bias": torch.ones(3, 1)}, r"bias has shape \[3, 1\], not \[3\]"),
    ({"bias": torch.ones(3, device="meta")}, "bias is on meta"),
    ({"bias": torch.tensor([0, NAN, 0])}, r"bias\[1\] is nan; it must be finite"),
    ({"softcap": 0.0}, "softcap is 0"),
    ({"softcap": NAN}, "softcap is nan"),
    ({"sampled": torch.tensor([1, 1])}, r"sampled has shape \[2\], not \[1\]"),
    ({"guards": Guards(opsm=0.1)}, "guards need the sequence of every token"),
    (GUARDED | {"sequences": torch.zeros(1)}, "sequences is torch.float32"),
    (GUARDED | {"sequences": torch.tensor([0, 0])}, r"sequences has shape \[2\], not \[1\]"),
    (GUARDED | {"sequences": torch.tensor([-1])}, r"sequences\[0\] is -1; it must be in \[0, 1\)"),
    (GUARDED | {"sequences": torch.tensor([2**33])}, r"sequences\[0\] is 8589934592; it must be in \[0, 1\)"),
    (AGED, "max_staleness needs each token's staleness"),
    (AGED | {"staleness": torch.zeros(2).long()}, r"staleness has shape \[2\], not \[1\]"),
    (AGED | {"staleness": torch.zeros(1)}, "staleness is torch.float32"),
]


def candidate_arguments() -> dict[str, object]:
    return {
        "hidden": torch.ones(1, 2), "head": torch.ones(3, 2), "bias": None, "supports": ONE, "sampled": torch.tensor([0]),
        "advantages": torch.ones(1), "weight": Plain(), "denominator": 1, "temperature": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        *UPDATE,
        *MODEL,
        ({"supports": TOP}, "kind top_k; this loss takes top_p"),
        ({"sampled": torch.tensor([2])}, "row 0's sampled token 2 is not among its candidates"),
        (
            {"supports": dataclasses.replace(ONE, ids=torch.tensor([0, 3]))},
            "row 0's candidate 3 is outside the vocabulary",
        ),
        ({"supports": dataclasses.replace(ONE, ids=torch.tensor([0, -1]))}, "row 0's candidate -1 is outside"),
        (
            {"supports": dataclasses.replace(ONE, offsets=torch.tensor([0, 9]))},
            r"offsets \[0, 9\] do not span 2 entries",
        ),
        ({"probes": -1}, "probes is -1; it must be a whole number, at least 0"),
    ],
)
def test_bad_input_of_the_candidate_loss(changed: dict[str, object], what: str) -> None:
    given = candidate_arguments()
    candidate_loss(**given)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=what):
        candidate_loss(**given | changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        *(case for case in UPDATE if case[0] != {"supports": None}),
        *MODEL,
        ({"supports": ONE}, "kind top_p; this loss takes top_k"),
        ({"logprobs": torch.tensor([-torch.inf])}, "row 0's sampled token 0 has probability 0"),
        ({"logprobs": torch.tensor([torch.nan])}, "row 0's sampled token 0 has log-probability nan"),
        ({"logprobs": torch.tensor([0.5])}, "row 0's sampled token 0 has log-probability 0.5"),
        ({"logprobs": torch.zeros(2)}, r"logprobs has shape \[2\], not \[1\]"),
        ({"logprobs": torch.tensor([-1])}, "logprobs is torch.int64, not torch.float32 or torch.float64"),
        ({"logprobs": torch.zeros(1, device="meta")}, "logprobs is on meta"),
        ({"sampled": torch.tensor([3])}, "row 0's sampled token 3 is outside the vocabulary of 3"),
        ({"supports": dataclasses.replace(TOP, ids=torch.tensor([0, -1]))}, "row 0's candidate -1 is outside"),
    ],
)
def test_bad_input_of_the_vocabulary_loss(changed: dict[str, object], what: str) -> None:
    given = candidate_arguments() | {"supports": TOP, "logprobs": torch.tensor([-1.0]), "weight": Clipped(0.0, 2.0)}
    vocabulary_loss(**given)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=what):
        vocabulary_loss(**given | changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        *UPDATE,
        ({"logits": torch.ones(3)}, r"logits has shape \[3\], not \[2\]"),
        ({"logits": torch.ones(2, dtype=torch.int64)}, "logits is torch.int64"),
        ({"supports": TOP}, "kind top_k; this loss takes top_p"),
        ({"sampled": torch.tensor([2])}, "row 0's sampled token 2 is not among its candidates"),
        (
            {"supports": dataclasses.replace(ONE, logprobs=torch.tensor([-0.1, NAN]))},
            "candidate 1 has log-probability nan",
        ),
        ({"supports": dataclasses.replace(ONE, logprobs=torch.tensor([-INF, 0]))}, "sampled token 0 has probability 0"),
        (
            {"supports": dataclasses.replace(ONE, logprobs=torch.tensor([0, -INF]))},
            "candidate 1 has log-probability -inf",
        ),
        (
            {"supports": dataclasses.replace(ONE, logprobs=torch.tensor([-2.0, -2]))},
            "probabilities sum to 0.270671, not 1",
        ),
        ({"supports": dataclasses.replace(ONE, ids=torch.tensor([0, 0]))}, "row 0 names candidate 0 twice"),
        ({"supports": dataclasses.replace(ONE, ids=torch.tensor([0, 2**62]))}, f"row 0's candidate {2**62} is outside"),
        (
            {"supports": dataclasses.replace(ONE, offsets=torch.tensor([1, 2]))},
            r"offsets \[1, 2\] do not span 2 entries",
        ),
        (
            {"supports": dataclasses.replace(ONE, offsets=torch.tensor([0, 9]))},
            r"offsets \[0, 9\] do not span 2 entries",
        ),
    ],
)
def test_bad_input_of_the_centred_loss(changed: dict[str, object], what: str) -> None:
    given: dict[str, object] = {
        "logits": torch.ones(2), "supports": ONE, "sampled": torch.tensor([0]), "advantages": torch.ones(1),
        "weight": Plain(), "denominator": 1, "temperature": 1.0,
    }  # fmt: skip
    centred_loss(**given)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=what):
        centred_loss(**given | changed)  # type: ignore[arg-type]


def test_one_divisor_in_every_form() -> None:
    """A number, a tensor of none or one dimension: one loss. One for each row in a column would be N times as much."""
    supports = ONE.select(torch.zeros(3, dtype=torch.int64))
    given = candidate_arguments() | {
        "hidden": torch.arange(6.0).view(3, 2), "sampled": torch.tensor([0, 1, 0]), "supports": supports,
        "head": torch.arange(6.0).view(3, 2), "advantages": torch.tensor([1.0, 2, -1]),
    }  # fmt: skip
    losses = [
        candidate_loss(**given | {"denominator": each})[0]  # type: ignore[arg-type]
        for each in (6, 6.0, torch.tensor(6), torch.tensor(6.0), torch.full((3,), 6.0), torch.full((3,), 6))
    ]
    assert losses[0] != 0
    assert all(torch.equal(each, losses[0]) for each in losses)
    with pytest.raises(BadInput, match=r"denominator has shape \[3, 1\], not \[3\]"):
        candidate_loss(**given | {"denominator": torch.full((3, 1), 6.0)})  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [Plain(), Masked(0.5, 5.0)])
@pytest.mark.parametrize("part", ["hidden", "head"])
def test_a_model_that_is_not_finite_shows_in_the_loss(part: str, weight: Weight) -> None:
    """Never a finite loss that looks like one."""
    for broken in (NAN, INF):
        given = candidate_arguments() | {"weight": weight, part: torch.full((3 if part == "head" else 1, 2), broken)}
        assert candidate_loss(**given)[0].isnan()  # type: ignore[arg-type]
        given |= {"supports": TOP, "logprobs": torch.tensor([-1.0])}
        assert vocabulary_loss(**given)[0].isnan()  # type: ignore[arg-type]
    loss, _, _ = centred_loss(
        torch.tensor([1.0, NAN]), ONE, torch.tensor([0]), torch.ones(1), weight=weight, denominator=1
    )
    assert loss.isnan()


def test_narrow_logits_are_widened() -> None:
    """bfloat16 logits: value, log-probabilities and coefficients are those of the same numbers in float32."""
    narrow = torch.tensor([0.3, -1.7]).bfloat16().requires_grad_()
    wide = narrow.detach().float().requires_grad_()
    results = [
        centred_loss(z, ONE, torch.tensor([1]), torch.ones(1), weight=Masked(0.5, 5.0), denominator=1)
        for z in (narrow, wide)
    ]
    assert results[0][1].dtype == torch.float32
    assert torch.equal(results[0][0], results[1][0])
    (got,), (want,) = (torch.autograd.grad(r[0], z) for r, z in zip(results, (narrow, wide), strict=True))
    assert torch.equal(got, want.bfloat16())
