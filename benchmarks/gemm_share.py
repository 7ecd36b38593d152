#!/usr/bin/env python3
"""How much of an update is matrix products at the speed that the machine can give them.

    python benchmarks/gemm_share.py --model SMOLLM2_DIR                       # 8 prompts x 4 samples x 128 tokens, bf16
    python benchmarks/gemm_share.py --model DIR --dtype float32 --device cuda --rounds 5

The limit is the best of ten products of two 4096 x 4096 matrices, computed as layers do (`models/linear.py`). The
products of an update are counted, not estimated: forward and backward, with what rows share counted once. Share = their
operations / limit / seconds of the update (with the optimizer's step). Above 0.5, more than half of the time is spent
as well as it can be. Prints each round's share.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from valor.config.engine import FSDPConfig, ModelConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines import distributed
from valor.engines.fsdp.engine import build_fsdp
from valor.models import linear
from valor.models.load import load_policy
from valor.workers.memory import keep_freed_memory


def limit(dtype: torch.dtype, device: torch.device, size: int = 4096) -> float:
    """Operations a second."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        linear.product(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def engine_of(args: argparse.Namespace, device: torch.device) -> Any:
    model = ModelConfig(path=str(args.model), enable_gradient_checkpointing=False, use_remove_padding=True)
    section = argparse.Namespace(fsdp_config=FSDPConfig(dtype=args.dtype), optim=OptimConfig(lr=1e-6))
    return build_fsdp(section, model, partial(load_policy, model), device=device)


def batch_of(args: argparse.Namespace) -> Batch:
    """--n random answers to each of --prompts random prompts."""
    size = AutoConfig.from_pretrained(args.model).get_text_config().vocab_size
    rows = args.prompts * args.n
    prompts = torch.randint(size, (args.prompts, args.prompt)).repeat_interleave(args.n, 0)
    lengths = {"prompt_lengths": torch.full((rows,), args.prompt)}
    lengths["response_lengths"] = torch.full((rows,), args.response)
    return Batch({"prompts": prompts, "responses": torch.randint(size, (rows, args.response)), **lengths})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=88, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=120, help="tokens of an answer")
    parser.add_argument("--max-tokens", type=int, default=4096, help="token budget of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    keep_freed_memory()  # as ranks do
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = distributed.init_process_group(args.device)
    engine, batch = engine_of(args, device), batch_of(args)

    def loss(outputs: dict[str, Tensor], _: Batch) -> tuple[Tensor, dict[str, Any]]:
        return -outputs["log_probs"].sum() / batch["responses"].numel(), {}

    def update() -> float:
        began = time.perf_counter()
        engine.forward_backward(batch, loss, max_tokens=args.max_tokens)
        engine.optimizer_step()  # whose norm waits for the device
        return time.perf_counter() - began

    with FlopCounterMode(display=False) as counter:  # the first update, which is not timed
        update()
    operations = counter.get_total_flops()
    update()
    for _ in range(args.rounds):
        most, seconds = limit(getattr(torch, args.dtype), device), update()
        print(
            f"{operations / 1e12:.2f} T operations, limit {most / 1e9:,.0f} G a second, update {seconds:.2f} s: "
            f"share {operations / most / seconds:.2f}",
            flush=True,
        )
    distributed.leave_process_group()


if __name__ == "__main__":
    main()
