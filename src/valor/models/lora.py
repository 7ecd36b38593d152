"""LoRA (Hu et al. 2021, arXiv:2106.09685): small trainable adapters on the linear layers of a frozen model, by peft.

An adapted layer computes W x + s B A x with s = alpha / rank; B starts at zero, so that a new adapter changes nothing.
What trains is the adapters, in float32, and the head of a critic or reward model. Without adapters the model is its
base, bit for bit: the reference policy needs no weights of its own.
"""

import copy
import dataclasses
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from valor.config.engine import BackboneConfig
from valor.errors import UserError
from valor.models.hf import published_config
from valor.models.internals import peft_renames, switch_adapter, without_config
from valor.models.value import HEAD_NAMES

logger = logging.getLogger(__name__)

# peft is imported where it is used: it takes a second, and most runs have no adapters.

ADAPTER_DIR = "adapter"  # beside a merged model: its adapters, as peft reads them
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"  # peft's name of a model's first adapter
_PREFIX = "base_model.model."  # of all names in peft's files
_PART = re.compile(rf"(.*)\.(base_layer|lora_A|lora_B)(?:\.{_NAME})?\.weight")
_TASKS = {"CausalLM": "CAUSAL_LM", "TokenClassification": "TOKEN_CLS", "SequenceClassification": "SEQ_CLS"}
# What an adapter of peft may set and still be W x + s B A x on linear layers.
_UNDERSTOOD = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    "inference_mode",
}


def add_adapters(hf: Any, model: BackboneConfig, *, base: str, seed: int) -> None:
    """Give `hf`, loaded from `base`, the adapters that `model` asks for, if any; freeze all else but a head.

    New ones are drawn from `seed`. UserError: modules that are not there or cannot have adapters, or an adapter
    directory that is not one, or of another rank, scale or base.
    """
    if model.lora_rank == 0:
        return
    from peft import LoraConfig

    if model.lora_adapter_path is None:
        for key in ("target_modules", "exclude_modules"):
            _require_modules(hf, key, getattr(model, key))
        config = LoraConfig(
            r=model.lora_rank,
            lora_alpha=model.lora_alpha,  # pyright: ignore[reportArgumentType]
            target_modules=model.target_modules,
            exclude_modules=model.exclude_modules,
        )
    else:
        config = read_adapter_config(Path(model.lora_adapter_path))
        for key, there in (("lora_rank", config.r), ("lora_alpha", config.lora_alpha)):
            if there != getattr(model, key):
                raise UserError(f"the adapter '{model.lora_adapter_path}' has {key}={there}: set model.{key}={there}")
    config.base_model_name_or_path = base
    inject(hf, config, seed=seed)
    if model.lora_adapter_path is not None:
        _fill(hf, Path(model.lora_adapter_path))


def inject(hf: Any, config: Any, *, seed: int = 0) -> None:
    """Adapters on the layers that `config`, a peft LoraConfig, names; only they and a head require gradients."""
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear

    heads = [name for name in HEAD_NAMES if isinstance(getattr(hf, name, None), nn.Module)]
    config.inference_mode, config.lora_dropout, config.modules_to_save = False, 0.0, None
    config.task_type = "SEQ_CLS"  # peft's word for: "all-linear" leaves out a head of any kind
    targets, linear = config.target_modules, linear_layers(hf)
    if not linear:
        raise UserError(f"{type(hf).__name__} has no layer that can have an adapter: set model.lora_rank=0")
    names = ",".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    remedy = f"adapters are for linear layers below the head: set it to all-linear, or to some of [{names}]"
    if targets == "all-linear":  # peft's own "all-linear" has routers and fused experts among them
        config.target_modules = list(linear)
        _tell_frozen(hf, linear.values())
    base, plain = _checksum(hf), without_config(hf)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, plain, _NAME)
        except (ValueError, re.error) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"model.target_modules={targets} of {type(hf).__name__}: {first}; {remedy}") from error
    hf.peft_config = plain.peft_config
    for name, layer in adapted_layers(hf).items():
        if not isinstance(layer, Linear) or name not in linear:
            raise UserError(f"model.target_modules: {name} of {type(hf).__name__} can have no adapter; {remedy}")
    config.target_modules = sorted(t) if isinstance(t := config.target_modules, set) else t
    if peft_renames(hf, config):
        logger.warning(
            "the folder '%s' of an exported %s is misread by peft, which takes its layers for experts: load the "
            "merged model beside it",
            ADAPTER_DIR, hf.config.model_type,
        )  # fmt: skip
    config.task_type = next((task for kind, task in _TASKS.items() if type(hf).__name__.endswith(kind)), None)
    config.modules_to_save = heads or None
    scale = {"use_rslora": config.use_rslora, "alpha_pattern": config.alpha_pattern}
    hf.adapter_record = {"lora_rank": config.r, "lora_alpha": config.lora_alpha, **scale, "base": base}
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(is_trained(name))
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _checksum(hf: Any) -> str:
    """Sum of the base weights' bits as bfloat16, which is the same whatever precision they are kept in."""
    weights = (p.detach() for name, p in hf.named_parameters() if not is_trained(name))
    bits = (weight.to(torch.bfloat16).contiguous().view(torch.int16) for weight in weights)
    return f"{sum(int(x.sum(dtype=torch.int64)) for x in bits):#x}"


