"""Which steps of a run were taken back, because the weights were lost in them, and what that changes."""

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from valor.config.tree import flatten, nested
from valor.errors import UserError
from valor.tracking.rundir import ROLLBACKS_FILE, write_atomically

Config = TypeVar("Config", bound=BaseModel)


class Rollbacks:
    """They stand in the run's folder, so that the same command knows of them after a kill.

    Of each, `to` is the checkpoint's step and `at` the step in which it happened: the batch of `at` is left out, and
    from `to` on all learning rates are half of what they were.
    """

    def __init__(self, run_dir: Path, limit: int) -> None:
        self.limit = limit
        self._file = run_dir / ROLLBACKS_FILE
        self._made: list[dict[str, Any]] = []

    def read(self, step: int) -> None:
        """Those that a run which resumes at `step` knows of; later ones never happened."""
        if self._file.exists():
            try:
                self._made = [one for one in json.loads(self._file.read_bytes()) if one["to"] <= step]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"'{self._file}' is damaged: delete it, or start afresh with another folder") from error

    def add(self, to: int, at: int, reason: str) -> bool:
        """Note one, if there may be a further one."""
        if len(self._made) >= self.limit:
            return False
        self._made.append({"to": to, "at": at, "reason": reason})
        write_atomically(self._file, json.dumps(self._made, indent=1) + "\n")
        return True

    def leaves_out(self, step: int) -> bool:
        """Whether the next batch is left out before `step`."""
        return any(one["at"] == step for one in self._made)

    def lowered(self, config: Config) -> Config:
        """The configuration with the learning rates that hold now."""
        if not self._made:
            return config
        scale = 0.5 ** len(self._made)
        flat = flatten(config.model_dump())
        lowered = {key: value * scale if key.endswith("optim.lr") else value for key, value in flat.items()}
        return type(config).model_validate(nested(lowered))

    def metrics(self) -> dict[str, Any]:
        """`training/rollbacks`, how many there were, where there may be any."""
        return {"training/rollbacks": len(self._made)} if self.limit else {}
