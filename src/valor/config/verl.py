"""Spellings from verl that are not keys here: what each is read as, why it has no effect, or why it is refused; and
those of `valor.config.trl`, by the same rules."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import yaml
from pydantic import BaseModel

from valor.config import trl
from valor.config.tree import exists, is_section

_SECTIONS = {
    "A": "actor_rollout_ref.actor",
    "REF": "actor_rollout_ref.ref",
    "R": "actor_rollout_ref.rollout",
    "M": "actor_rollout_ref.model",
    "RM": "reward.reward_model",
}
# `KEYS -> KEY [: reason]` is read as KEY, or as the first of several that the command has, `KEYS -> KEY=VALUE` as KEY
# at that value; `KEYS : reason` has no effect; `KEYS ! reason` is refused; `KEYS ? answer` is a mistake whose line is
# the answer. The first row that fits counts. `*` stands for any rest of a key, also in the target; a target that ends
# in a dot keeps the last name; `a.(b c)` is `a.b a.c`; with `[values]` behind the keys a row is about these alone;
# indented lines continue a row.
_TABLE = """
*.ppo_micro_batch_size -> *.ppo_micro_batch_size_per_gpu : it counts samples of one process here
*.log_prob_micro_batch_size -> *.log_prob_micro_batch_size_per_gpu : it counts samples of one process here
data.micro_batch_size -> data.micro_batch_size_per_gpu : it counts samples of one process here
data.tokenizer -> {M}.tokenizer_path
model.partial_pretrain -> model.path
optim.lr_scheduler -> optim.lr_scheduler_type
trainer.resume_path -> trainer.resume_from_path
use_remove_padding -> model.use_remove_padding
data.chat_template -> model.custom_chat_template
data.multiturn.messages_key -> data.messages_key
data.(multiturn.enable ignore_input_ids_mismatch) : a row is what its columns say, tokenised once
data.(use_dynamic_bsz pad_mode balance_dp_token num_workers) : micro-batches are made by tokens
ulysses_sequence_parallel_size engine.ulysses_sequence_parallel_size [1] : rows are whole
ulysses_sequence_parallel_size engine.ulysses_sequence_parallel_size ! rows are whole here: drop it
data.(tools_key multiturn.tools_key) [tools] : it is where they are read
data.(enable_thinking_key multiturn.enable_thinking_key) [enable_thinking] : it is where a row says so
{R}.multi_turn.environment -> {R}.agent.environment
*.fsdp_config.(strategy ulysses_sequence_parallel_size) -> *.
{A}.use_remove_padding {A}.megatron.use_remove_padding data.trust_remote_code -> {M}.
reward_model.(enable enable_resource_pool n_gpus_per_node nnodes strategy max_length micro_batch_size_per_gpu)
    reward_model.model.trust_remote_code -> {RM}.
{A}.(tau_pos tau_neg) -> {A}.policy_loss.loss_kwargs.
{A}.policy_loss.(clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef dro_beta) ->
    {A}.policy_loss.loss_kwargs.
{R}.(max_num_batched_tokens enable_chunked_prefill enable_prefix_caching load_format enforce_eager
    cudagraph_capture_sizes disable_log_stats) -> {R}.engine_kwargs.vllm.
