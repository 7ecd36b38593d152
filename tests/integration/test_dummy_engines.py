"""What it takes to add an engine: a class, a registration, and a whole PPO run goes through it."""

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from runs import read_metrics
from safetensors.torch import load_file, save_file

from valor.engines.base import TrainingEngine
from valor.engines.registry import TRAINING_ENGINES
from valor.models.export import export_hf, plain_weights
from valor.models.rows import ROW_FIELDS
from valor.rollout.base import Output, RolloutEngine, Span
from valor.rollout.registry import GENERATION_ENGINES
from valor.rollout.spec import GenerationEngineSpec
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow


class PlainEngine:
    """A whole module on one device, all rows in one pass, AdamW: no shards, no micro-batches."""

    data_parallel_rank = 0

    def __init__(self, section, model, load, *, device, total_steps=0, trainable=True):
        self.device, self.module, self.version = device, load(dtype=torch.float32), 0
        self.optimizer, self.clip = None, None
        if trainable:
            optim = section.optim
            self.clip = optim.clip_grad
            self.optimizer = torch.optim.AdamW(
                self.module.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
            )

    @torch.no_grad()
    def forward(self, batch, *, max_tokens=None, max_rows=None, **options):
        return self.module({name: batch[name] for name in ROW_FIELDS}, **options)

    def forward_backward(self, batch, loss_fn, *, max_tokens=None, max_rows=None, **options):
        loss, metrics = loss_fn(self.module({name: batch[name] for name in ROW_FIELDS}, **options), batch)
        loss.backward()
        return {name: float(value) for name, value in metrics.items()}

    def optimizer_step(self, *, advance_schedule=True):
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip or math.inf))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        return {"grad_norm": norm, "lr": self.optimizer.param_groups[0]["lr"], "skipped": 0.0}

    def named_weights(self, names):
        return plain_weights(self.module, self.module.state_dict().items())

    @property
    def generation_module(self):
        return self.module.hf

    def unsharded(self) -> AbstractContextManager:
        return nullcontext(self.module)

    @contextmanager
    def reference(self) -> Iterator:
        yield partial(self.module, as_reference=True)

    def without_adapters(self) -> AbstractContextManager:
        return nullcontext()

    @property
    def checkpoint_bytes(self) -> int:
        return sum(value.nbytes for value in self.module.state_dict().values())

    def save(self, path: Path) -> None:
        path.mkdir(parents=True)
        save_file({name: tensor.clone() for name, tensor in self.module.state_dict().items()}, path / "plain")

    def load(self, path: Path) -> None:
        self.module.load_state_dict(load_file(path / "plain"))

    def export(self, path: Path) -> None:
        export_hf(self.module, path)

    def offload(self) -> None: ...

    def onload(self, *, optimizer=True) -> None: ...


class FourEngine(RolloutEngine):
    """Answers every prompt with the same tokens, the last of which ends it."""

    weight_mode, parallel_size = "copied", 1
    made: ClassVar[list] = []

    def __init__(self, context) -> None:
        self.context, self.weights_version, self.weights_checksum = context, None, None
        self.received: list[tuple[int, int]] = []
        FourEngine.made.append(self)

    def serve(self, source):
        while (requests := source.poll(wait=True)) is not None:
            for request in requests:
                tokens = [7, self.context.eos_token_ids[0]]
                output = Output(request.request_id, tokens, [-1.0, -1.0], "stop", (Span(2, self.weights_version),))
                request.on_finish(output)

    def sync_weights(self, weights=None, *, version):
        self.received.append((version, sum(tensor.numel() for _, tensor in weights)))
        self.weights_version = version

    def sleep(self) -> None: ...

    def close(self) -> None: ...


def test_a_training_engine_is_one_registration(monkeypatch, overrides, tmp_path):
    built: list[TrainingEngine] = []

    def build(section, model, load, **options):
        built.append(PlainEngine(section, model, load, **options))
        return built[-1]

    monkeypatch.setitem(TRAINING_ENGINES, "plain", build)
    more = ["trainer.total_training_steps=1", "algorithm.use_kl_in_reward=true", "trainer.save_freq=1"]
    assert main(overrides(tmp_path / "plain", "actor_rollout_ref.actor.strategy=plain", *more)) == 0
    assert len(built) == 3 and [engine.version for engine in built] == [2, 0, 2]  # actor, reference, critic
    assert main(overrides(tmp_path / "fsdp2", *more)) == 0
    for ours, theirs in zip(*(read_metrics(tmp_path / name) for name in ("plain", "fsdp2")), strict=True):
        assert ours.keys() == theirs.keys()
        numbers = [name for name, value in theirs.items() if isinstance(value, float)]
        assert [ours[n] for n in numbers] == pytest.approx([theirs[n] for n in numbers], rel=1e-3, abs=1e-4)
    names = {p.name for p in (tmp_path / "plain" / "global_step_1" / "actor").iterdir()}
    assert names == {"plain"}


def test_a_generation_engine_is_one_registration(monkeypatch, overrides, tmp_path):
    checked: list[int] = []
    spec = GenerationEngineSpec(
        name="four",
        check_start=lambda config, world_size: checked.append(world_size),
        plan=lambda config: "says the same to everyone",
        build=FourEngine,
    )
    monkeypatch.setitem(GENERATION_ENGINES, spec.name, spec)
    FourEngine.made.clear()
    run_dir = tmp_path / "run"
    assert main(overrides(run_dir, "actor_rollout_ref.rollout.name=four", "trainer.total_training_steps=2")) == 0
    (engine,) = FourEngine.made
    assert isinstance(engine, RolloutEngine) and checked == [1]
    versions, sizes = zip(*engine.received, strict=True)
    assert versions == (0, 2, 4) and len(set(sizes)) == 1 and sizes[0] > 0  # two updates a step
    rows = read_metrics(run_dir)
    assert [row["response_length/mean"] for row in rows[1:]] == [2.0, 2.0]
    sample = json.loads((run_dir / "samples" / "step_1.jsonl").read_text().splitlines()[0])
    assert len(sample["tokens"]) == 2


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("actor_rollout_ref.rollout.name=nativ", "rollout.name 'nativ'; did you mean native"),
        ("actor_rollout_ref.actor.strategy=fsdp3", "strategy 'fsdp3'; did you mean fsdp2"),
    ],
)
def test_an_unknown_engine_is_one_line(setting, line, overrides, tmp_path, capsys):
    assert main(overrides(tmp_path, setting)) == 2
    assert line in capsys.readouterr().err.replace("\n", " ")
