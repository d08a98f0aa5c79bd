"""The agent's loop: one task, one sandbox, one transcript; sample, run the command, show what it printed, until an end.

Where replies come from is the sampler's matter: a fleet of models, or a script that returns ids. Every way to end has its
own reason. What is the policy's doing gets a reward (0 unless a submitted diff passes the tests in a fresh sandbox); what
is the machinery's raises ``Dropped`` and never becomes a reward.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from farflung.agents.base import Sampler
from farflung.agents.calls import NoCall
from farflung.agents.dialect import Dialect
from farflung.agents.transcript import Transcript
from farflung.config import AgentConfig, SamplingConfig, SandboxConfig
from farflung.core.episode import DropCause, EndReason, Episode
from farflung.core.errors import Corrupt, InfraError
from farflung.core.sampling import Completion, GenerateRequest, SamplingParams
from farflung.core.task import Task
from farflung.sandboxes.base import CommandResult, Sandbox, SandboxDied, SandboxFactory
from farflung.tasks.grader import Grade, grade, make_patch

SUBMIT = "submit"
UNCHANGED = "the submitted tree is unchanged"


class Dropped(InfraError):
    """Machinery failed in an episode: it has no result, has to be counted under ``cause``, and may be tried again."""

    def __init__(self, cause: DropCause, error: Exception) -> None:
        self.cause = cause
        super().__init__(str(error) or type(error).__name__)


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """How training episodes are drawn; the harness fills in lengths, stop ids and seed."""
    return SamplingParams(1, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)


def begin(task: Task, dialect: Dialect) -> Transcript:
    """The transcript of an episode before its first reply."""
    return Transcript(dialect.opening(dialect.instructions(), task.statement))


def observe(result: CommandResult, agent: AgentConfig) -> str:
    """What the agent is shown of a command: both ends of a long output, and how it ended if not well."""
    text = result.output.rstrip("\n")
    if (left_out := len(text) - agent.observation_chars) > 0:
        tail = agent.observation_chars // 2
        head = agent.observation_chars - tail
        text = f"{text[:head]}\n[{left_out} characters left out]\n{text[len(text) - tail :]}"
    lines = [text] if text else []
    if result.killed == "time":
        lines.append(f"[killed after {result.seconds:.0f} s]")
    elif result.killed == "output":
        lines.append(f"[killed: it printed more than {agent.command_bytes} bytes]")
    elif result.exit_code:
        lines.append(f"[exit code {result.exit_code}]")
    return "\n".join(lines) or "[no output]"


async def run_episode(
    task: Task,
    *,
    sampler: Sampler,
    factory: SandboxFactory,
    dialect: Dialect,
    agent: AgentConfig,
    sandbox: SandboxConfig,
    params: SamplingParams,
    session: str,
    group: int = 0,
    index: int = 0,
    seed: int = 0,
    min_version: int = 0,
    attempt: int = 0,
) -> Episode:
    """Attempt ``task`` once. Of ``params``, temperature, top_p and top_k count; ``seed`` fixes the random numbers.

    ``session`` must be new: it names the conversation to the fleet. Raises Dropped when machinery failed and BadInput
    when the sampler says that it can never serve this (a wrong model or limit, not bad luck).
    """
    began = time.monotonic()
    params = replace(params, stop_ids=dialect.stop_ids, seed=seed)
    talk = _Conversation(begin(task, dialect), sampler, dialect, agent, params, session, min_version)
    with _infra(DropCause.SANDBOX):
        box = await factory.open(task.files)
    try:
        end, patch = await talk.run(task, box)
    finally:
        await box.close()
        with contextlib.suppress(InfraError):
            await sampler.forget(session)
    verdict = Grade(0.0, talk.detail, 0.0)
    if patch:
        with _infra(DropCause.GRADER):
            verdict = await grade(task, patch, factory, sandbox)
    with _infra(DropCause.CORRUPT):
        trajectory = talk.transcript.trajectory(params.temperature)
    return Episode(
        group=group,
        index=index,
        task=task.id,
        end=end,
        reward=verdict.reward,
        turns=talk.turns,
        trajectory=trajectory,
        patch=patch,
        detail=verdict.detail,
        seconds={
            "sampling": talk.sampling_seconds,
            "tools": talk.tool_seconds,
            "grading": verdict.seconds,
            "total": time.monotonic() - began,
        },
        format_errors=talk.format_errors,
        attempt=attempt,
    )


@dataclass(slots=True)
class _Conversation:
    """The turns of one episode and what they cost."""

    transcript: Transcript
    sampler: Sampler
    dialect: Dialect
    agent: AgentConfig
    params: SamplingParams
    session: str
    min_version: int
    turns: int = 0
    format_errors: int = 0
    detail: str = ""
    sampling_seconds: float = 0.0
    tool_seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    async def run(self, task: Task, box: Sandbox) -> tuple[EndReason, str]:
        """Talk until an end; the reason, and the submitted diff if there is one."""
        agent = self.agent
        self.started = time.monotonic()
        wrong_in_a_row: list[str] = []
        kills: Counter[str] = Counter()
        while (room := agent.max_tokens - len(self.transcript)) > 0:
            reply = await self._sample(min(room, agent.max_turn_tokens))
            step = self.dialect.parse(reply.ids)
            if isinstance(step, NoCall):
                if step.reason == "cut" and len(reply.ids) == room:
                    break
                self.format_errors += 1
                wrong_in_a_row.append(step.reason)
                if len(wrong_in_a_row) == agent.format_errors:
                    self.detail = f"replies without a call: {', '.join(wrong_in_a_row)}"
                    return EndReason.FORMAT_ERROR, ""
                suffix = self.dialect.correction(step.reason, reply.ids)
            else:
                wrong_in_a_row.clear()
                if step.command.strip() == SUBMIT:
                    return await self._submit(task, box)
                if self.turns == agent.max_turns:
                    return EndReason.TURN_LIMIT, ""
                seconds = min(agent.command_seconds, agent.episode_seconds - self._clock())
                if seconds <= 0:
                    return EndReason.EPISODE_TIME, ""
                try:
                    result = await self._execute(box, step.command, seconds)
                except SandboxDied as error:
                    self.detail = str(error)
                    return EndReason.SANDBOX_LIMIT, ""
                if self._clock() >= agent.episode_seconds:
                    return EndReason.EPISODE_TIME, ""
                if result.killed is not None:
                    kills[result.killed] += 1
                    if kills[result.killed] == agent.command_kills:
                        return EndReason(f"command_{result.killed}"), ""
                suffix = self.dialect.observation(observe(result, agent), reply.ids)
            if self.turns == agent.max_turns:
                return EndReason.TURN_LIMIT, ""
            if len(suffix) >= agent.max_tokens - len(self.transcript):
                break  # no room for another reply; what follows the last sampled token teaches nothing
            self.transcript.told(suffix)
        return EndReason.TOKEN_LIMIT, ""

    def _clock(self) -> float:
        """Seconds of the episode so far, the wait for samplers not counted."""
        return time.monotonic() - self.started - self.sampling_seconds

    async def _sample(self, most: int) -> Completion:
        began = time.monotonic()
        request = GenerateRequest(
            self.session, self.transcript.ids, replace(self.params, max_tokens=most), self.min_version
        )
        with _infra(DropCause.SAMPLER):
            reply = await self.sampler.generate(request)
        self.sampling_seconds += time.monotonic() - began
        self.turns += 1
        self.transcript.sampled(reply)
        return reply

    async def _execute(self, box: Sandbox, command: str, seconds: float) -> CommandResult:
        began = time.monotonic()
        try:
            with _infra(DropCause.SANDBOX):
                return await box.exec(command, seconds=seconds, max_bytes=self.agent.command_bytes)
        finally:
            self.tool_seconds += time.monotonic() - began

    async def _submit(self, task: Task, box: Sandbox) -> tuple[EndReason, str]:
        try:
            with _infra(DropCause.SANDBOX):
                tree = await box.read_tree()
        except SandboxDied as error:
            self.detail = str(error)
            return EndReason.SANDBOX_LIMIT, ""
        patch = make_patch(task, tree)
        self.detail = "" if patch else UNCHANGED
        return EndReason.SUBMITTED, patch


@contextlib.contextmanager
def _infra(cause: DropCause) -> Iterator[None]:
    """Give failed machinery its cause; a reply that cannot be what it claims counts as corrupt."""
    try:
        yield
    except Corrupt as error:
        raise Dropped(DropCause.CORRUPT, error) from error
    except InfraError as error:
        raise Dropped(cause, error) from error
