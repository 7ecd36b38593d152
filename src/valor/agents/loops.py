"""Loops: who carries an episode from turn to turn."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from valor.agents.chat import Chat, Conversation, Message
from valor.agents.episode import Episode, EpisodeEnd, EpisodeKey, Turn
from valor.algorithms.registry import Named
from valor.config import PPOConfig
from valor.data.batch import Batch, unpadded
from valor.data.images import IMAGES
from valor.errors import UserError
from valor.rollout.base import Output, SamplingParams, StopTexts

_T = TypeVar("_T")
Generate = Callable[..., Awaitable[Output]]  # `EpisodeRunner.generate`


@dataclass(frozen=True, slots=True)
class Task:
    """What an episode is to be played for: one sample of one row of the data."""

    key: EpisodeKey
    prompt_ids: Sequence[int]
    params: SamplingParams
    row: Mapping[str, Any]
    """messages, data_source, ground_truth, extra_info, uid, agent_name, images; episode_key: as a list, for random
    numbers that repeat."""


def tasks_of(prompts: Batch, params: SamplingParams) -> list[Task]:
    """A task for each row: `prompts`, `prompt_lengths`, `episode_key`, and its objects."""
    rows = ({name: column[i] for name, column in prompts.objects.items()} for i in range(len(prompts)))
    return [
        Task(tuple(key), prompt_ids, params, {**row, "episode_key": key})
        for key, prompt_ids, row in zip(prompts["episode_key"].tolist(), unpadded(prompts, "prompt"), rows, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Limits:
    """In tokens: what may follow the prompt of a row, and a prompt with all that follows."""

    response: int
    model: int


class Play:
    """The episode of one task while it is being played: it writes down turns as they come, within the limits."""

    def __init__(self, task: Task, generate: Generate, limits: Limits, prompt_ids: Sequence[int]) -> None:
        self.task, self.prompt_ids = task, list(prompt_ids)
        self._generate, self._limits = generate, limits
        self.row: list[int] = list(prompt_ids)
        """The present row: its prompt and all that has followed."""
        self._row_prompt = len(self.row)
        self._observed: tuple[int, ...] = ()  # since the last turn
        self._new_prompt: Sequence[int] | None = None
        self.turns: list[Turn] = []
        self._said: dict[str, str] = {}
        self._images: str | None = task.row.get(IMAGES)
        """Those of the present row; None in a run on text."""
        self.alone = asyncio.Lock()
        self.asides: list[dict[str, int]] = []
        """What sub-agents said: numbers of their first and last turns."""
        self.cuts: list[dict[str, int]] | None = None
        """Where rows were cut: number of the turn that is the summary, and tokens that the policy reads less after it.
        None: rows are not cut."""

    @property
    def room(self) -> int:
        """How many tokens the present row may still get."""
        return min(self._limits.response - (len(self.row) - self._row_prompt), self._limits.model - len(self.row))

    @property
    def num_turns(self) -> int:
        """Turns of the policy without its summaries and its sub-agents'."""
        return len(self.turns) - len(self.cuts or ()) - sum(one["last"] - one["first"] + 1 for one in self.asides)

    async def turn(self, *, most: int | None = None, stop: StopTexts | None = None) -> Output:
        """Let the policy speak, in at most `most` tokens."""
        seed = self.task.key if not self.turns else (*self.task.key, len(self.turns))
        room = self.room if most is None else min(self.room, most)
        params = replace(self.task.params, max_tokens=min(room, self.task.params.max_tokens), stop=stop)
        images = {IMAGES: self._images} if self._images else {}
        output = await self._generate(self.row, params, seed, **images)
        before = self._observed, self._new_prompt
        self.turns.append(Turn(output.token_ids, output.log_probs, output.spans, *before, images=self._images))
        self.row = [*self.row, *output.token_ids]
        self._observed, self._new_prompt = (), None
        return output

    def observe(self, token_ids: Sequence[int], least: int = 1) -> bool:
        """Append what the policy is told. False: that leaves less room than `least`, and nothing was appended."""
        if self.room - len(token_ids) < least:
            return False
        self.row = [*self.row, *token_ids]
        self._observed = (*self._observed, *token_ids)
        return True

    def new_row(self, prompt_ids: Sequence[int], least: int = 1) -> bool:
        """Go on in a row of its own with this prompt. False: the prompt leaves less room than `least`."""
        if self._limits.model - len(prompt_ids) < least:
            return False
        self.row, self._row_prompt = list(prompt_ids), len(prompt_ids)
        self._observed, self._new_prompt = (), tuple(prompt_ids)
        self._images = self._images and ""
        return True

    def tell(self, talk: Conversation, messages: Sequence[Message], least: int = 1) -> bool:
        """Append messages, or go on in a new row where the chat template rewrites history. False: there is no room."""
        observation = talk.tell(messages)
        fits = self.new_row(talk.token_ids, least) if observation is None else self.observe(observation, least)
        if fits:
            self.take_images(talk)
        return fits

    def take_images(self, talk: Conversation) -> None:
        """The present row is that of a conversation, and has its images."""
        self._images = None if self._images is None else talk.images

    def cut(self, prompt_ids: Sequence[int], least: int) -> bool:
        """Go on from the summary that is the last turn, in a new row with this prompt. False: as of `new_row`."""
        cut = {"turn": len(self.turns), "tokens": len(self.row) - len(prompt_ids)}
        if not self.new_row(prompt_ids, least):
            return False
        self.cuts = [*(self.cuts or ()), cut]
        return True

    def leave(self, prompt_ids: Sequence[int]) -> Callable[[], None] | None:
        """Go on in a row of a sub-agent with this prompt, until the function that is returned is called: then the
        present row goes on, all of it as a prompt. None: as False of `new_row`."""
        row, row_prompt, observed, new_prompt = self.row, self._row_prompt, self._observed, self._new_prompt
        images, first = self._images, len(self.turns) + 1
        if not self.new_row(prompt_ids):
            return None

        def back() -> None:
            self.row, self._row_prompt, self._observed, self._new_prompt = row, row_prompt, observed, new_prompt
            self._images = images
            if len(self.turns) < first:
                return
            self._observed, self._new_prompt = (), row
            self.asides.append({"first": first, "last": len(self.turns)})
            self._said |= {str(number): "" for number in range(first, len(self.turns) + 1)}

        return back

    def say(self, text: str) -> None:
        """What graders read of the last turn, if that is not all of it: its text without its calls."""
        self._said[str(len(self.turns))] = text

    def reward(self, reward: float, turn: int = 0) -> None:
        """Add to the reward of a turn, by its number, or of the last one."""
        self.turns[turn - 1] = replace(self.turns[turn - 1], reward=self.turns[turn - 1].reward + reward)

    def end(self, reason: EpisodeEnd, outcome: float | None = None, info: Mapping[str, Any] | None = None) -> Episode:
        info = {**(info or {}), **({"said": self._said} if self._said else {})}
        info |= {} if self.cuts is None else {"compactions": self.cuts}
        info |= {"sub_agents": self.asides} if self.asides else {}
        return Episode(self.task.key, tuple(self.turns), reason, self.prompt_ids, outcome, info)


