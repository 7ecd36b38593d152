"""`model.override_config`: keys of a Hugging Face config replaced as if its config.json had said so."""

import inspect
import logging
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from logging.handlers import BufferingHandler
from typing import Any

from transformers import AutoModel, PreTrainedConfig, masking_utils, modeling_rope_utils, modeling_utils

from valor.errors import UserError, did_you_mean

_ROPE = "rope_theta", "rope_scaling", "partial_rotary_factor"  # keys of their own before transformers 5
_KEPT_ROPE = "rope_theta", "partial_rotary_factor"  # by a rope_scaling or rope_parameters that does not name them
_WINDOW = "use_sliding_window", "sliding_window", "max_window_layers"
_NO_EFFECT = {
    **{field.name: "it does not change what the model computes here" for field in fields(PreTrainedConfig)},
    "use_cache": "generation has a cache, training has none",
    "gradient_checkpointing": "set model.enable_gradient_checkpointing",
    "num_labels": "the role decides how many outputs the head has",
    **dict.fromkeys(("output_router_logits", "router_aux_loss_coef"), "no loss has a term for the balance of experts"),
    **dict.fromkeys(("dtype", "torch_dtype"), "set fsdp_config.model_dtype and fsdp_config.dtype"),
    **dict.fromkeys(("model_type", "auto_map"), "it says how the directory is read: edit its config.json"),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), "the tokenizer and generation_config.json name them: edit these"),
}


def override(config: Any, changes: Mapping[str, Any], at: str) -> Any:
    """A config that differs from `config` in `changes` and in what is derived from them, such as layer_types.

    A dict for a part, such as text_config, changes keys of that part. `at`: the name of the changes in messages.
    UserError: a key that the config does not have or that changes nothing, or a value of the wrong type.
    """
    parts = {name for name, value in changes.items() if _is_part(getattr(config, name, None), value)}
    plain = {name: value for name, value in changes.items() if name not in parts}
    changed = config
    if plain:
        stated = _stated(config)
        changed = _built(config, stated, plain, at)
        if "sliding_attention" in (getattr(changed, "layer_types", None) or ()) and not changed.sliding_window:
            raise UserError(f"{at}.layer_types has sliding_attention: set {at}.sliding_window to its number of tokens")
        for name, value in plain.items():
            others = {key: other for key, other in plain.items() if key != name}
            _require_effect(_built(config, stated, others, at), changed, name, value, at)
    for name in parts:
        setattr(changed, name, override(getattr(changed, name), changes[name], f"{at}.{name}"))
    return changed


def _is_part(present: Any, value: Any) -> bool:
    return isinstance(present, PreTrainedConfig) and isinstance(value, Mapping)


def _stated(config: Any) -> dict[str, Any]:
    """The config's keys without those whose values it derives from others where they are left out."""
    every = config.to_dict()
    stated = every | {"_name_or_path": config.name_or_path}
    for name in (
        [field.name for field in fields(type(config)) if field.default is None] if is_dataclass(type(config)) else []
    ):
        rest = {key: value for key, value in stated.items() if key != name}
        if every.get(name) is not None and type(config)(**deepcopy(rest)).to_dict() == every:
            stated = rest
    return stated


def _built(config: Any, stated: Mapping[str, Any], changes: Mapping[str, Any], at: str) -> Any:
    """The config that `stated` and `changes` describe."""
    for name in changes:
        if callable(getattr(type(config), name, None)):  # the name of a method
            raise _unknown(config, name, at)
    given = _with_rope_parameters(config, changes, at)
    warnings, logger = BufferingHandler(100), logging.getLogger(modeling_rope_utils.__name__)
    before = logger.level, logger.propagate
    logger.addHandler(warnings)
    logger.level, logger.propagate = logging.WARNING, False
    try:
        made = type(config)(**deepcopy({**stated, **given}))
    except Exception as error:  # of a type, of several keys together, of a class that came with the model
        reason = str(error.args[0] if error.args else error).strip().splitlines()[-1].strip()
        raise UserError(f"{at}={dict(changes)}: {reason}") from None
    finally:
        logger.removeHandler(warnings)
        logger.level, logger.propagate = before
    texts = [record.getMessage() for record in warnings.buffer]
    if changes and (wrong := [text for text in texts if "Unrecognized" in text or "must be" in text]):
        raise UserError(f"{at}={dict(changes)}: {wrong[0]}")
    return made


