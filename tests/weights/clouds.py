"""Google Cloud Storage and Azure Blob Storage over HTTP, as far as a store speaks with them, each with one bucket in memory.

What they answer follows their documentation of the XML interface and of the Blob service: conditional writes, metadata, ranges,
listings by pages, and errors. A handler waits for nothing once it has the request's body, so each request is whole.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from hashlib import md5
from typing import ClassVar
from urllib.parse import unquote
from xml.sax.saxutils import escape

from aiohttp import web

from tests.weights.servers import ACCOUNT, BUCKET, SECRET, loop, s3_server

PAGE = 1000


@dataclass(frozen=True, slots=True)
class Blob:
    data: bytes
    number: int
    """Counts all writes into the bucket."""
    written: float
    metadata: dict[str, str]

    @property
    def etag(self) -> str:
        return f'"{md5(self.data).hexdigest()}-{self.number}"'


class Cloud(ABC):
    """A bucket behind HTTP."""

    at: ClassVar[str]
    """The bucket's path."""
    prefix: ClassVar[str]
    """Of headers that carry metadata."""
    no_bucket: ClassVar[str]
    no_object: ClassVar[str]

    def __init__(self) -> None:
        self.blobs: dict[str, Blob] = {}
        self._writes = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        refused = self.refused(request)
        if refused is not None:
            return refused
        if request.path != self.at and not request.path.startswith(f"{self.at}/"):
            return self.error(404, self.no_bucket)
        key = request.path.removeprefix(self.at).removeprefix("/")
        if request.method == "POST":
            return self.batch(request, body)
        if not key:
            return self._listed(request)
        if request.method == "PUT":
            return self._put(request, key, body)
        if key not in self.blobs:
            return self.error(404, self.no_object)
        if request.method == "DELETE":
            del self.blobs[key]
            return web.Response(status=self.deleted)
        return self._got(request, self.blobs[key])

    def _put(self, request: web.Request, key: str, body: bytes) -> web.Response:
        broken = self.broken(request, self.blobs.get(key))
        if broken is not None:
            return broken
        metadata = {
            name.lower().removeprefix(self.prefix): value
            for name, value in request.headers.items()
            if name.lower().startswith(self.prefix)
        }
        self._writes += 1
        blob = self.blobs[key] = Blob(body, self._writes, time.time(), metadata)
        return web.Response(status=self.created, headers=self._headers(blob))

    def _got(self, request: web.Request, blob: Blob) -> web.Response:
        if request.headers.get("If-Match", blob.etag) != blob.etag:
            return self.error(412, "ConditionNotMet")
        headers, size = self._headers(blob), len(blob.data)
        for name, value in blob.metadata.items():
            headers[self.prefix + name] = value
        if request.method == "HEAD":
            return web.Response(headers=headers | {"Content-Length": str(size)})
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if asked is None or not size:
            return web.Response(body=blob.data, headers=headers)
        first, last = int(asked[1]), min(int(asked[2] or size), size - 1)
        if first > last:
            return self.error(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        return web.Response(status=206, body=blob.data[first : last + 1], headers=headers)

    def _headers(self, blob: Blob) -> dict[str, str]:
        return {"ETag": blob.etag, "Last-Modified": formatdate(blob.written, usegmt=True)} | self.more(blob)

    def _listed(self, request: web.Request) -> web.Response:
        """A page of the names that follow the one at which the page before ended."""
        prefix, delimiter = request.query.get("prefix", ""), request.query.get("delimiter", "")
        names: list[str] = []
        for key in sorted(self.blobs):
            if key.startswith(prefix):
                head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                name = prefix + head + found if found else key
                if names[-1:] != [name]:
                    names.append(name)
        first = bisect_right(names, request.query.get(self.marker, ""))
        page = names[first : first + PAGE]
        ended = page[-1] if len(names) > first + PAGE else ""
        blobs = {name: self.blobs[name] for name in page if name in self.blobs}
        text = self.listing(blobs, [name for name in page if name not in blobs], ended)
        return web.Response(text=f'<?xml version="1.0" encoding="utf-8"?>{text}', content_type="application/xml")

    def error(self, status: int, code: str) -> web.Response:
        return web.Response(status=status, text=f"<Error><Code>{code}</Code></Error>", content_type="application/xml")

    marker: ClassVar[str]
    created: ClassVar[int]
    deleted: ClassVar[int]

    @abstractmethod
    def refused(self, request: web.Request) -> web.Response | None:
        """The answer to a request that may not be made at all."""

    @abstractmethod
    def broken(self, request: web.Request, held: Blob | None) -> web.Response | None:
        """The answer to a write whose condition does not hold, or which is none."""

    def batch(self, request: web.Request, body: bytes) -> web.Response:
        """The answers to several requests in one."""
        return self.error(400, "NotImplemented")

    @abstractmethod
    def more(self, blob: Blob) -> dict[str, str]:
        """Headers of an object beside the common ones."""

    @abstractmethod
    def listing(self, blobs: dict[str, Blob], folders: list[str], ended: str) -> str: ...


class Google(Cloud):
    at, prefix, no_bucket, no_object = f"/{BUCKET}", "x-goog-meta-", "NoSuchBucket", "NoSuchKey"
    marker, created, deleted = "continuation-token", 200, 204

    def refused(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") != f"Bearer {SECRET}":
            return self.error(403, "AccessDenied")
        if request.path == self.at and request.query.get("list-type") != "2":
            return self.error(400, "InvalidArgument")  # of another form
        return None

    def broken(self, request: web.Request, held: Blob | None) -> web.Response | None:
        if "If-Match" in request.headers or "If-None-Match" in request.headers:
            return self.error(400, "InvalidArgument")  # on writes Google compares generations alone
        wanted = request.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (0 if held is None else held.number):
            return self.error(412, "PreconditionFailed")
        return None

    def more(self, blob: Blob) -> dict[str, str]:
        return {"x-goog-generation": str(blob.number), "x-goog-metageneration": "1"}

    def listing(self, blobs: dict[str, Blob], folders: list[str], ended: str) -> str:
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Generation>{blob.number}</Generation><MetaGeneration>1</MetaGeneration>"
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(blob.written))}.000Z</LastModified>"
            f"<ETag>{escape(blob.etag)}</ETag><Size>{len(blob.data)}</Size></Contents>"
            for key, blob in blobs.items()
        )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        more = f"<NextContinuationToken>{escape(ended)}</NextContinuationToken>" if ended else ""
        return (
            f"<ListBucketResult><Name>{BUCKET}</Name><IsTruncated>{str(bool(ended)).lower()}</IsTruncated>"
            f"{more}{contents}{common}</ListBucketResult>"
        )


