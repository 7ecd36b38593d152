"""Episodes of a run as files: `N.jsonl` holds those of step N, `val_N.jsonl` those of the validation after it, and
`greedy_N.jsonl` those of a greedy baseline."""

import json
from pathlib import Path

from valor.agents.agents import TOOLS_FILE, Agents
from valor.agents.episode import episode_rows
from valor.agents.record import Record, as_json, episode_records, recorded_episode
from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.errors import UserError
from valor.tracking.generations import plain
from valor.tracking.rundir import write_atomically

_KEY = "actor_rollout_ref.rollout.agent.replay_dir"


class EpisodeFiles:
    """Writes episodes to `trainer.episode_data_dir`, and reads those of `agent.replay_dir`, where these are set."""

    def __init__(self, config: PPOConfig, agents: Agents | None) -> None:
        folders = config.trainer.episode_data_dir, config.actor_rollout_ref.rollout.agent.replay_dir
        self._written, self._replayed = (
            Path(path).expanduser().absolute() if path and agents else None for path in folders
        )
        self._agents = agents
        self._lines: list[str] = []
        self._file = ""
        self._recorded: dict[tuple[int, ...], Record] = {}

    def begin(self, name: str) -> None:
        """Episodes from now on belong to the file `name`. UserError: there is none to replay."""
        self._file, self._lines = f"{name}.jsonl", []
        if self._written is not None and self._agents is not None:
            schemas = self._agents.schemas
            shown = schemas if not any(schemas.values()) or self._agents.chat.shows("tools") else {}
            write_atomically(self._written / TOOLS_FILE, json.dumps(shown, indent=1, default=str) + "\n")
        if self._replayed is not None:
            self._recorded = _read(self._replayed / self._file)

    def replayed(self, prompts: Batch) -> Batch | None:
        """The rows of the recorded episodes of these prompts, where episodes are replayed.

        UserError: an episode is missing, or had another prompt.
        """
        if self._replayed is None or not self._file:
            return None
        episodes, where = [], f"{_KEY}: {self._replayed / self._file} has"
        for key, messages in zip(prompts["episode_key"].tolist(), prompts.objects["messages"], strict=True):
            seed, step, sample = key
            record = self._recorded.get(tuple(key))
            if record is None:
                raise UserError(f"{where} no episode {sample} of step {step} with trainer.seed={seed}")
            if record["messages"] != as_json(messages):
                raise UserError(f"{where} another prompt for episode {sample} of step {step}: give the same data")
            episodes.append(recorded_episode(record))
        return episode_rows(episodes)

    def write(self, prompts: Batch, rows: Batch) -> None:
        """Add the episodes of these prompts to the file."""
        if self._written is not None and self._file and self._agents is not None:
            records = episode_records(prompts, rows, self._agents.chat)
            self._lines += (json.dumps(record, default=plain, ensure_ascii=False) + "\n" for record in records)
            write_atomically(self._written / self._file, "".join(self._lines))


def _read(path: Path) -> dict[tuple[int, ...], Record]:
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {tuple(record["key"]): record for record in records}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f": {error.strerror}" if isinstance(error, OSError) else f" holds no records of episodes ({error!r})"
        raise UserError(f"{_KEY}: '{path}'{reason}: it is written under trainer.episode_data_dir") from None
