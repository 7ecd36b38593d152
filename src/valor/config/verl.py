"""Spellings from verl that are not keys here: what each is read as, why it has no effect, or why it cannot be had.

One table, first match wins. `*` stands for any rest of a key and carries over to the target.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from valor.config.base import Unavailable, is_set
from valor.config.engine import MEGATRON, PARTS, lacks_parts
from valor.config.reward import MANAGERS
from valor.config.tree import exists, is_section


@dataclass(frozen=True)
class Spelling:
    """A rule for keys that match `pattern`, and, with `only`, have one of these values.

    It has one of: `target`, the key that is meant; `value`, the value that is meant; `refused`, an error;
    `unavailable`, a feature that some values ask for. Otherwise, and for other values, the key has no effect.
    """

    pattern: str
    reason: str = ""
    target: str | None = None
    value: str | None = None
    refused: bool = False
    unavailable: Unavailable | None = None
    only: tuple[Any, ...] | None = None

    def match(self, key: str, value: Any) -> str | None:
        """What `*` stands for in `key` ("" without a star), or None when the rule is about something else."""
        found = re.fullmatch(re.escape(self.pattern).replace(r"\*", "(.*)"), key)
        if found is None or (self.only is not None and value not in self.only):
            return None
        return found.group(1) if "*" in self.pattern else ""


def _rules(patterns: str, at: str = "", **rule: Any) -> list[Spelling]:
    """The same rule for several patterns, separated by spaces, below the section `at`."""
    return [Spelling(f"{at}.{pattern}" if at else pattern, **rule) for pattern in patterns.split()]


def _read_as(target: str, patterns: str, reason: str = "") -> list[Spelling]:
    return _rules(patterns, target=target, reason=reason)


def _same_names(section: str, old_section: str, names: str) -> list[Spelling]:
    return [Spelling(f"{old_section}.{name}", target=f"{section}.{name}") for name in names.split()]


def _no_effect(reason: str, patterns: str, at: str = "", only: tuple[Any, ...] | None = None) -> list[Spelling]:
    return _rules(patterns, at, reason=reason, only=only)


def _refused(reason: str, patterns: str, at: str = "") -> list[Spelling]:
    return _rules(patterns, at, reason=reason, refused=True)


def _unavailable(
    feature: tuple[str, str],
    patterns: str,
    at: str = "",
    reason: str = "it asks for nothing",
    asks: Callable[[Any], bool] = is_set,
) -> list[Spelling]:
    return _rules(patterns, at, reason=reason, unavailable=Unavailable(*feature, asks))


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
REWARD_MODEL = "reward.reward_model"
PER_PROCESS = "it counts samples of one process here"
TOOLS = "multi-turn generation with tools", "leave multi_turn.enable at false"
ONE_TURN = "responses have one turn"
GREEDY = "greedy training rollouts", "leave rollout.do_sample at true"
REPLICAS = (
    "data, expert or pipeline parallelism of the rollout",
    "set it to 1, replicas follow from the processes and tensor_model_parallel_size",
)


def _several(size: Any) -> bool:
    return size not in (1, None)


SPELLINGS: tuple[Spelling, ...] = (
    # Renamed or moved.
    *_read_as("*.ppo_micro_batch_size_per_gpu", "*.ppo_micro_batch_size", PER_PROCESS),
    *_read_as("*.log_prob_micro_batch_size_per_gpu", "*.log_prob_micro_batch_size", PER_PROCESS),
    *_read_as("critic.fsdp_config.*", "critic.fsdp.* critic.model.fsdp_config.*"),
    *_read_as(f"{MODEL}.enable_gradient_checkpointing", f"{ACTOR}.fsdp_config.gradient_checkpointing"),
    *_read_as("critic.model.enable_gradient_checkpointing", "critic.fsdp_config.gradient_checkpointing"),
    *_read_as("*.optim.clip_grad", "*.grad_clip"),
    *_read_as("*optim.lr_warmup_steps", "*optim.warmup_steps"),
    *_read_as("*optim.lr_warmup_steps_ratio", "*optim.warmup_steps_ratio"),
    *_read_as("*optim.lr_scheduler_type", "*optim.warmup_style"),
    *_read_as("*checkpoint.save_contents", "*checkpoint.contents"),
    *_same_names("*", "*.fsdp_config", "strategy ulysses_sequence_parallel_size"),
    *_same_names(MODEL, ACTOR, "use_remove_padding"),
    *_read_as("*.model.lora_rank", "*.model.lora.rank"),
    *_read_as("*.model.lora_alpha", "*.model.lora.alpha"),
    *_same_names(MODEL, "data", "trust_remote_code"),
    *_read_as("trainer.max_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep"),
    *_read_as("trainer.log_val_generations", "trainer.val_generations_to_log_to_wandb"),
    *_read_as("ray_kwargs.ray_init.*", "ray_init.*"),
    # Rewards: the older tree beside the present one.
    *_read_as("reward.custom_reward_function.*", "custom_reward_function.*"),
    *_read_as("reward.sandbox_fusion.*", "sandbox_fusion.* reward_model.sandbox_fusion.*"),
    *_read_as("reward.reward_manager.name", "reward_model.reward_manager reward.reward_manager"),
    *_read_as("reward.reward_kwargs.*", "reward_model.reward_kwargs.*"),
    *_read_as("reward.num_workers", "reward_model.num_workers"),
    *_read_as(f"{REWARD_MODEL}.model_path", "reward_model.path reward_model.model_path reward_model.model.path"),
    *_same_names(REWARD_MODEL, "reward_model", "enable enable_resource_pool n_gpus_per_node nnodes"),
    *_same_names(REWARD_MODEL, "reward_model", "max_length micro_batch_size_per_gpu"),
    *_same_names(REWARD_MODEL, "reward_model.model", "trust_remote_code"),
    *_read_as(f"{REWARD_MODEL}.micro_batch_size_per_gpu", "reward_model.micro_batch_size"),
    *_read_as(f"{REWARD_MODEL}.max_token_len_per_gpu", "reward_model.forward_max_token_len_per_gpu"),
    *_read_as(f"{REWARD_MODEL}.fsdp_config.*", "reward_model.fsdp_config.* reward_model.model.fsdp_config.*"),
    *_no_effect("it runs in the training processes", f"reward_model.rollout.* {REWARD_MODEL}.rollout.*"),
    *_no_effect("scoring has one way", "reward_model.use_reward_loop reward_model.launch_reward_fn_async"),
    *_no_effect("the reward model's own tokenizer is used", "reward_model.model.input_tokenizer"),
    *_no_effect(
        "the reward model has one engine, which sorts texts by length",
        "strategy use_dynamic_bsz ulysses_sequence_parallel_size model.use_remove_padding model.use_fused_kernels "
        "model.external_lib model.use_shm",
        at="reward_model",
    ),
    # Values.
    *_rules("*strategy", value="fsdp2", only=("fsdp",)),
    *_rules(f"{ROLLOUT}.name", value="native", only=("hf",)),
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
        f"actor_rollout_ref.nccl_timeout {ACTOR}.freeze_vision_tower {ROLLOUT}.over_sample_rate "
        f"{ROLLOUT}.multi_stage_wake_up {ROLLOUT}.multi_turn.num_repeat_rollouts data.return_raw_input_ids "
        "critic.forward_micro_batch_size critic.forward_micro_batch_size_per_gpu critic.forward_max_token_len_per_gpu",
    ),
    *_no_effect("samples per prompt are actor_rollout_ref.rollout.n", f"{ACTOR}.rollout_n critic.rollout_n"),
    *_no_effect("the schedule spans the run (trainer.total_training_steps)", "*optim.total_training_steps"),
    *_no_effect("what an estimator needs is computed", f"{ACTOR}.calculate_sum_pi_squared"),
    *_no_effect("training does not group equal prefixes", f"{ACTOR}.use_prefix_grouper"),
    *_no_effect(
        "entropy never holds all logits at once",
        "*.entropy_from_logits_with_chunking *.entropy_from_logits_chunk_size *.entropy_checkpointing",
    ),
    *_no_effect("log-probs never hold all logits at once", f"*model.use_fused_kernels {ACTOR}.use_fused_kernels"),
    *_no_effect("there are no such kernels here", "*model.use_liger"),
    *_no_effect("kernels are chosen by the model", f"{MODEL}.fused_kernel_options.* *.tiled_mlp.*"),
    *_no_effect("weights are read from where they are", "*model.use_shm"),
    *_no_effect("micro-batches pad to their own longest row", "*.pad_to_length *.pad_to_length_bucket"),
    *_no_effect("runs are deterministic", "*.full_determinism"),
    *_no_effect("trainer.seed seeds everything", f"*fsdp_config.seed {ROLLOUT}.seed"),
    *_no_effect("it is where AdamW comes from", "*optim.optimizer_impl", only=("torch.optim",)),
    *_no_effect("it is the optimizer", "*optim.optimizer", only=("AdamW",)),
    *_no_effect("managers are built in", "reward.reward_manager.module.*", only=(None, "custom_reward_manager")),
    *_no_effect("no warm-up step has rate 0", "*optim.zero_indexed_step"),
    *_no_effect("FSDP2 shards layer by layer", "*.wrap_policy.min_num_params *fsdp_config.use_orig_params"),
    *_no_effect("the role decides it", "*fsdp_config.forward_only"),
    *_no_effect("nothing here is compiled", "*.use_torch_compile"),
    *_no_effect("a checkpoint is always read strictly", "*checkpoint.strict"),
    *_no_effect("an export holds merged weights", f"{MODEL}.lora.merge"),
    *_no_effect("rollout log-probs are those of the sampling distribution", f"{ROLLOUT}.logprobs_mode"),
    *_no_effect("expert load is not measured", f"{ROLLOUT}.moe_load_balance_metrics_interval"),
    *_no_effect(
        "generation takes and gives token ids one by one, always with their log-probs",
        "mode agent.num_workers checkpoint_engine.backend scheduling_policy layered_summon skip_tokenizer_init "
        "calculate_log_probs",
        at=ROLLOUT,
    ),
    *_no_effect("messages are always kept", "data.return_raw_chat data.return_full_prompt"),
    *_no_effect("prompts are read in the trainer's process", "data.dataloader_num_workers data.use_shm"),
    *_no_effect("one process measures prompts", "data.filter_overlong_prompts_workers"),
    *_no_effect("the policy's tokenizer is used", "critic.model.tokenizer_path critic.model.custom_chat_template"),
    *_no_effect("there is one data plane and nothing to set", "transfer_queue.*"),
    *_no_effect("Ray waits for its own start", "trainer.ray_wait_register_center_timeout"),
    *_no_effect("an interrupted run saves by itself", "trainer.esi_redundant_time"),
    *_no_effect("fsdp and fsdp2 are the engine", "model_engine engine", only=("dp", "fsdp", "fsdp2")),
    # Features that this version does not have: no effect unless they are asked for.
    *_unavailable(TOOLS, "multi_turn.enable agent.agent_loop_config_path", ROLLOUT, ONE_TURN),
    *_unavailable(TOOLS, "agent.default_agent_loop", ROLLOUT, ONE_TURN, lambda loop: loop != "single_turn_agent"),
    *_no_effect(ONE_TURN, f"{ROLLOUT}.multi_turn.* data.tool_config_path data.function_tool_path"),
    *_unavailable(GREEDY, "do_sample", ROLLOUT, "training rollouts are always sampled", lambda sample: not sample),
    *_unavailable(
        REPLICAS, "data_parallel_size expert_parallel_size pipeline_model_parallel_size", ROLLOUT, asks=_several
    ),
    *_unavailable(MEGATRON, "*.megatron_config *.megatron_config.*"),
    *_unavailable(PARTS, "*checkpoint.load_contents", "", "a checkpoint is always read as a whole", lacks_parts),
    *_unavailable(("saving in the background", "leave async_save at false"), "*checkpoint.async_save"),
    *_unavailable(("activation offload", "use gradient checkpointing"), "*model.enable_activation_offload"),
    *_unavailable(("a dataset class of your own", "prepare a parquet or jsonl file"), "data.custom_cls.path"),
    *_no_effect("it names a class in data.custom_cls.path", "data.custom_cls.name"),
    *_unavailable(
        MANAGERS, "reward.reward_manager.source", "", "managers are built in", lambda source: source == "importlib"
    ),
    # Features of verl that do not exist here; asking for one is an error.
    *_refused("the Megatron backend is not installed: use strategy=fsdp2", "model_engine engine *.megatron.*"),
    *_refused(
        "Valor has no profiler: timings are in the metrics as timing_s/*",
        "*.profiler.* global_profiler.* trainer.profile_steps",
    ),
    *_refused("expert routing is not replayed", f"*.router_replay.* {ROLLOUT}.enable_rollout_routing_replay"),
    *_refused(
        "the optimizer is torch.optim.AdamW: set optim.betas, optim.eps",
        "*optim.optimizer *optim.optimizer_impl *optim.override_optimizer_config.* *optim.override_optimizer_config",
    ),
    *_refused("training is not quantized", "*.qat.* *fsdp_config.turbo_config.*"),
    *_refused("generation is not quantized", f"{ROLLOUT}.quantization {ROLLOUT}.quantization_config_file"),
    *_refused("multi-token prediction is not supported", "*.mtp.*"),
    *_refused("only lora_rank, lora_alpha, target_modules and exclude_modules are supported", "*.model.lora.*"),
    *_refused("the model directory holds its own config: use override_config", "*.hf_config_path"),
    *_refused("the reference model is the policy's start: set actor_rollout_ref.model.path", f"{REF}.model.*"),
    *_refused("metrics go where trainer.logger says", f"{ROLLOUT}.trace.* {ROLLOUT}.prometheus.*"),
    *_refused("prefill and decoding share an engine", f"{ROLLOUT}.disaggregation.*"),
    *_refused("custom servers are not supported", f"{ROLLOUT}.agent.custom_async_server.*"),
    *_refused(
        "only the built-in weight transport is supported",
        "checkpoint_engine.engine_kwargs.* checkpoint_engine.custom_backend_module",
        at=ROLLOUT,
    ),
    *_refused("rollouts are not cached", f"skip.* {ROLLOUT}.skip.* {ROLLOUT}.skip_rollout {ROLLOUT}.skip_dump_dir"),
    *_refused(
        "training is on text",
        "image_key video_key audio_key image_patch_size return_multi_modal_inputs mm_processor_kwargs.*",
        at="data",
    ),
    *_refused("sampling of prompts is data.shuffle and data.seed", "data.sampler.*"),
    *_refused("use algorithm.rollout_correction.*", "algorithm.rollout_is algorithm.rollout_is_*"),
    *_refused("a grader of your own is reward.custom_reward_function.*", "reward.reward_manager.module.*"),
    *_refused("distillation is not supported", "distillation.*"),
    *_refused("the trainer is synchronous", "trainer.v1.* async_training.*"),
    *_refused("checkpoints go to trainer.default_local_dir", "trainer.default_hdfs_dir"),
    *_refused("checkpoints are kept by trainer.max_ckpt_to_keep", "trainer.del_local_ckpt_after_load"),
    *_refused("use trainer.max_ckpt_to_keep=1", "trainer.remove_previous_ckpt_in_save"),
    *_refused("use `ray timeline`", "ray_kwargs.timeline_json_file"),
    # Supervised training's older names.
    *_read_as("fsdp_config.*", "engine.* model.fsdp_config.*"),
    *_read_as("data.micro_batch_size_per_gpu", "data.micro_batch_size", PER_PROCESS),
)


def find_spelling(root: type[BaseModel], key: str, value: Any) -> tuple[Spelling, str | None] | None:
    """The first rule that applies to `key`, and the key of `root` that it leads to (over further rules, if need be)."""
    for one in SPELLINGS:
        star = one.match(key, value)
        if star is None:
            continue
        if one.target is None:
            return one, None
        target = one.target.replace("*", star)
        if exists(root, target) and not is_section(root, target):
            return one, target
        further = find_spelling(root, target, value)
        if further is not None:
            return further[0] if further[0].target is None else one, further[1]
    return None
