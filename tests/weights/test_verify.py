"""Verification: a sound store is sound, and every kind of damage is found, named and mended as it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from farflung.core.errors import BadInput, Corrupt
from farflung.weights import Compactor, FolderStore, Publisher, delta
from farflung.weights.changes import Changes
from farflung.weights.delta import Change, Whole
from farflung.weights.elements import digest
from farflung.weights.history import History, Version
from farflung.weights.manifest import (
    Manifest,
    Part,
    Ref,
    Seal,
    encode_pointer,
    jump_key,
    manifest_key,
    name_part,
    object_key,
    pointer_key,
    read_jump,
    read_part,
)
from farflung.weights.retention import prune
from farflung.weights.schema import Schema
from farflung.weights.store import Store
from farflung.weights.verify import Fault, verify
from tests.weights.published import FORMATS, KEY, RUN, in_folder, policy, spoil, step


def history_of(store: Store, key: bytes | None = KEY) -> History:
    return History(store, RUN, Seal(key))


def faults(store: Store, **options: object) -> tuple[Fault, ...]:
    return verify(history_of(store), **options).faults  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return in_folder(tmp_path / "store")


def test_a_sound_store_has_no_faults_and_no_orphans(store: FolderStore) -> None:
    seen: list[tuple[int, int, str]] = []
    verdict = verify(history_of(store), progress=lambda *step: seen.append(step))
    assert verdict.faults == ()
    assert verdict.orphans == ()
    assert verdict.versions == 7
    assert verdict.jumps == 3 * 4  # to 2, 4 (two) and 6, in three formats
    objects = list((store.root / RUN / "objects").iterdir())
    assert verdict.objects == len(objects)
    assert verdict.nbytes == sum(path.stat().st_size for path in objects)
    assert seen[0] == (0, 21, "bf16, version 0")
    assert seen[-1] == (20, 21, "nvfp4, version 6")


def test_every_object_of_a_run_is_looked_at(store: FolderStore) -> None:
    objects = sorted((store.root / RUN / "objects").iterdir())
    assert len(objects) > 20
    for path in objects:
        kept = path.read_bytes()
        spoil(path)
        found = faults(store)
        assert any(path.name in fault.where and "hash in its name" in fault.what for fault in found), path.name
        path.unlink()
        assert any(path.name in fault.where and "not there" in fault.what for fault in faults(store)), path.name
        path.write_bytes(kept)
    assert faults(store) == ()


def test_what_follows_a_damaged_delta_is_said_to_be_unchecked_up_to_the_next_whole_copy(store: FolderStore) -> None:
    version = history_of(store).find(2)
    part = version.stream("nvfp4").delta[-1]
    (store.root / object_key(RUN, part)).unlink()
    damaged, unchecked = faults(store)
    assert damaged.where == f"object {object_key(RUN, part)}"
    assert "any file whose SHA-256 is its name is right" in damaged.mend
    assert unchecked.where == f"nvfp4 of run {RUN}"
    assert "versions 2-3" in unchecked.what
    assert faults(store, last=3) == ()


def test_the_newest_versions_alone_need_the_whole_copy_before_them(store: FolderStore) -> None:
    assert verify(history_of(store), last=2).versions == 3
    assert verify(history_of(store), last=2).orphans is None
    assert verify(history_of(store), last=4).versions == 7
    for part in history_of(store).find(4).stream("fp8").anchor:
        (store.root / object_key(RUN, part)).unlink()
    assert any("versions 4-6" in fault.what for fault in faults(store, last=1))
    assert not any("not checked" in fault.what for fault in faults(store))
    with pytest.raises(BadInput, match="last 0 versions"):
        verify(history_of(store), last=0)


def test_a_pruned_run_is_sound(store: FolderStore) -> None:
    prune(history_of(store), 2)
    assert verify(history_of(store)).versions == 7, "they are young: somebody may be reading them"
    prune(history_of(store), 2, live_seconds=-1.0)
    verdict = verify(history_of(store))
    assert (verdict.versions, verdict.faults, verdict.orphans) == (3, (), ())


@pytest.mark.parametrize(
    ("number", "lost"),
    [
        (1, "it is not there, though versions that need it are"),
        (3, "it is not there, though versions that need it are"),
        (
            4,
            "it is not there, so nothing leads to what follows it: it was lost, or",
        ),  # nor does anything name an older one
    ],
)
def test_a_manifest_that_is_lost_or_damaged_is_named(store: FolderStore, number: int, lost: str) -> None:
    key = manifest_key(RUN, history_of(store).find(number).ref)
    spoil(store.root / key)
    assert any(fault.where == f"manifest {key}" and "hash" in fault.what for fault in faults(store))
    assert verify(history_of(store)).orphans is None
    (store.root / key).unlink()
    assert any(fault.where == f"manifest {key}" and lost in fault.what for fault in faults(store))


def test_a_pruning_that_was_cut_off_is_named_as_one_and_ended_by_the_next(store: FolderStore) -> None:
    assert prune(history_of(store), 2, live_seconds=-1.0, dry_run=True).floor == 4
    for number in range(4):
        (store.root / manifest_key(RUN, history_of(store).find(number).ref)).unlink()
        found = faults(store)
        if number == 3:
            assert found == ()
            break
        assert "a pruning is at work or was cut off" in found[0].what
        assert "gc ends a pruning" in found[0].mend
    prune(history_of(store), 2, live_seconds=-1.0, orphan_seconds=-1.0)
    verdict = verify(history_of(store))
    assert (verdict.faults, verdict.orphans) == ((), ())


def test_what_was_pruned_since_the_last_look_is_no_fault(store: FolderStore) -> None:
    history = history_of(store)
    assert verify(history).faults == ()
    prune(history_of(store), 2, live_seconds=-1.0)
    assert verify(history).faults == ()


@pytest.mark.parametrize("garbage", [b"", b"\0" * 100, b'{"version": 3}', b"[]"])
def test_a_pointer_of_garbage_is_one_fault(store: FolderStore, garbage: bytes) -> None:
    (store.root / pointer_key(RUN)).write_bytes(garbage)
    (fault,) = faults(store)
    assert fault.where == f"pointer {pointer_key(RUN)}"
    newest = max((store.root / RUN / "manifests").iterdir()).name.rpartition("-")[2]
    assert fault.mend == f"write {encode_pointer(Ref(6, newest)).decode()} to it, and verify again"


def test_another_key_and_no_signature_are_faults(store: FolderStore, tmp_path: Path) -> None:
    (fault,) = verify(history_of(store, b"another key")).faults
    assert "signed with another key" in fault.what
    assert verify(history_of(store, None)).faults == ()
    plain = in_folder(tmp_path / "plain", 2, key=None)
    (fault,) = faults(plain)
    assert "not signed" in fault.what


def test_a_lease_of_garbage_is_named_and_gone_when_it_is_removed(store: FolderStore) -> None:
    store.write_note(f"{RUN}/leases/ok", b'{"version": 3}')
    store.write_note(f"{RUN}/leases/odd", b"nonsense")
    (fault,) = faults(store)
    assert (fault.where, fault.mend) == (f"lease {RUN}/leases/odd", "remove it")
    store.delete(f"{RUN}/leases/odd")
    assert faults(store) == ()


def test_orphans_are_named(store: FolderStore) -> None:
    part = name_part(b"of a publisher that died")
    store.put(object_key(RUN, part), b"of a publisher that died")
    store.put(jump_key(RUN, "bf16", 7, 3), b"nobody looks for it")
    verdict = verify(history_of(store))
    assert verdict.orphans == (jump_key(RUN, "bf16", 7, 3), object_key(RUN, part))
    assert verdict.faults == ()
    assert verify(history_of(store), orphans=False).orphans is None


def test_a_damaged_jump_is_mended_by_removing_it_and_compacting(store: FolderStore) -> None:
    key = jump_key(RUN, "fp8", 4, 4)
    jump = read_jump(store, RUN, "fp8", 4, 4, Seal(KEY))
    assert jump is not None
    spoil(store.root / object_key(RUN, jump.delta[0]))
    (fault,) = faults(store)
    assert fault.where == f"object {object_key(RUN, jump.delta[0])}"
    assert fault.mend.startswith("remove ")
    assert any(jump_key(RUN, format, 4, 4) in fault.mend for format in FORMATS)  # they may share it
    store.delete(key)
    store.delete(object_key(RUN, jump.delta[0]))
    Compactor(store, RUN, key=KEY).step()
    verdict = verify(history_of(store))
    assert (verdict.faults, verdict.orphans, verdict.jumps) == ((), (), 12)


def put_jump(store: FolderStore, **changes: object) -> None:
    """Sign another jump where one of the run's lies."""
    jump = read_jump(store, RUN, "bf16", 2, 2, Seal(KEY))
    assert jump is not None
    key = jump_key(RUN, "bf16", 2, 2)
    store.delete(key)
    store.put(key, Seal(KEY).sign(replace(jump, **changes).encode()))  # type: ignore[arg-type]


