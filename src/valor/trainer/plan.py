"""What a run would do, in words and numbers, before anything of it is loaded: the text of --dry-run."""

from __future__ import annotations

import math
from collections.abc import Collection

from valor.config import (
    BackboneConfig,
    CriticConfig,
    CriticPretrainConfig,
    CriticScoreConfig,
    FSDPConfig,
    OptimConfig,
    PPOConfig,
    RMConfig,
    RunConfig,
    Section,
    SupervisedConfig,
    TrainerConfig,
    UpdateConfig,
)
from valor.rollout.registry import generation_engines
from valor.trainer.checks import inert_settings
from valor.trainer.old_log_probs import OldLogProbs

Rows = list[tuple[str, str]]


def plan(config: Section, explicit_keys: Collection[str] = ()) -> str:
    """A readable plan: roles, placement, steps, batch arithmetic in prompts, samples and tokens.

    `explicit_keys` are examined for settings without effect.
    """
    if isinstance(config, CriticScoreConfig):
        rows = _score_rows(config)
    elif isinstance(config, PPOConfig | SupervisedConfig):
        rows = _training_rows(config)
    else:
        raise ValueError(f"no plan for a {type(config).__name__}")
    rows += [("note", f"{key}: {reason}") for key, reason in inert_settings(config, explicit_keys).items()]
    width = max(len(title) for title, _ in rows)
    lines, last = [], ""
    for title, text in rows:
        lines.append(f"{'' if title == last else title:<{width}}  {text}".rstrip())
        last = title
    return "\n".join(lines)


def _training_rows(config: PPOConfig | SupervisedConfig) -> Rows:
    trainer, data = config.trainer, config.data
    unit, files = "prompts", data.train_files
    if isinstance(config, SupervisedConfig):
        unit = "pairs" if isinstance(config, RMConfig) else "samples"
        rows = _supervised_rows(config, unit)
    elif isinstance(config, CriticPretrainConfig):
        rows, files = _pretrain_rows(config), config.pretrain.rollouts or files
    else:
        rows = _ppo_rows(config)
    length = (
        f"{_count(trainer.total_epochs, 'epoch')} x ({unit} in the training data / {data.train_batch_size:,}) steps"
    )
    if trainer.total_training_steps is not None:
        length = _count(trainer.total_training_steps, "step")
    kept = "all kept" if trainer.max_ckpt_to_keep is None else f"the newest {trainer.max_ckpt_to_keep} kept"
    resume = {
        "auto": "resumes from the newest in the run's folder",
        "disable": "starts afresh",
        "resume_path": f"resumes from {trainer.resume_from_path}",
    }[trainer.resume_mode]
    name = f"{trainer.project_name}/{trainer.experiment_name}"
    return [
        ("run", f"{name} in {trainer.default_local_dir}, seed {trainer.seed}"),
        *rows,
        ("length", length),
        ("training data", _and(*files)),
        ("validation", _validation(config)),
        ("checkpoints", f"{_every(trainer.save_freq)}, {kept}; {resume}"),
    ]


def _ppo_rows(config: PPOConfig) -> Rows:
    policy, actor, trainer = config.actor_rollout_ref, config.actor_rollout_ref.actor, config.trainer
    algorithm, with_critic = config.algorithm, config.critic.enable
    lam = f"lambda {algorithm.lam_actor:g}"
    if algorithm.lam_critic != algorithm.lam_actor:
        lam += f" (critic {algorithm.lam_critic:g})"
    estimator = [algorithm.adv_estimator, with_critic and f"gamma {algorithm.gamma:g}", with_critic and lam]
    rows = [
        ("algorithm", _and(*estimator, f"policy loss {actor.policy_loss.loss_mode}")),
        ("actor", _and(_model(policy.model), _optimizer(actor.optim), *_precision(actor.fsdp_config))),
        ("rollout", _rollout(config)),
        ("critic", _critic(config.critic)),
        ("reference", _reference(config)),
        ("reward", _reward(config)),
        ("placement", _placement(trainer, with_pools=bool(config.pools))),
    ]
    for name, pool in config.pools.items():
        nodes = f" on each of {pool.nnodes} nodes" if pool.nnodes > 1 else ""
        each = f"{_count(pool.n_gpus_per_node, 'process')}{nodes}"
        rows.append(("placement", f"pool {name}: {each}: {_and(*pool.roles)}"))
    rows += [("batch", text) for text in _batch(config)]
    rows.append(("old log-probs", _old_log_probs(config)))
    warmup = f"the first {trainer.critic_warmup} steps train the critic alone"
    return [*rows, ("warm-up", warmup)] if trainer.critic_warmup else rows


def _pretrain_rows(config: CriticPretrainConfig) -> Rows:
    critic, data = config.critic, config.data
    updates = f"{critic.ppo_mini_batch_size:,} prompts per update, {_count(critic.ppo_epochs, 'epoch')} of each"
    return [
        ("critic", f"{_critic(critic)}, value loss {critic.value_loss}"),
        *([] if config.pretrain.rollouts else [("rollouts", _drawn(config, data.train_files))]),
        ("placement", _placement(config.trainer)),
        ("batch", f"{data.train_batch_size:,} prompts per step, {updates}"),
    ]


def _score_rows(config: CriticScoreConfig) -> Rows:
    score, critic = config.score, config.critic
    branches = f"{score.mc} from each of {score.positions} positions of {score.responses} responses"
    return [
        ("critic", _and(_model(critic.model), *_precision(critic.fsdp_config))),
        ("rollouts", _and(*score.rollouts or [_drawn(config, config.data.val_files or [])])),
        ("placement", _placement(config.trainer)),
        *([("branches", branches)] if score.mc else []),
        ("written to", score.out),
    ]


