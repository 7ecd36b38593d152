"""The agents of a run: which loop plays which row, and all episodes of a batch beside one engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from valor.agents.chat import Chat
from valor.agents.environment_loop import EnvironmentLoop
from valor.agents.episode import Episode, Turn
from valor.agents.gateway_loop import GatewayLoop
from valor.agents.loops import AgentLoop, Generate, Limits, LoopContext, Task, make_loop
from valor.agents.runner import EpisodeRunner, Sink
from valor.agents.search_loop import SearchLoop
from valor.agents.tool_loop import ToolLoop
from valor.agents.verl_loop import VerlLoop
from valor.config import PPOConfig
from valor.errors import TrainingStopped, UserError
from valor.rollout.base import RolloutEngine, Span
from valor.user_files import load_object

BUILT_IN = (ToolLoop, SearchLoop, EnvironmentLoop, GatewayLoop, VerlLoop)  # importing them makes their names known


class Agents:
    """Loops by name, made as they are asked for. UserError: a loop, or what it needs, is not there."""

    def __init__(self, config: PPOConfig, tokenizer: Any) -> None:
        rollout, data = config.actor_rollout_ref.rollout, config.data
        limits = Limits(config.episode_length, rollout.max_model_len)
        self._context = LoopContext(config, Chat(tokenizer, data.apply_chat_template_kwargs), limits)
        self._options = rollout.agent
        self._loops: dict[str, AgentLoop] = {}
        self._own: dict[str, dict[str, Any]] = {}
        if rollout.agent.agent_loop_config_path is not None:
            self._own = _read_own(rollout.agent.agent_loop_config_path)

    def loop_of(self, extra_info: Mapping[str, Any]) -> AgentLoop:
        """The loop that plays a row's episodes."""
        name = extra_info.get("agent_name") or self._context.config.default_agent_loop
        if name not in self._loops:
            self._loops[name] = self._make(name)
        return self._loops[name]

    def schemas_of(self, extra_info: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Tools that the chat template describes in the first prompt of such a row."""
        return self.loop_of(extra_info).schemas

    def judges(self, extra_info: Mapping[str, Any]) -> bool:
        """Whether such a row's episodes come with an outcome, so that no grader is needed."""
        return self.loop_of(extra_info).grades

    def play(self, engine: RolloutEngine, tasks: Sequence[Task], sink: Sink | None = None) -> list[Episode]:
        """An episode for each task, in their order; `sink` gets each when it has ended."""
        runner = EpisodeRunner(
            tasks,
            partial(self._play),
            most=self._options.max_concurrent_episodes,
            max_tokens=self._context.limits.model,
            deterministic=self._options.deterministic,
        )
        return runner.run(engine, sink)

    async def _play(self, task: Task, runner: EpisodeRunner[Task]) -> Episode:
        """One episode. What a loop or an environment raises is that episode's error, and no other's."""
        generate: Generate = runner.generate
        try:
            return await self.loop_of(task.row["extra_info"]).run(task, generate)
        except (UserError, TrainingStopped):
            raise
        except Exception as error:
            return _failed(task, f"{type(error).__name__}: {error}")

    def _make(self, name: str) -> AgentLoop:
        if name not in self._own:
            return make_loop(name, self._context)
        options = dict(self._own[name])
        cls = load_object(options.pop("_target_"), "actor_rollout_ref.rollout.agent.agent_loop_config_path")
        if isinstance(cls, type) and issubclass(cls, AgentLoop):
            return cls(self._context, **options)
        return make_loop("verl", self._context, cls=cls, options=options)


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
