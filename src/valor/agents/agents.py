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
from valor.agents.environment_loop import EnvironmentLoop
from valor.agents.episode import Episode, Turn
from valor.agents.formats import valid_text
from valor.agents.gateway_loop import GatewayLoop
from valor.agents.loops import LOOPS, AgentLoop, Limits, LoopContext, Task
from valor.agents.runner import EpisodeRunner
from valor.agents.search_loop import SearchLoop
from valor.agents.tool_loop import ToolLoop
from valor.agents.tool_runner import exception_text
from valor.agents.verl_loop import VerlLoop
from valor.config import PPOConfig
from valor.errors import TrainingStopped, UserError
from valor.rollout.base import Span
from valor.user_files import load_object

TOOLS_FILE = "tools.json"
BUILT_IN = (ToolLoop, SearchLoop, EnvironmentLoop, GatewayLoop, VerlLoop)  # importing them makes their names known


class Agents:
    """Loops by name, made as they are asked for. UserError: a loop, or what it needs, is not there.

    Under `agent.replay_dir` there are no loops: recorded episodes take the place of played ones.
    """

    def __init__(self, config: PPOConfig, tokenizer: Any) -> None:
        rollout, data = config.actor_rollout_ref.rollout, config.data
        limits = Limits(config.episode_length, rollout.max_model_len)
        self.chat = Chat(tokenizer, data.apply_chat_template_kwargs)
        self._context = LoopContext(config, self.chat, limits)
        self._options = rollout.agent
        self._loops: dict[str, AgentLoop] = {}
        self._own: dict[str, dict[str, Any]] = {}
        if rollout.agent.agent_loop_config_path is not None and rollout.agent.replay_dir is None:
            self._own = _read_own(rollout.agent.agent_loop_config_path)

    def loop_of(self, extra_info: Mapping[str, Any]) -> AgentLoop:
        name = self._name_of(extra_info)
        if name not in self._loops:
            self._loops[name] = self._make(name)
        return self._loops[name]

    def schemas_of(self, extra_info: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Tools that the chat template describes in the first prompt of such a row."""
        if self._options.replay_dir is not None:
            return self._recorded_schemas.get(self._name_of(extra_info), ())
        return self.loop_of(extra_info).schemas

    @property
    def schemas(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        """Tools of the loops that have been asked for, by the loop's name."""
        if self._options.replay_dir is not None:
            return self._recorded_schemas
        return {name: loop.schemas for name, loop in self._loops.items()}

    def judges(self, extra_info: Mapping[str, Any]) -> bool:
        """Whether such a row's episodes come with an outcome, so that no grader is needed, or are replayed."""
        return self._options.replay_dir is not None or self.loop_of(extra_info).grades

    def runner(self) -> EpisodeRunner:
        return EpisodeRunner(
            self._play,
            most=self._options.max_concurrent_episodes,
            max_tokens=self._context.limits.model,
            deterministic=self._options.deterministic,
        )

    def close(self) -> None:
        for loop in self._loops.values():
            loop.close()

    async def _play(self, task: Task, runner: EpisodeRunner) -> Episode:
        """One episode. What a loop or an environment raises is that episode's error, and no other's; so is a reward
        that is not finite."""
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
            me = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and me is not None and me.cancelling():
                raise  # the run ends; else the loop has cancelled itself
            return _failed(task, valid_text(exception_text(error)))

    def _name_of(self, extra_info: Mapping[str, Any]) -> str:
        return extra_info.get("agent_name") or self._context.config.default_agent_loop

    @cached_property
    def _recorded_schemas(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        path = Path(self._options.replay_dir or "").expanduser() / TOOLS_FILE
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"actor_rollout_ref.rollout.agent.replay_dir: '{path}' cannot be read ({error}): give a folder that a "
                "run has written under trainer.episode_data_dir"
            ) from None

    def _make(self, name: str) -> AgentLoop:
        if name not in self._own:
            return LOOPS[name](self._context)
        options = dict(self._own[name])
        cls = load_object(options.pop("_target_"), "actor_rollout_ref.rollout.agent.agent_loop_config_path")
        if isinstance(cls, type) and issubclass(cls, AgentLoop):
            return cls(self._context, **options)
        return LOOPS["verl"](self._context, cls=cls, options=options)


def _failed(task: Task, error: str) -> Episode:
    """An episode that could not be played: one token from which nothing is learnt."""
    turn = Turn([], [], (Span(0, 0),), observation_ids=[task.prompt_ids[-1]])
    return Episode(task.key, (turn,), "abort", task.prompt_ids, info={}, error=error)


def _read_own(path: str) -> dict[str, dict[str, Any]]:
    """Loops of the user's own by name, from a YAML list of {name, _target_, arguments}."""
    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    try:
        entries = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
        return {entry.pop("name"): entry for entry in entries if entry["_target_"]}
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"{key}={path}: must be a YAML list of loops with name and _target_ ({error})") from None
