"""What a config says of a format is what those who read it look for."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from transformers import FineGrainedFP8Config

from farflung.core.sampling import WeightFormat
from farflung.formats.hub_config import quantization_config


def test_bf16_is_no_quantisation() -> None:
    assert quantization_config("bf16", ["lm_head"]) is None


@pytest.mark.parametrize("format", [f for f in get_args(WeightFormat) if f != "bf16"])
def test_every_other_format_names_its_method_its_blocks_and_what_it_leaves_alone(format: WeightFormat) -> None:
    entry = quantization_config(format, ["lm_head", "model.embed_tokens"])
    assert entry is not None
    text = json.dumps(entry)
    assert entry["quant_method"] == {"fp8": "fp8", "mxfp4": "quark", "nvfp4": "modelopt"}[format]
    assert f"{ {'fp8': 128, 'mxfp4': 32, 'nvfp4': 16}[format] }" in text
    assert '["lm_head", "model.embed_tokens"]' in text


def test_four_bit_formats_claim_nothing_of_activations() -> None:
    nvfp4, mxfp4 = quantization_config("nvfp4", []), quantization_config("mxfp4", [])
    assert nvfp4 is not None
    assert mxfp4 is not None
    assert nvfp4["quant_algo"] == "W4A16_NVFP4"
    assert set(nvfp4["config_groups"]["group_0"]) == {"weights", "targets"}
    assert mxfp4["global_quant_config"]["input_tensors"] is None


def test_transformers_understands_the_fp8_entry() -> None:
    entry = quantization_config("fp8", ["lm_head"])
    assert entry is not None
    read = FineGrainedFP8Config.from_dict(entry)
    assert tuple(read.weight_block_size) == (128, 128)
    assert read.modules_to_not_convert == ["lm_head"]
    assert read.activation_scheme == "dynamic"
