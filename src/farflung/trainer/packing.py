"""Packing: sequences of any length into rows of at most a budget of tokens, without padding, shared prefixes once.

The trajectories of a group begin with the same prompt and often with the same first turns. Sorted by their tokens, each
shares most with its neighbour, so one comparison with the neighbour finds what is already in the pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farflung.core.supports import Int32, Int64
from farflung.trainer.attention import Layout

MIN_SHARED = 16
"""Shorter common prefixes are not worth their mask."""


@dataclass(frozen=True, slots=True)
class Pack:
    """ids and positions [rows] int64 with their layout; member i of the batch has its token t in row ``paths[i][t]``."""

    ids: Tensor
    positions: Tensor
    layout: Layout
    paths: dict[int, Int64]


@dataclass(slots=True)
class _Unit:
    """Neighbouring sequences of one group that go into one pack: (sequence, tokens shared with the one before)."""

    members: list[tuple[int, int]]
    size: int


def pack(
    sequences: Sequence[Int32], groups: Sequence[int], budget: int, device: torch.device, *, share: bool = True
) -> list[Pack]:
    """First-fit decreasing over the groups' units; a sequence longer than ``budget`` gets a pack of its own.

    sequences: ids [n] each; groups: what may share a prefix. Without ``share`` every sequence is stored whole.
    """
    units = [unit for group in _by_group(groups) for unit in _units(sequences, group, budget, share)]
    bins: list[tuple[int, list[_Unit]]] = []
    for unit in sorted(units, key=lambda u: -u.size):
        for index, (used, held) in enumerate(bins):
            if used + unit.size <= budget:
                held.append(unit)
                bins[index] = (used + unit.size, held)
                break
        else:
            bins.append((unit.size, [unit]))
    return [_lay_out(sequences, held, device) for _, held in bins]


def _by_group(groups: Sequence[int]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        found.setdefault(group, []).append(index)
    return list(found.values())


def _units(sequences: Sequence[Int32], members: list[int], budget: int, share: bool) -> list[_Unit]:
    if not share:
        return [_Unit([(i, 0)], len(sequences[i])) for i in members]
    units: list[_Unit] = []
    before: Int32 | None = None
    for index in sorted(members, key=lambda i: sequences[i].tolist()):
        ids = sequences[index]
        common = 0 if before is None else _common(before, ids)
        shared = common if common >= MIN_SHARED else 0
        if units and units[-1].size + len(ids) - shared <= budget:
            units[-1].members.append((index, shared))
            units[-1].size += len(ids) - shared
        else:
            units.append(_Unit([(index, 0)], len(ids)))
        before = ids
    return units


def _common(a: Int32, b: Int32) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


def _lay_out(sequences: Sequence[Int32], units: list[_Unit], device: torch.device) -> Pack:
    ids: list[Int32] = []
    positions: list[Int64] = []
    whole: list[Int64] = []
    paths: dict[int, Int64] = {}
    rows = 0
    for unit in units:
        path = np.zeros(0, np.int64)
        for index, shared in unit.members:
            own = sequences[index][shared:]
            path = np.concatenate([path[:shared], np.arange(rows, rows + len(own))])
            paths[index] = path
            if len(own):
                ids.append(own)
                positions.append(np.arange(shared, shared + len(own)))
                whole.append(path)
                rows += len(own)
    lengths = tuple(map(len, whole))
    gather = None if sum(lengths) == rows else torch.from_numpy(np.concatenate(whole)).to(device)
    return Pack(
        torch.from_numpy(np.concatenate(ids)).to(device, torch.int64),
        torch.from_numpy(np.concatenate(positions)).to(device),
        Layout(tuple(map(len, ids)), lengths, gather),
        paths,
    )
