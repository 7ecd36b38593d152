"""Weak scaling of an update, and what it says to the other ranks: collectives by kind and dtype, bytes, seconds.

    python benchmarks/collectives.py --model SMOLLM2_DIR                     # 1 and 2 ranks over gloo, one thread each
    python benchmarks/collectives.py --model SMOLLM2_DIR --max-tokens 2048   # more micro-batches

Each rank has --rows rows of its own, whatever the number of ranks; their losses are those of a policy. Of five updates
the last three are measured, and their median is told: the first makes the optimizer's states, the second takes new
memory, beside them. Seconds of collectives are those that rank 0 spends in them in the last update, waiting for the
others included.

Weak scaling is told twice: against one process that has the machine for itself, and against as many processes as there
are ranks, each a run of its own at the same time. The second is what the machine itself lets be had: cores share its
memory and its power.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoConfig

from valor.config.engine import FSDPConfig, ModelConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines import distributed
from valor.engines.fsdp.engine import FSDPEngine
from valor.engines.fsdp.loading import built_once
from valor.models.load import load_policy
from valor.workers.memory import keep_freed_memory

KINDS = ("all_gather_single", "reduce_scatter_single", "all_reduce", "broadcast", "all_gather")
Said = dict[tuple[str, str], list[float]]
"""By kind and dtype: calls, bytes of this rank's own part, seconds."""


class Listener:
    """Counts the collectives of this process."""

    def __init__(self) -> None:
        self.said: Said = defaultdict(lambda: [0, 0, 0.0])
        for kind in KINDS:
            setattr(dist, kind, self._counted(kind, getattr(dist, kind)))

    def _counted(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            own = min(tensors, key=Tensor.numel) if tensors else torch.empty(0)
            began = time.perf_counter()
            work = function(*args, **kwargs)
            one = self.said[kind, str(own.dtype).removeprefix("torch.")]
            one[0] += 1
            one[1] += own.numel() * own.element_size()
            one[2] += time.perf_counter() - began
            return work if work is None else _Timed(work, one)

        return call


class _Timed:
    """A collective under way, whose waiting counts too."""

    def __init__(self, work: Any, one: list[float]) -> None:
        self._work, self._one = work, one

    def wait(self, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._work.wait(*args)
        finally:
            self._one[2] += time.perf_counter() - began

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def measure(rank: int, world: int, port: int, args: argparse.Namespace, out: Any) -> None:
    """One rank: rank 0 puts the update's seconds, its micro-batches, and what was said into `out`."""
    keep_freed_memory()  # as ranks do
    torch.set_num_threads(1)
    device = distributed.init_process_group("cpu", rank=rank, world_size=world, address="127.0.0.1", port=port)
    listener = Listener()
    model = ModelConfig(path=str(args.model), enable_gradient_checkpointing=False, use_remove_padding=True)
    policy = built_once(partial(load_policy, model), prepare=lambda: None)
    fsdp = FSDPConfig(dtype="bfloat16", reshard_after_forward=args.reshard)
    engine = FSDPEngine(policy, fsdp=fsdp, optim=OptimConfig(lr=1e-6), device=device)
    generator, passes = torch.Generator().manual_seed(rank), [0]
    size = AutoConfig.from_pretrained(args.model).get_text_config().vocab_size
    prompts = torch.randint(size, (args.rows, args.prompt), generator=generator)
    responses = torch.randint(size, (args.rows, args.response), generator=generator)
    lengths = {"prompt_lengths": torch.full((args.rows,), args.prompt)}
    lengths["response_lengths"] = torch.full((args.rows,), args.response)
    batch = Batch({"prompts": prompts, "responses": responses, **lengths})

    def loss(outputs: dict[str, Tensor], rows: Batch) -> tuple[Tensor, dict[str, Any]]:
        passes[0] += 1
        return -outputs["log_probs"].sum() / (args.rows * world * args.response), {}

    seconds: list[float] = []
    for _ in range(5):
        listener.said.clear()
        passes[0] = 0
        dist.barrier()
        began = time.perf_counter()
        engine.forward_backward(batch, loss, max_tokens=args.max_tokens)
        engine.optimizer_step()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        out.put((statistics.median(seconds[2:]), passes[0], dict(listener.said)))
    distributed.leave_process_group()


def run(world: int, args: argparse.Namespace) -> tuple[float, int, Said]:
    context = multiprocessing.get_context("spawn")
    out: SimpleQueue = context.SimpleQueue()  # type: ignore[assignment]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start: Any = mp.start_processes  # type: ignore[attr-defined]
    start(measure, (world, port, args, out), nprocs=world, start_method="spawn")
    return out.get()


def side_by_side(world: int, args: argparse.Namespace) -> float:
    """Seconds of an update in each of so many runs of one rank, which know nothing of each other."""
    with ThreadPoolExecutor(world) as runs:
        return statistics.mean(found[0] for found in runs.map(lambda _: run(1, args), range(world)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1, help="all forms by turns, so often; medians are printed")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=88)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--reshard", action="store_true", help="fsdp_config.reshard_after_forward=true, as on GPUs")
    args = parser.parse_args()
    found: dict[int, list[tuple[float, int, Said]]] = {world: [] for world in args.ranks}
    apart: dict[int, list[float]] = {world: [] for world in args.ranks}
    for _ in range(args.rounds):
        for world in args.ranks:
            found[world].append(run(world, args))
            apart[world].append(side_by_side(world, args) if world > 1 else found[world][-1][0])
    first = 0.0
    print("| ranks | micro-batches | seconds of an update | of runs side by side | weak scaling |", end="")
    print(" against side by side | collective | dtype | calls | MB | seconds |")
    print("|---:|---:|---:|---:|---:|---:|---|---|---:|---:|---:|")
    for world in args.ranks:
        seconds, passes, said = sorted(found[world], key=itemgetter(0))[args.rounds // 2]
        first, beside = first or seconds, statistics.median(apart[world])
        head = f"| {world} | {passes} | {seconds:.2f} | {beside:.2f} | {first / seconds:.2f} | {beside / seconds:.2f} |"
        for (kind, dtype), (calls, size, spent) in sorted(said.items()) or [(("", ""), (0, 0, 0.0))]:
            print(f"{head} {kind} | {dtype} | {calls:.0f} | {size / 1e6:,.1f} | {spent:.2f} |", flush=True)
            head = "| | | | | | |"


if __name__ == "__main__":
    main()
