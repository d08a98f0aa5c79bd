"""Object stores and mirrors as stores: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage, HTTP.

Credentials come from where the clouds' own programs look: the environment, the machine's or the pod's identity. No
URL carries one. What else the environment can say:

    S3      AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT (another server than
            Amazon's), AWS_VIRTUAL_HOSTED_STYLE_REQUEST, AWS_SKIP_SIGNATURE, AWS_ALLOW_HTTP=true (an endpoint without TLS)
    Google  GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT, GOOGLE_SERVICE_ACCOUNT_KEY,
            GOOGLE_BEARER_TOKEN, GOOGLE_BASE_URL (another server than Google's), GOOGLE_ALLOW_HTTP=true
    Azure   AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, AZURE_CLIENT_ID,
            AZURE_CLIENT_SECRET, AZURE_TENANT_ID, AZURE_STORAGE_ENDPOINT, AZURE_ALLOW_HTTP=true

An S3-compatible server must honour If-None-Match: * and If-Match on PUT: all that keeps two writers apart rests on them.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import SplitResult, urlsplit

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import HTTPStore, MemoryStore, from_url

from farflung.core.errors import BadInput, Corrupt
from farflung.weights.store import MAX_POINTER, SEGMENT, Conflict, Missing, StoreError, check_key, check_pointer, is_key

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

CREATE_TRIES = 3
PROBE = ".clock"
"""The object that ``ages`` writes into a folder to learn the store's time. No key: a key's segment starts with no dot."""

MARK = "farflungswap"
"""Metadata of a pointer: a word drawn for the one swap that wrote it, since two writers may swap in equal bytes.
Letters only: each cloud and each proxy forbids others."""

_VARIABLES = {"s3": "AWS", "s3a": "AWS", "gs": "GOOGLE"}
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")
_CORRUPT = re.compile(r'"kind": ?"corrupt"')
"""In a mirror's answer."""
_memory: dict[str, MemoryStore] = {}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long one call may take: at most ``retry_seconds`` + ``request_seconds``.

    ``stall_seconds`` without a byte end a read. ``request_seconds`` are for one request with its whole body, so they
    bound how slow a connection may be that carries an object of gigabytes. After ``retry_seconds`` or ``retries``
    failed requests (connection, timeout, status 5xx or 429) the error is raised. As many as there are take some seconds at
    least: Google refuses more than about one write of an object a second.
    """

    connect_seconds: float = 10.0
    stall_seconds: float = 30.0
    request_seconds: float = 600.0
    retries: int = 10
    retry_seconds: float = 120.0

    def client(self, *, reads: bool, allow_http: bool, headers: dict[str, str] | None = None) -> ClientConfig:
        options: ClientConfig = {
            "allow_http": allow_http,
            "connect_timeout": timedelta(seconds=self.connect_seconds),
            "timeout": timedelta(seconds=self.request_seconds),
            "default_headers": headers or {},
        }
        if reads:  # in a client that writes it would end every upload that takes longer
            options["read_timeout"] = timedelta(seconds=self.stall_seconds)
        return options

    def retry(self) -> RetryConfig:
        return {
            "max_retries": self.retries,
            "retry_timeout": timedelta(seconds=self.retry_seconds),
            "backoff": {"max_backoff": timedelta(seconds=5)},
        }


@dataclass(frozen=True, slots=True)
class _Found:
    """What an object holds, what names this version of it in a conditional write, and who swapped it in."""

    data: bytes
    version: dict[str, str]
    mark: str | None


DEADLINES = Deadlines()
MIRROR_DEADLINES = Deadlines(stall_seconds=120.0)
"""A mirror says nothing until it has fetched and verified the whole object. Asked again, it has gone on meanwhile."""


class ObjectStore:
    """A bucket, or a part of one, as a store. Put and swap are single conditional requests, so they need no lock.

    Every error names the object by ``url``, which holds no credentials. Safe to use from several threads.
    """

    def __init__(self, url: str, *, deadlines: Deadlines = DEADLINES) -> None:
        self.url = url.rstrip("/")
        parts = _plain(url)
        if parts.scheme == "memory":
            self._reads: Any = _memory.setdefault(self.url, MemoryStore())
            self._writes: Any = self._reads
            return
        variable = f"{_VARIABLES.get(parts.scheme, 'AZURE')}_ALLOW_HTTP"
        retry = deadlines.retry()
        allow = os.environ.get(variable, "").lower() in ("1", "true", "yes", "on")
        try:
            self._reads, self._writes = (
                from_url(url, client_options=deadlines.client(reads=reads, allow_http=allow), retry_config=retry)
                for reads in (True, False)
            )
        except (BaseError, ValueError) as error:
            raise BadInput(f"no store can be opened: {_reason(error)}", where=self.url) from None

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        for _ in range(CREATE_TRIES):
            if self._written(key, data, "create"):
                return
            # It is there, or this very request wrote it and the reply was lost, or another write was under way.
            with suppress(Missing):
                if self._written(key, data, self._compare(key, data)):
                    return
        raise StoreError("others write and delete it again and again", where=self._where(key), mend="try again")

    def get(self, key: str, max_bytes: int) -> bytes:
        return self._get(key, max_bytes).data

    def exists(self, key: str) -> bool:
        with suppress(Missing), self._explained("look for", check_key(key)):
            self._reads.head(key)
            return True
        return False

    def folders(self) -> list[str]:
        with self._explained("list", ""):
            found = self._reads.list_with_delimiter()["common_prefixes"]
        return sorted(name for name in found if SEGMENT.fullmatch(name))

    def list(self, folder: str) -> list[str]:
        return sorted(filter(is_key, self._listed(folder)))

    def delete(self, key: str) -> None:
        with suppress(Missing), self._explained("delete", check_key(key)):
            self._writes.delete(key)

    def read_pointer(self, key: str) -> bytes | None:
        try:
            return self.get(key, MAX_POINTER)
        except Missing:
            return None

    def swap_pointer(self, key: str, expected: bytes | None, value: bytes) -> None:
        held: bytes | None = None
        mode: Any = "create"
        with suppress(Missing):
            found = self._get(check_pointer(key, value), MAX_POINTER)
            held, mode = found.data, found.version
        if held != expected:
            raise self._moved(key)
        mark = secrets.token_hex(16)
        try:
            if self._written(key, value, mode, {MARK: mark}):
                return
        except StoreError:
            with suppress(StoreError):
                if self._marked(key, mark):
                    return
            raise
        if not self._marked(key, mark):
            raise self._moved(key)

    def write_note(self, key: str, data: bytes) -> None:
        self._written(check_pointer(key, data), data, "overwrite")

    def ages(self, folder: str) -> dict[str, float]:
        probe = f"{check_key(folder)}/{PROBE}"
        self._written(probe, b"now", "overwrite")
        written = self._listed(folder)
        if probe not in written:
            raise StoreError("what was just written is not listed", where=self._where(probe), mend="try again")
        now = written[probe]
        return {key: max(0.0, now - when) for key, when in written.items() if is_key(key)}

    def _get(self, key: str, max_bytes: int) -> _Found:
        with self._explained("read", check_key(key)):
            reply = self._reads.get(key)
            meta = reply.meta
            if meta["size"] > max_bytes:
                raise Corrupt(f"the object is larger than the {max_bytes} bytes it should have", where=self._where(key))
            data = bytes(reply.bytes())
        if len(data) != meta["size"]:
            raise StoreError(f"{len(data)} of {meta['size']} bytes came", where=self._where(key), mend="try again")
        version = {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}
        return _Found(data, version, reply.attributes.get(MARK))

    def _written(self, key: str, data: bytes, mode: Any, attributes: dict[str, str] | None = None) -> bool:
        """Write in one request; false when its condition did not hold."""
        with self._explained("write", key):
            try:
                self._writes.put(key, data, mode=mode, attributes=attributes, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def _marked(self, key: str, mark: str) -> bool:
        """Whether the pointer is as the write with this mark left it: that write succeeded and its reply was lost."""
        with suppress(Missing, Corrupt):
            return self._get(key, MAX_POINTER).mark == mark
        return False

    def _compare(self, key: str, data: bytes) -> dict[str, str]:
        """Which version of the object has these bytes. Raises Conflict when it has others."""
        with suppress(Corrupt):
            found = self._get(key, len(data))
            if found.data == data:
                return found.version
        raise Conflict(
            "the object exists with other bytes", where=self._where(key), mend=f"objects never change: {key}"
        )

    def _listed(self, folder: str) -> dict[str, float]:
        """When each object below a folder, key or not, was written, in seconds of the store's clock."""
        with self._explained("list", check_key(folder)):
            found = [meta for batch in self._reads.list(folder, chunk_size=1000) for meta in batch]
        return {meta["path"]: meta["last_modified"].timestamp() for meta in found}

    def _moved(self, key: str) -> Conflict:
        where = self._where(key)
        return Conflict("the pointer has moved", where=where, mend="another writer is at work on this run")

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    @contextmanager
    def _explained(self, doing: str, key: str) -> Iterator[None]:
        """Errors of the library in this package's terms; never chained, for what they say at length is for no log."""
        where = self._where(key)
        try:
            yield
        except FileNotFoundError as error:
            if _NO_BUCKET.search(str(error)):
                raise _no_bucket(self.url) from None
            raise Missing("there is no such object", where=where) from None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            mend = "check the credentials and what they may do"
            raise StoreError(f"no permission to {doing}: {_reason(error)}", where=where, mend=mend) from None
        except (BaseError, OSError, ValueError) as error:
            if _NO_BUCKET.search(str(error)):
                raise _no_bucket(self.url) from None
            if _CORRUPT.search(str(error)):
                raise Corrupt(f"the mirror's store is damaged: {_reason(error)}", where=where) from None
            mend = "check the URL, the credentials and the network, or try again later"
            raise StoreError(f"cannot {doing}: {_reason(error)}", where=where, mend=mend) from None


