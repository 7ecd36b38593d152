"""Spellings from verl that are not keys here: what each is read as, why it has no effect, or why it cannot be had.

One table, first match wins. `*` stands for any rest of a key and carries over to the target. `only` limits a rule to
some values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from valor.config.tree import exists, is_section


@dataclass(frozen=True)
class Alias:
    """A rule for keys that match `pattern`: move the value to `target`, or say `reason`; `refused`: as an error."""

    pattern: str
    target: str | None = None
    reason: str = ""
    refused: bool = False
    only: tuple[Any, ...] | None = None

    def match(self, key: str) -> str | None:
        """What `*` stands for in `key` ("" without a star), or None when the rule is about other keys."""
        expression = re.escape(self.pattern).replace(r"\*", "(.*)")
        found = re.fullmatch(expression, key)
        if found is None:
            return None
        return found.group(1) if "*" in self.pattern else ""


def _moved(target: str, *patterns: str, reason: str = "") -> list[Alias]:
    return [Alias(pattern, target=target, reason=reason) for pattern in patterns]


def _same_names(section: str, old_section: str, *names: str) -> list[Alias]:
    return [Alias(f"{old_section}.{name}", target=f"{section}.{name}") for name in names]


def _no_effect(reason: str, *patterns: str, only: tuple[Any, ...] | None = None) -> list[Alias]:
    return [Alias(pattern, reason=reason, only=only) for pattern in patterns]


def _refused(reason: str, *patterns: str) -> list[Alias]:
    return [Alias(pattern, reason=reason, refused=True) for pattern in patterns]


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
PER_PROCESS = "it counts samples of one process here"

ALIASES: tuple[Alias, ...] = (
    # Renamed or moved.
    *_moved(f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size", reason=PER_PROCESS),
    *_moved("critic.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size", reason=PER_PROCESS),
    *_moved(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size", reason=PER_PROCESS),
    *_moved(f"{REF}.log_prob_micro_batch_size_per_gpu", f"{REF}.log_prob_micro_batch_size", reason=PER_PROCESS),
    *_moved("critic.fsdp_config.*", "critic.fsdp.*", "critic.model.fsdp_config.*"),
    *_moved(f"{MODEL}.enable_gradient_checkpointing", f"{ACTOR}.fsdp_config.gradient_checkpointing"),
    *_moved("critic.model.enable_gradient_checkpointing", "critic.fsdp_config.gradient_checkpointing"),
    *_moved(f"{ACTOR}.optim.clip_grad", f"{ACTOR}.grad_clip"),
    *_moved("critic.optim.clip_grad", "critic.grad_clip"),
    *_moved("*optim.lr_warmup_steps", "*optim.warmup_steps"),
    *_moved("*optim.lr_warmup_steps_ratio", "*optim.warmup_steps_ratio"),
    *_moved("*optim.lr_scheduler_type", "*optim.warmup_style"),
    *_moved("*checkpoint.save_contents", "*checkpoint.contents"),
    *_same_names(ACTOR, f"{ACTOR}.fsdp_config", "use_torch_compile", "strategy", "ulysses_sequence_parallel_size"),
    *_same_names("critic", "critic.fsdp_config", "ulysses_sequence_parallel_size", "strategy"),
    *_same_names(MODEL, ACTOR, "use_remove_padding", "use_fused_kernels"),
    *_moved(f"{MODEL}.lora_rank", f"{MODEL}.lora.rank"),
    *_moved(f"{MODEL}.lora_alpha", f"{MODEL}.lora.alpha"),
    *_moved("critic.model.lora_rank", "critic.model.lora.rank"),
    *_moved("critic.model.lora_alpha", "critic.model.lora.alpha"),
    *_moved(f"{ROLLOUT}.multi_turn.max_assistant_turns", f"{ROLLOUT}.multi_turn.max_turns"),
    *_same_names(f"{ROLLOUT}.multi_turn", "data", "tool_config_path", "function_tool_path"),
    *_same_names(MODEL, "data", "trust_remote_code"),
    *_moved("trainer.max_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"),
    *_moved("trainer.log_val_generations", "trainer.val_generations_to_log_to_wandb"),
    *_moved("ray_kwargs.ray_init.*", "ray_init.*"),
    # Rewards: the older tree beside the present one.
    *_moved("reward.custom_reward_function.*", "custom_reward_function.*"),
    *_moved("reward.sandbox_fusion.*", "sandbox_fusion.*", "reward_model.sandbox_fusion.*"),
    *_moved("reward.reward_manager.name", "reward_model.reward_manager", "reward.reward_manager"),
    *_moved("reward.reward_kwargs.*", "reward_model.reward_kwargs.*"),
    *_moved("reward.num_workers", "reward_model.num_workers"),
    *_moved(
        "reward.reward_model.model_path", "reward_model.path", "reward_model.model_path", "reward_model.model.path"
    ),
    *_same_names("reward.reward_model", "reward_model", "enable", "enable_resource_pool", "n_gpus_per_node", "nnodes"),
    *_same_names("reward.reward_model", "reward_model", "rollout.*", "max_length", "micro_batch_size_per_gpu"),
    *_same_names("reward.reward_model", "reward_model.model", "trust_remote_code"),
    *_moved("reward.reward_model.micro_batch_size_per_gpu", "reward_model.micro_batch_size"),
    *_moved("reward.reward_model.max_token_len_per_gpu", "reward_model.forward_max_token_len_per_gpu"),
    *_moved("reward.reward_model.fsdp_config.*", "reward_model.fsdp_config.*", "reward_model.model.fsdp_config.*"),
    *_no_effect("scoring has one way", "reward_model.use_reward_loop", "reward_model.launch_reward_fn_async"),
    *_no_effect("the reward model's own tokenizer is used", "reward_model.model.input_tokenizer"),
    *_no_effect(
        "the reward model has one engine, which sorts texts by length",
        "reward_model.strategy",
        "reward_model.use_dynamic_bsz",
        "reward_model.ulysses_sequence_parallel_size",
        "reward_model.model.use_remove_padding",
        "reward_model.model.use_fused_kernels",
        "reward_model.model.external_lib",
        "reward_model.model.use_shm",
    ),
    # Without effect, and why.
    *_no_effect("there is one worker implementation", "trainer.use_legacy_worker_impl"),
    *_no_effect("there is one trainer", "trainer.use_v1"),
    *_no_effect("the trainer is synchronous", "trainer.v1.trainer_mode", only=("sync",)),
    *_no_effect("the penalty is always logged", "*.overlong_buffer_cfg.log"),
    *_no_effect("the trainer is synchronous", "algorithm.filter_groups.max_inflight_gen_batches"),
    *_no_effect("rows are always balanced over processes by tokens", "trainer.balance_batch"),
    *_no_effect("any group of processes hosts any roles", "actor_rollout_ref.hybrid_engine"),
    *_no_effect(
        "it is unused in verl too",
        "actor_rollout_ref.nccl_timeout",
        f"{ACTOR}.freeze_vision_tower",
        f"{ROLLOUT}.over_sample_rate",
        f"{ROLLOUT}.multi_stage_wake_up",
        f"{ROLLOUT}.multi_turn.num_repeat_rollouts",
        "critic.forward_micro_batch_size",
        "critic.forward_micro_batch_size_per_gpu",
        "critic.forward_max_token_len_per_gpu",
        "data.return_raw_input_ids",
    ),
    *_no_effect("samples per prompt are actor_rollout_ref.rollout.n", f"{ACTOR}.rollout_n", "critic.rollout_n"),
    *_no_effect("the schedule spans the run (trainer.total_training_steps)", "*optim.total_training_steps"),
    *_no_effect("what an estimator needs is computed", f"{ACTOR}.calculate_sum_pi_squared"),
    *_no_effect("training does not group equal prefixes", f"{ACTOR}.use_prefix_grouper"),
    *_no_effect(
        "entropy never holds all logits at once",
        "*.entropy_from_logits_with_chunking",
        "*.entropy_from_logits_chunk_size",
        "*.entropy_checkpointing",
    ),
    *_no_effect("micro-batches pad to their own longest row", "*.pad_to_length", "*.pad_to_length_bucket"),
    *_no_effect("runs are deterministic", "*.full_determinism"),
    *_no_effect("trainer.seed seeds everything", "*fsdp_config.seed", f"{ROLLOUT}.seed"),
    *_no_effect("it is where AdamW comes from", "*optim.optimizer_impl", only=("torch.optim",)),
    *_no_effect("managers are built in", "reward.reward_manager.module.*", only=(None, "custom_reward_manager")),
    *_no_effect("no warm-up step has rate 0", "*optim.zero_indexed_step"),
    *_no_effect("FSDP2 shards layer by layer", "*.wrap_policy.min_num_params", "*fsdp_config.use_orig_params"),
    *_no_effect("the role decides it", "*fsdp_config.forward_only"),
    *_no_effect("nothing here is compiled", f"{REF}.use_torch_compile", "*fsdp_config.use_torch_compile"),
    *_no_effect("a checkpoint is always read strictly", "*checkpoint.strict"),
    *_no_effect("kernels are chosen by the model", f"{MODEL}.fused_kernel_options.*", "*.tiled_mlp.*"),
    *_no_effect("an export holds merged weights", f"{MODEL}.lora.merge"),
    *_no_effect("rollout log-probs are those of the sampling distribution", f"{ROLLOUT}.logprobs_mode"),
    *_no_effect("expert load is not measured", f"{ROLLOUT}.moe_load_balance_metrics_interval"),
    *_no_effect(
        "token ids go in and out, nothing is tokenized again",
        f"{ROLLOUT}.multi_turn.use_inference_chat_template",
        f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode",
    ),
    *_no_effect("messages are always kept", "data.return_raw_chat", "data.return_full_prompt"),
    *_no_effect("prompts are read in the trainer's process", "data.dataloader_num_workers", "data.use_shm"),
    *_no_effect("the policy's tokenizer is used", "critic.model.tokenizer_path", "critic.model.custom_chat_template"),
    *_no_effect("there is one data plane and nothing to set", "transfer_queue.*"),
    *_no_effect("Ray waits for its own start", "trainer.ray_wait_register_center_timeout"),
    *_no_effect("an interrupted run saves by itself", "trainer.esi_redundant_time"),
    *_no_effect("fsdp and fsdp2 are the engine", "model_engine", "engine", only=("dp", "fsdp", "fsdp2")),
    # Features of verl that do not exist here; asking for one is an error.
    *_refused("the Megatron backend is not installed: use strategy=fsdp2", "model_engine", "engine", "*.megatron.*"),
    *_refused(
        "Valor has no profiler: timings are in the metrics as timing_s/*",
        *("*.profiler.*", "global_profiler.*", "trainer.profile_steps"),
    ),
    *_refused("expert routing is not replayed", "*.router_replay.*", f"{ROLLOUT}.enable_rollout_routing_replay"),
    *_refused(
        "the optimizer is torch.optim.AdamW: set optim.betas, optim.eps",
        *("*optim.optimizer_impl", "*optim.override_optimizer_config.*", "*optim.override_optimizer_config"),
    ),
    *_refused("training is not quantized", "*.qat.*", "*fsdp_config.turbo_config.*"),
    *_refused("generation is not quantized", f"{ROLLOUT}.quantization", f"{ROLLOUT}.quantization_config_file"),
    *_refused("multi-token prediction is not supported", "*.mtp.*"),
    *_refused("only lora_rank, lora_alpha, target_modules and exclude_modules are supported", "*.model.lora.*"),
    *_refused("the model directory holds its own config: use override_config", "*.hf_config_path"),
    *_refused("the reference model is the policy's start: set actor_rollout_ref.model.path", f"{REF}.model.*"),
    *_refused("metrics go where trainer.logger says", f"{ROLLOUT}.trace.*", f"{ROLLOUT}.prometheus.*"),
    *_refused("prefill and decoding share an engine", f"{ROLLOUT}.disaggregation.*"),
    *_refused("custom servers are not supported", f"{ROLLOUT}.agent.custom_async_server.*"),
    *_refused(
        "only the built-in weight transport is supported",
        f"{ROLLOUT}.checkpoint_engine.engine_kwargs.*",
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module",
    ),
    *_refused(
        "rollouts are not cached", "skip.*", f"{ROLLOUT}.skip.*", f"{ROLLOUT}.skip_rollout", f"{ROLLOUT}.skip_dump_dir"
    ),
    *_refused(
        "training is on text",
        "data.image_key",
        "data.video_key",
        "data.audio_key",
        "data.image_patch_size",
        "data.return_multi_modal_inputs",
        "data.mm_processor_kwargs.*",
    ),
    *_refused("sampling of prompts is data.shuffle and data.seed", "data.sampler.*"),
    *_refused("use algorithm.rollout_correction.*", "algorithm.rollout_is", "algorithm.rollout_is_*"),
    *_refused("a grader of your own is reward.custom_reward_function.*", "reward.reward_manager.module.*"),
    *_refused("distillation is not supported", "distillation.*"),
    *_refused("the trainer is synchronous", "trainer.v1.*", "async_training.*"),
    *_refused("checkpoints go to trainer.default_local_dir", "trainer.default_hdfs_dir"),
    *_refused("checkpoints are kept by trainer.max_ckpt_to_keep", "trainer.del_local_ckpt_after_load"),
    *_refused("use trainer.max_ckpt_to_keep=1", "trainer.remove_previous_ckpt_in_save"),
    *_refused("use `ray timeline`", "ray_kwargs.timeline_json_file"),
    # Supervised training's older names.
    *_moved("fsdp_config.*", "engine.*", "model.fsdp_config.*"),
    *_moved("data.micro_batch_size_per_gpu", "data.micro_batch_size", reason=PER_PROCESS),
)


def find_alias(root: type[BaseModel], key: str, value: Any) -> tuple[Alias, str | None] | None:
    """The first rule that applies to `key`, and the key of `root` that it leads to (over further rules, if need be)."""
    for alias in ALIASES:
        star = alias.match(key)
        if star is None or (alias.only is not None and value not in alias.only):
            continue
        if alias.target is None:
            return alias, None
        target = alias.target.replace("*", star)
        if exists(root, target) and not is_section(root, target):
            return alias, target
        further = find_alias(root, target, value)
        if further is not None:
            return further[0] if further[0].target is None else alias, further[1]
    return None
