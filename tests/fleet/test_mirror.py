"""The mirror: what it serves is right, each object is fetched once, faults are said."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from farflung.core.errors import BadInput, Corrupt
from farflung.fleet import mirror as mirrors
from farflung.fleet import wire
from farflung.fleet.mirror import Mirror, MirrorOptions, serve
from farflung.weights import open_store
from farflung.weights.manifest import MAX_OBJECT
from tests.fleet.kit import TOKEN, sever, until
from tests.fleet.site import MIB, Upstream, cached, site


async def test_an_object_is_fetched_once_and_kept(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        key = one.upstream.add(b"weights" * 1000)
        for _ in range(3):
            assert await one.get(key) == b"weights" * 1000
        assert one.upstream.asked == [key]
        stats = await one.stats()
        assert (stats["hits"], stats["misses"], stats["rejected"], stats["uncached"]) == (2, 1, 0, 0)
        assert (stats["bytes_served"], stats["bytes_fetched"], stats["cached_bytes"]) == (21000, 7000, 7000)
        assert cached(tmp_path) == [key.rsplit("/", 1)[1]]


async def test_a_manifest_is_kept_by_its_hash_too(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        data = b'{"a manifest": 1}'
        key = f"run/manifests/00000012-{hashlib.sha256(data).hexdigest()}"
        one.upstream.put(key, data)
        assert [await one.get(key) for _ in range(2)] == [data, data]
        assert one.upstream.asked == [key]
        wrong = f"run/manifests/00000013-{'0' * 64}"
        one.upstream.put(wrong, data)
        assert await one.refused(wrong) == (502, "corrupt")


async def test_many_who_ask_at_once_share_one_fetch(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        key = one.upstream.add(os.urandom(300_000))
        one.upstream.open.clear()
        asking = [asyncio.create_task(one.get(key)) for _ in range(20)]
        gone = asyncio.create_task(one.get(key))
        await until(lambda: one.upstream.asked)
        gone.cancel()
        await asyncio.sleep(0.1)
        one.upstream.open.set()
        bodies = await asyncio.gather(*asking)
        assert {hashlib.sha256(body).hexdigest() for body in bodies} == {key.rsplit("/", 1)[1]}
        assert one.upstream.asked == [key]
        stats = await one.stats()
        assert (stats["misses"], stats["hits"]) == (1, 19)


async def test_the_fetch_goes_on_when_all_who_asked_are_gone(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        key = one.upstream.add(b"data")
        one.upstream.open.clear()
        asking = asyncio.create_task(one.get(key))
        await until(lambda: one.upstream.asked)
        asking.cancel()
        await asyncio.sleep(0.1)
        one.upstream.open.set()
        await until(lambda: cached(tmp_path))
        assert await one.get(key) == b"data"
        assert one.upstream.asked == [key]


async def test_ranges_and_heads_are_answered_as_http_says(tmp_path: Path) -> None:
    async with site(tmp_path, 8 * MIB) as one:
        data = os.urandom(3 * MIB + 17)
        key = one.upstream.add(data)
        for _ in range(2):  # from memory, then from the disk
            for header, start, stop in (
                ("bytes=0-0", 0, 1),
                ("bytes=5-99", 5, 100),
                (f"bytes={MIB - 3}-{2 * MIB + 3}", MIB - 3, 2 * MIB + 4),
                (f"bytes={3 * MIB}-", 3 * MIB, len(data)),
                ("bytes=-7", len(data) - 7, len(data)),
                ("bytes=10-99999999999", 10, len(data)),
            ):
                async with one.http.get(f"/{key}", headers={"Range": header}) as answer:
                    assert answer.status == 206
                    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(data)}"
                    assert await answer.read() == data[start:stop]
        for header in (f"bytes={len(data)}-", "bytes=9-3", "bytes=a-b", "bytes=0-1,5-9"):
            async with one.http.get(f"/{key}", headers={"Range": header}) as answer:
                assert answer.status == 416
                assert answer.headers["Content-Range"] == f"bytes */{len(data)}"
        for name, size in ((key, len(data)), (one.upstream.add(b"new"), 3), (one.upstream.add(b""), 0)):
            async with one.http.head(f"/{name}") as answer:
                assert (answer.status, answer.content_length) == (200, size)
                assert answer.headers["ETag"] == f'"{name.rsplit("/", 1)[1]}"'
                assert await answer.read() == b""
        assert await one.get(one.upstream.add(b"")) == b""


async def test_what_may_change_is_never_cached(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        one.upstream.swap_pointer("run/latest", None, b"1")
        one.upstream.put("run/skips/3", b"why")
        for i in range(1, 4):
            assert await one.get("run/latest") == str(i).encode()
            one.upstream.swap_pointer("run/latest", str(i).encode(), str(i + 1).encode())
        assert await one.get("run/skips/3") == b"why"
        async with one.http.get("/run/latest", headers={"Range": "bytes=0-0"}) as answer:
            assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store")
        one.upstream.delete("run/latest")
        assert await one.refused("run/latest") == (404, "missing")
        async with one.http.head("/run/latest") as answer:
            assert answer.status == 404
        assert cached(tmp_path) == []
        stats = await one.stats()
        assert (stats["hits"], stats["misses"], stats["passed"]) == (0, 0, 7)


async def test_wrong_bytes_are_never_served(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        key = one.upstream.add(b"right" * 100)
        (tmp_path / "store" / key).write_bytes(b"wrong" * 100)
        for _ in range(2):
            assert await one.refused(key) == (502, "corrupt")
        stats = await one.stats()
        assert (stats["rejected"], stats["bytes_served"], stats["cached_bytes"]) == (2, 0, 0)
        assert cached(tmp_path) == []
        with pytest.raises(Corrupt, match=r"mirror's store is damaged.*502.*do not have the hash"):
            await asyncio.to_thread(open_store(one.mirror.url, token=TOKEN).get, key, 500)
        (tmp_path / "store" / key).write_bytes(b"right" * 100)
        assert await one.get(key) == b"right" * 100


async def test_a_store_that_fails_is_said_and_nothing_is_remembered_of_it(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        key = one.upstream.add(b"data")
        one.upstream.down = True
        assert await one.refused(key) == (503, "store")
        assert await one.refused("run/latest") == (503, "store")
        one.upstream.down = False
        assert await one.get(key) == b"data"
        one.upstream.down = True
        assert await one.get(key) == b"data"
        assert await one.refused(f"run/objects/{'0' * 64}") == (503, "store")
        one.upstream.down = False
        assert await one.refused(f"run/objects/{'0' * 64}") == (404, "missing")


async def test_a_store_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "FILL_SECONDS", 0.3)
    monkeypatch.setattr(mirrors, "PASS_SECONDS", 0.3)
    async with site(tmp_path) as one:
        key = one.upstream.add(b"data")
        one.upstream.open.clear()
        assert await one.refused(key) == (503, "store")
        assert await one.refused("run/latest") == (503, "store")
        one.upstream.open.set()
        assert await one.get(key) == b"data"


async def test_every_request_needs_the_token(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        key = one.upstream.add(b"data")
        for path in (key, "run/latest", "stats"):
            for token in ("", "Bearer wrong", TOKEN):
                assert await one.refused(path, headers={"Authorization": token}) == (401, "unauthorized")
        refusal = await one.refused("run/leases/a", "PUT", data=b"1", headers={"Authorization": "Bearer x"})
        assert refusal == (401, "unauthorized")
        assert one.upstream.asked == []
        assert one.upstream.list("run/leases") == []


async def test_only_leases_are_taken_and_passed_on(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        for note in (b"one", b"two"):
            assert (await one.ask("run/leases/sampler-1", "PUT", data=note))[0] == 204
            assert one.upstream.read_pointer("run/leases/sampler-1") == note
            assert await one.get("run/leases/sampler-1") == note
        for key in ("run/latest", f"run/objects/{'0' * 64}", "leases/a", "run/leases/a/b", "a/run/leases/b"):
            assert await one.refused(key, "PUT", data=b"1") == (405, "read_only")
        assert await one.refused("run/leases/big", "PUT", data=bytes(5000)) == (413, "too_large")
        assert await one.refused("run/latest", "DELETE") == (405, "http")
        assert one.upstream.list("run") == ["run/leases/sampler-1"]


async def test_a_key_cannot_leave_the_store(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    async with site(tmp_path) as one:
        for key in ("..%2Fsecret", "a/%2e%2e/%2e%2e/secret", ".lock", "a//b", "run%20a", "%2Fetc/passwd"):
            url = aiohttp.client.URL(f"{one.mirror.url}/{key}", encoded=True)
            async with aiohttp.ClientSession(headers=wire.bearer(TOKEN)) as http, http.get(url) as answer:
                assert answer.status == 400
                assert b"not a store key" in await answer.read()
        assert one.upstream.asked == []


async def test_an_object_that_is_larger_than_any_is_not_read(tmp_path: Path) -> None:
    """However much the cache may hold."""
    async with site(tmp_path, 4 * MAX_OBJECT) as one:
        key = f"run/objects/{'0' * 64}"
        one.upstream.put(key, b"")
        os.truncate(tmp_path / "store" / key, MAX_OBJECT + 1)
        assert await one.refused(key) == (502, "corrupt")
        assert (await one.stats())["bytes_fetched"] == 0


async def test_a_mirror_of_a_mirror(tmp_path: Path) -> None:
    async with site(tmp_path) as near:
        key = near.upstream.add(b"data")
        near.upstream.swap_pointer("run/latest", None, b"1")
        near.upstream.asked.clear()
        far = Mirror(open_store(near.mirror.url, token=TOKEN), tmp_path / "far", token=TOKEN, limit_bytes=MIB)
        client = open_store(await far.start("127.0.0.1", 0), token=TOKEN)
        try:
            for _ in range(2):
                assert await asyncio.to_thread(client.get, key, 4) == b"data"
            assert await asyncio.to_thread(client.read_pointer, "run/latest") == b"1"
            assert near.upstream.asked == [key, "run/latest"]
            await asyncio.to_thread(client.write_note, "run/leases/a", b"here")
            assert near.upstream.read_pointer("run/leases/a") == b"here"
        finally:
            await far.close()


PROGRAM = """
import asyncio, sys
from pathlib import Path
from farflung.fleet import mirror, process, wire
process.start_process()
asyncio.run(mirror.serve(mirror.MirrorOptions(sys.argv[1], Path(sys.argv[2]), wire.read_token())))
"""


async def test_the_process_says_where_it_is_and_stops_when_told(tmp_path: Path) -> None:
    store = Upstream(tmp_path / "store")
    key = store.add(b"data")
    environment = os.environ | {wire.TOKEN_VARIABLE: TOKEN}
    command = (sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(tmp_path / "cache"))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            said = json.loads(await process.stdout.readline())
        assert said["role"] == "mirror"
        client = open_store(said["url"], token=TOKEN)
        assert await asyncio.to_thread(client.get, key, 4) == b"data"
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            _, log = await process.communicate()
        assert process.returncode == 0
        assert TOKEN.encode() not in log
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_hanging_store_does_not_keep_the_process(tmp_path: Path) -> None:
    """Its server accepts and says nothing, for longer than anybody waits after SIGTERM."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    asked = asyncio.Event()
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    environment = os.environ | {wire.TOKEN_VARIABLE: TOKEN}
    command = (sys.executable, "-c", PROGRAM, f"http://127.0.0.1:{port}", str(tmp_path / "cache"))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            url = json.loads(await process.stdout.readline())["url"]
            async with aiohttp.ClientSession(headers=wire.bearer(TOKEN)) as http:
                waiting = asyncio.create_task(http.get(f"{url}/run/latest"))
                await asked.wait()
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
                with pytest.raises(aiohttp.ClientError):
                    await waiting
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        server.close()


async def test_a_wrong_store_is_said_before_anything_listens(tmp_path: Path) -> None:
    options = MirrorOptions("ftp://host", tmp_path, TOKEN)
    with pytest.raises(BadInput, match="no store"):
        await serve(options)
    with pytest.raises(BadInput, match="cannot listen"):
        await serve(replace(options, store=str(tmp_path / "store"), host="256.0.0.1"))
    assert TOKEN not in repr(options)


async def test_a_mirror_that_dies_and_comes_back_is_followed(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        key = one.upstream.add(b"data")
        url = one.mirror.url
        client = open_store(url, token=TOKEN)
        assert await asyncio.to_thread(client.get, key, 4) == b"data"
        assert one.mirror._runner is not None
        await sever(one.mirror._runner)
        reading = asyncio.create_task(asyncio.to_thread(client.get, key, 4))
        await asyncio.sleep(0.2)
        await one.mirror.close()
        again = Mirror(one.upstream, tmp_path / "cache", token=TOKEN, limit_bytes=MIB)
        try:
            await again.start("127.0.0.1", int(url.rsplit(":", 1)[1]))
            assert await reading == b"data"
            assert one.upstream.asked == [key]
        finally:
            await again.close()
