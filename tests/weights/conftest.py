"""One server of each cloud for all tests of a test process that want one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.weights.clouds import SERVERS
from tests.weights.servers import use


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with SERVERS["s3"]() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def gs_endpoint() -> Iterator[str]:
    with SERVERS["gs"]() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def az_endpoint() -> Iterator[str]:
    with SERVERS["az"]() as endpoint:
        yield endpoint


@pytest.fixture(params=SERVERS)
def scheme(request: pytest.FixtureRequest) -> str:
    """Of a cloud's URLs."""
    return str(request.param)


@pytest.fixture
def endpoint(request: pytest.FixtureRequest, scheme: str) -> str:
    """Where the cloud's server is."""
    return str(request.getfixturevalue(f"{scheme}_endpoint"))


@pytest.fixture
def cloud(scheme: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The scheme, with the environment that leads an object store to its server."""
    use(monkeypatch, scheme, endpoint)
    return scheme
