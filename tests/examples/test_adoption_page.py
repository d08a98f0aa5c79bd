"""The page for other trainers: its code runs as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.core.errors import BadInput

ROOT = Path(__file__).parents[2]


def test_the_code_on_the_page_runs_and_both_ways_give_one_loss() -> None:
    page = (ROOT / "docs" / "adoption.md").read_text()
    padded, loss, from_logits, readers, echo = re.findall(r"```python\n(.*?)```", page, re.S)
    torch.manual_seed(0)
    lm_head = torch.nn.Linear(16, 50)
    hidden = torch.randn(3, 16, requires_grad=True)
    names: dict[str, Any] = {
        "lm_head": lm_head, "hidden": hidden,
        "logits": lm_head(hidden), "sampled": torch.tensor([4, 9, 2]), "advantages": torch.tensor([1.0, -0.5, 2.0]),
        "padded_ids": torch.tensor([[4, 7, 8], [9, 0, 0], [1, 2, 0]]),
        "padded_logprobs": torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.4, 0.6, 0.0]]).log(),
        "temperature": 0.8, "action_tokens": 3, "served": {"temperature": 0.8, "top_p": 0.97},
        "sglang_answer": json.loads((ROOT / "examples" / "replies" / "sglang.json").read_text()),
        "vllm_answer": json.loads((ROOT / "examples" / "replies" / "vllm.json").read_text()),
    }  # fmt: skip
    exec(padded, names)
    assert names["supports"].sizes.tolist() == [3, 1, 2]
    exec(loss, names)
    assert hidden.grad is not None
    first = names["loss"]
    exec(from_logits, names)
    assert torch.allclose(first, names["loss"])
    exec(readers, names)
    assert len(names["supports"]) == 6
    exec(echo, names)
    names["served"]["top_p"] = 0.95
    with pytest.raises(BadInput, match=r"top_p 0\.97 was asked for, 0\.95 was used"):
        exec(echo, names)


def test_the_page_makes_rows_that_keep_what_is_no_number() -> None:
    """NaN is no padding: it reaches the check, which names it."""
    (padded,) = re.findall(r"```python\n(.*?kept = .*?)```", (ROOT / "docs" / "adoption.md").read_text(), re.S)
    names: dict[str, Any] = {
        "padded_ids": torch.tensor([[4, 7]]), "padded_logprobs": torch.tensor([[0.9995, torch.nan]]).log(),
    }  # fmt: skip
    exec(padded, names)
    with pytest.raises(BadInput, match="row 0's candidate 7 has log-probability nan"):
        names["supports"].check(torch.tensor([4]))
