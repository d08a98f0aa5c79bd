from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from agents.dialects import dialect
from agents.world import MEND, TASK, FakeFactory, Say, Script, complete, reply_ids
from farflung.config import AgentConfig, EvalConfig, SandboxConfig
from farflung.core.errors import BadInput, InfraError
from farflung.core.sampling import Completion, GenerateRequest, SamplingParams
from farflung.evaluation.held_out import EvalResult, Shown, evaluate
from farflung.evaluation.pass_at_k import Estimate, Tally
from farflung.sandboxes import open_factory
from farflung.sandboxes.base import SandboxError

COMMAND = dialect("command")
TASKS = [replace(TASK, id=f"t{i}") for i in range(3)]
PROCESS = SandboxConfig(kind="process")


def run(sampler: Any, factory: Any = None, **changes: Any) -> Any:
    config = EvalConfig(**({"tasks": 2, "samples": 4, "concurrency": 3} | changes))
    return evaluate(
        TASKS, sampler=sampler, factory=factory or FakeFactory(), dialect=COMMAND, agent=AgentConfig(),
        sandbox=PROCESS, config=config, seed=5, version=7,
    )  # fmt: skip


async def test_it_counts_what_a_policy_solves() -> None:
    """The policy mends a task at its first two attempts, then talks, then gives up untouched."""
    attempts: Counter[str] = Counter()
    kinds = ([MEND, "submit"], [MEND, "submit"], [Say("I"), Say("give"), Say("up")], ["submit"])
    scripts: dict[str, Script] = {}

    class Policy:
        async def generate(self, request: GenerateRequest) -> Completion:
            assert request.params == SamplingParams(
                96, 1.0, 1.0, 0, COMMAND.stop_ids, request.params.seed
            )  # the whole vocabulary
            assert request.min_version == 7
            if request.session not in scripts:
                number = attempts.total()
                attempts[request.session] += 1
                scripts[request.session] = Script(COMMAND, kinds[number % 4])
            return await scripts[request.session].generate(request)

        async def forget(self, session: str) -> None:
            pass

    result = await run(Policy(), open_factory(PROCESS), concurrency=1)
    assert result.tallies == {"t0": Tally(4, 2), "t1": Tally(4, 2)}
    assert result.pass_at(1) == Estimate(0.5, 0.0, 2)
    assert result.pass_at(4) == Estimate(1.0, 0.0, 2)
    assert result.pass_at(8).mean is None
    assert result.ends == {"submitted": 6, "format_error": 2}
    assert (result.missing, result.reruns, result.version, result.turns) == (0, {}, 7, 2.0)
    assert [(s.end, s.reward) for s in result.shown] == [("submitted", 1.0), ("submitted", 0.0), ("format_error", 0.0)]
    assert result.shown[0].parts[1][0] == "policy"
    assert MEND in result.shown[0].parts[1][1]
    assert "+    return a + b" in result.shown[0].patch
    data = json.loads(json.dumps(result.to_dict()))
    assert EvalResult.from_dict(data) == result
    assert isinstance(result.shown[0], Shown)
    assert data["pass1"] == {"mean": 0.5, "se": 0.0, "tasks": 2}


async def test_spoilt_tries_run_again_with_the_same_numbers_and_never_score_zero() -> None:
    tries: Counter[int] = Counter()

    class Flaky(Script):
        async def generate(self, request: GenerateRequest) -> Completion:
            tries[request.params.seed] += 1
            if tries[request.params.seed] < 4:
                raise InfraError("down")
            return complete(reply_ids(COMMAND, "submit"), request)

    result = await run(Flaky(COMMAND, []))
    assert list(tries.values()) == [4] * 8
    assert (result.reruns, result.missing, result.ends) == ({"sampler": 24}, 0, {"submitted": 8})


async def test_what_stays_without_a_result_is_missing_and_in_no_mean() -> None:
    result = await run(Script(COMMAND, []), FakeFactory(failure=SandboxError("no namespaces")))
    assert (result.missing, result.reruns) == (8, {"sandbox": 32})
    assert result.pass_at(1) == Estimate(None, None, 0)
    assert EvalResult.from_dict(result.to_dict()) == result


async def test_it_keeps_to_its_concurrency_and_tells_how_far_it_is() -> None:
    active, most, seen = 0, 0, []

    class Slow(Script):
        async def generate(self, request: GenerateRequest) -> Completion:
            nonlocal active, most
            active += 1
            most = max(most, active)
            await asyncio.sleep(0.005)
            active -= 1
            return complete(reply_ids(COMMAND, "submit"), request)

    await evaluate(
        TASKS, sampler=Slow(COMMAND, []), factory=FakeFactory(), dialect=COMMAND, agent=AgentConfig(), sandbox=PROCESS,
        config=EvalConfig(tasks=3, samples=4, concurrency=5), progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert most == 5
    assert seen == [(i, 12) for i in range(1, 13)]


async def test_a_sampler_that_can_never_serve_stops_it() -> None:
    with pytest.raises(BadInput, match="no version 7"):
        await run(Script(COMMAND, [BadInput("no version 7")]))


async def test_the_same_numbers_are_used_for_every_policy() -> None:
    def seeds(script: Script) -> set[int]:
        return {request.params.seed for request in script.requests}

    first, second = Script(COMMAND, ["submit"]), Script(COMMAND, ["ls", "submit"])
    await run(first)
    await run(second)
    assert seeds(first) == seeds(second)
    assert len(seeds(first)) == 8
