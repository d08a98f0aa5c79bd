"""farflung weights compact: jumps, once and following."""

from __future__ import annotations

import signal
from pathlib import Path

from farflung.weights import FolderStore
from farflung.weights.manifest import is_signed
from tests.cli.weights.kit import SECONDS, Run, process, read_line
from tests.weights.published import RUN, in_folder, publish, spoil


def test_compact_makes_signed_jumps_once(weights: Run, tmp_path: Path, token: Path) -> None:
    store = in_folder(tmp_path / "store", 5, jumps=False)
    code, shown, _ = weights("compact", store.root, "--key-file", token, "--levels", 1)
    assert code == 0
    assert "bf16: 0 to 2, " in shown
    assert shown.endswith("\n6 jumps made\n")
    assert all(is_signed(store.get(key, 1 << 20)) for key in store.list(f"{RUN}/jumps"))
    assert weights("compact", store.root, "--key-file", token)[1].endswith("\n3 jumps made\n")
    assert weights("compact", store.root, "--key-file", token)[1] == "0 jumps made\n"


def test_compact_and_ls_say_what_they_cannot_read_and_go_on(weights: Run, store: FolderStore, token: Path) -> None:
    for key in store.list(f"{RUN}/jumps"):
        if not key.endswith("/00000002-2"):
            store.delete(key)
    spoil(store.root / f"{RUN}/jumps/bf16/00000002-2")
    code, shown, _ = weights("compact", store.root, "--key-file", token)
    assert code == 1
    assert f"\nskipped: jump {RUN}/jumps/bf16/00000002-2: it was signed with another key, or changed since" in shown
    assert "bf16: 0 to 4, " in shown
    assert shown.endswith("\n9 jumps made, 1 faults\n")
    code, shown, said = weights("ls", store.root, "--key-file", token)
    assert code == 0
    assert "newest version 6" in shown
    assert f"farflung: jump {RUN}/jumps/bf16/00000002-2: " in said


def test_compact_follows_until_it_is_stopped(tmp_path: Path, token: Path) -> None:
    store = in_folder(tmp_path / "store", 2, jumps=False, formats=("bf16",))
    with process("compact", store.root, "--key-file", token, "--follow", "--interval", "0.05") as started:
        publish(store, 3, formats=("bf16",), jumps=False, resume=True)
        assert read_line(started).startswith("bf16: 0 to 2, ")
        started.send_signal(signal.SIGINT)
        out, error = started.communicate(timeout=SECONDS)
        assert (started.returncode, out, error) == (0, "stopped; every jump that was named is stored\n", "")


def test_following_outlives_a_store_that_fails_for_a_while(tmp_path: Path, token: Path) -> None:
    store = in_folder(tmp_path / "store", 3, jumps=False, formats=("bf16",))
    pointer, kept = store.root / RUN / "latest", tmp_path / "kept"
    with process("compact", store.root, "--key-file", token, "--follow", "--interval", "0.05") as started:
        assert read_line(started).startswith("bf16: 0 to 2, ")
        pointer.rename(kept)
        pointer.symlink_to("latest")  # a loop, which no one can open
        assert started.stderr is not None
        assert "cannot read: Too many levels of symbolic links" in started.stderr.readline()
        kept.replace(pointer)
        publish(store, 5, formats=("bf16",), jumps=False, resume=True)
        assert read_line(started).startswith("bf16: 2 to 4, ")


def test_following_ends_after_its_time(weights: Run, store: FolderStore, token: Path) -> None:
    code, _, said = weights("compact", store.root, "--key-file", token, "--follow", "--minutes", 0)
    assert (code, said) == (0, "")
