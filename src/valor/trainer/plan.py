"""What a run would do, in words and numbers, before anything of it is loaded: the text of --dry-run."""

from __future__ import annotations

import math
from collections.abc import Collection

from valor.config import (
    ActorConfig,
    AlgorithmConfig,
    BackboneConfig,
    CriticConfig,
    CriticPretrainConfig,
    CriticRunConfig,
    CriticScoreConfig,
    PoolConfig,
    PPOConfig,
    RMConfig,
    RunConfig,
    Section,
    SupervisedConfig,
    TrainerConfig,
)
from valor.rollout.registry import generation_engines
from valor.trainer.checks import inert_settings
from valor.trainer.old_log_probs import OldLogProbs


def plan(config: Section, explicit_keys: Collection[str] = (), unavailable: Collection[str] = ()) -> str:
    """A readable plan: roles, placement, steps, batch arithmetic in prompts, samples and tokens.

    `explicit_keys` are examined for settings without effect; `unavailable`: what the run would stop at.
    """
    if isinstance(config, CriticRunConfig):
        rows = _critic_rows(config)
    elif isinstance(config, PPOConfig):
        rows = _ppo_rows(config)
    elif isinstance(config, SupervisedConfig):
        rows = _supervised_rows(config, "pairs" if isinstance(config, RMConfig) else "samples")
    else:
        raise ValueError(f"no plan for a {type(config).__name__}")
    rows += [("note", f"{key}: {reason}") for key, reason in inert_settings(config, explicit_keys).items()]
    rows += [("stops here", line) for line in unavailable]
    width = max(len(title) for title, _ in rows)
    lines, last = [], ""
    for title, text in rows:
        lines.append(f"{'' if title == last else title:<{width}}  {text}".rstrip())
        last = title
    return "\n".join(lines)


def _ppo_rows(config: PPOConfig) -> list[tuple[str, str]]:
    policy, critic = config.actor_rollout_ref, config.critic
    loss = policy.actor.policy_loss.loss_mode
    rows = [("run", _run(config.trainer)), ("algorithm", f"{_estimator(config)}, policy loss {loss}")]
    rows.append(("actor", f"{_model(policy.model)}, {_optimizer(policy.actor)}, {_precision(policy.actor)}"))
    rows.append(("rollout", _rollout(config)))
    if critic.enable:
        update = "frozen" if critic.freeze else _optimizer(critic)
        update += (
            f", frozen in steps {', '.join(critic.freeze_steps)}" if critic.freeze_steps and not critic.freeze else ""
        )
        update += f", {critic.ensemble_reduce} of {critic.ensemble_size}" if critic.ensemble_size > 1 else ""
        rows.append(("critic", f"{_model(critic.model)}, {update}, {_precision(critic)}"))
    else:
        rows.append(("critic", "none"))
    rows.append(("reference", _reference(config)))
    rows.append(("reward", _reward(config)))
    rows.append(("placement", _placement(config.trainer, bool(config.pools))))
    rows += [("", f"pool {name}: {_pool(pool)}") for name, pool in config.pools.items()]
    rows += [("batch", text) for text in _batch(config)]
    rows.append(("old log-probs", _old_log_probs(config)))
    rows.append(("length", _length(config.trainer, config.data.train_batch_size, "prompts")))
    if config.trainer.critic_warmup:
        rows.append(("", f"the first {config.trainer.critic_warmup} steps train the critic alone"))
    rows.append(("training data", ", ".join(config.data.train_files)))
    rows.append(("validation", _validation(config)))
    rows.append(("checkpoints", _checkpoints(config.trainer)))
    rows.append(("logs", ", ".join(config.trainer.logger)))
    return rows


