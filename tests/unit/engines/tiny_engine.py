"""A tiny policy engine, a ragged batch, and the same numbers by plain torch."""

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from valor.config.engine import FSDPConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines.fsdp.engine import FSDPEngine
from valor.models.policy import PolicyModel

VOCAB = 61
CPU = torch.device("cpu")


def tiny_policy(seed: int = 0, **changes) -> PolicyModel:
    torch.manual_seed(seed)
    keys = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        **changes,
    }
    return PolicyModel(AutoModelForCausalLM.from_config(Qwen2Config(**keys)))


def tiny_engine(seed: int = 0, *, dtype: str = "float32", total_steps: int = 10, frozen: bool = False, **optim):
    config = None if frozen else OptimConfig(**{"lr": 1e-2, **optim})
    return FSDPEngine(
        tiny_policy(seed), fsdp=FSDPConfig(dtype=dtype), optim=config, device=CPU, total_steps=total_steps
    )


def ragged_batch(rows: int = 7, seed: int = 1) -> Batch:
    """Rows of different lengths; the third has an empty response. Row i is the same for every `rows` > i."""
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.tensor([6, 2, 3, 1, 4, 6, 5])[:rows]
    response_lengths = torch.tensor([4, 7, 0, 5, 7, 1, 3])[:rows]
    prompts = torch.randint(3, VOCAB, (7, 6), generator=generator)[:rows]
    responses = torch.randint(3, VOCAB, (7, 7), generator=generator)[:rows]
    advantages = torch.randn(7, 7, generator=generator)[:rows]
    mask = (torch.arange(7) < response_lengths[:, None]).float()
    return Batch(
        {
            "prompts": prompts,
            "prompt_lengths": prompt_lengths,
            "responses": responses,
            "response_lengths": response_lengths,
            "response_mask": mask,
            "advantages": advantages * mask,
        },
        {"uid": [str(i) for i in range(rows)]},
    )


def loss_fn(num_tokens: float):
    """Advantage-weighted likelihood over the global number of tokens, with metrics that add up."""

    def loss(outputs, micro):
        value = -(outputs["log_probs"] * micro["advantages"]).sum() / num_tokens
        return value, {"loss": value.detach(), "tokens": micro["response_mask"].sum(), "rows_max": float(len(micro))}

    return loss


def gradients(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor().clone() for n, p in engine.module.named_parameters() if p.grad is not None}


def weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor().clone() for n, p in engine.module.named_parameters()}
