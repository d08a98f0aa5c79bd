"""farflung weights serve: a mirror in a process of its own."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from farflung.run.workspace import Workspace
from farflung.weights import FolderStore, StoreError, Subscriber
from farflung.weights.manifest import derive_key
from farflung.weights.objects import MirrorStore
from tests.cli.weights.kit import SECONDS, Run, process, read_line
from tests.weights.published import KEY, RUN, TOKEN


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
