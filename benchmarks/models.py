"""Tiny random models of every family of causal language models in transformers, through what a PPO run does with them.

    python benchmarks/models.py [KIND ...] [--parallel 2] [--write benchmarks/results/models.md]

A model of 2 to 4 layers is made from the family's own config with small sizes. Columns: greedy tokens of the native
engine against a pass over all tokens; log-probs of samples against the policy's in training; packed against padded
rows (— where the family reads padded rows); adapters (LoRA) in rollout against training, and merged in an export that
is loaded again; a critic trained for two steps, exported, loaded again here and by transformers alone; two ranks of
FSDP2 against one: outputs, gradients, and the export after an update; two steps of `valor ppo` with a critic, and the
second of them again, resumed from the first: equal metrics. "yes" is within 1e-5 (values: 1e-6).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from sharded_model import in_fork, sharded, within
from valor.cli import main as valor
from valor.config.engine import CriticModelConfig, ModelConfig
from valor.lab import arithmetic
from valor.lab.demo import ppo_overrides
from valor.models.export import export_hf
from valor.models.load import load_policy, load_value_model
from valor.models.policy import PolicyModel
from valor.rollout.base import Request, SamplingParams
from valor.rollout.native.engine import NativeEngine

TOKENIZER = arithmetic.make_tokenizer()
VOCAB = len(TOKENIZER)
# Given to a config where it has such a key.
SIZES = {
    **{"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 128},
    **{"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "d_model": 32, "n_heads": 4, "n_layers": 4},
    **{"intermediate_size": 48, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_seq_len": 128, "sliding_window": 8},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"topk_group": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "first_k_dense_replace": 1},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
    **{"chunk_size": 16, "mamba_chunk_size": 16, "state_size": 8, "conv_dim": 32, "block_dim": 32, "num_layers": 4},
    **{"hidden_size_per_layer_input": 4, "rotary_dim": 8, "vocab_size_per_layer_input": VOCAB},
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
# Of one family: its keys have other names, or its sizes hang together.
OWN: dict[str, dict[str, Any]] = {
    "doge": {"num_key_value_heads": 4},
    "longcat_flash": {"head_dim": 8, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "cwm": {"bos_token_id": 1},
    "modernbert-decoder": {"bos_token_id": 1},
    "mamba2": {"num_heads": 8},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "dots1": {"n_shared_experts": 1, "num_key_value_heads": 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2}, "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16}},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 8},
    "gemma3n_text": {"num_kv_shared_layers": 2, "num_hidden_layers": 10, "laurel_rank": 4},
    "zamba2": {
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
        **{"n_mamba_heads": 8, "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_headdim": 8},
        **{"num_query_groups": 4, "kv_channels": 8, "adapter_rank": 4, "mamba_d_state": 8},
    },
    "kimi_linear": {
        **{"layer_types": ["linear_attention", "full_attention"] * 2, "linear_head_dim": 8, "linear_num_heads": 4},
        **{"num_experts_per_token": 2, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    },
    "deepseek_v4": {
        **{"layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]},
        **{"num_hidden_layers": 3, "mlp_layer_types": ["hash_moe", "moe", "moe"], "index_n_heads": 2},
        **{"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
        **{"index_head_dim": 8, "index_topk": 4, "o_groups": 2, "o_lora_rank": 8, "head_dim": 16, "hc_mult": 2},
    },
}
# Not tried: BERT, XLNet and Doge, whose tokens read later ones; decoders beside an encoder, as BART's.
ENCODERS = {*MODEL_FOR_MASKED_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
ENCODERS |= {"bert-generation", "xlnet", "trocr", "doge"}
LARGEST = 3_000_000  # weights: a family that has more of them at these sizes has other keys
PLAIN = """
import sys, torch
from transformers import AutoModelForTokenClassification
for line in sys.stdin:
    folder, ids, out = line.split()
    try:
        model = AutoModelForTokenClassification.from_pretrained(folder, trust_remote_code=True).eval()
        torch.save(model(input_ids=torch.load(ids), use_cache=False).logits[0, :, 0], out)
        print("saved", flush=True)
    except Exception as error:
        print(type(error).__name__, str(error).partition(chr(10))[0], flush=True)
"""


@cache
def plain_transformers() -> subprocess.Popen[str]:
    """A process that never imports this library: it loads critics as lines on its input ask."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-c", PLAIN], text=True, **pipes)


def tiny_config(kind: str) -> Any:
    """The family's config with small sizes."""
    base = AutoConfig.for_model(kind)
    sizes = {**SIZES, **(LATENT if hasattr(base, "kv_lora_rank") else {})}
    if hasattr(base, "qk_rope_head_dim"):
        sizes.pop("head_dim")
    there = {*getattr(base, "attribute_map", {}), *base.to_dict()}
    return type(base)(**{key: value for key, value in sizes.items() if key in there} | OWN.get(kind, {}))


