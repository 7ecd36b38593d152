"""Log-probs of the reference policy, where a KL term needs them."""

from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.models.rows import ROW_FIELDS
from valor.tracking.progress import phase
from valor.trainer.phases.base import Metrics, Phase


class ReferenceLogProbs(Phase):
    """One pass of the reference policy over the batch."""

    name = "ref"
    role = "ref"
    reads = frozenset(ROW_FIELDS)
    reads_if_there = frozenset(("episode",))
    adds = frozenset(("ref_log_probs",))

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.needs_ref_log_probs

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        with phase("reference log-probs", len(batch), unit="sample"):
            return self.resources.roles["ref"].compute_log_probs(batch), {}