engine.* model.fsdp_config.* -> fsdp_config.*
critic.fsdp.* critic.model.fsdp_config.* -> critic.fsdp_config.*
{A}.fsdp_config.gradient_checkpointing -> {M}.enable_gradient_checkpointing
{R}.n_agent -> {R}.n
data.(tool_config_path function_tool_path) -> {R}.multi_turn.
{A}.use_prefix_grouper -> {M}.share_prefixes
critic.model.external_lib -> {M}.external_lib
{M}.freeze_vision_tower -> {A}.freeze_vision_tower
trainer.v1.*_async.num_warmup_batches -> trainer.v1.num_warmup_batches
critic.fsdp_config.gradient_checkpointing -> critic.model.enable_gradient_checkpointing
*.grad_clip -> *.optim.clip_grad
*.profiler.tool_config.torch.contents -> global_profiler.contents
*fsdp_config.mixed_precision.param_dtype -> *fsdp_config.dtype
*optim.warmup_steps -> *optim.lr_warmup_steps
*optim.warmup_steps_ratio -> *optim.lr_warmup_steps_ratio
*optim.(warmup_style lr_decay_style) -> *optim.lr_scheduler_type
{A}.megatron_config.* -> {A}.megatron.*
{REF}.megatron_config.* -> {REF}.megatron.*
critic.megatron_config.* -> critic.megatron.*
*.megatron.(dtype param_offload optimizer_offload) -> *.fsdp_config.
reward_model.megatron.* -> {RM}.megatron.*
*checkpoint.contents -> *checkpoint.save_contents
*.model.lora.rank -> *.model.lora_rank
*.model.lora.alpha -> *.model.lora_alpha
*fsdp_config.full_determinism {R}.full_determinism -> trainer.full_determinism
trainer.(max_actor_ckpt_to_keep max_critic_ckpt_to_keep) -> trainer.max_ckpt_to_keep
{R}.prompt_length -> data.max_prompt_length
{R}.response_length reward.reward_kwargs.max_resp_len -> data.max_response_length
algorithm.gdpo_reward_keys -> algorithm.adv_kwargs.reward_keys
algorithm.gdpo_reward_weights -> algorithm.adv_kwargs.reward_weights
trainer.val_generations_to_log_to_wandb -> trainer.log_val_generations
ray_init.* -> ray_kwargs.ray_init.*
custom_reward_function.* -> reward.custom_reward_function.*
reward_model.reward_manager reward.reward_manager -> reward.reward_manager.name
reward_model.reward_kwargs.* -> reward.reward_kwargs.*
reward_model.num_workers -> reward.num_workers
reward_model.(path model_path) reward_model.model.path -> {RM}.model_path
reward_model.micro_batch_size -> {RM}.micro_batch_size_per_gpu
reward_model.forward_max_token_len_per_gpu -> {RM}.max_token_len_per_gpu
reward_model.fsdp_config.* reward_model.model.fsdp_config.* -> {RM}.fsdp_config.*
{A}.state_masking [true] : what the policy is told is never trained on
{A}.state_masking [false] ! what the policy is told is never trained on: leave it at true
*optim.optimizer_impl [torch.optim] : it is where optimizers come from
*optim.num_cycles [0.5] : cosine falls once, from lr to its floor
*.profiler.(enable all_ranks) [true] : global_profiler.roles and global_profiler.ranks say what is traced
*.profiler.ranks : global_profiler.roles and global_profiler.ranks say what is traced
*fsdp_config.tensor_parallel_size [1] : layers are whole
reward.reward_manager.module.* [null, custom_reward_manager] : managers are built in
model_engine engine strategy [dp, fsdp, fsdp2] : fsdp and fsdp2 are the engine
{R}.do_sample [false] ! training rollouts are always sampled
{R}.(data_parallel_size expert_parallel_size pipeline_model_parallel_size moe_tensor_parallel_size) [1] : replicas
    follow from the processes
*checkpoint.load_contents [[model, optimizer, extra], [model, optimizer, extra, hf_model]] : a checkpoint is always
    read as a whole
reward.reward_manager.source [register] : managers are built in
trainer.(use_legacy_worker_impl use_v1) : there is one trainer and one kind of worker
transfer_queue.* : batches stay in the processes that make and read them
algorithm.filter_groups.max_inflight_gen_batches trainer.v1.sampler.sync_refill_failed_groups : other prompts take the
    place of filtered ones, data.gen_batch_size at a time
reward_model.(rollout.* use_reward_loop launch_reward_fn_async use_dynamic_bsz ulysses_sequence_parallel_size)
    {RM}.rollout.* reward_model.model.(input_tokenizer use_remove_padding use_fused_kernels external_lib use_shm) :
    the reward model runs in the training processes, with its own engine and tokenizer
