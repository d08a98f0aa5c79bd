"""What is asked of a sampler and what comes back: token in, token out, every token with its origin."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from farflung.core import frame
from farflung.core.errors import BadInput, Corrupt
from farflung.core.supports import Float32, Int32, Supports, check_rows

Finish = Literal["stop", "length"]
WeightFormat = Literal["bf16", "fp8", "mxfp4", "nvfp4"]
KvFormat = Literal["bf16", "fp8"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw: T > 0, then top-k (0 = all), then top-p of what is left, renormalised.

    A support is recorded exactly when ``top_k`` is finite (> 0); ``top_p`` < 1 needs it, so that supports stay bounded.
    ``seed`` and a token's absolute position fix its random number, so a session that moves to another replica goes on
    with the same stream.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadInput(f"max_tokens is {self.max_tokens}; at least 1 is needed", where="sampling")
        if not 0 < self.temperature < float("inf"):
            raise BadInput(f"temperature is {self.temperature}; it must be above 0", where="sampling")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p is {self.top_p}; it must be in (0, 1]", where="sampling")
        if self.top_k < 0 or (self.top_p < 1 and self.top_k == 0):
            raise BadInput(
                f"top_k is {self.top_k} with top_p {self.top_p}",
                where="sampling",
                mend="top_p below 1 needs a finite top_k, e.g. 64",
            )


@dataclass(frozen=True, slots=True)
class Source:
    """Where tokens came from: one replica of one pool, its weight format and KV-cache format."""

    pool: str
    replica: str
    weights: str
    kv: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn of a session. ``ids`` [n] int32 is the whole sequence so far, so that any replica can go on with it."""

    session: str
    ids: Int32
    params: SamplingParams
    min_version: int = 0

    def encode(self) -> bytes:
        data = {"session": self.session, "params": asdict(self.params), "min_version": self.min_version}
        return frame.encode(data, {"ids": self.ids})

    @staticmethod
    def decode(raw: bytes) -> GenerateRequest:
        """Raises BadInput or Corrupt with what is wrong."""
        data, arrays = frame.decode(raw, where="generate request")
        try:
            given = dict(data["params"])
            unknown = set(given) - {f.name for f in fields(SamplingParams)}
            if unknown:
                raise BadInput(f"unknown sampling parameters {sorted(unknown)}", where="generate request")
            given["stop_ids"] = tuple(_whole(i, "a stop id", 1 << 31) for i in given.get("stop_ids", ()))
            for name, bound in (("max_tokens", 1 << 31), ("top_k", 1 << 31), ("seed", 1 << 64)):
                _whole(given.get(name, 0), name, bound)
            for name in ("temperature", "top_p"):
                if type(given.get(name, 1.0)) not in (int, float):
                    raise BadInput(f"{name} is {given[name]!r:.100}, not a number", where="generate request")
            min_version = _whole(data.get("min_version", 0), "min_version", 1 << 48)
            session, ids, params = str(data["session"]), arrays["ids"], SamplingParams(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"not a generate request: {error!r}", where="generate request") from None
        if ids.ndim != 1 or len(ids) == 0 or ids.dtype != np.int32 or ids.min() < 0:
            what = f"ids has shape {ids.shape} and type {ids.dtype}"
            raise BadInput(f"{what}; a non-empty row of int32, none negative, is needed", where="generate request")
        return GenerateRequest(session, ids, params, min_version)


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled turn: ids, logprobs, versions, each [n]; supports of n rows, or None when the whole vocabulary was open.

    ``logprobs`` are under the distribution that really drew the token (after T, top-k and top-p); ``versions`` is the
    policy version that each token was sampled from; ``finish`` is "stop" when the last id is a stop id, else "length".
    ``cached`` counts prompt tokens whose keys and values were reused.
    """

    ids: Int32
    logprobs: Float32
    versions: Int32
    supports: Supports | None
    finish: Finish
    source: Source
    cached: int = 0

    def encode(self) -> bytes:
        arrays: dict[str, Any] = {"ids": self.ids, "logprobs": self.logprobs, "versions": self.versions}
        if self.supports is not None:
            arrays |= {
                "support_ids": self.supports.ids,
                "support_logprobs": self.supports.logprobs,
                "support_offsets": self.supports.offsets,
            }
        return frame.encode({"finish": self.finish, "source": asdict(self.source), "cached": self.cached}, arrays)

    @staticmethod
    def decode(raw: bytes) -> Completion:
        """Parse and check a sampler's reply; raises Corrupt, so a bad reply never reaches the trainer."""
        where = "sampler reply"
        data, arrays = frame.decode(raw, where=where)
        try:
            supports = None
            if "support_ids" in arrays:
                supports = Supports(arrays["support_ids"], arrays["support_logprobs"], arrays["support_offsets"])
            completion = Completion(
                arrays["ids"],
                arrays["logprobs"],
                arrays["versions"],
                supports,
                data["finish"],
                Source(**data["source"]),
                int(data["cached"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"not a completion: {error!r}", where=where) from None
        check_rows(
            where,
            ids=(completion.ids, np.int32),
            logprobs=(completion.logprobs, np.float32),
            versions=(completion.versions, np.int32),
        )
        n = len(completion.ids)
        if (
            completion.finish not in ("stop", "length")
            or n == 0
            or len(completion.logprobs) != n
            or len(completion.versions) != n
        ):
            raise Corrupt(f"{n} ids, {len(completion.logprobs)} log-probs, finish {completion.finish!r}", where=where)
        if not np.isfinite(completion.logprobs).all():
            raise Corrupt("a sampled token has no finite log-probability", where=where)
        if supports is not None:
            supports.check(completion.ids, completion.logprobs, where=where)
        return completion


def _whole(value: Any, name: str, bound: int) -> int:
    """Raises BadInput unless ``value`` is an integer from 0 to below ``bound``."""
    if type(value) is not int or not 0 <= value < bound:
        raise BadInput(f"{name} is {value!r:.100}; a whole number below {bound} is needed", where="generate request")
    return value


def uniforms(
    seeds: np.ndarray[Any, np.dtype[np.uint64]], positions: np.ndarray[Any, np.dtype[np.uint64]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One uniform number in [0, 1) per (seed, position), [n]: splitmix64 (Steele et al. 2014), so it needs no state."""
    with np.errstate(over="ignore"):
        z = seeds.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + positions.astype(np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        for _ in range(2):
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
