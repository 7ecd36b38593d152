"""Transformers as it is used here: models without dropout, and no output of its own on the console of a run."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import logging as hf_logging


def disable_dropout(hf: Any) -> None:
    """Zero every dropout rate of a built model: a policy ratio or a value must not depend on a random mask.

    Those of its config are zeroed too, since some models read them in a pass; `published_config` has them back.
    """
    if not hasattr(hf, "config_dropout"):
        configs = {id(c): c for c in (hf.config, hf.config.get_text_config())}.values()
        rates = [(config, key, value) for config in configs for key, value in config.to_dict().items()]
        hf.config_dropout = [rate for rate in rates if "drop" in rate[1] and isinstance(rate[2], float)]
    for config, key, _ in hf.config_dropout:
        setattr(config, key, 0.0)
    for module in hf.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def reads_later_tokens(config: Any) -> bool:
    """Whether hidden states depend on later tokens: encoders, and Doge, which is causal only with a mask of its own.

    True too of BART and its like, whose decoder alone is a causal model.
    """
    decoder = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    others = ("doge", "xlnet", "bert-generation")  # in no list of transformers
    return (config.model_type in others and not decoder) or (
        type(config) in MODEL_FOR_MASKED_LM_MAPPING and not decoder
    )


@contextmanager
def published_config(hf: Any) -> Iterator[Any]:
    """The model's config, inside with the dropout rates of the checkpoint that it was loaded from."""
    for config, key, rate in hf.config_dropout:
        setattr(config, key, rate)
    try:
        yield hf.config
    finally:
        for config, key, _ in hf.config_dropout:
            setattr(config, key, 0.0)


def tied_names(module: nn.Module) -> set[str]:
    """The parameters that are another one too, under the names that come later."""
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return every - {name for name, _ in module.named_parameters()}


def input_device(hf: Any) -> torch.device:
    """Where token ids are read. With weights that FSDP keeps on the host it is the device inside a pass alone."""
    return hf.get_input_embeddings().weight.device


def cache_argument(hf: Any) -> str:
    """The argument of its forward pass that takes a cache: `past_key_values` before transformers 5.24, `cache` since
    then, Mamba's `cache_params`."""
    names, takes = ("past_key_values", "cache", "cache_params"), inspect.signature(hf.forward).parameters
    return next((name for name in names if name in takes), names[0])


def cache_bytes_per_token(config: Any, element: int) -> int:
    """Bytes of keys and values of one position, in all layers; `config` is a text config, `element` bytes a number."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:  # a state-space model: its state does not grow
        return 0
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * size * element


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, load reports or warnings inside: what matters in them is checked by the caller."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
