"""PF-PPO: critic and policy learn from as many answers as there are, drawn by their scores.

    valor ppo ... algorithm.phases_path=examples/phases/resampling.py

https://arxiv.org/abs/2409.06957; `weights` are the paper's "pow". Draws depend on `trainer.seed` and the step alone. A
critic that gets one update a step has learnt from all answers before they are drawn.
"""

import torch

from valor.data.batch import Batch, Episodes
from valor.data.sampler import keyed_generator
from valor.trainer.phases.base import Phase
from valor.trainer.phases.training_rows import CHOSEN

STREAM = 1  # last word of the random key


def weights(scores: torch.Tensor) -> torch.Tensor:
    """[E] sampling weights from scores [E]: with scores of 0 and 1 right answers alone."""
    return scores.abs().square() + 1e-8


class Resampling(Phase):
    """Draws episodes by their scores, with replacement."""

    name = "resampling"
    reads = frozenset(("token_level_scores", "response_mask", "response_lengths"))
    reads_if_there = frozenset(("episode",))
    adds = frozenset((CHOSEN,))

    def run(self, batch, step):
        episodes = Episodes(batch)
        written = (episodes.sums(batch["response_mask"]) > 0).nonzero().flatten()  # the others were rejected
        scores = episodes.sums(batch["token_level_scores"])[written]
        draw = keyed_generator(self.config.trainer.seed, step, STREAM)
        drawn = torch.multinomial(weights(scores), len(scores), replacement=True, generator=draw)
        metrics = {"training/pf_ppo/distinct_ratio": len(drawn.unique()) / len(drawn)}
        metrics["training/pf_ppo/score_after"] = float(scores[drawn].mean())
        return Batch(meta={CHOSEN: written[drawn].tolist()}), metrics


def phases(standard, config):
    """The standard phases, and the draw after the advantages, which are of all answers."""
    at = [phase.name for phase in standard].index("advantages") + 1
    return [*standard[:at], Resampling(config), *standard[at:]]
