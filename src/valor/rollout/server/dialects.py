"""What servers are asked and how they answer: OpenAI's protocol as vLLM speaks it, and TensorRT-LLM's variant.

Shapes: docs/servers.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from valor.config import RolloutConfig
from valor.data.images import with_marks
from valor.rollout.base import SamplingParams
from valor.rollout.server.client import ServerClient, root
from valor.rollout.server.weights import WeightFiles

_TOKEN_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
_ROUNDING = 1e-3  # by which rounding may lift the log-prob of a certain token above 0


@dataclass(frozen=True, slots=True)
class Completion:
    """Request for up to `max_tokens` tokens after `prompt`; only a token of `stop_ids` or a stop text ends it earlier.

    name: of the request on the server. weights: name of the weights that the server holds, None before an update.
    images: those of the prompt (`valor.data.images.IMAGES`).
    """

    prompt: list[int]
    max_tokens: int
    params: SamplingParams
    seed: int
    stop_ids: list[int]
    name: str
    weights: str | None
    images: str = ""


class Reply(NamedTuple):
    """Answer to a completion. `prompt`: what the server has read, where it read images."""

    token_ids: list[int]
    log_probs: list[float]
    reason: str
    prompt: list[int] | None = None


def checked(reply: Reply, request: Completion, vocabulary: int | None) -> Reply:
    """The reply with finish reason "stop" where a stop token ends it, "length" where it is as long as it may be, and
    "lost" where a log-prob is not finite.

    ValueError, a predicate of the server, when training on the reply would be wrong.
    """
    ids, most, ends, stop = reply.token_ids, request.max_tokens, frozenset(request.stop_ids), request.params.stop
    foreign = [token for token in ids if type(token) is not int or not 0 <= token < (vocabulary or token + 1)]
    ended = bool(ids) and ids[-1] in ends
    text = [*request.prompt, *ids]
    stopped = ended or (stop is not None and any(stop.complete(text[: len(text) - i]) for i in range(len(ids))))
    faults = {
        f"gives {len(ids)} tokens with {len(reply.log_probs)} log-probs": len(ids) != len(reply.log_probs),
        f"ends a response for the reason '{reply.reason}'": reply.reason not in ("stop", "length", "abort"),
        f"gives the token {foreign[:1]}, which the policy does not have: is it the same model?": bool(foreign),
        "reads other tokens in a prompt with images than the policy: start it with the policy's model, and with "
        "data.mm_processor_kwargs as --mm-processor-kwargs": reply.prompt not in (None, request.prompt),
        f"gives {len(ids)} tokens where {most} were asked for": len(ids) > most,
        "gives log-probs above 0": any(log_prob > _ROUNDING for log_prob in reply.log_probs),
        "gives tokens behind a stop token": not ends.isdisjoint(ids[:-1]),
        f"says that a response has stopped, and leaves out the stop token (of {[*ends]}): have it return it": (
            reply.reason == "stop" and not stopped
        ),
        f"cut a response of up to {most} tokens at {len(ids)}: let it take responses as long as "
        "data.max_response_length (vLLM: --generation-config vllm)": reply.reason == "length"
        and len(ids) < most
        and not stopped,
    }
    if fault := next((text for text, present in faults.items() if present), None):
        raise ValueError(f"{fault}. Nothing can be learnt from that: docs/servers.md tells what a server has to do")
    if not all(map(math.isfinite, reply.log_probs)):
        return reply._replace(reason="lost")
    return reply._replace(reason="stop" if ended else "length" if len(ids) == most and not stopped else reply.reason)


class Dialect:
    """vLLM's: completions by token ids, `/abort_requests`, and `WeightReceiver` behind `/collective_rpc`."""

    def __init__(self, config: RolloutConfig) -> None:
        self._settings, self.client = config.server, ServerClient(config.server)

    def address(self, url: str) -> str:
        """Route of completions."""
        return f"{url}/completions"

    def health(self, url: str) -> str:
        """Route that answers as soon as the server runs."""
        return f"{url}/models"

    def body(self, request: Completion) -> dict[str, Any]:
        """JSON of a completion. Sets every sampling option: servers take defaults from the model's files."""
        params = request.params
        return {
            "model": self._settings.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stop_token_ids": request.stop_ids,
            "ignore_eos": True,  # stop_token_ids has the end-of-sequence tokens
            "include_stop_str_in_output": True,
            **({} if params.stop is None else {"stop": params.stop.texts}),
            **self._extensions(request),
        }

    def _extensions(self, request: Completion) -> dict[str, Any]:
        """Fields beyond OpenAI's protocol."""
        params = request.params
        cut = {"top_k": params.top_k if params.top_k > 0 else -1, "min_p": 0.0, "repetition_penalty": 1.0}
        # With the weights' name as salt, cached keys and values are found only by prompts of the same weights.
        salt = {} if request.weights is None else {"cache_salt": request.weights}
        return {**cut, "seed": request.seed, **_TOKEN_IDS, "logprobs": 0, "request_id": request.name, **salt}

    def read(self, reply: Any) -> Reply:
        """LookupError, TypeError or ValueError where the JSON has no token ids and log-probs."""
        choice = reply["choices"][0]
        log_probs = [math.nan if value is None else float(value) for value in choice["logprobs"]["token_logprobs"]]
        return Reply(list(choice["token_ids"]), log_probs, choice["finish_reason"])

    def prompt_tokens(self, reply: Any) -> int:
        """How many tokens the server read in the prompt."""
        return int(reply["usage"]["prompt_tokens"])

    def abort(self, url: str, name: str) -> tuple[str, dict[str, Any]] | None:
        """Route and JSON that end a request early; None: only closing the connection does."""
        return f"{root(url)}/abort_requests", {"request_ids": [f"cmpl-{name}-0"]}

    async def update(
        self, url: str, files: WeightFiles, name: str, version: int, leave: Callable[[], bool]
    ) -> list[dict[str, Any]]:
        """Replace the weights. For each worker `error`, or `checksum` or `digest` of its weights now."""
        return await self._rpc(url, "valor_update", files.folder, name, version, leave=leave)

    async def held_weights(self, url: str, **how: Any) -> list[str | None]:
        """Names of the weights in the server's workers; None: those that it was started with."""
        return [worker["weights"] for worker in await self._rpc(url, "valor_describe", **how)]

    async def sleep(self, url: str) -> None:
        """Release the memory of weights and cache, until an update or `wake`. Nothing where a server cannot."""

    async def wake(self, url: str) -> None:
        """Take the memory back, where no update did."""

    async def _rpc(self, url: str, method: str, *args: Any, **how: Any) -> list[dict[str, Any]]:
        """Result of a `WeightReceiver` method in each worker."""
        body = {"method": method, "args": args, "timeout": self.client.timeout}
        return (await self.client.request(f"{root(url)}/collective_rpc", body, **how))["results"]


