"""Episodes of a run as files: `N.jsonl` holds those of step N, `val_N.jsonl` those of the validation after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from valor.agents.agents import TOOLS_FILE, Agents
from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.errors import UserError
from valor.rollout.base import SamplingParams
from valor.tracking.rundir import write_atomically

_KEY = "actor_rollout_ref.rollout.agent.replay_dir"


class EpisodeFiles:
    """Writes episodes to `trainer.episode_data_dir`, and reads those of `agent.replay_dir`, where these are set."""

    def __init__(self, config: PPOConfig, agents: Agents | None) -> None:
        written, replayed = config.trainer.episode_data_dir, config.actor_rollout_ref.rollout.agent.replay_dir
        self._written = Path(written).expanduser() if written and agents else None
        self._replayed = Path(replayed).expanduser() if replayed and agents else None
        self._agents = agents
        self._lines: list[str] = []
        self._file: str | None = None
        self._recorded: dict[tuple[Any, ...], Any] = {}

    def begin(self, name: str) -> None:
        """What is played from now on belongs to the file `name`. UserError: there is none to replay."""
        self._file, self._lines = f"{name}.jsonl", []
        if self._written is not None and self._agents is not None:
            write_atomically(self._written / TOOLS_FILE, json.dumps(self._agents.schemas, indent=1, default=str) + "\n")
        if self._replayed is not None:
            self._recorded = _read(self._replayed / self._file)

    def recorded(self, prompts: Batch, params: SamplingParams) -> Batch:
        """A column `recorded` for prompts that are to be replayed, else nothing. UserError: an episode is missing."""
        if self._replayed is None or self._file is None:
            return Batch()
        keys = [(*key, params.temperature) for key in prompts["episode_key"].tolist()]
        missing = [key for key in keys if key not in self._recorded]
        if missing:
            seed, step, sample, _ = missing[0]
            where = self._replayed / self._file
            raise UserError(f"{_KEY}: {where} has no episode {sample} of step {step} with trainer.seed={seed}")
        return Batch({}, {"recorded": [self._recorded[key] for key in keys]})

    def write(self, rows: Batch) -> None:
        """Take the records of episodes out of their rows, and add them to the file."""
        records = rows.objects.pop("episode_record", ())
        if self._written is not None and self._file is not None:
            kept = (record for record in records if record is not None)
            self._lines += (json.dumps(record, default=str, ensure_ascii=False) + "\n" for record in kept)
            write_atomically(self._written / self._file, "".join(self._lines))


def _read(path: Path) -> dict[tuple[Any, ...], Any]:
    """Records by key and temperature: a greedy baseline has the keys of the samples."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {(*record["key"], record["temperature"]): record for record in records}
    except OSError as error:
        raise UserError(f"{_KEY}: '{path}': {error.strerror}: it is written under trainer.episode_data_dir") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{_KEY}: '{path}' holds no records of episodes ({type(error).__name__}: {error})") from None
