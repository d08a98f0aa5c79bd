"""Codes and scales under the names of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from farflung.core.errors import BadInput
from farflung.core.sampling import WeightFormat
from farflung.formats.checkpoint import CODED, from_tensors, to_tensors
from farflung.formats.weights import E4M3, FORMATS, Quantised, quantise

NAME = "model.layers.0.mlp.up_proj.weight"
LAYOUTS: dict[WeightFormat, dict[str, tuple[torch.dtype, list[int]]]] = {
    "bf16": {NAME: (torch.bfloat16, [130, 40])},
    "fp8": {NAME: (E4M3, [130, 40]), f"{NAME}_scale_inv": (torch.float32, [2, 1])},
    "mxfp4": {NAME: (torch.uint8, [130, 32]), f"{NAME}_scale": (torch.uint8, [130, 2])},
    "nvfp4": {
        NAME: (torch.uint8, [130, 24]), f"{NAME}_scale": (E4M3, [130, 3]), f"{NAME}_scale_2": (torch.float32, []),
    },
}  # fmt: skip
each_format = pytest.mark.parametrize("format", FORMATS)


def made(format: WeightFormat) -> Quantised:
    return quantise(torch.randn(130, 40, generator=torch.Generator().manual_seed(0)), format)


@each_format
def test_names_types_and_shapes(format: WeightFormat) -> None:
    tensors = to_tensors(NAME, made(format))
    assert {name: (t.dtype, list(t.shape)) for name, t in tensors.items()} == LAYOUTS[format]
    assert (tensors[NAME].dtype in CODED) == (format != "bf16")


@each_format
def test_a_file_gives_back_what_was_saved(format: WeightFormat, tmp_path: Path) -> None:
    quantised = made(format)
    save_file(to_tensors(NAME, quantised), tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors") | {"model.norm.weight": torch.ones(40)}
    again = from_tensors(loaded, NAME, format, 130, 40)
    assert (again.format, again.rows, again.columns) == (format, 130, 40)
    assert torch.equal(again.dequantise(), quantised.dequantise())


@each_format
def test_memory_is_shared(format: WeightFormat) -> None:
    quantised = made(format)
    tensors = to_tensors(NAME, quantised)
    assert tensors[NAME].data_ptr() == quantised.codes.data_ptr()
    assert from_tensors(tensors, NAME, format, 130, 40).codes.data_ptr() == quantised.codes.data_ptr()


@each_format
def test_every_tensor_is_needed_and_checked(format: WeightFormat) -> None:
    good = to_tensors(NAME, made(format))
    for name, tensor in good.items():
        with pytest.raises(BadInput, match=rf"the weights lack {name}: "):
            from_tensors({n: t for n, t in good.items() if n != name}, NAME, format, 130, 40)
        with pytest.raises(BadInput, match=rf"{name} is float64 .*; it must be ({'|'.join(('bf', 'float', 'uint'))})"):
            from_tensors(good | {name: tensor.float().double()}, NAME, format, 130, 40)
        with pytest.raises(BadInput, match=rf"{name} is .* \[1(, \d+)*\]; it must be .*, as {format} has it"):
            from_tensors(good | {name: tensor.reshape(1, -1)}, NAME, format, 130, 40)
    with pytest.raises(BadInput, match=rf"{NAME} is .*for \[130, 80\]"):
        from_tensors(good, NAME, format, 130, 80)
