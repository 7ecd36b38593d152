"""The frozen starting policy: its log-probs are what the KL penalty compares with."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from torch import Tensor

from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.models.load import load_policy
from valor.models.policy import Reference
from valor.models.rows import ROW_FIELDS, model_rows
from valor.models.states import StateProjection
from valor.workers.dispatch import Dispatch
from valor.workers.host import RunFacts, WorkerContext
from valor.workers.model_role import ModelRole


class ReferenceWorker:
    """One rank of the reference policy (forward only, no optimizer).

    Beside an actor that trains adapters it is that actor without them, and holds no weights; else a model of its own.
    It is the model at `model.path`, also where an actor goes on from adapters trained before.
    """

    def __init__(self, context: WorkerContext, *, config: PPOConfig, facts: RunFacts) -> None:
        model, ref = config.actor_rollout_ref.model, config.actor_rollout_ref.ref
        self._limits = {"max_tokens": ref.log_prob_max_token_len_per_gpu, "max_rows": ref.max_rows}
        self._is_actor = bool(model.lora_rank) and "actor" in context.roles
        if self._is_actor:
            self._role: ModelRole = context.roles["actor"]
        else:
            base = model.model_copy(update={"lora_rank": 0, "lora_adapter_path": None})
            self._role = ModelRole(context, ref, base, partial(load_policy, base), trainable=False)

    @property
    def data_parallel_rank(self) -> int:
        return self._role.data_parallel_rank

    @Dispatch("dp", reads=ROW_FIELDS, stays=("ref_log_probs",))
    def compute_log_probs(self, batch: Batch) -> Batch:
        """`ref_log_probs` [B, T]."""
        with self._role.on_device() as engine, engine.without_adapters():
            rows = model_rows(batch)
            out = engine.forward(rows, **self._limits, temperature=batch.meta["temperature"])
        return Batch({"ref_log_probs": out["log_probs"]})

    def states(self, rows: Batch, projection: StateProjection) -> tuple[Tensor, Tensor]:
        """For a critic beside it: projected hidden states [B, T, K] before each response token, and the log-probs
        [B, T] of the tokens."""
        with self._role.on_device() as engine, engine.without_adapters():
            out = engine.forward(rows, **self._limits, projection=projection)
        return out["states"], out["log_probs"]

    @contextmanager
    def reference(self) -> Iterator[Reference]:
        """For the actor beside it, whose passes compute the exact KL: distributions of rows, by the reference."""
        turn = nullcontext() if self._is_actor else self._role.on_device()  # the actor is on the device already
        with turn, self._role.engine.reference() as reference:
            yield reference