@dataclass(frozen=True, slots=True)
class LoopContext:
    """From what a loop is made, in each process that generates."""

    config: PPOConfig
    chat: Chat
    limits: Limits


class AgentLoop(ABC):
    """Plays episodes: one object a process, for many episodes at once."""

    grades: bool = False
    """Whether its episodes come with an outcome, so that no grader is needed."""
    schemas: Sequence[Mapping[str, Any]] = ()
    """Tools that the chat template describes in every first prompt."""

    shows_images: bool = True
    """Whether its rows may have images."""

    def __init__(self, context: LoopContext) -> None:
        self.context, self.chat = context, context.chat
        if not self.shows_images and (name := context.config.data.image_key) is not None:
            raise UserError(f"data.image_key={name}: {type(self).__name__} plays text episodes: take another loop")

    @abstractmethod
    async def run(self, task: Task, generate: Generate) -> Episode:
        """Play one episode."""

    def close(self) -> None:  # noqa: B027
        """Let go of what it has made."""

    def play(self, task: Task, generate: Generate, prompt_ids: Sequence[int] | None = None) -> Play:
        """An episode to write turns into, from the task's prompt or another one."""
        prompt_ids = task.prompt_ids if prompt_ids is None else prompt_ids
        return Play(task, generate, self.context.limits, prompt_ids)


def copied(value: _T) -> _T:
    """A copy of a Play or a Conversation that can go on without changing the original."""
    made = copy(value)
    if value is not None:
        vars(made).update({name: copy(part) for name, part in vars(value).items() if isinstance(part, list | dict)})
    return made


LOOPS = Named[Callable[..., AgentLoop]]("agent_name")  # each takes a LoopContext and keyword arguments
register_loop = LOOPS.register


async def answer(task: Task, generate: Generate) -> Episode:
    """The episode of a run without agents: one answer, and no prompt of its own. The prompt may have images."""
    images = {IMAGES: task.row[IMAGES]} if IMAGES in task.row else {}
    return Episode.of_one_turn(task.key, await generate(task.prompt_ids, task.params, task.key, **images))


@register_loop("single_turn_agent")
class SingleTurnLoop(AgentLoop):
    """One answer, as without agents: for rows that name it beside others that do not."""

    async def run(self, task: Task, generate: Generate) -> Episode:
        play = self.play(task, generate)
        output = await play.turn()
        return play.end(output.finish_reason)
