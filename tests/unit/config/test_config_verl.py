"""verl's other spellings: read as the real key, without effect for a stated reason, or refused with one."""

import pytest

from valor.config import PPOConfig, RMConfig, SFTConfig, load
from valor.config.distillation import TeacherConfig
from valor.config.tree import exists, get_at
from valor.config.verl import SPELLINGS, find_spelling
from valor.errors import UserError

ALL = "model,optimizer,extra,hf_model"
A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        (f"{A}.ppo_micro_batch_size=2", f"{A}.ppo_micro_batch_size_per_gpu", 2),
        ("critic.ppo_micro_batch_size=2", "critic.ppo_micro_batch_size_per_gpu", 2),
        ("critic.fsdp.param_offload=true", "critic.fsdp_config.param_offload", True),
        ("critic.model.fsdp_config.optimizer_offload=true", "critic.fsdp_config.optimizer_offload", True),
        (
            "critic.model.fsdp_config.gradient_checkpointing=false",
            "critic.model.enable_gradient_checkpointing",
            False,
        ),
        (
            f"{A}.fsdp_config.gradient_checkpointing=false",
            f"{M}.enable_gradient_checkpointing",
            False,
        ),
        (f"{A}.grad_clip=0.5", f"{A}.optim.clip_grad", 0.5),
        ("critic.grad_clip=0.5", "critic.optim.clip_grad", 0.5),
        (f"{A}.optim.warmup_steps=7", f"{A}.optim.lr_warmup_steps", 7),
        ("critic.optim.warmup_style=cosine", "critic.optim.lr_scheduler_type", "cosine"),
        (f"{A}.checkpoint.contents=[{ALL}]", f"{A}.checkpoint.save_contents", ALL.split(",")),
        ("trainer.max_actor_ckpt_to_keep=3", "trainer.max_ckpt_to_keep", 3),
        (f"{A}.policy_loss.dro_beta=0.1", f"{A}.policy_loss.loss_kwargs", {"dro_beta": 0.1}),
        (f"{A}.tau_pos=2", f"{A}.policy_loss.loss_kwargs", {"tau_pos": 2}),
        (f"{R}.enforce_eager=true", f"{R}.engine_kwargs", {"vllm": {"enforce_eager": True}}),
        ("data.trust_remote_code=true", f"{M}.trust_remote_code", True),
        ("ray_init.num_cpus=4", "ray_kwargs.ray_init.num_cpus", 4),
        ("custom_reward_function.path=f.py", "reward.custom_reward_function.path", "f.py"),
        ("custom_reward_function.reward_kwargs.k=1", "reward.custom_reward_function.reward_kwargs", {"k": 1}),
        ("reward_model.num_workers=3", "reward.num_workers", 3),
        ("reward_model.reward_manager=naive", "reward.reward_manager.name", "naive"),
        ("reward.reward_manager=naive", "reward.reward_manager.name", "naive"),
        (
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=9",
            "reward.reward_kwargs.overlong_buffer_cfg.len",
            9,
        ),
        (f"{R}.prompt_length=99", "data.max_prompt_length", 99),
        (f"{R}.n_agent=5", f"{R}.n", 5),
        ("data.tool_config_path=t.yaml", f"{R}.multi_turn.tool_config_path", "t.yaml"),
        (f"{R}.response_length=99", "data.max_response_length", 99),
        ("reward.reward_kwargs.max_resp_len=99", "data.max_response_length", 99),
        ("reward_model.reward_kwargs.max_resp_len=99", "data.max_response_length", 99),
        ("algorithm.gdpo_reward_keys=[a,b]", "algorithm.adv_kwargs", {"reward_keys": ["a", "b"]}),
        ("algorithm.gdpo_reward_weights=[1,2]", "algorithm.adv_kwargs", {"reward_weights": [1, 2]}),
        ("reward_model.path=rm", "reward.reward_model.model_path", "rm"),
        ("reward_model.strategy=megatron", "reward.reward_model.strategy", "megatron"),
        ("reward_model.megatron.param_offload=true", "reward.reward_model.fsdp_config.param_offload", True),
        ("reward_model.model.path=rm", "reward.reward_model.model_path", "rm"),
    ],
)
def test_aliases_reach_the_real_key(given, key, value):
    loaded = load([given])
    assert get_at(loaded.config.model_dump(), key) == value
    assert any(f"is read as {key}" in note for note in loaded.notes)
    assert any(name == key or name.startswith(f"{key}.") for name in loaded.explicit_keys)


