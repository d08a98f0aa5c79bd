from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agents.dialects import TEMPLATES, dialect
from agents.world import MEND, SOURCE, TASK, FakeFactory, Reply, Say, Script
from farflung.agents import harness
from farflung.agents.harness import Dropped, observe, run_episode, sampling_params
from farflung.config import AgentConfig, SamplingConfig, SandboxConfig
from farflung.core.episode import DropCause, EndReason, Episode
from farflung.core.errors import BadInput, Corrupt, InfraError
from farflung.core.sampling import SamplingParams, Source
from farflung.engines.base import TooLong
from farflung.sandboxes import open_factory
from farflung.sandboxes.base import CommandResult, SandboxDied, SandboxError

COMMAND = dialect("command")
PARAMS = sampling_params(SamplingConfig())
AGENT = AgentConfig(max_turns=6, max_tokens=2000, max_turn_tokens=80)


async def attempt(
    replies: list[Reply], factory: Any = None, *, agent: AgentConfig = AGENT, script: Script | None = None, **more: Any
) -> Episode:
    script = script or Script(more.get("dialect", COMMAND), replies)
    given = {"dialect": COMMAND, "sandbox": SandboxConfig(retries=2), "params": PARAMS, "session": "s1"} | more
    return await run_episode(TASK, sampler=script, factory=factory or FakeFactory(), agent=agent, **given)


# Whole episodes in a real sandbox


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_repair_is_rewarded_in_every_dialect(name: str) -> None:
    d = dialect(name)
    script = Script(d, ["cat -n calc/core.py", MEND, "submit"])
    sandbox = SandboxConfig(kind="process")
    episode = await attempt([], open_factory(sandbox), agent=AgentConfig(max_tokens=4000, max_turn_tokens=300), script=script, dialect=d, sandbox=sandbox)  # fmt: skip
    assert (episode.end, episode.reward, episode.turns, episode.format_errors) == (EndReason.SUBMITTED, 1.0, 3, 0)
    assert "-    return a - b\n+    return a + b\n" in episode.patch
    text = d.decode(episode.trajectory.ids)
    assert "     2\t    return a - b" in text
    assert "[no output]" in text
    assert set(episode.seconds) == {"sampling", "tools", "grading", "total"}
    assert Episode.decode(episode.encode()).trajectory.ids.tolist() == episode.trajectory.ids.tolist()
    assert script.forgotten == ["s1"]


async def test_a_wrong_repair_and_an_untouched_tree_get_nothing() -> None:
    sandbox = SandboxConfig(kind="process")
    wrong = await attempt(["sed -i 's/a - b/a * b/' calc/core.py", "submit"], open_factory(sandbox), sandbox=sandbox)
    assert (wrong.end, wrong.reward) == (EndReason.SUBMITTED, 0.0)
    assert wrong.patch
    untouched = await attempt(["submit"])
    assert (untouched.end, untouched.reward, untouched.patch) == (EndReason.SUBMITTED, 0.0, "")
    assert untouched.detail == harness.UNCHANGED


# The transcript


async def test_every_request_is_the_transcript_so_far_and_sampled_ids_are_kept() -> None:
    script = Script(COMMAND, ["ls", Say("Hm."), "pwd", "submit"])
    episode = await attempt([], FakeFactory({"ls": "calc\n", "pwd": "/w"}), script=script, seed=7, min_version=3, group=2, index=5, attempt=1)  # fmt: skip
    ids, action = episode.trajectory.ids, episode.trajectory.action
    sampled = [COMMAND.reply("ls"), script_ids("Hm."), COMMAND.reply("pwd"), COMMAND.reply("submit")]
    assert ids[action].tolist() == np.concatenate(sampled).tolist()
    for request, reply in zip(script.requests, sampled, strict=True):
        n = len(request.ids)
        assert ids[:n].tolist() == request.ids.tolist()
        assert not action[n - 1]
        assert ids[n : n + len(reply)].tolist() == reply.tolist()
        assert action[n : n + len(reply)].all()
        assert (request.session, request.min_version) == ("s1", 3)
        assert request.params == SamplingParams(80, 1.0, 0.97, 64, COMMAND.stop_ids, 7)
    assert action[-1]
    assert (episode.group, episode.index, episode.attempt, episode.task) == (2, 5, 1, TASK.id)
    assert "<|tool|>calc<|assistant|>" in COMMAND.decode(ids)


