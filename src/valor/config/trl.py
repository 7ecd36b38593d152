"""TRL's words for settings, in the grammar of `valor.config.verl`: read as a key here, or answered with what to set."""

TABLE = """
learning_rate -> {A}.optim.lr optim.lr
num_generations -> {R}.n
(max_completion_length max_new_tokens response_length) -> data.max_response_length
max_prompt_length -> data.max_prompt_length
(max_length max_seq_length) -> data.max_length
num_train_epochs -> trainer.total_epochs
max_steps [-1] -> trainer.total_training_steps=null : the length is trainer.total_epochs
max_steps -> trainer.total_training_steps
output_dir -> trainer.default_local_dir
run_name -> trainer.experiment_name
save_steps -> trainer.save_freq
save_total_limit -> trainer.max_ckpt_to_keep
eval_steps -> trainer.test_freq
seed -> trainer.seed
data_seed -> data.seed
(model model_name_or_path) -> {M}.path model.path
train_dataset -> data.train_files
eval_dataset -> data.val_files
reward_funcs -> reward.custom_reward_function.path
gradient_checkpointing -> {M}.enable_gradient_checkpointing model.enable_gradient_checkpointing
(num_iterations num_ppo_epochs) -> {A}.ppo_epochs
(epsilon cliprange) -> {A}.clip_ratio
epsilon_high -> {A}.clip_ratio_high
cliprange_value -> critic.cliprange_value
(temperature top_p top_k) -> {R}.
delta -> {A}.clip_ratio_c
entropy_coef -> {A}.entropy_coeff
num_generations_eval -> {R}.val_kwargs.n
trust_remote_code -> {M}.trust_remote_code model.trust_remote_code
chat_template_path -> {M}.custom_chat_template model.custom_chat_template
chat_template_kwargs.* -> data.apply_chat_template_kwargs.*
shuffle_dataset -> data.shuffle
vllm_gpu_memory_utilization -> {R}.gpu_memory_utilization
vllm_tensor_parallel_size -> {R}.tensor_model_parallel_size
vllm_max_model_length -> {R}.max_model_len
vllm_server_base_url -> {R}.server.base_url
vllm_mode [colocate] -> {R}.name=vllm
lora_r -> {M}.lora_rank model.lora_rank
lora_target_modules -> {M}.target_modules model.target_modules
(lora_alpha lora_rank) -> {M}. model.
warmup_steps -> {A}.optim.lr_warmup_steps optim.lr_warmup_steps
warmup_ratio -> {A}.optim.lr_warmup_steps_ratio optim.lr_warmup_steps_ratio
max_grad_norm -> {A}.optim.clip_grad optim.clip_grad
lr_scheduler_type [constant_with_warmup] -> {A}.optim.lr_scheduler_type=constant optim.lr_scheduler_type=constant
(weight_decay lr_scheduler_type) -> {A}.optim. optim.
scale_rewards [true, false] -> algorithm.norm_adv_by_std_in_grpo
scale_rewards [group] -> algorithm.norm_adv_by_std_in_grpo=true
scale_rewards [none] -> algorithm.norm_adv_by_std_in_grpo=false
beta [0] -> {A}.use_kl_loss=false
mask_truncated_completions [true] -> algorithm.truncated_responses=exclude
mask_truncated_completions [false] -> algorithm.truncated_responses=end
use_vllm [false] -> {R}.name=native
use_liger_kernel -> {M}.use_liger model.use_liger
center_rewards_coefficient -> loss.center_coef
(fp16 push_to_hub sync_ref_model use_adaptive_entropy use_bias_correction_kl whiten_rewards
    load_best_model_at_end) [false] :
    it is off
(top_entropy_quantile num_labels) [1] : it is so
disable_dropout [true] : models are trained without
stop_token [eos] : responses end at the model's end tokens
local_rollout_forward_batch_size : passes are shared out by tokens
(packing padding_free packing_strategy pad_to_multiple_of eval_packing) : texts are packed without padding
(completion_only_loss assistant_only_loss) [true] : the loss is of answers alone
(log_completions logging_steps logging_strategy) : every step is logged, samples too
(remove_unused_columns dataloader_num_workers disable_tqdm) : every column reaches the grader
per_device_eval_batch_size : validation is shared out by tokens
resume_from_checkpoint [true] -> trainer.resume_mode=auto
resume_from_checkpoint [false] -> trainer.resume_mode=disable
beta ? set actor_rollout_ref.actor.use_kl_loss=true and actor_rollout_ref.actor.kl_loss_coef
kl_coef ? set algorithm.use_kl_in_reward=true and algorithm.kl_ctrl.kl_coef
vf_coef ? the critic has an optimizer: set critic.optim.lr
scale_rewards ? set algorithm.norm_adv_by_std_in_grpo=true (by the group) or false
loss_type ? set actor_rollout_ref.actor.loss_agg_mode: seq-mean-token-mean is grpo's, token-mean dapo's,
    seq-mean-token-sum-norm dr_grpo's
importance_sampling_level ? for sequence set actor_rollout_ref.actor.policy_loss.loss_mode=gspo; token is the default
(per_device_train_batch_size gradient_accumulation_steps generation_batch_size steps_per_generation num_mini_batches) ?
    set data.train_batch_size, the rows of a step on all devices (PPO and GRPO: prompts, not samples), and
    actor_rollout_ref.actor.ppo_mini_batch_size, the prompts of an update; micro-batches follow from a token budget
(bf16 fp16 dtype torch_dtype) ? set fsdp_config.dtype=bfloat16 or float32 (PPO: below
    actor_rollout_ref.actor and critic)
report_to ? set trainer.logger=[console,file] with wandb, tensorboard, trackio or mlflow behind them
(save_strategy eval_strategy evaluation_strategy) ? set trainer.save_freq and trainer.test_freq in steps
(completion_only_loss assistant_only_loss) ? answers alone count, or texts without a prompt: drop it
vllm_mode ? start vllm serve; set actor_rollout_ref.rollout.name=server and actor_rollout_ref.rollout.server.base_url
vllm_importance_sampling_(correction mode cap clip_max) ? set algorithm.rollout_correction.rollout_is (token, sequence)
    and rollout_is_threshold
tools ? mark them with @function_tool; set rollout.multi_turn.enable=true and rollout.multi_turn.function_tool_path
environment_factory ? set rollout.agent.environment to its file and class
rollout_func ? set actor_rollout_ref.rollout.agent.gateway.function, or rollout.agent.agent_loop_config_path for a loop
max_tool_calling_iterations ? set actor_rollout_ref.rollout.multi_turn.max_assistant_turns to one more
reward_weights ? your grader returns one score: weigh its parts there
(min_p repetition_penalty generation_kwargs) ? tokens are drawn by temperature, top_k and top_p
use_vllm ? set actor_rollout_ref.rollout.name=vllm
total_episodes ? set trainer.total_training_steps or trainer.total_epochs
missing_eos_penalty ? set algorithm.truncated_responses, or the overlong_buffer_cfg of reward.reward_manager.name=dapo
(stop_token stop_token_id) ? responses end at the model's end tokens: leave it out
whiten_rewards ? set algorithm.adv_whitening, which is of advantages
(disable_dropout neftune_noise_alpha) ? nothing random is put into a pass: leave it out
(sync_ref_model ref_model_mixup_alpha ref_model_sync_steps) ? the reference stays as it was loaded: leave it out
(dataset_text_field formatting_func dataset_kwargs.*) ? rows have messages, or prompt and response: write them so
data_collator ? batches are made from the rows: leave it out
optimizers ? set optim.optimizer and optim.lr (PPO: below actor_rollout_ref.actor and critic)
compute_metrics ? what graders return beside the score is logged, and trainer.logger takes a class of your own
model_init_kwargs.* ? set model.override_config and fsdp_config.dtype (PPO: below actor_rollout_ref)
generation_kwargs.* ? tokens are drawn by temperature, top_k and top_p
(deepspeed fsdp ddp_timeout) ? models are sharded over trainer.n_gpus_per_node: see {A}.fsdp_config, or fsdp_config
logging_dir ? set trainer.default_local_dir
(load_best_model_at_end metric_for_best_model) ? set trainer.keep_best=true
attn_implementation ? set model.override_config={{attn_implementation:…}} (PPO: below actor_rollout_ref)
(use_peft peft_config) ? set {M}.lora_rank (PPO), model.lora_rank (SFT) or lora_rank=16
dataset_name ? make files first (valor data prepare), then set data.train_files
resume_from_checkpoint ? set trainer.resume_mode=resume_path and trainer.resume_from_path
(push_to_hub hub_model_id) ? after the run: valor publish
(adam_beta1 adam_beta2 adam_epsilon) ? set optim.betas and optim.eps (PPO: below actor_rollout_ref.actor)
"""
