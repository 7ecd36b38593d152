"""A server with a real tiny model behind the native engine, in the words of SGLang, TensorRT-LLM or, where the model
reads images, vLLM (docs/servers.md).

Its faults are a test's to set, by POST /faults.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from json_http import JsonHandler
from valor.config import ModelConfig
from valor.data.images import ImageFiles, with_images
from valor.models.internals import processor_without_video
from valor.models.load import load_policy
from valor.rollout.base import Abort, Output, Request, SamplingParams
from valor.rollout.native.engine import NativeCopy
from valor.rollout.transfer import checksum


@dataclass(eq=False)
class Pending:
    """A request that has no answer yet."""

    request: Request
    answer: Future[Output] = field(default_factory=Future)


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServedModel:
    """The model of `folder`. `kind`: sglang, trtllm or vllm."""

    everywhere = True
    max_requests, max_tokens = 64, 800

    def __init__(self, folder: str, kind: str, port: int) -> None:
        self.kind, self.names = kind, ["default"]
        self.faults: dict[str, Any] = {}
        self.log: list[str] = []
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        policy = load_policy(ModelConfig(path=folder))
        self.folder, self.hf = folder, policy.hf
        self.engine = NativeCopy(policy, eos_token_ids=[], max_num_seqs=64, images=kind == "vllm")
        self.images = _reader(folder, self.tokenizer) if kind == "vllm" else None
        self.tensors = dict(policy.hf.state_dict())
        self.engine.weights_version = 0
        self.pending: dict[str, Pending] = {}
        self.asleep = list[str]()
        self._todo: SimpleQueue[Request | Abort | Callable[[], None]] = SimpleQueue()
        self._changes: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def run(self) -> None:
        while True:
            self.engine.serve(self)
            while self._changes:
                self._changes.pop(0)()

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        found: list[Request | Abort] = []
        if self._changes:
            return None
        if not wait:
            time.sleep(self.faults.get("slow", 0.0))
        with suppress(Empty):
            one = self._todo.get(timeout=0.05 if wait else 0.0)
            while not callable(one):
                found.append(one)
                one = self._todo.get_nowait()
            self._changes.append(one)
        return found

    def in_engine(self, change: Callable[[], None]) -> None:
        """Between two calls of the engine."""
        done: Future[None] = Future()
        self._todo.put(lambda: done.set_result(change()))
        done.result(30)

    # ---- generation

    def generate(self, name: str, ids: list[int], params: SamplingParams, seed: int, images: str = "") -> Output:
        if self.asleep:
            raise Refused(400, "the memory is released")
        if self.faults.get("die") == "generate":
            os._exit(9)
        request = Request(name, ids, params, (seed,), lambda output: self._ended(name, output), images=images)
        with self._lock:
            one = self.pending[name] = Pending(request)
            self._todo.put(request)
        return one.answer.result()

    def _ended(self, name: str, output: Output) -> None:
        with self._lock:
            one = self.pending.pop(name)
        one.answer.set_result(output)

    def abort(self, name: str) -> None:
        with self._lock:
            if name in self.pending:
                self._todo.put(Abort(name))

    @property
    def busy(self) -> bool:
        return bool(self.pending)

    # ---- SGLang's routes

    def sglang(self, path: str, body: dict[str, Any]) -> Any:
        if path in ("/health", "/health_generate"):
            if self.faults.get("starting", 0) > 0:
                self.faults["starting"] -= 1
                raise Refused(503, "the server is starting")
            return None
        if path == "/model_info":
            return {"model_path": "m", "is_generation": True, "weight_version": self.faults.get("says", self.names[-1])}
        if path == "/generate":
            return self._generated(body)
        if path == "/abort_request":
            self.abort(body["rid"])
            return None
        if path == "/weights_checker":
            total = hashlib.sha256(b"".join(t.numpy().tobytes() for t in self.tensors.values())).hexdigest()
            return {
                "success": True,
                "message": "ok",
                "ranks": [{"per_gpu_checksum": total}],
                "per_engine_checksum": total,
            }
        if path == "/get_weights_by_name":
            if self.faults.get("unreadable"):
                raise Refused(400, "Get parameter by name failed")
            return self.tensors[body["name"]].float().tolist()[: body["truncate_size"]]
        if self.busy and "/update_weights" not in path:
            raise Refused(400, "Flush cache failed: there are pending requests")
        if path == "/flush_cache":
            return None
        if path == "/release_memory_occupation":
            self.asleep = [*body["tags"]]
            for tensor in self.tensors.values():
                tensor.zero_()
            return None
        if path == "/resume_memory_occupation":
            self.asleep = [tag for tag in self.asleep if tag not in body["tags"]]
            return None
        if path == "/update_weights_from_disk":
            return self._updated(body)
        raise Refused(404, "Not Found")

    def _generated(self, body: dict[str, Any]) -> dict[str, Any]:
        how = body["sampling_params"]
        assert body["return_logprob"] is True and how["min_p"] == 0 and how["repetition_penalty"] == 1
        assert how["ignore_eos"] == (not how["stop_token_ids"])
        params = SamplingParams(
            how["temperature"], how["top_k"], how["top_p"], how["max_new_tokens"], tuple(how["stop_token_ids"])
        )
        output = self.generate(body["rid"], body["input_ids"], params, how["sampling_seed"])
        matched = {"matched": output.token_ids[-1]} if output.finish_reason == "stop" else {}
        told = {"id": body["rid"], "finish_reason": {"type": output.finish_reason, **matched}}
        told |= {"prompt_tokens": len(body["input_ids"]), "completion_tokens": len(output.token_ids)}
        pairs = zip(output.log_probs, output.token_ids, strict=True)
        told["output_token_logprobs"] = [[log_prob, token, None] for log_prob, token in pairs]
        return {"text": "", "output_ids": output.token_ids, "meta_info": told}

    def _updated(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.faults.get("die") == "update":
            os._exit(9)
        if self.busy:
            raise Refused(400, "Cache flush failed after updating weights")
        assert "weights" not in self.asleep and body["flush_cache"] and not body["abort_all_requests"]
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        new = {name: t for file in files for name, t in load_file(file).items()}
        if not new:
            raise Refused(400, f"Failed to get weights iterator: {body['model_path']}")
        return self._replaced(body, new)

    def _replaced(self, body: dict[str, Any], new: dict[str, torch.Tensor]) -> dict[str, Any]:
        for name in list(new)[self.faults.get("torn", len(new)) :]:
            del new[name]
        number = len(self.names)
        if self.faults.get("stale"):  # it says that it has done it
            return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        if self.faults.get("fails"):
            raise Refused(400, "Failed to update weights: shape mismatch. Rolling back to original weights.")
        self.in_engine(lambda: self.engine.sync_weights(new.items(), version=number))
        self.names.append(body["weight_version"])
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    # ---- TensorRT-LLM's

    def trtllm(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "m", "object": "model"}]}
        if path == "/v1/completions":
            return self._completed(body)
        raise Refused(404, "Not Found")

    def _completed(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["model"] == "m" and body["ignore_eos"] and body["detokenize"] is False and body["logprobs"] == 1
        params = SamplingParams(
            body["temperature"], body["top_k"], body["top_p"], body["max_tokens"], tuple(body["stop_token_ids"])
        )
        name = os.urandom(8).hex()
        output = self.generate(name, body["prompt"], params, body["seed"])
        probs = {"token_logprobs": output.log_probs, "tokens": [str(token) for token in output.token_ids]}
        choice = {"index": 0, "text": "", "token_ids": output.token_ids, "logprobs": probs}
        choice |= {"finish_reason": output.finish_reason}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(output.token_ids)}
        return {"id": "cmpl-1", "choices": [choice], "usage": usage, "prompt_token_ids": body["prompt"]}

    # ---- vLLM's

    def vllm(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 512}]}
        if path == "/v1/completions":
            text = body["prompt"] if isinstance(body["prompt"], str) else None
            ids = self.tokenizer(text)["input_ids"] if text is not None else body["prompt"]
            output = self._sampled(body["request_id"], ids, body)
            probs = {"token_logprobs": output.log_probs}
            choice = {"token_ids": output.token_ids, "logprobs": probs, "prompt_token_ids": ids}
            choice |= {"finish_reason": output.finish_reason}
            return {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}
        if path == "/inference/v1/generate" and not self.faults.get("old"):
            return self._seen(body)
        if path == "/reset_encoder_cache":
            return None
        if path == "/collective_rpc":
            return {"results": [getattr(self, body["method"])(*body.get("args", []))]}
        raise Refused(404, "Not Found")

    def _seen(self, body: dict[str, Any]) -> dict[str, Any]:
        """Each image in the place that the prompt leaves for it, as vLLM's processor puts it there."""
        assert self.images is not None and body["return_token_ids"] and body["model"] == "m"
        place = self.tokenizer.convert_tokens_to_ids(self.images.processor.image_token)
        first, *others = _split(body["token_ids"], place)
        parts = []
        for part, following in zip(body.get("content_parts", []), others, strict=True):
            assert part["type"] == "image_url" and part["url"].startswith("data:image/")
            content = base64.b64decode(part["url"].partition(",")[2])
            parts.append((self.images.file_of(content, "an image"), following))
        ids, images = with_images(first, parts)
        output = self._sampled(body["request_id"], ids, body["sampling_params"], images)
        content = [
            {"token": f"token_id:{t}", "logprob": x} for t, x in zip(output.token_ids, output.log_probs, strict=True)
        ]
        choice = {"index": 0, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
        choice |= {"logprobs": {"content": content}}
        shown = ids[1:] if self.faults.get("other") else ids
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids)}, "prompt_token_ids": shown}

    def _sampled(self, name: str, ids: list[int], how: dict[str, Any], images: str = "") -> Output:
        assert how["ignore_eos"] and how["min_p"] == 0 and how["repetition_penalty"] == 1 and how["logprobs"] == 0
        ends = tuple(how["stop_token_ids"])
        params = SamplingParams(how["temperature"], how["top_k"], how["top_p"], how["max_tokens"], ends)
        return self.generate(name, ids, params, how["seed"], images)

    def valor_describe(self) -> dict[str, Any]:
        weights = self.names[-1] if len(self.names) > 1 else None
        return {"dtype": "float32", "parts": 1, "weights": weights, "ends_in_parts": False}

    def valor_update(self, folder: str, name: str, version: int) -> dict[str, Any]:
        files = [load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))]
        sent = {key: tensor for file in files for key, tensor in file.items()}
        with TemporaryDirectory() as made:  # the names are those of the checkpoint, as vLLM's loader has them
            shutil.copy(Path(self.folder, "config.json"), made)
            save_file(sent, Path(made, "model.safetensors"), {"format": "pt"})
            new = type(self.hf).from_pretrained(made, dtype="float32").state_dict()
        self.in_engine(lambda: self.engine.sync_weights(new.items(), version=version))
        self.names.append(name)
        return {"checksum": str(sum(int(checksum(tensor)) for tensor in sent.values()))}

    def _handler(self) -> type[JsonHandler]:
        model = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, body = 200, None
                try:
                    asked = json.loads(text or "{}")
                    model.log.append(self.path)
                    if self.path == "/faults":
                        model.faults = asked
                        body = model.log
                    else:
                        body = getattr(model, model.kind)(self.path, asked)
                except Refused as refused:
                    status, body = refused.status, {"error": {"message": str(refused)}}
                except (AssertionError, LookupError, TypeError, ValueError) as error:
                    status, body = 400, {"error": repr(error)}
                with suppress(BrokenPipeError, ConnectionResetError):  # nobody waits for it any more
                    self.reply(status, body)

        return Handler


def _reader(folder: str, tokenizer: Any) -> ImageFiles:
    config = AutoConfig.from_pretrained(folder)
    processor = processor_without_video(config).from_pretrained(folder, video_processor=None)
    processor.tokenizer = tokenizer
    return ImageFiles(processor, config.image_token_id, tempfile.mkdtemp(), {}, apart=True)


def _split(ids: list[int], place: int) -> list[list[int]]:
    pieces: list[list[int]] = [[]]
    for token in ids:
        if token == place:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


def main(folder: str, kind: str, port: str) -> None:
    torch.set_num_threads(1)
    ServedModel(folder, kind, int(port)).run()
