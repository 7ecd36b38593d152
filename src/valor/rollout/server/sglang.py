"""SGLang's protocol: `/generate`, weights from files between a pause and its end, and memory given back by tags.

Shapes: docs/servers.md.
"""

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from valor.errors import TrainingStopped
from valor.rollout.server.connection import Away, root
from valor.rollout.server.dialects import Ask, Dialect, Leave, Reply, Written
from valor.rollout.server.transfers import broadcast, share

MEMORY = ("weights", "kv_cache")
_OURS = re.compile(r"[0-9a-f]{32}-\d+")
_READ_BACK = 64  # tensors of each update

logger = logging.getLogger(__name__)


class SGLang(Dialect):
    """A reply names the weights of every span of tokens, so no answer of other weights can pass as one of ours."""

    tells_weights = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._asleep: set[str] = set()
        self._unread = False  # whether it was said that this model's weights cannot be read back

    def address(self, url: str) -> str:
        return f"{root(url)}/generate"

    def health(self, url: str) -> str:
        return f"{root(url)}/model_info"

    def body(self, ask: Ask) -> dict[str, Any]:
        params = ask.params
        return {
            "input_ids": ask.prompt,
            "sampling_params": {
                "max_new_tokens": ask.max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k if params.top_k > 0 else -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "stop": None if params.stop is None else list(params.stop.texts),
                "stop_token_ids": ask.stop_ids,
                "ignore_eos": not ask.stop_ids,  # it would ignore these too
                "no_stop_trim": True,
                "sampling_seed": ask.seed % 2**31,
            },
            "return_logprob": True,
            "rid": ask.name,
            # Cached keys and values are found only by prompts of the same weights.
            **({} if ask.weights is None else {"extra_key": ask.weights}),
        }

    def read(self, reply: Any) -> Reply:
        told, ids = reply["meta_info"], list(reply["output_ids"])
        given = told.get("output_token_logprobs") or []
        if [one[1] for one in given] != ids:
            raise ValueError(f"{len(ids)} tokens, and log-probs of {len(given)} others")
        spans = [(_sent(span["version"]), span["end"] - span["start"]) for span in told["weight_versions"]]
        weights = [name for name, count in spans for _ in range(count)]
        return Reply(ids, [float(one[0]) for one in given], told["finish_reason"]["type"], weights)

    def prompt_tokens(self, reply: Any) -> int:
        return int(reply["meta_info"]["prompt_tokens"])

    def abort(self, url: str, name: str) -> tuple[str, dict[str, Any]]:
        return f"{root(url)}/abort_request", {"rid": name}

    async def update(self, url: str, files: Written, name: str, version: int, leave: Leave) -> list[dict[str, Any]]:
        (before,) = await self.held(url, leave=leave)
        # What is under way gives its cache back, and has it computed again by the new weights.
        await self._post(url, "pause_generation", {"mode": "retract"}, leave=leave)
        try:
            await self.wake(url, ["weights"], leave=leave)
            told = await self._send(url, files, name, leave)
            await self.wake(url, ["kv_cache"], leave=leave)
            problem = await self._problem(url, files, name, version) if told["success"] else told["message"]
            checked = await self._post(url, "weights_checker", {"action": "checksum"}, leave=leave)
        except (Away, TrainingStopped):
            with suppress(Away, TrainingStopped):
                await self._post(url, "continue_generation", {}, leave=lambda: True)
            raise
        await self._post(url, "continue_generation", {}, leave=leave)
        digest = f"{checked['per_engine_checksum']} of {len(checked['ranks'])} parts"
        return [{"before": before, "sampled": {}, "digest": digest, "error": problem}]

    async def _send(self, url: str, weights: Written, name: str, leave: Leave) -> Any:
        """The server's last answer."""
        post, way = partial(self._post, url, leave=leave), self._server.weight_updates
        if way == "filesystem":
            asked = {"model_path": weights.folder, "load_format": "safetensors", "weight_version": name}
            return await post("update_weights_from_disk", asked | {"flush_cache": True, "abort_all_requests": False})
        if way == "tensor":
            return await share(post, weights.buckets, name, weights.device)
        return await broadcast(post, url, weights.buckets, name, weights.device, self._server.timeout)

    async def held(self, url: str, **how: Any) -> list[str | None]:
        """An update's name, which no server is started with."""
        return [_sent((await self.connection.ask(self.health(url), **how))["weight_version"])]

    async def sleep(self, url: str) -> None:
        await self._post(url, "release_memory_occupation", {"tags": MEMORY}, pending=True)
        self._asleep.add(url)

    async def wake(self, url: str, tags: Sequence[str] = MEMORY, **how: Any) -> None:
        """Of its weights only the memory comes back: what fills it is an update."""
        if url in self._asleep:
            await self._post(url, "resume_memory_occupation", {"tags": tags}, **how)
            if "kv_cache" in tags:
                self._asleep.discard(url)

    async def _post(self, url: str, path: str, body: dict[str, Any] | None = None, **how: Any) -> Any:
        return await self.connection.ask(f"{root(url)}/{path}", body, **how)

    async def _problem(self, url: str, files: Written, name: str, version: int) -> str | None:
        """In what the server's weights differ from those sent: their name, or the first numbers of a tensor."""
        if (now := await self.held(url)) != [name]:
            return f"it says that it holds {now[0]}"
        names = list(files.beginnings)
        first = version * _READ_BACK % len(names)
        for key in islice([*names[first:], *names[:first]], _READ_BACK):
            try:
                told = await self._post(url, "get_weights_by_name", {"name": key, "truncate_size": 1})
            except TrainingStopped as error:
                if not self._unread:
                    logger.warning("weights cannot be read back, only their version is known: %s", error)
                self._unread = True
                return None
            while told and isinstance(told[0], list):
                told = told[0]
            sent = files.beginnings[key][: len(told)]
            if told[: len(sent)] != sent:
                return f"{key} begins with {told[:1]} in it, {sent[:1]} was sent"
        return None


def _sent(weights: str) -> str | None:
    """The name, if it is that of weights that a run has sent."""
    return weights if _OURS.fullmatch(weights) else None