def test_sft_aliases():
    loaded = load(["engine.param_offload=true", "optim.warmup_steps=3"], SFTConfig)
    assert loaded.config.fsdp_config.param_offload and loaded.config.optim.lr_warmup_steps == 3
    older = ["model.partial_pretrain=m", "optim.lr_scheduler=cosine", "use_remove_padding=True", "data.chat_template=x"]
    unread = [
        "data.multiturn.enable=true",
        "data.use_dynamic_bsz=True",
        "data.pad_mode=no_padding",
        "data.num_workers=8",
    ]
    loaded = load(
        [
            *older,
            *unread,
            "data.multiturn.messages_key=chat",
            "data.tools_key=tools",
            "data.enable_thinking_key=enable_thinking",
        ],
        SFTConfig,
    )
    model, optim = loaded.config.model, loaded.config.optim
    assert (model.path, model.custom_chat_template, optim.lr_scheduler_type) == ("m", "x", "cosine")
    assert loaded.config.data.messages_key == "chat" and len(loaded.notes) == 11
    for given, words in {
        "data.prompt_dict_keys=[question]": "columns are read whole",
        "data.enable_thinking_key=thinks": "in its columns 'enable_thinking' and 'chat_template_kwargs'",
        "engine.ulysses_sequence_parallel_size=2": "rows are whole here",
        "data.tools_key=functions": "tools are read from the column 'tools'",
    }.items():
        with pytest.raises(UserError, match=words):
            load([given], SFTConfig)


def test_aliases_in_yaml(tmp_path):
    (tmp_path / "old.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "reward_model: {enable: null, path: null, reward_manager: naive}\n"
        "critic: {fsdp: {param_offload: true}}\n"
    )
    loaded = load(["--config-path", str(tmp_path), "--config-name", "old"])
    assert loaded.config.critic.fsdp_config.param_offload
    assert len(loaded.notes) == 2  # an alias that is null says nothing


def test_an_alias_that_disagrees_with_its_key_is_a_mistake():
    with pytest.raises(UserError) as caught:
        load(["critic.grad_clip=0.5", "critic.optim.clip_grad=1.0"])
    expected = "critic.grad_clip=0.5 and critic.optim.clip_grad=1.0 are the same setting: give one of them"
    assert str(caught.value) == expected
    assert load(["critic.grad_clip=1.0", "critic.optim.clip_grad=1.0"]).config.critic.optim.clip_grad == 1.0


def test_values_behind_an_alias_are_checked():
    with pytest.raises(UserError, match=r"critic\.optim\.clip_grad: expected number > 0 or null, got 'x'"):
        load(["critic.grad_clip=x"])


