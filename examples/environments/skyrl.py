"""Environments of SkyRL-Gym: its own, and those that were registered with `skyrl_gym.register`.

Needs `pip install skyrl-gym`.
"""

from collections.abc import Mapping
from typing import Any

from valor.agents.chat import Message
from valor.agents.env import Env, Step
from valor.errors import UserError
from valor.user_files import installed


class _Config(dict[str, Any]):
    """Settings whose keys are attributes too: SkyRL hands over such a tree."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"env_config has no '{name}'")
        return _Config(self[name]) if isinstance(self[name], dict) else self[name]


class SkyRLGym(Env):
    """The environment `name`, such as gsm8k_multi_turn; a name may be `package.module:ID`, whose import registers it.

    `env_config` is the environment's own; further arguments join the row's columns in its `extras`. UserError: it is
    not installed, or there is no such environment.
    """

    def __init__(self, name: str, env_config: Mapping[str, Any] | None = None, **extras: Any) -> None:
        skyrl_gym = installed("skyrl_gym", f"{name} needs SkyRL-Gym", "skyrl-gym")
        try:
            self._spec = skyrl_gym.spec(name)
        except (skyrl_gym.error.Error, ImportError) as error:
            raise UserError(f"SkyRL-Gym, {name}: {' '.join(str(error).split())}") from None
        self._make = skyrl_gym.make
        self._environment: Any = None
        self._config, self._extras = _Config(env_config or {}), extras

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """The environment gets the columns of SkyRL's data sets, which have the truth in `reward_spec` or
        `reward_model`."""
        columns, truth = dict(row["extra_info"]), {"method": "rule", "ground_truth": row["ground_truth"]}
        extras = {
            "data_source": row["data_source"],
            "reward_spec": truth,
            "reward_model": truth,
            **columns,
            "extra_info": columns,
            **self._extras,
        }
        self._environment = self._make(self._spec, env_config=self._config, extras=extras)
        messages, _ = self._environment.init([dict(message) for message in row["messages"]])
        return messages

    def step(self, text: str) -> Step:
        out = self._environment.step(text)
        return Step(out["observations"], float(out["reward"] or 0.0), bool(out["done"]))

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()