def _critic_rows(config: CriticRunConfig) -> list[tuple[str, str]]:
    rollouts, how, rows = None, "", [("placement", _placement(config.trainer))]
    critic = f"{_model(config.critic.model)}, {_precision(config.critic)}"
    prompts = config.data.train_files
    if isinstance(config, CriticPretrainConfig):
        rollouts, trainer = config.pretrain.rollouts, config.trainer
        critic += f", {_optimizer(config.critic)}, value loss {config.critic.value_loss}"
        how = f"; {config.pretrain.holdout:.0%} of the prompts held out"
        updates = f"{config.critic.ppo_mini_batch_size:,} prompts per update, {config.critic.ppo_epochs} epochs of each"
        rows += [("batch", f"{config.data.train_batch_size:,} prompts per step, {updates}")]
        rows += [("length", _length(trainer, config.data.train_batch_size, "prompts"))]
        rows += [("checkpoints", _checkpoints(trainer)), ("logs", ", ".join(trainer.logger))]
        rows.insert(0, ("run", _run(trainer)))
    elif isinstance(config, CriticScoreConfig):
        score, rollouts, prompts = config.score, config.score.rollouts, config.data.val_files or []
        if score.mc:
            branches = f"{score.mc} from each of {score.positions} positions of {score.responses} responses"
            rows += [("branches", branches)]
        rows += [("written to", score.out)]
    policy = config.actor_rollout_ref
    drawn = f"{policy.rollout.n} answers by {policy.model.path} to each prompt of {', '.join(prompts)}"
    return [("critic", critic), ("rollouts", (", ".join(rollouts) if rollouts else drawn) + how), *rows]


def _supervised_rows(config: SupervisedConfig, unit: str) -> list[tuple[str, str]]:
    data, trainer = config.data, config.trainer
    every = f"every {trainer.test_freq} steps and " if trainer.test_freq > 0 else ""
    validation = f"{every}at the end: {', '.join(data.val_files)}" if data.val_files else "none"
    if isinstance(config, RMConfig) and not data.val_files and config.data.val_share > 0:
        validation = f"{every}at the end: {config.data.val_share:.0%} of the prompts of each source, held out"
    return [
        ("run", _run(trainer)),
        (
            "model",
            f"{_model(config.model)}, AdamW lr {config.optim.lr:g}, {config.fsdp_config.dtype}",
        ),
        ("placement", _processes(trainer, 1)),
        ("batch", f"{data.train_batch_size:,} {unit} per update, each text at most {data.max_length:,} tokens"),
        ("", f"micro-batches of at most {data.max_token_len_per_gpu:,} tokens per process"),
        ("length", _length(trainer, data.train_batch_size, unit)),
        ("training data", ", ".join(data.train_files)),
        ("validation", validation),
        ("checkpoints", _checkpoints(trainer)),
        ("logs", ", ".join(trainer.logger)),
    ]


def _run(trainer: RunConfig) -> str:
    return f"{trainer.project_name}/{trainer.experiment_name} in {trainer.default_local_dir}, seed {trainer.seed}"


def _estimator(config: PPOConfig) -> str:
    algorithm = config.algorithm
    if not config.critic.enable:
        return algorithm.adv_estimator
    lam = f"lambda {algorithm.lam_actor:g}"
    if algorithm.lam_critic != algorithm.lam_actor:
        lam += f" (critic {algorithm.lam_critic:g})"
    return f"{algorithm.adv_estimator}, gamma {algorithm.gamma:g}, {lam}"


def _optimizer(role: ActorConfig | CriticConfig) -> str:
    optim = role.optim
    schedule = "" if optim.lr_scheduler_type == "constant" else f" {optim.lr_scheduler_type}"
    return f"AdamW lr {optim.lr:g}{schedule}"


def _precision(role: ActorConfig | CriticConfig) -> str:
    fsdp = role.fsdp_config
    compute = f"{fsdp.dtype} over {fsdp.model_dtype} weights" if fsdp.dtype != fsdp.model_dtype else fsdp.dtype
    moved = [n for n, on in (("weights", fsdp.param_offload), ("optimizer", fsdp.optimizer_offload)) if on]
    compute += f", tensor parallel over {fsdp.tensor_parallel_size}" if fsdp.tensor_parallel_size > 1 else ""
    return compute + (f", {' and '.join(moved)} offloaded" if moved else "")