def test_a_jump_that_leads_elsewhere_is_found_though_it_is_signed(store: FolderStore) -> None:
    jump = read_jump(store, RUN, "bf16", 2, 2, Seal(KEY))
    other = read_jump(store, RUN, "bf16", 6, 2, Seal(KEY))
    assert jump is not None
    assert other is not None
    for changes, what in (
        ({"before": "0" * 64}, "other weights than those of versions 0 and 2"),
        ({"root": other.root}, "other weights than those of versions 0 and 2"),
        ({"delta": other.delta}, "does not lead from version 0 to version 2"),
        ({"delta": jump.delta[:-1]}, "does not lead from version 0 to version 2"),
    ):
        put_jump(store, **changes)
        (fault,) = faults(store)
        assert what in fault.what
        store.delete(jump_key(RUN, "bf16", 2, 2))
        store.put(jump_key(RUN, "bf16", 2, 2), Seal(KEY).sign(jump.encode()))
    assert faults(store) == ()


def republish(store: FolderStore, change: Callable[[Version], Manifest]) -> None:
    """Let the pointer name another manifest for the newest version, rightly signed: a publisher that was wrong."""
    newest = history_of(store).newest()
    assert newest is not None
    raw = Seal(KEY).sign(change(newest).encode())
    ref = Ref(newest.number, name_part(raw).sha256)
    store.put(manifest_key(RUN, ref), raw)
    (store.root / pointer_key(RUN)).write_bytes(encode_pointer(ref))