*.overlong_buffer_cfg.log : the penalty is always logged
trainer.balance_batch : rows are always balanced over processes by tokens
actor_rollout_ref.hybrid_engine : any group of processes hosts any roles
algorithm.no_think_rl : Search-R1 does not read it either
actor_rollout_ref.nccl_timeout data.return_raw_input_ids critic.(forward_micro_batch_size
    forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu) {R}.(over_sample_rate multi_stage_wake_up)
    {R}.multi_turn.num_repeat_rollouts : it is unused in verl too
{A}.rollout_n critic.rollout_n : samples per prompt are actor_rollout_ref.rollout.n
*optim.total_training_steps : the schedule spans the run (trainer.total_training_steps)
*.megatron.(use_mbridge vanilla_mbridge) : Valor reads and writes Hugging Face weights itself
{REF}.megatron.(grad_offload optimizer_offload override_ddp_config.*) {RM}.megatron.(grad_offload optimizer_offload
    override_ddp_config.*) {REF}.fsdp_config.optimizer_offload {RM}.fsdp_config.optimizer_offload : the model is not
    trained
*.megatron.use_distributed_optimizer : the state of megatron's optimizer is always distributed
*.megatron.grad_offload : gradients leave with the optimizer's state
*.megatron.sequence_parallel : processes that share matrices always share positions between them
{REF}.(strategy ulysses_sequence_parallel_size) {REF}.megatron.(tensor_model_parallel_size
    pipeline_model_parallel_size context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
    override_transformer_config.*) {REF}.fsdp_config.(offload_policy reshard_after_forward fsdp_size dtype) : the
    reference runs as the actor
{REF}.log_prob_* : the reference has the micro-batches of actor_rollout_ref.rollout.log_prob_*
{R}.log_prob_use_dynamic_bsz critic.use_dynamic_bsz : actor_rollout_ref.actor.use_dynamic_bsz holds for all passes
critic.fsdp_config.(offload_policy reshard_after_forward fsdp_size) critic.(loss_agg_mode loss_scale_factor)
    critic.megatron.(context_parallel_size expert_model_parallel_size expert_tensor_parallel_size)
    critic.checkpoint.save_contents critic.model.use_liger : the critic takes the actor's
{RM}.megatron.(tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size override_transformer_config.*)
    {RM}.fsdp_config.(offload_policy reshard_after_forward fsdp_size model_dtype) : the reward model is divided as the
    actor, and sharded over all its processes
*.fsdp_config.forward_prefetch : gathers overlap on a stream of their own
*.megatron.dist_ckpt_optim_fully_reshardable : checkpoints can always be read under another layout
{A}.calculate_sum_pi_squared : what an estimator needs is computed
*.(entropy_checkpointing entropy_from_logits_with_chunking entropy_from_logits_chunk_size) *model.use_fused_kernels
    {A}.use_fused_kernels : entropy and log-probs never hold all logits at once
{M}.fused_kernel_options.* reward_model.model.use_liger : kernels are chosen by the model
*.tiled_mlp.* : gradient checkpointing and micro-batches by tokens bound the activations
*.use_torch_compile : training passes are compiled by model.compile=true
*model.use_shm : weights are read from where they are
*.(pad_to_length pad_to_length_bucket) : micro-batches pad to their own longest row
*fsdp_config.seed *.megatron.seed {R}.seed {A}.data_loader_seed critic.data_loader_seed : one seed decides all,
    trainer.seed
