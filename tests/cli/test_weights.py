"""farflung weights: real stores, real mirrors, and one clear error for each thing that is asked for wrongly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from farflung.cli.main import main
from farflung.cli.weights import ACTIONS
from farflung.config import load_recipe
from farflung.run.workspace import Workspace
from farflung.weights import FolderStore, StoreError, Subscriber, open_store
from farflung.weights.history import History
from farflung.weights.manifest import Seal, derive_key, is_signed, object_key
from farflung.weights.objects import MirrorStore
from tests.weights.published import KEY, RUN, TOKEN, in_folder, publish, spoil
from tests.weights.servers import BUCKET, s3_server, use_s3

SECONDS = 60.0
RECIPE = Path(__file__).parents[2] / "src/farflung/assets/recipes/quickstart.toml"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def weights(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """``farflung weights ...`` here: exit code, stdout, stderr."""
    monkeypatch.delenv("FARFLUNG_TOKEN", raising=False)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*argv: object) -> tuple[int, str, str]:
        code = main(["weights", *map(str, argv)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """A run of seven versions, signed."""
    return in_folder(tmp_path / "store")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.fixture
def own_run(tmp_path: Path) -> Workspace:
    """A run's folder whose trainer has published."""
    Workspace.create(tmp_path / "run", load_recipe(RECIPE))
    space = Workspace.open(tmp_path / "run")
    publish(FolderStore(space.store), 3, run=space.run_id, key=derive_key(space.token))
    return space