def linear_layers(hf: Any) -> dict[str, Any]:
    """The layers that may have adapters, by name: those that compute a product of their input and their weight alone,
    without the head. A router, or experts in one tensor, is none, nor what a Mamba block hands to its kernels as plain
    weights: all its projections but the first; nor layers with one weight, of which an export can hold no two sums."""
    forwards, heads = (nn.Linear.forward, Conv1D.forward), [getattr(hf, name, None) for name in HEAD_NAMES]
    others = {*map(id, heads), id(hf.get_output_embeddings())}
    for block in hf.modules():
        if {"A_log", "D"} <= block._parameters.keys():
            others |= {id(part) for name, part in block.named_children() if name != "in_proj"}
        elif "Router" in type(block).__name__:
            others |= {*map(id, block.children())}
    linear = [(name, part) for name, part in hf.named_modules() if type(part).forward in forwards]
    layers_of = Counter(part.weight for _, part in linear)
    return {name: part for name, part in linear if id(part) not in others and layers_of[part.weight] == 1}


def _tell_frozen(hf: Any, linear: Iterable[nn.Module]) -> None:
    """Log the matrices that no adapter reaches, such as fused experts, and their share of all weights."""
    reached = {id(module) for module in (*linear, hf.get_output_embeddings())}
    left = {
        f"{name}.{key}": weight.numel()
        for name, module in hf.named_modules()
        if id(module) not in reached and not isinstance(module, nn.Embedding) and name.split(".")[0] not in HEAD_NAMES
        for key, weight in module.named_parameters(recurse=False)
        if weight.ndim > 1
    }
    if left:
        kinds = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in left))
        share = sum(left.values()) / sum(weight.numel() for weight in hf.parameters())
        what = "experts, routers and all else" if "expert" in kinds else "all"
        logger.warning("LoRA on all-linear leaves frozen %s that it cannot reach, %.0f%%: %s", what, 100 * share, kinds)


def adapted_layers(hf: Any) -> dict[str, Any]:
    """The layers with adapters, by name."""
    if not has_adapters(hf):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in hf.named_modules() if isinstance(module, LoraLayer)}


def has_adapters(hf: Any) -> bool:
    return hasattr(hf, "peft_config")


def is_trained(name: str) -> bool:
    """Does the tensor of this name (of `hf`, or of the module around it) learn in a model with adapters?"""
    name = name.removeprefix("hf.")
    return ".lora_A." in name or ".lora_B." in name or name.split(".")[0] in HEAD_NAMES


def adapter_record(hf: Any) -> dict[str, Any]:
    """Settings that the adapters of a checkpoint must share with those of `hf`, besides names and shapes."""
    return getattr(hf, "adapter_record", {"lora_rank": 0})


@contextmanager
def adapters_off(hf: Any) -> Iterator[None]:
    """`hf` computes as its base model inside."""
    layers = adapted_layers(hf).values()
    for layer in layers:
        switch_adapter(layer, on=False)
    try:
        yield
    finally:
        for layer in layers:
            switch_adapter(layer, on=True)


