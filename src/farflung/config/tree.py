"""The recipe: a typed tree. Each field's description is its documentation (``farflung init`` prints it as comments)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from farflung.core.sampling import KvFormat, WeightFormat

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Rate
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]  # a file's name, an argument, a header's value


class Section(BaseModel):
    """Strict: an unknown key is an error, a value is never silently converted to another kind."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class RunConfig(Section):
    name: Name = "run"
    """Name of the run; its folder is runs/NAME unless --dir says otherwise."""
    seed: int = 0
    """Fixes the order of tasks, every episode's random numbers and the trainer's."""
    updates: Positive = 20
    """Optimiser steps to make."""
    minutes: Seconds | None = None
    """Stop cleanly after the update during which this much wall time has passed since the start (or since the run was gone on
    with), even if updates are left."""
    sync: bool = False
    """Sample, then train, in turns (for comparison). Otherwise both go on at the same time."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Drop groups whose oldest token is more than this many versions old when the trainer takes them. None: unbounded."""
    buffer_batches: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    """Sampling pauses while this many batches of finished or unfinished groups wait."""


class ModelConfig(Section):
    path: str = "builtin:repair-1m"
    """A folder or Hub id of a Hugging Face causal LM with tokenizer and chat template; builtin:NAME is a packaged one."""
    tool_format: Literal["auto", "command", "hermes", "xml", "fenced"] = "auto"
    """How the model writes a bash call; auto reads it off the chat template."""


class TasksConfig(Section):
    train: str = "builtin:repair/train"
    """A task file (JSON lines) to learn from, named as seen from where the command runs; builtin:NAME is a packaged one."""
    heldout: str = "builtin:repair/heldout"
    """A task file for evaluation; no task may stand in both."""
    limit: Positive | None = None
    """Use only the first this many training tasks."""


class AgentConfig(Section):
    max_turns: Positive = 8
    """Replies per episode; one more ends it as turn_limit."""
    max_tokens: Positive = 1024
    """Tokens of the whole transcript; reaching it ends the episode as token_limit."""
    max_turn_tokens: Positive = 96
    """Tokens of one reply; a reply cut there counts as a format error unless its call is complete."""
    format_errors: Positive = 3
    """Replies in a row without a tool call that end the episode as format_error."""
    command_seconds: Seconds = 5.0
    """A command is killed, with all that it started, after this long."""
    command_bytes: Positive = 1 << 20
    """A command is killed when it has printed this much."""
    command_kills: Positive = 2
    """Commands killed for time (or output) that end the episode as command_time (or command_output)."""
    observation_chars: Positive = 600
    """What the agent sees of an output: its first and last halves, with a note of what was left out."""
    episode_seconds: Seconds = 120.0
    """Wall time of an episode, not counting the wait for a sampler; reaching it ends it as episode_time."""


class SandboxConfig(Section):
    kind: Literal["bubblewrap", "process"] = "bubblewrap"
    """bubblewrap isolates; process does not and is for machines where nothing else runs and the model is trusted."""
    memory_mb: Positive = 256
    """Memory of all processes of a sandbox."""
    processes: Positive = 64
    """Processes and threads of a sandbox."""
    disk_mb: Positive = 32
    """Size of the file system of its working tree, and of its /tmp."""
    start_seconds: Seconds = 20.0
    """A sandbox that is not ready by then has failed."""
    test_seconds: Seconds = 20.0
    """Time for a task's tests when they grade a patch."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Fresh tries of a failed sandbox or grader before the episode is dropped."""


class SamplingConfig(Section):
    temperature: Rate = 1.0
    """The same temperature is used by samplers and trainer."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.97
    """Mass of the most likely candidates that a token is drawn from; the trainer replays exactly that set."""
    top_k: Positive = 64
    """Bound on the candidates of a token."""


class PoolConfig(Section):
    name: Name
    """The pool's name in every metric."""
    weights: WeightFormat = "bf16"
    """Weight format that its samplers serve."""
    kv: KvFormat = "bf16"
    """Format of its key-value cache."""
    replicas: Positive = 1
    """Samplers that are started on this machine; 0 or more others may join by URL."""
    capacity: Positive = 16
    """Sessions that one replica serves at a time; pools get sessions in proportion to replicas x capacity."""
    engine: Literal["embedded", "paced"] = "embedded"
    """embedded computes here; paced answers at tokens_per_second as a remote accelerator would (for overlap measurements)."""
    tokens_per_second: Rate = 1000.0
    """Rate of the paced engine, per session."""
    replay: str | None = None
    """Folder of recorded episodes that the paced engine says again; without it, it says anything."""


class WeightsConfig(Section):
    store: str | None = None
    """Where versions are published: a folder, s3://bucket/prefix, gs://..., az://... None: the run's own folder. Samplers on
    other machines must reach it."""
    formats: tuple[WeightFormat, ...] = ()
    """Formats to publish beyond bf16 and those of the pools, for samplers that join from elsewhere."""
    exclude: tuple[str, ...] = ()
    """Patterns of matrices, by Hugging Face name, that stay BF16 in every format, e.g. ["model.layers.0.*"]. Embeddings, LM
    head and norms always do."""
    anchor_every: Positive = 50
    """A whole copy is stored every this many versions, for samplers that join."""
    levels: Annotated[int, Field(ge=0, le=20)] = 7
    """Deltas are folded into jumps of up to 2^levels versions, for samplers that are behind; 0 folds none."""
    small: bool = False
    """Store BF16 deltas a second time, in about a quarter fewer bytes that take longer to apply, for samplers behind slow
    links (farflung serve --small)."""
    keep: Positive | None = None
    """Remove versions that are older than this many and than ten minutes, unless a sampler still holds them. None: keep all."""


