"""Plain Hugging Face directories: what transformers loads without Valor."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME

from valor.config.engine import ModelConfig
from valor.data.templates import end_tokens
from valor.errors import UserError
from valor.models.hf import quiet_transformers, tied_names
from valor.models.load import load_model_config
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
    with quiet_transformers():
        model.hf.save_pretrained(path, state_dict=plain)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
        write_end_tokens(path, end_tokens(tokenizer))
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


def end_token_ids(model: ModelConfig, given: Sequence[int] = ()) -> list[int]:
    """`given` and the end tokens that the model's own files name. UserError: the model has no such token."""
    try:
        own: Any = GenerationConfig.from_pretrained(model.path).eos_token_id
    except OSError:
        own = GenerationConfig.from_model_config(load_model_config(model)).eos_token_id
    ends = sorted({*given, *_as_list(own)})
    size = int(load_model_config(model).get_text_config().vocab_size)
    if ends and not 0 <= ends[0] <= ends[-1] < size:
        raise UserError(
            f"the model '{model.path}' knows {size} tokens, and its end is to be one of {ends}: correct eos_token_id "
            "in its generation_config.json and config.json"
        )
    return ends


def write_end_tokens(path: Path | str, ends: Sequence[int]) -> None:
    """Add `ends` to those in the generation_config.json of an exported model, if it generates."""
    if (Path(path) / GENERATION_CONFIG_NAME).is_file():
        config: Any = GenerationConfig.from_pretrained(path)
        found = list(dict.fromkeys([*_as_list(config.eos_token_id), *ends]))
        config.eos_token_id = found[0] if len(found) == 1 else found or None
        config.save_pretrained(path)


def _as_list(ends: Any) -> list[int]:
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
