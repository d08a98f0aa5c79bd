"""One typed tree for everything that can be set: TOML recipes, dotted overrides, errors that name the key."""

from farflung.config.load import dump_recipe, load_recipe, override_recipe, recipe_of
from farflung.config.tree import (
    AgentConfig,
    EvalConfig,
    ModelConfig,
    PoolConfig,
    Recipe,
    RouterConfig,
    RunConfig,
    SamplingConfig,
    SandboxConfig,
    TasksConfig,
    TrainConfig,
)

__all__ = [
    "AgentConfig",
    "EvalConfig",
    "ModelConfig",
    "PoolConfig",
    "Recipe",
    "RouterConfig",
    "RunConfig",
    "SamplingConfig",
    "SandboxConfig",
    "TasksConfig",
    "TrainConfig",
    "dump_recipe",
    "load_recipe",
    "override_recipe",
    "recipe_of",
]
