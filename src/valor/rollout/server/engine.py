"""Generation by OpenAI-compatible servers that are running already: token ids there, token ids and log-probs back.

The servers live and die on their own, so every answer is taken with care: a broken connection is tried again for a
while, and after each batch the servers are asked whether they still hold the weights that they were sent. A vLLM
server takes weights from files (`valor.rollout.server.receiver` is its half); any other one keeps its own.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import httpx2
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from valor.config import RolloutConfig
from valor.config.rollout import ServerConfig
from valor.errors import TrainingStopped
from valor.rollout.base import Output, Request, RequestSource, RolloutEngine, Span, WeightMode
from valor.rollout.sampling import uniform_stream
from valor.rollout.transfer import buckets, checksum

AS_TOKENS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
CONNECT_SECONDS = 10.0
_POLL_SECONDS = 0.002  # between two looks for further requests
_PATIENCE = 30.0  # seconds for which a server may be away
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 4.0  # seconds between two attempts


class ServerEngine(RolloutEngine):
    """Generates by asking servers; see `valor.rollout.base.RolloutEngine`.

    Every rank of the process group sends its own requests, samples of a prompt and turns of an episode to one server.
    `sync_weights` is collective: rank 0 writes and sends, the others have a part in gathering. With
    `weight_updates=none` there is no sync, and `weights_version` stays None. TrainingStopped, with the address, when a
    server does not do its part.
    """

    parallel_size = 1

    def __init__(self, config: RolloutConfig, *, eos_token_ids: Sequence[int]) -> None:
        self.weight_mode: WeightMode = "fixed" if config.server.weight_updates == "none" else "copied"
        self.weights_version: int | None = None
        self.weights_checksum: int | None = None
        self._name: str | None = None  # of the weights that all servers hold
        self._config, self._server = config, config.server
        self._eos = frozenset(eos_token_ids)

    def serve(self, source: RequestSource) -> None:
        """Have the servers generate what `source` has until it has no more."""
        if self.weights_version is None and self.weight_mode == "copied":
            raise ValueError("the servers have no weights: sync_weights comes first")
        try:
            asyncio.run(self._serve(source))
        except* Exception as failed:
            raise failed.exceptions[0] from None

    def sync_weights(self, weights: Iterable[tuple[str, Tensor]] | None = None, *, version: int) -> None:
        """Replace the servers' weights in place, and have them forget what they computed with the old ones.

        `weights`: all parameters, whole, under their Hugging Face names. TrainingStopped unless every worker of every
        server then holds exactly what was sent.
        """
        if weights is None:
            raise ValueError("servers have weights of their own: they must be given the policy's")
        self.weights_version = self._name = None
        sent: list[Any] = [None]
        if dist.get_rank() == 0:
            sent = [self._send(weights, version)]
        else:
            for _ in weights:
                pass
        dist.broadcast_object_list(sent)  # nobody generates before the servers are ready
        self._name, self.weights_checksum = sent[0]
        self.weights_version = version

    def sleep(self) -> None:
        """The servers have devices of their own."""

    def close(self) -> None:
        """The servers are not ours to end."""

    # ---- inside

    async def _serve(self, source: RequestSource) -> None:
        urls = addresses(self._server)
        prompts: dict[tuple[int, ...], int] = {}
        episodes: dict[tuple[int, ...], str] = {}

        def server(request: Request) -> str:
            """Samples of one prompt go to one server, and so do all turns of an episode."""
            episode, turn = request.seed[:3], request.seed[3:]
            if not turn or episode not in episodes:
                episodes[episode] = urls[prompts.setdefault(tuple(request.prompt_ids), len(prompts)) % len(urls)]
            return episodes[episode]

        async def one(request: Request) -> None:
            url = server(request)
            reply = await self._post(client, f"{url}/completions", self._body(request))
            output = _output(request, url, reply, self.weights_version or 0)
            if request.on_finish is not None:
                request.on_finish(output)

        async with self._client() as client:
            async with asyncio.TaskGroup() as tasks:
                # Asked again and again, so that an error ends the loop though no further request may come.
                while (new := source.poll(wait=False)) is not None:
                    for request in new:
                        tasks.create_task(one(request))
                    await asyncio.sleep(_POLL_SECONDS)
            if self.weight_mode == "copied":
                await self._check_held(client)

    def _body(self, request: Request) -> dict[str, Any]:
        """All that decides about sampling is said: what is left out, servers take from the model's files."""
        params = request.params
        return {
            "model": self._server.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k if params.top_k > 0 else -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": int(uniform_stream(request.seed, 1)[0] * 2**53),
            "stop_token_ids": sorted({*params.stop_token_ids} | (set() if params.ignore_eos else self._eos)),
            "ignore_eos": True,  # all that ends a sequence is named above
            **AS_TOKENS,
            "logprobs": 0,
            **({} if params.stop is None else {"stop": params.stop.texts, "include_stop_str_in_output": True}),
        }

    def _client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers=headers(self._server),
            timeout=httpx2.Timeout(self._server.timeout, connect=CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(max_connections=self._config.max_num_seqs),
        )

    async def _post(self, client: httpx2.AsyncClient, url: str, body: dict[str, Any]) -> Any:
        """The reply; a server that is away, or too busy, is asked again for a while."""
        pause, end = _FIRST_PAUSE, None
        while True:
            try:
                reply = await client.post(url, json=body)
                if reply.status_code == 200:
                    return reply.json()
                refusal = f"status {reply.status_code}: {' '.join(reply.text.split())[:300]}"
                again = reply.status_code in (408, 429) or reply.status_code >= 500
            except httpx2.ReadTimeout:
                limit = self._server.timeout
                refusal, again = f"no answer within {limit:g} s (actor_rollout_ref.rollout.server.timeout)", False
            except httpx2.TransportError as error:
                refusal, again = f"{type(error).__name__}: {error}".rstrip(": "), True
            end = end or time.monotonic() + _PATIENCE
            if not again or time.monotonic() + pause > end:
                hint = ": start it again, and the same command goes on from the last checkpoint" if again else ""
                raise TrainingStopped(f"the rollout server at {url} failed: {refusal}{hint}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    # ---- weights

    def _send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> tuple[str, int]:
        """The name and the checksum under which all servers hold `weights` afterwards."""
        name = f"{uuid4().hex}-{version}"  # another run's, or none after a restart, would be noticed
        with TemporaryDirectory(prefix="valor-weights-", dir=self._server.weights_dir) as folder:
            limit = self._config.checkpoint_engine.update_weights_bucket_megabytes << 20
            total = torch.zeros((), dtype=torch.int64)  # wraps around, as all sums of bits here
            sent = buckets(weights, getattr(torch, self._config.dtype), torch.device("cpu"), limit)
            for number, bucket in enumerate(sent):
                tensors = {key: tensor.contiguous() for key, tensor in bucket}
                total += sum(map(checksum, tensors.values()))
                save_file(tensors, Path(folder) / f"{number:06}.safetensors")
            asyncio.run(self._update(folder, name, version, int(total)))
        return name, int(total)

    async def _update(self, folder: str, name: str, version: int, expected: int) -> None:
        async with self._client() as client:

            async def one(url: str) -> None:
                for held in await self._call(client, url, "valor_update", folder, name, version):
                    problem = held.get("error")
                    if problem is None and int(held["checksum"]) != expected:
                        problem = f"it holds {held['checksum']}, {expected} was sent"
                    if problem is not None:
                        raise TrainingStopped(f"the rollout server at {url} has not taken weights {version}: {problem}")
                await self._forget(client, url)

            await asyncio.gather(*map(one, addresses(self._server)))

    async def _forget(self, client: httpx2.AsyncClient, url: str) -> None:
        """Empty the prefix cache, whose keys and values are the old weights'."""
        end = time.monotonic() + _PATIENCE
        while not (await self._post(client, f"{root(url)}/reset_prefix_cache", {}))["success"]:
            if time.monotonic() > end:
                raise TrainingStopped(
                    f"the rollout server at {url} keeps cached prefixes, which belong to the old weights, for requests "
                    "that are not this run's: give it a server of its own"
                )
            await asyncio.sleep(_FIRST_PAUSE)

    async def _check_held(self, client: httpx2.AsyncClient) -> None:
        for url in addresses(self._server):
            if any(held["weights"] != self._name for held in await self._call(client, url, "valor_describe")):
                raise TrainingStopped(
                    f"the rollout server at {url} no longer holds the weights that this run sent: it was started "
                    "anew, or another run uses it; run the same command again to go on from the last checkpoint"
                )

    async def _call(self, client: httpx2.AsyncClient, url: str, method: str, *args: Any) -> list[dict[str, Any]]:
        """What `WeightReceiver` answers in each of the server's workers."""
        body = {"method": method, "args": args, "timeout": self._server.timeout}
        return (await self._post(client, f"{root(url)}/collective_rpc", body))["results"]


def addresses(config: ServerConfig) -> list[str]:
    """The servers' addresses without a slash at the end."""
    return [url.rstrip("/") for url in config.base_url]


def root(url: str) -> str:
    """Where a server has what is not OpenAI's protocol."""
    return url.removesuffix("/v1")


def headers(config: ServerConfig) -> dict[str, str]:
    """With the key, if there is one."""
    key = os.environ.get(config.api_key_env)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _output(request: Request, url: str, reply: Any, version: int) -> Output:
    try:
        choice = reply["choices"][0]
        tokens, given, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        log_probs = [math.nan if one is None else float(one) for one in given]
        if not tokens or len(tokens) != len(log_probs) or reason not in ("stop", "length", "abort"):
            raise ValueError(f"{len(tokens)} tokens, {len(log_probs)} log-probs, finish reason {reason}")
    except (LookupError, TypeError, ValueError) as error:
        raise TrainingStopped(
            f"the reply of the rollout server at {url} is no completion with token ids and log-probs: {error!r}"
        ) from None
    asked = request.params.max_tokens
    if reason == "length" and len(tokens) < asked:
        raise TrainingStopped(
            f"the rollout server at {url} cut a response of up to {asked} tokens at {len(tokens)}: let it take "
            "responses as long as data.max_response_length (vLLM: --generation-config vllm)"
        )
    return Output(request.request_id, tokens, log_probs, reason, (Span(len(tokens), version),))
