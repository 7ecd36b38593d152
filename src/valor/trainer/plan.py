"""What a run would do, in words and numbers, before anything of it is loaded: the text of --dry-run."""

import math
from collections.abc import Collection, Mapping

import torch

from valor.algorithms import ADVANTAGES
from valor.config import (
    BackboneConfig,
    CriticConfig,
    CriticPretrainConfig,
    CriticScoreConfig,
    CriticSearchConfig,
    PPOConfig,
    RewardModelConfig,
    RMConfig,
    RunConfig,
    Section,
    SupervisedConfig,
    TrainerConfig,
    UpdateConfig,
)
from valor.config.describe import show
from valor.config.tree import flatten
from valor.rollout.registry import GENERATION_ENGINES
from valor.trainer.checks import inert_settings
from valor.trainer.phases.standard import phases_of

Rows = list[tuple[str, str]]


def plan(
    config: Section, explicit_keys: Collection[str] = (), presets: Mapping[str, Collection[str]] | None = None
) -> str:
    """A readable plan: roles, placement, steps, batch arithmetic in prompts, samples and tokens.

    `explicit_keys` are examined for settings without effect. `presets`: keys whose values a named configuration gave.
    """
    assert isinstance(config, PPOConfig | SupervisedConfig), "what commands read"
    rows = _rows(config)
    settings = flatten(config.model_dump(mode="json"))
    for preset, keys in (presets or {}).items():
        rows.append((f"from {preset}", " ".join(f"{key}={show(settings[key])}" for key in keys)))
    rows += [("note", f"{key}: {reason}") for key, reason in inert_settings(config, explicit_keys).items()]
    width = max(len(title) for title, _ in rows)
    lines, last = [], ""
    for title, text in rows:
        lines.append(f"{'' if title == last else title:<{width}}  {text}".rstrip())
        last = title
    return "\n".join(lines)


def _rows(config: PPOConfig | SupervisedConfig) -> Rows:
    if isinstance(config, CriticScoreConfig | CriticSearchConfig):
        return _critic_rows(config)
    trainer, unit, files = config.trainer, "prompts", config.data.train_files
    if isinstance(config, SupervisedConfig):
        unit = "pairs" if isinstance(config, RMConfig) else "samples"
        rows = _supervised_rows(config, unit)
    elif isinstance(config, CriticPretrainConfig):
        rows, files = _critic_rows(config), config.pretrain.rollouts or files
    else:
        rows = _ppo_rows(config)
    epochs = _count(trainer.total_epochs, "epoch")
    length = f"{epochs} x ({unit} in the training data / {config.data.train_batch_size:,}) steps"
    if trainer.total_training_steps is not None:
        length = _count(trainer.total_training_steps, "step")
    run = f"{trainer.project_name}/{trainer.experiment_name} in {trainer.default_local_dir}"
    ends = [("length", length), ("training data", _and(*files)), ("validation", _validation(config))]
    return [("run", run), *rows, *ends]


def _ppo_rows(config: PPOConfig) -> Rows:
    policy, estimator = config.actor_rollout_ref, config.algorithm.adv_estimator
    weights = [engine.plan(config) for engine in GENERATION_ENGINES.values() if engine.name == policy.rollout.name]
    rows = [
        ("algorithm", f"{estimator}, policy loss {config.policy_loss}"),
        ("actor", _and(_model(policy.model), _engine(policy.actor))),
        ("rollout", _and(policy.rollout.name, *weights)),
        ("critic", _and(_critic(config.critic), config.critic.enable and _engine(config.critic))),
        ("reference", _reference(config)),
        ("reward", _reward(config)),
        ("placement", _placement(config.trainer, with_pools=bool(config.pools))),
    ]
    for name, pool in config.pools.items():
        nodes = f" on each of {pool.nnodes} nodes" if pool.nnodes > 1 else ""
        each = f"{_count(pool.n_gpus_per_node, 'process')}{nodes}"
        rows.append(("placement", f"pool {name}: {each}: {_and(*pool.roles)}"))
    return [*rows, *(("batch", text) for text in _batch(config)), *(("step", text) for text in _step(config))]


