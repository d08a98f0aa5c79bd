"""Sandboxes: bubblewrap by default, plain processes only where they are asked for by name."""

from __future__ import annotations

from farflung.config.tree import SandboxConfig
from farflung.sandboxes.base import CommandResult, Sandbox, SandboxDied, SandboxError, SandboxFactory
from farflung.sandboxes.bubblewrap import BubblewrapFactory
from farflung.sandboxes.process import ProcessFactory

__all__ = ["CommandResult", "Sandbox", "SandboxDied", "SandboxError", "SandboxFactory", "open_factory", "probe"]

FACTORIES: dict[str, type[BubblewrapFactory] | type[ProcessFactory]] = {
    "bubblewrap": BubblewrapFactory,
    "process": ProcessFactory,
}


def open_factory(config: SandboxConfig) -> SandboxFactory:
    """The factory that ``config.kind`` names, tried once at once. Raises SandboxError with the reason and the mend."""
    return FACTORIES[config.kind](config)


def probe(kind: str) -> str | None:
    """Why sandboxes of this kind cannot run here, or None when they can."""
    try:
        FACTORIES[kind](SandboxConfig())
    except SandboxError as error:
        return str(error)
    return None
