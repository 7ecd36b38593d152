"""Optimizer steps on a batch: mini-batches with the global counts their losses divide by, and ensembles of critics."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

from valor import algorithms
from valor.config import PPOConfig
from valor.controller.group import Pools
from valor.data.batch import Batch, Episodes
from valor.data.images import IMAGES
from valor.data.sampler import shuffled
from valor.errors import UserError
from valor.models.routing import ROUTES
from valor.models.rows import ROW_FIELDS
from valor.tracking.progress import part, phase
from valor.trainer.advantage import targets_by_ranks
from valor.trainer.old_log_probs import WEIGHTS, OldLogProbs, corrected
from valor.trainer.prompt_templates import critic_rows
from valor.trainer.run import SkippedUpdates
from valor.trainer.step_metrics import mean_over_updates
from valor.workers.probe import HALF, POLICY_MASK
from valor.workers.roles import critic_names

_ROWS = (*ROW_FIELDS, IMAGES, "response_mask", "episode")
_CRITIC_COLUMNS = (*_ROWS, "values", "returns", POLICY_MASK, HALF)
_ACTOR_COLUMNS = (*_ROWS, ROUTES, "advantages", WEIGHTS, "positive")


class Updates:
    """Updates critic and actor on a batch that has its advantages."""

    def __init__(self, config: PPOConfig, roles: Pools, skips: SkippedUpdates) -> None:
        self.config, self.roles, self.skips = config, roles, skips
        self.old = OldLogProbs(config)
        options = algorithms.ADVANTAGES[config.algorithm.adv_estimator].options
        self._whiten = "whitening" in options and config.algorithm.adv_whitening == "mini_batch"
        self._loss = algorithms.POLICY_LOSSES[config.policy_loss]
        self._compared = compared_columns(config)
        self._ratio_of_sequences = "sequence_log_ratio" in self._loss.parameters and not self.old.on_policy

    def run(self, role: str, batch: Batch, step: int, *, member: int = 0, last: bool = True) -> dict[str, float]:
        """All epochs and mini-batches of a role, or of one `member` of an ensemble, in an order of its own.

        Metrics are means over the updates. `last`: of the step, which is one for the learning rate's schedule.

        Raises TrainingStopped after `trainer.max_skipped_updates` updates in a row with non-finite gradients.
        """
        count = len(self.rows_of_updates(role, batch, step, member))
        if role == "actor" and self.old.on_policy and count > 1:
            raise UserError(
                f"a phase has chosen so many episodes that the policy has {count} updates in step {step}, and without "
                "old log-probs it is to have one: choose no more than the step has, or set "
                "actor_rollout_ref.actor.ppo_mini_batch_size below data.train_batch_size"
            )
        name = role if member == 0 else f"{role}_{member + 1}"
        worker, metrics_of_updates = self.roles[name], list[dict[str, float]]()
        asks_actor = role == "actor" and (self.old.correct_mini_batches or self._ratio_of_sequences)
        ahead = int(worker.group.apart and not asks_actor)
        started: deque[tuple[dict[str, float], Callable[[], dict[str, float]]]] = deque()
        waiting = self.mini_batches(role, batch, step, member, last=last)
        self.skips.updating = True
        with phase(f"train {role}", count, unit="mini-batch"):
            for done in range(count):
                with part(done, count):
                    # The next one is made and handed out while the ranks are at work on this one.
                    for mini_batch in islice(waiting, 1 + ahead - len(started)):
                        measured: dict[str, float] = {}
                        if role == "actor" and self.old.correct_mini_batches:
                            mini_batch, measured = self._corrected(mini_batch)
                        if role == "actor" and self._ratio_of_sequences:
                            mini_batch = self._with_ratios(mini_batch)
                        started.append((measured, worker.start("update", mini_batch)))
                    metrics, results = started.popleft()
                    metrics |= results()
                self.skips.count(name, bool(metrics["skipped"]), step)
                metrics_of_updates.append(metrics)
        return named(role, metrics_of_updates)

    def mini_batches(
        self, role: str, batch: Batch, step: int, member: int = 0, *, last: bool = True
    ) -> Iterator[Batch]:
        """Rows of each optimizer step, in order, with the columns that the role reads; an episode's rows together."""
        tokens = batch["response_mask"].sum(-1)
        indices = self.rows_of_updates(role, batch, step, member)
        for number, index in enumerate(indices, 1):
            rows = batch.select(self._columns(role, batch, first=number == 1)).take(index)
            if role == "actor" and self._whiten:
                rows["advantages"] = algorithms.masked_whiten(rows["advantages"], rows["response_mask"])
            rows.meta |= {"update": number, "last_of_step": last and number == len(indices), "global_step": step}
            yield counted(rows, tokens[index])

    def rows_of_updates(self, role: str, batch: Batch, step: int, member: int = 0) -> list[Tensor]:
        """Row numbers of each update, in order."""
        if role == "critic" and self.config.has_probe:
            return [torch.arange(len(batch))] if len(batch) else []
        settings = self.config.critic if role == "critic" else self.config.actor_rollout_ref.actor
        samples_per_step = settings.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        samples, indices = Episodes(batch).rows, list[Tensor]()
        for epoch in range(settings.ppo_epochs):
            order = list(range(len(samples)))
            if settings.shuffle and samples_per_step < len(samples):
                order = shuffled(len(samples), self.config.trainer.seed + member, step, epoch).tolist()
            # Where a step has left all episodes out, one update of none moves the schedule on.
            for start in range(0, max(len(samples), 1), samples_per_step):
                chosen = order[start : start + samples_per_step]
                indices.append(torch.tensor([row for sample in chosen for row in samples[sample]], dtype=torch.long))
        return indices

    def _columns(self, role: str, batch: Batch, *, first: bool) -> list[str]:
        if role == "critic":  # without values the update makes its targets itself
            names = _CRITIC_COLUMNS if "values" in batch else (*_ROWS, "token_level_rewards", HALF)
            return [name for name in names if name in batch]
        names = [*(name for name in _ACTOR_COLUMNS if name in batch), *self._compared]
        names += ["turn_ids"] * ("turn_ids" in self._loss.parameters)
        # Before the first update the weights are still those that sampled: the gap can be measured for free.
        measures_gap = first and not self.old.recompute
        return names + ["rollout_log_probs"] * (self.old.correct_mini_batches or measures_gap)

    def _present_log_probs(self, mini_batch: Batch) -> Tensor:
        return self.roles["actor"].compute_log_probs(mini_batch, with_entropy=False)["old_log_probs"]

    def _corrected(self, mini_batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Bypass mode: weights and rejection by the present policy's log-probs (one forward pass)."""
        present = self._present_log_probs(mini_batch)
        mini_batch, metrics = corrected(mini_batch, present, self.config.algorithm.rollout_correction)
        if mini_batch.meta["update"] > 1:  # from here on the distance is the training's own, not the engine's
            del mini_batch.tensors["rollout_log_probs"]
        if self._whiten:
            mini_batch["advantages"] = algorithms.masked_whiten(mini_batch["advantages"], mini_batch["response_mask"])
        return counted(mini_batch), metrics

    def _with_ratios(self, mini_batch: Batch) -> Batch:
        """Adds `sequence_log_ratio` [B], the mean log-ratio of the row's episode, where episodes have several rows: a
        micro-batch need not have all of them, so it takes a forward pass of its own."""
        episodes = Episodes(mini_batch)
        if not episodes.forked:
            return mini_batch
        mask = mini_batch["response_mask"]
        log_ratios = algorithms.log_ratio(self._present_log_probs(mini_batch), mini_batch["old_log_probs"])
        means = episodes.sums(algorithms.keep_masked(log_ratios, mask)) / episodes.sums(mask).clamp(min=1.0)
        return mini_batch.union(Batch({"sequence_log_ratio": episodes.spread(means)}))


class Critics:
    """Evaluates and trains the critic's roles.

    An ensemble (https://arxiv.org/abs/1602.04621 without its resampling) has one value, by which advantages are
    computed; its members learn the same returns from heads and mini-batch orders of their own, each clipped around its
    own old values.
    """

    def __init__(self, config: PPOConfig, roles: Pools, updates: Updates) -> None:
        self.config, self.roles, self.updates = config.critic, roles, updates
        self.names = critic_names(config)
        self._targets, self._measures_lambda = targets_by_ranks(config), config.measures_lambda

    def values_in_update(self, batch: Batch, step: int) -> bool:
        """Whether values and update of this step share a forward pass, the critic's ranks making the targets."""
        possible = self._targets is not None and not self.config.frozen_at(step) and not Episodes(batch).forked
        return possible and len(self.updates.rows_of_updates("critic", batch, step)) == 1

    def update_with_values(self, batch: Batch, step: int) -> tuple[Batch, dict[str, float]]:
        """`values` [B, T] of a batch that has `token_level_rewards`, as they are before its one update; the metrics of
        that update."""
        (name,) = self.names
        (rows,) = self.updates.mini_batches("critic", self._halved(critic_rows(batch)), step)
        self.updates.skips.updating = True
        with phase("train critic", unit="micro-batch"):
            result = self.roles[name].update_with_values(rows, self._targets)
        metrics = result.meta.pop("metrics")
        self.updates.skips.count(name, bool(metrics["skipped"]), step)
        return result, named("critic", [metrics]) | {"critic/frozen": 0.0}

    def compute_values(self, batch: Batch, *, with_end: bool = False) -> tuple[Batch, dict[str, float]]:
        """`values` [B, T] (with_end: and `bootstrap_values` [B]) of the ensemble, each member's as `values/<role>`.

        Metric: `critic/ensemble_std`, the members' standard deviation, mean over policy tokens.
        """
        rows = critic_rows(batch)
        results = [self.roles[name].compute_values(rows, with_end=with_end) for name in self.names]
        if len(results) == 1:
            read = {POLICY_MASK: batch["response_mask"]} if self.config.kind == "probe" else {}
            return results[0].union(Batch(read)), {}
        stacked = {column: torch.stack([result[column] for result in results]) for column in results[0].tensors}
        mean = self.config.ensemble_reduce == "mean"
        out = {column: values.mean(0) if mean else values.amin(0) for column, values in stacked.items()}
        out |= {f"values/{name}": result["values"] for name, result in zip(self.names, results, strict=True)}
        mask = batch["response_mask"]
        spread = (stacked["values"].std(0) * mask).sum() / mask.sum().clamp(min=1.0)
        return Batch(out), {"critic/ensemble_std": float(spread)}

    def update(self, batch: Batch, step: int, *, last: bool = True) -> dict[str, float]:
        """A batch's updates of every member; metrics are means over them. Nothing in a frozen step.

        Trains where `value_mask` is 1, or, without that column, at all policy tokens. last: as of `Updates.run`.
        """
        if self.config.frozen_at(step):
            return {"critic/frozen": 1.0}
        batch = self._halved(critic_rows(batch))
        batch = batch.union(Batch({"response_mask": batch["value_mask"]})) if "value_mask" in batch else batch
        metrics = []
        for member, name in enumerate(self.names):
            values = f"values/{name}"
            rows = batch.union(Batch({"values": batch[values]})) if values in batch else batch
            metrics.append(self.updates.run("critic", rows, step, member=member, last=last))
        return mean_over_updates(metrics) | {"critic/frozen": 0.0}

    def _halved(self, batch: Batch) -> Batch:
        """With the column by which a critic in closed form fits its samples twice, every second one each time."""
        if not self._measures_lambda:
            return batch
        episodes = Episodes(batch)
        return batch.union(Batch({HALF: episodes.spread(torch.arange(len(episodes.rows)) % 2)}))


def compared_columns(config: PPOConfig) -> list[str]:
    """What the actor's update reads of other policies: of the one before it, the reference and the teachers."""
    actor, teach = config.actor_rollout_ref.actor, config.distillation
    names = ["old_log_probs"] * (not OldLogProbs(config).on_policy)
    names += ["ref_log_probs"] * (actor.use_kl_loss and not actor.exact_kl_loss)
    names += ["teacher_log_probs"] * (teach.of_samples and not teach.as_reward)
    return names + ["teacher"] * teach.of_distributions


def named(role: str, updates: list[dict[str, float]]) -> dict[str, float]:
    """A role's metrics: means over its updates."""
    return {k if "/" in k else f"{role}/{k}": v for k, v in mean_over_updates(updates).items()}


def counted(mini_batch: Batch, tokens: Tensor | None = None) -> Batch:
    """Adds the global counts of the mini-batch's mask; at least 1, so that a loss over nothing is 0; `learns` says
    whether there is something. `tokens` [B]: of each row, if already known.

    With a column `episode` a sequence is an episode: `sequence_lengths` [B] are the policy tokens of the row's episode.
    """
    tokens = mini_batch["response_mask"].sum(-1) if tokens is None else tokens
    present = tokens > 0
    if "episode" in mini_batch:
        episodes = Episodes(mini_batch)
        lengths = episodes.sums(tokens[:, None])
        mini_batch["sequence_lengths"], present = episodes.spread(lengths), lengths > 0
    if "positive" in mini_batch:
        mini_batch.meta["num_positive_tokens"] = max(float((tokens * mini_batch["positive"]).double().sum()), 1.0)
    mini_batch.meta |= {
        "num_tokens": max(float(tokens.double().sum()), 1.0),
        "num_sequences": max(float(present.sum()), 1.0),
        "learns": bool(present.any()),
    }
    return mini_batch