*optim.zero_indexed_step : no warm-up step has rate 0
*.wrap_policy.min_num_params *fsdp_config.use_orig_params : FSDP2 shards layer by layer
*fsdp_config.forward_only *.megatron.forward_only : the role decides it
*fsdp_config.mixed_precision.* : gradients are summed in float32
*model.enable_activation_offload : gradient checkpointing leaves few activations to offload
*checkpoint.strict : a checkpoint is always read strictly
*.profiler.tool_config.torch.discrete global_profiler.(relocate_results profile_continuous_steps) : each call has a
    trace of its own, in global_profiler.save_path
{M}.lora.merge : an export holds merged weights
{R}.logprobs_mode : rollout log-probs are those at rollout.temperature, before top_k and top_p
{R}.moe_load_balance_metrics_interval : expert load is not measured
{R}.(mode skip_tokenizer_init calculate_log_probs) : generation takes and gives token ids one by one, always with
    their log-probs
{R}.agent.num_workers : episodes are tasks of one process: agent.max_concurrent_episodes bounds them
{R}.checkpoint_engine.backend {R}.layered_summon : weights go to generators tensor by tensor, in the way that fits
    where these are
{R}.scheduling_policy : requests are answered in the order in which they come
{R}.do_sample : training rollouts are always sampled
{R}.(repetition_penalty val_kwargs.repetition_penalty) [1] : it is off
{R}.(repetition_penalty val_kwargs.repetition_penalty min_p val_kwargs.min_p stop stop_token_ids) ! tokens are drawn by
    temperature, top_k and top_p, up to the template's end of a turn
{R}.multi_turn.interaction_config_path ! an environment answers the model here: set {R}.agent.environment
{R}.multi_turn.(use_inference_chat_template tokenization_sanity_check_mode) : turns are put together by token ids,
    always exactly
data.(return_raw_chat return_full_prompt) : messages are always kept
data.val_batch_size : generation gets all validation prompts, and makes batches of its own
data.validation_shuffle : validation keeps the file's order
data.(dataloader_num_workers use_shm filter_overlong_prompts_workers) : prompts are read and measured in the trainer's
    process
critic.model.(tokenizer_path custom_chat_template) : the policy's tokenizer is used
trainer.ray_wait_register_center_timeout : Ray waits for its own start
trainer.esi_redundant_time : an interrupted run saves by itself
model_engine engine strategy megatron.* ! the engine is set by each role: use
    actor_rollout_ref.actor.strategy=megatron; valor sft and valor rm train are fsdp2's alone
*.megatron.(use_dist_checkpointing dist_checkpointing_path) ! weights are read from, and written to, Hugging Face
    directories
*.megatron.override_mcore_model_config.* ! set megatron.override_transformer_config
*.megatron.virtual_pipeline_model_parallel_size ! a process has one pipeline stage: drop it
*.megatron.override_ddp_config.* ! gradients are reduced in float32, behind the backward pass: drop it
*optim.num_cycles ! cosine falls once, from lr to its floor: leave it at 0.5
*.megatron.use_megatron_fsdp ! megatron-core's own FSDP is not used: set strategy=fsdp2
*.megatron.(dynamic_context_parallel max_seqlen_per_dp_cp_rank) ! context parallel ranks are the same for all rows
*optim.min_lr ! the schedule's floor is a share of lr: set min_lr_ratio
{R}.(data_parallel_size expert_parallel_size pipeline_model_parallel_size moe_tensor_parallel_size) ! replicas follow
    from the processes and tensor_model_parallel_size: set it to 1
*checkpoint.load_contents ! a checkpoint is always read as a whole: drop it
*checkpoint.async_save ! saving is done before the next step: leave it at false
*fsdp_config.tensor_parallel_size ! layers are not split: set ulysses_sequence_parallel_size to share rows
*sandbox_fusion.* ! code runs in a sandbox on this machine: drop it
*data.custom_cls.* ! a class is for the prompts of a PPO run: prepare a parquet or jsonl file
reward.reward_manager.source ! managers are built in: naive (or prime, the same), dapo, batch
*.profiler.* global_profiler.* trainer.profile_steps ! traces are torch's: set global_profiler.tool=torch, .steps,
    .roles, .ranks, .save_path
{R}.enable_rollout_routing_replay : the engine records what {A}.router_replay.mode=R3 needs
*.router_replay.* ! the experts of a run's own rollouts are replayed, by the actor alone: set {A}.router_replay.mode=R3
*optim.(optimizer optimizer_impl override_optimizer_config.* override_optimizer_config) ! the optimizer is
    torch.optim.AdamW: set optim.betas, optim.eps