def with_object(
    store: FolderStore, version: Version, make: Callable[[list[Change]], list[Change]], *, whole: bool
) -> Manifest:
    """The version's manifest with the first object of its BF16 delta or whole copy made anew."""
    stream = version.stream("bf16")
    parts = stream.anchor if whole else stream.delta
    schema = Schema.decode(read_part(store, RUN, stream.schema), "schema")
    changes = make(delta.decode(read_part(store, RUN, parts[0]), schema, where="object"))
    raw = delta.encode(changes, schema).raw
    part: Part = name_part(raw)
    store.put(object_key(RUN, part), raw)
    made = (part, *parts[1:])
    stream = replace(stream, anchor=made) if whole else replace(stream, delta=made)
    return replace(version.manifest, streams={**version.manifest.streams, "bf16": stream})


def test_a_delta_that_does_not_give_its_hashes_is_found_by_tensor(store: FolderStore) -> None:
    def make(changes: list[Change]) -> list[Change]:
        first = changes[0]
        assert isinstance(first.content, Changes)
        steps = first.content.steps.copy()
        steps[0] += 1
        return [replace(first, content=Changes(first.content.positions, steps)), *changes[1:]]

    republish(store, lambda newest: with_object(store, newest, make, whole=False))
    damaged, unchecked = faults(store)
    assert "tensor model.embed_tokens.weight" in damaged.where
    assert "do not give the hash" in damaged.what
    assert "version 6," in unchecked.what


def test_a_delta_that_leads_to_other_weights_is_found(store: FolderStore) -> None:
    republish(store, lambda newest: with_object(store, newest, lambda changes: changes[1:], whole=False))
    assert any("leads to other weights than those published" in fault.what for fault in faults(store))


def test_a_delta_that_starts_elsewhere_is_found(store: FolderStore) -> None:
    def change(newest: Version) -> Manifest:
        stream = replace(newest.stream("bf16"), before="0" * 64)
        return replace(newest.manifest, streams={**newest.manifest.streams, "bf16": stream})

    republish(store, change)
    assert any("starts at other weights than version 5" in fault.what for fault in faults(store))


