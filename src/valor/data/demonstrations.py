"""Demonstrations for supervised training: chats as a prompt and a response, with a mask of the assistant's tokens."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from valor.config import SFTDataConfig
from valor.data.batch import Batch, pad_rows
from valor.data.files import parse_messages, read_records
from valor.data.prompts import render, tokenized, truncated
from valor.data.reward_texts import text_rows
from valor.data.sampler import SUBSET_STREAM, subset
from valor.data.templates import ask_template, end_tokens, parts_of
from valor.errors import UserError

logger = logging.getLogger(__name__)

Piece = tuple[str, bool]  # text, and whether the assistant wrote it


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Tokens of one chat up to the last one of the assistant; `loss_mask` is 1 where the assistant wrote the token.

    The first `prompt_length` tokens are the prompt: what stands before the assistant's first turn in this row.
    """

    tokens: array[int]
    loss_mask: array[int]
    prompt_length: int


class DemonstrationDataset(Sequence[Demonstration]):
    """The training or validation chats that `data` asks for, in file order, tokenised when the object is made.

    Every piece of a chat (prompt, assistant turn, what comes between) is tokenised by itself, so the prompt has the
    very tokens that a rollout will see. A turn whose template renders the turns before it otherwise than they were
    written (drops their thoughts, say) begins a row of its own; each turn is learnt once. Rows over `data.max_length`
    are cut (`truncation` left, right, middle) or a UserError that names the first one; those left without a token of
    the assistant are dropped, with a warning.
    """

    def __init__(self, data: SFTDataConfig, tokenizer: Any, split: Literal["train", "val"], seed: int) -> None:
        paths = (data.train_files if split == "train" else data.val_files) or []
        limit = data.train_max_samples if split == "train" else data.val_max_samples
        # Which columns there must be depends on the row: messages, or prompt and response.
        records = [record for path in paths for record in read_records(path)]
        numbers = subset(len(records), limit, seed, 0, SUBSET_STREAM, shuffle=data.shuffle)
        chats = [(where, *chat_of(record, where, data)) for where, record in (records[i] for i in numbers)]
        kwargs, end = data.apply_chat_template_kwargs, next(iter(end_tokens(tokenizer)), None)
        if split == "train":
            parts = parts_of(chat for _, chat, _ in chats) | ({"tools"} if any(tools for *_, tools in chats) else set())
            ask_template(tokenizer, parts | {"end"}, kwargs, needed=["assistant"])
        pieces = [
            (where, row)
            for where, chat, tools in chats
            for row in _rows(tokenizer, chat, where, {**kwargs, "tools": tools} if tools else kwargs)
        ]
        if len(pieces) > len(chats):
            logger.warning("%s: %d chats are %d rows (the template rewrites turns)", split, len(chats), len(pieces))
        texts = [text for _, row in pieces for text, _ in row]
        ids = tokenized(tokenizer, texts, len(texts))
        self._rows: list[Demonstration] = []
        for where, row in pieces:
            self._rows += _sample([(next(ids), own) for _, own in row], end, data, where)
        dropped = len(pieces) - len(self._rows)
        if not self._rows:
            raise UserError(f"data.{split}_files: no sample has an assistant token within data.max_length")
        if dropped:
            gone = "have no assistant token left and are dropped"
            logger.warning("%s: %d of %d samples %s", split, dropped, len(pieces), gone)

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