class MirrorStore(ObjectStore):
    """A mirror (fleet/mirror.py), or any web server with a store's files: reads, and notes where it takes them.

    ``token`` is sent with every request to the URL's host. Objects that come from here are worth what their hashes say.
    """

    def __init__(self, url: str, *, token: str | None = None, deadlines: Deadlines = MIRROR_DEADLINES) -> None:
        self.url = url.rstrip("/")
        parts = _plain(url)
        if not parts.hostname or parts.username is not None:
            raise BadInput(
                "not the URL of a mirror", where=_bare(parts), mend="give http://HOST:PORT, and a token apart"
            )
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        options = deadlines.client(reads=True, allow_http=parts.scheme == "http", headers=headers)
        self._reads = HTTPStore(self.url, client_options=options, retry_config=deadlines.retry())
        self._writes = self._reads

    def put(self, key: str, data: bytes) -> NoReturn:
        self._refuse(key)

    def list(self, folder: str) -> NoReturn:
        self._unlisted(check_key(folder))

    def folders(self) -> NoReturn:
        self._unlisted("")

    def delete(self, key: str) -> NoReturn:
        self._refuse(key)

    def swap_pointer(self, key: str, expected: bytes | None, value: bytes) -> NoReturn:
        self._refuse(check_pointer(key, value))

    def ages(self, folder: str) -> NoReturn:
        self.list(folder)

    def _unlisted(self, folder: str) -> NoReturn:
        raise BadInput("a mirror cannot list", where=self._where(folder), mend="list the store behind it")

    def _refuse(self, key: str) -> NoReturn:
        raise BadInput("a mirror is read-only", where=self._where(check_key(key)), mend="write to the store behind it")


def _plain(url: str) -> SplitResult:
    """The parts of a URL that names a place and nothing else. Raises BadInput, without what may be a secret."""
    parts = urlsplit(url)
    if parts.password is not None or parts.query or parts.fragment:
        mend = "take the password, the query and the fragment out; credentials come from the environment"
        raise BadInput("the URL of a store names a place and nothing else", where=_bare(parts), mend=mend)
    return parts


def _bare(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _no_bucket(url: str) -> BadInput:
    return BadInput("there is no such bucket", where=url, mend="create it, or mend the URL")


def _reason(error: Exception) -> str:
    """The library's message without its debugging notes, a URL's query and most of an XML answer."""
    text = str(error).partition("\n\nDebug source")[0]
    code = re.search(r"<Code>(\w+)</Code>", text)
    text = text.partition("<")[0] + (code[1] if code else "")
    return re.sub(r"\?\S*", "", " ".join(text.split()))[:400] or type(error).__name__
