"""What every server and client of the fleet shares: the run's token, JSON errors, limits, deadlines in words.

A body that is too large, a wrong token or a malformed request is answered before anything is computed. The token is
compared in constant time and never appears in a log or an answer.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from farflung.core.errors import BadInput, InfraError
from farflung.engines.base import TooLong

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "FARFLUNG_TOKEN"
MAX_BODY = 256 << 20
BODY_SECONDS = 60.0
FRAME = "application/octet-stream"

REPLICA_HEADER = "Farflung-Replica"
"""In an answer: the replica that served the turn. In a request: the replica that served the session before."""
AVOID_HEADER = "Farflung-Avoid"
"""In a request: a replica whose last answer to this turn did not check."""


def read_token(path: Path | str | None = None) -> str:
    """The run's token from a file, else from the environment. Raises BadInput without quoting what was found."""
    if path is not None:
        try:
            token, where = Path(path).read_text().strip(), str(path)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise BadInput(f"cannot read the token: {why}", where=str(path)) from None
    else:
        token, where = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
    if not token:
        raise BadInput(
            "no token",
            where=where,
            mend=f"put a long random word into a file (mode 600) or into {TOKEN_VARIABLE}; every request carries it",
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise BadInput("the token has characters that an HTTP header cannot carry", where=where)
    return token


def bearer(token: str) -> dict[str, str]:
    """Headers that carry the token."""
    return {"Authorization": f"Bearer {token}"}


def error(status: int, kind: str, text: str) -> web.Response:
    """The one form of every error: ``{"error": text, "kind": word}``."""
    return web.json_response({"error": text, "kind": kind}, status=status)


def guard(token: str) -> Middleware:
    """Middleware: the token first, then every exception as a JSON error with the status that the contract gives it."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def run(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, expected):
            return error(401, "unauthorized", "a request needs the run's token: Authorization: Bearer TOKEN")
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return error(413, "too_large", f"the body is larger than {request.client_max_size} bytes")
        except web.HTTPException as problem:
            return error(problem.status, "http", f"{request.method} {request.path}: {problem.reason}")
        except TooLong as problem:
            return error(413, "too_long", str(problem))
        except BadInput as problem:
            return error(400, "bad_request", str(problem))
        except InfraError as problem:
            log.warning("%s %s: %s", request.method, request.path, problem)
            return error(500, "engine", str(problem))
        except Exception as problem:
            log.exception("%s %s failed", request.method, request.path)
            return error(500, "internal", f"{type(problem).__name__}: {problem}")

    return run


def application(token: str) -> web.Application:
    """An empty application behind ``guard``."""
    return web.Application(middlewares=[guard(token)], client_max_size=MAX_BODY)


async def listen(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Serve ``app``; returns its runner (to clean up) and its URL. Port 0 takes a free one. Raises BadInput.

    A client that disconnects cancels its handler, so work that nobody waits for stops.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except (OSError, OverflowError) as problem:
        await runner.cleanup()
        why = getattr(problem, "strerror", None) or problem
        raise BadInput(f"cannot listen: {why}", where=f"{host}:{port}") from None
    bound = runner.addresses[0]
    shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
    return runner, f"http://{shown}:{bound[1]}"


async def read_body(request: web.Request) -> bytes:
    """The whole body. Raises BadInput when it does not come within BODY_SECONDS."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise BadInput(f"the body did not come within {BODY_SECONDS:g} s", where=request.path) from None


async def read_json(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object. Raises BadInput."""
    try:
        data = json.loads(await read_body(request))
    except (ValueError, RecursionError) as problem:
        raise BadInput(f"the body is not JSON: {problem}", where=request.path) from None
    if not isinstance(data, dict):
        raise BadInput("the body is not a JSON object", where=request.path)
    return data


def explain(body: bytes) -> tuple[str, str]:
    """(kind, text) of an error answer; anything that is not one is kind "http"."""
    try:
        data = json.loads(body)
        if isinstance(data, Mapping):
            return str(data["kind"]), str(data["error"])
    except (ValueError, KeyError):
        pass
    return "http", body[:200].decode("utf-8", "replace")
