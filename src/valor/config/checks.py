"""Rules about several keys at once. Each finding is one line that names the keys and what to do."""

from __future__ import annotations

import re

from pydantic import BaseModel

from valor.config.critic_runs import CriticPretrainConfig, CriticRunConfig, CriticScoreConfig
from valor.config.model import BackboneConfig
from valor.config.placement_checks import check_placement, tensor_parallel_of_role
from valor.config.ppo import NEEDS_CRITIC, PPOConfig
from valor.config.reward import RewardModelConfig
from valor.config.supervised import SupervisedConfig
from valor.config.trainer import RunConfig


def check(config: BaseModel) -> list[str]:
    """Every contradiction in a tree whose keys are valid one by one."""
    lines: list[str] = []
    if isinstance(config, CriticRunConfig):
        lines += _critic_run(config)
    elif isinstance(config, PPOConfig):
        lines += [*_critic(config), *_value_lab(config), *_batches(config), *_losses(config), *_validation(config)]
        lines += check_placement(config)
    if isinstance(config, PPOConfig):
        lines += [*_generation(config), *_rewards(config), *_reward_model(config.reward.reward_model)]
        lines += _adapters("actor_rollout_ref.model", config.actor_rollout_ref.model)
        lines += _adapters("critic.model", config.critic.model) if config.critic.enable else []
    elif isinstance(config, SupervisedConfig):
        lines += _adapters("model", config.model)
        size, processes = config.fsdp_config.tensor_parallel_size, config.trainer.processes_per_node
        lines += tensor_parallel_of_role("", size, processes, config.model.lora_rank, 1)
    trainer = getattr(config, "trainer", None)
    if isinstance(trainer, RunConfig):
        lines += _resume(trainer)
    return lines


def _critic(config: PPOConfig) -> list[str]:
    algorithm, critic, trainer = config.algorithm, config.critic, config.trainer
    lines = []
    if not critic.enable:
        if algorithm.adv_estimator in NEEDS_CRITIC:
            lines.append(
                f"algorithm.adv_estimator={algorithm.adv_estimator} needs a critic: set critic.enable=true, or an "
                "estimator that does without, such as grpo or rloo"
            )
        if algorithm.truncation_bootstrap:
            lines.append("algorithm.truncation_bootstrap=true needs a critic: set critic.enable=true")
        if trainer.critic_warmup > 0:
            lines.append(f"trainer.critic_warmup={trainer.critic_warmup} needs a critic: set critic.enable=true")
        return lines
    if critic.freeze and trainer.critic_warmup > 0:
        lines.append("trainer.critic_warmup trains the critic and critic.freeze=true does not: drop one of them")
    own = critic.model.path != config.actor_rollout_ref.model.path or critic.model.lora_adapter_path is not None
    if critic.freeze and not own:
        lines.append(
            "critic.freeze=true uses the critic as it is loaded, and critic.model.path is not set: set it to a critic "
            "that has been trained (valor critic pretrain, or huggingface/critic in the folder of a run)"
        )
    if critic.ensemble_size > 1 and (critic.freeze or critic.model.value_head_init == "zero"):
        lines.append(
            f"critic.ensemble_size={critic.ensemble_size}: the critics would all be the same, set "
            + ("critic.freeze=false" if critic.freeze else "critic.model.value_head_init=normal")
        )
    return lines


def _value_lab(config: PPOConfig) -> list[str]:
    algorithm, with_critic = config.algorithm, config.critic.enable
    lines = []
    if algorithm.reward_source == "critic":
        if not with_critic:
            lines.append("algorithm.reward_source=critic needs a critic: set critic.enable=true")
        if algorithm.reward_mask_ratio > 0:
            lines.append(
                "algorithm.reward_source=critic replaces every reward and algorithm.reward_mask_ratio takes some away: "
                "for a part of them use reward_source=rule_based with missing_reward=critic"
            )
        if algorithm.adv_estimator in NEEDS_CRITIC:  # A = V(last) - V has no place for these
            if algorithm.use_kl_in_reward:
                lines.append(
                    "algorithm.reward_source=critic leaves no reward to subtract algorithm.use_kl_in_reward from: use "
                    "actor_rollout_ref.actor.use_kl_loss=true"
                )
            if algorithm.truncation_bootstrap:
                lines.append("algorithm.truncation_bootstrap=true is for rewards by rule: drop it")
    masked = algorithm.reward_mask_ratio > 0
    if masked and algorithm.missing_reward in ("bootstrap", "critic") and not with_critic:
        lines.append(
            f"algorithm.missing_reward={algorithm.missing_reward} needs a critic: set critic.enable=true, or "
            "missing_reward to zero or exclude"
        )
    if masked and algorithm.reward_mask_flip_adv_when_masked and algorithm.adv_whitening == "mini_batch":
        lines.append(
            "algorithm.reward_mask_flip_adv_when_masked=true acts after whitening: set algorithm.adv_whitening to "
            "batch or none"
        )
    if algorithm.adv_estimator == "gdpo" and (masked or algorithm.reward_binarize):
        lines.append(
            "algorithm.adv_estimator=gdpo reads reward components, which algorithm.reward_mask_ratio and "
            "algorithm.reward_binarize do not touch: drop them or take another estimator"
        )
    return lines


