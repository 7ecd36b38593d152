"""Samplers beside the shuffled epoch: by the difficulty that rows have had lately, and of a class of the user's own."""

import json
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from operator import index
from typing import Any

import numpy as np
import torch

from valor.config.data import DataConfig, DifficultyConfig
from valor.data.balance import grouped
from valor.data.batch import Batch
from valor.data.prompts import PromptDataset
from valor.data.sampler import DIFFICULTY_STREAM, PromptSampler, words
from valor.errors import UserError
from valor.user_files import load_object

_KEY = "data.sampler.class_path"


def training_sampler(data: DataConfig, rows: PromptDataset, batch_size: int) -> PromptSampler:
    """The sampler that `data.sampler` asks for."""
    sampler = data.sampler
    if sampler.class_path is not None:
        return ClassSampler(data, rows, batch_size)
    if sampler.difficulty.enable:
        return DifficultySampler(len(rows), batch_size, sampler.difficulty, seed=data.seed)
    return PromptSampler(len(rows), batch_size, seed=data.seed, shuffle=data.shuffle)


class DifficultySampler(PromptSampler):
    """Draws rows with probabilities in the ratio of weights, which depend on their recent pass rates.

    Pool k holds the rows whose pass rate is at least `thresholds[k - 1]` and below `thresholds[k]`; a further pool
    those that have not been answered yet. A batch has no row twice, an epoch is as many draws as there are rows, and
    no row is sure to be among them. Draws are a function of seed, `position` (draws so far) and pass rates.
    """

    def __init__(self, num_rows: int, batch_size: int, options: DifficultyConfig, *, seed: int = 0) -> None:
        super().__init__(num_rows, batch_size, seed=seed)
        self._options = options
        self._rates: dict[int, float] = {}
        self._predicted: dict[int, float] = {}  # of rows without answers
        self._weights = np.full(num_rows, options.new_weight)
        ends = [f"{end:g}" for end in (0.0, *options.thresholds, 1.0)]
        self._pools = [*map("-".join, pairwise(ends)), "new"]

    def next_batch(self) -> list[int]:
        """The rows with the smallest exponential variates, their rates the weights (Efraimidis and Spirakis 2006)."""
        rows = self._next_rows()[: self.batch_size].tolist()
        self.epoch = self.position // self.num_rows
        self.position += self.batch_size
        return rows

    def unknown(self, most: int) -> list[int]:
        """Rows without answers, at most so many, in the order in which the next draw would take them."""
        return [row for row in self._next_rows().tolist() if row not in self._rates][:most]

    def predict(self, rows: Sequence[int], rates: Sequence[float]) -> None:
        """Weigh rows without answers by these pass rates."""
        for row, rate in zip(rows, rates, strict=True):
            self._predicted[row] = min(max(rate, 0.0), 1.0)
            self._weights[row] = self._options.weights[bisect_right(self._options.thresholds, self._predicted[row])]

    def _next_rows(self) -> np.ndarray:
        uniform = ((words(self.num_rows, self.seed, self.position, DIFFICULTY_STREAM) >> 11) + 0.5) * 2.0**-53
        return np.argsort(-np.log(uniform) / self._weights, kind="stable")

    def update(self, outcomes: Batch) -> dict[str, float]:
        """Metrics by pool (`sampler/LOW-HIGH/*`, `sampler/new/*`), by the pass rates before these outcomes: `drawn`
        prompts, `zero_variance`, the share of these whose samples all have one score, and `rows` of the data after.
        `sampler/predictor/error`: mean difference of predicted and first pass rates."""
        drawn, equal = [0] * len(self._pools), [0] * len(self._pools)
        rates: list[tuple[int, float]] = []
        for samples in grouped(range(len(outcomes)), outcomes.objects["uid"]):
            row, scores = int(outcomes["row"][samples[0]]), outcomes["scores"][samples]
            pool = self._pool(row)
            drawn[pool] += 1
            equal[pool] += bool(scores.min() == scores.max())
            rates.append((row, float(outcomes["correct"][samples].double().mean())))
        errors = [abs(self._predicted.pop(row) - rate) for row, rate in rates if row in self._predicted]
        for row, rate in rates:
            self._set(row, (rate + self._rates.get(row, rate)) / 2)
        rows = np.bincount([self._pool(row) for row in self._rates], minlength=len(self._pools))
        rows[-1] = self.num_rows - len(self._rates)
        metrics = {"sampler/predictor/error": sum(errors) / len(errors)} if errors else {}
        for name, count, same, size in zip(self._pools, drawn, equal, rows.tolist(), strict=True):
            metrics |= {f"sampler/{name}/drawn": float(count), f"sampler/{name}/rows": float(size)}
            metrics |= {f"sampler/{name}/zero_variance": same / count} if count else {}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        predicted = {"predicted": [*self._predicted.items()]} if self._options.predictor != "none" else {}
        return {**super().state_dict(), "rates": [*self._rates.items()], **predicted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of rows that the data have no longer nothing is kept."""
        super().load_state_dict(state)
        rates, predicted = (
            [(row, rate) for row, rate in state.get(name, ()) if row < self.num_rows] for name in ("rates", "predicted")
        )
        for row, rate in rates:
            self._set(row, rate)
        self.predict(*zip(*predicted, strict=True) if predicted else ((), ()))

    def _pool(self, row: int) -> int:
        return bisect_right(self._options.thresholds, self._rates[row]) if row in self._rates else -1

    def _set(self, row: int, rate: float) -> None:
        self._rates[row] = rate
        self._weights[row] = self._options.weights[self._pool(row)]


class ClassSampler(PromptSampler):
    """Batches of the numbers that an object of `data.sampler.class_name` yields, made and updated as in verl.

    It is iterated anew each epoch; numbers at the end of one that fill no batch are left out. What it draws from the
    global generators of Python, NumPy and torch depends on `data.seed` and the epoch alone. UserError: the class fails,
    yields what is no row, or learns and could not be resumed.
    """

    def __init__(self, data: DataConfig, rows: PromptDataset, batch_size: int) -> None:
        super().__init__(len(rows), batch_size, seed=data.seed)
        self._name = f"{str(data.sampler.class_path).removeprefix('pkg://')}:{data.sampler.class_name}"
        cls = load_object(self._name, _KEY)
        self._generators = _seeded(data.seed)
        self._object = self._call("the class", partial(cls, data_source=rows, data_config=data))
        self._learns = hasattr(self._object, "update")
        self._has_state = all(hasattr(self._object, name) for name in ("state_dict", "load_state_dict"))
        if not hasattr(self._object, "__iter__"):
            raise self._error("has no __iter__, which is to yield numbers of rows")
        if self._learns and not self._has_state:
            raise self._error("has update() and no state_dict() and load_state_dict(): a resumed run would go astray")
        if hasattr(self._object, "__len__"):  # an epoch is an iteration of it, which may leave rows out or repeat them
            self.epoch_length = self._call("len", len, self._object)
        self._numbers: Iterator[int] | None = None
        self.state_dict()  # a mistake in it is reported before the run

    def next_batch(self) -> list[int]:
        for _ in range(2):
            numbers = self._numbers = self._numbers or self._begun()
            batch = [self._checked(number) for number in self._call("iter", list, islice(numbers, self.batch_size))]
            if len(batch) == self.batch_size:
                self.position += self.batch_size
                return batch
            self._numbers, self.epoch, self.position = None, self.epoch + 1, 0
        raise self._error(f"yields fewer than a batch of {self.batch_size} rows in an epoch")

    def update(self, outcomes: Batch) -> dict[str, float]:
        if self._learns:
            self._call("update()", self._object.update, outcomes)
        return {}

    def state_dict(self) -> dict[str, Any]:
        """With the object's own, if it has one."""
        state = self._call("state_dict()", self._object.state_dict) if self._has_state else None
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise self._error(f"state_dict() is not JSON ({error})") from None
        return {**super().state_dict(), "own": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """An object without a state of its own is iterated to where it was."""
        self._check(state)
        if self._has_state:
            self._call("load_state_dict()", self._object.load_state_dict, state["own"])
            self._numbers = None
        elif (self.epoch, self.position) != (state["epoch"], state["position"]):
            for self.epoch in range(state["epoch"] + 1):
                self._numbers = self._begun()
                left = state["position"] if self.epoch == state["epoch"] else None
                self._call("iter", deque, islice(self._numbers, left), 0)
        super().load_state_dict(state)

    def _checked(self, number: Any) -> int:
        try:
            row = index(number)
        except TypeError:
            row = -1
        if not 0 <= row < self.num_rows:
            raise self._error(f"yields {number!r}, and rows are 0 to {self.num_rows - 1}")
        return row

    def _begun(self) -> Iterator[int]:
        """The numbers of this epoch."""
        self._generators = _seeded(self.seed, self.epoch)
        return self._call("iter", iter, self._object)

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        others = _generators()
        try:
            _set_generators(self._generators)
            return function(*arguments)
        except Exception as error:
            raise self._error(f"fails in {name} ({type(error).__name__}: {error})") from error
        finally:
            self._generators = _generators()
            _set_generators(others)

    def _error(self, problem: str) -> UserError:
        return UserError(f"{_KEY}: {self._name} {problem}")


def _generators() -> tuple[Any, Any, torch.Tensor]:
    """The states of the global generators of Python, NumPy and torch."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_generators(states: tuple[Any, Any, torch.Tensor]) -> None:
    python, numpy, of_torch = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(of_torch)


def _seeded(*key: int) -> tuple[Any, Any, torch.Tensor]:
    """Such states that depend on `key` alone."""
    seed = int(words(1, *key)[0])
    numpy = np.random.RandomState(seed % 2**32).get_state()
    return random.Random(seed).getstate(), numpy, torch.Generator().manual_seed(seed >> 1).get_state()


class Outcomes(Batch):
    """A batch that classes for verl's DataProto can read too: its scores and the `index` of rows in the data."""

    @property
    def batch(self) -> dict[str, torch.Tensor]:
        scores = self["scores"][:, None]
        return {**self.tensors, "token_level_scores": scores, "token_level_rewards": scores}

    @property
    def non_tensor_batch(self) -> dict[str, np.ndarray]:
        return {
            "uid": np.array(self.objects["uid"], dtype=object),
            "index": self["row"].numpy(),
            "acc": self["correct"].numpy(),
        }


def outcomes(rows: PromptDataset, judged: Sequence[tuple[str, Any]]) -> Outcomes:
    """What samplers learn from, E samples that could be graded: `row` [E], the prompt's number in the data set,
    `scores` [E], `correct` [E]; objects `uid`, the same of samples that are compared. judged: the uid and the
    RewardResult of each."""
    columns = {
        "row": torch.tensor([rows.number_of(uid) for uid, _ in judged], dtype=torch.long),
        "scores": torch.tensor([result.score for _, result in judged], dtype=torch.float32),
        "correct": torch.tensor([result.correct for _, result in judged], dtype=torch.bool),
    }
    return Outcomes(columns, {"uid": [uid for uid, _ in judged]})
