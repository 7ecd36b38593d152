"""Settings whose key exists but which ask for something this version cannot do. One table: a feature that is built
leaves it by deleting its line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel

from valor.config.base import inherited_from
from valor.config.inheritance import absolute
from valor.config.mistakes import show
from valor.config.tree import get_at, walk_keys


@dataclass(frozen=True)
class Unavailable:
    """Keys that match `pattern` (`*`: anything) cannot have a value for which `asks` is true."""

    pattern: str
    asks: Callable[[Any], bool]
    what: str
    instead: str = ""


def _is_set(value: Any) -> bool:
    return value not in (None, False, {}, [], 0, "")


def _among(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _other_than(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value not in values


def _lacks(*items: Any) -> Callable[[Any], bool]:
    return lambda value: not set(items) <= set(value)


RESUMABLE = "model", "optimizer", "extra"
PARTS = "a checkpoint without model, optimizer or extra", "list all three, so that a run resumes exactly"
ENGINES = "use rollout.name=native, vllm or server"
MEGATRON = "the Megatron backend", "use strategy=fsdp2 and no megatron_config"
TOOLS = "multi-turn generation with tools", "leave multi_turn.enable at false"
MANAGER = "this reward manager", "use naive (or prime, the same), dapo, batch or remote"

TABLE: tuple[Unavailable, ...] = (
    Unavailable("*.rollout.name", _among("sglang"), "the SGLang engine", ENGINES),
    Unavailable("*.rollout.name", _among("trtllm"), "the TensorRT-LLM engine", ENGINES),
    Unavailable("*.rollout.do_sample", _among(False), "greedy training rollouts", "leave rollout.do_sample at true"),
    Unavailable("*.rollout.multi_turn.enable", _is_set, *TOOLS),
    Unavailable("*.rollout.agent.default_agent_loop", _other_than("single_turn_agent"), *TOOLS),
    Unavailable("*.rollout.agent.agent_loop_config_path", _is_set, *TOOLS),
    Unavailable("*strategy", _among("megatron"), *MEGATRON),
    Unavailable("*.megatron_config", _is_set, *MEGATRON),
    Unavailable("*checkpoint.save_contents", _lacks(*RESUMABLE), *PARTS),
    Unavailable("*checkpoint.load_contents", _lacks(*RESUMABLE), *PARTS),
    Unavailable("*checkpoint.async_save", _is_set, "saving in the background", "leave async_save at false"),
    Unavailable("*model.enable_activation_offload", _is_set, "activation offload", "use gradient checkpointing"),
    Unavailable("reward.reward_manager.source", _among("importlib"), *MANAGER),
    Unavailable("reward.reward_manager.name", _other_than("naive", "prime", "dapo", "batch", "remote"), *MANAGER),
    Unavailable("data.custom_cls.path", _is_set, "a dataset class of your own", "prepare a parquet or jsonl file"),
)


def unavailable_settings(config: BaseModel) -> list[str]:
    """One line for each thing that is asked for and cannot be had, with the keys that ask for it."""
    tree = config.model_dump()
    asking: dict[tuple[str, str], list[str]] = {}
    for key, section, name in walk_keys(type(config)):
        value = get_at(tree, key)
        source = inherited_from(section, name)
        if source is not None and get_at(tree, absolute(source, key)) == value:
            continue  # the key that it inherits from is named
        for entry in TABLE:
            if fnmatchcase(key, entry.pattern) and entry.asks(value):
                asking.setdefault((entry.what, entry.instead), []).append(f"{key}={show(value)}")
    return [
        f"{what[0].upper()}{what[1:]} is not available in this version: {instead} ({', '.join(settings)})"
        for (what, instead), settings in asking.items()
    ]