def merged(hf: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`weights` (whole, under the names of `hf`) with W + s B A in place of W, A and B; one after another.

    The sum is taken in float32 and has the dtype of W.
    """
    if not has_adapters(hf):
        yield from weights
        return
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        match = _PART.fullmatch(name)
        if match is None:
            yield name.replace(".base_layer.", "."), tensor  # a bias
            continue
        parts = waiting.setdefault(match[1], {})
        parts[match[2]] = tensor
        if len(parts) == 3:
            del waiting[match[1]]
            yield f"{match[1]}.weight", _sum(hf.get_submodule(match[1]), **parts)


def merged_weight(layer: Any) -> Tensor:
    """W + s B A of an adapted layer, a new tensor, float32."""
    a, b = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
    return _sum(layer, layer.base_layer.weight.float(), a, b)


def low_rank(layer: Any) -> tuple[Tensor, Tensor]:
    """A [rank, in] and s B [out, rank] of a linear layer; of one without an adapter, the rank is 0."""
    if not hasattr(layer, "lora_A"):
        weight = layer.weight
        return weight.new_zeros(0, weight.shape[1]), weight.new_zeros(len(weight), 0)
    return layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight * layer.scaling[_NAME]


def _sum(layer: Any, base_layer: Tensor, lora_A: Tensor, lora_B: Tensor) -> Tensor:
    update = (lora_B.float() @ lora_A.float()) * layer.scaling[_NAME]
    return (base_layer.float() + (update.T if layer.fan_in_fan_out else update)).to(base_layer.dtype)


def save_adapter(hf: Any, path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a directory that `peft.PeftModel.from_pretrained` loads; `weights` are whole, under the names of `hf`."""
    write_adapter_config(hf, path)
    trained = {_in_file(name): tensor.contiguous() for name, tensor in weights.items() if is_trained(name)}
    save_file(trained, path / WEIGHTS_FILE, metadata={"format": "pt"})
    with published_config(hf) as config:
        config.save_pretrained(path)  # how a value is read from a critic's head


def write_adapter_config(hf: Any, path: Path) -> None:
    """adapter_config.json, as peft writes it, in the directory `path`."""
    path.mkdir(parents=True, exist_ok=True)
    config = copy.copy(hf.peft_config[_NAME])
    config.inference_mode = True
    config.save_pretrained(str(path))


def read_adapter_config(path: Path) -> Any:
    """The LoraConfig in a directory that peft or Valor wrote. UserError: none there, or not plain LoRA."""
    from peft import LoraConfig

    try:
        kind = json.loads((path / CONFIG_FILE).read_text()).get("peft_type")
        config: Any = LoraConfig.from_pretrained(str(path)) if kind == "LORA" else None
    except (OSError, ValueError, TypeError, KeyError) as error:
        below = path / ADAPTER_DIR
        near = f"give '{below}'" if (below / CONFIG_FILE).is_file() else f"its {CONFIG_FILE} cannot be read ({error})"
        raise UserError(f"'{path}' is no adapter directory: {near}") from error
    if config is None:
        raise UserError(f"the adapter '{path}' is of peft's type {kind}: only LORA is supported")
    plain = LoraConfig()
    other = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(plain, f.name, None)]
    starts = {"init_lora_weights"} if config.init_lora_weights in (True, False, "gaussian") else set()
    other = [name for name in other if name not in _UNDERSTOOD | starts]
    if other or set(config.modules_to_save or ()) - set(HEAD_NAMES):
        raise UserError(f"the adapter '{path}' is not plain LoRA: it sets {', '.join(other or ['modules_to_save'])}")
    return config


def _fill(hf: Any, path: Path) -> None:
    """Read the weights of the adapter directory `path` into `hf`; a head too, if it holds one."""
    try:
        stored = load_file(path / WEIGHTS_FILE)
    except Exception as error:  # safetensors has errors of its own
        raise UserError(f"the adapter '{path}': {WEIGHTS_FILE} cannot be read ({error})") from error
    parameters = {_in_file(name): p for name, p in hf.named_parameters() if is_trained(name)}
    differences = [f"lacks {name}" for name in parameters if name not in stored and "lora_" in name]
    differences += [f"holds {name}, which this model has not" for name in stored if name not in parameters]
    differences += [
        f"has {name} of shape {tuple(tensor.shape)}, this model of {tuple(parameters[name].shape)}"
        for name, tensor in stored.items()
        if name in parameters and parameters[name].shape != tensor.shape
    ]
    if differences:
        raise UserError(f"the adapter '{path}' is for another model than '{hf.name_or_path}': it {differences[0]}")
    for name, tensor in stored.items():
        parameters[name].data.copy_(tensor)


def _in_file(name: str) -> str:
    return _PREFIX + name.removeprefix("hf.").replace(f".{_NAME}.", ".")


def _require_modules(hf: Any, key: str, wanted: str | list[str] | None) -> None:
    """UserError: a name in a list is neither that of a module nor the end of one's."""
    names = [f".{name}" for name, _ in hf.named_modules()]
    for item in wanted if isinstance(wanted, list) else ():
        if not any(name.endswith(f".{item}") for name in names):
            raise UserError(f"model.{key}: {type(hf).__name__} has no module '{item}'")