def _rollout(config: PPOConfig) -> str:
    rollout = config.actor_rollout_ref.rollout
    weights = [f" ({engine.plan(config)})" for engine in generation_engines() if engine.name == rollout.name]
    cut = f", top-p {rollout.top_p:g}" if rollout.top_p < 1 else ""
    cut += f", top-k {rollout.top_k}" if rollout.top_k > 0 else ""
    return f"{rollout.name}{''.join(weights)}, temperature {rollout.temperature:g}{cut}"


def _model(model: BackboneConfig) -> str:
    start = f" from {model.lora_adapter_path}" if model.lora_adapter_path is not None else ""
    return model.path + (f" with LoRA adapters of rank {model.lora_rank}{start}" if model.lora_rank else "")


def _reference(config: PPOConfig) -> str:
    if not config.needs_reference:
        return "none (no KL term is on)"
    terms = []
    if config.algorithm.use_kl_in_reward:
        control = config.algorithm.kl_ctrl
        terms.append(f"{control.type} KL penalty {control.kl_coef:g} in the reward")
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss:
        terms.append(f"KL loss {actor.kl_loss_coef:g} ({actor.kl_loss_type})")
    return f"{config.actor_rollout_ref.model.path}: {', '.join(terms)}"


def _reward(config: PPOConfig) -> str:
    function = config.reward.custom_reward_function
    source = f"{function.path}:{function.name}" if function.path else f"built in, by column {config.data.reward_fn_key}"
    parts = [source, f"at most {config.reward.timeout:g} s a sample"]
    model = config.reward.reward_model
    if model.enable:
        judge = model.judge
        name = f"judge {judge.model} at {judge.url}" if judge.url else f"reward model {model.model_path}"
        rule = "in the rule's place" if model.replaces_rule else f"+ {model.rule_weight:g} x rule"
        parts = [f"{model.weight:g} x {name} {rule}", *([] if model.replaces_rule else parts)]
    return "; ".join([*parts, *_shaping(config.algorithm)])


def _shaping(algorithm: AlgorithmConfig) -> list[str]:
    if algorithm.reward_source == "critic":
        return ["training takes the critic's value in its place"]
    parts = []
    if algorithm.reward_binarize:
        parts.append(f"1 above {algorithm.reward_threshold:g}, else 0")
    if algorithm.reward_mask_ratio > 0:
        flip = ", advantages flipped" if algorithm.reward_mask_flip_adv_when_masked else ""
        what = {"trajectory": "trajectories", "group": "prompts"}[algorithm.reward_mask_level]
        parts.append(
            f"taken from {algorithm.reward_mask_ratio:.0%} of the {what} ({algorithm.reward_mask_type}), "
            f"missing_reward {algorithm.missing_reward}{flip}"
        )
    return parts


def _processes(trainer: RunConfig, nodes: int) -> str:
    where = "this machine" if nodes == 1 else f"{nodes} nodes"
    if trainer.n_gpus_per_node is None:
        per_node = {
            "cpu": "one CPU process",
            "cuda": "one process per GPU",
            "auto": "one process per GPU, or one CPU process where there is none",
        }[trainer.device]
        return f"{per_node}, on {where}"
    kind = {"cpu": "CPU process", "cuda": "GPU", "auto": "GPU"}[trainer.device]
    total = trainer.n_gpus_per_node * nodes
    plural = ("es" if kind.endswith("s") else "s") if trainer.n_gpus_per_node > 1 else ""
    spread = f" on each of {nodes} nodes = {total}" if nodes > 1 else " on this machine"
    return f"{trainer.n_gpus_per_node} {kind}{plural}{spread}"


def _placement(trainer: TrainerConfig, with_pools: bool = False) -> str:
    controller = {
        "auto": "in this process if there is one, else under Ray",
        "local": "in this process",
        "ray": "under Ray",
    }["ray" if with_pools else trainer.controller]
    roles = "roles of no pool below" if with_pools else "all roles"
    return f"{_processes(trainer, trainer.nnodes)}; {roles} share each process; {controller}"