@contextmanager
def process(*argv: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """``farflung weights ...`` in a process of its own, which is killed at the end, or when it takes too long."""
    command = [sys.executable, "-u", "-m", "farflung.cli.main", "weights", *map(str, argv)]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    too_late = threading.Timer(SECONDS, started.kill)
    too_late.start()
    try:
        yield started
    finally:
        too_late.cancel()
        started.kill()
        started.communicate()


def read_line(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline()


def test_every_action_explains_itself(weights: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ACTIONS:
        with pytest.raises(SystemExit) as end:
            main(["weights", action, "--help"])
        assert not end.value.code
        shown = capsys.readouterr().out
        assert f"usage: farflung weights {action}" in shown
        assert f"\nexamples:\n  farflung weights {action}" in shown
        assert action in weights()[1]


@pytest.mark.parametrize("action", ["ls", "verify", "gc --keep 1", "compact", "materialize --out x", "serve --cache x"])
@pytest.mark.parametrize("where", ["{} {}", "--store {} {}"])
def test_a_store_that_is_not_there(weights: Run, token: Path, tmp_path: Path, action: str, where: str) -> None:
    name, *rest = action.split()
    given = where.format(tmp_path / "nowhere", 0 if name == "materialize" else "").split()
    code, _, said = weights(name, *given, *rest, "--token-file", token)
    assert code == 2
    assert f"{tmp_path / 'nowhere'}: no such folder\n  give a store's folder or URL" in said
    assert not (tmp_path / "nowhere").exists()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["lss"], "weights: unknown action 'lss'\n  did you mean 'ls'?"),
        (["ls"], "weights ls: a store is needed\n  farflung weights ls STORE"),
        (["ls", "a", "--store", "b"], "weights ls: two stores are given: a and b"),
        (["ls", "{store}", "--last", "-1"], "--last: -1 is out of range\n  at least 0"),
        (["ls", "{store}", "--lst", "1"], "unknown argument '--lst'\n  did you mean '--last'?"),
        (["ls", "ftp://x"], "no store can be opened at 'ftp://x'"),
        (["ls", "{store}"], "run r1: the run is signed, and there is no key to check it with\n  give --key-file FILE"),
        (["ls", "{store}", "--key-file", "{none}"], "cannot read the token: No such file"),
        (["ls", "{store}", "--key-file", "{empty}"], "no token"),
        (["ls", "{store}", "--key-file", "{other}"], "signed with another key"),
        (["ls", "{store}", "--key-file", "{other}", "--no-key"], "--key-file and --no-key are given"),
        (["ls", "{store}", "--run-id", "r2"], "no run 'r2' has published here\n  did you mean 'r1'? runs here: r1"),
        (["ls", "{store}", "--run-id", "a/b"], "'a/b' is not the name of a run"),
        (["ls", "{other}"], "the store is not a folder"),
        (["ls", "{empty_folder}"], "no run has published here"),
        (["verify", "{store}", "--last", "0"], "--last: 0 is out of range"),
        (["verify", "{store}"], "there is no key to check it with"),
        (["gc", "{store}"], "the following arguments are required: --keep"),
        (["gc", "{store}", "--keep", "0", "--no-key"], "--keep: 0 is out of range"),
        (["gc", "{store}", "--keep", "1"], "there is no key to check it with"),
        (["gc", "{store}", "--keep", "1", "--live-seconds", "nan"], "--live-seconds: nan is out of range"),
        (["gc", "{store}", "--keep", "1", "--key-file", "{other}"], "signed with another key"),
        (["compact", "{store}", "--no-key"], "there is no key to check it with\n  give --key-file FILE"),
        (["compact", "{store}", "--key-file", "{other}"], "signed with another key"),
        (["compact", "{store}", "--key-file", "{token}", "--levels", "0"], "0 levels; 1 to 30 make sense"),
        (["compact", "{store}", "--interval", "0"], "--interval: 0 is out of range"),
        (["materialize", "{store}", "--out", "x"], "a version is needed\n  farflung weights materialize STORE VERSION"),
        (["materialize", "{store}", "newest", "--out", "x"], "'newest' is not a version"),
        (["materialize", "{store}", "-1", "--out", "x"], "'-1' is not a version"),
        (["materialize", "{store}", "0"], "the following arguments are required: --out"),
        (["materialize", "{store}", "0", "--out", "{out}"], "there is no key to check it with"),
        (["materialize", "{store}", "0", "--out", "{out}", "--no-key", "--format", "int4"], "invalid choice: 'int4'"),
        (["materialize", "{store}", "0", "--out", "{out}", "--no-key", "--format", "mxfp4"], "not published as 'mxfp4'"),
        (["materialize", "{store}", "7", "--out", "{out}", "--no-key"], "version 7 does not exist; the newest is 6"),
        (["materialize", "{store}", "0", "--out", "{full}", "--no-key"], "the folder is not empty; nothing was written"),
        (["materialize", "{store}", "0", "--out", "{other}", "--no-key"], "it is a file"),
        (["materialize", "{store}", "0", "--out", "{out}", "--no-key", "--model", "{full}"], "no config.json"),
        (["materialize", "{store}", "0", "--out", "{out}", "--no-key", "--shard-gb", "inf"], "--shard-gb: inf is out"),
        (["serve", "{store}", "--token-file", "{token}"], "the following arguments are required: --cache"),
        (["serve", "{store}", "--cache", "{out}"], "no token"),
        (["serve", "{store}", "--cache", "{out}", "--token-file", "{token}", "--limit-gb", "0"], "--limit-gb: 0 is out"),
        (["serve", "{store}", "--cache", "{other}", "--token-file", "{token}"], "{other}"),
        (["serve", "{store}", "--cache", "{out}", "--token-file", "{token}", "--port", "99999"], "cannot listen"),
    ],
)  # fmt: skip
def test_what_is_asked_for_wrongly_gets_one_clear_error(
    weights: Run, store: FolderStore, token: Path, tmp_path: Path, argv: list[str], said: str
) -> None:
    (tmp_path / "full").mkdir()
    write(tmp_path / "full" / "mine", "precious")
    (tmp_path / "empty_folder").mkdir()
    names = {
        "store": store.root, "token": token, "other": write(tmp_path / "other", "another-word"),
        "empty": write(tmp_path / "empty", ""), "empty_folder": tmp_path / "empty_folder", "none": tmp_path / "none",
        "out": tmp_path / "out", "full": tmp_path / "full",
    }  # fmt: skip
    code, _, error = weights(*(word.format(**names) for word in argv))
    assert code == 2
    assert error.startswith("farflung: ")
    assert said.format(**names) in error
    assert "Traceback" not in error
    assert TOKEN not in error
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_store_of_several_runs_wants_one_named(weights: Run, store: FolderStore, token: Path) -> None:
    publish(store, 1, run="r2", key=None)
    (store.root / "notes").mkdir()
    code, _, said = weights("ls", store.root)
    assert code == 2
    assert "the store holds 2 runs\n  --run-id says which: r1, r2" in said
    assert weights("ls", store.root, "--run-id", "r2")[0] == 0
    code, _, said = weights("ls", store.root, "--run-id", "r2", "--key-file", token)
    assert code == 2
    assert "it is not signed" in said


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


