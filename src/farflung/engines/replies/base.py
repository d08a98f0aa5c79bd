"""What every reader returns, and the checks that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from farflung.core.errors import Corrupt
from farflung.core.supports import Float32, Int32, Supports

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens start..stop (stop excluded) were drawn from the weights that the engine calls ``version``."""

    version: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Reply:
    """One generation: ids [n] int32; logprobs [n] float32 under the distribution that drew them; supports of n rows.

    ``finish`` is "abort" where the engine broke off; what had been drawn until then is there, and may be nothing. ``spans``
    cover the n tokens in order, or are empty where the engine named no versions.
    """

    ids: Int32
    logprobs: Float32
    supports: Supports
    finish: Finish
    spans: tuple[Span, ...]


def field(data: Any, name: str, kind: type | tuple[type, ...], where: str, mend: str = "") -> Any:
    """``data[name]``; raises Corrupt if it is missing, null or of another kind."""
    found = data.get(name) if isinstance(data, Mapping) else None
    if not isinstance(found, kind):
        what = "missing" if found is None else f"{found!r:.60}, of the wrong type"
        raise Corrupt(f"{name} is {what}", where=where, mend=mend)
    return found


def same_length(where: str, tokens: int, **rows: Sequence[Any]) -> None:
    """Raises Corrupt unless there is one row for each token."""
    for name, found in rows.items():
        if len(found) != tokens:
            raise Corrupt(f"{name} has {len(found)} rows for {tokens} tokens", where=where)


def token_ids(values: Sequence[Any], name: str, where: str) -> Int32:
    """Raises Corrupt unless every value is an integer that can be a token id."""
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise Corrupt(f"{name} has {value!r:.60}, which is no token id", where=where)
    return np.array(values, np.int32)


def log_probs(values: Sequence[Any], name: str, where: str) -> Float32:
    """Raises Corrupt unless every value is a finite number. Engines send null or NaN where they have none."""
    for value in values:
        if type(value) not in (int, float) or not -1e30 < value < 1e30:
            raise Corrupt(f"{name} has log-probability {value!r:.60}", where=where)
    return np.array(values, np.float32)


def pack(ids: Sequence[Sequence[Any]], logprobs: Sequence[Sequence[Any]], where: str) -> Supports:
    """Each row's candidates and their log-probabilities as Supports. Raises Corrupt for values that are neither."""
    parts = []
    for t, (names, values) in enumerate(zip(ids, logprobs, strict=True)):
        if len(names) != len(values):
            raise Corrupt(f"row {t} has {len(names)} candidates and {len(values)} log-probabilities", where=where)
        part = token_ids(names, f"row {t}", where), log_probs(values, f"row {t}", where)
        parts.append(Supports(*part, np.array([0, len(names)], np.int64)))
    return Supports.concat(parts)


def read_finish(reason: Any, where: str) -> Finish:
    """Raises Corrupt for anything but the three; a part of a stream has none yet."""
    match reason:
        case "stop":
            return "stop"
        case "length":
            return "length"
        case "abort":
            return "abort"
    raise Corrupt(f"finish_reason is {reason!r:.60}: this generation is not finished", where=where)


def read_spans(data: Any, count: int, where: str) -> tuple[Span, ...]:
    """``weight_versions``, [{version, start, end}]: half-open and contiguous over the output tokens, or absent."""
    if data is None:
        return ()
    spans = []
    for t, each in enumerate(data if isinstance(data, list) else [data]):
        row = f"{where}, weight_versions {t}"
        spans.append(
            Span(field(each, "version", str, row), field(each, "start", int, row), field(each, "end", int, row))
        )
    at = 0
    for span in spans:
        if span.start != at or span.stop < at:
            raise Corrupt(f"weight_versions go from token {at} to {span.start}..{span.stop}", where=where)
        at = span.stop
    if at != count:
        raise Corrupt(f"weight_versions cover {at} of {count} tokens", where=where)
    return tuple(spans)
