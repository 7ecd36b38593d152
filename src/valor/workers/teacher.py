"""A teacher: a frozen policy that scores what the actor has sampled, token by token or by whole distributions."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.errors import UserError
from valor.models.load import load_policy
from valor.models.policy import Reference
from valor.models.rows import ROW_FIELDS, CompactRows
from valor.models.teachers import teacher_model
from valor.models.token_log_probs import HeadProduct, LogitMap
from valor.workers.dispatch import Dispatch
from valor.workers.host import RunFacts, WorkerContext
from valor.workers.model_role import ModelRole


class TeacherWorker(ModelRole):
    """One rank of a teacher, the one of this number in `distillation.teacher_models` (forward only, no optimizer)."""

    def __init__(self, context: WorkerContext, *, config: PPOConfig, facts: RunFacts, member: int = 0) -> None:
        section = config.distillation
        teacher = [*section.teacher_models.values()][member]
        model = teacher_model(config, teacher)
        self._temperature = teacher.temperature
        self._limits = {"max_tokens": section.log_prob_max_token_len_per_gpu, "max_rows": section.max_rows}
        super().__init__(context, section, model, partial(load_policy, model), trainable=False)
        packs: Any = context.roles["actor"].engine.module.packed if section.of_distributions else False
        if packs and not self.engine.module.packed:
            raise UserError(
                f"the teacher '{model.path}' reads padded rows alone: set actor_rollout_ref.model.use_remove_padding="
                "false, or distillation.distillation_loss.loss_mode to an estimator such as k3"
            )

    @Dispatch("dp", reads=ROW_FIELDS)
    def compute_log_probs(self, batch: Batch) -> Batch:
        """`teacher_log_probs` [B, T]."""
        with self.on_device() as engine:
            temperature = self._temperature or batch.meta["temperature"]
            out = engine.forward(batch.select(ROW_FIELDS), **self._limits, temperature=temperature)
        return Batch({"teacher_log_probs": out["log_probs"]})

    @contextmanager
    def reference(self) -> Iterator[Reference]:
        """For the actor beside it, whose passes compare whole distributions with those of the teacher."""
        with self.on_device() as engine, engine.reference() as reference:
            logit_map = engine.module.logit_map or LogitMap()

            def distributions(rows: CompactRows) -> HeadProduct:
                return reference(rows)._replace(logit_map=logit_map, temperature=self._temperature)

            yield distributions
