"""What servers are asked and how they answer: vLLM's dialect of OpenAI's protocol, from which others differ."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from valor.config import RolloutConfig
from valor.rollout.base import SamplingParams
from valor.rollout.server.connection import Connection, root

AS_TOKENS = {"return_token_ids": True, "return_tokens_as_token_ids": True}

_ROUNDING = 1e-3  # by which the log-prob of a sure token may be above 0

Leave = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion: of `prompt`, by at most `max_tokens` tokens; those of `stop_ids` end it, and nothing else does.

    `name`: of the request. `weights`: of those that the server holds, if it was sent any.
    """

    prompt: list[int]
    max_tokens: int
    params: SamplingParams
    seed: int
    stop_ids: list[int]
    name: str
    weights: str | None


class Reply(NamedTuple):
    """A completion. `weights`: of each token the name of those that sampled it (None: what the server was started
    with), where a server tells them."""

    token_ids: list[int]
    log_probs: list[float]
    reason: str
    weights: Sequence[str | None] | None = None


def checked(reply: Reply, ask: Ask, vocabulary: int | None) -> Reply:
    """The reply, if it can be learnt from: with the finish reason "stop" where it ends with a stop token, and "lost"
    where it has a log-prob that is not finite. ValueError, in words that go on from the server's name: it cannot."""
    ids, most, ends, stop = reply.token_ids, ask.max_tokens, frozenset(ask.stop_ids), ask.params.stop
    counts = (len(ids), len(reply.log_probs), len(reply.weights or ids))
    foreign = [one for one in ids if type(one) is not int or not 0 <= one < (vocabulary or one + 1)]
    ended = bool(ids) and ids[-1] in ends
    known = [*ask.prompt, *ids]
    stopped = ended or (stop is not None and any(stop.complete(known[: len(known) - i]) for i in range(len(ids))))
    faults = {
        f"gives {counts[0]} tokens with {counts[1]} log-probs and {counts[2]} weights": len({*counts}) > 1,
        f"ends a response for the reason '{reply.reason}'": reply.reason not in ("stop", "length", "abort"),
        f"gives the token {foreign[:1]}, which the policy does not have: is it the same model?": bool(foreign),
        f"gives {len(ids)} tokens where {most} were asked for": len(ids) > most,
        "gives log-probs above 0": any(one > _ROUNDING for one in reply.log_probs),
        "gives tokens behind a stop token": not ends.isdisjoint(ids[:-1]),
        f"says that a response has stopped, and leaves out the stop token (of {[*ends]}): have it return it": (
            reply.reason == "stop" and not stopped
        ),
        f"cut a response of up to {most} tokens at {len(ids)}: let it take responses as long as "
        "data.max_response_length (vLLM: --generation-config vllm)": reply.reason == "length"
        and len(ids) < most
        and not stopped,
    }
    if fault := next((text for text, there in faults.items() if there), None):
        raise ValueError(f"{fault}. Nothing can be learnt from that: docs/servers.md tells what a server has to do")
    lost = not all(map(math.isfinite, reply.log_probs))
    return reply._replace(reason="lost" if lost else "stop" if ended and reply.reason == "length" else reply.reason)


class Written(NamedTuple):
    """Weights in files or, as `server.weight_updates` has it, in host memory, to be sent from `device`; the checksum of
    all of them, and of each tensor the first numbers, as float32."""

    folder: str
    buckets: list[list[tuple[str, Tensor]]]
    device: torch.device
    checksum: int
    beginnings: dict[str, list[float]]


class Dialect:
    """vLLM's: completions by token ids, `/abort_requests`, and `WeightReceiver` behind `/collective_rpc`.

    `tells_weights`: whether a reply names the weights that sampled each token; else its server is asked afterwards.
    """

    tells_weights = False

    def __init__(self, config: RolloutConfig) -> None:
        self._server, self.connection = config.server, Connection(config.server)

    def address(self, url: str) -> str:
        """Where completions are asked for."""
        return f"{url}/completions"

    def health(self, url: str) -> str:
        """What answers as soon as a server is there."""
        return f"{url}/models"

    def body(self, ask: Ask) -> dict[str, Any]:
        """All that decides about sampling is said: what is left out, servers take from the model's files."""
        params = ask.params
        return {
            "model": self._server.model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stop_token_ids": ask.stop_ids,
            "ignore_eos": True,  # all that ends a sequence is named above
            "include_stop_str_in_output": True,
            **({} if params.stop is None else {"stop": params.stop.texts}),
            **self._own_fields(ask),
        }

    def _own_fields(self, ask: Ask) -> dict[str, Any]:
        """What OpenAI's protocol leaves open."""
        cut = {"top_k": ask.params.top_k if ask.params.top_k > 0 else -1, "min_p": 0.0, "repetition_penalty": 1.0}
        # Cached keys and values are found only by prompts of the same weights.
        salt = {} if ask.weights is None else {"cache_salt": ask.weights}
        return {**cut, "seed": ask.seed, **AS_TOKENS, "logprobs": 0, "request_id": ask.name, **salt}

    def read(self, reply: Any) -> Reply:
        """LookupError, TypeError or ValueError where it is no completion with token ids and log-probs."""
        choice = reply["choices"][0]
        log_probs = [math.nan if one is None else float(one) for one in choice["logprobs"]["token_logprobs"]]
        return Reply(list(choice["token_ids"]), log_probs, choice["finish_reason"])

    def prompt_tokens(self, reply: Any) -> int:
        """How many tokens the server counts in the prompt of a completion."""
        return int(reply["usage"]["prompt_tokens"])

    def abort(self, url: str, name: str) -> tuple[str, dict[str, Any]] | None:
        """Where and how a request is ended early; None: by hanging up."""
        return f"{root(url)}/abort_requests", {"request_ids": [f"cmpl-{name}-0"]}

    async def update(self, url: str, files: Written, name: str, version: int, leave: Leave) -> list[dict[str, Any]]:
        """Replace a server's weights; of each of its workers `error`, or `before`, the name of those that it held,
        `sampled`, how many tokens each request under way had, and `checksum` or `digest` of what it holds now."""
        return await self._rpc(url, "valor_update", files.folder, name, version, leave=leave)

    async def held(self, url: str, **how: Any) -> list[str | None]:
        """The names of the weights in the workers of a server; None: what it was started with."""
        return [one["weights"] for one in await self._rpc(url, "valor_describe", **how)]

    async def sleep(self, url: str) -> None:
        """Give the memory of weights and cache back. An update wakes the server, or `wake`."""
        raise NotImplementedError(f"{type(self).__name__} has no sleep")

    async def wake(self, url: str) -> None:
        """Have the memory again, where no update comes; nothing where it was not given back."""

    async def _rpc(self, url: str, method: str, *args: Any, **how: Any) -> list[dict[str, Any]]:
        """What `WeightReceiver` answers in each of the server's workers."""
        body = {"method": method, "args": args, "timeout": self.connection.timeout}
        return (await self.connection.ask(f"{root(url)}/collective_rpc", body, **how))["results"]
