"""One S3 server for all tests of a test process that want one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.weights.servers import s3_server, use_s3


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The endpoint, with the environment that leads an object store to it."""
    use_s3(monkeypatch, s3_endpoint)
    return s3_endpoint
