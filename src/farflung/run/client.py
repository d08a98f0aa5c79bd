"""A blocking client of the coordinator, for the trainer: it waits through restarts, up to a deadline."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from farflung.core.errors import FarflungError, InfraError
from farflung.core.process import patience


class RunOver(Exception):
    """The coordinator wants nothing more."""


class RunClient:
    """Calls to one run. ``deadline`` is how long a call is repeated while the coordinator does not answer, in seconds."""

    def __init__(self, url: str, token: str, deadline: float = 120.0) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._deadline = deadline

    def get(self, path: str) -> dict[str, Any]:
        return dict(json.loads(self._call("GET", path, None)))

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The raw answer; empty when there is nothing yet. Raises RunOver, FarflungError, InfraError."""
        return self._call("POST", path, json.dumps(body).encode())

    def _call(self, method: str, path: str, body: bytes | None) -> bytes:
        request = urllib.request.Request(self._url + path, data=body, method=method)
        request.add_header("Authorization", f"Bearer {self._token}")
        request.add_header("Content-Type", "application/json")
        until = time.monotonic() + self._deadline
        for pause in patience(0.1, 2.0):
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError as error:
                text = error.read().decode(errors="replace")
                if error.code == 410:
                    raise RunOver from None
                if error.code < 500 or error.code == 507:
                    raise FarflungError(f"answered {error.code}: {text}", where=self._url + path) from None
                reason = f"{error.code}: {text}"
            except (OSError, http.client.HTTPException) as error:
                reason = str(error)
            if time.monotonic() + pause > until:
                raise InfraError(f"no answer for {self._deadline:.0f} s: {reason}", where=self._url + path)
            time.sleep(pause)
        raise AssertionError("patience never ends")
