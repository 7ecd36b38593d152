"""Which teacher scores a row."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from valor.collector.inputs import RunInputs
from valor.config import PPOConfig
from valor.config.distillation import DistillationConfig
from valor.data.batch import Batch
from valor.errors import StepRefused, UserError
from valor.models.teachers import check_teachers


def routed(batch: Batch, config: DistillationConfig) -> Tensor:
    """[B] number of each row's teacher in `teacher_models`. StepRefused: a row has none."""
    if len(config.teacher_models) == 1:
        return torch.zeros(len(batch), dtype=torch.long)
    numbers = {teacher.key: number for number, teacher in enumerate(config.teacher_models.values())}
    rows = zip(batch.objects["data_source"], batch.objects["extra_info"], strict=True)
    keys = [_key(config, source, extra_info) for source, extra_info in rows]
    if unknown := sorted({key for key in keys if key not in numbers}):
        raise StepRefused(_no_teacher(config, unknown[0]))
    return torch.tensor([numbers[key] for key in keys])


def check_routes(config: PPOConfig, inputs: RunInputs) -> None:
    """UserError: a teacher that the policy cannot learn from, or a row of the training prompts without a teacher."""
    section = config.distillation
    if not section.enabled:
        return
    check_teachers(config, inputs.tokenizer)
    known = {teacher.key for teacher in section.teacher_models.values()}
    for row in inputs.train if len(section.teacher_models) > 1 else ():
        if (key := _key(section, row.data_source, row.extra_info)) not in known:
            raise UserError(_no_teacher(section, key))


def _key(config: DistillationConfig, data_source: str, extra_info: Mapping[str, Any]) -> str:
    return data_source if config.teacher_key == "data_source" else str(extra_info.get(config.teacher_key))


def _no_teacher(config: DistillationConfig, key: str) -> str:
    have = ", ".join(str(teacher.key) for teacher in config.teacher_models.values())
    return (
        f"a row has {config.teacher_key}={key}, and no teacher has that key (they have {have}): set "
        "distillation.teacher_models.<name>.key"
    )