def chat_of(record: Mapping[str, Any], where: str, data: SFTDataConfig) -> tuple[list[dict[str, Any]], list[Any]]:
    """The row's messages, from its messages column or its prompt and response; and the schemas of its tools."""
    if data.messages_key in record:
        chat = parse_messages(_with_calls(record[data.messages_key]), where, data.messages_key)
    elif data.prompt_key in record and data.response_key in record:
        response = record[data.response_key]
        if not isinstance(response, str):
            raise UserError(f"{where}: '{data.response_key}' must be text, got {type(response).__name__}")
        prompt = parse_messages(record[data.prompt_key], where, data.prompt_key, text_role="user")
        chat = [*prompt, {"role": "assistant", "content": response}]
    else:
        raise UserError(
            f"{where}: needs a column '{data.messages_key}', or '{data.prompt_key}' and '{data.response_key}' "
            f"(it has {', '.join(record)}): rename it, or set data.messages_key, data.prompt_key, data.response_key"
        )
    if chat[0]["role"] == "assistant" or all(m["role"] != "assistant" for m in chat):
        raise UserError(f"{where}: a demonstration needs an assistant message, and something before the first one")
    tools = _without_nulls(_from_json(record.get(data.tools_key)) or [])
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(f"{where}: '{data.tools_key}' must be a list of function schemas, or such a list as JSON")
    return chat, tools


def _with_calls(messages: Any) -> Any:
    """Messages with `tool_calls` as templates want them: arguments that are no JSON text, and content, if empty."""
    messages = _without_nulls(messages)
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if isinstance(calls, list):
            message["content"] = message.get("content") or ""
            functions = [call.get("function") for call in calls if isinstance(call, dict)]
            for function in (one for one in functions if isinstance(one, dict)):
                function["arguments"] = _from_json(function.get("arguments", {}))
    return messages


def _from_json(found: Any) -> Any:
    """What a text says as JSON; the text where it is none."""
    try:
        return json.loads(found) if isinstance(found, str) else found
    except ValueError:
        return found


def _without_nulls(found: Any) -> Any:
    """Parquet gives every dictionary the union of all keys, filled with nulls that chat templates would render."""
    if isinstance(found, Mapping):
        return {key: _without_nulls(value) for key, value in found.items() if value is not None}
    return [_without_nulls(value) for value in found] if isinstance(found, list) else found


def _rows(
    tokenizer: Any, chat: Sequence[Mapping[str, Any]], where: str, template_kwargs: Mapping[str, Any]
) -> list[list[Piece]]:
    """The rendered chat cut before and after every assistant turn; what follows the last turn is left out.

    One row, or several where the template renders earlier turns otherwise when more follows.
    """
    rows: list[list[Piece]] = []
    done = ""
    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, chat[:i], {**template_kwargs, "add_generation_prompt": True}, where)
        after = render(tokenizer, chat[: i + 1], {**template_kwargs, "add_generation_prompt": False}, where)
        if not after.startswith(before):
            raise UserError(
                f"{where}: the chat template renders message {i} otherwise than it asks for it, so its tokens cannot "
                "be told apart: leave data.apply_chat_template_kwargs alone, or set model.custom_chat_template"
            )
        if not rows or not before.startswith(done):
            rows.append([])
            done = ""
        rows[-1] += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    return rows


def _sample(
    pieces: Sequence[tuple[list[int], bool]], end: int | None, data: SFTDataConfig, where: str
) -> list[Demonstration]:
    """One row of tokenised pieces: at most `data.max_length` tokens, ending with one of the assistant; none if no such
    token is left. What a template puts after the end token of a turn was not the assistant's."""
    tokens, written = list[int](), list[bool]()
    for ids, own in pieces:
        rest = ids[::-1].index(end) if own and end in ids else 0
        tokens += ids
        written += [own] * (len(ids) - rest) + [False] * rest
    kept = list(range(len(tokens)))
    if len(kept) > data.max_length:
        if data.truncation == "error":
            raise UserError(
                f"{where}: the sample has {len(kept)} tokens, data.max_length is {data.max_length}: raise it, or set "
                "data.truncation=left|right|middle (cut such samples)"
            )
        kept = truncated(kept, data.max_length, data.truncation)
    prompt = max(1, sum(i < len(pieces[0][0]) for i in kept))  # the first token has nothing that could predict it
    while len(kept) > prompt and not written[kept[-1]]:
        kept.pop()
    if not any(written[i] for i in kept[prompt:]):
        return []
    mask = [0] * prompt + [int(written[i]) for i in kept[prompt:]]
    return [Demonstration(array("i", [tokens[i] for i in kept]), array("b", mask), prompt)]
