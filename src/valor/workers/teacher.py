"""A teacher: a policy that scores what the actor has sampled, token by token or by whole distributions."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from valor.config import PPOConfig
from valor.config.distillation import TeacherConfig
from valor.config.engine import ModelConfig
from valor.data.batch import Batch
from valor.errors import UserError
from valor.models.load import load_model_config, load_policy, other_tokenizer
from valor.models.policy import Reference
from valor.models.rows import ROW_FIELDS, CompactRows
from valor.models.token_log_probs import HeadProduct, LogitMap
from valor.workers.dispatch import Dispatch
from valor.workers.host import RunFacts, WorkerContext
from valor.workers.model_role import ModelRole


class TeacherWorker(ModelRole):
    """One rank of a teacher, the one of this number in `distillation.teacher_models` (forward only, no optimizer)."""

    def __init__(self, context: WorkerContext, *, config: PPOConfig, facts: RunFacts, member: int = 0) -> None:
        section = config.distillation
        teacher = [*section.models.values()][member]
        model = teacher_model(config, teacher)
        self._temperature = teacher.temperature
        self._limits = {"max_tokens": section.log_prob_max_token_len_per_gpu, "max_rows": section.max_rows}
        self._last_token = int(load_model_config(model).get_text_config().vocab_size) - 1
        super().__init__(context, section, model, partial(load_policy, model), trainable=False)
        if teacher.update_rate is not None:
            policy = context.roles["actor"].engine
            shapes = [[weight.shape for weight in x.module.parameters()] for x in (self.engine, policy)]
            if shapes[0] != shapes[1]:
                raise UserError(
                    f"the teacher '{model.path}' has other weights than the policy, and update_rate moves each to the "
                    "policy's: give it the policy's own model, or drop update_rate"
                )
        packs: Any = context.roles["actor"].engine.module.packed if section.of_distributions else False
        if packs and not self.engine.module.packed:
            raise UserError(
                f"the teacher '{model.path}' reads padded rows alone: set actor_rollout_ref.model.use_remove_padding="
                "false, or distillation.distillation_loss.loss_mode to an estimator such as k3"
            )

    @Dispatch("dp", reads=ROW_FIELDS)
    def compute_log_probs(self, batch: Batch) -> Batch:
        """`teacher_log_probs` [B, T]; tokens that only the padding of the policy's vocabulary has count as its last."""
        rows = batch.select(ROW_FIELDS)
        for name in ("prompts", "responses"):
            rows[name] = rows[name].clamp(max=self._last_token)
        with self.on_device() as engine:
            out = engine.forward(rows, **self._limits, temperature=batch.meta["temperature"])
        return Batch({"teacher_log_probs": out["log_probs"]})

    @Dispatch("all")
    def follow(self, rate: float) -> None:
        """Move the weights this share of the way to those of the actor beside it."""
        with self._context.roles["actor"].on_device() as policy, self.on_device() as engine:
            cast(Any, engine).approach(policy, rate)  # fsdp2's, which alone may follow

    @contextmanager
    def reference(self) -> Iterator[Reference]:
        """For the actor beside it, whose passes compare whole distributions with those of the teacher."""
        with self.on_device() as engine, engine.reference() as reference:
            logit_map = engine.module.logit_map or LogitMap()

            def distributions(rows: CompactRows) -> HeadProduct:
                return reference(rows)._replace(logit_map=logit_map, temperature=self._temperature)

            yield distributions


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
    for name, teacher in section.models.items():
        model = teacher_model(config, teacher)
        of_teacher = load_model_config(model)
        if difference := other_tokenizer(model, of_teacher, policy, tokenizer):
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