class Azure(Cloud):
    at, prefix, no_bucket, no_object = f"/{ACCOUNT}/{BUCKET}", "x-ms-meta-", "ContainerNotFound", "BlobNotFound"
    marker, created, deleted = "marker", 201, 202

    def refused(self, request: web.Request) -> web.Response | None:
        if not request.headers.get("Authorization", "").startswith(f"SharedKey {ACCOUNT}:"):
            return self.error(403, "AuthenticationFailed")
        return None

    def broken(self, request: web.Request, held: Blob | None) -> web.Response | None:
        if request.headers.get("x-ms-blob-type") != "BlockBlob":
            return self.error(400, "InvalidHeaderValue")
        names = [name for name in request.headers if name.lower().startswith(self.prefix)]
        if not all(re.fullmatch("[A-Za-z_][A-Za-z_0-9]*", name[len(self.prefix) :]) for name in names):
            return self.error(400, "InvalidMetadata")
        if request.headers.get("If-None-Match") == "*" and held is not None:
            return self.error(409, "BlobAlreadyExists")
        wanted = request.headers.get("If-Match")
        if wanted is not None and (held is None or wanted != held.etag):
            return self.error(412, "ConditionNotMet")
        return None

    def batch(self, request: web.Request, body: bytes) -> web.Response:
        parts = []
        asked = re.findall(rb"Content-ID: (\d+)\r\n\r\nDELETE (\S+) HTTP/1.1\r\n", body)
        if request.query.get("comp") != "batch" or body.count(b"\nAuthorization: SharedKey ") != len(asked):
            return self.error(400, "InvalidInput")
        for number, path in asked:
            key = unquote(path.decode()).removeprefix(f"{self.at}/")
            status = "202 Accepted" if self.blobs.pop(key, None) else f"404 {self.no_object}"
            parts.append(
                f"--answers\r\nContent-Type: application/http\r\nContent-ID: {number.decode()}\r\n\r\n"
                f"HTTP/1.1 {status}\r\n\r\n"
            )
        if not parts:
            return self.error(400, "InvalidInput")
        text = "".join(parts) + "--answers--\r\n"
        return web.Response(
            status=202, body=text.encode(), headers={"Content-Type": "multipart/mixed; boundary=answers"}
        )

    def more(self, blob: Blob) -> dict[str, str]:
        return {"x-ms-blob-type": "BlockBlob"}

    def listing(self, blobs: dict[str, Blob], folders: list[str], ended: str) -> str:
        found = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{formatdate(blob.written, usegmt=True)}"
            f"</Last-Modified><Etag>{escape(blob.etag)}</Etag><Content-Length>{len(blob.data)}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type><BlobType>BlockBlob</BlobType></Properties></Blob>"
            for key, blob in blobs.items()
        )
        common = "".join(f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in folders)
        return (
            f'<EnumerationResults ContainerName="{BUCKET}"><Blobs>{found}{common}</Blobs>'
            f"<NextMarker>{escape(ended)}</NextMarker></EnumerationResults>"
        )


@contextmanager
def serving(cloud: Cloud) -> Iterator[str]:
    """Where it can be reached."""
    with loop() as beside:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", cloud.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        beside.run(runner.setup())
        beside.run(web.TCPSite(runner, "127.0.0.1", 0).start())
        try:
            yield "http://{}:{}".format(*runner.addresses[0][:2])
        finally:
            beside.run(runner.cleanup())


SERVERS: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "s3": s3_server,
    "gs": lambda: serving(Google()),
    "az": lambda: serving(Azure()),
}
"""What gives the endpoint of a server of one's own with the bucket BUCKET, by scheme."""