def _batches(config: PPOConfig) -> list[str]:
    prompts = config.data.train_batch_size
    actor, critic = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size
    sizes = {"actor_rollout_ref.actor.ppo_mini_batch_size": actor}
    if config.critic.enable and critic != actor:
        sizes["critic.ppo_mini_batch_size"] = critic
    return [
        f"{key}={size} prompts is more than data.train_batch_size={prompts} prompts: set it to {prompts} or less"
        for key, size in sizes.items()
        if size > prompts
    ]


def _generation(config: PPOConfig) -> list[str]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    lines = []
    for key, value, source, length in (
        ("prompt_length", rollout.prompt_length, "max_prompt_length", data.max_prompt_length),
        ("response_length", rollout.response_length, "max_response_length", data.max_response_length),
    ):
        if value != length:
            lines.append(
                f"actor_rollout_ref.rollout.{key}={value} and data.{source}={length} differ: set data.{source} alone"
            )
    longest = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        lines.append(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} is less than data.max_prompt_length + "
            f"data.max_response_length = {longest}: raise it, or lower one of them"
        )
    trained = config.actor_rollout_ref.actor.fsdp_config.dtype
    if rollout.name == "native" and rollout.dtype != trained:
        lines.append(
            f"actor_rollout_ref.rollout.dtype={rollout.dtype}, but rollout.name=native generates with the actor's own "
            f"weights in {trained}: set actor_rollout_ref.actor.fsdp_config.dtype"
        )
    if rollout.name == "vllm":
        for key in ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size"):
            if getattr(rollout, key) > 1:
                lines.append(
                    f"actor_rollout_ref.rollout.{key}={getattr(rollout, key)} is not available: set it to 1 (replicas "
                    "follow from the processes and tensor_model_parallel_size)"
                )
    if rollout.name == "server":
        lines += _server(config)
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        lines.append(
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true with temperature=0 is greedy: set "
            "actor_rollout_ref.rollout.val_kwargs.temperature"
        )
    return lines


def _server(config: PPOConfig) -> list[str]:
    lines, rollout, key = [], config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if not rollout.server.base_url:
        lines.append(
            f"{key}.name=server asks a server that is running: set {key}.server.base_url, such as "
            "http://localhost:8000/v1"
        )
    if config.rollout_apart:
        lines.append(
            f"{key}.name=server generates on the server's devices: drop {key}.nnodes, and rollout in resource_pools"
        )
    if rollout.temperature != 1 and (rollout.top_k > 0 or rollout.top_p < 1):
        lines.append(
            f"{key}.name=server: no server tells log-probs at temperature {rollout.temperature:g} before {key}.top_k "
            "and top_p cut: drop them, or set temperature=1, or take name=vllm"
        )
    return lines


def _losses(config: PPOConfig) -> list[str]:
    lines = []
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        lines.append("actor_rollout_ref.actor.policy_loss.loss_mode=dro needs policy_loss.dro_beta")
    algorithm = config.algorithm
    correction = algorithm.rollout_correction
    if correction.rollout_rs is not None and correction.rollout_rs_threshold is None:
        lines.append(
            f"algorithm.rollout_correction.rollout_rs={correction.rollout_rs} needs "
            "algorithm.rollout_correction.rollout_rs_threshold"
        )
    if (
        correction.bypass_mode
        and correction.loss_type == "reinforce"
        and loss.loss_mode not in ("vanilla", "reinforce")
    ):
        lines.append(
            f"algorithm.rollout_correction.loss_type=reinforce and actor_rollout_ref.actor.policy_loss.loss_mode="
            f"{loss.loss_mode} are two policy losses: use loss_type=ppo_clip, or leave loss_mode at vanilla"
        )
    if correction.bypass_mode and algorithm.exact_kl_in_reward:
        lines.append(
            "algorithm.kl_penalty=full needs a pass of the actor over each batch, which algorithm.rollout_correction."
            "bypass_mode leaves out: set bypass_mode=false, or an estimator such as kl"
        )
    if algorithm.gdpo_reward_weights is not None:
        keys, weights = algorithm.gdpo_reward_keys or [], algorithm.gdpo_reward_weights
        if len(keys) != len(weights):
            lines.append(
                f"algorithm.gdpo_reward_keys names {len(keys)} components and algorithm.gdpo_reward_weights has "
                f"{len(weights)} numbers: give one weight per component"
            )
    return lines


