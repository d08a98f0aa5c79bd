"""Every argument of a loss, looked at where it enters: shape, type, device and, of what was recorded, values.

Nothing here reads a matrix. Hidden states, logits and the LM head are the caller's own results: where one that is computed
holds NaN, the loss is NaN, and whoever minimises it must look. Errors name the argument, the row and the value.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from farflung.core.errors import BadInput
from farflung.corrections.guards import Guards
from farflung.corrections.supports import Kind, Supports

WHOLE = (torch.int32, torch.int64)
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PRECISE = (torch.float32, torch.float64)

_WHERE = "loss"


def check_model(hidden: Tensor, head: Tensor, bias: Tensor | None, softcap: float | None) -> None:
    """hidden [N, d], head [V, d], bias [V] finite, all of real floating types on one device; softcap above 0."""
    check_tensor("hidden", hidden, (None, None), REAL)
    check_tensor("head", head, (None, None), REAL, hidden)
    if hidden.shape[1] != head.shape[1]:
        raise BadInput(
            f"hidden is {tuple(hidden.shape)} and head {tuple(head.shape)}: their widths differ", where=_WHERE
        )
    if bias is not None:
        check_tensor("bias", bias, (len(head),), REAL, hidden)
        _check_values("bias", bias, torch.isfinite(bias), "finite")
    if softcap is not None:
        check_number("softcap", softcap)


def check_rows(like: Tensor, rows: int, sampled: Tensor, advantages: Tensor) -> None:
    """sampled [rows] int, and advantages [rows] floating and finite, both on the device of ``like``."""
    check_tensor("sampled", sampled, (rows,), WHOLE, like)
    check_tensor("advantages", advantages, (rows,), REAL, like)
    _check_values("advantages", advantages, torch.isfinite(advantages), "finite")


def check_supports(like: Tensor, supports: Supports, kind: Kind) -> None:
    """Supports of the kind on the device of ``like``; their values are looked at by ``Supports.check``."""
    if not isinstance(supports, Supports):
        raise BadInput(f"supports is {_name(supports)}, not Supports", where=_WHERE)
    if supports.kind != kind:
        raise BadInput(f"supports are of kind {supports.kind}; this loss takes {kind}", where=_WHERE)
    check_tensor("supports", supports.ids, (None,), WHOLE, like)


def check_update(like: Tensor, rows: int, weight: Any, temperature: Any, denominator: Any) -> None:
    """A callable weight; temperature and denominator above 0 and finite, the latter a number or a tensor [] or [rows]."""
    if not callable(weight):
        raise BadInput(f"weight is {_name(weight)}, not a function", where=_WHERE, mend="make_weight makes one")
    check_number("temperature", temperature)
    if isinstance(denominator, Tensor):
        check_tensor("denominator", denominator, (rows,) if denominator.dim() else (), (*WHOLE, *REAL), like)
        right = (denominator > 0) & torch.isfinite(denominator)
        _check_values("denominator", denominator, right, "finite and above 0: a batch needs action tokens")
    else:
        check_number("denominator", denominator, ": a batch needs action tokens")


def check_guards(
    like: Tensor, rows: int, guards: Guards, sequences: Tensor | None, staleness: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """sequences [rows] int in [0, rows), and staleness [rows] int where ``max_staleness`` needs it, as int64."""
    if sequences is None:
        raise BadInput("guards need the sequence of every token", where=_WHERE)
    check_tensor("sequences", sequences, (rows,), WHOLE, like)
    inside = (sequences >= 0) & (sequences < rows)
    _check_values("sequences", sequences, inside, f"in [0, {rows}): the sequences of a call are numbered from 0")
    if guards.max_staleness is None:
        return sequences.long(), None
    if staleness is None:
        raise BadInput("max_staleness needs each token's staleness", where=_WHERE)
    check_tensor("staleness", staleness, (rows,), WHOLE, like)
    return sequences.long(), staleness.long()


def check_number(name: str, value: Any, why: str = "") -> None:
    if not isinstance(value, Real):
        raise BadInput(f"{name} is {_name(value)}, not a number", where=_WHERE)
    if not 0 < float(value) < math.inf:
        raise BadInput(f"{name} is {value}; it must be finite and above 0{why}", where=_WHERE)


def check_count(name: str, value: Any) -> None:
    if not isinstance(value, Integral) or int(value) < 0:
        raise BadInput(f"{name} is {value!r}; it must be a whole number, at least 0", where=_WHERE)


def check_tensor(
    name: str, value: Any, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], like: Tensor | None = None
) -> None:
    """Raises BadInput unless a tensor of this shape (None: any length) and one of these types, on the device of ``like``."""
    if not isinstance(value, Tensor):
        raise BadInput(f"{name} is {_name(value)}, not a tensor", where=_WHERE)
    if value.dim() != len(shape) or any(n not in (None, m) for n, m in zip(shape, value.shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise BadInput(f"{name} has shape {list(value.shape)}, not [{wanted}]", where=_WHERE)
    if value.dtype not in dtypes:
        raise BadInput(f"{name} is {value.dtype}, not {' or '.join(map(str, dtypes))}", where=_WHERE)
    if like is not None and value.device != like.device:
        raise BadInput(f"{name} is on {value.device}, what it belongs to on {like.device}", where=_WHERE)


def _check_values(name: str, values: Tensor, right: Tensor, what: str) -> None:
    """Raises BadInput with the first entry of ``values`` [n] or [] that is not right."""
    if not right.all():
        at = int(torch.nonzero(~right.reshape(-1))[0])
        place = f"{name}[{at}]" if values.dim() else name
        raise BadInput(f"{place} is {values.reshape(-1)[at].item()}; it must be {what}", where=_WHERE)


def _name(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
