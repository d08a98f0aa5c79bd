"""Between a model's tensors and the bits that are published: BF16, round to nearest even, tied tensors once.

torch loads at the first conversion, so that a program that only asks for version numbers does without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from farflung.core.errors import BadInput
from farflung.weights.delta import Bits

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A policy's published form: ``bits`` and ``hashes`` (``digest``) by name, and ``tied``: another name -> its tensor's."""

    bits: Mapping[str, Bits]
    hashes: Mapping[str, str]
    tied: Mapping[str, str]

    @staticmethod
    def of(weights: Mapping[str, torch.Tensor]) -> Snapshot:
        """A copy that shares no memory with ``weights``. Raises BadInput for none, and for one not of floating point.

        Tensors that lie in the same memory are tied: the first name has the bits.
        """
        if not weights:
            raise BadInput("there are no tensors to publish")
        bits: dict[str, Bits] = {}
        tied: dict[str, str] = {}
        first: dict[tuple[object, ...], str] = {}
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                raise BadInput(f"it has type {tensor.dtype}; weights are floating point", where=f"tensor {name}")
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            owner = first.setdefault(memory, name) if tensor.numel() else name
            if owner == name:
                bits[name] = to_bits(tensor)
            else:
                tied[name] = owner
        return Snapshot(bits, {name: digest(array) for name, array in bits.items()}, tied)

    def tensors(self) -> dict[str, torch.Tensor]:
        """BF16 tensors under every name, tied ones too, over the same memory as ``bits``: treat them as read-only."""
        tensors = {name: from_bits(array) for name, array in self.bits.items()}
        return tensors | {name: tensors[owner] for name, owner in self.tied.items()}


def to_bits(tensor: torch.Tensor) -> Bits:
    """A copy of a floating tensor as BF16 bits, uint16 of its shape."""
    import torch

    bf16 = tensor.detach().to("cpu", torch.bfloat16, copy=True).contiguous()
    bits: Bits = bf16.view(torch.int16).numpy().view(np.uint16)
    return bits


def from_bits(bits: Bits) -> torch.Tensor:
    """BF16 bits as a tensor over the same memory."""
    import torch

    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def digest(bits: Bits) -> str:
    """xxh3-128 of the little-endian bits, 32 hex digits."""
    raw = np.ascontiguousarray(bits, np.dtype("<u2")).reshape(-1).view(np.uint8)
    return str(xxhash.xxh3_128_hexdigest(raw.data))
