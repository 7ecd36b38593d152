"""The plan of a run, a table of titles and texts from its configuration alone: what --dry-run prints."""

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from math import inf
from typing import Any

import torch

from valor.config import (
    BackboneConfig,
    CriticConfig,
    CriticPretrainConfig,
    CriticRunConfig,
    EvalConfig,
    PPOConfig,
    RMConfig,
    RunConfig,
    Section,
    SupervisedConfig,
    UpdateConfig,
)
from valor.config.describe import show
from valor.config.tree import flatten
from valor.data.files import count_rows
from valor.errors import UserError
from valor.rollout.registry import GENERATION_ENGINES
from valor.trainer.checks import inert_settings
from valor.trainer.phases.standard import phases_of

Rows = Iterator[tuple[str, str]]


def plan(
    config: Section, explicit_keys: Collection[str] = (), presets: Mapping[str, Collection[str]] | None = None
) -> str:
    """Roles, placement, the batch in prompts, samples and tokens, the phases of a step, length and validation.

    `explicit_keys` are examined for settings without effect. `presets`: keys whose values a named configuration gave.
    """
    assert isinstance(config, PPOConfig | SupervisedConfig), "what commands read"
    settings, rows = flatten(config.model_dump(mode="json")), list(_rows(config))
    for preset, keys in (presets or {}).items():
        rows.append((f"from {preset}", " ".join(f"{key}={show(settings[key])}" for key in keys)))
    rows += [("note", f"{key}: {reason}") for key, reason in inert_settings(config, explicit_keys).items()]
    width = max(len(title) for title, _ in rows)
    shown = [("" if title == above else title, text) for (above, _), (title, text) in pairwise([("", ""), *rows])]
    return "\n".join(f"{title:<{width}}  {text}".rstrip() for title, text in shown)


def _rows(config: PPOConfig | SupervisedConfig) -> Rows:
    trainer, data, unit, files = config.trainer, config.data, "prompts", config.data.train_files
    if isinstance(config, SupervisedConfig):
        unit = "pairs" if isinstance(config, RMConfig) else "samples"
    elif isinstance(config, CriticRunConfig):
        yield from _critic_rows(config)
        if not isinstance(config, CriticPretrainConfig):
            return
        files = config.pretrain.rollouts or files
    elif isinstance(config, EvalConfig):
        yield from _eval_rows(config)
        return
    yield "run", f"{trainer.project_name}/{trainer.experiment_name} in {trainer.default_local_dir}"
    if isinstance(config, SupervisedConfig):
        yield "model", _model(config.model)
        yield "placement", _processes(trainer)
        size, longest = data.train_batch_size, config.data.max_length
        yield "batch", f"{size:,} {unit} per update, each text at most {longest:,} tokens"
    elif not isinstance(config, CriticRunConfig):
        yield from _ppo_rows(config)
    yield "length", _length(config, unit)
    yield "training data", getattr(data, "taskset", None) or _and(*files)
    yield "validation", _validation(config)


def num_rows(config: PPOConfig | SupervisedConfig) -> int | None:
    """Rows of the training files, as many as are used; None: they come from a class of the user's, or a task set.
    UserError: a file cannot be read."""
    own_class = getattr(getattr(config.data, "custom_cls", None), "path", None)
    if own_class is not None or getattr(config.data, "taskset", None) is not None:
        return None
    rows, limit = sum(map(count_rows, config.data.train_files)), config.data.train_max_samples
    return min(rows, limit) if limit > 0 else rows


