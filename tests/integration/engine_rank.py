"""One rank of an engine test: builds actor and critic engines, takes a share of one batch, leaves what it found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loading_rank import run_loading
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen2Config, Qwen2ForTokenClassification

from valor import algorithms
from valor.config.engine import FSDPConfig, OptimConfig
from valor.data.balance import partition_rows
from valor.data.batch import Batch
from valor.engines.fsdp.engine import FSDPEngine
from valor.models.internals import checkpoint_layers
from valor.models.policy import PolicyModel
from valor.models.value import ValueModel

CPU = torch.device("cpu")
ROWS, PROMPT, WIDTH, VOCAB = 12, 14, 9, 61
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 50,
    "vocab_size": VOCAB,
}


@dataclass
class Case:
    """What one comparison does; `role` is actor (PPO's clipped loss), windows (one whose attention has windows and
    sinks), grpo (with a KL term) or critic."""

    role: str
    fsdp: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    packed: bool = False
    shared: int = 1  # ranks that compute a part of every row

    @property
    def name(self) -> str:
        return "-".join(str(v) for v in asdict(self).values())


def whole_batch() -> Batch:
    """Rows of very different lengths, one of them without a response, with all that the losses read; three of each
    prompt."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([4, 9, 0, 5, 7, 1, 3, 9, 2, 6, 8, 1])
    mask = (torch.arange(WIDTH) < lengths[:, None]).float()
    noise = {name: torch.randn(ROWS, WIDTH, generator=generator) * mask for name in ("a", "old", "ref", "v", "r")}
    return Batch(
        {
            "prompts": torch.randint(3, VOCAB, (ROWS // 3, PROMPT), generator=generator).repeat(3, 1),
            "prompt_lengths": torch.randint(1, PROMPT + 1, (ROWS // 3,), generator=generator).repeat(3),
            "responses": torch.randint(3, VOCAB, (ROWS, WIDTH), generator=generator),
            "response_lengths": lengths,
            "response_mask": mask,
            "advantages": noise["a"],
            "old_log_probs": -4.1 * mask + 0.2 * noise["old"],
            "ref_log_probs": -4.1 * mask + 0.2 * noise["ref"],
            "values": noise["v"],
            "returns": noise["r"],
        },
        meta={"num_tokens": float(mask.sum()), "num_sequences": float(mask.any(-1).sum())},
    )


def policy_loss(outputs: dict[str, torch.Tensor], rows: Batch, *, kl: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    mask, counts = rows["response_mask"], {name: rows.meta[name] for name in ("num_tokens", "num_sequences")}
    loss, metrics = algorithms.policy_loss(
        "vanilla",
        log_probs=outputs["log_probs"],
        old_log_probs=rows["old_log_probs"],
        advantages=rows["advantages"],
        response_mask=mask,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
        loss_agg_mode="token-mean",
        loss_scale_factor=None,
        **counts,
    )
    if kl:
        term = algorithms.kl_penalty(outputs["log_probs"], rows["ref_log_probs"], kind="low_var_kl")
        loss = loss + 0.1 * (term * mask).sum() / counts["num_tokens"]
    else:
        loss = loss - 0.01 * (outputs["entropy"] * mask).sum() / counts["num_tokens"]
    return loss, {**metrics, "loss": loss.detach(), "rows": float(len(rows))}


def value_loss(outputs: dict[str, torch.Tensor], rows: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    error = (outputs["head_outputs"] - rows["returns"]) ** 2 * rows["response_mask"]
    loss = error.sum() / rows.meta["num_tokens"]
    return loss, {"loss": loss.detach(), "rows": float(len(rows))}


def build(case: Case, **optim: Any) -> FSDPEngine:
    torch.manual_seed(0)
    if case.role == "critic":
        hf: Any = Qwen2ForTokenClassification(Qwen2Config(**SIZES, num_labels=1))
    elif case.role == "windows":
        kinds = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
        hf = AutoModelForCausalLM.from_config(GptOssConfig(**{**SIZES, **kinds, **experts}, rope_parameters=rope))
        for layer in hf.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    else:
        more = {"head_dim": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
        hf = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES, **more))
    if case.checkpointing:
        checkpoint_layers(hf)
    kind = ValueModel if case.role == "critic" else PolicyModel
    model = kind(hf, packed=case.packed, shared=case.packed)
    assert model.packed == model.shared == case.packed
    fsdp = FSDPConfig(**{"dtype": "float32", **case.fsdp})
    return FSDPEngine(
        model, fsdp=fsdp, optim=OptimConfig(lr=1e-2, **optim), device=CPU, total_steps=9, sequence_parallel=case.shared
    )


def run_case(case: Case, out: Path) -> None:
    """Outputs, then two steps; the first one's gradients and both steps' metrics go to files of this rank."""
    rank, batch = dist.get_rank(), whole_batch()
    lengths = (batch["prompt_lengths"] + batch["response_lengths"]).tolist()
    engine = build(case)
    rows = partition_rows(lengths, dist.get_world_size() // case.shared)[engine.data_parallel_rank]
    share = batch.take(rows)
    limits = {"max_tokens": 45}
    evaluated = {} if case.role == "critic" else {"temperature": 0.8, "with_entropy": True}
    outputs = engine.forward(share, **limits, **evaluated)
    engine.offload()
    engine.onload()
    steps, grads = [], {}
    for _ in range(2):
        if case.role == "critic":
            metrics = engine.forward_backward(share, value_loss, **limits, raw=True)
        else:
            loss = lambda o, r: policy_loss(o, r, kl=case.role == "grpo")  # noqa: E731
            metrics = engine.forward_backward(share, loss, **limits, temperature=0.8, with_entropy=case.role != "grpo")
        grads = grads or {n: p.grad.full_tensor().clone() for n, p in engine.module.named_parameters()}
        steps.append({**metrics, **engine.optimizer_step()})
    save_file({f"{name}": value.contiguous() for name, value in outputs.items()}, out / f"{case.name}.{rank}.outputs")
    if rank == 0:
        save_file(grads, out / f"{case.name}.grads")
    (out / f"{case.name}.{rank}.json").write_text(
        json.dumps({"steps": steps, "rows": rows, "share": engine.data_parallel_rank})
    )


def run_checkpoint(out: Path) -> None:
    """A step of one rank, saved, goes on here, and is saved again."""
    engine = build(Case("actor"))
    states = {}
    if dist.get_world_size() > 1:
        engine.load(out.parent / "1" / "checkpoint")
        states["arrived"] = whole_state(engine)
    engine.forward_backward(whole_batch(), lambda o, r: policy_loss(o, r, kl=False), with_entropy=True)
    engine.optimizer_step()
    engine.save(out / "checkpoint")
    states["saved"] = whole_state(engine)
    if dist.get_rank() == 0:
        for name, tensors in states.items():
            save_file(tensors, out / f"{name}.state")


def run_muon(out: Path) -> None:
    """What one update by Muon adds to the weights, of which each rank holds shards."""
    engine = build(Case("actor"), optimizer="Muon")
    rank, world = dist.get_rank(), dist.get_world_size()
    share = whole_batch().take([*range(rank, ROWS, world)])
    before = _weights(engine)
    engine.forward_backward(share, lambda o, r: policy_loss(o, r, kl=False), with_entropy=True)
    engine.optimizer_step()
    updates = {name: weight - before[name] for name, weight in _weights(engine).items()}
    if rank == 0:
        save_file(updates, out / "muon.updates")


def _weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    parameters = engine.module.named_parameters()
    return {name: p.full_tensor().detach().clone() for name, p in parameters if isinstance(p, DTensor)}


def whole_state(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's moments, gathered."""
    assert engine.optimizer is not None
    tensors = dict(engine.module.named_parameters())
    for name, parameter in engine.module.named_parameters():
        tensors |= {f"{name} {key}": value for key, value in engine.optimizer.state[parameter].items()}
    return {name: t.full_tensor().detach().clone() for name, t in tensors.items() if isinstance(t, DTensor)}


def run_all(out: Path, cases: list[Case], models: Path) -> None:
    """All cases, and the loading of `models`, on this rank; its files go to `out`."""
    out.mkdir(exist_ok=True)
    dist.barrier()
    for case in cases:
        run_case(case, out)
    run_loading(models, out)
    run_checkpoint(out)
    run_muon(out)
