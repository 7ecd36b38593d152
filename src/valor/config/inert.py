"""Settings that are legal but change nothing in this run, and why: shown in the plan, so that nobody tunes in vain."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce

from pydantic import BaseModel

from valor.config.critic_runs import CriticPretrainConfig, CriticRunConfig, CriticScoreConfig
from valor.config.mistakes import show
from valor.config.ppo import PPOConfig


@dataclass(frozen=True)
class Inert:
    """Keys that match one of `patterns` have no effect when `when` holds."""

    patterns: tuple[str, ...]
    when: Callable[[PPOConfig], bool]
    reason: str


def _never(reason: str, *patterns: str) -> Inert:
    return Inert(patterns, lambda config: True, f"no effect: {reason}")


def _with(setting: str, *patterns: str, why: str = "") -> Inert:
    """No effect with one setting, such as `trainer.device=cpu`; `data.val_files=null` is said as "is not set"."""
    key, _, value = setting.partition("=")
    short = ".".join(key.split(".")[-2:])

    def when(config: PPOConfig) -> bool:
        return show(reduce(getattr, key.split("."), config)).strip("'") == value

    reason = f"no effect: {short} is not set" if value == "null" else f"no effect with {short}={value}"
    return Inert(patterns, when, reason + why)


def _below(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


# Built-in estimators that work without GAE's recursion.
CRITIC_FREE = frozenset(
    {
        *("grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg"),
        *("gdpo", "optimal_token_baseline"),
    }
)
_POLICY, _ROLLOUT, _REF = "actor_rollout_ref.model", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_CORRECTION, _REWARD = "algorithm.rollout_correction", "reward.reward_model"
# verl's keys for its engines, which are servers.
_VERL_KEYS = (
    *("mode", "agent.num_workers", "checkpoint_engine.backend", "scheduling_policy", "layered_summon"),
    *("skip_tokenizer_init", "calculate_log_probs", "engine_kwargs.[!v]*"),
)
_VLLM_KEYS = (
    *("gpu_memory_utilization", "tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size"),
    *("pipeline_model_parallel_size", "max_num_batched_tokens", "enforce_eager", "cudagraph_capture_sizes"),
    *("free_cache_engine", "enable_chunked_prefill", "enable_prefix_caching", "load_format", "disable_log_stats"),
    "engine_kwargs.vllm*",
)
_LAMBDAS = ("algorithm.lam", "algorithm.lam_actor", "algorithm.lam_critic", "algorithm.adaptive_lam_alpha")


def _never_updates_policy(config: PPOConfig) -> bool:
    return isinstance(config, CriticRunConfig)


def _asks_server(config: PPOConfig) -> bool:
    return config.actor_rollout_ref.rollout.name == "server"


TABLE: tuple[Inert, ...] = (
    Inert(
        (
            *_below("actor_rollout_ref.actor", "optim.*", "policy_loss.*", "clip_*", "entropy*", "*kl_*"),
            *(f"{_REF}.*", f"{_ROLLOUT}.val_kwargs.*", f"{_ROLLOUT}.log_prob_*"),
            *("algorithm.lam*", "algorithm.ad[av]*", "algorithm.norm_*", "algorithm.singleton", "algorithm.gdpo_*"),
            *("algorithm.truncation_bootstrap", "algorithm.reward_source", "algorithm.reward_mask_*"),
            *("algorithm.missing_reward", "algorithm.use_*", "algorithm.kl_*", "algorithm.pf_ppo.*"),
            *("algorithm.filter_groups.*", "algorithm.rollout_correction.*", "data.gen_batch_size"),
            *("trainer.critic_warmup", "trainer.val_*", "trainer.test_freq", "trainer.keep_best", "trainer.log_*"),
            *("trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.rollout_probs_diff_warn"),
        ),
        _never_updates_policy,
        "no effect: the policy is not trained here, and returns are outcomes (lambda 1)",
    ),
    Inert(
        ("resource_pools*", f"{_ROLLOUT}.nnodes"),
        _never_updates_policy,
        "no effect: policy and critic take turns on all processes of trainer.*",
    ),
    Inert(
        ("data.val_*", "data.validation_shuffle"),
        lambda config: isinstance(config, CriticPretrainConfig),
        "no effect: pretrain.holdout keeps prompts back",
    ),
    Inert(
        ("data.train_[fm]*",),
        lambda config: isinstance(config, CriticPretrainConfig) and config.pretrain.rollouts is not None,
        "no effect with pretrain.rollouts",
    ),
    Inert(
        (
            *("critic.optim.*", "critic.freeze*", "critic.value_loss*", "critic.cliprange_value", "critic.loss_*"),
            *("critic.ppo_epochs", "critic.ppo_mini*", "critic.shuffle", "critic.data_loader_seed"),
            *("data.train_*", "data.shuffle", "trainer.default_local_dir", "trainer.total_*", "trainer.save_freq"),
            *("trainer.resume_*", "trainer.max_*", "trainer.logger", "trainer.report", "trainer.*_name"),
        ),
        lambda config: isinstance(config, CriticScoreConfig),
        "no effect: nothing is trained here",
    ),
    _never(
        "generation takes and gives token ids one by one, always with their log-probs", *_below(_ROLLOUT, *_VERL_KEYS)
    ),
    _with(f"{_ROLLOUT}.nnodes=0", f"{_ROLLOUT}.n_gpus_per_node"),
    Inert(
        (f"{_ROLLOUT}.checkpoint_engine.update_*",),
        lambda config: not _asks_server(config) and (not config.rollout_apart or _never_updates_policy(config)),
        "no effect: the rollout is in the actor's processes",
    ),
    Inert((f"{_ROLLOUT}.server.*",), lambda config: not _asks_server(config), "no effect: rollout.name is not server"),
    _with(
        f"{_ROLLOUT}.name=server",
        *_below(_ROLLOUT, "max_model_len", *_VLLM_KEYS),
        why=": the server has options of its own",
    ),
    Inert(
        _below(_ROLLOUT, "dtype", "server.weights_dir", "checkpoint_engine.update_*"),
        lambda config: config.actor_rollout_ref.rollout.keeps_weights,
        "no effect with rollout.server.weight_updates=none",
    ),
    Inert(
        (f"{_ROLLOUT}.free_cache_engine",),
        lambda config: config.rollout_apart,
        "no effect: nothing else is on the rollout's devices",
    ),
    _with(f"{_ROLLOUT}.name=native", *_below(_ROLLOUT, *_VLLM_KEYS)),
    _with(
        "trainer.device=cpu",
        *_below(_ROLLOUT, "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine"),
        why=", where vLLM runs without graphs and cannot sleep",
    ),
    _with(f"{_ROLLOUT}.multi_turn.enable=false", f"{_ROLLOUT}.multi_turn.*"),
    _never("no such kernels here", "*model.use_liger"),
    _never("log-probs never hold all logits at once as it is", "*model.use_fused_kernels"),
    _never("weights are read from where they are", "*model.use_shm"),
    _never("nothing here is compiled", "*.use_torch_compile"),
    _with("trainer.device=cpu", "*fsdp_config.offload_policy"),
    _with(f"{_POLICY}.lora_rank=0", *_below(_POLICY, "lora_alpha", "*_modules")),
    _with("critic.model.lora_rank=0", *_below("critic.model", "lora_alpha", "*_modules")),
    Inert(
        (f"{_POLICY}.*_modules",),
        lambda config: config.actor_rollout_ref.model.lora_adapter_path is not None,
        "no effect with lora_adapter_path: the adapter says which",
    ),
    Inert(
        ("critic.model.*_modules",),
        lambda config: config.critic.model.lora_adapter_path is not None,
        "no effect with lora_adapter_path: the adapter says which",
    ),
    Inert(
        (f"{_REF}.fsdp_config.*",),
        lambda config: (
            config.actor_rollout_ref.model.lora_rank > 0
            and all("ref" not in pool.roles for pool in config.pools.values())
        ),
        "no effect with lora_rank: the reference is the actor without its adapters",
    ),
    _with("reward.sandbox_fusion.url=null", "reward.sandbox_fusion.*"),
    _never("one process measures prompts", "data.filter_overlong_prompts_workers"),
    _never("no optimizer", f"{_REF}.fsdp_config.optimizer_offload"),
    Inert(("critic.[!e]*",), lambda config: not config.critic.enable, "no effect: this run has no critic"),
    Inert((f"{_REF}.*",), lambda config: not config.needs_reference, "no effect: no KL term is on"),
    Inert(
        (f"{_REF}.log_prob_*",),
        lambda config: not config.needs_ref_log_probs,
        "no effect with the exact KL: the reference takes the actor's micro-batches",
    ),
    _with("actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.actor.kl_loss_*"),
    _with("algorithm.use_kl_in_reward=false", "algorithm.kl_ctrl.*", "algorithm.kl_penalty"),
    _with("algorithm.use_pf_ppo=false", "algorithm.pf_ppo.*"),
    _with("algorithm.filter_groups.enable=false", "algorithm.filter_groups.*", "data.gen_batch_size"),
    Inert(
        _LAMBDAS,
        lambda config: config.algorithm.adv_estimator in CRITIC_FREE,
        "no effect: this estimator has no lambda",
    ),
    _with("algorithm.reward_source=critic", *_LAMBDAS, why=": the advantage is V(last) - V"),
    _with(
        "algorithm.reward_source=critic",
        "algorithm.reward_binarize",
        "algorithm.reward_threshold",
        why=" (on training)",
    ),
    _with("algorithm.reward_binarize=false", "algorithm.reward_threshold"),
    _with("algorithm.reward_mask_ratio=0.0", "algorithm.reward_mask_[!r]*", "algorithm.missing_reward"),
    _with("algorithm.missing_reward=exclude", "algorithm.reward_mask_flip_adv_when_masked"),
    _with("critic.freeze=true", "critic.freeze_steps"),
    _with("critic.ensemble_size=1", "critic.ensemble_reduce"),
    _with(
        "critic.freeze=true",
        *_below("critic", "optim.*", "value_loss*", "cliprange_value", "ppo_mini*", "ppo_epochs"),
    ),
    Inert(
        ("algorithm.gdpo_reward_*",),
        lambda config: config.algorithm.adv_estimator in CRITIC_FREE - {"gdpo"} | {"gae"},
        "no effect: adv_estimator is not gdpo",
    ),
    _with(f"{_CORRECTION}.rollout_is=null", f"{_CORRECTION}.rollout_is_*"),
    _with(f"{_CORRECTION}.rollout_rs=null", f"{_CORRECTION}.rollout_rs_threshold"),
    Inert(
        _below(_CORRECTION, "rollout_is", "rollout_is_*"),
        lambda config: (
            config.algorithm.rollout_correction.bypass_mode
            and config.algorithm.rollout_correction.loss_type == "ppo_clip"
        ),
        "no effect with bypass_mode and ppo_clip: the ratio is the importance weight already",
    ),
    _with(f"{_CORRECTION}.bypass_mode=false", f"{_CORRECTION}.loss_type"),
    *(
        _with(f"critic.value_loss={loss}", "critic.cliprange_value", why=", which does not clip")
        for loss in ("bce", "hl_gauss")
    ),
    _with("reward.reward_kwargs.overlong_buffer_cfg.enable=false", "reward.reward_kwargs.*"),
    _with(
        "data.val_files=null",
        *("trainer.test_freq", "trainer.val_before_train", "*.val_kwargs.*", "trainer.log_val_generations"),
    ),
    _with(f"{_REWARD}.enable=false", f"{_REWARD}.*"),
    _with(f"{_REWARD}.judge.url=null", f"{_REWARD}.judge.*"),
    Inert(
        (
            *_below(_REWARD, "tokenizer_path", "custom_chat_template", "trust_remote_code", "label", "max_length"),
            *_below(_REWARD, "micro_batch_size_per_gpu", "max_token_len_per_gpu", "fsdp_config.*"),
        ),
        lambda config: config.reward.reward_model.judge.url is not None,
        "no effect with judge.url: the judge has its own server",
    ),
    _never("it runs in the training processes", f"{_REWARD}.rollout*"),
    _never("no optimizer", f"{_REWARD}.fsdp_config.optimizer_offload"),
    _with(f"{_REWARD}.enable_resource_pool=false", *_below(_REWARD, "n_gpus_per_node", "nnodes")),
    Inert(
        ("reward.remote.*",),
        lambda config: config.reward.reward_manager.name != "remote",
        "no effect: reward_manager.name is not remote",
    ),
    _with(
        "reward.reward_manager.name=remote",
        *_below("reward", "num_workers", "memory_limit_mb", "sandbox_fusion.*"),
        why=": a server grades",
    ),
    Inert(
        _below("reward", "custom_reward_function.*", "num_workers", "memory_limit_mb", "timeout"),
        lambda config: config.reward.reward_model.replaces_rule and config.data.val_files is None,
        "no effect: the reward model scores every sample (reward_model.rule_weight=0)",
    ),
)


def inert_settings(config: BaseModel, explicit_keys: Collection[str]) -> list[tuple[str, str]]:
    """Those of `explicit_keys` that change nothing, each with the reason."""
    if not isinstance(config, PPOConfig):
        return []
    return [
        (key, entry.reason)
        for key in sorted(explicit_keys)
        if (entry := next((e for e in TABLE if e.when(config) and _matches(key, e)), None)) is not None
    ]


def _matches(key: str, entry: Inert) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in entry.patterns)