def _rewards(config: PPOConfig) -> list[str]:
    manager, options = config.reward.reward_manager.name, config.reward.reward_kwargs
    buffer, longest = options.overlong_buffer_cfg, config.data.max_response_length
    key = "reward.reward_kwargs.overlong_buffer_cfg"
    lines = []
    own, named = config.reward.custom_reward_function.path, f"reward.reward_manager.name={manager}"
    if manager == "batch" and own is None:
        lines.append(f"{named} calls a function of your own: set reward.custom_reward_function.path")
    if manager == "remote" and config.reward.remote.url is None:
        lines.append(f"{named} asks a server: set reward.remote.url")
    if manager == "remote" and own is not None:
        lines.append(f"{named} and reward.custom_reward_function.path={own} are two graders: set one of them")
    if not buffer.enable:
        return lines
    if manager != "dapo":
        lines.append(f"{key}.enable=true is read with reward.reward_manager.name=dapo, it is {manager}: set that too")
        return lines
    if options.max_resp_len != longest:
        lines.append(
            f"reward.reward_kwargs.max_resp_len={options.max_resp_len} and data.max_response_length={longest} differ: "
            "set data.max_response_length alone"
        )
    if buffer.len > longest:
        lines.append(f"{key}.len={buffer.len} is more than data.max_response_length={longest}: set it to less")
    return lines


def _reward_model(model: RewardModelConfig) -> list[str]:
    if not model.enable:
        return []
    key = "reward.reward_model"
    lines = []
    if (model.model_path is None) == (model.judge.url is None):
        found = "has neither" if model.model_path is None else "has both"
        lines.append(f"{key}.enable=true {found} {key}.model_path and {key}.judge.url: set one of them")
    if model.weight == 0:
        lines.append(f"{key}.weight=0 leaves the reward model without effect: set {key}.enable=false")
    if model.judge.url is not None:
        judge = model.judge
        if judge.model is None:
            lines.append(f"{key}.judge.url needs {key}.judge.model: the model's name on that server")
        try:
            groups = re.compile(judge.score_regex).groups
        except re.error as error:
            lines.append(f"{key}.judge.score_regex is no regular expression: {error}")
        else:
            if groups < 1:
                lines.append(f"{key}.judge.score_regex needs a group, (...), around the number")
        if judge.prompt_template is not None and "{response}" not in judge.prompt_template:
            lines.append(f"{key}.judge.prompt_template has no {{response}} in it: the judge would not see it")
        if judge.score_range[0] >= judge.score_range[1]:
            lines.append(f"{key}.judge.score_range must be [low, high] with low below high")
    return lines


def _validation(config: PPOConfig) -> list[str]:
    if config.data.val_files is not None:
        return []
    needs = {"trainer.val_only": config.trainer.val_only, "trainer.keep_best": config.trainer.keep_best}
    return [f"{key}=true needs validation prompts: set data.val_files" for key, on in needs.items() if on]


def _critic_run(config: CriticRunConfig) -> list[str]:
    lines = []
    if not config.critic.enable:
        lines.append("critic.enable=false leaves nothing to do here: leave it at true")
    if isinstance(config, CriticPretrainConfig) and (config.critic.freeze or config.critic.freeze_steps):
        lines.append("critic.freeze and critic.freeze_steps hold the critic still, and here it is to learn: drop them")
    if isinstance(config, CriticPretrainConfig):
        lines += _batches(config)
    if isinstance(config, CriticScoreConfig):
        if config.score.rollouts is None and config.data.val_files is None:
            lines.append("a critic is scored on prompts that it has not seen: set data.val_files, or score.rollouts")
        if config.score.rollouts is not None and config.score.mc:
            lines.append("score.mc branches off answers of the policy itself: set data.val_files, not score.rollouts")
    return lines


def _adapters(key: str, model: BackboneConfig) -> list[str]:
    if model.lora_rank or model.lora_adapter_path is None:
        return []
    return [f"{key}.lora_adapter_path={model.lora_adapter_path} needs {key}.lora_rank: set it to that adapter's rank"]


def _resume(trainer: RunConfig) -> list[str]:
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        return ["trainer.resume_mode=resume_path needs trainer.resume_from_path=<a checkpoint folder>"]
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        return ["trainer.resume_from_path is read with trainer.resume_mode=resume_path: set that too"]
    return []
