"""What a run would miss on this machine, or find unfit: all of it at once, before a model is loaded, for --dry-run."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from valor.collector.inputs import RunInputs, check_positions
from valor.config import CriticRunConfig, EvalConfig, PPOConfig, RMConfig, SupervisedConfig, held_out
from valor.data.files import read_records
from valor.data.sampler import PromptSampler
from valor.engines.checkpoint import MODEL_CONFIG_DIR
from valor.errors import UserError
from valor.models.load import check_critic, load_model_config, load_policy_tokenizer
from valor.models.reward import reward_model_kind
from valor.rewards.manager import make_graders
from valor.trainer.checkpoints import MANIFEST_FILE, read_manifest
from valor.trainer.checks import placed
from valor.trainer.export import TOKENIZER_DIR
from valor.trainer.missing import are_here, missing
from valor.trainer.phases.critic_prompts import check_critic_prompts
from valor.trainer.phases.distillation import check_routes
from valor.trainer.plan import num_rows
from valor.trainer.rm import RewardModelRun
from valor.trainer.supervised import SFTRun

_ROWS = 2000  # of each data set that are rendered and tokenised


def lacking(config: PPOConfig | SupervisedConfig) -> list[str]:
    """A line for each file, column, model, grader and device that a run of `config` would miss, or find unfit.

    The checks are those of the run's own start, on few rows; a model that would be downloaded is not examined.
    """
    lines = missing(config)
    for check in _checks(_of_evaluation(config) if isinstance(config, EvalConfig) else config):
        try:
            check()
        except UserError as error:
            lines += str(error).splitlines()
    return list({line.partition(";")[0]: line for line in lines}.values())  # a missing file is told once


def _of_evaluation(config: EvalConfig) -> PPOConfig:
    """The tree of a run on the prompts; of a checkpoint its files of config and tokenizer, where a model has them."""
    model, tree = config.actor_rollout_ref.model, held_out(config)
    checkpoint = Path(model.path)
    if not (checkpoint / MANIFEST_FILE).exists():
        return tree
    paths = {"path": str(checkpoint / "actor" / MODEL_CONFIG_DIR)}
    if model.tokenizer_path in (None, model.path):
        paths["tokenizer_path"] = str(checkpoint / TOKENIZER_DIR)
    policy = config.actor_rollout_ref.model_copy(update={"model": model.model_copy(update=paths)})
    return tree.model_copy(update={"actor_rollout_ref": policy})


def _checks(config: PPOConfig | SupervisedConfig) -> Iterator[Callable[[], Any]]:
    """Each stage alone, so that a mistake in one hides none in another; then all together, as the run has them."""
    yield partial(_check_folder, Path(config.trainer.default_local_dir))
    if config.trainer.resume_mode == "resume_path" and config.trainer.resume_from_path:
        yield partial(read_manifest, Path(config.trainer.resume_from_path).expanduser())
    if not isinstance(config, CriticRunConfig):
        from_files = getattr(config.data, "taskset", None) is None
        for path in [*config.data.train_files, *(config.data.val_files or [])] if from_files else ():
            yield lambda path=path: next(read_records(path, optional=()))
        yield partial(_check_batch, config)
    if isinstance(config, PPOConfig):
        yield from _ppo(config)
    elif are_here(config.model.path, config.model.tokenizer_path):
        run: Any = RewardModelRun if isinstance(config, RMConfig) else SFTRun
        yield lambda: run(_on_few_rows(config), "")


def _ppo(config: PPOConfig) -> Iterator[Callable[[], Any]]:
    policy, judge = config.actor_rollout_ref, config.reward.reward_model
    yield partial(placed, config)
    if config.generator and not judge.replaces_rule:
        yield lambda: make_graders(config.reward).close()
    if config.has_value_model and are_here(config.critic.model.path):
        yield partial(load_model_config, config.critic.model)
    if not are_here(policy.model.path, policy.model.tokenizer_path):
        return
    yield partial(check_positions, config)
    if are_here(config.critic.model.path):
        yield lambda: check_critic(config, load_policy_tokenizer(config))
    if config.generator and judge.is_role and are_here(judge.model_path):
        yield partial(reward_model_kind, judge)
    if not isinstance(config, CriticRunConfig) and are_here(judge.model_path if judge.is_role else None):
        yield lambda: _check_inputs(_on_few_rows(config))


def _check_inputs(config: PPOConfig) -> None:
    """UserError: what the run refuses of its rows."""
    with closing(RunInputs(config)) as inputs:
        check_routes(config, inputs)
        check_critic_prompts(config, inputs)


def _on_few_rows(config: Any) -> Any:
    """The same run on the first rows of its data; with batches of one row where these are not all."""
    limits = {name: getattr(config.data, name) for name in ("train_max_samples", "val_max_samples")}
    few = {name: min(limit, _ROWS) if limit > 0 else _ROWS for name, limit in limits.items()}
    size = config.data.train_batch_size if (num_rows(config) or sys.maxsize) <= _ROWS else 1
    data = config.data.model_copy(update={**few, "shuffle": False, "train_batch_size": size, "gen_batch_size": None})
    return config.model_copy(update={"data": data})


def _check_batch(config: Any) -> None:
    """UserError: the training files have fewer rows than a batch."""
    if config.data.train_files and (rows := num_rows(config)) is not None:
        PromptSampler(rows, config.data.train_batch_size)


def _check_folder(folder: Path) -> None:
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"trainer.default_local_dir={folder}: nothing can be written to '{there}'")
