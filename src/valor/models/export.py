"""Plain Hugging Face directories: what transformers loads without Valor."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from valor.models.hf import published_config, quiet_transformers, tied_names
from valor.models.lora import ADAPTER_DIR, has_adapters, merged, save_adapter
from valor.models.policy import PolicyModel
from valor.models.reward import RewardModel
from valor.models.value import ValueModel

NamedTensors = Iterable[tuple[str, Tensor]]


def export_hf(
    model: PolicyModel | ValueModel | RewardModel,
    path: Path | str,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    tokenizer: Any | None = None,
) -> None:
    """Write weights, config and tokenizer to the directory `path`.

    A policy becomes an `AutoModelForCausalLM` directory, a value model an `AutoModelForTokenClassification` one, a
    reward model an `AutoModelForSequenceClassification` one. Adapters are merged into its weights, and written by
    themselves, for peft, into its folder `adapter`.

    `state_dict` holds full CPU weights under the names of `model` (default: the model's own).
    """
    weights = dict(state_dict if state_dict is not None else model.state_dict())
    plain = dict(plain_weights(model, weights.items()))
    with quiet_transformers(), published_config(model.hf):
        model.hf.save_pretrained(path, state_dict=plain)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    if has_adapters(model.hf):
        save_adapter(model.hf, Path(path) / ADAPTER_DIR, weights)


def published_weights(model: PolicyModel, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """`weights` (whole, under the names of `model`) one after another as a checkpoint of that model names them.

    Adapters are merged into their layers. Tensors that are tied to another one are left out.
    """
    for name, tensor in plain_weights(model, weights):
        yield from revert_weight_conversion(model.hf, {name: tensor}).items()


def plain_weights(model: PolicyModel | ValueModel | RewardModel, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """`weights` under the names of the Hugging Face model, adapters merged; tied tensors once."""
    # Gathered shards are separate tensors, so transformers cannot see by itself which of them are one.
    tied = tied_names(model)
    return merged(model.hf, ((name.removeprefix("hf."), tensor) for name, tensor in weights if name not in tied))