def script_ids(text: str) -> np.ndarray:
    from agents.world import reply_ids

    return reply_ids(COMMAND, Say(text))


async def test_every_token_knows_where_it_came_from() -> None:
    other = Source("pool2", "r9", "nvfp4", "fp8")
    script = Script(
        COMMAND,
        ["ls", "pwd", "submit"],
        version_of_turn=lambda turn: 10 + turn,
        source_of_turn=lambda turn: other if turn == 1 else SOURCE,
    )
    t = (await attempt([], script=script)).trajectory
    lengths = [len(COMMAND.reply(c)) for c in ("ls", "pwd", "submit")]
    assert t.sources == (SOURCE, other)
    assert t.source.tolist() == np.repeat([0, 1, 0], lengths).tolist()
    assert t.versions.tolist() == np.repeat([10, 11, 12], lengths).tolist()
    assert t.supports is not None
    assert len(t.supports) == sum(lengths)
    t.check()


async def test_the_whole_vocabulary_has_no_supports() -> None:
    t = (await attempt(["submit"], params=SamplingParams(1, temperature=0.5))).trajectory
    assert t.supports is None
    assert t.temperature == 0.5


# Ends


async def test_three_replies_in_a_row_without_a_call_end_it() -> None:
    episode = await attempt([Say("a"), Say("b"), Say(""), "submit"])
    assert (episode.end, episode.turns, episode.format_errors, episode.reward) == (EndReason.FORMAT_ERROR, 3, 3, 0.0)
    assert episode.detail == "replies without a call: text, text, empty"
    assert episode.trajectory.ids[-1] == COMMAND.stop_ids[0]


async def test_a_call_sets_the_count_back() -> None:
    episode = await attempt([Say("a"), Say("b"), "ls", Say("c"), Say("d"), "submit"])
    assert (episode.end, episode.format_errors, episode.turns) == (EndReason.SUBMITTED, 4, 6)
    assert "The reply had no call." in COMMAND.decode(episode.trajectory.ids)


async def test_turns_run_out_and_the_last_command_is_not_run() -> None:
    factory = FakeFactory()
    episode = await attempt(["ls"] * 9, factory)
    assert (episode.end, episode.turns) == (EndReason.TURN_LIMIT, 6)
    assert len(factory.boxes[0].asked) == 5
    talk = await attempt([Say("a"), Say("b"), "ls", Say("a"), Say("b"), Say("c"), "ls"])
    assert (talk.end, talk.turns) == (EndReason.FORMAT_ERROR, 6)
    short = await attempt([Say("a"), Say("b")], agent=AGENT.model_copy(update={"max_turns": 2}))
    assert (short.end, short.turns) == (EndReason.TURN_LIMIT, 2)


async def test_a_reply_cut_at_its_own_limit_is_a_format_error_unless_its_call_is_whole() -> None:
    whole = COMMAND.reply("ls")
    agent = AGENT.model_copy(update={"max_turn_tokens": len(whole) - 1})
    script = Script(COMMAND, [Say("x" * 40, ends=False), "ls", "pwd -P -P -P", "ls", Say("y"), Say("z"), Say("")])
    agent = agent.model_copy(update={"max_turns": 9})
    factory = FakeFactory({"ls": "calc"})
    episode = await attempt([], factory, agent=agent, script=script)
    assert [command for command, _, _ in factory.boxes[0].asked] == ["ls", "ls"]
    assert (episode.end, episode.format_errors) == (EndReason.FORMAT_ERROR, 5)
    text = COMMAND.decode(episode.trajectory.ids)
    assert "<tool_call>ls</tool_call><|end|><|tool|>calc" in text  # the end token was told, not sampled
    ids, action = episode.trajectory.ids, episode.trajectory.action
    assert not action[np.flatnonzero(ids == COMMAND.stop_ids[0])[:2]].any()


