"""farflung weights ls, verify and gc: what is there, whether it is sound, and what may go."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from farflung.weights import FolderStore, Subscriber, open_store
from farflung.weights.history import History
from farflung.weights.manifest import Seal, object_key
from tests.cli.weights.kit import Run, write
from tests.weights.clouds import SERVERS
from tests.weights.published import KEY, RUN, publish, spoil
from tests.weights.servers import BUCKET, use


def test_ls_shows_what_versions_cost_and_who_holds_them(weights: Run, store: FolderStore, token: Path) -> None:
    Subscriber(store, RUN, key=KEY, name="sampler-0").fetch(5)
    code, shown, _ = weights("ls", store.root, "--key-file", token)
    assert code == 0
    assert "run r1, newest version 6, signed; leases: sampler-0 at 5" in shown
    assert len([line for line in shown.splitlines() if " nvfp4 " in line]) == 7
    code, shown, _ = weights("ls", store.root, "--key-file", token, "--last", 3, "--json")
    data = json.loads(shown)
    assert (data["run"], data["newest"], data["signed"], data["leases"]) == (RUN, 6, True, {"sampler-0": 5})
    assert [version["version"] for version in data["versions"]] == [4, 5, 6]
    first = data["versions"][0]["formats"]
    assert set(first) == {"bf16", "fp8", "nvfp4"}
    for entry in first.values():
        assert 0 < entry["changed"] < entry["elements"]
        assert entry["delta_bytes"] < entry["anchor_bytes"]
        assert set(entry["jumps"]) == {"2", "4"}
    assert data["versions"][1]["formats"]["bf16"]["jumps"] == {}
    assert len(json.loads(weights("ls", store.root, "--no-key", "--last", 0, "--json")[1])["versions"]) == 7


def test_verify_says_that_all_is_well_or_what_is_not(weights: Run, store: FolderStore, token: Path) -> None:
    code, shown, _ = weights("verify", store.root, "--key-file", token)
    assert code == 0
    assert "run r1: 7 versions, 12 jumps," in shown
    assert "; 0 faults, 0 orphans" in shown
    store.put(f"{RUN}/objects/{'0' * 64}", b"nobody's")
    damaged = History(store, RUN, Seal(KEY)).find(2).stream("nvfp4").delta[-1]
    spoil(store.root / object_key(RUN, damaged))
    code, shown, _ = weights("verify", store.root, "--no-key")
    assert code == 1
    assert f"fault   object {object_key(RUN, damaged)}: its bytes do not have the hash in its name\n        → " in shown
    assert f"orphan  {RUN}/objects/{'0' * 64}" in shown
    assert "1 orphans\nsignatures were not looked at" in shown
    for path in (store.root / RUN / "objects").iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    (store.root / RUN / "latest").write_bytes(b"\0\xff" * 40)
    code, shown, _ = weights("verify", store.root, "--key-file", token)
    assert code == 1
    assert "fault   pointer r1/latest: not a pointer" in shown
    assert "orphans not looked for" in shown


def test_verify_with_another_key_is_a_fault(weights: Run, store: FolderStore, tmp_path: Path) -> None:
    code, shown, _ = weights("verify", store.root, "--key-file", write(tmp_path / "other", "another-word"))
    assert code == 1
    assert "signed with another key, or changed since\n        → publisher and subscribers need the same key" in shown


def test_gc_says_what_would_go_and_lets_it_go(weights: Run, store: FolderStore, token: Path) -> None:
    keys = set(store.list(RUN))
    code, shown, _ = weights("gc", store.root, "--key-file", token, "--keep", 2, "--live-seconds", 0, "--dry-run")
    assert code == 0
    assert set(store.list(RUN)) == keys
    would = shown.replace("would remove", "removed")
    code, shown, _ = weights("gc", store.root, "--key-file", token, "--keep", 2, "--live-seconds", 0)
    assert (code, shown) == (0, would)
    assert "removed 4 versions, 9 jumps, " in shown
    assert "the oldest version left is 4" in shown
    gone = keys - set(store.list(RUN))
    assert f"{len([key for key in gone if '/objects/' in key])} objects, 0 leases" in shown
    assert weights("verify", store.root, "--key-file", token)[0] == 0
    code, _, said = weights("materialize", store.root, 1, "--key-file", token, "--out", store.root.parent / "out")
    assert code == 2
    assert "version 1 was pruned" in said


def test_gc_lets_orphans_be_for_some_hours(weights: Run, store: FolderStore, token: Path) -> None:
    orphan = f"{RUN}/objects/{'0' * 64}"
    store.put(orphan, b"of a publisher that died")
    os.utime(store.root / orphan, (0, time.time() - 3 * 3600))
    gc = ("gc", store.root, "--key-file", token, "--keep", 99)
    assert "0 versions, 0 jumps, 0 objects" in weights(*gc)[1]
    assert "0 versions, 0 jumps, 0 objects" in weights(*gc, "--orphan-hours", 4)[1]
    assert "0 versions, 0 jumps, 1 objects" in weights(*gc, "--orphan-hours", 2)[1]
    assert not store.exists(orphan)


def test_ls_shows_what_lies_above_a_damaged_manifest(weights: Run, store: FolderStore, token: Path) -> None:
    (key,) = (key for key in store.list(f"{RUN}/manifests") if "/00000004-" in key)
    spoil(store.root / key)
    code, shown, said = weights("ls", store.root, "--key-file", token)
    assert code == 1
    assert [line.split()[0] for line in shown.splitlines()[1:-1] if "bf16" in line] == ["5", "6"]
    assert f"farflung: manifest {key}: " in said
    assert said.endswith("versions before it are not shown\n")


@pytest.mark.parametrize("scheme", SERVERS)
def test_a_store_in_a_bucket_is_looked_after_too(
    weights: Run, token: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str
) -> None:
    with SERVERS[scheme]() as endpoint:
        use(monkeypatch, scheme, endpoint)
        url = f"{scheme}://{BUCKET}/cli"
        publish(open_store(url), 4)
        code, shown, _ = weights("ls", url, "--key-file", token)
        assert code == 0
        assert "run r1, newest version 3, signed" in shown
        code, shown, _ = weights("verify", url, "--key-file", token)
        assert code == 0
        assert "0 faults, 0 orphans" in shown
        assert weights("materialize", url, 1, "--key-file", token, "--out", tmp_path / "out")[0] == 0
        bucket, orphan = open_store(url), f"{RUN}/objects/{'0' * 64}"
        jumps = bucket.list(f"{RUN}/jumps")
        for lost in jumps:
            bucket.delete(lost)
        assert weights("compact", url, "--key-file", token)[0] == 0
        assert bucket.list(f"{RUN}/jumps") == jumps != []
        bucket.put(orphan, b"of no version")
        bucket.put(f"{RUN}/objects/{'1' * 64}", b"of no version")
        time.sleep(2.1)  # clouds tell times in whole seconds
        code, shown, _ = weights("gc", url, "--key-file", token, "--keep", 1, "--orphan-hours", 0)
        assert code == 0
        assert "0 versions, 0 jumps, 2 objects" in shown
        assert not bucket.exists(orphan)
        assert weights("verify", url, "--key-file", token)[0] == 0
        code, _, said = weights("ls", f"{scheme}://no-such-bucket/x")
        assert code == 2
        assert "no such bucket" in said


def test_a_run_whose_pointer_is_gone_is_found_by_its_manifests(weights: Run, store: FolderStore, token: Path) -> None:
    latest = store.root / RUN / "latest"
    right = latest.read_bytes()
    latest.unlink()
    for given in ((), ("--run-id", RUN)):
        code, shown, _ = weights("verify", store.root, "--key-file", token, *given)
        assert code == 1
        assert f"fault   pointer {RUN}/latest: it names nothing, but version 6 is there as well" in shown
        assert f"→ write {right.decode()} to it, and verify again" in shown
    code, _, said = weights("verify", store.root)
    assert code == 2
    assert "the run is signed" in said
    for action in (["gc", "--keep", 1], ["ls"], ["compact"]):
        code, _, said = weights(action[0], store.root, "--key-file", token, *action[1:])
        assert code == 2
        assert "it is not there, but versions are\n" in said
        assert "farflung weights verify" in said
