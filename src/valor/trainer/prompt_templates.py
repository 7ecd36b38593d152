"""Prompts in which a template stands for the last message: what a teacher or a critic reads and the policy does not."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from valor.config.engine import BackboneConfig
from valor.data.batch import Batch, pad_rows
from valor.data.messages import Messages
from valor.data.positions import num_positions
from valor.data.prompts import render, token_ids
from valor.errors import UserError
from valor.models.load import load_model_config

COLUMNS = ("data_source", "ground_truth", "extra_info")
"""Of a row, what a template may name; entries of extra_info by their names."""
CRITIC_PROMPTS = ("critic_prompts", "critic_prompt_lengths")
"""Columns [B, P] and [B]: prompts of the critic's own."""

_FIELD = re.compile(r"\{(\w+)\}")


def filled(template: str, key: str, messages: Messages, columns: Mapping[str, Any]) -> Messages:
    """The messages, the last one as `template` has it: {prompt} is its text, other names are those of `columns`.

    UserError: `key`, the template's, names a column that the row does not have (or null in it, as files of columns have
    where a row lacks an entry), or the message is not text.
    """
    *before, last = messages
    if not isinstance(last["content"], str):
        raise UserError(f"{key} is for messages of plain text, and a row's last one has parts: drop it")
    values = {name: value for name, value in {**columns, "prompt": last["content"]}.items() if value is not None}
    if missing := [name for name in _FIELD.findall(template) if name not in values]:
        raise UserError(
            f"{key} has {{{missing[0]}}} in it, and a row has no such column, or null there: it has "
            f"{', '.join(sorted(values))}"
        )
    return [*before, {**last, "content": _FIELD.sub(lambda field: str(values[field[1]]), template)}]


def columns_of(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    """What a template may name of a row."""
    return {**extra_info, "data_source": data_source, "ground_truth": ground_truth}


def reading_more(
    batch: Batch,
    template: str,
    key: str,
    tokenizer: Any,
    options: Mapping[str, Any],
    hidden: Sequence[Mapping[str, Any]] | None = None,
) -> Batch:
    """`prompts` and `prompt_lengths` of the rows with the template in place of the last message.

    `options` are those of the chat template, `hidden` further columns of each row.
    """
    names = ("messages", "template_kwargs", *COLUMNS)
    rows = zip(*(batch.objects[name] for name in names), hidden or [{}] * len(batch), strict=True)
    texts = [
        render(tokenizer, filled(template, key, messages, {**columns_of(*values), **more}), {**options, **kwargs})
        for messages, kwargs, *values, more in rows
    ]
    prompts, lengths = pad_rows(token_ids(tokenizer, texts), torch.long)
    return Batch({"prompts": prompts, "prompt_lengths": lengths})


def check_longest(key: str, prompt: int, responses: int, model: BackboneConfig) -> None:
    """UserError: the template `key` makes a prompt of so many tokens, and `model` has too few positions for it and a
    response."""
    positions = num_positions(load_model_config(model).get_text_config())
    if positions is not None and prompt + responses > positions:
        raise UserError(
            f"{key} makes prompts of up to {prompt} tokens, which with data.max_response_length={responses} are more "
            f"than the {positions} positions of '{model.path}': shorten it"
        )


def critic_rows(batch: Batch) -> Batch:
    """The rows as the critic reads them."""
    if CRITIC_PROMPTS[0] not in batch:
        return batch
    return batch.union(Batch({name.removeprefix("critic_"): batch[name] for name in CRITIC_PROMPTS}))
