"""Factories are opened once for all tests; each test opens its own sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import pytest

from farflung.config import SandboxConfig
from farflung.sandboxes import Sandbox, SandboxFactory, open_factory, probe

CONFIG = {"memory_mb": 128, "processes": 32, "disk_mb": 16}
FILES = {"a.py": "print('hello')\n", "pkg/__init__.py": "", "pkg/b.txt": "naïve\n"}


@pytest.fixture(scope="session")
def bubblewrap() -> SandboxFactory:
    if (problem := probe("bubblewrap")) is not None:
        pytest.skip(problem)
    return open_factory(SandboxConfig(kind="bubblewrap", **CONFIG))


@pytest.fixture(scope="session")
def process() -> SandboxFactory:
    return open_factory(SandboxConfig(kind="process", **CONFIG))


@pytest.fixture(params=["bubblewrap", "process"])
def factory(request: pytest.FixtureRequest) -> SandboxFactory:
    return request.getfixturevalue(request.param)


@pytest.fixture
async def box(factory: SandboxFactory) -> AsyncIterator[Sandbox]:
    """A sandbox of either kind."""
    sandbox = await factory.open(FILES)
    yield sandbox
    await sandbox.close()


@pytest.fixture
async def jail(bubblewrap: SandboxFactory) -> AsyncIterator[Sandbox]:
    """A bubblewrap sandbox."""
    sandbox = await bubblewrap.open(FILES)
    yield sandbox
    await sandbox.close()


@pytest.fixture(scope="session")
def files() -> Mapping[str, str]:
    return FILES
