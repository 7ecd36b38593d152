"""Single phases of a training step on batches made by hand."""

from typing import Any

from pydantic import BaseModel

from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.trainer.phases.base import Phase


def made(kind: type[Phase], algorithm: Any, seed: int = 0, **sections: Any) -> Phase:
    """The phase of a run with this `algorithm` section, a mapping or an object."""
    if isinstance(algorithm, BaseModel):
        algorithm = algorithm.model_dump(exclude_unset=True)
    tree = {"data": {"train_files": ["x"]}, "algorithm": algorithm, "trainer": {"seed": seed}, **sections}
    return kind(PPOConfig.model_validate(tree))


def after(phase: Phase, batch: Batch, step: int = 1) -> tuple[Batch, dict[str, Any]]:
    """The batch with what the phase adds, all of which it has declared, and its metrics."""
    columns, metrics = phase.run(batch.union(Batch()), step)
    assert {*columns.tensors, *columns.objects, *columns.meta} <= {*phase.adds, *batch.meta}
    return batch.union(columns), metrics
