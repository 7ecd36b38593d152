"""The critic in closed form: a ridge regression of returns on the policy's hidden states."""

import math
from collections.abc import Iterator
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from valor import algorithms
from valor.algorithms.ridge import Evidence, OnlineRidge
from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.engines.distributed import max_over_ranks
from valor.errors import UserError
from valor.models.rows import ROW_FIELDS, model_rows
from valor.models.states import StateProjection, state_features
from valor.tracking.rundir import disk_errors
from valor.workers.critic import state_values
from valor.workers.dispatch import Dispatch
from valor.workers.host import RunFacts, WorkerContext
from valor.workers.model_role import longer_rows

PROBE_FILE = "probe.safetensors"
POLICY_MASK = "policy_mask"  # column [B, T]: 1 at all tokens of the policy
VALUE_ERROR = "value_error"  # column [B, T]: as large as the error of a regression of half of the samples
HALF = "half"  # column [B], 0 or 1: which of the two a sample is for
_TOKENS = 8192  # of a part of a batch: the features of so many are in memory at a time
_BLOCK = 256  # rows of a matrix that ranks exchange at a time


class ProbeCritic:
    """One rank of the critic in closed form (`critic.kind=probe`); all ranks have the same coefficients.

    Coefficients change at the end of an update, so that a value comes from earlier steps alone and never knows its own
    outcome. The states are those of the actor, or of the reference beside it, which has the starting weights.
    """

    def __init__(self, context: WorkerContext, *, config: PPOConfig, facts: RunFacts) -> None:
        probe = config.critic.probe
        self._states_of: Any = context.roles["actor" if probe.states == "policy" else "ref"]
        self._device = context.device if context.device.type == "cuda" else torch.device("cpu")  # has float64
        self._projection, self._longest = StateProjection(probe.features), config.data.max_response_length
        self._fit, *self._halves = (OnlineRidge(probe.forgetting) for _ in range(1 + 2 * config.measures_lambda))
        if probe.path is not None:
            self._read(Path(probe.path))
        if config.critic.freeze and not all(fit.state for fit in self._halves):
            raise UserError(
                f"algorithm.lam=auto measures the error of a critic, and '{probe.path}' was fitted without it: set lam "
                "to a number, or critic.freeze=false"
            )

    @property
    def data_parallel_rank(self) -> int:
        return self._states_of.data_parallel_rank

    @Dispatch("dp", reads=(*ROW_FIELDS, "response_mask"), stays=("values", VALUE_ERROR))
    def compute_values(self, batch: Batch, *, with_end: bool = False) -> Batch:
        """`values` [B, T], 0 before the first update, and with `algorithm.lam=auto` their `value_error`. with_end: also
        `bootstrap_values` [B], after the last token."""
        rows, mask = model_rows(batch), batch["response_mask"]
        longer, mask = (longer_rows(rows), functional.pad(mask, (0, 1))) if with_end else (rows, mask)
        outputs = self._outputs(longer)
        for part, features in self._features(longer, mask):
            self._predict(features, part, outputs)
        return Batch(state_values(outputs, rows, with_end=with_end))

    @Dispatch("dp")
    def update(self, batch: Batch) -> dict[str, float]:
        """Refit with a step's `returns` where `response_mask` is 1; metrics are of the step, over all ranks.

        The features are those of the values, also where rejection or turns leave fewer tokens to learn from.
        """
        mask = batch["response_mask"]
        parts = [
            self._evidence(features, batch["returns"][part], mask[part], batch.tensors.get(HALF, mask)[part])
            for part, features in self._features(model_rows(batch), batch.tensors.get(POLICY_MASK, mask))
        ]
        return self._learn(parts)

    @Dispatch("dp", stays=("values", VALUE_ERROR))
    def update_with_values(self, batch: Batch, options: dict[str, Any]) -> Batch:
        """`update` whose forward pass also gives the `values` [B, T], and whose targets are GAE's, as in
        CriticWorker."""
        parts, outputs = list[list[Evidence]](), self._outputs(batch)
        for part, features in self._features(model_rows(batch), batch["response_mask"]):
            mask = batch["response_mask"][part]
            self._predict(features, part, outputs)
            outputs["values"][part] *= mask != 0
            present = {"values": outputs["values"][part], "response_mask": mask}
            rewards = batch["token_level_rewards"][part]
            _, returns = algorithms.compute_advantages("gae", rewards=rewards, **present, **options)
            parts.append(self._evidence(features, returns, mask, batch.tensors.get(HALF, mask)[part]))
        return Batch(outputs, meta={"metrics": self._learn(parts)})

    @Dispatch("all")
    def save(self, directory: Path) -> None:
        """Sums, coefficients and errors, into `directory`, by rank 0."""
        if dist.get_rank() == 0:
            with disk_errors(directory):
                directory.mkdir(parents=True, exist_ok=True)
                save_file({name: x.cpu().contiguous() for name, x in self._state().items()}, directory / PROBE_FILE)
        dist.barrier()

    @Dispatch("all")
    def load(self, directory: Path) -> None:
        with disk_errors(directory):
            self._read(directory)

    @Dispatch("all", light=True)
    def checkpoint_bytes(self) -> int:
        return 8 * (4 * self._projection.size) ** 2 * (1 + len(self._halves))

    @Dispatch("all")
    def export(self, directory: Path) -> None:
        """The same as `save`: `critic.probe.path` reads it."""
        self.save(directory)

    def _features(self, rows: Batch, mask: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Parts of the rows with their features [b, T, D]; as many on each rank, the last ones may be empty."""
        each = max(1, _TOKENS // max(1, rows["responses"].shape[1]))
        for number in range(max_over_ranks(-(-len(rows) // each))):
            part = slice(number * each, (number + 1) * each)
            some = rows.take(range(*part.indices(len(rows))))
            states, log_probs = (x.to(self._device) for x in self._states_of.states(some, self._projection))
            features = state_features(states, log_probs, mask[part].to(self._device), self._longest)
            fitted = self._fit.state["weights"].shape[-1] - 1 if self._fit.state else features.shape[-1]
            if fitted != features.shape[-1]:
                raise UserError(
                    f"the critic in closed form was fitted to {fitted:,} features of a state, and here are "
                    f"{features.shape[-1]:,}: use the same policy, critic.probe.features and data.max_response_length, "
                    "or drop critic.probe.path"
                )
            yield part, features

    def _outputs(self, rows: Batch) -> dict[str, Tensor]:
        shape = rows["responses"].shape
        return {name: torch.zeros(shape) for name in ("values", *[VALUE_ERROR] * bool(self._halves))}

    def _predict(self, features: Tensor, part: slice, outputs: dict[str, Tensor]) -> None:
        outputs["values"][part] = self._fit.predict(features).float().cpu()
        if self._halves:
            first, second = (fit.predict(features) for fit in self._halves)
            outputs[VALUE_ERROR][part] = ((first - second) / math.sqrt(2)).float().cpu()

    def _evidence(self, features: Tensor, returns: Tensor, mask: Tensor, half: Tensor) -> list[Evidence]:
        """Of each regression."""
        where, half, y = mask.to(self._device) > 0, half.to(self._device), returns.to(self._device)
        samples = [where, *(where & (half == number)[:, None] for number in range(len(self._halves)))]
        fits = zip((self._fit, *self._halves), samples, strict=True)
        return [fit.evidence(features[chosen], y[chosen]) for fit, chosen in fits]

    def _learn(self, parts: list[list[Evidence]]) -> dict[str, float]:
        """Refit from the parts of a batch; metrics are of the regression that gives the values."""
        fits = zip((self._fit, *self._halves), zip(*parts, strict=True), strict=True)
        metrics, *_ = [fit.learn(self._over_ranks(Evidence.total(of_fit))) for fit, of_fit in fits]
        return metrics

    def _state(self) -> dict[str, Tensor]:
        halves = enumerate(self._halves, 1)
        return self._fit.state | {f"half_{k}.{name}": x for k, fit in halves for name, x in fit.state.items()}

    def _over_ranks(self, seen: Evidence) -> Evidence:
        """The sum over the shares of a batch, in their order."""
        if dist.get_world_size() == 1:
            return seen
        ranks = [int(share) for share in self._gathered(torch.tensor([self.data_parallel_rank]))]
        first = [ranks.index(share) for share in range(max(ranks) + 1)]  # several ranks may have one share

        def shares(x: Tensor) -> list[Tensor]:
            parts = self._gathered(x.contiguous())
            return [parts[rank] for rank in first]

        low, high = torch.stack(shares(seen.low)).amin(0), torch.stack(shares(seen.high)).amax(0)
        moments = torch.cat([reduce(add, shares(block)) for block in seen.moments.split(_BLOCK)])
        return Evidence(moments, reduce(add, shares(seen.errors)), low, high)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        """A tensor of every rank, in their order; collective."""
        x = x.to(self._device)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return parts

    def _read(self, directory: Path) -> None:
        file = directory / PROBE_FILE
        if not file.is_file():
            raise UserError(f"'{directory}' holds no {PROBE_FILE}: give the folder `huggingface/critic` of such a run")
        state = {name: x.to(self._device) for name, x in load_file(file).items()}
        for number, fit in enumerate((self._fit, *self._halves)):
            prefix = f"half_{number}." * (number > 0)
            names = [name for name in state if name.startswith(prefix) and "." not in name.removeprefix(prefix)]
            fit.state = {name.removeprefix(prefix): state[name] for name in names}