@pytest.mark.parametrize(
    "given",
    [
        "trainer.use_legacy_worker_impl=auto",
        "data.return_raw_chat=True",
        "trainer.balance_batch=True",
        "trainer.v1.sampler.sync_refill_failed_groups=true",
        "model_engine=fsdp",
        f"{A}.fsdp_config.wrap_policy.min_num_params=0",
        f"{A}.entropy_checkpointing=True",
        "reward_model.use_reward_loop=True",
        "reward_model.model.input_tokenizer=null",
        "transfer_queue.enable=True",
        f"{A}.optim.optimizer_impl=torch.optim",
        f"{R}.seed=7",
        f"{R}.do_sample=True",
        f"{R}.data_parallel_size=1",
        f"{R}.multi_turn.tokenization_sanity_check_mode=strict",
        f"{A}.state_masking=true",
        f"{A}.profiler.enable=true",
        "actor_rollout_ref.ref.fsdp_config.offload_policy=true",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size=4",
        "actor_rollout_ref.ref.megatron.override_transformer_config.x=1",
        "critic.optim.num_cycles=0.5",
        "algorithm.no_think_rl=false",
        "critic.checkpoint.load_contents=[model,optimizer,extra]",
    ],
)
def test_spellings_without_effect_say_why(given):
    loaded = load([given])
    key, _, value = given.partition("=")
    expected = [] if value == "null" else [key]
    assert [note.split(" has no effect: ")[0] for note in loaded.notes] == expected
    assert loaded.config == PPOConfig()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("model_engine=megatron", "the engine is set by each role: use actor_rollout_ref.actor.strategy=megatron"),
        (
            "strategy=megatron",
            "the engine is set by each role: use actor_rollout_ref.actor.strategy=megatron; valor sft and valor rm",
        ),
        (f"{A}.megatron.use_megatron_fsdp=true", "megatron-core's own FSDP is not used"),
        (f"{A}.megatron.dist_checkpointing_path=/x", "weights are read from, and written to, Hugging Face"),
        (f"{A}.megatron.dynamic_context_parallel=true", "context parallel ranks are the same for all rows"),
        ("trainer.v1.separate_async.hybrid_rollout.enable_switch=true", "training and generation keep their processes"),
        ("async_training.staleness_threshold=0.1", "set trainer.v1.trainer_mode=separate_async"),
        (f"{A}.profiler.tool_config.npu.level=level0", "traces are torch's"),
        (f"{A}.optim.optimizer_impl=bitsandbytes.optim", "the optimizer is torch.optim.AdamW"),
        ("+critic.optim.override_optimizer_config.momentum=1", "the optimizer is torch.optim.AdamW"),
        ("data.video_key=videos", "prompts have text and images, no video and no audio: drop it"),
        (f"{R}.quantization=fp8", "generation is not quantized"),
        (f"{A}.state_masking=false", "what the policy is told is never trained on: leave it at true"),
        (f"+{R}.repetition_penalty=1.05", "tokens are drawn by temperature, top_k and top_p"),
        (f"{R}.do_sample=false", "training rollouts are always sampled"),
        (f"{R}.data_parallel_size=2", "replicas follow from the processes"),
        ("critic.checkpoint.load_contents=[model,optimizer]", "a checkpoint is always read as a whole"),
        ("critic.checkpoint.async_save=true", "saving is done before the next step"),
        ("reward.reward_manager.source=importlib", "managers are built in"),
    ],
)
def test_features_that_are_not_there_are_refused(given, reason):
    with pytest.raises(UserError) as caught:
        load([given])
    key, found = given.partition("=")[0].removeprefix("+"), str(caught.value)
    assert found.startswith(f"{key}=") and f" asks for what Valor does not have: {reason}" in found


def test_features_that_are_not_asked_for_are_not_refused():
    off = [f"{A}.profiler.enable=False", "data.image_key=null", "distillation.enabled=False", f"{R}.quantization=null"]
    off += [
        f"+{R}.min_p=0.0",
        f"{R}.multi_turn.enable=False",
        "critic.checkpoint.async_save=False",
        "data.custom_cls.path=null",
    ]
    loaded = load(off)
    assert loaded.config == PPOConfig() and loaded.notes == ()
    (note,) = load([f"+{R}.repetition_penalty=1.0"]).notes
    assert note == f"{R}.repetition_penalty has no effect: it is off"


@pytest.mark.parametrize("pool", [True, False])
def test_the_one_teacher_of_verls_first_scripts(pool):
    teacher = "distillation.teacher_model"
    given = [f"{teacher}.model_path=T", f"{teacher}.enable_resource_pool={pool}", f"{teacher}.nnodes=1"]
    given += [f"{teacher}.n_gpus_per_node=4", f"{teacher}.inference.temperature=0.9", f"{teacher}.inference.name=vllm"]
    distillation = load(["distillation.enabled=true", "distillation.num_workers=8", *given]).config.distillation
    assert distillation.teacher_models == {"teacher_model": TeacherConfig(model_path="T", temperature=0.9)}
    assert (distillation.nnodes, distillation.n_gpus_per_node) == (int(pool), 4)


def test_every_rule_is_about_something_that_is_not_a_key():
    for one in SPELLINGS:
        if "*" not in one.pattern:
            real = [root for root in (PPOConfig, SFTConfig) if exists(root, one.pattern)]
            assert not real or one.pattern in ("reward.reward_manager", "model"), one.pattern  # sections, given a name


def test_every_plain_target_exists():
    for one in SPELLINGS:
        if one.target is not None and "*" not in one.target:
            assert any(exists(root, one.target) for root in (PPOConfig, SFTConfig, RMConfig)), one.target


