"""Chat templates are asked, before a run, what they make of a conversation: small ones are rendered and looked at."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from valor.data.prompts import render
from valor.errors import UserError

logger = logging.getLogger(__name__)

_MARK = "Probe7"
_QUESTION, _CALL = {"role": "user", "content": "Question"}, {"role": "assistant", "content": "Call"}
_FUNCTION = {"name": _MARK, "arguments": {"word": _MARK}}
_SCHEMA = {"name": _MARK, "description": _MARK, "parameters": {"type": "object", "properties": {}}}
_TOOL = {"role": "tool", "name": "lookup", "tool_call_id": "call00001"}
_THOUGHT = {"role": "assistant", "content": f"<think>\n{_MARK}\n</think>\n\nAnswer"}

# What may be lost: its name in messages to the user, a conversation that has it with the mark, template arguments.
_PARTS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "user": ("what the user says", [{"role": "user", "content": _MARK}], {}),
    "assistant": ("what the assistant says", [_QUESTION, {"role": "assistant", "content": _MARK}, _QUESTION], {}),
    "system": ("system messages", [{"role": "system", "content": _MARK}, _QUESTION], {}),
    "developer": ("developer messages", [{"role": "developer", "content": _MARK}, _QUESTION], {}),
    "tool": ("what tools answer", [_QUESTION, _CALL, {**_TOOL, "content": _MARK}], {}),
    "tools": ("tools (their schemas)", [_QUESTION], {"tools": [{"type": "function", "function": _SCHEMA}]}),
    "tool_calls": (
        "tool_calls",
        [
            _QUESTION,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call00001", "type": "function", "function": _FUNCTION}],
            },
            {**_TOOL, "content": "1"},
        ],
        {},
    ),
    "reasoning_content": (
        "reasoning_content",
        [_QUESTION, {"role": "assistant", "content": "Answer", "reasoning_content": _MARK}],
        {},
    ),
    "thoughts": ("what stands before </think>", [_QUESTION, _THOUGHT], {}),
}


def template_text(given: str) -> str:
    """The Jinja text of a `custom_chat_template`: itself, or what the file that it names holds. UserError: neither."""
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"custom_chat_template={given[:200]!r} is no Jinja text, and no file that can be read ({reason})"
        ) from None


def keeps(tokenizer: Any, part: str, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the template renders `part`, one of `_PARTS`. UserError: it refuses a conversation that has it."""
    name, messages, more = _PARTS[part]
    options = {**(kwargs or {}), "add_generation_prompt": False, **more}
    return _MARK in render(tokenizer, messages, options, f"a conversation with {name}")


def parts_of(chats: Iterable[Sequence[Mapping[str, Any]]]) -> set[str]:
    """Those parts of conversations that a template may lose."""
    found: set[str] = set()
    for message in (message for chat in chats for message in chat):
        found |= {message["role"], *(name for name in ("tool_calls", "reasoning_content") if message.get(name))}
        if message["role"] == "assistant" and "</think>" in str(message.get("content")):
            found.add("thoughts")
    return found & _PARTS.keys()


def check_template(tokenizer: Any, kwargs: Mapping[str, Any] | None = None, needed: Collection[str] = ()) -> None:
    """UserError: the template cannot be rendered, or leaves out what the user says or one of the `needed` parts."""
    for part in ("user", *needed):
        if not keeps(tokenizer, part, kwargs):
            raise UserError(
                f"the chat template leaves out {_PARTS[part][0]}, without which there is nothing to learn: set "
                "custom_chat_template to another one (Jinja text, or a file with it)"
            )


def tell_losses(tokenizer: Any, parts: Collection[str], kwargs: Mapping[str, Any] | None = None) -> None:
    """One line about those of a run's `parts` that its template leaves out. What it refuses, it refuses in the data."""

    def is_lost(part: str) -> bool:
        try:
            return not keeps(tokenizer, part, kwargs)
        except UserError:
            return False

    if lost := [name for part, (name, *_) in _PARTS.items() if part in parts and is_lost(part)]:
        logger.warning("the chat template leaves out %s: the model never reads them", " and ".join(lost))


def end_of_turn(tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> int | None:
    """The token that the template writes behind an assistant's text; None: it writes none."""
    answered = [_QUESTION, {"role": "assistant", "content": _MARK}]
    try:
        text = render(tokenizer, answered, {**(kwargs or {}), "add_generation_prompt": False})
    except UserError:
        return None
    known = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    tail = tokenizer(text.rpartition(_MARK)[2], add_special_tokens=False)["input_ids"]
    added = [number for number in tail if number in known]
    return next((number for number in added if known[number].special), next(iter(added), None))


def end_tokens(tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> list[int]:
    """The token with which the template ends a turn, then the tokenizer's end token, where there are such."""
    ends = (end_of_turn(tokenizer, kwargs), tokenizer.eos_token_id)
    return list(dict.fromkeys(number for number in ends if number is not None))


def tell_end(tokenizer: Any, known: Collection[int], kwargs: Mapping[str, Any] | None = None) -> None:
    """One line where a turn ends otherwise than by one of the model's `known` end tokens."""
    end = end_of_turn(tokenizer, kwargs)
    if end is None:
        logger.warning("the chat template writes no end token behind a turn: a model that learns from it learns no end")
    elif end not in known:
        logger.warning(
            "the chat template ends a turn with %s (token %d), which is no end token of the model: generation stops at "
            "it, and the generation_config.json of an export names it",
            tokenizer.convert_ids_to_tokens(end),
            end,
        )
