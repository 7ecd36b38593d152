"""Which teacher scores a row, and what it reads."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from valor.collector.inputs import RunInputs
from valor.config import PPOConfig
from valor.config.distillation import DistillationConfig
from valor.data.batch import Batch
from valor.data.prompts import render, token_ids
from valor.errors import StepRefused, UserError
from valor.trainer.prompt_templates import COLUMNS, check_longest, columns_of, filled
from valor.workers.teacher import check_teachers, teacher_model

TEMPLATE = "distillation.teacher_models.<name>.prompt_template"


def routed(batch: Batch, config: DistillationConfig) -> Tensor:
    """[B] number of each row's teacher in `teacher_models`. StepRefused: a row has none."""
    try:
        return torch.tensor([_number(config, *row) for row in zip(*map(batch.objects.get, COLUMNS), strict=True)])
    except UserError as error:
        raise StepRefused(str(error)) from error


def check_routes(config: PPOConfig, inputs: RunInputs) -> None:
    """UserError: a teacher that the policy cannot learn from, or a row of the training prompts without a teacher, or
    without a column that its teacher is told, or with more of it than that has positions."""
    section, tokenizer = config.distillation, inputs.tokenizer
    if not section.enabled:
        return
    check_teachers(config, tokenizer)
    teachers = [*section.teacher_models.values()]
    longest = [0] * len(teachers)
    for row in inputs.train if section.routes or teachers[0].prompt_template is not None else ():
        values = (row.data_source, row.ground_truth, row.extra_info)
        number = _number(section, *values)
        if (template := teachers[number].prompt_template) is not None:
            messages = filled(template, TEMPLATE, row.messages, columns_of(*values))
            text = render(tokenizer, messages, {**config.data.apply_chat_template_kwargs, **row.template_kwargs})
            longest[number] = max(longest[number], len(token_ids(tokenizer, [text])[0]))
    for teacher, prompt in zip(teachers, longest, strict=True):
        if prompt and teacher.url is None:
            model = config.actor_rollout_ref.model
            model = model if teacher.model_path is None else teacher_model(config, teacher)
            check_longest(TEMPLATE, prompt, config.data.max_response_length, model)


def _number(config: DistillationConfig, data_source: str, _: Any, extra_info: Mapping[str, Any]) -> int:
    if not config.routes:
        return 0
    key = data_source if config.teacher_key == "data_source" else str(extra_info.get(config.teacher_key))
    keys = [str(teacher.key) for teacher in config.teacher_models.values()]
    if config.teacher_key not in ("data_source", *extra_info):
        raise UserError(
            f"a row has no '{config.teacher_key}' in extra_info, where distillation.teacher_key is looked up"
        )
    if key not in keys:
        raise UserError(
            f"a row has {config.teacher_key}={key}, and no teacher has that key (they have {', '.join(keys)}): set "
            "distillation.teacher_models.<name>.key"
        )
    return keys.index(key)
