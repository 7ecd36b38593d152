"""AsyPPO's mask: no advantage at the tokens where the critics of an ensemble agree most.

    valor ppo ... algorithm.phases_path=examples/phases/agreement_mask.py critic.ensemble_size=2 \
        critic.model.value_head_init=normal

https://arxiv.org/abs/2510.01656.
"""

import torch

from valor.data.batch import Batch
from valor.trainer.phases.base import Phase
from valor.workers.roles import critic_names

SHARE = 0.2  # of the policy tokens of a batch


class AgreementMask(Phase):
    """Advantage 0 where the critics' values have the smallest standard deviation."""

    name = "agreement_mask"
    adds = frozenset(("advantages",))

    def __init__(self, config):
        super().__init__(config)
        self.values = [f"values/{name}" for name in critic_names(config)]
        self.reads = frozenset(("response_mask", "advantages", *self.values))

    def run(self, batch, step):
        spread, here = torch.stack([batch[name] for name in self.values]).double().std(0), batch["response_mask"] > 0
        ordered = spread[here].sort().values
        at = min(int(SHARE * len(ordered)), len(ordered) - 1)
        masked = here & (spread < ordered[at]) if len(ordered) else here
        share = float(masked.sum() / here.sum().clamp(min=1))
        return Batch({"advantages": batch["advantages"] * ~masked}), {"critic/agreement_masked": share}


def phases(standard, config):
    """The standard phases, and the mask after the advantages."""
    at = [phase.name for phase in standard].index("advantages") + 1
    return [*standard[:at], AgreementMask(config), *standard[at:]]