async def test_tokens_run_out() -> None:
    opening = len(harness.begin(TASK, COMMAND))
    reply = len(COMMAND.reply("ls"))
    limits = {
        "the opening leaves no room": (opening, 0),
        "a reply is cut at the limit": (opening + reply - 3, 1),
        "no room for the output": (opening + reply + 5, 1),
    }
    for why, (limit, turns) in limits.items():
        agent = AgentConfig(max_tokens=limit, max_turn_tokens=80)
        episode = await attempt(["ls", "submit"], FakeFactory({"ls": "core.py " * 9}), agent=agent)
        assert (episode.end, episode.turns) == (EndReason.TOKEN_LIMIT, turns), why
        assert len(episode.trajectory.ids) <= limit
        episode.trajectory.check()


@pytest.mark.parametrize(("killed", "end"), [("time", EndReason.COMMAND_TIME), ("output", EndReason.COMMAND_OUTPUT)])
async def test_the_second_killed_command_ends_it(killed: Any, end: EndReason) -> None:
    factory = FakeFactory({"spin": CommandResult(-9, "so far", 5.0, killed)})
    episode = await attempt(["spin", "ls", "spin", "submit"], factory)
    assert (episode.end, episode.turns, episode.reward) == (end, 3, 0.0)
    seen = COMMAND.decode(episode.trajectory.ids)
    assert ("[killed after 5 s]" if killed == "time" else "[killed: it printed more than 1048576 bytes]") in seen


async def test_kills_of_different_kinds_are_counted_apart() -> None:
    factory = FakeFactory({"spin": CommandResult(-9, "", 5.0, "time"), "print": CommandResult(-9, "", 5.0, "output")})
    assert (await attempt(["spin", "print", "submit"], factory)).end is EndReason.SUBMITTED


async def test_time_runs_out_but_waiting_for_a_sampler_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(harness.time, "monotonic", lambda: now[0])
    factory = FakeFactory()
    script = Script(COMMAND, ["ls", "ls", "ls", "submit"])
    generate, ask = script.generate, {"seconds": 3.0}

    class Slow(Script):
        async def generate(self, request: Any) -> Any:
            now[0] += 1000.0
            return await generate(request)

    async def slow_exec(self: Any, command: str, *, seconds: float, max_bytes: int) -> CommandResult:
        self.asked.append((command, seconds, max_bytes))
        now[0] += min(ask["seconds"], seconds)
        return CommandResult(0, "", min(ask["seconds"], seconds))

    monkeypatch.setattr("agents.world.FakeBox.exec", slow_exec)
    agent = AGENT.model_copy(update={"episode_seconds": 10.0, "command_seconds": 4.0})
    slow = Slow(COMMAND, [])
    episode = await attempt([], factory, agent=agent, script=slow)
    assert episode.end is EndReason.SUBMITTED
    assert episode.seconds["sampling"] == 4000.0
    assert episode.seconds["tools"] == 9.0
    assert episode.seconds["total"] == 4009.0

    ask["seconds"] = 4.0
    script._at.clear()
    factory = FakeFactory()
    episode = await attempt([], factory, agent=agent, script=slow)
    assert (episode.end, episode.turns) == (EndReason.EPISODE_TIME, 3)
    assert [seconds for _, seconds, _ in factory.boxes[0].asked] == [4.0, 4.0, 2.0]


