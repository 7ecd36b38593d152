"""`model.override_config`: keys of a Hugging Face config replaced as if its config.json had said so."""

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from logging.handlers import BufferingHandler
from typing import Any

from transformers import PreTrainedConfig, modeling_rope_utils

from valor.errors import UserError, did_you_mean

_OLD_ROPE = "rope_theta", "rope_scaling", "partial_rotary_factor"  # keys of the config itself before transformers 5
_ANY_ROPE = "rope_theta", "partial_rotary_factor"  # parameters of every type of rotary positions
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
    new = {name: value for name, value in plain.items() if getattr(config, name, None) != value}
    for name, value in plain.items():
        if name in _OLD_ROPE and getattr(config, "rope_parameters", None):
            new_spelling = value if name == "rope_scaling" else {name: value}
            raise UserError(f"{at}.{name}: transformers 5 has {at}.rope_parameters: set it to {new_spelling}")
        if name not in _known(config) or callable(getattr(type(config), name, None)):  # or the name of a method
            raise _unknown(config, name, at)
    for name, value in new.items():
        if "drop" in name:
            raise UserError(
                f"{at}.{name}={value} has no effect: there is no dropout, as ratios and values must not be random"
            )
        if name in _NO_EFFECT:
            raise UserError(f"{at}.{name} has no effect: {_NO_EFFECT[name]}")
    changed = _built(config, new, at) if new else config
    if "sliding_attention" in (getattr(changed, "layer_types", None) or ()) and not changed.sliding_window:
        raise UserError(f"{at}.layer_types has sliding_attention: set {at}.sliding_window to its number of tokens")
    if (windows := [name for name in _WINDOW if name in new]) and _windows(config) == _windows(changed):
        raise UserError(
            f"{at}.{windows[0]} has no effect: no layer gets another window by it; together {at} needs "
            "use_sliding_window=true, sliding_window=TOKENS and max_window_layers below the number of layers"
        )
    for name in parts:
        setattr(changed, name, override(getattr(changed, name), changes[name], f"{at}.{name}"))
    return changed


def _is_part(present: Any, value: Any) -> bool:
    return isinstance(present, PreTrainedConfig) and isinstance(value, Mapping)


def _known(config: Any) -> set[str]:
    return {*config.to_dict(), *vars(config), *(config.attribute_map or {}), *_NO_EFFECT}


def _built(config: Any, changes: Mapping[str, Any], at: str) -> Any:
    """The config with these `changes` and what follows from them. UserError: of a type or a value that it refuses."""
    stated = config.to_dict() | {"_name_or_path": config.name_or_path}
    if {*_WINDOW, "num_hidden_layers"} & changes.keys():  # which kinds of layers there are follows from these
        stated.pop("layer_types", None)
    if "rope_parameters" in changes and getattr(config, "rope_parameters", None):
        rope = _rope_parameters(config.rope_parameters, changes["rope_parameters"], f"{at}.rope_parameters")
        changes = {**changes, "rope_parameters": rope}
    warnings, logger = BufferingHandler(100), logging.getLogger(modeling_rope_utils.__name__)
    before = logger.level, logger.propagate
    logger.addHandler(warnings)
    logger.level, logger.propagate = logging.WARNING, False
    try:
        made = type(config)(**deepcopy({**stated, **changes}))
    except Exception as error:  # of a type, of several keys together, of a class that came with the model
        reason = str(error.args[0] if error.args else error).strip().splitlines()[-1].strip()
        raise UserError(f"{at}={dict(changes)}: {reason}") from None
    finally:
        logger.removeHandler(warnings)
        logger.level, logger.propagate = before
    texts = [record.getMessage() for record in warnings.buffer]
    if wrong := [text for text in texts if "Unrecognized" in text or "must be" in text]:
        raise UserError(f"{at}={dict(changes)}: {wrong[0]}")
    return made


def _rope_parameters(present: Mapping[str, Any], new: Any, at: str) -> dict[str, Any]:
    """Rotary parameters, or those of each kind of layer, with the `new` ones; theta stays unless it is new."""
    if not isinstance(new, Mapping):
        raise UserError(f"{at}={new}: give a dict, such as {dict(present)}")
    if any(isinstance(value, Mapping) for value in present.values()):
        return {**present, **{kind: _rope_parameters(present.get(kind, {}), new[kind], f"{at}.{kind}") for kind in new}}
    rope = dict(present) if "rope_type" not in new else {n: present[n] for n in _ANY_ROPE if n in present}
    rope |= new
    if not isinstance(rope.get("rope_theta"), int | float):
        raise UserError(f"{at}.rope_theta: expected a number, got {rope.get('rope_theta')!r}")
    return rope


def _unknown(config: Any, name: str, at: str) -> UserError:
    text = config.get_text_config()
    inside = next((part for part in config.sub_configs if getattr(config, part, None) is text), None)
    near = did_you_mean(name, config.to_dict())
    where = f"; set {at}.{inside}.{name}" if inside and name in text.to_dict() else near
    return UserError(f"{at}.{name}: a config of type '{config.model_type}' has no such key{where}")


def _windows(config: Any) -> Any:
    """What a layer sees of the past: everything, or a window of so many tokens."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    return window if kinds is None else [window if kind == "sliding_attention" else kind for kind in kinds]
