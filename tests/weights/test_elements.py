"""Elements: bits go from a tensor and back unchanged, whatever numbers they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from farflung.core.errors import BadInput
from farflung.weights.elements import ELEMENT_TYPES, digest, element_type, from_bits, to_bits
from tests.weights.parts import random_bits, raw_bytes


@pytest.mark.parametrize("kind", ELEMENT_TYPES)
def test_bits_come_back_as_they_were(kind: str) -> None:
    type = ELEMENT_TYPES[kind]
    bits = random_bits(kind, 60)
    tensor = from_bits(bits, type, (3, 20))
    assert tensor.shape == (3, 20)
    assert element_type(tensor, where="t", packed=type.bits == 4) == type
    np.testing.assert_array_equal(to_bits(tensor, type), bits)
    assert raw_bytes(tensor) == bits.tobytes()
    assert tensor.data_ptr() == bits.ctypes.data, "the memory is shared"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(float("nan")),
        torch.zeros(0, 3),
        torch.arange(24.0).reshape(4, 6).T,
        torch.arange(8.0)[::2],
        torch.ones(2, requires_grad=True),
    ],
    ids=["scalar", "empty", "transposed", "strided", "grad"],
)
def test_any_layout_is_read_in_order(tensor: Tensor) -> None:
    assert to_bits(tensor, ELEMENT_TYPES["F32"]).tobytes() == raw_bytes(tensor)


def test_of_packed_elements_two_lie_in_a_byte() -> None:
    type = ELEMENT_TYPES["F4"]
    assert (type.per_item, type.dtype.itemsize) == (2, 1)
    assert ELEMENT_TYPES["BF16"].per_item == 1
    assert element_type(torch.zeros(1, dtype=torch.uint8), where="t") == ELEMENT_TYPES["U8"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool, torch.complex64])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(BadInput, match=r"tensor w: its type is .*\n.*bfloat16"):
        element_type(torch.zeros(2, dtype=dtype), where="tensor w")


def test_a_digest_is_of_the_little_endian_bits() -> None:
    bits = random_bits("BF16", 100)
    assert digest(bits) == digest(bits.astype(">u2").astype("<u2")) == digest(bits.reshape(4, 25).T.T)
    assert digest(bits[::2]) == digest(bits[::2].copy()) != digest(bits)
    assert len(digest(bits[:0])) == 16
