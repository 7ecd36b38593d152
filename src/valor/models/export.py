"""Plain Hugging Face directories: what transformers loads without Valor."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from shutil import copyfile
from typing import Any

from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from valor.data.templates import end_tokens
from valor.models.classifier import is_made, write_class
from valor.models.hf import published_config, quiet_transformers, tied_names
from valor.models.images import vision_tower
from valor.models.lora import ADAPTER_DIR, has_adapters, merged, save_adapter
from valor.models.policy import PolicyModel
from valor.models.reward import RewardModel
from valor.models.value import ValueModel

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")

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
    reward model an `AutoModelForSequenceClassification` one. Adapters are merged into its weights, and also written to
    its folder `adapter` as peft reads them. `state_dict`: unsharded CPU weights under the names of `model`.
    """
    weights = dict(state_dict if state_dict is not None else model.state_dict())
    plain = dict(plain_weights(model, weights.items()))
    with quiet_transformers(), published_config(model.hf):
        # Where our class comes with the model, transformers knows no other names of its weights.
        renamed = is_made(model.hf) and vision_tower(model.hf) is not None
        model.hf.save_pretrained(path, state_dict=plain, save_original_format=not renamed)
    write_class(model.hf, path)
    if tokenizer is not None:
        write_tokenizer(tokenizer, path)
    if has_adapters(model.hf):
        save_adapter(model.hf, Path(path) / ADAPTER_DIR, weights)


def write_tokenizer(tokenizer: Any, path: Path | str) -> None:
    """Write it beside a model, and add the tokens with which it ends a turn to those of generation_config.json."""
    tokenizer.save_pretrained(path)
    if (Path(path) / "generation_config.json").is_file():
        config: Any = GenerationConfig.from_pretrained(path)
        stated = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        ends = list(dict.fromkeys(end for end in [*stated, *end_tokens(tokenizer)] if end is not None))
        config.eos_token_id = ends if len(ends) > 1 else next(iter(ends), None)
        config.save_pretrained(path)


def copy_processor(source: Path | str, path: Path) -> None:
    """Copy what the model at `source`, a directory or a name on the hub, has of a processor of images."""
    for name in _PROCESSOR_FILES:
        file = Path(source) / name if Path(source).is_dir() else try_to_load_from_cache(str(source), name)
        if isinstance(file, str | Path) and Path(file).is_file():
            copyfile(file, path / name)


def published_weights(model: PolicyModel, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Unsharded `weights` under the names of a checkpoint of `model`; adapters merged, tied tensors once."""
    for name, tensor in plain_weights(model, weights):
        yield from revert_weight_conversion(model.hf, {name: tensor}).items()


def plain_weights(model: PolicyModel | ValueModel | RewardModel, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """`weights` under the names of the Hugging Face model, adapters merged; tied tensors once."""
    # Gathered shards are separate tensors, so transformers cannot see by itself which of them are one.
    tied = tied_names(model)
    return merged(model.hf, ((name.removeprefix("hf."), tensor) for name, tensor in weights if name not in tied))
