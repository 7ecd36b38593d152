"""The policy: log-probs of given responses and the PPO-style update, one optimizer step a call."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from valor import algorithms
from valor.algorithms import load_custom
from valor.config import ActorConfig, PPOConfig
from valor.config.distillation import DistillationLossConfig
from valor.data.batch import Batch
from valor.data.sampler import keyed_generator
from valor.models.load import load_policy
from valor.models.policy import PolicyModel, Reference
from valor.models.routing import ROUTES
from valor.models.rows import ROW_FIELDS, model_rows
from valor.models.states import StateProjection
from valor.models.token_log_probs import Divergence
from valor.rollout.registry import GENERATION_ENGINES
from valor.rollout.transfer import TIMEOUT, WeightChannel
from valor.tracking.metrics import reduce_metrics
from valor.workers.dispatch import Dispatch
from valor.workers.host import RunFacts, WorkerContext
from valor.workers.model_role import ModelRole

Address = tuple[str, int]


class ActorWorker(ModelRole):
    """One rank of the actor. Its weights also go to a rollout that has a pool of its own."""

    def __init__(self, context: WorkerContext, *, config: PPOConfig, facts: RunFacts) -> None:
        load_custom(config.algorithm.custom_path)
        shared, self.loss_mode, self.seed = config.actor_rollout_ref, config.policy_loss, config.trainer.seed
        actor, rollout = self.config, self._rollout = shared.actor, shared.rollout
        self.distillation, self._teachers_weight = config.distillation, 1.0
        self._generator = keyed_generator(self.seed)  # of losses that draw; a new one for each update
        self._log_prob_limits = {"max_tokens": rollout.log_prob_max_token_len_per_gpu, "max_rows": rollout.max_rows}
        self._store: TCPStore | None = None
        self._channel: WeightChannel | None = None

        def load(**options: Any) -> PolicyModel:
            frozen = actor.freeze_vision_tower
            policy = load_policy(shared.model, seed=self.seed, frozen_vision=frozen, **options)
            if actor.router_replay.mode == "R3":
                policy.replay_experts()
            return policy

        super().__init__(context, actor, shared.model, load, total_steps=facts.learning_steps)

    @Dispatch("dp", reads=(*ROW_FIELDS, ROUTES), stays=("old_log_probs", "entropy", "sum_pi_squared", "full_kl"))
    def compute_log_probs(
        self, batch: Batch, *, with_entropy: bool = True, with_sum_pi_squared: bool = False, with_full_kl: bool = False
    ) -> Batch:
        """`old_log_probs` [B, T] of the batch's responses under the present weights, with `entropy`, `sum_pi_squared`
        (Σ_v π(v)² of each position), `full_kl` (the exact KL to the reference) if asked."""
        with self.on_device() as engine, self._reference(with_full_kl) as reference:
            out = engine.forward(
                model_rows(batch),
                **self._log_prob_limits,
                temperature=batch.meta["temperature"],
                with_entropy=with_entropy,
                with_sum_pi_squared=with_sum_pi_squared,
                reference=reference,
            )
        return Batch({"old_log_probs": out.pop("log_probs"), **out})

    def states(self, rows: Batch, projection: StateProjection) -> tuple[Tensor, Tensor]:
        """For a critic beside it: projected hidden states [B, T, K] before each response token, and the log-probs
        [B, T] of the tokens."""
        with self.on_device() as engine:
            out = engine.forward(rows, **self._log_prob_limits, projection=projection)
        return out["states"], out["log_probs"]

    @Dispatch("dp")
    def update(self, mini_batch: Batch) -> dict[str, float]:
        """One optimizer step on the rows of a mini-batch; metrics are of the whole mini-batch, over all ranks."""
        config, meta = self.config, mini_batch.meta
        self._generator = keyed_generator(self.seed, meta["global_step"], meta["update"], self.data_parallel_rank)
        self._teachers_weight = self.distillation.coefficient(meta["global_step"])
        options: dict[str, Any] = {
            "max_tokens": config.ppo_max_token_len_per_gpu,
            "max_rows": config.max_rows,
            "temperature": meta["temperature"],
            "with_entropy": config.entropy_coeff != 0 or config.calculate_entropy,
            "divergence": teacher_divergence(self.distillation.distillation_loss),
        }
        with self.on_device(optimizer=True) as engine:
            metrics = []
            for rows, compared in self._passes(mini_batch):
                with compared as reference:
                    metrics.append(engine.forward_backward(rows, self._loss, reference=reference, **options))
            return self.apply_gradients(mini_batch, reduce_metrics(metrics), advance_schedule=meta["last_of_step"])

    @Dispatch("all", light=True)
    def version(self) -> int:
        """Number of updates that the weights have had."""
        return self.engine.version

    @Dispatch("all")
    def open_channel(self) -> Address | None:
        """Where the processes of a rollout pool meet rank 0, which sends weights."""
        self._store = self._channel = None
        if self._context.rank > 0:
            return None
        address = self._context.address or "127.0.0.1"  # without Ray pools are threads of one process
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return address, self._store.port

    @Dispatch("all")
    def send_weights(self, receivers: int) -> None:
        """Send the weights to `receivers` processes, in the dtype and under the names of their generation engine."""
        spec = GENERATION_ENGINES[self._rollout.name]
        if self._store is not None and self._channel is None:  # at once: the receivers wait there
            device = torch.device("cpu") if spec.elsewhere else self._context.device
            self._channel = WeightChannel(self._store, 0, receivers + 1, device)
        with self.on_device() as engine:
            weights = engine.named_weights(spec.weight_names)
            if self._channel is None:  # the other ranks have a part in gathering
                for _ in weights:
                    pass
                return
            bucket_bytes = self._rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
            self._channel.send(weights, dtype=getattr(torch, self._rollout.dtype), bucket_bytes=bucket_bytes)

    def _reference(self, needed: bool) -> AbstractContextManager[Reference | None]:
        """The reference policy of this process, for the exact KL: it lives here, so that no distribution travels."""
        return self._context.roles["ref"].reference() if needed else nullcontext()

    def _passes(self, rows: Batch) -> Iterator[tuple[Batch, AbstractContextManager[Reference | None]]]:
        """The rows of an update, and the policy whose distributions their pass reads: a pass for each teacher."""
        if not self.distillation.of_distributions:
            yield rows, self._reference(self.config.exact_kl_loss)
            return
        teachers = [role for name, role in self._context.roles.items() if name.partition("_")[0] == "teacher"]
        for number, teacher in enumerate(teachers):
            several = len(teachers) > 1
            yield (rows.take((rows["teacher"] == number).nonzero()[:, 0]) if several else rows), teacher.reference()

    def _policy_loss(self, log_probs: Tensor, rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of advantages, those of the task and those that the teacher's judgement of a token is."""
        advantages = rows["advantages"]
        if self.distillation.as_advantage:
            signal = -self._teachers_weight * self._divergence({"log_probs": log_probs.detach()}, rows)
            advantages = signal if self.distillation.replaces_advantages else advantages + signal
        counts = {"num_tokens": rows.meta["num_tokens"], "num_sequences": rows.meta["num_sequences"]}
        pg_loss, metrics = algorithms.policy_loss(
            self.loss_mode,
            log_probs=log_probs,
            old_log_probs=rows.tensors.get("old_log_probs"),
            advantages=advantages,
            response_mask=rows["response_mask"],
            rollout_is_weights=rows.tensors.get("rollout_is_weights"),
            sequence_lengths=rows.tensors.get("sequence_lengths"),
            turn_ids=rows.tensors.get("turn_ids"),
            sequence_log_ratio=rows.tensors.get("sequence_log_ratio"),
            **policy_loss_options(self.config, self.loss_mode, self._generator),
            **counts,
        )
        return pg_loss, {**metrics, "pg_loss": pg_loss.detach()}

    def _divergence(self, outputs: dict[str, Tensor], rows: Batch) -> Tensor:
        """[B, T] how far the policy is from its teacher at each token."""
        loss = self.distillation.distillation_loss
        if loss.of_distributions:
            return outputs["full_kl"]
        columns = outputs["log_probs"], rows["teacher_log_probs"]
        return algorithms.sampled_divergence(*columns, **sampled_options(loss))

    def _loss(self, outputs: dict[str, Tensor], rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Policy loss − entropy bonus + KL loss + distance to the teacher of some rows, already divided by the
        mini-batch's global counts."""
        config, teach = self.config, self.distillation
        log_probs, mask = outputs["log_probs"], rows["response_mask"]
        counts = {"num_tokens": rows.meta["num_tokens"], "num_sequences": rows.meta["num_sequences"]}
        sequence_lengths = rows.tensors.get("sequence_lengths")
        loss, metrics = log_probs.new_zeros(()), dict[str, Tensor]()
        if teach.as_advantage or not teach.replaces_advantages:
            loss, metrics = self._policy_loss(log_probs, rows)
        if "old_log_probs" in rows:
            metrics |= algorithms.ratio_metrics(log_probs, rows["old_log_probs"], mask, counts["num_tokens"])
        denominator = algorithms.loss_denominator(config.loss_agg_mode, **counts)
        aggregate = (mask, config.loss_agg_mode, config.loss_scale_factor, denominator, sequence_lengths)
        if (entropy := outputs.get("entropy")) is not None:
            metrics["entropy"] = algorithms.aggregate_loss(entropy.detach(), mask, denominator=counts["num_tokens"])
            loss = loss - config.entropy_coeff * algorithms.aggregate_loss(entropy, *aggregate)
        if "positive" in rows:
            counted = rows.meta["num_positive_tokens"]
            nll = algorithms.positive_nll(log_probs, mask, rows["positive"], counted)
            loss = loss + config.positive_nll_coef * nll
            metrics["positive_nll"] = nll.detach()
        if config.use_kl_loss:
            kl = None if teach.of_distributions else outputs.get("full_kl")
            if kl is None:
                kl = algorithms.kl_penalty(log_probs, rows["ref_log_probs"], kind=config.kl_loss_type)
            kl_loss = algorithms.aggregate_loss(kl, *aggregate)
            loss = loss + config.kl_loss_coef * kl_loss
            metrics["kl_loss"] = kl_loss.detach()
        if teach.enabled and not teach.as_reward:
            gap = self._divergence(outputs, rows)
            distance = algorithms.aggregate_loss(gap, *aggregate)
            loss = loss if teach.as_advantage else loss + self._teachers_weight * distance
            metrics["actor/distillation/loss"] = distance.detach()
        metrics["loss"] = loss.detach()
        if "rollout_log_probs" in rows:  # the weights are still those that sampled: measure the gap
            metrics |= algorithms.mismatch_sums(
                log_probs.detach(), rows["rollout_log_probs"], mask, counts["num_tokens"]
            )
        return loss, metrics


def teacher_divergence(config: DistillationLossConfig) -> Divergence | None:
    """What a pass that reads a teacher's distributions computes; None: the exact reverse KL, or nothing."""
    kind, limits = config.loss_mode.removesuffix("_topk"), _limits(config)
    topk = config.topk if kind != config.loss_mode else None
    if not config.of_distributions or (kind == "reverse_kl" and topk is None and not any(limits.values())):
        return None
    return partial(algorithms.divergence, kind=kind, topk=topk, beta=config.beta, add_tail=config.add_tail, **limits)


def sampled_options(config: DistillationLossConfig) -> dict[str, Any]:
    """Options of `algorithms.sampled_divergence`."""
    return {"kind": config.loss_mode, **_limits(config)}


def _limits(config: DistillationLossConfig) -> dict[str, float | None]:
    return {"log_prob_min": config.log_prob_min_clamp, "limit": config.loss_max_clamp}


def policy_loss_options(
    config: ActorConfig, loss_mode: str, generator: torch.Generator | None = None
) -> dict[str, Any]:
    """The settings under `actor` for a policy loss: what all share, and its own options."""
    shared = {
        name: getattr(config, name)
        for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "loss_agg_mode", "loss_scale_factor")
    }
    draws = {"generator": generator} if "generator" in algorithms.POLICY_LOSSES[loss_mode].options else {}
    return shared | draws | config.policy_loss.loss_kwargs
