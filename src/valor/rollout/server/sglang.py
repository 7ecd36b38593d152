"""SGLang's protocol: `/generate`, weights from files, and memory released by tags.

Shapes: docs/servers.md.
"""

import logging
import re
from collections.abc import Callable
from itertools import islice
from typing import Any

from valor.config import RolloutConfig
from valor.errors import TrainingStopped
from valor.rollout.server.client import root
from valor.rollout.server.dialects import Completion, Dialect, Reply
from valor.rollout.server.weights import WeightFiles

MEMORY = ("weights", "kv_cache")
_NAME = re.compile(r"[0-9a-f]{32}-\d+")  # of weights that a run has sent
_READ_BACK = 64  # tensors of each update

logger = logging.getLogger(__name__)


class SGLang(Dialect):
    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        self._asleep: set[str] = set()

    def address(self, url: str) -> str:
        return f"{root(url)}/generate"

    def health(self, url: str) -> str:
        return f"{root(url)}/model_info"

    def body(self, request: Completion) -> dict[str, Any]:
        params = request.params
        return {
            "input_ids": request.prompt,
            "sampling_params": {
                "max_new_tokens": request.max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k if params.top_k > 0 else -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "stop": None if params.stop is None else list(params.stop.texts),
                "stop_token_ids": request.stop_ids,
                "ignore_eos": not request.stop_ids,  # true would ignore stop_token_ids too
                "no_stop_trim": True,
                "sampling_seed": request.seed % 2**31,
            },
            "return_logprob": True,
            "rid": request.name,
        }

    def read(self, reply: Any) -> Reply:
        info, ids = reply["meta_info"], list(reply["output_ids"])
        log_probs = info.get("output_token_logprobs") or []
        if [token for _, token, *_ in log_probs] != ids:
            raise ValueError(f"{len(ids)} tokens, and log-probs of {len(log_probs)} others")
        return Reply(ids, [float(log_prob) for log_prob, *_ in log_probs], info["finish_reason"]["type"])

    def prompt_tokens(self, reply: Any) -> int:
        return int(reply["meta_info"]["prompt_tokens"])

    def abort(self, url: str, name: str) -> tuple[str, dict[str, Any]]:
        return f"{root(url)}/abort_request", {"rid": name}

    async def update(
        self, url: str, files: WeightFiles, name: str, version: int, leave: Callable[[], bool]
    ) -> list[dict[str, Any]]:
        await self.wake(url, leave=leave)
        order = {"model_path": files.folder, "load_format": "safetensors", "weight_version": name}
        order |= {"flush_cache": True, "abort_all_requests": False}
        answer = await self._post(url, "update_weights_from_disk", order, leave=leave)
        problem = await self._problem(url, files, name, version) if answer["success"] else answer["message"]
        checker = await self._post(url, "weights_checker", {"action": "checksum"}, leave=leave)
        digest = f"{checker['per_engine_checksum']} of {len(checker['ranks'])} parts"
        return [{"digest": digest, "error": problem}]

    async def held_weights(self, url: str, **how: Any) -> list[str | None]:
        """A server starts with a name that is no update's."""
        name = (await self.client.request(self.health(url), **how))["weight_version"]
        return [name if _NAME.fullmatch(name) else None]

    async def sleep(self, url: str) -> None:
        await self._post(url, "release_memory_occupation", {"tags": MEMORY})
        self._asleep.add(url)

    async def wake(self, url: str, **how: Any) -> None:
        """The memory of the weights comes back empty: an update has to follow."""
        if url in self._asleep:
            await self._post(url, "resume_memory_occupation", {"tags": MEMORY}, **how)
            self._asleep.discard(url)

    async def _post(self, url: str, path: str, body: dict[str, Any] | None = None, **how: Any) -> Any:
        return await self.client.request(f"{root(url)}/{path}", body, **how)

    async def _problem(self, url: str, files: WeightFiles, name: str, version: int) -> str | None:
        """How the server's weights differ from those sent, by their name and the first values of some tensors."""
        if (present := await self.held_weights(url)) != [name]:
            return f"it says that it holds {present[0]}"
        names = list(files.first_values)
        start = version * _READ_BACK % len(names)
        for key in islice([*names[start:], *names[:start]], _READ_BACK):
            try:
                values = await self._post(url, "get_weights_by_name", {"name": key, "truncate_size": 1})
            except TrainingStopped as error:
                logger.info("weights cannot be read back, only their version is known: %s", error)
                return None
            while values and isinstance(values[0], list):
                values = values[0]
            sent = files.first_values[key][: len(values)]
            if values[: len(sent)] != sent:
                return f"{key} begins with {values[:1]} in it, {sent[:1]} was sent"
        return None