VERL = """
actor_rollout_ref: hybrid_engine nccl_timeout
actor_rollout_ref.model: path hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template external_lib
actor_rollout_ref.model: override_config enable_gradient_checkpointing enable_activation_offload use_remove_padding
actor_rollout_ref.model: lora_rank lora_alpha target_modules exclude_modules lora_adapter_path use_liger
actor_rollout_ref.model: use_fused_kernels fused_kernel_options.impl_backend tiled_mlp.enabled mtp.enable lora.rank
actor_rollout_ref.actor: strategy rollout_n ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu
actor_rollout_ref.actor: use_dynamic_bsz ppo_max_token_len_per_gpu ppo_epochs shuffle data_loader_seed clip_ratio
actor_rollout_ref.actor: clip_ratio_low clip_ratio_high clip_ratio_c tau_pos tau_neg policy_loss.loss_mode
actor_rollout_ref.actor: policy_loss.clip_cov_ratio policy_loss.clip_cov_lb policy_loss.clip_cov_ub
actor_rollout_ref.actor: policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef policy_loss.dro_beta loss_agg_mode
actor_rollout_ref.actor: loss_scale_factor entropy_coeff calculate_entropy calculate_sum_pi_squared use_kl_loss
actor_rollout_ref.actor: kl_loss_coef kl_loss_type grad_clip freeze_vision_tower use_prefix_grouper use_torch_compile
actor_rollout_ref.actor: use_remove_padding use_fused_kernels ulysses_sequence_parallel_size
actor_rollout_ref.actor: entropy_from_logits_with_chunking entropy_checkpointing pad_to_length profiler.enable
actor_rollout_ref.actor: router_replay.mode qat.enable checkpoint.save_contents checkpoint.load_contents
actor_rollout_ref.actor: checkpoint.async_save checkpoint.strict
actor_rollout_ref.actor.optim: optimizer optimizer_impl lr lr_warmup_steps lr_warmup_steps_ratio total_training_steps
actor_rollout_ref.actor.optim: weight_decay betas clip_grad min_lr_ratio num_cycles lr_scheduler_type
actor_rollout_ref.actor.optim: zero_indexed_step warmup_style override_optimizer_config
actor_rollout_ref.actor.fsdp_config: wrap_policy.min_num_params param_offload optimizer_offload offload_policy
actor_rollout_ref.actor.fsdp_config: reshard_after_forward fsdp_size forward_prefetch model_dtype dtype use_orig_params
actor_rollout_ref.actor.fsdp_config: seed full_determinism ulysses_sequence_parallel_size pad_to_length_bucket
actor_rollout_ref.actor.fsdp_config: use_torch_compile forward_only strategy qat.enable turbo_config.enable
actor_rollout_ref.ref: strategy log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz
actor_rollout_ref.ref: log_prob_max_token_len_per_gpu ulysses_sequence_parallel_size use_torch_compile
actor_rollout_ref.ref: fsdp_config.param_offload fsdp_config.forward_only profiler.enable
actor_rollout_ref.rollout: name mode nnodes n_gpus_per_node n temperature top_k top_p do_sample seed full_determinism
actor_rollout_ref.rollout: prompt_length response_length max_model_len dtype gpu_memory_utilization
actor_rollout_ref.rollout: tensor_model_parallel_size data_parallel_size expert_parallel_size
actor_rollout_ref.rollout: pipeline_model_parallel_size max_num_batched_tokens max_num_seqs enforce_eager
actor_rollout_ref.rollout: cudagraph_capture_sizes free_cache_engine enable_chunked_prefill enable_prefix_caching
actor_rollout_ref.rollout: logprobs_mode scheduling_policy load_format layered_summon ignore_eos calculate_log_probs
actor_rollout_ref.rollout: disable_log_stats skip_tokenizer_init log_prob_micro_batch_size
actor_rollout_ref.rollout: log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu
actor_rollout_ref.rollout: over_sample_rate multi_stage_wake_up quantization quantization_config_file
actor_rollout_ref.rollout: enable_rollout_routing_replay moe_load_balance_metrics_interval engine_kwargs.vllm.x
actor_rollout_ref.rollout: val_kwargs.top_k val_kwargs.top_p val_kwargs.temperature val_kwargs.n val_kwargs.do_sample
actor_rollout_ref.rollout.multi_turn: enable max_assistant_turns max_user_turns tool_config_path function_tool_path
actor_rollout_ref.rollout.multi_turn: max_parallel_calls max_tool_response_length tool_response_truncate_side
actor_rollout_ref.rollout.multi_turn: use_inference_chat_template tokenization_sanity_check_mode format
actor_rollout_ref.rollout.multi_turn: num_repeat_rollouts
actor_rollout_ref.rollout: agent.num_workers agent.default_agent_loop agent.agent_loop_config_path
actor_rollout_ref.rollout: agent.custom_async_server.path checkpoint_engine.backend trace.backend prometheus.enable
actor_rollout_ref.rollout: checkpoint_engine.update_weights_bucket_megabytes checkpoint_engine.engine_kwargs.x
actor_rollout_ref.rollout: checkpoint_engine.custom_backend_module disaggregation.enabled profiler.enable
critic: enable strategy rollout_n ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_epochs
critic: forward_micro_batch_size forward_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu
critic: forward_max_token_len_per_gpu shuffle loss_agg_mode loss_scale_factor data_loader_seed cliprange_value grad_clip
critic: ulysses_sequence_parallel_size optim.lr fsdp.param_offload fsdp.dtype model.path model.tokenizer_path
critic: checkpoint.save_contents profiler.enable
data: tokenizer train_files val_files train_max_samples val_max_samples prompt_key reward_fn_key max_prompt_length
data: max_response_length train_batch_size gen_batch_size val_batch_size return_raw_input_ids return_raw_chat
data: return_full_prompt shuffle seed dataloader_num_workers image_patch_size validation_shuffle truncation
data: filter_overlong_prompts filter_overlong_prompts_workers image_key video_key audio_key trust_remote_code use_shm
data: custom_cls.path custom_cls.name tool_config_path function_tool_path return_multi_modal_inputs
data: apply_chat_template_kwargs.x mm_processor_kwargs.x
reward: num_workers custom_reward_function.path custom_reward_function.name reward_manager.source reward_manager.name
reward: reward_manager.module.path reward_manager.module.name reward_model.enable reward_model.enable_resource_pool
reward: reward_model.n_gpus_per_node reward_model.nnodes reward_model.model_path reward_model.rollout.name
reward: sandbox_fusion.url sandbox_fusion.max_concurrent sandbox_fusion.memory_limit_mb
custom_reward_function: path name
reward_model: enable model.path reward_manager num_workers rollout.name
sandbox_fusion: url
algorithm: adv_estimator gamma lam norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty kl_ctrl.type kl_ctrl.kl_coef
algorithm: kl_ctrl.horizon kl_ctrl.target_kl use_pf_ppo pf_ppo.reweight_method pf_ppo.weight_pow filter_groups.enable
algorithm: filter_groups.metric filter_groups.max_num_gen_batches rollout_correction.rollout_is
algorithm: rollout_correction.rollout_is_threshold rollout_correction.rollout_is_batch_normalize
algorithm: rollout_correction.rollout_rs rollout_correction.rollout_rs_threshold rollout_correction.bypass_mode
algorithm: rollout_correction.loss_type filter_groups.max_inflight_gen_batches
distillation: enabled n_gpus_per_node nnodes teacher_key teacher_models.teacher_model.key
distillation: teacher_models.teacher_model.model_path teacher_models.teacher_model.num_replicas
distillation: teacher_models.teacher_model.inference.temperature distillation_loss.loss_mode distillation_loss.topk
distillation: distillation_loss.use_task_rewards distillation_loss.distillation_loss_coef
distillation: distillation_loss.loss_max_clamp distillation_loss.log_prob_min_clamp
distillation: distillation_loss.use_policy_gradient distillation_loss.policy_loss_mode distillation_loss.clip_ratio
distillation: distillation_loss.clip_ratio_low distillation_loss.clip_ratio_high
transfer_queue: enable
trainer: use_v1 v1.trainer_mode balance_batch total_epochs total_training_steps project_name experiment_name logger
trainer: log_val_generations rollout_data_dir validation_data_dir nnodes n_gpus_per_node save_freq test_freq
trainer: val_before_train val_only critic_warmup resume_mode resume_from_path default_local_dir default_hdfs_dir
trainer: del_local_ckpt_after_load max_actor_ckpt_to_keep max_critic_ckpt_to_keep device esi_redundant_time
trainer: ray_wait_register_center_timeout
global_profiler: tool
skip: rollout.enable
ray_kwargs: ray_init.num_cpus timeline_json_file
"""


def test_verls_whole_tree_is_known():
    keys = [
        f"{prefix}.{name}"
        for prefix, _, names in (line.partition(": ") for line in VERL.strip().splitlines())
        for name in names.split()
    ]
    assert len(keys) > 300
    unknown = [key for key in keys if not exists(PPOConfig, key) and find_spelling(PPOConfig, key, "sync") is None]
    assert unknown == ["algorithm.filter_groups.max_inflight_gen_batches"] or unknown == []
