"""Options of a sampler's process, and the paced engine that replays a folder of episodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from farflung.core.episode import EndReason, Episode, Trajectory
from farflung.core.errors import BadInput
from farflung.core.sampling import GenerateRequest, SamplingParams, Source
from farflung.fleet.serve import ServeOptions, make_engine, parse

SOURCE = Source("p", "p-0", "bf16", "bf16")


def test_the_command_line_is_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARFLUNG_TOKEN", "word")
    options, token = parse(["--model", "m"])
    assert (options, token) == (ServeOptions(model="m"), "word")
    options, _ = parse(
        ["--model", "m", "--pool", "p", "--replica", "p-1", "--weights", "nvfp4", "--kv", "fp8", "--capacity", "8", "--store",
         "s", "--run-id", "r", "--image", "i", "--small", "--join", "http://x", "--engine", "paced", "--tokens-per-second", "50", "--threads", "2"]
    )  # fmt: skip
    assert options == ServeOptions(
        "m",
        "p",
        "p-1",
        "nvfp4",
        "fp8",
        "paced",
        8,
        "s",
        "r",
        Path("i"),
        True,
        "http://x",
        tokens_per_second=50.0,
        threads=2,
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [({"store": "s"}, "run id"), ({"run_id": "r"}, "run id"), ({"capacity": 0}, "capacity"), ({"threads": 0}, "threads"),
     ({"replay": Path("/nowhere"), "engine": "paced"}, "no such folder"), ({"replay": Path("/")}, "--engine paced"),
     ({"router": "http://x", "host": "0.0.0.0"}, "cannot reach")],
)  # fmt: skip
def test_options_that_cannot_go_together(change: dict[str, object], why: str) -> None:
    ServeOptions(model="m").check()
    with pytest.raises(BadInput, match=why):
        replace(ServeOptions(model="m"), **change).check()  # type: ignore[arg-type]


async def test_a_folder_of_episodes_is_said_again(tmp_path: Path) -> None:
    ids = np.array([1, 2, 7, 3], np.int32)
    action = np.array([False, False, True, True])
    trajectory = Trajectory(
        ids, action, np.full(2, -0.5, np.float32), np.zeros(2, np.int32), np.zeros(2, np.int16), (SOURCE,), None
    )
    episode = Episode(0, 0, "task", EndReason.SUBMITTED, 1.0, 1, trajectory)
    (tmp_path / "0-0.frame").write_bytes(episode.encode())
    engine = make_engine(ServeOptions(model="", engine="paced", replay=tmp_path, tokens_per_second=1e6), SOURCE)
    completion = await engine.generate(GenerateRequest("s", ids[:2], SamplingParams(max_tokens=9, stop_ids=(3,))))
    assert completion.ids.tolist() == [7, 3]
    assert completion.finish == "stop"
    (tmp_path / "broken").write_bytes(b"not a frame")
    with pytest.raises(BadInput, match="not a frame"):
        make_engine(ServeOptions(model="", engine="paced", replay=tmp_path), SOURCE)
