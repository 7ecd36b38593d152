"""Runs of the tiny model under settings that cover all pairs of values, with everything in sight that they promise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from valor.data.batch import Batch
from valor.engines.fsdp.engine import FSDPEngine
from valor.trainer.phases.schedule import Schedule
from valor.trainer.ppo import PPORun
from valor.trainer.recorder import PPORecorder, RunRecorder

Settings = dict[str, Any]


def pairwise(values: Mapping[str, Sequence[Any]], refused: Sequence[Mapping[str, Sequence[Any]]]) -> list[Settings]:
    """Settings of every key, none with all of a `refused` combination, in which each pair of values of two keys occurs.

    Greedy: each row begins with the first pair that has not been met and takes, key by key in random order (those of
    refused combinations first), the value that brings most pairs. A pair that leads to no row in twenty tries cannot be
    had.
    """
    draw = random.Random(0)
    every = [(key, value) for key, some in values.items() for value in some]  # a value's place here is its number
    of = {key: [n for n, one in enumerate(every) if one[0] == key] for key in values}
    bound = {key: [one for one in refused if key in one] for key in values}
    todo = np.array([[a[0] != b[0] for b in every] for a in every])

    def fits(row: list[int], n: int) -> bool:
        chosen = dict(every[m] for m in (*row, n))
        return not any(all(chosen.get(key) in some for key, some in one.items()) for one in bound[every[n][0]])

    def filled(row: list[int]) -> list[int]:
        chosen = {every[n][0] for n in row}
        for key in sorted(draw.sample([*of], len(of)), key=lambda key: not bound[key]):
            if key not in chosen:
                options = [n for n in draw.sample(of[key], len(of[key])) if fits(row, n)]
                if not options:
                    return []
                row.append(max(options, key=lambda n: todo[n, row].sum()))
        return row

    rows: list[Settings] = []
    while todo.any():
        a, b = (int(n) for n in np.argwhere(todo)[0])
        row = next((row for _ in range(20 * fits([a], b)) if (row := filled([a, b]))), [])
        rows += [{every[n][0]: every[n][1] for n in sorted(row)}] if row else []
        todo[np.ix_(row, row)] = todo[a, b] = todo[b, a] = False
    return rows


@dataclass
class Update:
    """One optimizer step: its rows, the micro-batches in which they were read, and what was done to the weights."""

    role: str
    step: int
    rows: Batch
    limits: dict[str, Any]
    engine: FSDPEngine
    before: dict[str, torch.Tensor]
    micro_batches: list[list[int]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    clipped_norm: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    after: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Pass:
    """One forward pass of a role over a batch without gradients."""

    role: str
    step: int
    limits: dict[str, Any]
    rows: Batch
    micro_batches: list[list[int]]


@dataclass
class Seen:
    """What a run did."""

    metrics: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    batches: dict[int, Batch] = field(default_factory=dict)
    """By step: the batch that is trained on, with its advantages."""
    updates: list[Update] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    validations: dict[int, tuple[Batch, list[float]]] = field(default_factory=dict)
    code: int | None = None
    out: str = ""
    err: str = ""

    def of(self, role: str, step: int | None = None) -> list[Update]:
        """The optimizer steps of a role, in a training step or in all."""
        return [one for one in self.updates if one.role == role and step in (None, one.step)]


@contextmanager
def watched() -> Iterator[Seen]:
    """Everything that runs of this process do inside the block."""
    seen, patch, step, micro = Seen(), pytest.MonkeyPatch(), [0], list[list[list[int]]]()

    def around(cls: type, name: str, wrap: Callable[..., Any]) -> None:
        original = getattr(cls, name)
        patch.setattr(cls, name, lambda self, *args, **options: wrap(original, self, *args, **options))

    def train_step(original: Any, run: PPORun) -> Any:
        step[0] = run.step
        return original(run)

    def phases(original: Any, schedule: Schedule, batch: Batch, at: int, *resources: Any) -> Any:
        seen.batches[at], metrics = original(schedule, batch, at, *resources)
        return seen.batches[at], metrics

    def log(original: Any, recorder: RunRecorder, at: int, metrics: Mapping[str, Any]) -> None:
        seen.metrics.append((at, dict(metrics)))
        original(recorder, at, metrics)

    def validation(original: Any, recorder: PPORecorder, at: int, batch: Batch, scores: Any, value: Any) -> None:
        seen.validations[at] = batch, list(scores)
        original(recorder, at, batch, scores, value)

    def forward_backward(original: Any, engine: FSDPEngine, rows: Batch, loss: Any, **limits: Any) -> Any:
        role = "critic" if "returns" in rows or "advantages" not in rows else "actor"
        seen.updates.append(Update(role, step[0], rows, limits, engine, engine.state_dict()))
        micro.append(seen.updates[-1].micro_batches)
        found = original(engine, rows, loss, **limits)
        micro.pop()
        seen.updates[-1].metrics |= found
        return found

    def forward(original: Any, engine: FSDPEngine, rows: Batch, **limits: Any) -> Any:
        micro.append([])
        found = original(engine, rows, **limits)
        role = "critic" if "values" in found else "actor" if "with_entropy" in limits else "ref"
        seen.passes.append(Pass(role, step[0], limits, rows, micro.pop()))
        return found

    def outputs(original: Any, engine: FSDPEngine, rows: Batch, indices: list[int], options: Any) -> Any:
        if micro:
            micro[-1].append(list(indices))
        return original(engine, rows, indices, options)

    def apply_update(original: Any, engine: FSDPEngine) -> None:
        update = seen.updates[-1]
        update.clipped_norm = engine._gradients()[0]
        named = engine.module.named_parameters()
        update.gradients = {name: p.grad.full_tensor().clone() for name, p in named if p.grad is not None}
        original(engine)
        update.after = engine.state_dict()

    def optimizer_step(original: Any, engine: FSDPEngine, **options: Any) -> dict[str, float]:
        found = original(engine, **options)
        seen.updates[-1].metrics |= found
        return found

    around(PPORun, "train_step", train_step)
    around(Schedule, "run", phases)
    around(RunRecorder, "log", log)
    around(PPORecorder, "validation", validation)
    around(FSDPEngine, "forward_backward", forward_backward)
    around(FSDPEngine, "forward", forward)
    around(FSDPEngine, "_outputs", outputs)
    around(FSDPEngine, "_apply_update", apply_update)
    around(FSDPEngine, "optimizer_step", optimizer_step)
    try:
        yield seen
    finally:
        patch.undo()


class Oracle:
    """The policy as transformers has it: a row at a time, without padding, in float32."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}

    def load(self, weights: Mapping[str, torch.Tensor] | None) -> Oracle:
        """None: the weights of the start."""
        named = self.start if weights is None else {name.removeprefix("hf."): one for name, one in weights.items()}
        self.model.load_state_dict(named, strict=True)
        self.model.zero_grad()
        return self

    def logits(self, batch: Batch, i: int) -> torch.Tensor:
        """[n, V]: before each token of response `i`."""
        start, count = int(batch["prompt_lengths"][i]), int(batch["response_lengths"][i])
        ids = torch.cat([batch["prompts"][i, :start], batch["responses"][i, :count]])
        return self.model(ids[None]).logits[0, start - 1 : start + count - 1]

    def rows(self, batch: Batch, temperature: float) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each row its responses' log-probs, the entropies before them, and the tokens, all [n]."""
        for i in range(len(batch)):
            log_probs = (self.logits(batch, i) / temperature).log_softmax(-1)
            tokens = batch["responses"][i, : len(log_probs)]
            yield log_probs.gather(1, tokens[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1), tokens