def _supervised_rows(config: SupervisedConfig, unit: str) -> Rows:
    data = config.data
    return [
        ("model", _and(_model(config.model), _optimizer(config.optim), *_precision(config.fsdp_config))),
        ("placement", _processes(config.trainer, 1)),
        ("batch", f"{data.train_batch_size:,} {unit} per update, each text at most {data.max_length:,} tokens"),
        ("batch", f"micro-batches of at most {data.max_token_len_per_gpu:,} tokens per process"),
    ]


def _and(*parts: str | bool) -> str:
    """Those of the parts that say something."""
    return ", ".join(str(part) for part in parts if part)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def _every(steps: int) -> str:
    return f"every {steps} steps, after the last" if steps > 0 else "after the last"


def _model(model: BackboneConfig) -> str:
    start = f" from {model.lora_adapter_path}" if model.lora_adapter_path is not None else ""
    return model.path + (f" with LoRA adapters of rank {model.lora_rank}{start}" if model.lora_rank else "")


def _optimizer(optim: OptimConfig) -> str:
    schedule = "" if optim.lr_scheduler_type == "constant" else f" {optim.lr_scheduler_type}"
    return f"AdamW lr {optim.lr:g}{schedule}"


def _precision(fsdp: FSDPConfig) -> list[str | bool]:
    moved = [name for name, on in (("weights", fsdp.param_offload), ("optimizer", fsdp.optimizer_offload)) if on]
    return [
        f"{fsdp.dtype} over {fsdp.model_dtype} weights" if fsdp.dtype != fsdp.model_dtype else fsdp.dtype,
        fsdp.tensor_parallel_size > 1 and f"tensor parallel over {fsdp.tensor_parallel_size}",
        bool(moved) and f"{' and '.join(moved)} offloaded",
    ]


def _drawn(config: PPOConfig, files: list[str]) -> str:
    policy = config.actor_rollout_ref
    return f"{policy.rollout.n} answers by {policy.model.path} to each prompt of {_and(*files)}"


def _rollout(config: PPOConfig) -> str:
    rollout = config.actor_rollout_ref.rollout
    weights = [f" ({engine.plan(config)})" for engine in generation_engines() if engine.name == rollout.name]
    return _and(
        f"{rollout.name}{''.join(weights)}",
        f"temperature {rollout.temperature:g}",
        rollout.top_p < 1 and f"top-p {rollout.top_p:g}",
        rollout.top_k > 0 and f"top-k {rollout.top_k}",
    )


def _critic(critic: CriticConfig) -> str:
    if not critic.enable:
        return "none"
    return _and(
        _model(critic.model),
        "frozen" if critic.freeze else _optimizer(critic.optim),
        bool(critic.freeze_steps) and not critic.freeze and f"frozen in steps {_and(*critic.freeze_steps)}",
        critic.ensemble_size > 1 and f"{critic.ensemble_reduce} of {critic.ensemble_size}",
        *_precision(critic.fsdp_config),
    )


def _reference(config: PPOConfig) -> str:
    if not config.needs_reference:
        return "none (no KL term is on)"
    actor, control = config.actor_rollout_ref.actor, config.algorithm.kl_ctrl
    terms = _and(
        config.algorithm.use_kl_in_reward and f"{control.type} KL penalty {control.kl_coef:g} in the reward",
        actor.use_kl_loss and f"KL loss {actor.kl_loss_coef:g} ({actor.kl_loss_type})",
    )
    return f"{config.actor_rollout_ref.model.path}: {terms}"


def _reward(config: PPOConfig) -> str:
    function, model = config.reward.custom_reward_function, config.reward.reward_model
    graded = f"{function.path}:{function.name}" if function.path else f"built in, by column {config.data.reward_fn_key}"
    if model.enable:
        judge = model.judge
        name = f"judge {judge.model} at {judge.url}" if judge.url else f"reward model {model.model_path}"
        rule = "in the rule's place" if model.replaces_rule else f"+ {model.rule_weight:g} x rule ({graded})"
        graded = f"{model.weight:g} x {name} {rule}"
    algorithm = config.algorithm
    return _and(
        graded,
        algorithm.reward_source == "critic" and "training takes the critic's value in its place",
        algorithm.reward_binarize and f"1 above {algorithm.reward_threshold:g}, else 0",
        algorithm.reward_mask_ratio > 0
        and f"taken from {algorithm.reward_mask_ratio:.0%}, missing_reward {algorithm.missing_reward}",
    )


def _processes(trainer: RunConfig, nodes: int) -> str:
    where = "on this machine" if nodes == 1 else f"on each of {nodes} nodes"
    per_node = trainer.n_gpus_per_node
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
    return [*lines, f"critic: {_updates(config, critic)}"] if critic.enable and not critic.freeze else lines


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


def _old_log_probs(config: PPOConfig) -> str:
    old, correction = OldLogProbs.of(config), config.algorithm.rollout_correction
    steps = [f"{correction.rollout_is} importance weights"] if correction.weighs else []
    steps += [f"rejection by {correction.rollout_rs}"] if correction.rollout_rs is not None else []
    corrections = " and ".join(steps)
    if old.bypass:
        return _and("the rollout's own (bypass_mode)", bool(steps) and f"{corrections} before each update")
    if not old.recompute:
        return "none needed: one update per batch, the ratio is exactly 1"
    return _and("recomputed once per step", corrections)


def _validation(config: PPOConfig | SupervisedConfig) -> str:
    every, files = _every(config.trainer.test_freq), _and(*config.data.val_files or [])
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