*.qat.* *fsdp_config.turbo_config.* ! training is not quantized
{R}.(quantization quantization_config_file) ! generation is not quantized
*.mtp.* ! multi-token prediction is not supported
*.model.lora.* ! only lora_rank, lora_alpha, target_modules and exclude_modules are supported
*.hf_config_path ! the model directory holds its own config: use override_config
{REF}.model.* ! the reference model is the policy's start: set actor_rollout_ref.model.path
{R}.trace.max_samples_per_step_per_worker -> trainer.trace_generations
{R}.trace.token2text : responses are always shown as text
{R}.trace.(project_name experiment_name) : samples belong to the run of trainer.project_name and experiment_name
{R}.trace.backend [null] : samples go where trainer.logger says
{R}.trace.backend ? name the service in trainer.logger (wandb, trackio, mlflow or swanlab), and set
    trainer.trace_generations
{R}.prometheus.* ! metrics go where trainer.logger says
{R}.disaggregation.* ! prefill and decoding share an engine
{R}.agent.custom_async_server.* ! custom servers are not supported
{R}.checkpoint_engine.(engine_kwargs.* custom_backend_module) ! only the built-in weight transport is supported
skip.* {R}.(skip.* skip_rollout skip_dump_dir) ! rollouts are not cached
data.(video_key audio_key) ! prompts have text and images, no video and no audio: drop it
data.image_patch_size : the model's processor knows it
data.return_multi_modal_inputs : samples name the files of their images
data.(image_* mm_processor_kwargs.*) ! this command reads text: prompts with images are for valor ppo
data.(tools_key multiturn.tools_key) ! tools are read from the column 'tools': rename it
data.(enable_thinking_key enable_thinking_default multiturn.enable_thinking_key) ! a row's arguments of the template are
    in its columns 'enable_thinking' and 'chat_template_kwargs', those of all in data.apply_chat_template_kwargs
data.(prompt_dict_keys response_dict_keys) ! columns are read whole: write what is inside one into others
algorithm.state_masking.* ! documents stand between <information> and </information>: drop it
algorithm.rollout_correction.rollout_rs_threshold_lower ! set rollout_rs_threshold to both bounds, as in 0.5_2.0
algorithm.rollout_correction.rollout_token_veto_threshold ! set rollout_rs=seq_max_k2, the largest
    log(ratio)²/2 of a response, and rollout_rs_threshold
algorithm.(rollout_is rollout_is_*) ! use algorithm.rollout_correction.*
reward.reward_manager.module.* ! a grader of your own is reward.custom_reward_function.*
distillation.distillation_loss.(clip_ratio clip_ratio_low clip_ratio_high) -> {A}. : one policy loss takes all
    advantages
distillation.distillation_loss.policy_loss_mode -> {A}.policy_loss.loss_mode : one policy loss takes all advantages
distillation.teacher_model.enable_resource_pool [true] -> distillation.nnodes=1
distillation.teacher_model.n_gpus_per_node -> distillation.
distillation.teacher_model.model_path -> distillation.teacher_models.teacher_model.
distillation.teacher_model.inference.temperature -> distillation.teacher_models.teacher_model.temperature
distillation.teacher_models.*.inference.temperature -> distillation.teacher_models.*.temperature
distillation.teacher_models.*.(num_replicas inference.*) distillation.teacher_model.(enable_resource_pool nnodes
    inference.*) distillation.num_workers : a teacher is a training engine in each of its processes, with no generation
    engine
distillation.distillation_loss.(use_chunked_topk chunked_topk_chunk_size) : logits are never held all at once
trainer.v1.separate_async.hybrid_rollout.* ! training and generation keep their processes: drop it
trainer.v1.sampler.(custom_sampler.* sampler_kwargs.*) ! which samples come next is
    trainer.v1.sampler.max_off_policy_strategy
