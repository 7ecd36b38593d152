"""The plan of a run, a table of titles and texts from its configuration alone: what --dry-run prints."""

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

import torch

from valor.algorithms import ADVANTAGES
from valor.config import (
    BackboneConfig,
    CriticConfig,
    CriticPretrainConfig,
    CriticRunConfig,
    PPOConfig,
    RMConfig,
    RunConfig,
    Section,
    SupervisedConfig,
    UpdateConfig,
)
from valor.config.describe import show
from valor.config.tree import flatten
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
    yield "run", f"{trainer.project_name}/{trainer.experiment_name} in {trainer.default_local_dir}"
    if isinstance(config, SupervisedConfig):
        yield "model", _model(config.model)
        yield "placement", _processes(trainer)
        yield (
            "batch",
            f"{data.train_batch_size:,} {unit} per update, each text at most {config.data.max_length:,} tokens",
        )
    elif not isinstance(config, CriticRunConfig):
        yield from _ppo_rows(config)
    steps = trainer.total_training_steps
    epochs = (
        f"{_count(trainer.total_epochs, 'epoch')} x ({unit} in the training data / {data.train_batch_size:,}) steps"
    )
    yield "length", epochs if steps is None else _count(steps, "step")
    yield "training data", _and(*files)
    yield "validation", _validation(config)


def _critic_rows(config: CriticRunConfig) -> Rows:
    yield "critic", _critic(config.critic)
    yield "policy", _model(config.actor_rollout_ref.model)
    if config.generator is not None:
        yield "answers", f"{config.actor_rollout_ref.rollout.n} to each prompt, by {config.generator}"
    yield "placement", _processes(config.trainer)


def _ppo_rows(config: PPOConfig) -> Rows:
    policy, critic, engine = config.actor_rollout_ref, config.critic, config.actor_rollout_ref.rollout.name
    yield "algorithm", f"{config.algorithm.adv_estimator}, policy loss {config.policy_loss}"
    yield "actor", _and(_model(policy.model), _engine(policy.actor))
    yield "rollout", _and(engine, engine in GENERATION_ENGINES and GENERATION_ENGINES[engine].plan(config))
    yield "critic", _and(_critic(critic), critic.enable and _engine(critic))
    terms = {"KL penalty in the reward": config.algorithm.use_kl_in_reward, "KL loss": policy.actor.use_kl_loss}
    uses = _and(*(term for term, is_on in terms.items() if is_on))
    yield "reference", f"{policy.model.path}: {uses}" if uses else "none (no KL term is on)"
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


def _and(*parts: str | bool) -> str:
    """The parts that are not empty or False."""
    return ", ".join(str(part) for part in parts if part)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def _model(model: BackboneConfig) -> str:
    start = f" from {model.lora_adapter_path}" if model.lora_adapter_path is not None else ""
    return model.path + (f" with LoRA adapters of rank {model.lora_rank}{start}" if model.lora_rank else "")


def _engine(role: UpdateConfig) -> str:
    if role.strategy != "megatron":
        return ""
    return _and(
        "by megatron-core", *(f"{name} parallel {size}" for name, size in role.megatron.sizes.items() if size > 1)
    )


def _critic(critic: CriticConfig) -> str:
    if not critic.enable:
        return "none"
    ensemble = critic.ensemble_size > 1 and f"{critic.ensemble_reduce} of {critic.ensemble_size}"
    shards = critic.ensemble_shards and "each from its own samples of every prompt"
    frozen = f"frozen in steps {_and(*critic.freeze_steps)}" if critic.freeze_steps else ""
    return _and(_model(critic.model), "frozen" if critic.freeze else frozen, ensemble, shards)


def _reward(config: PPOConfig) -> str:
    function, model, agent = (
        config.reward.custom_reward_function,
        config.reward.reward_model,
        config.actor_rollout_ref.rollout.agent,
    )
    text = f"{function.path}:{function.name}" if function.path else f"built in, by column {config.data.reward_fn_key}"
    text = text.removesuffix(f".pkl:{function.name}")  # a Python session's functions
    if model.enable:
        name = (
            f"judge {model.judge.model} at {model.judge.url}" if model.judge.url else f"reward model {model.model_path}"
        )
        if model.gives == "steps":
            entry = ADVANTAGES[config.algorithm.adv_estimator]
            by_token = "reward_on_masked" in entry.options or not entry.builtin
            name += f" at the end of each step ({entry.name} takes {'each at its token' if by_token else 'their sum'})"
        rule = "in the rule's place" if model.replaces_rule else f"+ {model.rule_weight:g} x rule ({text})"
        progress = f"{text}; advantages + {model.weight:g} x progress under {model.model_path}"
        text = f"{model.weight:g} x {name} {rule}" if model.scores else progress
    if agent.replay_dir is not None:
        return f"as recorded; of episodes without a score: {text}"
    if config.default_agent_loop == "environment_agent":
        return f"by the environment, {agent.environment}; where it leaves it open: {text}"
    return text


def _processes(trainer: RunConfig) -> str:
    nodes, processes = getattr(trainer, "nnodes", 1), trainer.n_gpus_per_node
    here = nodes == 1 and processes in (None, 1) and not torch.cuda.is_available()
    if trainer.device == "cpu" or (trainer.device == "auto" and here):
        each = _count(processes or 1, "CPU process")
    else:
        each = "one process per GPU" if processes is None else _count(processes, "GPU")
    return f"{each} on each of {nodes} nodes" if nodes > 1 else f"{each} on this machine"


def _batch(config: PPOConfig) -> Iterator[str]:
    data, n, critic = config.data, config.actor_rollout_ref.rollout.n, config.critic
    samples, longest = data.train_batch_size * n, data.max_prompt_length + data.max_response_length
    yield (
        f"{data.train_batch_size:,} prompts x {_count(n, 'sample')} = {samples:,} samples/step, at most "
        f"{data.max_prompt_length:,} + {data.max_response_length:,} tokens each = {samples * longest:,} tokens/step"
    )
    yield f"actor: {_updates(config, config.actor_rollout_ref.actor)}"
    if config.trains_critic:
        yield f"critic: {_updates(config, critic)}"


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
    trainer, files = config.trainer, _and(*config.data.val_files or [])
    every = _and(trainer.test_freq > 0 and f"every {trainer.test_freq} steps", "after the last")
    if isinstance(config, CriticPretrainConfig):
        return f"after every epoch: {config.pretrain.holdout:.0%} of the prompts, held out"
    if isinstance(config, RMConfig) and not files and config.data.val_share > 0:
        return f"{every}: {config.data.val_share:.0%} of the prompts of each source, held out"
    if not files:
        return "none (data.val_files is not set)"
    if not isinstance(config, PPOConfig):
        return f"{every}: {files}"
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    how = f"temperature {sampling.effective_temperature:g}" if sampling.effective_temperature else "greedy"
    times = (
        "alone" if config.trainer.val_only else _and(config.trainer.val_before_train and "before the first step", every)
    )
    return f"{times}; {_count(sampling.n, 'response')} per prompt, {how}: {files}"
