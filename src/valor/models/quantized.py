"""Checkpoints of quantized weights: read as the numbers that they stand for, and saved as these."""

from inspect import signature
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from valor.errors import UserError


def read_as_floats(config: Any, path: str) -> None:
    """Have transformers read FP8, MXFP4 and the like as floats on all devices; without it their layers stay on a GPU.

    UserError: weights of this kind are read by layers of their own alone, which are not trained.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if kind is None or "dequantize" not in signature(kind).parameters:
        raise UserError(
            f"'{path}' is quantized ({method}), and full weights are trained: take the checkpoint that it was made "
            "from, in bfloat16"
        )
    config.quantization_config = {**settings, "dequantize": True}


def save_as_floats(hf: Any) -> None:
    """Forget how a checkpoint's weights were quantized: transformers would quantize what it saves in the same way, in a
    directory whose config says nothing of it."""
    used = getattr(hf, "_weight_conversions", None) or []
    if not any(map(_dequantizes, used)):
        return
    plain = {tuple(one.target_patterns): one for one in get_model_conversion_mapping(hf, add_legacy=False)}
    kept = [plain.get(tuple(one.target_patterns)) if _dequantizes(one) else one for one in used]
    hf._weight_conversions = [one for one in kept if one is not None]


def whole_numbers(folder: str) -> set[str]:
    """Names of the tensors in a directory's safetensors whose elements are integers."""
    names: set[str] = set()
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names |= {name for name in tensors.keys() if tensors.get_slice(name).get_dtype()[0] in "IU"}  # noqa: SIM118
    return names


def _dequantizes(conversion: Any) -> bool:
    return any("Dequantize" in type(operation).__name__ for operation in getattr(conversion, "operations", ()))