def _length(config: PPOConfig | SupervisedConfig, unit: str) -> str:
    trainer, size = config.trainer, config.data.train_batch_size
    if trainer.total_training_steps is not None:
        return _count(trainer.total_training_steps, "step")
    epochs = _count(trainer.total_epochs, "epoch")
    try:
        rows = None if isinstance(config, CriticRunConfig) else num_rows(config)
    except UserError:  # that a file is missing is said by itself
        rows = None
    sampler = getattr(config.data, "sampler", None)
    if rows is None or (sampler is not None and sampler.class_path is not None):
        return f"{epochs} x ({unit} of an epoch / {size:,}) steps"
    about = ""
    if isinstance(config, RMConfig) and config.data.val_files is None and config.data.train_max_samples <= 0:
        about, rows = "about ", round(rows * (1 - config.data.val_share))  # prompts are held out, not pairs
    steps, left = _count(trainer.total_epochs * (rows // size), "step"), rows % size
    each_once = sampler is None or not sampler.difficulty.enable
    rest = f", {left} left out of each" if config.data.shuffle else f", the last {left} never (data.shuffle=false)"
    of = f"{epochs} of {about}{_count(rows, unit.removesuffix('s'))}, {size:,} at a time"
    return f"{about}{steps}: {of}{rest if left and each_once and not about else ''}"


def _critic_rows(config: CriticRunConfig) -> Rows:
    yield "critic", _critic(config.critic)
    yield "policy", _model(config.actor_rollout_ref.model)
    if config.generator is not None:
        yield "answers", f"{config.actor_rollout_ref.rollout.n} to each prompt, by {config.generator}"
    yield "placement", _processes(config.trainer)


def _eval_rows(config: EvalConfig) -> Rows:
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    yield "policy", _model(config.actor_rollout_ref.model)
    yield from (("", path) for path in config.eval.others or ())
    drawn = f"{_count(sampling.n, 'answer')} to each prompt at temperature {sampling.effective_temperature:g}"
    yield "answers", f"{drawn}, by {config.generator}"
    yield "reward", _reward(config)
    yield "placement", _processes(config.trainer)
    yield "prompts", _and(*config.data.val_files or [])
    yield "results", config.eval.out


def _ppo_rows(config: PPOConfig) -> Rows:
    policy, engine = config.actor_rollout_ref, config.actor_rollout_ref.rollout.name
    yield "algorithm", f"{config.algorithm.adv_estimator}, policy loss {config.policy_loss}"
    yield "actor", _and(_model(policy.model), policy.actor.strategy == "megatron" and "by megatron-core")
    yield "rollout", _and(engine, engine in GENERATION_ENGINES and GENERATION_ENGINES[engine].plan(config))
    if config.plays_episodes:
        yield "episodes", _episodes(config)
    yield "critic", _critic(config.critic)
    penalty, loss = config.algorithm.use_kl_in_reward, policy.actor.use_kl_loss
    uses = _and(penalty and "KL penalty in the reward", loss and "KL loss", config.has_probe and "critic's features")
    needed = config.needs_reference
    yield "reference", f"{policy.model.path}: {uses}" if needed else "none (no KL term is on)"
    yield "reward", _reward(config)
    main = "roles of no pool below" if config.pools else "all roles"
    controller = "ray" if config.pools else config.trainer.controller
    yield "placement", f"{_processes(config.trainer)}; {main} share each process; controller {controller}"
    for name, pool in config.pools.items():
        nodes = f" on each of {pool.nnodes} nodes" if pool.nnodes > 1 else ""
        yield "placement", f"pool {name}: {_count(pool.n_gpus_per_node, 'process')}{nodes}: {_and(*pool.roles)}"
    yield from (("batch", text) for text in _batch(config))
    yield "step", "collect: prompts, answers and their scores"
    for phase in phases_of(config):
        added = f"; adds {', '.join(sorted(phase.adds))}" if phase.adds else ""
        yield "step", f"{phase.name} ({phase.role or 'driver'}): {phase.plan()}{added}"


def _and(*parts: Any) -> str:
    """The parts that are neither empty nor False."""
    return ", ".join(str(part) for part in parts if part)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def _model(model: BackboneConfig) -> str:
    start = f" from {model.lora_adapter_path}" if model.lora_adapter_path is not None else ""
    return model.path + (f" with LoRA adapters of rank {model.lora_rank}{start}" if model.lora_rank else "")


def _critic(critic: CriticConfig) -> str:
    if not critic.enable:
        return "none"
    if critic.kind == "probe":
        start = critic.probe.path and f"from {critic.probe.path}"
        features = f"at most {critic.probe.features:,} numbers of the {critic.probe.states}'s hidden states"
        return _and("ridge regression", features, start, "frozen" if critic.freeze else "")
    frozen = critic.freeze_steps and f"frozen in steps {_and(*critic.freeze_steps)}"
    ensemble = critic.ensemble_size > 1 and f"{critic.ensemble_reduce} of {critic.ensemble_size}"
    return _and(_model(critic.model), "frozen" if critic.freeze else frozen, ensemble)


def _episodes(config: PPOConfig) -> str:
    """Who plays them, with what, and how many turns; names of tools are in their files (`RunInputs` says them)."""
    multi, agent = config.actor_rollout_ref.rollout.multi_turn, config.actor_rollout_ref.rollout.agent
    if agent.replay_dir is not None:
        return f"recorded ones of {agent.replay_dir}"
    search = f"searches in {config.retriever.corpus_path or config.retriever.url}" if config.do_search else ""
    files = _and(multi.tool_config_path, multi.function_tool_path)
    most = config.max_turns + 1 if config.do_search else multi.most_turns
    turns = "any number of turns that fit" if most == inf else f"at most {_count(int(most), 'turn')}"
    return _and(
        f"by {config.default_agent_loop}",
        agent.environment or config.data.taskset,
        files and f"tools of {files}",
        search,
        agent.agent_loop_config_path and f"loops of {agent.agent_loop_config_path}",
        f"{turns} in {config.episode_length:,} tokens",
    )


def _reward(config: PPOConfig) -> str:
    function, model = config.reward.custom_reward_function, config.reward.reward_model
    agent, by_column = config.actor_rollout_ref.rollout.agent, f"built in, by column {config.data.reward_fn_key}"
    reward = f"{function.path}:{function.name}".removesuffix(f".pkl:{function.name}") if function.path else by_column
    if model.enable and not model.scores:
        reward += f"; advantages + {model.weight:g} x progress under {model.model_path}"
    elif model.enable:
        name = f"judge {model.judge.model}" if model.judge.url else f"reward model {model.model_path}"
        rule = "" if model.replaces_rule else f" + {model.rule_weight:g} x {reward}"
        reward = f"{model.weight:g} x {name} ({model.gives}){rule}"
    if agent.replay_dir is not None:
        return f"as recorded, else {reward}"
    if environment := agent.environment or config.data.taskset:
        return f"by the environment {environment}, else {reward}"
    return reward


def _processes(trainer: RunConfig) -> str:
    nodes, processes = getattr(trainer, "nnodes", 1), trainer.n_gpus_per_node
    here = nodes == 1 and processes in (None, 1) and not torch.cuda.is_available()
    if trainer.device == "cpu" or (trainer.device == "auto" and here):
        each = _count(processes or 1, "CPU process")
    else:
        each = "one process per GPU" if processes is None else _count(processes, "GPU")
    return f"{each} on each of {nodes} nodes" if nodes > 1 else f"{each} on this machine"


def _batch(config: PPOConfig) -> Iterator[str]:
    data, n = config.data, config.actor_rollout_ref.rollout.n
    samples, longest = data.train_batch_size * n, data.max_prompt_length + data.max_response_length
    yield (
        f"{data.train_batch_size:,} prompts x {_count(n, 'sample')} = {samples:,} samples/step, at most "
        f"{data.max_prompt_length:,} + {data.max_response_length:,} tokens each = {samples * longest:,} tokens/step"
    )
    yield f"actor: {_updates(config, config.actor_rollout_ref.actor)}"
    if config.trains_critic and config.has_value_model:
        yield f"critic: {_updates(config, config.critic)}"


def _updates(config: PPOConfig, role: UpdateConfig) -> str:
    prompts, size = config.data.train_batch_size, role.ppo_mini_batch_size
    count = config.updates_per_step(role) // role.ppo_epochs
    last = f" (the last one {prompts % size} prompts)" if prompts % size and count > 1 else ""
    rows = "" if role.max_rows is None else f" and {role.max_rows:,} samples"
    return (
        f"{size:,}-prompt mini-batches = {size * config.actor_rollout_ref.rollout.n:,} samples -> "
        f"{_count(count, 'update')}{last} x {_count(role.ppo_epochs, 'epoch')}; micro-batches of at most "
        f"{role.ppo_max_token_len_per_gpu:,} tokens{rows} per process"
    )


def _validation(config: PPOConfig | SupervisedConfig) -> str:
    trainer, tasks = config.trainer, getattr(config.data, "taskset", None)
    files = _and(*config.data.val_files or []) if tasks is None else ""
    if isinstance(config, PPOConfig) and config.data.val_tasks:
        files = f"the last {_count(config.data.val_tasks, 'task')} of {tasks}"
    every = _and(trainer.test_freq > 0 and f"every {trainer.test_freq} steps", "after the last")
    if isinstance(config, CriticPretrainConfig):
        return f"after every epoch: {config.pretrain.holdout:.0%} of the prompts, held out"
    if isinstance(config, RMConfig) and not files and config.data.val_share > 0:
        files = f"{config.data.val_share:.0%} of the prompts of each source, held out"
    if files and isinstance(config, PPOConfig):
        first, sampling = config.trainer.val_before_train, config.actor_rollout_ref.rollout.val_kwargs
        every = "alone" if config.trainer.val_only else _and(first and "before the first step", every)
        every += f"; {_count(sampling.n, 'response')} per prompt at temperature {sampling.effective_temperature:g}"
    return f"{every}: {files}" if files else "none (data.val_files is not set)"