def _with_rope_parameters(config: Any, changes: Mapping[str, Any], at: str) -> dict[str, Any]:
    """`changes` in the spelling of transformers 5: rope_parameters in place of rope_theta and rope_scaling."""
    given, present = dict(changes), getattr(config, "rope_parameters", None)
    if not present or not {*_ROPE, "rope_parameters"} & given.keys():
        return given
    if "partial_rotary_factor" in given and "partial_rotary_factor" not in {*present, *vars(config)}:
        raise _unknown(config, "partial_rotary_factor", at)
    if any(isinstance(value, Mapping) for value in present.values()):  # for each kind of layer
        kinds, new = ", ".join(present), given.get("rope_parameters")
        if not isinstance(new, Mapping) or not new.keys() <= present.keys():
            name = next(name for name in given if name in (*_ROPE, "rope_parameters"))
            raise UserError(f"{at}.{name}: give {at}.rope_parameters a dict for each kind of layer to change ({kinds})")
        return given | {"rope_parameters": present | {kind: _rope(present[kind], new[kind], at) for kind in new}}
    rope = present
    for name in ("rope_parameters", "rope_scaling"):
        rope = _rope(present, given.pop(name), at) if name in given else rope
    rope = rope | {name: given.pop(name) for name in _KEPT_ROPE if name in given and name in present}
    if not isinstance(rope.get("rope_theta"), int | float):
        raise UserError(f"{at}.rope_theta: expected a number, got {rope.get('rope_theta')!r}")
    return given | {"rope_parameters": rope}


def _rope(present: Mapping[str, Any], new: Any, at: str) -> dict[str, Any]:
    """The parameters `new` of rotary positions, where null is no scaling; what every kind has stays as `present`."""
    new = {"rope_type": "default"} if new is None else new
    named = {"rope_type" if k == "type" else k: v for k, v in new.items()} if isinstance(new, Mapping) else {}
    if named and named.keys() <= {*_KEPT_ROPE}:
        return {**present, **named}
    kinds = ["default", *modeling_rope_utils.ROPE_INIT_FUNCTIONS]
    if named.get("rope_type") not in kinds:
        raise UserError(f"{at}.rope_parameters={new}: give a dict with rope_type, one of {', '.join(kinds)}")
    return {name: present[name] for name in _KEPT_ROPE if name in present} | named


def _unknown(config: Any, name: str, at: str) -> UserError:
    text = config.get_text_config()
    inside = next((part for part in config.sub_configs if getattr(config, part, None) is text), None)
    near = did_you_mean(name, config.to_dict())
    where = f"; set {at}.{inside}.{name}" if inside and name in text.to_dict() else near
    return UserError(f"{at}.{name}: a config of type '{config.model_type}' has no such key{where}")


def _require_effect(without: Any, changed: Any, name: str, value: Any, at: str) -> None:
    """UserError: the key `name` is unknown, or `changed`, which has it, computes what the config `without` it does."""
    key, before, after = f"{at}.{name}", without.to_dict(), changed.to_dict()
    moved = {one for one in before.keys() | after.keys() if before.get(one) != after.get(one)}
    rope = {"rope_theta", "rope_scaling"} if "rope_parameters" in before else set[str]()
    known = {*before, *vars(without), *(getattr(without, "attribute_map", None) or {}), *rope, *_NO_EFFECT}
    if name not in known and not moved - {name}:
        raise _unknown(without, name, at)
    if name in known and getattr(without, name, None) == value:
        return
    if "drop" in name:
        raise UserError(f"{key}={value} has no effect: there is no dropout, as ratios and values must not be random")
    if name in _NO_EFFECT:
        raise UserError(f"{key} has no effect: {_NO_EFFECT[name]}")
    if not moved and name not in rope:
        raise UserError(f"{key}={value} has no effect: the other keys make it {getattr(changed, name, None)}")
    if name in _WINDOW and _windows(without) == _windows(changed):
        raise UserError(
            f"{key}={value} has no effect: no layer gets another window by it; together {at} needs "
            "use_sliding_window=true, sliding_window=TOKENS and max_window_layers below the number of layers"
        )
    if moved == {name} and not _is_read(changed, name):
        raise UserError(f"{key}={value} has no effect: no model of type '{changed.model_type}' reads it")


def _windows(config: Any) -> Any:
    """What a layer sees of the past: everything, or a window of so many tokens."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    return window if kinds is None else [window if kind == "sliding_attention" else kind for kind in kinds]


def _is_read(config: Any, name: str) -> bool:
    """Whether the code that builds and runs a model of transformers names the key; true of other models."""
    model = AutoModel._model_mapping.get(type(config), None)  # type: ignore[attr-defined]
    if not inspect.isclass(model):
        return True
    modules = sys.modules[model.__module__], modeling_utils, modeling_rope_utils, masking_utils
    names = {name, *(old for old, new in config.attribute_map.items() if new == name), config.attribute_map.get(name)}
    return any(str(one) in inspect.getsource(module) for module in modules for one in names)
