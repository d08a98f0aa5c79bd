"""Codes and scales as the named tensors of a checkpoint, under the names that quantised checkpoints use, and back.

bf16    X.weight bfloat16 [out, in]
fp8     X.weight float8_e4m3fn [out, in], X.weight_scale_inv float32 [ceil(out / 128), ceil(in / 128)]: DeepSeek's names
mxfp4   X.weight uint8 [out, blocks * 16], X.weight_scale uint8 (E8M0) [out, blocks], blocks of 32 inputs
nvfp4   X.weight uint8 [out, blocks * 8], X.weight_scale float8_e4m3fn [out, blocks], blocks of 16 inputs,
        X.weight_scale_2 float32 []: ModelOpt's names
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from farflung.core.errors import BadInput
from farflung.core.sampling import WeightFormat
from farflung.formats.weights import E4M3, FP8_BLOCK, MXFP4_BLOCK, NVFP4_BLOCK, Quantised

CODED = (torch.uint8, E4M3)
"""The types of codes: a weight of another type holds plain numbers."""


def to_tensors(name: str, quantised: Quantised) -> dict[str, Tensor]:
    """The tensors of the weight ``name`` ("... .weight"), sharing the memory of codes and scales."""
    held = (quantised.codes, quantised.scales, quantised.tensor_scale)
    belongs = _belongs(name, quantised.format, quantised.rows, quantised.columns)
    return {part: tensor for part, tensor in zip(belongs, held, strict=False) if tensor is not None}


def from_tensors(tensors: Mapping[str, Tensor], name: str, format: WeightFormat, rows: int, columns: int) -> Quantised:
    """The weight ``name`` [rows, columns], sharing the memory of its tensors. Others than its own are not looked at.

    Raises BadInput, naming the tensor, when one is missing or of another type or shape than the format has.
    """
    parts = []
    for part, (dtype, shape) in _belongs(name, format, rows, columns).items():
        expected = f"{_say(dtype, shape)}, as {format} has it for [{rows}, {columns}]"
        tensor = tensors.get(part)
        if tensor is None:
            raise BadInput(f"the weights lack {part}: {expected}")
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise BadInput(f"{part} is {_say(tensor.dtype, tuple(tensor.shape))}; it must be {expected}")
        parts.append(tensor)
    return Quantised(format, rows, columns, *parts)


def _belongs(
    name: str, format: WeightFormat, rows: int, columns: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of each tensor by name, in the order of Quantised's fields."""
    match format:
        case "bf16":
            return {name: (torch.bfloat16, (rows, columns))}
        case "fp8":
            grid = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
            return {name: (E4M3, (rows, columns)), f"{name}_scale_inv": (torch.float32, grid)}
        case "mxfp4":
            blocks = -(-columns // MXFP4_BLOCK)
            return {
                name: (torch.uint8, (rows, blocks * MXFP4_BLOCK // 2)),
                f"{name}_scale": (torch.uint8, (rows, blocks)),
            }
        case "nvfp4":
            blocks = -(-columns // NVFP4_BLOCK)
            return {
                name: (torch.uint8, (rows, blocks * NVFP4_BLOCK // 2)),
                f"{name}_scale": (E4M3, (rows, blocks)),
                f"{name}_scale_2": (torch.float32, ()),
            }


def _say(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
