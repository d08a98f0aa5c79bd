"""The recipe of an ablation: one typed tree. Every setting is stated once and holds for all arms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from farflung.config.tree import Name, Positive, Rate, Section
from farflung.core.sampling import KvFormat, WeightFormat


class AblationConfig(Section):
    name: Name = "ablation"
    """Name of the ablation; its folder is runs/NAME unless --dir says otherwise."""
    updates: Positive = 600
    """Optimiser steps of each run."""
    window: Positive = 50
    """Updates over which starts and ends are averaged and signs are smoothed."""


class TaskConfig(Section):
    kind: Literal["sort"] = "sort"
    """sort: write the prompt's symbols in order, then STOP; reward 1 for exactly that, else another attempt, and 0 at last."""
    symbols: Annotated[int, Field(ge=2, le=64)] = 10
    """Different symbols that a prompt is made of."""
    length: Positive = 6
    """Symbols of a prompt."""
    attempts: Positive = 3
    """Attempts at a prompt; a right one ends the trajectory."""


class ModelConfig(Section):
    width: Positive = 64
    """Width of the residual stream."""
    layers: Positive = 2
    """Decoder layers."""
    heads: Positive = 4
    """Attention heads."""
    mlp: Positive = 256
    """Width inside the MLP."""


class StartConfig(Section):
    updates: Positive = 600
    """Optimiser steps on solved examples that make the first policy."""
    batch: Positive = 128
    """Examples per step."""
    lr: Rate = 3e-3
    """AdamW learning rate of this first training; it falls to nothing as half a cosine."""
    slip: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.2
    """Share of the examples' symbols that are any symbol, so that the first policy is well trained and yet often wrong."""
    seed: int = 0
    """Fixes the first weights and the examples."""


class SamplingConfig(Section):
    temperature: Rate = 1.0
    """The same temperature is used by samplers and trainer."""
    top_p: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.97
    """Mass that the arms with top-p draw from; the trainer replays exactly that set."""


class TrainConfig(Section):
    groups: Positive = 32
    """Groups (prompts) per update."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Trajectories per prompt."""
    lag: Annotated[int, Field(ge=0)] = 4
    """Versions between sampling a batch and training on it."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """sgd is plain, without momentum."""
    lr: Rate = 2e-4
    """Learning rate, constant after warm-up."""
    warmup: Annotated[int, Field(ge=0)] = 10
    """Updates over which the learning rate rises to lr."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW betas."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """AdamW weight decay."""
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Gradient norm is clipped to this."""
    std: bool = False
    """Divide the group's centred rewards by their standard deviation."""
    band: tuple[float, float] = (0.5, 1.5)
    """Ratios p/q kept by the arms with masked importance sampling, ends included."""


class PoolConfig(Section):
    name: Name
    """The pool's name in every metric."""
    weights: WeightFormat = "bf16"
    """Weight format that it serves."""
    kv: KvFormat = "bf16"
    """Format of its key-value cache."""


class AblationRecipe(Section):
    ablation: AblationConfig = AblationConfig()
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    start: StartConfig = StartConfig()
    sampling: SamplingConfig = SamplingConfig()
    train: TrainConfig = TrainConfig()
    mixed: tuple[PoolConfig, ...] = (PoolConfig(name="bf16"),)
    homogeneous: tuple[PoolConfig, ...] = (PoolConfig(name="bf16"),)

    @model_validator(mode="after")
    def _consistent(self) -> AblationRecipe:
        for fleet in ("mixed", "homogeneous"):
            names = [pool.name for pool in getattr(self, fleet)]
            if not names or len(set(names)) != len(names):
                raise ValueError(f"{fleet} needs at least one entry and different names, not {names}")
            if self.train.groups * self.train.group_size % len(names):
                raise ValueError(
                    f"train.groups x train.group_size do not divide among the {len(names)} pools of {fleet}"
                )
        low, high = self.train.band
        if not 0 < low < high:
            raise ValueError(f"train.band is [{low}, {high}]; it needs 0 < low < high")
        if not all(0 <= beta < 1 for beta in self.train.betas):
            raise ValueError(f"train.betas are {list(self.train.betas)}; each needs to be at least 0 and below 1")
        if self.model.width % (2 * self.model.heads):
            raise ValueError(f"model.width is {self.model.width}; it needs to be a multiple of 2 x model.heads")
        return self
