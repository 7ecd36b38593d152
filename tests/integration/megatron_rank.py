"""One rank of a test of the Megatron engine: the same batch, losses and weights as FSDP2's, under any layout."""

from __future__ import annotations

import json
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_rank import CPU, SIZES, policy_loss, value_loss, whole_batch
from megatron.core import parallel_state
from megatron_cases import Case, Move
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen3Config,
    Qwen3MoeConfig,
)

import megatron_on_cpu  # noqa: F401  (before megatron-core looks for a GPU)
from valor.config.engine import FSDPConfig, MegatronConfig, OptimConfig
from valor.data.balance import partition_rows
from valor.engines.fsdp.engine import FSDPEngine
from valor.engines.megatron.engine import MegatronEngine
from valor.engines.megatron.layout import make_groups
from valor.models.policy import PolicyModel
from valor.models.reward import RewardModel
from valor.models.value import ValueModel

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 2}
MODELS: dict[str, Any] = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True, pad_token_id=5),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=False),
    "mixtral": MixtralConfig(**SIZES | {"intermediate_size": 48}, num_local_experts=4, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES | _EXPERTS, num_experts=4, norm_topk_prob=True, head_dim=8, tie_word_embeddings=False
    ),
}
MODELS["deep"] = Qwen2Config(**SIZES | {"num_hidden_layers": 4}, tie_word_embeddings=True)


def build(case: Case, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = deepcopy(MODELS[case.model])  # which saving writes to
    if case.critic:
        config.num_labels = 1
        hf: Any = Qwen2ForTokenClassification(config)
        torch.nn.init.normal_(hf.score.weight)
    elif case.reward:
        config.num_labels = 3
        hf = Qwen2ForSequenceClassification(config)
        torch.nn.init.normal_(hf.score.weight)
    else:
        hf = AutoModelForCausalLM.from_config(config)
    if case.dtype == "bfloat16":
        hf.bfloat16()  # both engines begin with weights that it can say
    if case.layout is None:
        hf.float()
    if case.checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    kind = ValueModel if case.critic else partial(RewardModel, label=1) if case.reward else PolicyModel
    module = kind(hf, packed=case.packed, shared=case.packed)
    optim = None if case.reward else OptimConfig(lr=1e-2, clip_grad=0.5)
    if case.layout is None:
        return FSDPEngine(module, fsdp=FSDPConfig(dtype=case.dtype), optim=optim, device=CPU, total_steps=9)
    if parallel_state.is_initialized() and not seed:  # an earlier case's
        parallel_state.destroy_model_parallel()
    megatron = MegatronConfig(dtype=case.dtype, **case.layout)
    make_groups(megatron, CPU)
    return MegatronEngine(module, megatron=megatron, optim=optim, device=CPU, total_steps=9)


def step(engine: Any, case: Case, share: Any, reference: Any = None) -> dict[str, float]:
    if case.critic:
        metrics = engine.forward_backward(share, value_loss, max_tokens=45, raw=True)
    else:
        options = {"max_tokens": 45, "temperature": 0.8, "with_entropy": True, "reference": reference}
        metrics = engine.forward_backward(share, whole_loss, **options)
    return {**metrics, **engine.optimizer_step()}


def whole_loss(outputs: dict[str, torch.Tensor], rows: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """PPO's clipped loss, with the exact KL where there is one."""
    loss, metrics = policy_loss(outputs, rows, kl=False)
    if "full_kl" in outputs:
        term = (outputs["full_kl"] * rows["response_mask"]).sum() / rows.meta["num_tokens"]
        loss, metrics = loss + 0.1 * term, {**metrics, "kl": term.detach()}
    return loss, metrics


def rows_of(engine: Any) -> list[int]:
    """This rank's share of the batch."""
    batch = whole_batch()
    lengths = (batch["prompt_lengths"] + batch["response_lengths"]).tolist()
    parts = (
        parallel_state.get_data_parallel_world_size() if isinstance(engine, MegatronEngine) else dist.get_world_size()
    )
    return partition_rows(lengths, parts)[engine.data_parallel_rank]


def run_case(case: Case, out: Path) -> None:
    """Outputs, three steps (FSDP2: five), and the weights before and after them go to files of this rank."""
    engine = build(case)
    rows = rows_of(engine)
    share = whole_batch().take(rows)
    evaluated = (
        {} if case.critic or case.reward else {"temperature": 0.8, "with_entropy": True, "with_sum_pi_squared": True}
    )
    weights = {"start": engine.state_dict()}
    with build(case, seed=1).reference() if case.exact_kl else nullcontext() as reference:
        if reference is not None:
            evaluated["reference"] = reference
        outputs = engine.forward(share, max_tokens=45, **evaluated)
        steps = [] if case.reward else [step(engine, case, share, reference) for _ in range(3)]
        weights["end"] = engine.state_dict()
        if case.layout is None and not case.reward:
            steps += [step(engine, case, share, reference) for _ in range(2)]
    rank = dist.get_rank()
    save_file({name: value.contiguous() for name, value in outputs.items()}, out / f"{case.name}.{rank}.outputs")
    if rank == 0:
        for when, tensors in weights.items():  # tied ones once
            kept = {name: tensors[name] for name, _ in engine.module.named_parameters()}
            save_file(kept, out / f"{case.name}.{when}")
    found = {"steps": steps, "rows": rows, "share": engine.data_parallel_rank}
    (out / f"{case.name}.{rank}.json").write_text(json.dumps(found))


def run_move(out: Path, move: Move) -> None:
    """What it has read it writes again, as a checkpoint and as an export; then a step, and both again."""
    engine, name = build(move.case), move.case.name
    if move.after is not None:
        engine.load(out / f"{move.after}.checkpoint")
        engine.save(out / f"{name}.again")
        engine.export(out / f"{name}.arrived")
    metrics = step(engine, move.case, whole_batch().take(rows_of(engine)))
    engine.save(out / f"{name}.checkpoint")
    engine.export(out / f"{name}.exported")
    if dist.get_rank() == 0:
        (out / f"{name}.move").write_text(json.dumps({**metrics, "version": engine.version}))


def run_all(out: Path, cases: list[Case], moves: list[Move]) -> None:
    """Those of the cases and moves that are for this number of ranks."""
    for case in cases:
        if case.world == dist.get_world_size():
            run_case(case, out)
    for move in moves:
        if move.case.world == dist.get_world_size():
            run_move(out, move)