def _pool(pool: PoolConfig) -> str:
    nodes = f" on each of {pool.nnodes} nodes" if pool.nnodes > 1 else ""
    plural = "es" if pool.n_gpus_per_node > 1 else ""
    return f"{pool.n_gpus_per_node} process{plural}{nodes}: {', '.join(pool.roles)}"


def _batch(config: PPOConfig) -> list[str]:
    data, n = config.data, config.actor_rollout_ref.rollout.n
    longest = data.max_prompt_length + data.max_response_length
    samples = data.train_batch_size * n
    lines = [
        f"{data.train_batch_size:,} prompts x {_count(n, 'sample')} = {samples:,} samples/step, at most "
        f"{data.max_prompt_length:,} + {data.max_response_length:,} tokens each = {samples * longest:,} tokens/step"
    ]
    lines.append(f"actor: {_updates(config, config.actor_rollout_ref.actor)}")
    if config.critic.enable and not config.critic.freeze:
        lines.append(f"critic: {_updates(config, config.critic)}")
    return lines


def _updates(config: PPOConfig, role: ActorConfig | CriticConfig) -> str:
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini = role.ppo_mini_batch_size
    count = math.ceil(prompts / mini)
    rest = prompts % mini
    last = f" (the last one {rest} prompts)" if rest and count > 1 else ""
    rows = "" if role.max_rows is None else f" and {role.max_rows:,} samples"
    return (
        f"{mini:,}-prompt mini-batches = {mini * n:,} samples -> {_count(count, 'update')}{last} x "
        f"{_count(role.ppo_epochs, 'epoch')}; micro-batches of at most {role.ppo_max_token_len_per_gpu:,} tokens"
        f"{rows} per process"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _old_log_probs(config: PPOConfig) -> str:
    old, correction = OldLogProbs.of(config), config.algorithm.rollout_correction
    steps = [f"{correction.rollout_is} importance weights"] if correction.weighs else []
    steps += [f"rejection by {correction.rollout_rs}"] if correction.rollout_rs is not None else []
    corrections = " and ".join(steps)
    if old.bypass:
        return "the rollout's own (bypass_mode)" + (f", {corrections} before each update" if corrections else "")
    if not old.recompute:
        return "none needed: one update per batch, the ratio is exactly 1"
    return "recomputed once per step" + (f", {corrections}" if corrections else "")


def _length(trainer: RunConfig, batch: int, unit: str) -> str:
    if trainer.total_training_steps is not None:
        return _count(trainer.total_training_steps, "step")
    return f"{_count(trainer.total_epochs, 'epoch')} x ({unit} in the training data / {batch:,}) steps"


def _validation(config: PPOConfig) -> str:
    if config.data.val_files is None:
        return "none (data.val_files is not set)"
    trainer, sampling = config.trainer, config.actor_rollout_ref.rollout.val_kwargs
    temperature = sampling.effective_temperature
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    times = "alone" if trainer.val_only else ""
    if not times:
        before = "before the first step, " if trainer.val_before_train else ""
        every = f"every {trainer.test_freq} steps, " if trainer.test_freq > 0 else ""
        times = f"{before}{every}after the last"
    responses = "response" if sampling.n == 1 else "responses"
    return f"{times}; {sampling.n} {responses} per prompt, {how}: {', '.join(config.data.val_files)}"


def _checkpoints(trainer: RunConfig) -> str:
    every = f"every {trainer.save_freq} steps and " if trainer.save_freq > 0 else ""
    kept = "all kept" if trainer.max_ckpt_to_keep is None else f"the newest {trainer.max_ckpt_to_keep} kept"
    resume = {
        "auto": "resumes from the newest in the run's folder",
        "disable": "starts afresh",
        "resume_path": f"resumes from {trainer.resume_from_path}",
    }[trainer.resume_mode]
    return f"{every}after the last step, {kept}; {resume}"