def _critic_rows(config: CriticPretrainConfig | CriticScoreConfig | CriticSearchConfig) -> Rows:
    policy, critic = config.actor_rollout_ref, ("critic", _critic(config.critic))
    if isinstance(config, CriticSearchConfig):
        return [critic, ("policy", _model(policy.model)), ("prompts", _and(*config.data.val_files or []))]
    asked = config.score if isinstance(config, CriticScoreConfig) else config.pretrain
    drawn = f"{_count(policy.rollout.n, 'answer')} by {policy.model.path} to each prompt"
    return [critic, ("rollouts", _and(*asked.rollouts or [drawn])), ("placement", _placement(config.trainer))]


def _supervised_rows(config: SupervisedConfig, unit: str) -> Rows:
    data = config.data
    return [
        ("model", _model(config.model)),
        ("placement", _processes(config.trainer, 1)),
        ("batch", f"{data.train_batch_size:,} {unit} per update, each text at most {data.max_length:,} tokens"),
        ("batch", f"micro-batches of at most {data.max_token_len_per_gpu:,} tokens per process"),
    ]


def _and(*parts: str | bool) -> str:
    """Those of the parts that say something."""
    return ", ".join(str(part) for part in parts if part)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith(("s", "tch")) else "s")


def _model(model: BackboneConfig) -> str:
    start = f" from {model.lora_adapter_path}" if model.lora_adapter_path is not None else ""
    return model.path + (f" with LoRA adapters of rank {model.lora_rank}{start}" if model.lora_rank else "")


def _engine(role: UpdateConfig | RewardModelConfig) -> str:
    if role.strategy != "megatron":
        return ""
    sizes = [f"{name} parallel {size}" for name, size in role.megatron.sizes.items() if size > 1]
    return _and("by megatron-core", *sizes)


def _critic(critic: CriticConfig) -> str:
    if not critic.enable:
        return "none"
    ensemble = critic.ensemble_size > 1 and f"{critic.ensemble_reduce} of {critic.ensemble_size}"
    own = critic.ensemble_shards and "each from its own samples of every prompt"
    frozen = f"frozen in steps {_and(*critic.freeze_steps)}" if critic.freeze_steps else ""
    return _and(_model(critic.model), "frozen" if critic.freeze else frozen, ensemble, own)


def _reference(config: PPOConfig) -> str:
    if not config.needs_reference:
        return "none (no KL term is on)"
    loss, penalty = config.actor_rollout_ref.actor.use_kl_loss, config.algorithm.use_kl_in_reward
    terms = _and(penalty and "KL penalty in the reward", loss and "KL loss")
    return f"{config.actor_rollout_ref.model.path}: {terms}"


def _reward(config: PPOConfig) -> str:
    function, model = config.reward.custom_reward_function, config.reward.reward_model
    graded = f"{function.path}:{function.name}" if function.path else f"built in, by column {config.data.reward_fn_key}"
    graded = graded.removesuffix(f".pkl:{function.name}")  # a Python session's functions
    if model.enable:
        judge = model.judge
        name = f"judge {judge.model} at {judge.url}" if judge.url else f"reward model {model.model_path}"
        if model.gives == "steps":
            estimator = config.algorithm.adv_estimator
            along = "reward_on_masked" in ADVANTAGES[estimator].options or not ADVANTAGES[estimator].builtin
            name += f" at the end of each step ({estimator} takes {'each at its token' if along else 'their sum'})"
        rule = "in the rule's place" if model.replaces_rule else f"+ {model.rule_weight:g} x rule ({graded})"
        progress = f"{graded}; advantages + {model.weight:g} x progress under {model.model_path}"
        graded = f"{model.weight:g} x {name} {rule}" if model.scores else progress
    agent, algorithm = config.actor_rollout_ref.rollout.agent, config.algorithm
    if agent.replay_dir is not None:
        graded = f"as recorded; of episodes without a score: {graded}"
    elif config.default_agent_loop == "environment_agent":
        graded = f"by the environment, {agent.environment}; where it leaves it open: {graded}"
    return _and(
        graded,
        model.is_role and _engine(model),
        algorithm.reward_source == "critic" and "training takes the critic's value in its place",
        algorithm.reward_binarize and f"1 above {algorithm.reward_threshold:g}, else 0",
        algorithm.reward_mask_ratio > 0
        and f"taken from {algorithm.reward_mask_ratio:.0%}, missing_reward {algorithm.missing_reward}",
    )