def rows() -> dict[str, torch.Tensor]:
    """Five rows; two begin alike, one has an empty response."""
    torch.manual_seed(1)
    prompts = torch.randint(3, VOCAB, (5, 6))
    prompts[3] = prompts[2]
    return {
        "prompts": prompts,
        "prompt_lengths": torch.tensor([6, 2, 5, 5, 1]),
        "responses": torch.randint(3, VOCAB, (5, 9)),
        "response_lengths": torch.tensor([4, 9, 7, 3, 0]),
    }


def generation(folder: str) -> Iterator[str]:
    """Two cells: greedy tokens, and log-probs of samples in rollout against training."""
    policy = load_policy(ModelConfig(path=folder, use_remove_padding=False, enable_gradient_checkpointing=False))
    for temperature in (0.0, 1.0):
        batch, log_probs = sampled(policy, temperature)
        with torch.no_grad():
            scored = policy(batch, with_hits=True)
        if temperature:
            yield within(scored["log_probs"], log_probs)
        else:
            yield "yes" if bool(scored["hits"].all()) else "NO"


def sampled(policy: PolicyModel, temperature: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Rows of three prompts with ten tokens of the native engine each, and its log-probs of them."""
    prompts = ([5, 9, 3, 4, 11], [7, 8, 9, 10, 12], [3, 4])
    params = SamplingParams(max_tokens=10, temperature=temperature)
    engine = NativeEngine(policy.hf, eos_token_ids=[])
    outputs = engine.generate([Request(str(i), ids, params, (i,)) for i, ids in enumerate(prompts)])
    batch = {
        "prompts": torch.tensor([[*ids, *[0] * (5 - len(ids))] for ids in prompts]),
        "prompt_lengths": torch.tensor([len(ids) for ids in prompts]),
        "responses": torch.tensor([output.token_ids for output in outputs]),
        "response_lengths": torch.tensor([10] * len(prompts)),
    }
    return batch, torch.tensor([output.log_probs for output in outputs])


def adapters(folder: str, out: Path) -> str:
    """LoRA with random adapters: rollout against training, and against the merged export."""
    keys = {"use_remove_padding": False, "enable_gradient_checkpointing": False}
    policy = load_policy(ModelConfig(path=folder, lora_rank=4, **keys))
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    batch, log_probs = sampled(policy, 1.0)
    export_hf(policy, out / "merged")
    with torch.no_grad():
        plain, tuned, merged = (
            model(batch)["log_probs"]
            for model in (
                load_policy(ModelConfig(path=folder, **keys)),
                policy,
                load_policy(ModelConfig(path=str(out / "merged"), **keys)),
            )
        )
    if torch.allclose(plain, tuned, atol=1e-4):
        return "NO: adapters change nothing"
    first = within(tuned, log_probs)
    return first if first != "yes" else within(tuned, merged)


def ppo(folder: str, out: Path) -> Iterator[str]:
    """Two cells: two steps of PPO, and the second again from the checkpoint of the first."""
    TOKENIZER.save_pretrained(folder)
    files = arithmetic.make_data(out / "data")
    run = out / "run"
    settings = [
        *ppo_overrides(Path(folder), files, run),
        *("data.train_batch_size=4", "data.val_files=null", "data.max_response_length=6"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=2"),
        *("trainer.total_training_steps=2", "trainer.critic_warmup=0", "trainer.save_freq=1", "trainer.test_freq=-1"),
        *("algorithm.reward_noise=1", "trainer.report=false", "actor_rollout_ref.rollout.n=1"),
    ]
    in_fork(lambda: valor(["ppo", *settings]), out / "ppo.log")
    first = last_step(run)
    if first["training/global_step"] != 2 or not first["actor/grad_norm"] > 0 or not first["critic/grad_norm"] > 0:
        yield "NO: nothing was learnt"
        return
    yield "yes"
    shutil.rmtree(run / "global_step_2")
    (run / "latest_checkpointed_iteration.txt").write_text("1")
    in_fork(lambda: valor(["ppo", *settings]), out / "ppo.log")
    again = last_step(run)
    yield "yes" if again == first else "NO: " + ", ".join(k for k in first if again.get(k) != first[k])[:90]


def last_step(run: Path) -> dict[str, float]:
    """Metrics of the last step, times and memory aside."""
    row = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return {
        key: value for key, value in row.items() if not key.startswith(("timing", "perf/")) and "seconds" not in key
    }


def packed(folder: str) -> str:
    """The largest difference of log-probs between packed and padded rows."""
    keys = {"path": folder, "enable_gradient_checkpointing": False}
    models = [load_policy(ModelConfig(**keys, use_remove_padding=packs)) for packs in (True, False)]
    if not models[0].packed:
        return "—"
    with torch.no_grad():
        one, other = (model(rows())["log_probs"] for model in models)
    return within(one, other)


def critic(folder: str, out: Path) -> Iterator[str]:
    """Two cells: values after two steps of training and an export, here and by transformers alone."""
    keys = {"value_head_init": "normal", "enable_gradient_checkpointing": False}  # some families have none
    value = load_value_model(CriticModelConfig(path=folder, **keys))
    optimizer = torch.optim.AdamW(value.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = (value(rows())["values"] - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    export_hf(value.eval(), out / "critic")
    again = load_value_model(CriticModelConfig(path=str(out / "critic"), enable_gradient_checkpointing=False)).eval()
    ids = rows()["prompts"][:1]
    with torch.no_grad():
        same = torch.allclose(again(rows())["values"], value(rows())["values"], rtol=0, atol=1e-6)
        expected = value.head(value.hf.base_model(input_ids=ids, use_cache=False).last_hidden_state)[0, :, 0]
    yield "yes" if same and losses[2] < losses[0] else f"NO: losses {losses}, same values after reloading: {same}"
    torch.save(ids, out / "ids.pt")
    process = plain_transformers()
    assert process.stdin and process.stdout
    print(out / "critic", out / "ids.pt", out / "z.pt", file=process.stdin, flush=True)
    if (answer := process.stdout.readline().strip()) != "saved":
        yield f"NO: {answer[:90]}"
        return
    yield within(torch.load(out / "z.pt"), expected)


def line(kind: str) -> list[str] | None:
    """The cells of a family; None: no tiny model of it can be made from these sizes."""
    try:
        config = tiny_config(kind)
        with torch.device("meta"):
            if sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()) > LARGEST:
                return None
    except Exception:  # each family's config refuses in its own way
        return None
    torch.manual_seed(0)
    cells = [kind]
    with tempfile.TemporaryDirectory() as name:
        folder, out = str(Path(name) / "policy"), Path(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        cells += attempt(lambda: generation(folder), 2)
        cells += attempt(lambda: iter([packed(folder)]), 1)
        cells += attempt(lambda: iter([adapters(folder, out)]), 1)
        cells += attempt(lambda: critic(folder, out), 2)
        cells += attempt(lambda: iter([sharded(folder, out, rows())]), 1)
        cells += attempt(lambda: ppo(folder, out), 2)
    return cells


def attempt(check: Callable[[], Iterator[str]], number: int) -> list[str]:
    """The cells of a check; where it fails, why, in each of its cells that is missing."""
    cells: list[str] = []
    try:
        for cell in check():
            cells.append(cell)
    except Exception as error:
        cells.append(f"NO: {type(error).__name__} {str(error).partition(chr(10))[0][:90]}")
    return [*cells, *["NO"] * (number - len(cells))]


HEAD = ["greedy", "rollout = training", "packed = padded", "LoRA", "critic", "critic by transformers alone"]
HEAD += ["FSDP2", "PPO, two steps", "resumed"]


def quiet_line(kind: str) -> list[str] | None:
    with contextlib.redirect_stderr(None):
        return line(kind)


def lines(kinds: Sequence[str], parallel: int) -> Iterator[list[str] | None]:
    """Of each family in turn, each in a process of its own."""
    with ProcessPoolExecutor(parallel, multiprocessing.get_context("fork"), max_tasks_per_child=None) as pool:
        for kind, cells in zip(kinds, pool.map(quiet_line, kinds), strict=True):
            print("| " + " | ".join(cells or [kind, "not made"]) + " |", flush=True)
            yield cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - ENCODERS))
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    made = dict(zip(arguments.kinds, lines(arguments.kinds, arguments.parallel), strict=True))
    unmade = [kind for kind, cells in made.items() if cells is None]
    rows = [cells for cells in made.values() if cells]
    green = sum({*cells[1:]} <= {"yes", "—"} for cells in rows)
    head = ["| family | " + " | ".join(HEAD) + " |", "|---" * (len(HEAD) + 1) + "|"]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    text = f"{green} of {len(rows)} families have every cell; {versions}. Not tried (other keys): {', '.join(unmade)}."
    print(text)
    if arguments.write:
        about = (__doc__ or "").split("\n\n")
        table = "\n".join([*head, *("| " + " | ".join(cells) + " |" for cells in rows)])
        arguments.write.write_text(f"# Families of models\n\n{about[0]}\n{about[2]}\n{text}\n\n{table}\n")


if __name__ == "__main__":
    main()
