"""Agent loops in verl's shape: a class derived from `AgentLoopBase`, whose `run` returns tokens and their mask.

Shapes of volcengine/verl, verl/experimental/agent_loop/agent_loop.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from typing import Any, TypeVar

from valor.agents.episode import Episode, Turn, turns_of
from valor.agents.loops import AgentLoop, Generate, LoopContext, Task, register_loop
from valor.errors import UserError
from valor.rollout.base import Output, SamplingParams, StopTexts, token_versions

Loop = TypeVar("Loop", bound=type)

_CHANGED = ("temperature", "top_p", "top_k", "max_tokens", "ignore_eos")
_NEUTRAL = {"n": 1, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "min_p": 0, "min_tokens": 0}
_UNREAD = ("logprobs", "return_logprob", "seed", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
"""Which of a call's sampling_params are read, the only values of others, and those without a part in the tokens."""


@dataclass
class TokenOutput:
    """What `server_manager.generate` returns."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str


@dataclass
class AgentLoopOutput:
    """An episode, or a row of one: `response_mask` is 1 on the policy's tokens.

    `response_logprobs` may be left out where these are what `generate` returned behind the tokens before them.
    `reward_score`: the score of the episode; None leaves it to the graders.
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

    shows_images = False

    def __init__(self, context: LoopContext, *, cls: type, options: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._cls, self._options = cls, options
        self._stop_texts = cache(lambda *texts: self.chat.stop_texts(*texts))  # looks at the whole vocabulary

    async def run(self, task: Task, generate: Generate) -> Episode:
        server = _ServerManager(task, generate, self.context.limits.model, self._stop_texts)
        loop = self._cls(
            trainer_config=self.context.config,
            server_manager=server,
            tokenizer=self.chat.tokenizer,
            processor=None,
            **self._options,
        )
        params = task.params
        sampling = {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
        row = {**task.row["extra_info"], **task.row, "raw_prompt": task.row["messages"]}
        returned = await loop.run(sampling, **row)
        outputs: list[Any] = returned if isinstance(returned, list) else [returned]
        limits = self.context.limits
        for output in outputs:
            room = min(limits.response, limits.model - len(output.prompt_ids))
            if (size := len(output.response_ids)) > room:
                raise ValueError(
                    f"run() returned {size} response_ids, and data.max_response_length={limits.response} and "
                    f"rollout.max_model_len={limits.model} leave {room} of this row: cut them, and what goes with them"
                )
        turns = [turn for i, output in enumerate(outputs) for turn in server.turns(output, new_row=i > 0)]
        last = outputs[-1]
        reason = server.calls[-1][1].finish_reason if server.calls else "stop"
        info = {"metrics": last.metrics, **(last.extra_fields or {})}
        return Episode(task.key, tuple(turns), reason, outputs[0].prompt_ids, last.reward_score, info)


class _ServerManager:
    """Generates for a loop. `calls`: the prompts and outputs, from which log-probs of returned tokens are read."""

    def __init__(self, task: Task, generate: Generate, max_tokens: int, stop_texts: Callable[..., StopTexts]) -> None:
        self._task, self._generate, self._max_tokens, self._count = task, generate, max_tokens, 0
        self._stop_texts = stop_texts
        self.calls: list[tuple[list[int], Output]] = []

    async def generate(
        self, request_id: str = "", *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """The tokens that follow `prompt_ids`. ValueError: these leave no room for any. UserError: something else is
        asked for that has no place here."""
        if asked := [name for name in ("image_data", "video_data", "audio_data") if kwargs.get(name)]:
            raise UserError(f"a loop calls generate with {asked[0]}, and loops of verl's AgentLoopBase play texts")
        room, size = self._max_tokens - len(prompt_ids), len(prompt_ids)
        if room < 1:
            raise ValueError(f"a prompt of {size} tokens leaves no room (rollout.max_model_len={self._max_tokens})")
        params = _params(self._task.params, sampling_params, self._stop_texts)
        params = replace(params, max_tokens=min(params.max_tokens, room))
        seed = (*self._task.key, self._count) if self._count else self._task.key
        self._count += 1
        output = await self._generate(prompt_ids, params, seed)
        self.calls.append((list(prompt_ids), output))
        return TokenOutput(output.token_ids, output.log_probs, output.finish_reason)

    def turns(self, output: AgentLoopOutput, *, new_row: bool) -> list[Turn]:
        """The turns of a row. ValueError: lengths differ, or log-probs of policy tokens are unknown."""
        ids, mask, log_probs = output.response_ids, output.response_mask, output.response_logprobs
        if len(mask) != len(ids) or (log_probs is not None and len(log_probs) != len(ids)):
            raise ValueError("response_ids, response_mask and response_logprobs differ in length")
        sampled = self._sampled([*output.prompt_ids, *ids])[len(output.prompt_ids) :]
        version = next((span.weights_version for _, out in reversed(self.calls) for span in reversed(out.spans)), 0)
        numbers = [int(is_policy == 1) for is_policy in mask]
        if log_probs is None and any(number and not fact for number, fact in zip(numbers, sampled, strict=True)):
            raise ValueError("own tokens that no call of generate returned there need response_logprobs")
        facts = [fact or (0.0, version) for fact in sampled]
        log_probs = [log_prob for log_prob, _ in facts] if log_probs is None else [*log_probs]
        prompt = output.prompt_ids if new_row else None
        return turns_of([*ids], numbers, log_probs, [version for _, version in facts], [0.0] * len(ids), prompt)

    def _sampled(self, row: list[int]) -> list[tuple[float, int] | None]:
        """Log-prob and weights version of each token of a row; None where no call sampled it behind those before it."""
        facts: list[tuple[float, int] | None] = [None] * len(row)
        for prompt, output in self.calls:
            tokens = [*prompt, *output.token_ids]
            agreeing = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(row, tokens, strict=False)))
            pairs = zip(output.log_probs, token_versions(output.spans), strict=True)
            facts[len(prompt) : agreeing] = [*pairs][: max(agreeing - len(prompt), 0)]
        return facts


def _params(params: SamplingParams, changes: Mapping[str, Any], stop_texts: Callable[..., StopTexts]) -> SamplingParams:
    changes = {name: value for name, value in changes.items() if value is not None}
    known = {name: changes.pop(name) for name in _CHANGED if name in changes}
    if "max_new_tokens" in changes:
        known["max_tokens"] = changes.pop("max_new_tokens")
    if "stop_token_ids" in changes:
        known["stop_token_ids"] = tuple(changes.pop("stop_token_ids"))
    texts = changes.get("stop", [])
    texts = [texts] if isinstance(texts, str) else texts
    if all(isinstance(text, str) and text for text in texts):
        changes.pop("stop", None)
        known |= {"stop": stop_texts(*texts)} if texts else {}
    if wrong := [name for name, value in changes.items() if name not in _UNREAD and value != _NEUTRAL.get(name)]:
        setting = f"{wrong[0]}={changes[wrong[0]]!r}"
        raise UserError(f"a loop calls generate with sampling_params: {setting}, which is not supported: drop it")
    return replace(params, **known)