def _processes(trainer: RunConfig, nodes: int) -> str:
    where = "on this machine" if nodes == 1 else f"on each of {nodes} nodes"
    per_node = trainer.n_gpus_per_node
    if trainer.device == "auto" and nodes == 1 and per_node == 1 and not torch.cuda.is_available():
        return f"one CPU process, {where}: it has no GPU"
    if per_node is not None:
        each = _count(per_node, "CPU process" if trainer.device == "cpu" else "GPU")
        return f"{each} {where}" + (f" = {per_node * nodes}" if nodes > 1 else "")
    each = {"cpu": "one CPU process", "cuda": "one process per GPU"}
    return f"{each.get(trainer.device, 'one process per GPU, or one CPU process where there is none')}, {where}"


def _placement(trainer: TrainerConfig, *, with_pools: bool = False) -> str:
    by = {"auto": "in this process if there is one, else under Ray", "local": "in this process", "ray": "under Ray"}
    controller = by["ray" if with_pools else trainer.controller]
    roles = "roles of no pool below" if with_pools else "all roles"
    return f"{_processes(trainer, trainer.nnodes)}; {roles} share each process; {controller}"


def _batch(config: PPOConfig) -> list[str]:
    data, n, critic = config.data, config.actor_rollout_ref.rollout.n, config.critic
    longest = data.max_prompt_length + data.max_response_length
    samples = data.train_batch_size * n
    lines = [
        f"{data.train_batch_size:,} prompts x {_count(n, 'sample')} = {samples:,} samples/step, at most "
        f"{data.max_prompt_length:,} + {data.max_response_length:,} tokens each = {samples * longest:,} tokens/step",
        f"actor: {_updates(config, config.actor_rollout_ref.actor)}",
    ]
    if (asked := config.algorithm.branch_values).share:
        states = max(round(asked.share * data.max_response_length), 1)
        drawn = samples * states * asked.branches
        lines.append(
            f"branches: at most {asked.branches} x {states:,} states of each response = {drawn:,} samples/step, about "
            f"{drawn * data.max_response_length // 2:,} tokens/step"
        )
    if not critic.enable or critic.freeze:
        return lines
    return [*lines, f"critic: {_updates(config, critic)}"]


def _updates(config: PPOConfig, role: UpdateConfig) -> str:
    prompts, mini = config.data.train_batch_size, role.ppo_mini_batch_size
    count, rest = math.ceil(prompts / mini), prompts % mini
    last = f" (the last one {rest} prompts)" if rest and count > 1 else ""
    rows = "" if role.max_rows is None else f" and {role.max_rows:,} samples"
    return (
        f"{mini:,}-prompt mini-batches = {mini * config.actor_rollout_ref.rollout.n:,} samples -> "
        f"{_count(count, 'update')}{last} x {_count(role.ppo_epochs, 'epoch')}; micro-batches of at most "
        f"{role.ppo_max_token_len_per_gpu:,} tokens{rows} per process"
    )


def _step(config: PPOConfig) -> list[str]:
    lines = ["collect: prompts, answers and their scores"]
    for phase in phases_of(config):
        added = f"; adds {', '.join(sorted(phase.adds))}" if phase.adds else ""
        lines.append(f"{phase.name} ({phase.role or 'driver'}): {phase.plan()}{added}")
    return lines


def _validation(config: PPOConfig | SupervisedConfig) -> str:
    steps, files = config.trainer.test_freq, _and(*config.data.val_files or [])
    every = _and(steps > 0 and f"every {steps} steps", "after the last")
    if isinstance(config, CriticPretrainConfig):
        return f"after every epoch: {config.pretrain.holdout:.0%} of the prompts, held out"
    if isinstance(config, RMConfig) and not files and config.data.val_share > 0:
        return f"{every}: {config.data.val_share:.0%} of the prompts of each source, held out"
    if not files:
        return "none (data.val_files is not set)"
    if not isinstance(config, PPOConfig):
        return f"{every}: {files}"
    trainer, sampling = config.trainer, config.actor_rollout_ref.rollout.val_kwargs
    temperature = sampling.effective_temperature
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    times = "alone" if trainer.val_only else _and(trainer.val_before_train and "before the first step", every)
    return f"{times}; {_count(sampling.n, 'response')} per prompt, {how}: {files}"