async def test_a_sandbox_that_the_policy_broke_is_its_result() -> None:
    factory = FakeFactory({"bomb": SandboxDied("out of memory")})
    episode = await attempt(["bomb"], factory)
    assert (episode.end, episode.reward, episode.detail) == (EndReason.SANDBOX_LIMIT, 0.0, "out of memory")
    assert factory.boxes[0].closed == 1
    died = FakeFactory({"read_tree": SandboxDied("gone")})
    assert (await attempt(["submit"], died)).end is EndReason.SANDBOX_LIMIT


# Failed machinery


@pytest.mark.parametrize(
    ("replies", "factory", "cause"),
    [
        (["ls"], FakeFactory(failure=SandboxError("no namespaces")), DropCause.SANDBOX),
        (["ls"], FakeFactory({"ls": SandboxError("pipe broke")}), DropCause.SANDBOX),
        (["submit"], FakeFactory({"read_tree": SandboxError("pipe broke")}), DropCause.SANDBOX),
        (["ls", InfraError("no sampler")], FakeFactory(), DropCause.SAMPLER),
        ([Corrupt("bad reply")], FakeFactory(), DropCause.CORRUPT),
    ],
)
async def test_failed_machinery_is_never_a_reward(replies: list[Reply], factory: FakeFactory, cause: DropCause) -> None:
    with pytest.raises(Dropped) as error:
        await attempt(replies, factory)
    assert error.value.cause is cause
    assert all(box.closed == 1 for box in factory.boxes)


async def test_what_a_sampler_can_never_do_is_said_as_it_is() -> None:
    with pytest.raises(BadInput, match="context"):
        await attempt([TooLong("the context holds 128 tokens")])


async def test_samplers_that_disagree_about_supports_are_noticed() -> None:
    class Forgetful(Script):
        async def generate(self, request: Any) -> Any:
            reply = await Script.generate(self, request)
            from dataclasses import replace

            return replace(reply, supports=None) if len(self.requests) == 2 else reply

    with pytest.raises(Dropped) as error:
        await attempt([], script=Forgetful(COMMAND, ["ls", "submit"]))
    assert error.value.cause is DropCause.CORRUPT


async def test_only_a_changed_tree_is_graded_and_a_failed_grader_gives_no_reward() -> None:
    class Editor(Script):
        async def generate(self, request: Any) -> Any:
            factory.boxes[0].files["calc/core.py"] = TASK.fix["calc/core.py"]
            factory.failure = SandboxError("no room for tests")
            return await Script.generate(self, request)

    factory = FakeFactory()
    with pytest.raises(Dropped, match="no room for tests") as error:
        await attempt([], factory, script=Editor(COMMAND, ["submit"]))
    assert error.value.cause is DropCause.GRADER
    assert len(factory.boxes) == 1


# What the agent sees


@pytest.mark.parametrize(
    ("result", "seen"),
    [
        (CommandResult(0, "a\nb\n", 0.1), "a\nb"),
        (CommandResult(0, "", 0.1), "[no output]"),
        (CommandResult(3, "oops\n", 0.1), "oops\n[exit code 3]"),
        (CommandResult(1, "", 0.1), "[exit code 1]"),
        (CommandResult(0, "0123456789", 0.1), "0123456789"),
        (CommandResult(0, "0123456789AB", 0.1), "01234\n[2 characters left out]\n789AB"),
        (CommandResult(-9, "x", 2.0, "time"), "x\n[killed after 2 s]"),
    ],
)
def test_an_observation_shows_both_ends_and_how_it_ended(result: CommandResult, seen: str) -> None:
    assert observe(result, AgentConfig(observation_chars=10)) == seen


def test_an_odd_limit_is_kept_to() -> None:
    assert (
        observe(CommandResult(0, "abcdef", 0.1), AgentConfig(observation_chars=3)) == "ab\n[3 characters left out]\nf"
    )
    assert observe(CommandResult(0, "abcdef", 0.1), AgentConfig(observation_chars=1)) == "a\n[5 characters left out]\n"