reward_model.overlong_buffer.* -> reward.reward_kwargs.overlong_buffer_cfg.
rollout.(nnodes n_gpus_per_node) -> {R}.
rollout.(test_freq total_epochs) -> trainer.
algorithm.filter_groups._target_ : this section has keys of its own
rollout.total_rollout_steps ! steps are counted in updates of weights: set trainer.total_training_steps
async_training.* ! set trainer.v1.trainer_mode=separate_async, sampler.max_off_policy_threshold
algorithm.(use_pf_ppo agreement_mask divergence_mask) critic.ensemble_shards [0] : the key is gone, and this was its
    default
algorithm.pf_ppo.* : the key is gone
algorithm.truncation_bootstrap [false] -> algorithm.truncated_responses=end
algorithm.truncation_bootstrap [true] -> algorithm.truncated_responses=bootstrap
algorithm.use_pf_ppo ? set algorithm.phases_path=examples/phases/resampling.py
algorithm.(agreement_mask divergence_mask) ? set algorithm.phases_path=examples/phases/agreement_mask.py
critic.value_levels [[0, 1], [0.0, 1.0]] : the key is gone, and this was its default
data.sampler.difficulty.smoothing [0.5] : the key is gone, and this was its default
critic.value_levels ? the value of critic.value_loss=hl_gauss is the mean of its bins: drop it
critic.ensemble_shards ? critics learn from all samples: set critic.shuffle=true or critic.model.value_head_init=normal
trainer.default_hdfs_dir ! checkpoints go to trainer.default_local_dir
trainer.(del_local_ckpt_after_load remove_previous_ckpt_in_save) ! checkpoints are kept by trainer.max_ckpt_to_keep
ray_kwargs.timeline_json_file ! use `ray timeline`
"""


@dataclass(frozen=True)
class Spelling:
    """A rule for keys that match `pattern`, and, with `only`, have one of these values.

    With a `target` the key is read as that one, with a `value` (yaml) as that one at this value; `refused` makes it an
    error (without `only`: for values that switch something on), `answered` one whose line is the reason. Otherwise it
    has no effect.
    """

    pattern: str
    reason: str = ""
    target: str | None = None
    refused: bool = False
    only: list[Any] | None = None
    answered: bool = False
    value: str | None = None

    @property
    def why(self) -> str:
        """The reason in brackets, if there is one."""
        return f" ({self.reason})" if self.reason else ""

    def match(self, key: str, value: Any) -> str | None:
        """What `*` stands for in `key` ("" without a star), or None when the rule is about something else."""
        matched = re.fullmatch(re.escape(self.pattern).replace(r"\*", "(.*)"), key)
        if matched is None or (self.only is not None and value not in self.only):
            return None
        return matched.group(1) if "*" in self.pattern else ""


def _rows() -> Iterator[Spelling]:
    for row in f"{_TABLE.strip()}{trl.TABLE}".format_map(_SECTIONS).replace("\n    ", " ").strip().splitlines():
        keys, mark, effect = re.split(" (->|:|!|[?]) ", row, maxsplit=1)
        keys, _, values = keys.partition(" [")
        target, _, reason = effect.partition(" : ") if mark == "->" else ("", "", effect)
        only = yaml.safe_load(f"[{values}") if values else None
        for pattern, key in product(re.sub(r"(\S*)\((.*?)\)", _spread, keys).split(), target.split() or [""]):
            key += pattern.rpartition(".")[2] if key.endswith(".") else ""
            key, _, value = key.partition("=")
            yield Spelling(pattern, reason, key or None, mark == "!", only, mark == "?", value or None)


def _spread(group: re.Match[str]) -> str:
    return " ".join(group[1] + name for name in group[2].split())


SPELLINGS = tuple(_rows())


def find_spelling(root: type[BaseModel], key: str, value: Any) -> tuple[Spelling, str | None] | None:
    """The first rule that applies to `key`, and the key of `root` that it leads to (over further rules, if need be)."""
    for rule in SPELLINGS:
        star = rule.match(key, value)
        if star is None:
            continue
        if rule.target is None:
            return rule, None
        target = rule.target.replace("*", star)
        if exists(root, target) and not is_section(root, target):
            return rule, target
        further = find_spelling(root, target, value)
        if further is not None:
            return further[0] if further[0].target is None else rule, further[1]
    return None
