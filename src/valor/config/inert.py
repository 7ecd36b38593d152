"""Settings that are legal but change nothing in this run, and why: shown in the plan, so that nobody tunes in vain."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pydantic import BaseModel

from valor.config.critic_runs import CriticPretrainConfig, CriticRunConfig, CriticScoreConfig
from valor.config.ppo import PPOConfig

_ROLLOUT = "actor_rollout_ref.rollout"
# verl's keys for its engines, which are servers.
_VERL_KEYS = (
    "mode",
    "agent.num_workers",
    "checkpoint_engine.backend",
    "scheduling_policy",
    "layered_summon",
    "skip_tokenizer_init",
    "calculate_log_probs",
    "engine_kwargs.[!v]*",
)
_VLLM_KEYS = (
    "gpu_memory_utilization",
    "tensor_model_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
    "pipeline_model_parallel_size",
    "max_num_batched_tokens",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "free_cache_engine",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "load_format",
    "disable_log_stats",
    "engine_kwargs.vllm*",
)

_MODEL_KEYS = (
    "tokenizer_path",
    "custom_chat_template",
    "trust_remote_code",
    "label",
    "max_length",
    "micro_batch_size_per_gpu",
    "max_token_len_per_gpu",
    "fsdp_config.*",
)


@dataclass(frozen=True)
class Inert:
    """Keys that match one of `patterns` have no effect when `when` holds."""

    patterns: tuple[str, ...]
    when: Callable[[PPOConfig], bool]
    reason: str


# Built-in estimators that work without GAE's recursion.
CRITIC_FREE = frozenset(
    {
        *("grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg"),
        *("gdpo", "optimal_token_baseline"),
    }
)
_CORRECTION = "algorithm.rollout_correction"


def _always(config: PPOConfig) -> bool:
    return True


def _never_updates_policy(config: PPOConfig) -> bool:
    return isinstance(config, CriticRunConfig)


def _asks_server(config: PPOConfig) -> bool:
    return config.actor_rollout_ref.rollout.name == "server"


def _learns_from_files(config: PPOConfig) -> bool:
    return isinstance(config, CriticPretrainConfig) and config.pretrain.rollouts is not None


TABLE: tuple[Inert, ...] = (
    Inert(
        (
            *(
                f"actor_rollout_ref.actor.{name}"
                for name in ("optim.*", "policy_loss.*", "clip_*", "entropy*", "*kl_*")
            ),
            *("actor_rollout_ref.ref.*", f"{_ROLLOUT}.val_kwargs.*", f"{_ROLLOUT}.log_prob_*"),
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
    Inert(("data.train_[fm]*",), _learns_from_files, "no effect with pretrain.rollouts"),
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
    Inert(
        tuple(f"{_ROLLOUT}.{name}" for name in _VERL_KEYS),
        _always,
        "no effect: generation takes and gives token ids one by one, always with their log-probs",
    ),
    Inert(
        (f"{_ROLLOUT}.n_gpus_per_node",),
        lambda config: config.actor_rollout_ref.rollout.nnodes == 0,
        "no effect with rollout.nnodes=0",
    ),
    Inert(
        (f"{_ROLLOUT}.checkpoint_engine.update_*",),
        lambda config: not _asks_server(config) and (not config.rollout_apart or _never_updates_policy(config)),
        "no effect: the rollout is in the actor's processes",
    ),
    Inert((f"{_ROLLOUT}.server.*",), lambda config: not _asks_server(config), "no effect: rollout.name is not server"),
    Inert(
        (f"{_ROLLOUT}.max_model_len", *(f"{_ROLLOUT}.{name}" for name in _VLLM_KEYS)),
        _asks_server,
        "no effect with rollout.name=server: the server has options of its own",
    ),
    Inert(
        (f"{_ROLLOUT}.dtype", f"{_ROLLOUT}.server.weights_dir", f"{_ROLLOUT}.checkpoint_engine.update_*"),
        lambda config: config.actor_rollout_ref.rollout.keeps_weights,
        "no effect with rollout.server.weight_updates=none",
    ),
    Inert(
        (f"{_ROLLOUT}.free_cache_engine",),
        lambda config: config.rollout_apart,
        "no effect: nothing else is on the rollout's devices",
    ),
    Inert(
        tuple(f"{_ROLLOUT}.{name}" for name in _VLLM_KEYS),
        lambda config: config.actor_rollout_ref.rollout.name == "native",
        "no effect with rollout.name=native",
    ),
    Inert(
        tuple(f"{_ROLLOUT}.{name}" for name in ("enforce_eager", "cudagraph_capture_sizes", "free_cache_engine")),
        lambda config: config.trainer.device == "cpu",
        "no effect with trainer.device=cpu, where vLLM runs without graphs and cannot sleep",
    ),
    Inert(
        (f"{_ROLLOUT}.multi_turn.*",),
        lambda config: not config.actor_rollout_ref.rollout.multi_turn.enable,
        "no effect with multi_turn.enable=false",
    ),
    Inert(("*model.use_liger",), _always, "no effect: no such kernels here"),
    Inert(("*model.use_fused_kernels",), _always, "no effect: log-probs never hold all logits at once as it is"),
    Inert(("*model.use_shm",), _always, "no effect: weights are read from where they are"),
    Inert(("*.use_torch_compile",), _always, "no effect: nothing here is compiled"),
    Inert(
        ("*fsdp_config.offload_policy",),
        lambda config: config.trainer.device == "cpu",
        "no effect with trainer.device=cpu",
    ),
    Inert(
        ("actor_rollout_ref.model.lora_alpha", "actor_rollout_ref.model.*_modules"),
        lambda config: config.actor_rollout_ref.model.lora_rank == 0,
        "no effect with lora_rank=0",
    ),
    Inert(
        ("critic.model.lora_alpha", "critic.model.*_modules"),
        lambda config: config.critic.model.lora_rank == 0,
        "no effect with lora_rank=0",
    ),
    Inert(
        ("actor_rollout_ref.model.*_modules",),
        lambda config: config.actor_rollout_ref.model.lora_adapter_path is not None,
        "no effect with lora_adapter_path: the adapter says which",
    ),
    Inert(
        ("critic.model.*_modules",),
        lambda config: config.critic.model.lora_adapter_path is not None,
        "no effect with lora_adapter_path: the adapter says which",
    ),
    Inert(
        ("actor_rollout_ref.ref.fsdp_config.*",),
        lambda config: (
            config.actor_rollout_ref.model.lora_rank > 0
            and all("ref" not in pool.roles for pool in config.pools.values())
        ),
        "no effect with lora_rank: the reference is the actor without its adapters",
    ),
    Inert(
        ("reward.sandbox_fusion.*",),
        lambda config: config.reward.sandbox_fusion.url is None,
        "no effect: reward.sandbox_fusion.url is not set",
    ),
    Inert(("data.filter_overlong_prompts_workers",), _always, "no effect: one process measures prompts"),
    Inert(("actor_rollout_ref.ref.fsdp_config.optimizer_offload",), _always, "no effect: no optimizer"),
    Inert(("critic.[!e]*",), lambda config: not config.critic.enable, "no effect: this run has no critic"),
    Inert(("actor_rollout_ref.ref.*",), lambda config: not config.needs_reference, "no effect: no KL term is on"),
    Inert(
        ("actor_rollout_ref.ref.log_prob_*",),
        lambda config: not config.needs_ref_log_probs,
        "no effect with the exact KL: the reference takes the actor's micro-batches",
    ),
    Inert(
        ("actor_rollout_ref.actor.kl_loss_*",),
        lambda config: not config.actor_rollout_ref.actor.use_kl_loss,
        "no effect with use_kl_loss=false",
    ),
    Inert(
        ("algorithm.kl_ctrl.*", "algorithm.kl_penalty"),
        lambda config: not config.algorithm.use_kl_in_reward,
        "no effect with use_kl_in_reward=false",
    ),
    Inert(("algorithm.pf_ppo.*",), lambda config: not config.algorithm.use_pf_ppo, "no effect with use_pf_ppo=false"),
    Inert(
        ("algorithm.filter_groups.*", "data.gen_batch_size"),
        lambda config: not config.algorithm.filter_groups.enable,
        "no effect with filter_groups.enable=false",
    ),
    Inert(
        ("algorithm.lam", "algorithm.lam_actor", "algorithm.lam_critic", "algorithm.adaptive_lam_alpha"),
        lambda config: config.algorithm.adv_estimator in CRITIC_FREE,
        "no effect: this estimator has no lambda",
    ),
    Inert(
        ("algorithm.lam", "algorithm.lam_actor", "algorithm.lam_critic", "algorithm.adaptive_lam_alpha"),
        lambda config: config.algorithm.reward_source == "critic",
        "no effect with reward_source=critic: the advantage is V(last) - V",
    ),
    Inert(
        ("algorithm.reward_binarize", "algorithm.reward_threshold"),
        lambda config: config.algorithm.reward_source == "critic",
        "no effect on training with reward_source=critic",
    ),
    Inert(
        ("algorithm.reward_threshold",),
        lambda config: not config.algorithm.reward_binarize,
        "no effect with reward_binarize=false",
    ),
    Inert(
        ("algorithm.reward_mask_[!r]*", "algorithm.missing_reward"),
        lambda config: config.algorithm.reward_mask_ratio == 0,
        "no effect with reward_mask_ratio=0",
    ),
    Inert(
        ("algorithm.reward_mask_flip_adv_when_masked",),
        lambda config: config.algorithm.missing_reward == "exclude",
        "no effect with missing_reward=exclude",
    ),
    Inert(("critic.freeze_steps",), lambda config: config.critic.freeze, "no effect with freeze=true"),
    Inert(
        ("critic.ensemble_reduce",),
        lambda config: config.critic.ensemble_size == 1,
        "no effect with ensemble_size=1",
    ),
    Inert(
        ("critic.optim.*", "critic.value_loss*", "critic.cliprange_value", "critic.ppo_mini*", "critic.ppo_epochs"),
        lambda config: config.critic.freeze,
        "no effect with freeze=true",
    ),
    Inert(
        ("algorithm.gdpo_reward_*",),
        lambda config: config.algorithm.adv_estimator in CRITIC_FREE - {"gdpo"} | {"gae"},
        "no effect: adv_estimator is not gdpo",
    ),
    Inert(
        (f"{_CORRECTION}.rollout_is_*",),
        lambda config: config.algorithm.rollout_correction.rollout_is is None,
        "no effect: rollout_is is not set",
    ),
    Inert(
        (f"{_CORRECTION}.rollout_rs_threshold",),
        lambda config: config.algorithm.rollout_correction.rollout_rs is None,
        "no effect: rollout_rs is not set",
    ),
    Inert(
        (f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_is_*"),
        lambda config: (
            config.algorithm.rollout_correction.bypass_mode
            and config.algorithm.rollout_correction.loss_type == "ppo_clip"
        ),
        "no effect with bypass_mode and ppo_clip: the ratio is the importance weight already",
    ),
    Inert(
        (f"{_CORRECTION}.loss_type",),
        lambda config: not config.algorithm.rollout_correction.bypass_mode,
        "no effect with bypass_mode=false",
    ),
    Inert(
        ("critic.cliprange_value",),
        lambda config: config.critic.value_loss in ("bce", "hl_gauss"),
        "no effect with value_loss=bce and hl_gauss, which do not clip",
    ),
    Inert(
        ("reward.reward_kwargs.*",),
        lambda config: not config.reward.reward_kwargs.overlong_buffer_cfg.enable,
        "no effect with overlong_buffer_cfg.enable=false",
    ),
    Inert(
        ("trainer.test_freq", "trainer.val_before_train", "*.val_kwargs.*", "trainer.log_val_generations"),
        lambda config: config.data.val_files is None,
        "no effect: data.val_files is not set",
    ),
    Inert(
        ("reward.reward_model.*",),
        lambda config: not config.reward.reward_model.enable,
        "no effect with reward_model.enable=false",
    ),
    Inert(
        ("reward.reward_model.judge.*",),
        lambda config: config.reward.reward_model.judge.url is None,
        "no effect: reward_model.judge.url is not set",
    ),
    Inert(
        tuple(f"reward.reward_model.{name}" for name in _MODEL_KEYS),
        lambda config: config.reward.reward_model.judge.url is not None,
        "no effect with judge.url: the judge has its own server",
    ),
    Inert(("reward.reward_model.rollout*",), _always, "no effect: it runs in the training processes"),
    Inert(("reward.reward_model.fsdp_config.optimizer_offload",), _always, "no effect: no optimizer"),
    Inert(
        ("reward.reward_model.n_gpus_per_node", "reward.reward_model.nnodes"),
        lambda config: not config.reward.reward_model.enable_resource_pool,
        "no effect with enable_resource_pool=false",
    ),
    Inert(
        ("reward.remote.*",),
        lambda config: config.reward.reward_manager.name != "remote",
        "no effect: reward_manager.name is not remote",
    ),
    Inert(
        ("reward.num_workers", "reward.memory_limit_mb", "reward.sandbox_fusion.*"),
        lambda config: config.reward.reward_manager.name == "remote",
        "no effect with reward_manager.name=remote: a server grades",
    ),
    Inert(
        ("reward.custom_reward_function.*", "reward.num_workers", "reward.memory_limit_mb", "reward.timeout"),
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
