"""Which model a teacher is, and whether the policy can learn from it."""

from typing import Any

from valor.config import PPOConfig
from valor.config.distillation import TeacherConfig
from valor.config.engine import ModelConfig
from valor.errors import UserError
from valor.models.load import load_model_config, other_tokenizer


def teacher_model(config: PPOConfig, teacher: TeacherConfig) -> ModelConfig:
    """The model of a teacher, which is read as the policy's, without adapters."""
    policy = config.actor_rollout_ref.model
    changes = teacher.model_dump(include={"trust_remote_code", "override_config"})
    changes |= {"path": teacher.model_path, "lora_rank": 0, "lora_adapter_path": None, "compile": False}
    return policy.model_copy(update=changes | {"enable_gradient_checkpointing": False})


def check_teachers(config: PPOConfig, tokenizer: Any) -> None:
    """UserError: a teacher's vocabulary is not that of the policy's `tokenizer`, or it has no numbers for tokens of the
    policy that whole distributions have."""
    policy, section = config.actor_rollout_ref.model, config.distillation
    size = 0
    if section.of_distributions:
        size = int(load_model_config(policy).get_text_config().vocab_size)
    for name, teacher in section.teacher_models.items() if section.enabled else ():
        model = teacher_model(config, teacher)
        of_teacher = load_model_config(model)
        if difference := other_tokenizer(model, of_teacher, tokenizer):
            raise UserError(
                f"the teacher '{model.path}' has another tokenizer than the policy: {difference}: set "
                f"distillation.teacher_models.{name}.model_path to a model with the policy's tokenizer, or train on "
                "its answers by valor sft"
            )
        if size > (outputs := int(of_teacher.get_text_config().vocab_size)):
            raise UserError(
                f"the teacher '{model.path}' has {outputs} logits and the policy {size}, which whole distributions "
                "cannot be compared by: set distillation.distillation_loss.loss_mode to an estimator such as k3"
            )
