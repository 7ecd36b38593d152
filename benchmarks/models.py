"""Tiny random models of every family of causal language models in transformers, through what a PPO run does with them.

    python benchmarks/models.py [KIND ...] [--write benchmarks/results/models.md]

A model of 2 to 4 layers is made from the family's own config with small sizes. Columns: greedy tokens of the native
engine against a pass over all tokens; log-probs of samples against the policy's in training; packed against padded
rows (— where the family reads padded rows); a critic trained for two steps, exported, loaded again here and by
transformers alone.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from valor.config.engine import CriticModelConfig, ModelConfig
from valor.models.export import export_hf
from valor.models.load import load_policy, load_value_model
from valor.rollout.base import Request, SamplingParams
from valor.rollout.native.engine import NativeEngine

VOCAB = 61
# Given to a config where it has such a key.
SIZES = {
    **{"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 128},
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
LARGEST = 3_000_000  # weights: a family that has more of them at these sizes has other keys
PLAIN = """
import sys, torch
from transformers import AutoModelForTokenClassification
model = AutoModelForTokenClassification.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
torch.save(model(input_ids=torch.load(sys.argv[2]), use_cache=False).logits[0, :, 0], sys.argv[3])
"""


def tiny_config(kind: str) -> Any:
    """The family's config with small sizes."""
    base = AutoConfig.for_model(kind)
    sizes = {**SIZES, **(LATENT if hasattr(base, "kv_lora_rank") else {})}
    if hasattr(base, "qk_rope_head_dim"):
        sizes.pop("head_dim")
    there = {*getattr(base, "attribute_map", {}), *base.to_dict()}
    return type(base)(**{key: value for key, value in sizes.items() if key in there})


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
    """Two cells: greedy tokens, and the largest difference of log-probs between rollout and training."""
    policy = load_policy(ModelConfig(path=folder, use_remove_padding=False, enable_gradient_checkpointing=False))
    prompts = ([5, 9, 23, 40, 11], [7, 8, 9, 10, 12], [3, 4])
    engine = NativeEngine(policy.hf, eos_token_ids=[])
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=10, temperature=temperature)
        outputs = engine.generate([Request(str(i), ids, params, (i,)) for i, ids in enumerate(prompts)])
        batch = {
            "prompts": torch.tensor([[*ids, *[0] * (5 - len(ids))] for ids in prompts]),
            "prompt_lengths": torch.tensor([len(ids) for ids in prompts]),
            "responses": torch.tensor([output.token_ids for output in outputs]),
            "response_lengths": torch.tensor([10] * len(prompts)),
        }
        with torch.no_grad():
            scored = policy(batch, with_hits=True)
        if temperature:
            gap = (scored["log_probs"] - torch.tensor([output.log_probs for output in outputs])).abs().max()
            yield f"{gap.item():.0e}" if gap > 1e-5 else "yes"
        else:
            yield "yes" if bool(scored["hits"].all()) else "NO"


def packed(folder: str) -> str:
    """The largest difference of log-probs between packed and padded rows."""
    keys = {"path": folder, "enable_gradient_checkpointing": False}
    models = [load_policy(ModelConfig(**keys, use_remove_padding=packs)) for packs in (True, False)]
    if not models[0].packed:
        return "—"
    with torch.no_grad():
        one, other = (model(rows())["log_probs"] for model in models)
    gap = (one - other).abs().max().item()
    return "yes" if gap <= 1e-5 else f"{gap:.0e}"


def critic(folder: str, out: Path) -> Iterator[str]:
    """Two cells: values after two steps of training and an export, here and by transformers alone."""
    value = load_value_model(CriticModelConfig(path=folder, value_head_init="normal"))
    optimizer = torch.optim.AdamW(value.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = (value(rows())["values"] - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    export_hf(value.eval(), out / "critic")
    again = load_value_model(CriticModelConfig(path=str(out / "critic"))).eval()
    ids = rows()["prompts"][:1]
    with torch.no_grad():
        same = torch.allclose(again(rows())["values"], value(rows())["values"], rtol=0, atol=1e-6)
        expected = value.head(value.hf.base_model(input_ids=ids, use_cache=False).last_hidden_state)[0, :, 0]
    yield "yes" if same and losses[2] < losses[0] else f"NO: losses {losses}, same values after reloading: {same}"
    torch.save(ids, out / "ids.pt")
    subprocess.run(
        [sys.executable, "-c", PLAIN, str(out / "critic"), str(out / "ids.pt"), str(out / "z.pt")],
        check=True, capture_output=True,
    )  # fmt: skip
    gap = (torch.load(out / "z.pt") - expected).abs().max().item()
    yield "yes" if gap <= 1e-5 else f"{gap:.0e}"


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
        folder = str(Path(name) / "policy")
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for number, check in ((2, lambda: generation(folder)), (1, lambda: [packed(folder)])):
            cells += attempt(check, number)
        cells += attempt(lambda: critic(folder, Path(name)), 2)
    return cells


def attempt(check: Any, number: int) -> list[str]:
    """The cells of a check; where it fails, why, in each of its cells that is missing."""
    cells: list[str] = []
    try:
        for cell in check():
            cells.append(cell)
    except subprocess.CalledProcessError as error:
        cells.append("NO: " + error.stderr.decode().strip().splitlines()[-1][:90])
    except Exception as error:
        cells.append(f"NO: {type(error).__name__} {str(error).partition(chr(10))[0][:90]}")
    return [*cells, *["NO"] * (number - len(cells))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    head = ["family", "greedy", "rollout = training", "packed = padded", "critic", "critic by transformers alone"]
    table, unmade = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"], []
    for kind in arguments.kinds:
        with contextlib.redirect_stderr(None):
            cells = line(kind)
        if cells is None:
            unmade.append(kind)
            continue
        table.append("| " + " | ".join(cells) + " |")
        print(table[-1], flush=True)
    made = table[2:]
    green = sum("NO" not in row and "e-" not in row and "e+" not in row for row in made)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    text = f"{green} of {len(made)} families have every cell; {versions}. Not tried (other keys): {', '.join(unmade)}."
    print(text)
    if arguments.write:
        intro = (__doc__ or "").partition("\n\n")
        arguments.write.write_text(f"# Families of models\n\n{intro[0]}\n\n{text}\n\n" + "\n".join(table) + "\n")


if __name__ == "__main__":
    main()
