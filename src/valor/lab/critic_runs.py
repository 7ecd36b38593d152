"""`valor critic score`, `valor critic search`: key=value as in `valor ppo`, and the keys of `score` or of `search`."""

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any

from valor.config import CriticScoreConfig, CriticSearchConfig
from valor.trainer.command import run_command


def score(argv: Sequence[str] | None = None) -> int:
    return run_command("critic score", CriticScoreConfig, _later("valor.lab.critic_score:start"), argv)


def search(argv: Sequence[str] | None = None) -> int:
    return run_command("critic search", CriticSearchConfig, _later("valor.lab.critic_search:start"), argv)


def _later(name: str) -> Callable[[Any, str], int]:
    """The function, imported (and torch with it) when it is called: a mistake in the settings is told before."""
    return lambda config, command: resolve_name(name)(config, command)
