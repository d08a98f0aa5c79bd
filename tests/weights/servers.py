"""Servers that tests talk to over HTTP: an S3 in a process of its own, and any aiohttp application in a thread."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
from aiohttp import ClientSession, web

BUCKET = "weights"
SECONDS = 60.0
T = TypeVar("T")

# The lock: this server looks at If-Match and If-None-Match and then writes, in two steps, where S3 does both in one.
S3 = """
import threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
from farflung.core.process import die_with_parent
die_with_parent()
app, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()
def one_at_a_time(environ, start_response):
    with lock:
        return list(app(environ, start_response))
server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of an S3 server that holds one bucket, BUCKET."""
    process = subprocess.Popen([sys.executable, "-c", S3], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    too_late = threading.Timer(SECONDS, process.kill)
    too_late.start()
    try:
        assert process.stdout is not None
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        too_late.cancel()
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=SECONDS):
            yield endpoint
    finally:
        too_late.cancel()
        process.kill()
        process.wait(SECONDS)


SECRET = "YS1zZWNyZXQtZm9yLXRlc3Rz"
"""Base64, as Azure wants it."""
ACCOUNT = "account"

ENVIRONMENT = {
    "s3": {
        "AWS_ENDPOINT": "{endpoint}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "an-id",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    },
    "gs": {"GOOGLE_BASE_URL": "{endpoint}", "GOOGLE_ALLOW_HTTP": "true", "GOOGLE_BEARER_TOKEN": SECRET},
    "az": {
        "AZURE_STORAGE_ENDPOINT": "{endpoint}/" + ACCOUNT,
        "AZURE_ALLOW_HTTP": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": SECRET,
    },
}
"""By scheme."""


def use(monkeypatch: pytest.MonkeyPatch, scheme: str, endpoint: str) -> None:
    """The environment that leads an object store to an endpoint."""
    for name, value in ENVIRONMENT[scheme].items():
        monkeypatch.setenv(name, value.format(endpoint=endpoint))


class Loop:
    """An event loop in a thread, for servers beside a test that blocks."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Awaitable[T]) -> T:
        async def whole() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(whole(), self._loop).result(SECONDS)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()


@contextmanager
def loop() -> Iterator[Loop]:
    one = Loop()
    try:
        yield one
    finally:
        one.close()


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Fault = Callable[[web.Request, Answer], Awaitable[web.StreamResponse]]


class Front:
    """A proxy before another server that goes wrong as ``fault(request, forward)`` says; it notes every request."""

    def __init__(self, behind: str) -> None:
        self._behind = behind
        self.fault: Fault | None = None
        self.requests: list[str] = []
        self.url = ""

    async def start(self) -> None:
        self._http = ClientSession(auto_decompress=False, skip_auto_headers=("Content-Type", "Accept-Encoding"))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])

    async def close(self) -> None:
        await self._runner.cleanup()
        await self._http.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path_qs}")
        await request.read()
        return await (self._forward(request) if self.fault is None else self.fault(request, self._forward))

    async def _forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        async with self._http.request(
            request.method, self._behind + request.path_qs, headers=request.headers, data=body or None
        ) as answer:
            dropped = SET_AGAIN if request.method == "HEAD" else {*SET_AGAIN, "content-length"}
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in dropped}
            return web.Response(status=answer.status, body=await answer.read() or None, headers=kept)


SET_AGAIN = {"transfer-encoding", "connection", "date", "server"}


@contextmanager
def front(behind: str) -> Iterator[Front]:
    with loop() as beside:
        one = Front(behind)
        beside.run(one.start())
        try:
            yield one
        finally:
            beside.run(one.close())
