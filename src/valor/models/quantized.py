"""Checkpoints of quantized weights, which are read as the numbers that they stand for."""

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
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


def widen(hf: nn.Module, dtype: torch.dtype) -> None:
    """Weights of fewer bytes than `dtype` become of `dtype`: transformers 5.17 reads MXFP4 as bfloat16, whatever it is
    asked for."""
    for weight in hf.parameters():
        if weight.is_floating_point() and weight.element_size() < dtype.itemsize:
            weight.data = weight.data.to(dtype)


def whole_numbers(folder: str) -> set[str]:
    """Names of the tensors in a directory's safetensors whose elements are integers."""
    names: set[str] = set()
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names |= {name for name in tensors.keys() if tensors.get_slice(name).get_dtype()[0] in "IU"}  # noqa: SIM118
    return names
