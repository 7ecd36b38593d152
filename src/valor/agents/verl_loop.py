"""Agent loops in verl's shape: a class derived from `AgentLoopBase`, whose `run` returns tokens and their mask.

Shapes of volcengine/verl, verl/experimental/agent_loop/agent_loop.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from operator import eq
from typing import Any, TypeVar

from valor.agents.episode import Episode, Turn
from valor.agents.loops import AgentLoop, Generate, LoopContext, Task, register_loop
from valor.rollout.base import Output, SamplingParams, spans_of, token_versions

Loop = TypeVar("Loop", bound=type)


@dataclass
class TokenOutput:
    """What `server_manager.generate` returns."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str


@dataclass
class AgentLoopOutput:
    """An episode, or a row of one: `response_mask` is 1 on the policy's own tokens.

    `response_logprobs` may be left out where own tokens are what `generate` returned behind the tokens before them.
    `reward_score`: the score of the whole; None leaves it to the graders.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: Any = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class AgentLoopBase:
    """To derive from: one object an episode. `config` is the run's, `server_manager` generates."""

    def __init__(
        self, trainer_config: Any, server_manager: Any, tokenizer: Any, processor: Any = None, **kwargs: Any
    ) -> None:
        self.config = getattr(trainer_config, "config", trainer_config)
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """An AgentLoopOutput, or a list of them: rows of one episode. `kwargs` are the row's columns."""
        raise NotImplementedError


def register(name: str) -> Callable[[Loop], Loop]:

    def decorate(cls: Loop) -> Loop:
        register_loop(name)(lambda context, **options: VerlLoop(context, cls=cls, options=options))
        return cls

    return decorate


@register_loop("verl")
class VerlLoop(AgentLoop):
    """Plays episodes with objects of `cls`."""

    def __init__(self, context: LoopContext, *, cls: type, options: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._cls, self._options = cls, options

    async def run(self, task: Task, generate: Generate) -> Episode:
        server = _Server(task, generate, self.context.limits.model)
        loop = self._cls(
            trainer_config=self.context.config,
            server_manager=server,
            tokenizer=self.chat.tokenizer,
            processor=None,
            **self._options,
        )
        params = task.params
        sampling = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        row = {**task.row["extra_info"], **task.row, "raw_prompt": task.row["messages"]}
        found = await loop.run(sampling | {"max_tokens": params.max_tokens}, **row)
        outputs: list[Any] = found if isinstance(found, list) else [found]
        turns = [turn for i, output in enumerate(outputs) for turn in server.turns(output, new_row=i > 0)]
        last = outputs[-1]
        reason = server.calls[-1][1].finish_reason if server.calls else "stop"
        info = {"metrics": last.metrics, **(last.extra_fields or {})}
        return Episode(task.key, tuple(turns), reason, outputs[0].prompt_ids, last.reward_score, info)


class _Server:
    """What a loop calls `server_manager`: it generates, and remembers behind which tokens and with what log-probs."""

    def __init__(self, task: Task, generate: Generate, longest: int) -> None:
        self._task, self._generate, self._longest = task, generate, longest
        self._numbers = count()
        self.calls: list[tuple[list[int], Output]] = []

    async def generate(
        self, request_id: str = "", *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """The tokens that follow `prompt_ids`. ValueError: these leave no room for any."""
        room, number = self._longest - len(prompt_ids), next(self._numbers)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room (rollout.max_model_len={self._longest})"
            )
        params = _params(self._task.params, sampling_params)
        params = replace(params, max_tokens=min(params.max_tokens, room))
        output = await self._generate(prompt_ids, params, (*self._task.key, number) if number else self._task.key)
        self.calls.append((list(prompt_ids), output))
        return TokenOutput(output.token_ids, output.log_probs, output.finish_reason)

    def turns(self, output: AgentLoopOutput, *, new_row: bool) -> list[Turn]:
        """The turns of a row. ValueError: lengths differ, or own tokens are not what was generated there."""
        ids, mask, given = output.response_ids, output.response_mask, output.response_logprobs
        if len(mask) != len(ids) or (given is not None and len(given) != len(ids)):
            raise ValueError("response_ids, response_mask and response_logprobs differ in length")
        turns: list[Turn] = []
        told: list[int] = []
        prompt = output.prompt_ids if new_row else None
        last = next((span.weights_version for _, one in reversed(self.calls) for span in reversed(one.spans)), 0)
        for own, places in groupby(range(len(ids)), key=lambda i: mask[i] == 1):
            part = list(places)
            start, end = part[0], part[-1] + 1
            if not own:
                told = ids[start:end]
                continue
            log_probs, versions = self._sampled([*output.prompt_ids, *ids[:start]], ids[start:end])
            if given is None and len(log_probs) < end - start:
                raise ValueError("own tokens that no call of generate returned there need response_logprobs")
            if given is not None:
                log_probs = given[start:end]
                versions += [versions[-1] if versions else last] * (end - start - len(versions))
            turns.append(Turn(ids[start:end], log_probs, spans_of(versions), told, prompt))
            told, prompt = [], None
        if told or not turns:
            turns.append(Turn([], [], (), told or ids[:1], prompt))
        return turns

    def _sampled(self, before: list[int], tokens: list[int]) -> tuple[list[float], list[int]]:
        """Log-probs and weights versions of `tokens`, as far as calls of `generate` gave them behind `before`."""
        log_probs: list[float] = []
        versions: list[int] = []
        while len(log_probs) < len(tokens):
            known, rest = [*before, *tokens[: len(log_probs)]], tokens[len(log_probs) :]
            calls = (one for asked, one in self.calls if asked == known)
            made = [one for one in calls if one.token_ids and all(map(eq, one.token_ids, rest))]
            if not made:
                break
            longest = max(made, key=lambda one: len(one.token_ids))
            log_probs += longest.log_probs[: len(rest)]
            versions += token_versions(longest.spans)[: len(rest)]
        return log_probs, versions


def _params(params: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    known = {name: given[name] for name in ("temperature", "top_p", "top_k", "max_tokens") if name in given}
    known |= {"max_tokens": given["max_new_tokens"]} if "max_new_tokens" in given else {}
    known |= {"stop_token_ids": tuple(given["stop_token_ids"])} if given.get("stop_token_ids") else {}
    return replace(params, **known)
