"""A server that speaks as much of vLLM's protocol as rollouts use; what it does wrong is up to a test."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from json_http import JsonHandler
from valor.rollout.transfer import checksum

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -1.5]
DESCRIBED = {"dtype": "float32", "parts": 1, "weights": None, "ends_in_parts": False}


def tokenizer(text: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) for letter in text]}


class FakeServer:
    """Every next token has `LOGITS`; the one that is drawn is the seed modulo 6. Attributes are the test's to set."""

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = [{"id": "m", "max_model_len": 64}]
        self.mode = "processed_logprobs"
        self.described: dict[str, Any] | None = dict(DESCRIBED)
        self.with_tokens, self.encode = True, tokenizer
        self.replies: list[int] = []  # status of the next completions; then 200
        self.key: str | None = None
        self.breaks_off = 0  # of the next completions: they get no reply
        self.halves = 0  # of the next completions: they get half a reply
        self.pause = 0.0
        self.longest = 1000
        self.per_token = 0.0  # seconds; a request's tokens then come one after the other
        self.aborts = True  # whether it has /abort_requests
        self.aborted: set[str] = set()
        self.received: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": self.models}
        if path == "/v1/completions" and self.halves:
            self.halves -= 1
            return 200, b'{"choices": [{"token_ids"'
        if path == "/v1/completions":
            return self.complete(body)
        if path == "/abort_requests" and self.aborts:
            self.aborted |= {name.removeprefix("cmpl-").removesuffix("-0") for name in body["request_ids"]}
            return 200, {"status": "aborted"}
        if path == "/collective_rpc" and self.described is not None:
            return 200, {"results": [getattr(self, body["method"])(*body.get("args", []))]}
        return 404, {"detail": "Not Found"}

    def valor_describe(self) -> dict[str, Any]:
        return self.described or {}

    def valor_update(self, folder: str, name: str, version: int) -> dict[str, Any]:
        before = self.valor_describe().get("weights")
        files = [load_file(path) for path in sorted(Path(folder).glob("*.safetensors"))]
        self.received = {key: tensor for file in files for key, tensor in file.items()}
        self.described = {**self.valor_describe(), "weights": name}
        total = sum(int(checksum(tensor)) for tensor in self.received.values())
        return {"checksum": str(total), "before": before}

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.asked.append(body)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            status = self.replies.pop(0) if self.replies else 200
        time.sleep(self.pause)
        length = min(body["max_tokens"], self.longest)
        name, reason = body.get("request_id", ""), "length"
        for count in range(length if self.per_token else 0):
            time.sleep(self.per_token)
            if name in self.aborted:
                length, reason = count, "abort"
                break
        with self._lock:
            self.at_once -= 1
        if status != 200:
            return status, {"error": {"message": f"sorry, {status}"}}
        prompt = body["prompt"] if isinstance(body["prompt"], list) else self.encode(body["prompt"])["input_ids"]
        scale = body["temperature"] if self.mode.startswith("processed") and body["temperature"] else 1.0
        norm = 0.0 if self.mode.endswith("logits") else math.log(sum(math.exp(x / scale) for x in LOGITS))
        told = [x / scale - norm for x in LOGITS]
        if self.mode == "processed_logprobs" and body["top_k"] == 1:
            told = [0.0] * 6
        drawn = [(body.get("seed", 0) + i) % 6 for i in range(length)]
        tokens = [5 if one in body.get("stop_token_ids", ()) else one for one in drawn]
        choice: dict[str, Any] = {"finish_reason": reason}
        if self.with_tokens:
            choice |= {"token_ids": tokens, "prompt_token_ids": prompt}
        top = {f"token_id:{i}": x for i, x in enumerate(told[: body["logprobs"]])}
        choice["logprobs"] = {"token_logprobs": [told[t] for t in tokens], "top_logprobs": [top]}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}

    def _handler(self) -> type[JsonHandler]:
        fake = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                asked = self.request_json()
                refused = fake.key is not None and self.headers.get("Authorization") != f"Bearer {fake.key}"
                status, body = (401, {}) if refused else fake.answer(self.path, asked)
                if fake.breaks_off and self.path == "/v1/completions":
                    fake.breaks_off -= 1
                    self.close_connection = True
                    return
                with suppress(BrokenPipeError):  # nobody waits for it any more
                    self.reply(status, body)

        return Handler
