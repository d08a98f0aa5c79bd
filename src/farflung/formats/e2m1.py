"""E2M1, the 4-bit float of MXFP4 and NVFP4: sign, two exponent bits, one mantissa bit; 0, 0.5, 1, 1.5, 2, 3, 4, 6.

Two codes share a byte, the first in the low nibble. Torch can hold this type but neither cast to it nor from it.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

MAX = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
# A magnitude's code counts the midpoints below it. A magnitude that is a midpoint goes to the even one of its neighbours,
# up or down in turn; where it goes up, the threshold is the float32 just below.
_THRESHOLDS = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)
_PAIRS = torch.tensor([[VALUES[low], VALUES[high]] for high, low in product(range(16), repeat=2)])


def encode(values: Tensor) -> Tensor:
    """Nearest codes, ties to the even code, saturating at 6. values [..., n] float32, n even -> [..., n / 2] uint8."""
    size = values.abs()
    codes = torch.signbit(values).to(torch.uint8) << 3
    for threshold in _THRESHOLDS:
        codes += size > threshold
    return codes[..., 0::2] | codes[..., 1::2] << 4


def decode(packed: Tensor) -> Tensor:
    """[..., n / 2] uint8 -> [..., n] float32."""
    pairs = _PAIRS.to(packed.device).index_select(0, packed.reshape(-1).int())
    return pairs.view(*packed.shape[:-1], packed.shape[-1] * 2)


def decode_half(packed: Tensor, half: Tensor) -> Tensor:
    """One code of each byte: packed [n] uint8, half [n], 0 for the low nibble and 1 for the high one -> [n] float32."""
    codes = packed.int() >> half.int() * 4 & 15
    return VALUES.to(packed.device).index_select(0, codes)
