"""Demonstrations for supervised training: chats as a prompt and a response, with a mask of the assistant's tokens."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from valor.config import SFTDataConfig
from valor.data.batch import Batch, pad_rows, text_rows
from valor.data.files import read_records
from valor.data.images import refuse_unread
from valor.data.messages import parse_messages, row_options
from valor.data.prompts import Fits, Spans, render, token_owners, tokenized, truncated
from valor.data.sampler import SUBSET_STREAM, subset
from valor.data.templates import ask_template, end_tokens, parts_of
from valor.errors import UserError

logger = logging.getLogger(__name__)

_FLAGS = ("loss_mask", "weight", "train", "training", "loss")  # of verl, OpenAI, axolotl and ms-swift
_BESIDE = ("input", "context", "system_prompt", "history")  # what Alpaca, Dolly and others have beside a question
_LIKE_A_FLAG = re.compile("mask|weight|train|learn|loss|ignore")


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Tokens of one chat up to the last learnt one; `loss_mask` is 1 where the assistant wrote the token.

    The first `prompt_length` tokens are the prompt: what stands before the first learnt turn in this row.
    """

    tokens: array[int]
    loss_mask: array[int]
    prompt_length: int


class DemonstrationDataset(Sequence[Demonstration]):
    """The training or validation chats that `data` asks for, in file order, tokenised when the object is made.

    A chat is rendered as a whole and tokenised once; the mask covers the characters of the assistant. Where a template
    renders earlier turns otherwise once more follows (drops their thoughts, say), a new row begins; each turn is learnt
    once. Rows over `data.max_length` are cut (`truncation` left, right, middle) or a UserError that names the first;
    rows without a token to learn are dropped, with a warning. `fits` checks every row's tokens.
    """

    def __init__(
        self,
        data: SFTDataConfig,
        tokenizer: Any,
        split: Literal["train", "val"],
        seed: int,
        fits: Fits = lambda ids, where: None,
    ) -> None:
        paths = (data.train_files if split == "train" else data.val_files) or []
        limit = data.train_max_samples if split == "train" else data.val_max_samples
        # Which columns there must be depends on the row: messages, or prompt and response.
        records = [record for path in paths for record in read_records(path)]
        numbers = subset(len(records), limit, seed, 0, SUBSET_STREAM, shuffle=data.shuffle)
        rows: list[tuple[str, tuple[str, Spans]]] = []
        parts, names, end = {"end"}, set[str](), next(iter(end_tokens(tokenizer)), None)
        for where, record in (records[i] for i in numbers):
            options = data.apply_chat_template_kwargs | row_options(record, where)
            names |= options.keys()
            chat, learnt = chat_of(record, where, data)
            refuse_unread([name for name in record if record[name]], chat, where)
            parts |= parts_of([chat]) | ({"tools"} if "tools" in options else set())
            rows += [(where, row) for row in _rows(tokenizer, chat, learnt, where, options) or [("", [])]]
        pairs = [records[i][1] for i in numbers if data.messages_key not in records[i][1]]
        if left := [n for n in _BESIDE if n != data.prompt_key and any(pair.get(n) for pair in pairs)]:
            message = (
                "%s: rows have '%s', which is not read: only '%s' is the prompt (data.prompt_key), so join them before"
            )
            logger.warning(message, split, "', '".join(left), data.prompt_key)
        if split == "train":
            ask_template(tokenizer, parts, data.apply_chat_template_kwargs, needed=["assistant"], row_arguments=names)
        if len(rows) > len(numbers):
            logger.warning("%s: %d chats are %d rows (the template rewrites turns)", split, len(numbers), len(rows))
        self._rows: list[Demonstration] = []
        encoded = tokenized(tokenizer, (row for _, row in rows), len(rows), token_owners)
        for (where, _), (ids, owners) in zip(rows, encoded, strict=True):
            for sample in _sample(ids, owners, end, data, where):
                fits(sample.tokens, where)
                self._rows.append(sample)
        if not self._rows:
            raise UserError(f"data.{split}_files: no sample has an assistant token to learn within data.max_length")
        if dropped := len(rows) - len(self._rows):
            message = "%s: %d of %d samples have no assistant token left and are dropped"
            logger.warning(message, split, dropped, len(rows))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row.tokens) for row in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Demonstration:  # type: ignore[override]  # slices are of no use here
        return self._rows[i]

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples as prompts, responses and response_mask, with the counts that the loss divides by."""
        rows = [self._rows[i] for i in indices]
        batch = text_rows([r.tokens[: r.prompt_length] for r in rows], [r.tokens[r.prompt_length :] for r in rows])
        batch["response_mask"], _ = pad_rows([r.loss_mask[r.prompt_length :] for r in rows], torch.float32)
        batch.meta = {"num_tokens": float(batch["response_mask"].sum()), "num_sequences": float(len(rows))}
        return batch


def chat_of(record: Mapping[str, Any], where: str, data: SFTDataConfig) -> tuple[list[dict[str, Any]], set[int]]:
    """The row's messages, from its messages column or its prompt and response; and which of them are to be learnt."""
    prompt: list[dict[str, Any]] = []  # of which none is learnt
    has_pair, system = data.prompt_key in record and data.response_key in record, record.get("system")
    if data.messages_key in record and not (record[data.messages_key] is None and has_pair):
        chat = parse_messages(record[data.messages_key], where, data.messages_key, system=system)
    elif has_pair:
        response = record[data.response_key]
        if isinstance(response, str):
            response = [{"role": "assistant", "content": response}]
        prompt = parse_messages(record[data.prompt_key], where, data.prompt_key, text_role="user", system=system)
        chat = [*prompt, *parse_messages(response, where, data.response_key, text_role="assistant")]
    else:
        raise UserError(
            f"{where}: needs a column '{data.messages_key}', or '{data.prompt_key}' and '{data.response_key}' "
            f"(it has {', '.join(record)}): rename it, or set data.messages_key, data.prompt_key, data.response_key"
        )
    flags = [_is_learnt(message, f"{where}: message {i}") for i, message in enumerate(chat)]
    learnt = {i for i, flag in enumerate(flags) if flag and i >= len(prompt) and chat[i]["role"] == "assistant"}
    if 0 in learnt or all(message["role"] != "assistant" for message in chat):
        raise UserError(f"{where}: a demonstration needs an assistant message, and something before the first one")
    return chat, learnt