def test_the_key_may_come_from_the_environment(
    weights: Run, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARFLUNG_TOKEN", TOKEN)
    assert weights("ls", store.root)[0] == 0
    monkeypatch.setenv("FARFLUNG_TOKEN", "another-word")
    assert weights("ls", store.root)[0] == 2


def test_the_folder_of_a_run_knows_its_store_its_run_and_its_key(
    weights: Run, own_run: Workspace, tmp_path: Path
) -> None:
    publish(FolderStore(own_run.store), 1, run="another", key=None)
    for place in (own_run.path, own_run.path / "store"):
        code, shown, _ = weights("ls", place)
        assert code == 0
        assert f"run {own_run.run_id}, newest version 2, signed" in shown
    assert weights("verify", own_run.path)[0] == 0
    assert weights("ls", own_run.path, "--run-id", "another")[0] == 2  # which is not signed with the run's key
    code, shown, _ = weights("materialize", own_run.path, "latest", "--out", tmp_path / "out")
    assert code == 0
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {p.name for p in (tmp_path / "out").iterdir()}


def test_a_run_that_has_published_nothing_says_so(weights: Run, tmp_path: Path) -> None:
    Workspace.create(tmp_path / "run", load_recipe(RECIPE))
    code, _, said = weights("verify", tmp_path / "run")
    assert code == 2
    assert "the run has published nothing yet" in said


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


def test_ls_shows_what_lies_above_a_damaged_manifest(weights: Run, store: FolderStore, token: Path) -> None:
    (key,) = (key for key in store.list(f"{RUN}/manifests") if "/00000004-" in key)
    spoil(store.root / key)
    code, shown, said = weights("ls", store.root, "--key-file", token)
    assert code == 1
    assert [line.split()[0] for line in shown.splitlines()[1:-1] if "bf16" in line] == ["5", "6"]
    assert f"farflung: manifest {key}: " in said
    assert said.endswith("versions before it are not shown\n")


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


@pytest.mark.parametrize("given", ["{store} {version}", "{version} --store {store}", "--store {store} {version}"])
def test_materialize_writes_the_version_that_is_asked_for(
    weights: Run, tmp_path: Path, token: Path, given: str
) -> None:
    store = FolderStore(tmp_path / "store")
    history = publish(store, 7)
    for version, number in (("latest", 6), ("2", 2)):
        out = tmp_path / f"out-{version}"
        argv = given.format(store=store.root, version=version).split()
        code, shown, _ = weights("materialize", *argv, "--key-file", token, "--out", out)
        assert code == 0
        assert f"{out}: version {number} as bf16, " in shown
        assert "lm_head.weight is model.embed_tokens.weight" in shown
        found = load_file(out / "model.safetensors")
        for name, tensor in history[number].items():
            assert name == "lm_head.weight" or torch.equal(found[name], tensor.bfloat16())


def test_materialize_in_codes_says_so_in_the_config(
    weights: Run, store: FolderStore, token: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write(model / "config.json", '{"model_type": "llama"}')
    write(model / "tokenizer.json", "{}")
    out = tmp_path / "deep" / "out"
    code, shown, _ = weights(
        "materialize", store.root, "latest", "--key-file", token, "--format", "nvfp4", "--out", out, "--model", model,
        "--shard-gb", "0.00001",
    )  # fmt: skip
    assert code == 0
    assert "model-00001-of-0000" in shown
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "W4A16_NVFP4"
    assert (out / "tokenizer.json").exists()
    assert (out / "model.safetensors.index.json").exists()


def test_a_mirror_serves_a_run_to_those_who_have_the_token(
    weights: Run, store: FolderStore, token: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with process("serve", "--store", store.root, "--cache", cache, "--token-file", token, "--limit-gb", 1) as started:
        hello = json.loads(read_line(started))
        url = hello["url"]
        assert hello["role"] == "mirror"
        update = Subscriber(MirrorStore(url, token=TOKEN), RUN, format="nvfp4", key=KEY, name="far").fetch(6)
        assert update.version == 6
        with pytest.raises(StoreError):
            Subscriber(MirrorStore(url, token="another-word"), RUN, key=KEY).newest()
        request = urllib.request.Request(f"{url}/stats", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            assert json.load(answer)["misses"] > 0
        mine = ("--run-id", RUN, "--token-file", token, "--key-file", token)
        code, shown, _ = weights("verify", url, *mine)
        assert code == 0
        assert "0 faults, orphans not looked for" in shown
        code, shown, _ = weights("materialize", url, "latest", *mine, "--out", tmp_path / "out")
        assert code == 0
        for argv in (["ls"], ["gc", "--keep", "1"], ["compact"]):
            code, _, said = weights(argv[0], url, *mine, *argv[1:])
            assert code == 2
            assert "a mirror is read-only and cannot list\n  give the store behind it" in said
        code, _, said = weights("verify", url, "--token-file", token)
        assert code == 2
        assert "a mirror cannot say which runs there are\n  --run-id ID names the run" in said
        code, _, said = weights("verify", url, "--run-id", "r2", "--token-file", token)
        assert code == 2
        assert "no run 'r2' has published here" in said
        started.send_signal(signal.SIGTERM)
        started.communicate(timeout=SECONDS)
        assert started.returncode == 0
    assert json.loads((store.root / RUN / "leases" / "far").read_text()) == {"version": 6}
    assert any(cache.iterdir())


def test_a_mirror_of_a_run_takes_the_run_s_token(own_run: Workspace, tmp_path: Path) -> None:
    with process("serve", own_run.path, "--cache", tmp_path / "cache") as started:
        url = json.loads(read_line(started))["url"]
        key = derive_key(own_run.token)
        assert Subscriber(MirrorStore(url, token=own_run.token), own_run.run_id, key=key).newest() == 2


def test_a_store_in_a_bucket_is_looked_after_too(
    weights: Run, token: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with s3_server() as endpoint:
        use_s3(monkeypatch, endpoint)
        url = f"s3://{BUCKET}/cli"
        publish(open_store(url), 4)
        code, shown, _ = weights("ls", url, "--key-file", token)
        assert code == 0
        assert "run r1, newest version 3, signed" in shown
        code, shown, _ = weights("verify", url, "--key-file", token)
        assert code == 0
        assert "0 faults, 0 orphans" in shown
        assert weights("materialize", url, 1, "--key-file", token, "--out", tmp_path / "out")[0] == 0
        code, _, said = weights("ls", "s3://no-such-bucket/x")
        assert code == 2
        assert "no such bucket" in said
