"""What a tensor's elements are: unsigned integers of 4, 8, 16 or 32 bits, whatever numbers they stand for.

Bits are what is compared, sent, hashed and written, so NaN payloads and negative zeros survive. All IEEE-like types lay
sign, exponent and mantissa side by side, so that one step in the last place is a difference of one between integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from farflung.core.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

Bits = npt.NDArray[np.unsignedinteger[Any]]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ElementType:
    """``name`` is what safetensors calls it; ``bits`` those of one element. Two 4-bit elements lie in a byte, low one first."""

    name: str
    bits: int
    torch: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The integers that an array of it holds; bytes for packed elements."""
        return np.dtype(f"<u{max(8, self.bits) // 8}")

    @property
    def per_item(self) -> int:
        """Elements in one integer of the array."""
        return max(8, self.bits) // self.bits


ELEMENT_TYPES = {
    kind.name: kind
    for kind in (
        ElementType("F32", 32, "float32"),
        ElementType("BF16", 16, "bfloat16"),
        ElementType("F16", 16, "float16"),
        ElementType("F8_E4M3", 8, "float8_e4m3fn"),
        ElementType("F8_E5M2", 8, "float8_e5m2"),
        ElementType("U8", 8, "uint8"),
        ElementType("F4", 4, "uint8"),
    )
}


def element_type(tensor: Tensor, *, where: str, packed: bool = False) -> ElementType:
    """A tensor's element type; ``packed``: its bytes hold two 4-bit codes each. Raises BadInput for other types."""
    name = str(tensor.dtype).removeprefix("torch.")
    for kind in ELEMENT_TYPES.values():
        if kind.torch == name and (kind.bits == 4) == packed:
            return kind
    known = ", ".join(sorted({kind.torch for kind in ELEMENT_TYPES.values()}))
    raise BadInput(f"its type is {name}", where=where, mend=f"types that can be published: {known}")


def to_bits(tensor: Tensor, kind: ElementType) -> Bits:
    """The tensor's bits, flat, in this machine's memory; shares memory with a contiguous tensor that is there already."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[flat.element_size()]
    bits: Bits = flat.view(signed).numpy().view(kind.dtype)
    return bits


def from_bits(bits: Bits, kind: ElementType, shape: tuple[int, ...]) -> Tensor:
    """Bits as a tensor over the same memory; ``shape`` is the tensor's own (of bytes, where they are packed)."""
    import torch

    signed = {1: np.uint8, 2: np.int16, 4: np.int32}[bits.itemsize]
    return torch.from_numpy(bits.view(signed)).view(getattr(torch, kind.torch)).reshape(shape)


def digest(bits: Bits) -> bytes:
    """xxh3-128 of the little-endian bits, 16 bytes."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)
