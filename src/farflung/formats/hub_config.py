"""What a checkpoint's config.json says of its number format, in the words of those whose names and layout it has.

bf16    nothing
fp8     DeepSeek's fine-grained FP8, as transformers, vLLM and SGLang read it
mxfp4   Quark's weight-only MXFP4
nvfp4   ModelOpt's W4A16_NVFP4: weights alone, as no scale of activations is published
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farflung.core.sampling import WeightFormat
from farflung.formats.weights import FP8_BLOCK, MXFP4_BLOCK, NVFP4_BLOCK


def quantization_config(format: WeightFormat, kept: Sequence[str]) -> dict[str, Any] | None:
    """The entry ``quantization_config``, None for bf16. ``kept``: modules with weights that stay BF16, by name."""
    match format:
        case "bf16":
            return None
        case "fp8":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
                "modules_to_not_convert": list(kept),
            }
        case "mxfp4":
            weight = {
                "dtype": "fp4",
                "qscheme": "per_group",
                "group_size": MXFP4_BLOCK,
                "ch_axis": -1,
                "scale_format": "e8m0",
                "scale_calculation_mode": "floor",
                "round_method": "half_even",
                "is_dynamic": False,
            }
            return {
                "quant_method": "quark",
                "global_quant_config": {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None},
                "layer_quant_config": {},
                "layer_type_quant_config": {},
                "exclude": list(kept),
                "export": {"weight_format": "real_quantized", "pack_method": "reorder"},
            }
        case "nvfp4":
            weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
            return {
                "quant_method": "modelopt",
                "quant_algo": "W4A16_NVFP4",
                "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
                "ignore": list(kept),
            }
