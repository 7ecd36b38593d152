"""What a chat template leaves out, and how it ends a turn: found before a run by rendering small conversations."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from inspect import signature
from os.path import commonprefix
from pathlib import Path
from typing import Any

from valor.data.prompts import render
from valor.errors import UserError, did_you_mean

logger = logging.getLogger(__name__)

PROBE = _MARK = "Probe7"
_FUNCTION = {"name": _MARK, "description": _MARK, "arguments": {}, "parameters": {"type": "object", "properties": {}}}
_CALL = {"id": f"{_MARK}:00", "type": "function", "function": _FUNCTION}
_QUESTION, _ANSWER = {"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}
# Parts of conversations that a template may leave out: what users call them, and a conversation with a mark there.
_PARTS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "user": ("what the user says", [{"role": "user", "content": _MARK}]),
    "assistant": ("what the assistant says", [_QUESTION, {**_ANSWER, "content": _MARK}, _QUESTION]),
    "system": ("system messages", [{"role": "system", "content": _MARK}, _QUESTION]),
    "developer": ("developer messages", [{"role": "developer", "content": _MARK}, _QUESTION]),
    "tool": (
        "what tools answer",
        [
            _QUESTION,
            {**_ANSWER, "content": "", "tool_calls": [_CALL | {"function": _FUNCTION | {"name": "lookup"}}]},
            {"role": "tool", "name": "lookup", "tool_call_id": _CALL["id"], "content": _MARK},
        ],
    ),
    "tool_answers_text": (
        "what tools answer to calls in the content",
        [_QUESTION, _ANSWER, {"role": "tool", "name": "lookup", "tool_call_id": _CALL["id"], "content": _MARK}],
    ),
    "tools": ("tools (their schemas)", [_QUESTION]),
    "tool_calls": ("tool_calls", [_QUESTION, {**_ANSWER, "tool_calls": [_CALL]}]),
    "reasoning_content": ("reasoning_content", [_QUESTION, {**_ANSWER, "reasoning_content": _MARK}]),
    "thoughts": (
        "what stands before </think>",
        [_QUESTION, {**_ANSWER, "content": f"<think>\n{_MARK}\n</think>\n\nSo"}],
    ),
}


def template_text(text: str) -> str:
    """The Jinja text of a `custom_chat_template`: itself, or the content of the file. UserError: neither."""
    if "{{" in text or "{%" in text:
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8-sig")  # a mark of the file would stand in every prompt
    except (OSError, ValueError, RuntimeError) as error:
        why = f"custom_chat_template={text[:99]!r} is no Jinja text, and no file that can be read ({error})"
        raise UserError(why[:300]) from None


def keeps(tokenizer: Any, part: str, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the template renders `part`, one of `_PARTS`. UserError: it refuses a conversation that has it."""
    name, messages = _PARTS[part]
    options = {**(kwargs or {}), "add_generation_prompt": False, **({"tools": [_CALL]} if part == "tools" else {})}
    return _MARK in render(tokenizer, messages, options, f"a conversation with {name}")


def written_call(tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> str | None:
    """How the template writes a call of the tool `PROBE`, where it writes answers; None where it leaves calls out."""
    options = {**(kwargs or {}), "add_generation_prompt": False, "tools": [_CALL]}

    def turn(**answer: Any) -> str:
        texts = [render(tokenizer, [_QUESTION, *more], options) for more in ([], [{**_ANSWER, **answer}])]
        return texts[1][len(commonprefix(texts)) :]  # noqa: RUF071  # texts, not paths

    with suppress(UserError):
        before, _, behind = turn(content=_MARK).partition(_MARK)
        call = turn(content="", tool_calls=[_CALL]).removeprefix(before).removesuffix(behind)
        return call if _MARK in call else None
    return None


def parts_of(chats: Iterable[Sequence[Mapping[str, Any]]]) -> set[str]:
    """The parts of these conversations that a template may leave out, schemas of tools aside."""
    messages = [message for chat in chats for message in chat]
    names = {message["role"] for message in messages} | {key for message in messages for key in message if message[key]}
    thinks = any(m["role"] == "assistant" and "</think>" in str(m.get("content")) for m in messages)
    return _PARTS.keys() & (names | ({"thoughts"} if thinks else set()))


def ask_template(
    tokenizer: Any,
    parts: Collection[str],
    kwargs: Mapping[str, Any] | None = None,
    needed: Collection[str] = (),
    row_arguments: Collection[str] = (),
) -> None:
    """Log which of a run's `parts` and arguments (`kwargs`, and names in `row_arguments`) the template leaves out, and
    the end of a turn, if not the tokenizer's end token.

    UserError: the template cannot be rendered, or leaves out what the user says or a `needed` part.
    """
    lost, needed = [], {"user", *needed}
    for part, (name, _) in _PARTS.items():
        with nullcontext() if part in needed else suppress(UserError):  # rows that it refuses are refused by themselves
            if part in {*needed, *parts} and not keeps(tokenizer, part, kwargs):
                lost.append(name)
                if part in needed:
                    raise UserError(f"the chat template leaves out {name}: give another as custom_chat_template")
    read = {*signature(tokenizer.apply_chat_template).parameters, *re.findall(r"\w+", str(tokenizer.chat_template))}
    for name in sorted({*(kwargs or ()), *row_arguments} - read):
        near = did_you_mean(name, read, cutoff=0.68)
        logger.warning("the chat template does not read '%s': it has no effect%s", name, near)
    end = end_of_turn(tokenizer)
    lost += ["an end token behind the assistant's texts"] if end is None and "end" in parts else []
    if lost:
        logger.warning("the chat template leaves out %s: the model never reads them", " and ".join(lost))
    if end not in (None, tokenizer.eos_token_id):
        what = tokenizer.convert_ids_to_tokens(end)
        logger.warning("the chat template ends a turn with %s: so do generation and the exported model", what)


def end_of_turn(tokenizer: Any) -> int | None:
    """The token that the template writes after an assistant's text, if any."""
    try:
        text = render(tokenizer, [_QUESTION, {**_ANSWER, "content": _MARK}], {"add_generation_prompt": False})
    except UserError:
        return None
    added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    tail = tokenizer(text.rpartition(_MARK)[2], add_special_tokens=False)["input_ids"]
    ends = sorted((number for number in tail if number in added), key=lambda number: not added[number].special)
    return ends[0] if ends else None


def end_tokens(tokenizer: Any) -> list[int]:
    """The token with which the template ends a turn, then the tokenizer's end token, as far as there are such."""
    return list(dict.fromkeys(end for end in (end_of_turn(tokenizer), tokenizer.eos_token_id) if end is not None))
