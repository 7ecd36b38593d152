"""Transformers as it is used here: models without dropout, and no output of its own on the console of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.utils import logging as hf_logging


def disable_dropout_in_config(config: Any) -> None:
    """Zero every dropout rate of a transformers config and of its text part, so that models built from it have none.

    A policy ratio or a value must not depend on a random mask.
    """
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for key, value in part.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)


def disable_dropout(hf: Any) -> None:
    """Zero the rates of a built model, those that its modules copied from the config too."""
    disable_dropout_in_config(hf.config)
    for module in hf.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


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
