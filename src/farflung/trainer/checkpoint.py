"""Checkpoints of the trainer: a folder with ``state.safetensors`` and ``state.json``, there whole or not at all.

The JSON holds the tensors' hash and its own, so a flipped byte anywhere is an error and never a silently different run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import load_file
from torch import Tensor

from farflung.core.errors import BadInput, Corrupt
from farflung.trainer.files import new_folder, save_tensors

FORMAT = 1
TENSORS = "state.safetensors"
FACTS = "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def write(self, path: Path) -> None:
        with new_folder(path) as folder:
            save_tensors({k: v.detach().cpu().contiguous() for k, v in self.tensors.items()}, folder / TENSORS)
            facts = {**self.facts, "format": FORMAT, "tensors": _hash_file(folder / TENSORS)}
            (folder / FACTS).write_text(json.dumps({"facts": facts, "hash": _hash_facts(facts)}, indent=1))

    @staticmethod
    def read(path: Path) -> Checkpoint:
        """Raises BadInput if there is none, Corrupt if its bytes are not those that were written."""
        where = str(path)
        try:
            whole = json.loads((path / FACTS).read_bytes())
            facts, claimed = whole["facts"], whole["hash"]
        except OSError as error:
            if path.is_dir():  # left by a process that was killed while it took the place of this one
                raise Corrupt(f"{FACTS} cannot be read: {error.strerror}", where=where) from None
            raise BadInput(f"no checkpoint: {error.strerror}", where=where) from None
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"{FACTS} is damaged: {error!r}", where=where, mend="go on from the one before") from None
        if _hash_facts(facts) != claimed:
            raise Corrupt(f"{FACTS} does not match its hash", where=where, mend="go on from the one before")
        if facts.get("format") != FORMAT:
            raise BadInput(f"format {facts.get('format')}; this version reads {FORMAT}", where=where)
        try:
            if _hash_file(path / TENSORS) != facts["tensors"]:
                raise Corrupt(f"{TENSORS} does not match its hash", where=where, mend="go on from the one before")
            return Checkpoint(load_file(path / TENSORS), facts)
        except OSError as error:
            raise Corrupt(f"{TENSORS} cannot be read: {error.strerror}", where=where) from None


def _hash_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return str(digest.hexdigest())


def _hash_facts(facts: Mapping[str, Any]) -> str:
    return str(xxhash.xxh3_128(json.dumps(facts, sort_keys=True).encode()).hexdigest())
