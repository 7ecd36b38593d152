"""Models and layouts in which the Megatron engine is compared with FSDP2."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass
class Case:
    """A model in a layout on `world` ranks; `critic`, or a frozen `reward` model, in place of a policy. No layout is
    FSDP2."""

    name: str
    world: int
    layout: dict[str, Any] | None
    model: str = "qwen2"
    critic: bool = False
    reward: bool = False
    dtype: str = "float32"
    packed: bool = True
    checkpointing: bool = False
    exact_kl: bool = False  # outputs and losses have the KL to a policy of another seed


@dataclass
class Move:
    """A step of a case from the checkpoint that the case named `after` has left, or from the start."""

    case: Case
    after: str | None = None


def sizes(tensor: int = 1, pipeline: int = 1, context: int = 1, **more) -> dict:
    names = {"tensor_model": tensor, "pipeline_model": pipeline, "context": context}
    return {f"{name}_parallel_size": size for name, size in names.items()} | more


ONE = [
    Case("one", 1, sizes()),
    Case("one-kl", 1, sizes(), exact_kl=True),
    Case("one-padded", 1, sizes(), packed=False),
    Case("one-recompute", 1, sizes(), checkpointing=True),
    Case("one-critic", 1, sizes(), critic=True),
    Case("one-reward", 1, sizes(), reward=True),
    Case("one-llama", 1, sizes(), "llama"),
    Case("one-qwen3", 1, sizes(), "qwen3"),
    Case("one-mixtral", 1, sizes(), "mixtral"),
    Case("one-moe", 1, sizes(), "qwen3_moe"),
]
TWO = [
    Case("tp2", 2, sizes(2)),
    Case("tp2-kl", 2, sizes(2), exact_kl=True),
    Case("tp2-critic", 2, sizes(2), critic=True),
    Case("tp2-reward", 2, sizes(2), reward=True),
    Case("tp2-qwen3", 2, sizes(2), "qwen3"),
    Case("pp2", 2, sizes(1, 2)),
    Case("pp2-critic", 2, sizes(1, 2), critic=True),
    Case("pp2-reward", 2, sizes(1, 2), reward=True),
    Case("pp2-llama", 2, sizes(1, 2), "llama"),
    Case("dp2", 2, sizes()),
    Case("dp2-critic", 2, sizes(), critic=True),
    Case("cp2", 2, sizes(1, 1, 2)),
    Case("ep2-moe", 2, sizes(expert_model_parallel_size=2), "qwen3_moe"),
    Case("tp2-moe", 2, sizes(2), "qwen3_moe"),
]
FOUR = [
    Case("tp2-pp2", 4, sizes(2, 2)),
    Case("tp2-pp2-critic", 4, sizes(2, 2), critic=True),
    Case("tp2-pp2-reward", 4, sizes(2, 2), reward=True),
    Case("tp2-dp2", 4, sizes(2)),
    Case("tp2-cp2", 4, sizes(2, 1, 2)),
]
CASES = ONE + TWO + FOUR
ROUNDED = [Case("one-bf16", 1, sizes(), dtype="bfloat16"), Case("tp2-bf16", 2, sizes(2), dtype="bfloat16")]


# A run that changes its engine and layout after every step, in the order of the worlds 1, 2, 4, 1.
MOVES = [
    Move(Case("m1-fsdp", 1, None)),
    Move(Case("m2-pp", 2, sizes(1, 2)), "m1-fsdp"),
    Move(Case("m3-dp", 2, sizes()), "m2-pp"),
    Move(Case("m4-tp-pp", 4, sizes(2, 2)), "m3-dp"),
    Move(Case("x1-tp", 2, sizes(2), "qwen3_moe")),
    Move(Case("x2-ep", 2, sizes(expert_model_parallel_size=2), "qwen3_moe"), "x1-tp"),
    Move(Case("c1-tp", 2, sizes(2), critic=True)),
    Move(Case("c2-dp", 2, sizes(), critic=True), "c1-tp"),
]
LAST = [
    Move(Case("m5-fsdp", 1, None), "m4-tp-pp"),
    Move(Case("x3-fsdp", 1, None, "qwen3_moe"), "x2-ep"),
    Move(Case("c3-one", 1, sizes(), critic=True), "c2-dp"),
]


def base_of(case: Case) -> Case:
    """FSDP2 on one process, for the same model."""
    name = f"fsdp-{case.model}-{case.critic}-{case.reward}-{case.packed}-{case.exact_kl}-{case.dtype}"
    return replace(case, name=name, world=1, layout=None, checkpointing=False)


def run_all(*arguments: Any) -> None:
    """On a rank, where alone megatron-core is imported."""
    from megatron_rank import run_all

    run_all(*arguments)
