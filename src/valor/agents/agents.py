"""The agents of a run: which loop plays which row, and all episodes of a batch beside one engine."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from valor.agents.chat import Chat
from valor.agents.env_loop import EnvLoop
from valor.agents.episode import Episode, Turn
from valor.agents.formats import valid_text
from valor.agents.gateway_loop import GatewayLoop
from valor.agents.loops import LOOPS, AgentLoop, Limits, LoopContext, Task
from valor.agents.runner import EpisodeRunner
from valor.agents.search_loop import SearchLoop
from valor.agents.tool_runner import exception_text
from valor.agents.verl_loop import VerlLoop
from valor.config import PPOConfig, load_yaml
from valor.data.images import IMAGES, ImageFiles
from valor.errors import TrainingStopped, UserError
from valor.rollout.base import Span
from valor.user_files import load_object

TOOLS_FILE = "tools.json"
BUILT_IN = (EnvLoop, SearchLoop, GatewayLoop, VerlLoop)  # importing them registers their names
_KEY = "actor_rollout_ref.rollout.agent"

Schemas = Sequence[Mapping[str, Any]]


class Agents:
    """Loops by name, made when first used. UserError: there is no such loop, or it cannot be made.

    Under `agent.replay_dir` there are no loops: recorded episodes take the place of played ones.
    """

    def __init__(self, config: PPOConfig, tokenizer: Any, images: ImageFiles | None = None) -> None:
        rollout, data = config.actor_rollout_ref.rollout, config.data
        self.chat = Chat(tokenizer, data.apply_chat_template_kwargs, images)
        limits = Limits(config.episode_length, rollout.max_model_len)
        self._context, self._options = LoopContext(config, self.chat, limits), rollout.agent
        self._replays = rollout.agent.replay_dir is not None
        self._loops: dict[str, AgentLoop] = {}
        self._entries: dict[str, dict[str, Any]] = {}  # of the user's loops
        if rollout.agent.agent_loop_config_path is not None and not self._replays:
            self._entries = _read_loops(rollout.agent.agent_loop_config_path)

    def loop_of(self, extra_info: Mapping[str, Any]) -> AgentLoop:
        name = self._name_of(extra_info)
        if name not in self._loops:
            self._loops[name] = self._make(name)
        return self._loops[name]

    def schemas_of(self, extra_info: Mapping[str, Any]) -> Schemas:
        """Tools that the chat template describes in the first prompt of such a row."""
        if self._replays:
            return self._recorded_schemas.get(self._name_of(extra_info), ())
        return self.loop_of(extra_info).schemas

    @property
    def schemas(self) -> dict[str, Schemas]:
        """Tools of the loops that are in use, by the loop's name."""
        return self._recorded_schemas if self._replays else {name: one.schemas for name, one in self._loops.items()}

    def judges(self, extra_info: Mapping[str, Any]) -> bool:
        """Whether such a row's episodes come with an outcome, so that no grader is needed, or are replayed."""
        return self._replays or self.loop_of(extra_info).grades

    def runner(self) -> EpisodeRunner:
        most, longest = self._options.max_concurrent_episodes, self._context.limits.model
        return EpisodeRunner(self._play, most=most, max_tokens=longest, deterministic=self._options.deterministic)

    def close(self) -> None:
        for loop in self._loops.values():
            loop.close()

    async def _play(self, task: Task, runner: EpisodeRunner) -> Episode:
        """One episode. An exception of its loop or environment is its error alone, and so is a reward that is not
        finite."""
        try:
            episode = await self.loop_of(task.row["extra_info"]).run(task, runner.generate)
            if not episode.turns:
                raise ValueError("it has no turn")
            rewards = [*(turn.reward for turn in episode.turns), episode.outcome or 0.0]
            if not all(map(math.isfinite, rewards)):
                raise ValueError(f"its rewards are {rewards}")
            return replace(episode, info=valid_text(episode.info))
        except (UserError, TrainingStopped):
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            current = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling():
                raise  # the run ends; else the loop has cancelled itself
            last, images = [task.prompt_ids[-1]], task.row.get(IMAGES)
            turn = Turn([], [], (Span(0, 0),), observation_ids=last, images=images)  # nothing is learnt from it
            text = valid_text(exception_text(error))
            return Episode(task.key, (turn,), "abort", task.prompt_ids, info={}, error=text)

    def _name_of(self, extra_info: Mapping[str, Any]) -> str:
        return extra_info.get("agent_name") or self._context.config.default_agent_loop

    @cached_property
    def _recorded_schemas(self) -> dict[str, Schemas]:
        path = Path(self._options.replay_dir or "").expanduser() / TOOLS_FILE
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            written = "give a folder that a run has written under trainer.episode_data_dir"
            raise UserError(f"{_KEY}.replay_dir: '{path}' cannot be read ({error}): {written}") from None

    def _make(self, name: str) -> AgentLoop:
        if name not in self._entries:
            return LOOPS[name](self._context)
        options = dict(self._entries[name])
        cls = load_object(options.pop("_target_"), f"{_KEY}.agent_loop_config_path")
        if isinstance(cls, type) and issubclass(cls, AgentLoop):
            return cls(self._context, **options)
        return VerlLoop(self._context, cls=cls, options=options)


def _read_loops(path: str) -> dict[str, dict[str, Any]]:
    """The user's loops by name, from a YAML list of {name, _target_, arguments}."""
    try:
        entries = load_yaml(Path(path).expanduser().read_text(encoding="utf-8"))
        return {entry.pop("name"): entry for entry in entries if entry["_target_"]}
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, AttributeError, KeyError) as error:
        problem = f"must be a YAML list of loops with name and _target_ ({error})"
        raise UserError(f"{_KEY}.agent_loop_config_path={path}: {problem}") from None
