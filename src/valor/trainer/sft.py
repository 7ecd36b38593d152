"""Supervised fine-tuning: the policy learns the assistant's tokens of given chats, on the engine and batch of PPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from valor import algorithms
from valor.config import SFTConfig
from valor.data.batch import Batch
from valor.data.demonstrations import DemonstrationDataset
from valor.engines.sharding import DTYPES
from valor.models.load import load_policy, load_tokenizer
from valor.models.policy import PolicyModel
from valor.models.rows import compact_rows
from valor.models.token_log_probs import log_probs_from_logits
from valor.trainer.supervised import Samples, SupervisedRun
from valor.workers.dispatch import dispatch
from valor.workers.host import RoleSpec, WorkerContext
from valor.workers.model_role import ModelRole
from valor.workers.reduction import sum_over_ranks

ROLE = "actor"  # the policy's name in checkpoints and exports, as in a PPO run
_BLOCK_ELEMENTS = 2**24  # logits looked at together when hits are counted


class ImitatingPolicy(PolicyModel):
    """A policy that can also say at which response tokens it would have made the same choice greedily."""

    def __init__(self, policy: PolicyModel) -> None:
        nn.Module.__init__(self)
        self.hf, self.logit_map, self.packed = policy.hf, policy.logit_map, policy.packed

    def forward(self, rows: Mapping[str, Tensor], *, with_hits: bool = False, **options: Any) -> dict[str, Tensor]:
        """As PolicyModel; `with_hits` (no gradients) adds `hits` [b, T]: 1 where the token is the likeliest one."""
        if not with_hits:
            return super().forward(rows, **options)
        compact = compact_rows(rows)
        if self.logit_map is None:
            logits = compact.gather(self.hf(input_ids=compact.input_ids, use_cache=False).logits)
            blocks = [(logits, compact.targets)]
        else:
            states = compact.gather(self.hf.base_model(input_ids=compact.input_ids, use_cache=False).last_hidden_state)
            head = self.hf.get_output_embeddings()
            size = max(1, _BLOCK_ELEMENTS // len(head.weight))
            pairs = zip(states.split(size), compact.targets.split(size), strict=True)
            blocks = ((self.logit_map.apply_(head(s).float()), t) for s, t in pairs)
        found = [(log_probs_from_logits(logits, t)[0], (logits.argmax(-1) == t).float()) for logits, t in blocks]
        log_probs, hits = (torch.cat(parts) for parts in zip(*found, strict=True))
        return {"log_probs": compact.scatter(log_probs), "hits": compact.scatter(hits)}


class SFTWorker(ModelRole):
    """One rank of the policy under supervised training."""

    def __init__(self, context: WorkerContext, *, config: SFTConfig, total_steps: int) -> None:
        self._limits = {
            "max_tokens": config.data.max_token_len_per_gpu,
            "max_rows": config.data.micro_batch_size_per_gpu,
        }
        dtype = DTYPES[config.fsdp_config.model_dtype]
        super().__init__(
            context,
            config.model,
            lambda: ImitatingPolicy(load_policy(config.model, dtype=dtype, seed=config.trainer.seed)),
            fsdp=config.fsdp_config,
            optim=config.optim,
            checkpoint=config.checkpoint,
            total_steps=total_steps,
        )

    @dispatch("dp")
    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; `loss` is the mean over the tokens that count, over all ranks."""
        with self.on_device(optimizer=True) as engine:
            metrics = engine.forward_backward(batch, token_loss, **self._limits)
            return sum_over_ranks(metrics) | engine.optimizer_step()

    @dispatch("dp")
    def evaluate(self, batch: Batch) -> dict[str, float]:
        """`loss` and `token_accuracy` (greedy, given the demonstration so far), means over the tokens that count."""
        with self.on_device() as engine:
            out = engine.forward(batch, **self._limits, with_hits=True)
        mask, count = batch["response_mask"], batch.meta["num_tokens"]
        return sum_over_ranks(
            {
                "loss": float(-(out["log_probs"] * mask).sum() / count),
                "token_accuracy": float((out["hits"] * mask).sum() / count),
            }
        )


def token_loss(outputs: Mapping[str, Tensor], rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """These rows' share of -mean log-prob over the tokens that count in the whole batch."""
    loss = algorithms.aggregate_loss(
        -outputs["log_probs"], rows["response_mask"], mode="token-mean", denominator=rows.meta["num_tokens"]
    )
    return loss, {"loss": loss.detach()}


class SFTRun(SupervisedRun):
    """The policy learns demonstrations."""

    role = ROLE
    title = "supervised training"
    unit = "tokens"
    shown: ClassVar = {
        "train/loss": "loss",
        "train/lr": "lr",
        "val/loss": "val loss",
        "val/token_accuracy": "val accuracy",
    }
    config: SFTConfig

    def __init__(self, config: SFTConfig, command: str) -> None:
        model, data, seed = config.model, config.data, config.trainer.seed
        tokenizer = load_tokenizer(
            model.tokenizer_path or model.path,
            trust_remote_code=model.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
            require_chat_template=True,
        )
        train = DemonstrationDataset(data, tokenizer, "train", seed)
        val = DemonstrationDataset(data, tokenizer, "val", seed) if data.val_files else None
        super().__init__(config, command, tokenizer, train, val)

    def role_spec(self) -> RoleSpec:
        return RoleSpec(SFTWorker, {"config": self.config, "total_steps": self.total_steps})

    def measure(self, samples: Samples) -> dict[str, float]:
        """`loss` and `token_accuracy`."""
        return self.roles[ROLE].evaluate(samples.batch(range(len(samples))))
