"""What a configuration asks of this machine that is not there: all of it at once, before anything is loaded."""

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from valor.collector.inputs import check_positions
from valor.config import CriticRunConfig, DataConfig, PPOConfig, RMConfig, SFTConfig, SupervisedConfig, TrainerConfig
from valor.config.critic_runs import CriticSearchConfig
from valor.controller.placement import resolve_pool
from valor.data.demonstrations import chat_of
from valor.data.files import OPTIONAL_COLUMNS, existing_file, parse_row, read_records, read_rows
from valor.data.messages import row_options
from valor.data.preferences import pair_of
from valor.data.prompts import render, token_ids
from valor.data.templates import ask_template, parts_of
from valor.errors import UserError
from valor.models.load import check_critic, load_model_config, load_model_tokenizer
from valor.models.reward import reward_model_kind
from valor.rewards.manager import make_graders
from valor.rewards.registry import needs_truth, require_graders
from valor.trainer.checks import placed

_FIRST_ROWS = 20  # of each file

Check = Callable[[], Any]


def lacking(config: PPOConfig | SupervisedConfig) -> list[str]:
    """A line for each file, column, model, grader and device that a run of `config` would miss, or find unfit.

    Of a file the first rows are read, of a model its config and its tokenizer; a model that would be downloaded is
    taken for granted.
    """
    checks = _supervised(config) if isinstance(config, SupervisedConfig) else _ppo(config)
    lines: list[str] = []
    for check in [*checks, partial(_check_folder, Path(config.trainer.default_local_dir))]:
        try:
            check()
        except UserError as error:
            lines += str(error).splitlines()
    return list(dict.fromkeys(lines))


def _ppo(config: PPOConfig) -> Iterator[Check]:
    policy, data, reward_model = config.actor_rollout_ref, config.data, config.reward.reward_model
    if not isinstance(config, CriticSearchConfig):  # it is one process, wherever it is
        yield partial(placed, config)
    at = policy.model.tokenizer_path or policy.model.path
    tokenizer = _tokenizer_of(at, policy.model, chat=True)
    if _is_here(policy.model.path):
        yield partial(check_positions, config)
    if tokenizer is not None:
        yield tokenizer
    if config.critic.enable and _is_here(config.critic.model.path):
        yield partial(load_model_config, config.critic.model)
        if tokenizer is not None:
            yield lambda: check_critic(config, tokenizer())
    judge = reward_model.model_path if config.generator and reward_model.is_role else None
    if judge is not None and _is_here(judge):
        yield partial(reward_model_kind, reward_model)
    if config.generator and not reward_model.replaces_rule:
        yield lambda: make_graders(config.reward).close()
    if isinstance(config, CriticRunConfig):
        return
    multi = policy.rollout.multi_turn
    tools = config.plays_episodes and (multi.tool_config_path or multi.function_tool_path)
    parts, needed = ({"tools", "tool"}, ["tool"]) if tools else (set[str](), [])
    graded = config.reward.custom_reward_function.path is None and not config.plays_episodes
    if not data.train_files:
        yield partial(read_rows, [])
    for path in data.train_files:
        yield partial(_check_prompts, path, data, tokenizer, graded and not reward_model.replaces_rule, parts)
    for path in data.val_files or []:
        yield partial(_check_prompts, path, data, tokenizer, graded and not reward_model.enable, parts)
    if tokenizer is not None:
        yield lambda: ask_template(tokenizer(), parts, data.apply_chat_template_kwargs, needed)


def _supervised(config: SupervisedConfig) -> Iterator[Check]:
    yield partial(resolve_pool, TrainerConfig(**config.trainer.model_dump()))
    if _is_here(config.model.path):
        yield partial(load_model_config, config.model)
    at = config.model.tokenizer_path or config.model.path
    tokenizer, parts = _tokenizer_of(at, config.model, chat=isinstance(config, SFTConfig)), {"end"}
    if tokenizer is not None:
        yield tokenizer
    for path in [*config.data.train_files, *(config.data.val_files or [])]:
        yield partial(_check_texts, path, config, parts)
    if tokenizer is not None:
        kwargs = config.data.apply_chat_template_kwargs if isinstance(config, SFTConfig) else None
        yield lambda: tokenizer().chat_template and ask_template(tokenizer(), parts, kwargs, needed=["assistant"])


def _tokenizer_of(path: str, model: Any, *, chat: bool) -> Callable[[], Any] | None:
    """What loads it, once; None where it would be downloaded."""
    return cache(partial(load_model_tokenizer, model, at=path, chat=chat)) if _is_here(path) else None


def _is_here(path: str) -> bool:
    """Whether a model is a directory, or something that can only be one, or in the hub's cache of this machine."""
    if Path(path).exists() or path.startswith(("/", "~", ".")) or path.count("/") != 1:
        return True
    return isinstance(try_to_load_from_cache(path, "config.json"), str)


def _check_folder(folder: Path) -> None:
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"trainer.default_local_dir={folder}: nothing can be written to '{there}'")


def _check_prompts(
    path: str, data: DataConfig, tokenizer: Callable[[], Any] | None, graded: bool, parts: set[str]
) -> None:
    """The first rows: their columns, that somebody can grade them, and that the first one fits; `parts` gets theirs."""
    required = (data.prompt_key, data.reward_fn_key, "reward_model")
    records = islice(read_records(existing_file(path), required, OPTIONAL_COLUMNS), _FIRST_ROWS)
    rows = [parse_row(record, where, data.prompt_key, data.reward_fn_key) for where, record in records]
    parts |= parts_of(row.messages for row in rows)
    if graded:
        require_graders(row.data_source for row in rows)
        for row in rows:
            if row.style == "rule" and row.lacks_truth and needs_truth(row.data_source):
                grader = f"the grader of '{row.data_source}' needs"
                raise UserError(f"{row.where}: there is no reward_model.ground_truth, which {grader}")
    if tokenizer is None or data.filter_overlong_prompts or data.truncation != "error":
        return
    text = render(tokenizer(), rows[0].messages, data.apply_chat_template_kwargs | rows[0].template, rows[0].where)
    length = len(token_ids(tokenizer(), [text])[0])
    if length > data.max_prompt_length:
        raise UserError(
            f"{rows[0].where}: the prompt has {length} tokens, data.max_prompt_length is {data.max_prompt_length}: "
            "raise it, or set data.filter_overlong_prompts=true or data.truncation"
        )


def _check_texts(path: str, config: SupervisedConfig, parts: set[str]) -> None:
    pairs = isinstance(config, RMConfig)
    parse: Any = pair_of if pairs else chat_of
    required = (config.data.chosen_key, config.data.rejected_key) if pairs else ()
    for where, record in islice(read_records(existing_file(path), required), _FIRST_ROWS):
        row = parse(record, where, config.data)
        options = row_options(record, where)
        parts |= parts_of([row.prompt] if pairs else row[:1]) | ({"tools"} if "tools" in options else set())
