"""Spellings from verl that are not keys here: what each is read as, why it has no effect, or why it is refused.

One table, first match wins. `*` stands for any rest of a key and carries over to the target.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from valor.config.engine import RESUMABLE
from valor.config.tree import exists, is_section


@dataclass(frozen=True)
class Spelling:
    """A rule for keys that match `pattern`, and, with `only`, have one of these values.

    With a `target` the key is read as that one; `refused` makes it an error (without `only`: for values that switch
    something on). Otherwise it has no effect.
    """

    pattern: str
    reason: str = ""
    target: str | None = None
    refused: bool = False
    only: tuple[Any, ...] | None = None

    @property
    def why(self) -> str:
        """The reason in brackets, if there is one."""
        return f" ({self.reason})" if self.reason else ""

    def match(self, key: str, value: Any) -> str | None:
        """What `*` stands for in `key` ("" without a star), or None when the rule is about something else."""
        found = re.fullmatch(re.escape(self.pattern).replace(r"\*", "(.*)"), key)
        if found is None or (self.only is not None and value not in self.only):
            return None
        return found.group(1) if "*" in self.pattern else ""


def _at(section: str, names: str) -> str:
    """Each of the names, which are separated by spaces, below a section."""
    return " ".join(f"{section}.{name}" for name in names.split())


def _read_as(targets: Mapping[str, str], reason: str = "") -> list[Spelling]:
    return [Spelling(one, reason, target=target) for target, patterns in targets.items() for one in patterns.split()]


def _same_names(section: str, old_section: str, names: str) -> list[Spelling]:
    return [Spelling(f"{old_section}.{name}", target=f"{section}.{name}") for name in names.split()]


def _because(reasons: Mapping[str, str], **more: Any) -> list[Spelling]:
    """Rules without a target: no effect, or `refused=True`."""
    return [Spelling(one, reason, **more) for reason, patterns in reasons.items() for one in patterns.split()]


ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
REWARD_MODEL, VLLM = "reward.reward_model", "actor_rollout_ref.rollout.engine_kwargs.vllm"
LOSS = "actor_rollout_ref.actor.policy_loss"
UNSEEN = "what the policy is told is never trained on"
WHOLE = RESUMABLE, [*RESUMABLE, "hf_model"]
_TRACED = "global_profiler.roles and global_profiler.ranks say what is traced"
SAMPLED = "training rollouts are always sampled"
_LAYOUT = (
    "megatron.tensor_model_parallel_size megatron.pipeline_model_parallel_size megatron.context_parallel_size "
    "megatron.expert_model_parallel_size megatron.expert_tensor_parallel_size megatron.override_transformer_config.* "
    "fsdp_config.offload_policy fsdp_config.reshard_after_forward fsdp_config.fsdp_size"
)
REPLICAS = _at(ROLLOUT, "data_parallel_size expert_parallel_size pipeline_model_parallel_size moe_tensor_parallel_size")

_MICRO_BATCHES = {
    "*.ppo_micro_batch_size_per_gpu": "*.ppo_micro_batch_size",
    "*.log_prob_micro_batch_size_per_gpu": "*.log_prob_micro_batch_size",
    "data.micro_batch_size_per_gpu": "data.micro_batch_size",
}
_RENAMED = {
    "fsdp_config.*": "engine.* model.fsdp_config.*",
    "critic.fsdp_config.*": "critic.fsdp.* critic.model.fsdp_config.*",
    f"{MODEL}.enable_gradient_checkpointing": f"{ACTOR}.fsdp_config.gradient_checkpointing",
    f"{ROLLOUT}.n": f"{ROLLOUT}.n_agent",
    f"{ROLLOUT}.agent.environment": f"{ROLLOUT}.multi_turn.environment",
    f"{ROLLOUT}.multi_turn.tool_config_path": "data.tool_config_path",
    f"{ROLLOUT}.multi_turn.function_tool_path": "data.function_tool_path",
    f"{MODEL}.share_prefixes": f"{ACTOR}.use_prefix_grouper",
    f"{MODEL}.external_lib": "critic.model.external_lib",
    "trainer.v1.num_warmup_batches": "trainer.v1.*_async.num_warmup_batches",
    "critic.model.enable_gradient_checkpointing": "critic.fsdp_config.gradient_checkpointing",
    "*.optim.clip_grad": "*.grad_clip",
    "global_profiler.contents": "*.profiler.tool_config.torch.contents",
    "*fsdp_config.dtype": "*fsdp_config.mixed_precision.param_dtype",
    "*optim.lr_warmup_steps": "*optim.warmup_steps",
    "*optim.lr_warmup_steps_ratio": "*optim.warmup_steps_ratio",
    "*optim.lr_scheduler_type": "*optim.warmup_style *optim.lr_decay_style",
    **{f"{role}.megatron.*": f"{role}.megatron_config.*" for role in (ACTOR, REF, "critic")},
    **{f"*.fsdp_config.{name}": f"*.megatron.{name}" for name in ("dtype", "param_offload", "optimizer_offload")},
    f"{REWARD_MODEL}.megatron.*": "reward_model.megatron.*",
    "*checkpoint.save_contents": "*checkpoint.contents",
    "*.model.lora_rank": "*.model.lora.rank",
    "*.model.lora_alpha": "*.model.lora.alpha",
    "trainer.full_determinism": "*fsdp_config.full_determinism actor_rollout_ref.rollout.full_determinism",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep",
    "data.max_prompt_length": f"{ROLLOUT}.prompt_length",
    f"{MODEL}.tokenizer_path": "data.tokenizer",
    "data.max_response_length": f"{ROLLOUT}.response_length reward.reward_kwargs.max_resp_len",
    "algorithm.adv_kwargs.reward_keys": "algorithm.gdpo_reward_keys",
    "algorithm.adv_kwargs.reward_weights": "algorithm.gdpo_reward_weights",
    "trainer.log_val_generations": "trainer.val_generations_to_log_to_wandb",
    "ray_kwargs.ray_init.*": "ray_init.*",
    "reward.custom_reward_function.*": "custom_reward_function.*",
    "reward.reward_manager.name": "reward_model.reward_manager reward.reward_manager",
    "reward.reward_kwargs.*": "reward_model.reward_kwargs.*",
    "reward.num_workers": "reward_model.num_workers",
    f"{REWARD_MODEL}.model_path": "reward_model.path reward_model.model_path reward_model.model.path",
    f"{REWARD_MODEL}.micro_batch_size_per_gpu": "reward_model.micro_batch_size",
    f"{REWARD_MODEL}.max_token_len_per_gpu": "reward_model.forward_max_token_len_per_gpu",
    f"{REWARD_MODEL}.fsdp_config.*": "reward_model.fsdp_config.* reward_model.model.fsdp_config.*",
}
_MOVED = [
    *_same_names("*", "*.fsdp_config", "strategy ulysses_sequence_parallel_size"),
    *_same_names(MODEL, ACTOR, "use_remove_padding"),
    *_same_names(MODEL, f"{ACTOR}.megatron", "use_remove_padding"),
    *_same_names(MODEL, "data", "trust_remote_code"),
    *_same_names(REWARD_MODEL, "reward_model", "enable enable_resource_pool n_gpus_per_node nnodes strategy"),
    *_same_names(REWARD_MODEL, "reward_model", "max_length micro_batch_size_per_gpu"),
    *_same_names(REWARD_MODEL, "reward_model.model", "trust_remote_code"),
    *_same_names(f"{LOSS}.loss_kwargs", ACTOR, "tau_pos tau_neg"),
    *_same_names(
        f"{LOSS}.loss_kwargs", LOSS, "clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta"
    ),
    *_same_names(VLLM, ROLLOUT, "max_num_batched_tokens enable_chunked_prefill enable_prefix_caching load_format"),
    *_same_names(VLLM, ROLLOUT, "enforce_eager cudagraph_capture_sizes disable_log_stats"),
]
_BEFORE_WIDER_ONES = [
    *_because({UNSEEN: f"{ACTOR}.state_masking"}, only=(True,)),
    *_because({f"{UNSEEN}: leave it at true": f"{ACTOR}.state_masking"}, only=(False,), refused=True),
    *_because({"it is where AdamW comes from": "*optim.optimizer_impl"}, only=("torch.optim",)),
    *_because({"it is the optimizer": "*optim.optimizer"}, only=("AdamW", "adam")),
    *_because({"cosine falls once, from lr to its floor": "*optim.num_cycles"}, only=(0.5,)),
    *_because({_TRACED: "*.profiler.enable *.profiler.all_ranks"}, only=(True,)),
    *_because({_TRACED: "*.profiler.ranks"}),
    *_because({"layers are whole": "*fsdp_config.tensor_parallel_size"}, only=(1,)),
    *_because({"managers are built in": "reward.reward_manager.module.*"}, only=(None, "custom_reward_manager")),
    *_because({"fsdp and fsdp2 are the engine": "model_engine engine strategy"}, only=("dp", "fsdp", "fsdp2")),
    Spelling(f"{ROLLOUT}.do_sample", SAMPLED, refused=True, only=(False,)),
    *_because({"replicas follow from the processes": REPLICAS}, only=(1,)),
    *_because({"a checkpoint is always read as a whole": "*checkpoint.load_contents"}, only=WHOLE),
    *_because({"managers are built in": "reward.reward_manager.source"}, only=("register",)),
]
_NO_EFFECT = {
    "there is one trainer and one kind of worker": "trainer.use_legacy_worker_impl trainer.use_v1",
    "batches stay in the processes that make and read them": "transfer_queue.*",
    "other prompts take the place of filtered ones, data.gen_batch_size at a time": (
        "algorithm.filter_groups.max_inflight_gen_batches trainer.v1.sampler.sync_refill_failed_groups"
    ),
    "the reward model runs in the training processes, with its own engine and tokenizer": "reward_model.rollout.* "
    f"{REWARD_MODEL}.rollout.* reward_model.use_reward_loop reward_model.launch_reward_fn_async "
    "reward_model.use_dynamic_bsz reward_model.ulysses_sequence_parallel_size reward_model.model.input_tokenizer "
    "reward_model.model.use_remove_padding reward_model.model.use_fused_kernels reward_model.model.external_lib "
    "reward_model.model.use_shm",
    "the penalty is always logged": "*.overlong_buffer_cfg.log",
    "rows are always balanced over processes by tokens": "trainer.balance_batch",
    "any group of processes hosts any roles": "actor_rollout_ref.hybrid_engine",
    "Search-R1 does not read it either": "algorithm.no_think_rl",
    "it is unused in verl too": f"actor_rollout_ref.nccl_timeout data.return_raw_input_ids {ACTOR}.freeze_vision_tower "
    "critic.forward_micro_batch_size critic.forward_micro_batch_size_per_gpu critic.forward_max_token_len_per_gpu "
    + _at(ROLLOUT, "over_sample_rate multi_stage_wake_up multi_turn.num_repeat_rollouts"),
    "samples per prompt are actor_rollout_ref.rollout.n": f"{ACTOR}.rollout_n critic.rollout_n",
    "the schedule spans the run (trainer.total_training_steps)": "*optim.total_training_steps",
    "Valor reads and writes Hugging Face weights itself": "*.megatron.use_mbridge *.megatron.vanilla_mbridge",
    "the model is not trained": " ".join(
        [
            _at(f"{role}.{section}", "grad_offload optimizer_offload override_ddp_config.*")
            for role in (REF, REWARD_MODEL)
            for section in ("megatron", "fsdp_config")
        ]
    ),
    "the state of megatron's optimizer is always distributed": "*.megatron.use_distributed_optimizer",
    "gradients leave with the optimizer's state": "*.megatron.grad_offload",
    "processes that share matrices always share positions between them": "*.megatron.sequence_parallel",
    "the reference runs as the actor": _at(REF, f"strategy ulysses_sequence_parallel_size {_LAYOUT} fsdp_config.dtype"),
    "the reference has the micro-batches of actor_rollout_ref.rollout.log_prob_*": f"{REF}.log_prob_*",
    "actor_rollout_ref.actor.use_dynamic_bsz holds for all passes": f"{ROLLOUT}.log_prob_use_dynamic_bsz "
    "critic.use_dynamic_bsz",
    "the critic takes the actor's": _at(
        "critic",
        "fsdp_config.offload_policy fsdp_config.reshard_after_forward fsdp_config.fsdp_size loss_agg_mode "
        "loss_scale_factor megatron.context_parallel_size megatron.expert_model_parallel_size "
        "megatron.expert_tensor_parallel_size checkpoint.save_contents model.use_liger",
    ),
    "the reward model is divided as the actor, and sharded over all its processes": _at(
        REWARD_MODEL, f"{_LAYOUT} fsdp_config.model_dtype"
    ),
    "gathers overlap on a stream of their own": "*.fsdp_config.forward_prefetch",
    "checkpoints can always be read under another layout": "*.megatron.dist_ckpt_optim_fully_reshardable",
    "what an estimator needs is computed": f"{ACTOR}.calculate_sum_pi_squared",
    "entropy and log-probs never hold all logits at once": "*.entropy_checkpointing "
    "*.entropy_from_logits_with_chunking *.entropy_from_logits_chunk_size *model.use_fused_kernels "
    f"{ACTOR}.use_fused_kernels",
    "kernels are chosen by the model": f"{MODEL}.fused_kernel_options.* reward_model.model.use_liger",
    "gradient checkpointing and micro-batches by tokens bound the activations": "*.tiled_mlp.*",
    "training passes are compiled by model.compile=true": "*.use_torch_compile",
    "weights are read from where they are": "*model.use_shm",
    "micro-batches pad to their own longest row": "*.pad_to_length *.pad_to_length_bucket",
    "one seed decides all, trainer.seed": f"*fsdp_config.seed *.megatron.seed {ROLLOUT}.seed "
    f"{ACTOR}.data_loader_seed critic.data_loader_seed",
    "no warm-up step has rate 0": "*optim.zero_indexed_step",
    "FSDP2 shards layer by layer": "*.wrap_policy.min_num_params *fsdp_config.use_orig_params",
    "the role decides it": "*fsdp_config.forward_only *.megatron.forward_only",
    "gradients are summed in float32": "*fsdp_config.mixed_precision.*",
    "gradient checkpointing leaves few activations to offload": "*model.enable_activation_offload",
    "a checkpoint is always read strictly": "*checkpoint.strict",
    "each call has a trace of its own, in global_profiler.save_path": "*.profiler.tool_config.torch.discrete "
    "global_profiler.relocate_results global_profiler.profile_continuous_steps",
    "an export holds merged weights": f"{MODEL}.lora.merge",
    "rollout log-probs are those at rollout.temperature, before top_k and top_p": f"{ROLLOUT}.logprobs_mode",
    "expert load is not measured": f"{ROLLOUT}.moe_load_balance_metrics_interval",
    "generation takes and gives token ids one by one, always with their log-probs": _at(
        ROLLOUT,
        "mode skip_tokenizer_init calculate_log_probs",
    ),
    "episodes are tasks of one process: agent.max_concurrent_episodes bounds them": f"{ROLLOUT}.agent.num_workers",
    "weights go to generators tensor by tensor, in the way that fits where these are": _at(
        ROLLOUT, "checkpoint_engine.backend layered_summon"
    ),
    "requests are answered in the order in which they come": f"{ROLLOUT}.scheduling_policy",
    SAMPLED: f"{ROLLOUT}.do_sample",
    "turns are put together by token ids, always exactly": _at(
        ROLLOUT, "multi_turn.use_inference_chat_template multi_turn.tokenization_sanity_check_mode"
    ),
    "messages are always kept": "data.return_raw_chat data.return_full_prompt",
    "generation gets all validation prompts, and makes batches of its own": "data.val_batch_size",
    "validation keeps the file's order": "data.validation_shuffle",
    "prompts are read and measured in the trainer's process": "data.dataloader_num_workers data.use_shm "
    "data.filter_overlong_prompts_workers",
    "the policy's tokenizer is used": "critic.model.tokenizer_path critic.model.custom_chat_template",
    "Ray waits for its own start": "trainer.ray_wait_register_center_timeout",
    "an interrupted run saves by itself": "trainer.esi_redundant_time",
}
_REFUSED = {
    "documents stand between <information> and </information>: drop it": "algorithm.state_masking.*",
    "the engine is set by each role: use actor_rollout_ref.actor.strategy=megatron; valor sft and valor rm train are "
    "fsdp2's alone": "model_engine engine strategy megatron.*",
    "weights are read from, and written to, Hugging Face directories": "*.megatron.use_dist_checkpointing "
    "*.megatron.dist_checkpointing_path",
    "set megatron.override_transformer_config": "*.megatron.override_mcore_model_config.*",
    "a process has one pipeline stage: drop it": "*.megatron.virtual_pipeline_model_parallel_size",
    "gradients are reduced in float32, behind the backward pass: drop it": "*.megatron.override_ddp_config.*",
    "cosine falls once, from lr to its floor: leave it at 0.5": "*optim.num_cycles",
    "megatron-core's own FSDP is not used: set strategy=fsdp2": "*.megatron.use_megatron_fsdp",
    "context parallel ranks are the same for all rows": "*.megatron.dynamic_context_parallel "
    "*.megatron.max_seqlen_per_dp_cp_rank",
    "the schedule's floor is a share of lr: set min_lr_ratio": "*optim.min_lr",
    "replicas follow from the processes and tensor_model_parallel_size: set it to 1": REPLICAS,
    "a checkpoint is always read as a whole: drop it": "*checkpoint.load_contents",
    "saving is done before the next step: leave it at false": "*checkpoint.async_save",
    "layers are not split: set ulysses_sequence_parallel_size to share rows": "*fsdp_config.tensor_parallel_size",
    "code runs in a sandbox on this machine: drop it": "*sandbox_fusion.*",
    "a class is for the prompts of a PPO run: prepare a parquet or jsonl file": "*data.custom_cls.*",
    "managers are built in: naive (or prime, the same), dapo, batch": "reward.reward_manager.source",
    "traces are torch's: set global_profiler.tool=torch, .steps, .roles, .ranks, .save_path": "*.profiler.* "
    "global_profiler.* trainer.profile_steps",
    "expert routing is not replayed": f"*.router_replay.* {ROLLOUT}.enable_rollout_routing_replay",
    "the optimizer is torch.optim.AdamW: set optim.betas, optim.eps": "*optim.optimizer *optim.optimizer_impl "
    "*optim.override_optimizer_config.* *optim.override_optimizer_config",
    "training is not quantized": "*.qat.* *fsdp_config.turbo_config.*",
    "generation is not quantized": f"{ROLLOUT}.quantization {ROLLOUT}.quantization_config_file",
    "multi-token prediction is not supported": "*.mtp.*",
    "only lora_rank, lora_alpha, target_modules and exclude_modules are supported": "*.model.lora.*",
    "the model directory holds its own config: use override_config": "*.hf_config_path",
    "the reference model is the policy's start: set actor_rollout_ref.model.path": f"{REF}.model.*",
    "metrics go where trainer.logger says": f"{ROLLOUT}.trace.* {ROLLOUT}.prometheus.*",
    "prefill and decoding share an engine": f"{ROLLOUT}.disaggregation.*",
    "custom servers are not supported": f"{ROLLOUT}.agent.custom_async_server.*",
    "only the built-in weight transport is supported": f"{ROLLOUT}.checkpoint_engine.engine_kwargs.* "
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module",
    "rollouts are not cached": "skip.* " + _at(ROLLOUT, "skip.* skip_rollout skip_dump_dir"),
    "training is on text": _at(
        "data", "image_key video_key audio_key image_patch_size return_multi_modal_inputs mm_processor_kwargs.*"
    ),
    "sampling of prompts is data.shuffle and data.seed": "data.sampler.*",
    "tools are read from the column 'tools': rename it": "data.tools_key",
    "use algorithm.rollout_correction.*": "algorithm.rollout_is algorithm.rollout_is_*",
    "a grader of your own is reward.custom_reward_function.*": "reward.reward_manager.module.*",
    "distillation is not supported": "distillation.*",
    "training and generation keep their processes: drop it": "trainer.v1.separate_async.hybrid_rollout.*",
    "which samples come next is trainer.v1.sampler.max_off_policy_strategy": "trainer.v1.sampler.custom_sampler.* "
    "trainer.v1.sampler.sampler_kwargs.*",
    "set trainer.v1.trainer_mode=separate_async, sampler.max_off_policy_threshold": "async_training.*",
    "checkpoints go to trainer.default_local_dir": "trainer.default_hdfs_dir",
    "checkpoints are kept by trainer.max_ckpt_to_keep": "trainer.del_local_ckpt_after_load "
    "trainer.remove_previous_ckpt_in_save",
    "use `ray timeline`": "ray_kwargs.timeline_json_file",
}
SPELLINGS: tuple[Spelling, ...] = (
    *_read_as(_MICRO_BATCHES, "it counts samples of one process here"),
    *_MOVED,
    *_read_as(_RENAMED),
    *_BEFORE_WIDER_ONES,
    *_because(_NO_EFFECT),
    *_because(_REFUSED, refused=True),
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
