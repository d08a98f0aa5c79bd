"""The example that reads replies: both engines' lead to the same loss."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


def test_both_replies_give_the_same_step(
    load_example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["engine_replies.py"])
    load_example("engine_replies").main()
    _, sglang, vllm = capsys.readouterr().out.replace("SGLang", "vLLM").split("vLLM: ")
    assert sglang == vllm
    assert "tokens 4..5 from weights 18" in sglang
