"""The mirror's cache: bounded, never evicted under a reader, hashed again after a restart, at peace with a full disk."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import aiohttp
import pytest

from farflung.core.errors import BadInput
from farflung.fleet import mirror as mirrors
from farflung.fleet.mirror import Mirror
from farflung.weights import FolderStore
from tests.fleet.kit import TOKEN
from tests.fleet.site import MIB, cached, site


async def test_the_least_recently_used_objects_make_room(tmp_path: Path) -> None:
    async with site(tmp_path, limit=1000) as one:
        keys = [one.upstream.add(bytes([i]) * 300) for i in range(5)]
        for key in (*keys[:3], keys[0], keys[3]):
            await one.get(key)
        assert cached(tmp_path) == sorted(keys[i].rsplit("/", 1)[1] for i in (0, 2, 3))
        asked = len(one.upstream.asked)
        for i in (0, 2, 3):
            await one.get(keys[i])
        assert len(one.upstream.asked) == asked
        await one.get(keys[1])
        assert len(one.upstream.asked) == asked + 1
        stats = await one.stats()
        assert (stats["cached_bytes"], stats["cached_objects"]) == (900, 3)


async def test_an_object_larger_than_the_cache_is_refused(tmp_path: Path) -> None:
    async with site(tmp_path, limit=1000) as one:
        assert await one.refused(one.upstream.add(bytes(1001))) == (502, "corrupt")
        assert len(await one.get(one.upstream.add(bytes(1000)))) == 1000


async def test_what_is_being_sent_is_not_evicted(tmp_path: Path) -> None:
    async with site(tmp_path, limit=40 * MIB) as one:
        large, other = one.upstream.add(bytes(32 * MIB)), one.upstream.add(b"\1" * 20 * MIB)
        await one.ask(large, "HEAD")
        async with one.http.get(f"/{large}") as answer:
            await answer.content.readexactly(1)
            assert len(await one.get(other)) == 20 * MIB
            assert cached(tmp_path) == [large.rsplit("/", 1)[1]]
            assert (await one.stats())["uncached"] == 1
            rest = await answer.read()
            assert len(rest) == 32 * MIB - 1
        assert len(await one.get(other)) == 20 * MIB
        assert cached(tmp_path) == [other.rsplit("/", 1)[1]]


async def test_a_client_that_stops_reading_frees_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "SEND_SECONDS", 0.3)
    async with site(tmp_path, limit=40 * MIB) as one:
        large, other = one.upstream.add(bytes(32 * MIB)), one.upstream.add(b"\1" * 20 * MIB)
        await one.ask(large, "HEAD")
        async with one.http.get(f"/{large}") as answer:
            await answer.content.readexactly(1)
            await asyncio.sleep(1.0)
            await one.get(other)
            assert cached(tmp_path) == [other.rsplit("/", 1)[1]]
            with pytest.raises(aiohttp.ClientError):
                await answer.read()


async def test_a_restart_keeps_the_cache_and_hashes_it_again(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        good, bad, gone = (one.upstream.add(word * 100) for word in (b"good", b"bad!", b"gone"))
        for key in (good, bad, gone):
            await one.get(key)
    where = tmp_path / "cache"
    (where / bad.rsplit("/", 1)[1]).write_bytes(b"evil" * 100)
    (where / ".part-0123").write_bytes(b"half")
    (where / "notes.txt").write_bytes(b"someone's")
    async with site(tmp_path) as one:
        assert (await one.stats())["cached_objects"] == 3
        (where / gone.rsplit("/", 1)[1]).unlink()
        assert [await one.get(good) for _ in range(2)] == [b"good" * 100] * 2
        assert one.upstream.asked == []
        assert await one.get(bad) == b"bad!" * 100
        assert await one.get(gone) == b"gone" * 100
        assert one.upstream.asked == [bad, gone]
        assert cached(tmp_path) == sorted([*(key.rsplit("/", 1)[1] for key in (good, bad, gone)), "notes.txt"])
        stats = await one.stats()
        assert (stats["hits"], stats["misses"], stats["cached_bytes"]) == (2, 2, 1200)


async def test_a_restart_with_less_room_drops_what_was_used_least(tmp_path: Path) -> None:
    async with site(tmp_path) as one:
        keys = [one.upstream.add(bytes([i]) * 300) for i in range(3)]
        for key in keys:
            await one.get(key)
        for i, key in enumerate((keys[1], keys[2], keys[0])):
            os.utime(tmp_path / "cache" / key.rsplit("/", 1)[1], (1000 + i, 1000 + i))
    async with site(tmp_path, limit=600):
        assert cached(tmp_path) == sorted(keys[i].rsplit("/", 1)[1] for i in (0, 2))


async def test_a_file_that_shrinks_or_goes_under_the_mirror_is_fetched_again(tmp_path: Path) -> None:
    async with site(tmp_path, limit=8 * MIB) as one:
        key = one.upstream.add(os.urandom(3 * MIB))
        whole = await one.get(key)
        file = tmp_path / "cache" / key.rsplit("/", 1)[1]
        file.unlink()
        assert await one.get(key) == whole
        assert one.upstream.asked == [key, key]
        os.truncate(file, 2 * MIB)
        assert await one.get(key) == whole
        assert one.upstream.asked == [key] * 3


async def test_a_file_that_shrinks_while_it_is_sent_breaks_the_connection(tmp_path: Path) -> None:
    async with site(tmp_path, limit=40 * MIB) as one:
        data = os.urandom(32 * MIB)
        key = one.upstream.add(data)
        await one.ask(key, "HEAD")
        async with one.http.get(f"/{key}") as answer:
            await answer.content.readexactly(1)
            os.truncate(tmp_path / "cache" / key.rsplit("/", 1)[1], 2 * MIB)
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        assert await one.get(key) == data
        assert one.upstream.asked == [key, key]


@pytest.mark.parametrize("asked", [{}, {"Range": f"bytes={2 * MIB + 5}-{2 * MIB + 9}"}], ids=["whole", "range"])
async def test_a_file_that_decays_under_the_mirror_is_never_sent_and_fetched_again(
    tmp_path: Path, asked: dict[str, str]
) -> None:
    async with site(tmp_path, limit=40 * MIB) as one:
        data = os.urandom(3 * MIB + 17)
        key = one.upstream.add(data)
        assert await one.get(key) == data
        with open(tmp_path / "cache" / key.rsplit("/", 1)[1], "r+b") as file:
            file.seek(2 * MIB + 500)
            file.write(bytes([data[2 * MIB + 500] ^ 1]))
        with pytest.raises(aiohttp.ClientError):
            async with one.http.get(f"/{key}", headers=asked) as answer:
                await answer.read()
        assert await one.get(key) == data
        assert one.upstream.asked == [key, key]
        assert (await one.stats())["rejected"] == 1


async def test_a_full_disk_is_survived(tmp_path: Path) -> None:
    """A limit on file size stops a write half way, as a full disk does."""
    async with site(tmp_path) as one:
        key = one.upstream.add(bytes(5000))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            for _ in range(2):
                assert await one.get(key) == bytes(5000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        stats = await one.stats()
        assert (stats["uncached"], stats["misses"], stats["cached_bytes"]) == (2, 2, 0)
        assert cached(tmp_path) == []
        assert await one.get(key) == bytes(5000)
        assert (await one.stats())["cached_bytes"] == 5000


async def test_a_cache_belongs_to_one_mirror(tmp_path: Path) -> None:
    async with site(tmp_path):
        with pytest.raises(BadInput, match="another mirror"):
            Mirror(FolderStore(tmp_path), tmp_path / "cache", token=TOKEN, limit_bytes=1)
    Mirror(FolderStore(tmp_path), tmp_path / "cache", token=TOKEN, limit_bytes=1)._cache.close()
    with pytest.raises(BadInput, match="0 bytes"):
        Mirror(FolderStore(tmp_path), tmp_path / "cache", token=TOKEN, limit_bytes=0)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadInput, match="cannot use the cache"):
        Mirror(FolderStore(tmp_path), tmp_path / "file", token=TOKEN, limit_bytes=1)
