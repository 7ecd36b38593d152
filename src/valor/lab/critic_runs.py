"""`valor critic score`, `valor critic search`: key=value as in `valor ppo`, and the keys of `score` or of `search`."""

from collections.abc import Sequence

from valor.config import CriticScoreConfig, CriticSearchConfig
from valor.trainer.command import run_command, trains


def score(argv: Sequence[str] | None = None) -> int:
    return run_command("critic score", CriticScoreConfig, trains("valor.lab.critic_score:ScoreRun"), argv)


def search(argv: Sequence[str] | None = None) -> int:
    return run_command("critic search", CriticSearchConfig, trains("valor.lab.critic_search:SearchRun"), argv)
