"""Which teacher scores a row, and what it reads."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from valor.collector.inputs import RunInputs
from valor.config import PPOConfig
from valor.config.distillation import DistillationConfig
from valor.data.batch import Batch, pad_rows
from valor.data.messages import Messages
from valor.data.prompts import render, token_ids
from valor.errors import StepRefused, UserError
from valor.workers.teacher import check_teachers

COLUMNS = ("data_source", "ground_truth", "extra_info")
"""Of a row, what says which teacher it has, and what that teacher may be told."""

_FIELD = re.compile(r"\{(\w+)\}")


def routed(batch: Batch, config: DistillationConfig) -> Tensor:
    """[B] number of each row's teacher in `teacher_models`. StepRefused: a row has none."""
    try:
        return torch.tensor([_number(config, *row) for row in zip(*map(batch.objects.get, COLUMNS), strict=True)])
    except UserError as error:
        raise StepRefused(str(error)) from error


def reading_more(batch: Batch, template: str, tokenizer: Any, options: Mapping[str, Any]) -> Batch:
    """The rows with prompts in which `template` stands for the last message."""
    columns = [batch.objects[name] for name in ("messages", "template_kwargs", *COLUMNS)]
    texts = [
        render(tokenizer, _told(template, messages, *values), {**options, **kwargs})
        for messages, kwargs, *values in zip(*columns, strict=True)
    ]
    prompts, lengths = pad_rows(token_ids(tokenizer, texts), torch.long)
    return batch.union(Batch({"prompts": prompts, "prompt_lengths": lengths}))


def check_routes(config: PPOConfig, inputs: RunInputs) -> None:
    """UserError: a teacher that the policy cannot learn from, or a row of the training prompts without a teacher, or
    without a column that its teacher is told."""
    section = config.distillation
    if not section.enabled:
        return
    check_teachers(config, inputs.tokenizer)
    teachers = [*section.teacher_models.values()]
    for row in inputs.train if len(teachers) > 1 or teachers[0].prompt_template is not None else ():
        values = (row.data_source, row.ground_truth, row.extra_info)
        if (template := teachers[_number(section, *values)].prompt_template) is not None:
            _told(template, row.messages, *values)


def _number(config: DistillationConfig, data_source: str, _: Any, extra_info: Mapping[str, Any]) -> int:
    if len(config.teacher_models) == 1:
        return 0
    key = data_source if config.teacher_key == "data_source" else str(extra_info.get(config.teacher_key))
    keys = [str(teacher.key) for teacher in config.teacher_models.values()]
    if key not in keys:
        raise UserError(
            f"a row has {config.teacher_key}={key}, and no teacher has that key (they have {', '.join(keys)}): set "
            "distillation.teacher_models.<name>.key"
        )
    return keys.index(key)


def _told(template: str, messages: Messages, data_source: str, ground_truth: Any, extra_info: Mapping) -> Messages:
    """The messages, the last one as `template` has it. UserError: it names a column that the row does not have."""
    *before, last = messages
    values = {**extra_info, "data_source": data_source, "ground_truth": ground_truth, "prompt": last["content"]}
    if missing := [name for name in _FIELD.findall(template) if name not in values]:
        raise UserError(
            f"distillation.teacher_models.<name>.prompt_template has {{{missing[0]}}} in it, and a row has no such "
            f"column: it has {', '.join(sorted(values))}"
        )
    return [*before, {**last, "content": _FIELD.sub(lambda field: str(values[field[1]]), template)}]
