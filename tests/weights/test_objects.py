"""Object stores and mirrors that go wrong: each fault has its error, and nothing wrong is ever returned."""

from __future__ import annotations

import asyncio
import logging
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from aiohttp import web

from farflung.core.errors import BadInput, Corrupt, InfraError
from farflung.weights import Conflict, Missing, StoreError, open_store
from farflung.weights.objects import Deadlines, MirrorStore, ObjectStore
from tests.weights.servers import BUCKET, Answer, Fault, Front, front, use
from tests.weights.servers import SECRET as CLOUD_SECRET

FEW = Deadlines(retries=2)
SHORT = Deadlines(stall_seconds=0.5, request_seconds=0.7, retries=1)
SECRET = "a-token-that-nobody-may-see"
TOLD = ("ETag", "Last-Modified", "x-goog-generation")
"""Headers that tell of an object."""


@pytest.fixture
def proxy(scheme: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    """A cloud's server behind a proxy that tests break."""
    with front(endpoint) as one:
        use(monkeypatch, scheme, one.url)
        yield one


@pytest.fixture
def store(scheme: str, proxy: Front) -> ObjectStore:
    return ObjectStore(f"{scheme}://{BUCKET}/{secrets.token_hex(8)}", deadlines=FEW)


def first(times: int, fault: Fault) -> Fault:
    """The fault for so many requests, then none."""
    left = times

    async def run(request: web.Request, forward: Answer) -> web.StreamResponse:
        nonlocal left
        left -= 1
        return await (fault(request, forward) if left >= 0 else forward(request))

    return run


def writes(fault: Fault) -> Fault:
    """The fault for every PUT."""

    async def run(request: web.Request, forward: Answer) -> web.StreamResponse:
        return await (fault(request, forward) if request.method == "PUT" else forward(request))

    return run


async def fails(request: web.Request, forward: Answer) -> web.StreamResponse:
    return web.Response(status=500, text="<Error><Code>InternalError</Code></Error>")


async def forbids(request: web.Request, forward: Answer) -> web.StreamResponse:
    return web.Response(status=403, text="<Error><Code>AccessDenied</Code></Error>")


async def hangs(request: web.Request, forward: Answer) -> web.StreamResponse:
    await asyncio.sleep(30)
    return await forward(request)


async def loses_the_reply(request: web.Request, forward: Answer) -> web.StreamResponse:
    await forward(request)
    return web.Response(status=500)


async def breaks_off_the_reply(request: web.Request, forward: Answer) -> web.StreamResponse:
    await forward(request)
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def begins(request: web.Request, forward: Answer) -> web.StreamResponse:
    """All of the reply but its last byte."""
    whole = await forward(request)
    assert isinstance(whole, web.Response)
    assert isinstance(whole.body, bytes)
    headers = {name: whole.headers[name] for name in (*TOLD, "Content-Range") if name in whole.headers}
    response = web.StreamResponse(status=whole.status, headers=headers)
    response.content_length = len(whole.body)
    await response.prepare(request)
    await response.write(whole.body[:-1])
    return response


async def truncates(request: web.Request, forward: Answer) -> web.StreamResponse:
    response = await begins(request, forward)
    assert request.transport is not None
    request.transport.close()
    return response


async def stalls(request: web.Request, forward: Answer) -> web.StreamResponse:
    response = await begins(request, forward)
    await asyncio.sleep(30)
    return response


def test_a_server_that_recovers_is_asked_again(store: ObjectStore, proxy: Front) -> None:
    proxy.fault = first(1, fails)
    store.put("run/a", b"data")
    proxy.fault = first(2, fails)
    assert store.get("run/a", 4) == b"data"
    proxy.fault = first(1, fails)
    store.swap_pointer("run/latest", None, b"1")
    proxy.fault = first(1, writes(fails))
    store.swap_pointer("run/latest", b"1", b"2")
    assert store.read_pointer("run/latest") == b"2"


@pytest.mark.parametrize("fault", [fails, hangs, forbids])
def test_a_server_that_does_not_recover_is_an_error_that_names_the_object(
    store: ObjectStore, proxy: Front, fault: Fault
) -> None:
    store.swap_pointer("run/latest", None, b"1")
    store.put("run/a", b"data")
    proxy.fault = fault
    store = ObjectStore(store.url, deadlines=SHORT if fault is hangs else FEW)
    for call in (
        lambda: store.put("run/b", b"data"),
        lambda: store.get("run/a", 4),
        lambda: store.exists("run/a"),
        lambda: store.list("run"),
        lambda: store.delete("run/a"),
        lambda: store.read_pointer("run/latest"),
        lambda: store.swap_pointer("run/latest", b"1", b"2"),
        lambda: store.write_note("run/leases/a", b"1"),
        lambda: store.ages("run"),
    ):
        began = time.monotonic()
        with pytest.raises(StoreError) as raised:
            call()
        assert time.monotonic() - began < 30
        assert isinstance(raised.value, InfraError)
        assert raised.value.where.startswith(store.url + "/run")
        assert raised.value.mend
        assert CLOUD_SECRET not in str(raised.value)
    proxy.fault = None
    assert store.list("run") == ["run/a", "run/latest"]
    assert store.read_pointer("run/latest") == b"1"


def test_what_may_not_be_done_is_said_as_such(store: ObjectStore, proxy: Front) -> None:
    proxy.fault = forbids
    with pytest.raises(StoreError, match=r"no permission to read.*AccessDenied\n.*credentials"):
        store.get("run/a", 4)


def test_a_server_that_is_not_there(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scheme, "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="cannot read"):
        ObjectStore(f"{scheme}://{BUCKET}", deadlines=SHORT).read_pointer("run/latest")


@pytest.mark.parametrize("fault", [truncates, stalls])
def test_a_short_body_is_completed_or_an_error(store: ObjectStore, proxy: Front, fault: Fault) -> None:
    store.put("run/a", b"123456")
    proxy.fault = first(1, fault)
    hasty = ObjectStore(store.url, deadlines=replace(FEW, stall_seconds=2.0))
    assert hasty.get("run/a", 6) == b"123456"
    proxy.fault = fault
    with pytest.raises(StoreError, match="cannot read"):
        hasty.get("run/a", 6)


def test_a_pointer_that_changes_while_it_is_read_is_not_patched_together(store: ObjectStore, proxy: Front) -> None:
    """The first reply breaks off and the rest is asked for again, when the pointer has already moved."""
    store.swap_pointer("run/latest", None, b"oldold")
    other = ObjectStore(store.url, deadlines=FEW)

    async def breaks_off_and_moves(request: web.Request, forward: Answer) -> web.StreamResponse:
        response = await truncates(request, forward)
        await asyncio.to_thread(other.swap_pointer, "run/latest", b"oldold", b"newnew")
        return response

    proxy.fault = first(1, breaks_off_and_moves)
    try:
        assert store.read_pointer("run/latest") in (b"oldold", b"newnew")
    except StoreError:
        assert store.read_pointer("run/latest") == b"newnew"


@pytest.mark.parametrize("lost", [loses_the_reply, breaks_off_the_reply])
def test_a_write_whose_reply_is_lost_happened_once(store: ObjectStore, proxy: Front, lost: Fault) -> None:
    proxy.fault = first(1, writes(lost))
    store.put("run/a", b"data")
    assert store.get("run/a", 4) == b"data"
    pointer = None
    for value in (b"1", b"2", b"3"):
        proxy.fault = first(2, writes(lost))  # of the swap's requests the first is a read
        store.swap_pointer("run/latest", pointer, value)
        assert store.read_pointer("run/latest") == value
        pointer = value
    with pytest.raises(Conflict):
        store.swap_pointer("run/latest", b"2", b"4")


def test_a_put_whose_every_reply_is_lost_can_be_put_again(store: ObjectStore, proxy: Front) -> None:
    proxy.fault = writes(loses_the_reply)
    with pytest.raises(StoreError):
        store.put("run/a", b"data")
    with pytest.raises(StoreError):
        store.put("run/a", b"data")
    proxy.fault = None
    store.put("run/a", b"data")
    with pytest.raises(Conflict, match="other bytes"):
        store.put("run/a", b"DATA")
    assert store.get("run/a", 4) == b"data"


def test_a_swap_that_two_make_with_equal_bytes_is_won_by_one(store: ObjectStore, proxy: Front) -> None:
    """The other's swap comes between this one's look and its write."""
    other = ObjectStore(store.url, deadlines=FEW)
    busy = False

    async def another_is_faster(request: web.Request, forward: Answer) -> web.StreamResponse:
        nonlocal busy
        if request.method == "PUT" and not busy:
            busy = True
            await asyncio.to_thread(other.swap_pointer, "run/latest", None, b"1")
        return await forward(request)

    proxy.fault = another_is_faster
    with pytest.raises(Conflict, match="moved"):
        store.swap_pointer("run/latest", None, b"1")
    assert store.read_pointer("run/latest") == b"1"


def test_a_put_that_finds_another_write_under_way_tries_again(store: ObjectStore, proxy: Front) -> None:
    """S3 answers 409 while a write or a deletion of the same key is not yet decided."""

    async def undecided(request: web.Request, forward: Answer) -> web.StreamResponse:
        return web.Response(status=409, text="<Error><Code>ConditionalRequestConflict</Code></Error>")

    proxy.fault = first(1, writes(undecided))
    store.put("run/a", b"data")
    assert store.get("run/a", 4) == b"data"
    proxy.fault = writes(undecided)
    with pytest.raises(StoreError, match="again and again"):
        store.put("run/b", b"data")


def test_writes_that_come_too_fast_for_the_cloud_are_made_later(scheme: str, proxy: Front) -> None:
    """Google takes about one write of an object a second."""
    written = 0.0

    async def one_a_second(request: web.Request, forward: Answer) -> web.StreamResponse:
        nonlocal written
        if time.monotonic() < written + 1:
            return web.Response(status=429, text="<Error><Code>SlowDown</Code></Error>")
        written = time.monotonic()
        return await forward(request)

    store = ObjectStore(f"{scheme}://{BUCKET}/{secrets.token_hex(8)}")
    proxy.fault = writes(one_a_second)
    before = None
    for value in (b"1", b"2", b"3"):
        store.swap_pointer("run/latest", before, value)
        before = value
    assert store.read_pointer("run/latest") == b"3"


def test_a_stale_pointer_is_never_swapped_from(store: ObjectStore, proxy: Front) -> None:
    store.swap_pointer("run/latest", None, b"1")
    stale: web.Response | None = None

    async def remembers(request: web.Request, forward: Answer) -> web.StreamResponse:
        nonlocal stale
        if request.method != "GET":
            return await forward(request)
        if stale is None:
            answer = await forward(request)
            assert isinstance(answer, web.Response)
            stale = answer
        return web.Response(
            status=200, body=stale.body, headers={name: stale.headers[name] for name in TOLD if name in stale.headers}
        )

    proxy.fault = remembers
    assert store.read_pointer("run/latest") == b"1"
    proxy.fault = None
    store.swap_pointer("run/latest", b"1", b"2")
    proxy.fault = remembers
    assert store.read_pointer("run/latest") == b"1"  # an older truth, as any reader may see that looks a moment earlier
    for value in (b"2", b"3"):
        with pytest.raises(Conflict, match="moved"):
            store.swap_pointer("run/latest", b"1", value)
    proxy.fault = None
    assert store.read_pointer("run/latest") == b"2"


def test_what_is_not_found_is_missing_and_a_bucket_that_is_not_there_is_said(scheme: str, store: ObjectStore) -> None:
    with pytest.raises(Missing, match=scheme + r"://weights/[0-9a-f]+/run/a: there is no such object"):
        store.get("run/a", 4)
    nowhere = ObjectStore(f"{scheme}://no-such-bucket/x", deadlines=FEW)
    for call in (
        lambda: nowhere.read_pointer("run/latest"),
        lambda: nowhere.swap_pointer("run/latest", None, b"1"),
        lambda: nowhere.put("run/a", b""),
        lambda: nowhere.list("run"),
        lambda: nowhere.ages("run"),
    ):
        with pytest.raises(BadInput, match="no such bucket") as raised:
            call()
        assert not isinstance(raised.value, Missing)


def test_an_object_that_is_too_large_is_not_read(store: ObjectStore, proxy: Front) -> None:
    store.put("run/a", bytes(1 << 20))
    sent = 0

    async def slowly(request: web.Request, forward: Answer) -> web.StreamResponse:
        nonlocal sent
        told = (await forward(request)).headers
        response = web.StreamResponse(headers={name: told[name] for name in TOLD if name in told})
        response.content_length = 1 << 40
        await response.prepare(request)
        for _ in range(1 << 20):
            await response.write(bytes(1 << 20))
            sent += 1
        return response

    proxy.fault = slowly
    with pytest.raises(Corrupt, match="larger than the 4 bytes"):
        store.get("run/a", 4)
    assert sent < 1000


def test_more_keys_than_fit_one_page_are_listed(cloud: str) -> None:
    store = open_store(f"memory://{secrets.token_hex(8)}")
    paged = open_store(f"{cloud}://{BUCKET}/{secrets.token_hex(8)}")
    keys = [f"run/{i:04d}" for i in range(1100)]
    for key in keys:
        store.put(key, b"")
    assert store.list("run") == keys
    for key in keys:
        paged.put(key, b"")
    assert paged.list("run") == keys
    assert len(paged.ages("run")) == len(keys)


def test_stores_in_memory_are_shared_by_name() -> None:
    name = secrets.token_hex(8)
    open_store(f"memory://{name}").put("run/a", b"1")
    assert open_store(f"memory://{name}/").get("run/a", 1) == b"1"
    assert open_store(f"memory://{name}-2").list("run") == []


def test_two_prefixes_of_a_bucket_are_two_stores(cloud: str) -> None:
    name = secrets.token_hex(8)
    open_store(f"{cloud}://{BUCKET}/{name}/a").put("run/a", b"1")
    assert open_store(f"{cloud}://{BUCKET}/{name}").list("a") == ["a/run/a"]
    assert open_store(f"{cloud}://{BUCKET}/{name}/b").list("run") == []


def test_a_folder_needs_no_library_for_object_stores(tmp_path: str) -> None:
    program = (
        "import sys; from farflung.weights import open_store\n"
        "open_store(sys.argv[1]).put('run/a', b'1'); assert 'obstore' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "url",
    [
        f"http://me:{SECRET}@host/x",
        f"http://host/x?sig={SECRET}",
        f"az://container/x?{SECRET}",
        f"s3://bucket/x#{SECRET}",
        "https:///x",
        f"http://{SECRET}@host/x",
    ],
)
def test_a_url_that_holds_more_than_a_place_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(BadInput) as raised:
        open_store(url)
    assert SECRET not in str(raised.value)
    assert raised.value.mend


async def serves(request: web.Request, forward: Answer) -> web.StreamResponse:
    if request.headers.get("Authorization") != f"Bearer {SECRET}":
        return web.json_response({"error": "no", "kind": "unauthorized"}, status=401)
    if request.path.endswith("/there"):
        return web.Response(body=b"data")
    return web.json_response({"error": "no", "kind": "missing"}, status=404)


async def truncates_data(request: web.Request, forward: Answer) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_length = 4
    await response.prepare(request)
    await response.write(b"dat")
    assert request.transport is not None
    request.transport.close()
    return response


@pytest.fixture
def server() -> Iterator[Front]:
    with front("http://127.0.0.1:9") as one:
        one.fault = serves
        yield one


def test_a_mirror_is_read_with_the_token(server: Front, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    mirror = MirrorStore(f"{server.url}/prefix/", token=SECRET, deadlines=FEW)
    assert mirror.get("run/there", 4) == b"data"
    assert server.requests == ["GET /prefix/run/there"]
    assert mirror.exists("run/there")
    assert not mirror.exists("run/a")
    assert mirror.read_pointer("run/latest") is None
    with pytest.raises(Corrupt, match="larger"):
        mirror.get("run/there", 3)
    for token in (None, "another"):
        with pytest.raises(StoreError, match="no permission"):
            MirrorStore(server.url, token=token, deadlines=FEW).get("run/there", 4)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("fault", [fails, hangs, truncates_data])
def test_a_mirror_that_fails_is_an_error_without_the_token(server: Front, fault: Fault) -> None:
    server.fault = fault
    mirror = MirrorStore(server.url, token=SECRET, deadlines=SHORT)
    for call in (lambda: mirror.get("run/a", 9), lambda: mirror.read_pointer("run/latest")):
        with pytest.raises(StoreError, match="cannot read") as raised:
            call()
        assert SECRET not in str(raised.value)
        assert raised.value.__cause__ is None


def test_a_mirror_takes_no_writes_but_notes(server: Front) -> None:
    mirror = open_store(server.url, token=SECRET)
    for call in (
        lambda: mirror.put("run/a", b""),
        lambda: mirror.delete("run/a"),
        lambda: mirror.swap_pointer("run/latest", None, b""),
    ):
        with pytest.raises(BadInput, match="read-only"):
            call()
    for call in (lambda: mirror.list("run"), lambda: mirror.ages("run")):
        with pytest.raises(BadInput, match=r"cannot list\n.*store behind it"):
            call()
    assert server.requests == []
