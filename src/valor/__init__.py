"""Valor: value-oriented reinforcement learning for language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from valor.lab.api import PPO as PPO
    from valor.lab.api import SFT as SFT
    from valor.lab.api import RewardModel as RewardModel
    from valor.lab.api import train as train

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is first used."""
    if name in ("PPO", "SFT", "RewardModel", "train"):
        from valor.lab import api

        return getattr(api, name)
    raise AttributeError(f"module 'valor' has no attribute '{name}'")