class TokensAndImages(Dialect):
    """vLLM's `/inference/v1/generate`: token ids with images, whose marks the server replaces."""

    def address(self, url: str) -> str:
        return f"{root(url)}/inference/v1/generate"

    def body(self, request: Completion) -> dict[str, Any]:
        sampling = super().body(request)
        ids, uris = with_marks(request.prompt, request.images)
        beside = {name: sampling.pop(name) for name in ("model", "request_id", "cache_salt") if name in sampling}
        for name in ("prompt", *_TOKEN_IDS):
            del sampling[name]
        shown = {"content_parts": [{"type": "image_url", "url": uri} for uri in uris]} if uris else {}
        return {**beside, "token_ids": ids, **shown, "sampling_params": sampling, "return_token_ids": True}

    def read(self, reply: Any) -> Reply:
        choice = reply["choices"][0]
        log_probs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
        return Reply(list(choice["token_ids"]), log_probs, choice["finish_reason"], list(reply["prompt_token_ids"]))

    def abort(self, url: str, name: str) -> tuple[str, dict[str, Any]]:
        return f"{root(url)}/abort_requests", {"request_ids": [f"generate-tokens-{name}"]}

    async def update(
        self, url: str, files: WeightFiles, name: str, version: int, leave: Callable[[], bool]
    ) -> list[dict[str, Any]]:
        workers = await super().update(url, files, name, version, leave)
        # Features of images, which salts do not keep apart.
        await self.client.request(f"{root(url)}/reset_encoder_cache", {}, leave=leave)
        return workers


class TensorRTLLM(Dialect):
    """TensorRT-LLM's `trtllm-serve`, which takes no weights over HTTP."""

    def _extensions(self, request: Completion) -> dict[str, Any]:
        # A detokenized reply has no token ids.
        cut = {"top_k": max(request.params.top_k, 0), "seed": request.seed % 2**31}
        return {**cut, "logprobs": 1, "detokenize": False}

    def abort(self, url: str, name: str) -> None:
        return None