def _is_learnt(message: Mapping[str, Any], where: str) -> bool:
    """Whether a message's flags let it be learnt. UserError: a flag is neither 0 nor 1, or of an unknown name."""
    flags = {key: message[key] for key in _FLAGS if key in message}
    for key, value in message.items():
        if key in flags and value not in (0, 1):
            raise UserError(f"{where} has {key}={value!r}: a message is learnt (1) or not (0), nothing between")
        if key not in flags and isinstance(value, bool | int | float | list) and _LIKE_A_FLAG.search(key):
            raise UserError(
                f"{where} has {key}={value!r}, which may say that it is not to be learnt and is not known here: name "
                f"it {_FLAGS[0]} (0 or 1), or leave it out"
            )
    return all(flags.values())


def _rows(
    tokenizer: Any,
    chat: Sequence[Mapping[str, Any]],
    learnt: Iterable[int],
    where: str,
    template_kwargs: Mapping[str, Any],
) -> list[tuple[str, Spans]]:
    """The rendered chat up to the end of the last learnt message, and the characters of the learnt ones.

    One row, or several where the template renders earlier turns otherwise when more follows.
    """
    rows: list[tuple[str, Spans]] = []
    for i in sorted(learnt):
        before = render(tokenizer, chat[:i], {**template_kwargs, "add_generation_prompt": True}, where)
        after = render(tokenizer, chat[: i + 1], {**template_kwargs, "add_generation_prompt": False}, where)
        if not after.startswith(before):
            apart = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
            expected, rendered = (text[max(apart - 12, 0) :][:40] for text in (before, after))
            raise UserError(
                f"{where}: the chat template renders message {i} otherwise than it asks for it ({expected!r}, and then "
                f"{rendered!r}), so its tokens cannot be told apart: give answers what it asks for (thoughts?), or set "
                "data.apply_chat_template_kwargs (some know enable_thinking=false) or model.custom_chat_template"
            )
        if len(after) == len(before):
            continue
        spans = rows.pop()[1] if rows and before.startswith(rows[-1][0]) else []
        rows.append((after, [*spans, (len(before), len(after))]))
    return rows


def _sample(
    tokens: list[int], owners: list[int], end: int | None, data: SFTDataConfig, where: str
) -> list[Demonstration]:
    """One tokenised row: at most `data.max_length` tokens, ending with a learnt one; none if no such token is left.
    What a template puts after the end token of a turn is not learnt."""
    ended = {owner: i for i, (token, owner) in enumerate(zip(tokens, owners, strict=True)) if token == end}
    written = [owner >= 0 and i <= ended.get(owner, i) for i, owner in enumerate(owners)]
    chosen = list(range(len(tokens)))
    if len(chosen) > data.max_length:
        if data.truncation == "error":
            raise UserError(
                f"{where}: the sample has {len(chosen)} tokens, data.max_length is {data.max_length}: raise it, or set "
                "data.truncation=left|right|middle (cut such samples)"
            )
        chosen = truncated(chosen, data.max_length, data.truncation)
    first = next((i for i, owner in enumerate(owners) if owner >= 0), len(owners))
    prompt = max(1, sum(i < first for i in chosen))  # the first token has nothing that could predict it
    while len(chosen) > prompt and not written[chosen[-1]]:
        chosen.pop()
    if not any(written[i] for i in chosen[prompt:]):
        return []
    mask = [0] * prompt + [int(written[i]) for i in chosen[prompt:]]
    return [Demonstration(array("i", [tokens[i] for i in chosen]), array("b", mask), prompt)]