class RouterConfig(Section):
    turn_seconds: Seconds = 60.0
    """A replica that has not answered a turn by then is passed over and the turn goes to another."""
    retry_seconds: Seconds = 120.0
    """A turn that no replica could serve for this long fails (an infrastructure failure)."""
    heartbeat_seconds: Seconds = 1.0
    """How often replicas report; three missed reports drop a replica from rotation."""


class TrainConfig(Section):
    groups: Positive = 8
    """Groups (prompts) per update."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Trajectories per prompt."""
    lr: Rate = 3e-4
    """AdamW learning rate, constant after warm-up."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises to lr."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW betas."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """AdamW weight decay."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Gradient norm is clipped to this."""
    std: bool = False
    """Divide the group's centred rewards by their standard deviation."""
    baseline: Literal["group", "others"] = "group"
    """What is subtracted from a reward: the mean of its whole group, or of the other members (leave-one-out)."""
    aggregation: Literal["token", "sequence", "fixed"] = "token"
    """The loss is a mean over tokens, over trajectories of the mean over their tokens, or over trajectories of the sum over
    fixed_length (Dr. GRPO). What is masked or has no advantage counts in each."""
    fixed_length: Positive = 1024
    """Tokens per trajectory that aggregation fixed divides by."""
    weight: Literal["none", "is", "tis", "mis", "icepop", "mask", "cispo", "ppo", "dppo"] = "mis"
    """Importance weight f(p/q). none: 1; is: p/q; tis: p/q, at most cap; mis and icepop: p/q inside the band, 0 outside;
    mask: 1 inside the band, 0 outside; cispo: p/q clipped to clip_range; ppo: p/q, 0 where PPO clips; dppo: p/q, 0 where p
    has moved from q by more than delta in the advantage's direction."""
    band: tuple[float, float] = (0.5, 5.0)
    """Ratios kept by mis, icepop and mask, ends included."""
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Greatest weight that tis gives."""
    clip_range: tuple[float, float] = (0.8, 1.28)
    """Ratios between which ppo and cispo do not clip."""
    delta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.2
    """Difference of probabilities that dppo allows."""
    centering: bool = True
    """Subtract the expected weighted score under the sampler at every position (score centering)."""
    gspo: tuple[float, float] | None = None
    """Weight of a trajectory, for all its tokens: its mean ratio exp(mean log p/q), 0 where clipped below 1 - the first or above
    1 + the second, e.g. [3e-4, 4e-4]. It takes the place of the token weights: needs weight none."""
    geometric_mask: tuple[float, float] | None = None
    """Trajectories whose mean ratio exp(mean log p/q) is outside teach nothing, e.g. [0.99, 1.01]."""
    opsm: Annotated[float, Field(gt=0)] | None = None
    """Trajectories with negative advantage and a mean log q/p above this teach nothing (off-policy sequence masking)."""
    staleness_mask: Annotated[int, Field(ge=0)] | None = None
    """Trajectories with a token more than this many versions old teach nothing; run.max_staleness drops whole groups before."""
    pack_tokens: Positive = 4096
    """Tokens of one packed forward pass (a longer sequence gets a pass of its own)."""
    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; masters and optimiser state are always float32. auto: bfloat16 on a GPU, float32 on a CPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, for long sequences."""


class EvalConfig(Section):
    tasks: Positive = 64
    """Held-out tasks, the first this many of the file."""
    samples: Positive = 4
    """Attempts per task, from the whole vocabulary at temperature 1, weights and cache in BF16."""
    concurrency: Positive = 32
    """Episodes at a time."""


class Recipe(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    agent: AgentConfig = AgentConfig()
    sandbox: SandboxConfig = SandboxConfig()
    sampling: SamplingConfig = SamplingConfig()
    weights: WeightsConfig = WeightsConfig()
    pools: tuple[PoolConfig, ...] = (PoolConfig(name="bf16"),)
    router: RouterConfig = RouterConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        names = [pool.name for pool in self.pools]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"pools need at least one entry and different names, not {names}")
        _check_ranges(self.train)
        if not all(0 <= beta < 1 for beta in self.train.betas):
            raise ValueError(f"train.betas are {list(self.train.betas)}; each needs to be at least 0 and below 1")
        if self.agent.max_turn_tokens > self.agent.max_tokens:
            raise ValueError("agent.max_turn_tokens is above agent.max_tokens")
        return self


def _check_ranges(train: TrainConfig) -> None:
    """Raises ValueError for pairs of numbers that are no range, and for two corrections where one would do."""
    low, high = train.band
    if not 0 < low < high:
        raise ValueError(f"train.band is [{low}, {high}]; it needs 0 < low < high")
    for name, pair in (("clip_range", train.clip_range), ("geometric_mask", train.geometric_mask)):
        if pair is not None and not 0 <= pair[0] < pair[1]:
            raise ValueError(f"train.{name} is {list(pair)}; it needs 0 <= low < high")
    if train.gspo is not None:
        if not (0 <= train.gspo[0] <= 1 and train.gspo[1] >= 0):
            raise ValueError(
                f"train.gspo is {list(train.gspo)}; it needs the first in [0, 1] and the second at least 0"
            )
        if train.weight != "none":
            raise ValueError(f'train.gspo weighs whole trajectories; train.weight must be "none", not "{train.weight}"')
