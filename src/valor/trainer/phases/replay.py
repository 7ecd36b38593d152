"""The critic trains on the samples of earlier steps again."""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.data.images import IMAGES
from valor.trainer.phases.base import Metrics
from valor.trainer.phases.update_critic import UpdateCritic


class UpdateCriticWithReplay(UpdateCritic):
    """The critic's updates on the step's samples, then on those of earlier steps.

    Targets of earlier samples are the returns that they had, under the policies of their time; values are clipped
    around those of the present weights. The samples are part of a checkpoint. The critic's metrics are of the step's
    samples; `critic/replay_vf_loss`: mean loss of the earlier ones, before each update.
    """

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.earlier: dict[int, Batch] = {}  # by their steps, ascending

    @classmethod
    def wanted(cls, config: PPOConfig) -> bool:
        return config.replays

    def plan(self) -> str:
        return f"{super().plan()}: at most {self.config.critic.replay_steps}"

    def run(self, batch: Batch, step: int) -> tuple[Batch, Metrics]:
        critics, rows = self.resources.critics, self.rows(batch)
        self.earlier = {number: samples for number, samples in self.earlier.items() if number < step}
        again = {} if self.config.critic.frozen_at(step) else self.earlier
        metrics = critics.update(rows, step, last=not again)
        losses = []
        for number, samples in again.items():
            samples.meta = rows.meta
            values, _ = critics.compute_values(samples)
            measured = critics.update(samples.union(values), step, last=number == max(again))
            losses.append(measured["critic/vf_loss"])
        names = [name for name in (*self.reads, *self.reads_if_there, IMAGES) if name in rows and name != "values"]
        tensors = {name: rows[name] for name in names if name in rows.tensors}  # here: generators may be replaced
        if len(rows):  # some steps leave all episodes out
            self.earlier[step] = Batch(tensors, {name: rows.objects[name] for name in names if name in rows.objects})
        self.earlier = dict([*self.earlier.items()][-self.config.critic.replay_steps :])
        return Batch(), metrics | ({"critic/replay_vf_loss": sum(losses) / len(losses)} if losses else {})

    def save(self, folder: Path) -> None:
        for step, samples in self.earlier.items():
            columns = {name: column.clone() for name, column in samples.tensors.items()}  # some share memory
            save_file(columns, folder / f"{step}.safetensors", {"objects": json.dumps(samples.objects)})

    def load(self, folder: Path) -> None:
        self.earlier = {}
        for step in sorted(int(path.stem) for path in folder.glob("*.safetensors")):
            with safe_open(folder / f"{step}.safetensors", framework="pt") as file:
                columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
                self.earlier[step] = Batch(columns, json.loads(file.metadata()["objects"]))