@pytest.mark.parametrize("kind", ["bits", "hash", "missing", "twice"])
def test_a_whole_copy_that_is_not_the_version_is_found(tmp_path: Path, kind: str) -> None:
    store = in_folder(tmp_path, 5, formats=("bf16",), jumps=False)  # the newest version, 4, is whole

    def make(changes: list[Change]) -> list[Change]:
        first, *rest = changes
        assert isinstance(first.content, Whole)
        bits = first.content.bits + np.uint16(1)
        match kind:
            case "bits":
                return [replace(first, content=Whole(bits)), *rest]
            case "hash":
                return [replace(first, content=Whole(bits), after=digest(bits)), *rest]
            case "missing":
                return rest
        return changes

    def change(newest: Version) -> Manifest:
        manifest = with_object(store, newest, make, whole=True)
        stream = manifest.streams["bf16"]
        return replace(
            manifest,
            streams={
                "bf16": replace(
                    stream, anchor=tuple(sorted(stream.anchor * (2 if kind == "twice" else 1), key=lambda p: p.first))
                )
            },
        )

    republish(store, change)
    said = {
        "bits": "bits do not have the hash",
        "hash": "differs from what the delta of version 4 leads to",
        "missing": "no object holds tensor model.embed_tokens.weight",
        "twice": "a second time",
    }
    assert any(said[kind] in fault.what for fault in faults(store)), faults(store)
    if kind == "hash":
        assert any("holds other weights than those published" in fault.what for fault in faults(store, last=1))


def test_what_is_pruned_or_published_meanwhile_is_no_fault(tmp_path: Path) -> None:
    """The store of a run that goes on: everything before version 4 vanishes when version 2 is looked at."""
    store = in_folder(tmp_path)

    def progress(done: int, total: int, what: str) -> None:
        if what == "bf16, version 2":
            prune(history_of(store), 1, live_seconds=-1.0)
            publisher = Publisher(store, RUN, formats=FORMATS, key=KEY)
            publisher.resume()
            publisher.publish(7, policy())

    verdict = verify(history_of(store), progress=progress)
    assert verdict.faults == ()
    assert verdict.orphans == ()


def test_a_mirror_that_cannot_list_is_verified_all_the_same(store: FolderStore) -> None:
    class Unlisted(FolderStore):
        def list(self, folder: str) -> list[str]:
            raise BadInput("cannot list")

    verdict = verify(history_of(Unlisted(store.root)), orphans=False)
    assert (verdict.faults, verdict.versions, verdict.orphans) == ((), 7, None)


def test_a_format_that_comes_and_goes_is_followed_where_it_is(tmp_path: Path) -> None:
    store, weights = FolderStore(tmp_path), policy()
    for version, formats in enumerate((("bf16",), ("bf16", "fp8"), ("bf16", "fp8"), ("bf16",), ("bf16",))):
        publisher = Publisher(store, RUN, formats=formats, key=KEY)
        publisher.resume()
        publisher.publish(version, weights)
        step(weights, version)
    assert verify(history_of(store)).faults == ()
    part = history_of(store).find(2).stream("fp8").delta[-1]
    (store.root / object_key(RUN, part)).unlink()
    assert any(fault.where == f"fp8 of run {RUN}" and "version 2," in fault.what for fault in faults(store))


def test_an_empty_run_and_a_store_of_garbage(tmp_path: Path) -> None:
    verdict = verify(history_of(FolderStore(tmp_path / "nothing")))
    assert (verdict.versions, verdict.faults, verdict.orphans) == (0, (), ())
    store = in_folder(tmp_path / "store", 3)
    draw = np.random.default_rng(0)
    for path in (store.root / RUN).rglob("*"):
        if path.is_file() and path.name != "latest":
            path.write_bytes(draw.bytes(path.stat().st_size))
    (fault,) = faults(store)
    assert "hash" in fault.what
    (store.root / pointer_key(RUN)).write_bytes(encode_pointer(Ref(1, "0" * 64)))
    (fault,) = faults(store)
    assert "whose manifest is not there" in fault.what


def test_corrupt_manifests_raise_nothing(store: FolderStore) -> None:
    for path in (store.root / RUN / "manifests").iterdir():
        if not path.name.startswith("00000006"):
            spoil(path)
    found = verify(history_of(store))
    assert found.versions == 1
    assert len([fault for fault in found.faults if fault.where.startswith("manifest")]) >= 2
    with pytest.raises(Corrupt):
        history_of(store).find(5)
