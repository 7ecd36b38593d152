"""A dataflow of one's own: a second grader, asked only where the critic is unsure.

    valor ppo ... algorithm.phases_path=examples/phases/second_opinion.py

Where the critic's value at the end of an answer is neither clearly good nor clearly bad, the score becomes the mean of
both graders. Put a reward model or a judge into `second_score`.
"""

from valor.algorithms import value_at_end
from valor.data.batch import Batch
from valor.trainer.phases.base import Phase
from valor.trainer.phases.values import Values, ValuesInTheUpdate

UNSURE = (0.2, 0.8)  # values between these ask for a second opinion


def second_score(text: str, ground_truth: str) -> float:
    """A cheap grader in a costly one's place: the right number is somewhere in the answer."""
    return float(str(ground_truth) in text)


class SecondOpinion(Phase):
    """The mean of two graders where the critic is unsure."""

    name = "second_opinion"
    reads = frozenset(("response_mask", "values", "token_level_scores", "response_text", "ground_truth"))
    adds = frozenset(("token_level_scores",))

    def run(self, batch, step):
        values = value_at_end(batch["values"], batch["response_mask"])
        unsure = (values > UNSURE[0]) & (values < UNSURE[1])
        scores = batch["token_level_scores"].clone()
        for row in unsure.nonzero().flatten().tolist():
            second = second_score(batch.objects["response_text"][row], batch.objects["ground_truth"][row])
            end = int(batch["response_mask"][row].nonzero().max())
            scores[row, end] = (scores[row, end] + second) / 2
        return Batch({"token_level_scores": scores}), {"reward/second_opinions": float(unsure.float().mean())}


def phases(standard, config):
    """The standard phases, the critic's values first, and the second opinion before scores become rewards."""
    rest = [phase for phase in standard if not isinstance(phase, Values | ValuesInTheUpdate)]
    at = [phase.name for phase in rest].index("rewards")
    return [Values(config), *rest[:at], SecondOpinion(config), *rest[at:]]
