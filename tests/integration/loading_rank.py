"""One rank of a loading test: models of every kind, read by rank 0 alone; leaves what each rank had."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from valor.config.engine import CriticModelConfig, FSDPConfig, ModelConfig
from valor.engines.fsdp.engine import FSDPEngine
from valor.engines.fsdp.loading import built_once
from valor.errors import UserError
from valor.models.load import load_policy, load_sequence_classifier, load_value_model
from valor.models.reward import RewardModel

BF16 = torch.bfloat16


def make_models(root: Path, **sizes: Any) -> None:
    """A policy with tied weights in bfloat16 files, and one whose files are damaged."""
    torch.manual_seed(3)
    config = Qwen2Config(**sizes, tie_word_embeddings=True, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config).to(BF16)
    for name in ("policy", "damaged"):
        model.save_pretrained(root / name)
    (root / "damaged" / "model.safetensors").write_bytes(b"not a tensor file")


def loaders(root: Path) -> dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]]:
    """What is built, and how it is sharded, by name."""
    path = str(root / "policy")
    model, adapted = ModelConfig(path=path), ModelConfig(path=path, lora_rank=4)
    critic = CriticModelConfig(path=path, value_head_init="normal")
    return {
        "policy": (partial(load_policy, model), {}),
        "half": (partial(load_policy, model, dtype=BF16), {"model_dtype": "bfloat16", "fsdp_size": 2}),
        "lora": (partial(load_policy, adapted, dtype=BF16, seed=5), {}),
        "critic": (partial(load_value_model, critic, dtype=BF16, seed=5), {}),
        "reward": (lambda: RewardModel(load_sequence_classifier(model, new_head_seed=5)), {}),
        "no pickle": (partial(_with_a_lock, model), {}),
    }


def _with_a_lock(model: ModelConfig) -> nn.Module:
    """A policy that cannot be pickled."""
    policy = load_policy(model)
    policy.note = threading.Lock()  # type: ignore[assignment]
    return policy


def run_loading(root: Path, out: Path) -> None:
    """Files of this rank: whether parameters had values, structure and buffers, scores; rank 0's: the weights."""
    rank, found = dist.get_rank(), {}
    ids, lengths = torch.arange(12).view(2, 6) + 3, torch.tensor([6, 4])
    rows = {"prompts": ids, "prompt_lengths": lengths, "responses": ids, "response_lengths": lengths}
    for name, (build, fsdp) in loaders(root).items():
        module: Any = built_once(build, prepare=lambda: None)
        meta = {p.is_meta for p in module.parameters()}
        facts = (module.hf.config, getattr(module, "packed", 0), getattr(module, "logit_map", 0))
        adapters = getattr(module.hf, "adapter_record", None)
        engine = FSDPEngine(module, fsdp=FSDPConfig(dtype="float32", **fsdp), optim=None, device=torch.device("cpu"))
        with engine.unsharded(), torch.no_grad():
            outputs = module({key: value.clone() for key, value in rows.items()})
        weights = engine.state_dict()
        buffers = {f"buffer {key}": value for key, value in module.named_buffers()}
        save_file({**buffers, **outputs}, out / f"loaded {name}.{rank}")
        if rank == 0:
            save_file({key: value.clone() for key, value in weights.items()}, out / f"loaded {name}.weights")
        found[name] = {"meta": sorted(meta), "facts": [*map(str, facts), str(adapters)]}
    try:
        built_once(partial(load_policy, ModelConfig(path=str(root / "damaged"))), prepare=lambda: None)
    except UserError as error:
        found["damaged"] = str(error)
    (out / f"loaded.{rank}.json").write_text(json.dumps(found))
