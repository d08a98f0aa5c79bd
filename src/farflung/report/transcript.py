"""Three episodes to read: turns with who wrote them, and for every sampled token where it came from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from farflung.core.episode import Episode
from farflung.core.errors import BadInput, Corrupt
from farflung.report.data import EpisodeRow

TRIES = 8  # episodes of a kind that are looked at before giving up on unreadable ones


@dataclass(frozen=True, slots=True)
class Piece:
    """A token's text. ``origin`` is empty for what was not sampled; ``probability`` is the sampler's."""

    text: str
    special: bool = False
    origin: str = ""
    probability: float = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """``role`` is task, agent or tool."""

    role: str
    pieces: tuple[Piece, ...]
    origin: str = ""

    @property
    def tokens(self) -> int:
        return len(self.pieces)


@dataclass(frozen=True, slots=True)
class Reading:
    """One episode, ready to be read. ``kind`` says why it was chosen."""

    kind: str
    episode: Episode
    turns: tuple[Turn, ...]
    origins: tuple[str, ...]


def choose(rows: Sequence[EpisodeRow], tokenizer: Any) -> Iterator[Reading]:
    """The newest readable solved, failed and format-error episode, as far as there are any."""
    kinds: dict[str, Callable[[EpisodeRow], bool]] = {
        "solved": lambda row: row.reward > 0,
        "failed": lambda row: row.reward == 0 and row.end != "format_error",
        "format error": lambda row: row.end == "format_error",
    }
    for kind, fits in kinds.items():
        for row in [row for row in rows if fits(row)][:TRIES]:
            try:
                episode = Episode.decode(row.file.read_bytes(), where=str(row.file))
            except (OSError, Corrupt):
                continue
            yield read(kind, episode, tokenizer)
            break


def read(kind: str, episode: Episode, tokenizer: Any) -> Reading:
    """Split a transcript into turns at every change between told and sampled."""
    trajectory = episode.trajectory
    action = trajectory.action
    origins = [
        f"{trajectory.sources[s].pool} · version {v}"
        for s, v in zip(trajectory.source.tolist(), trajectory.versions.tolist(), strict=True)
    ]
    pieces = _pieces(trajectory.ids.tolist(), tokenizer)
    borders = np.flatnonzero(np.diff(action)) + 1
    number = np.cumsum(action) - 1
    turns: list[Turn] = []
    for part in np.split(np.arange(len(action)), borders):
        if not len(part):
            continue
        sampled = bool(action[part[0]])
        own = [
            Piece(text, special, origins[number[at]], math.exp(float(trajectory.logprobs[number[at]])))
            if sampled
            else Piece(text, special)
            for at in part.tolist()
            for text, special in [pieces[at]]
        ]
        role = "agent" if sampled else "tool" if turns else "task"
        turns.append(Turn(role, tuple(own), " → ".join(dict.fromkeys(p.origin for p in own if p.origin))))
    return Reading(kind, episode, tuple(turns), tuple(dict.fromkeys(origins)))


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a policy's folder. Raises BadInput."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise BadInput(f"not a tokenizer: {error}", where=str(path)) from None


def _pieces(ids: Sequence[int], tokenizer: Any) -> list[tuple[str, bool]]:
    """Each token's part of the text; a character that several tokens make up belongs to the last of them."""
    from tokenizers.decoders import DecodeStream

    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    stream = DecodeStream(skip_special_tokens=False)
    return [(stream.step(tokenizer, i) or "", i in special) for i in ids]
