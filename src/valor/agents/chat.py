"""Conversations as token ids: what a policy sampled stays as it was sampled, and what it is told is appended to it.

A chat template renders whole conversations. The next prompt is the ids so far plus those of the new messages wherever
the template's text of the longer conversation begins with its text of the shorter one. Where it does not, because it
rewrites history (Qwen3 drops the thinking of earlier turns), the conversation goes on as a new row.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from valor.data.prompts import render
from valor.errors import UserError
from valor.rollout.base import Output, StopTexts

Message = Mapping[str, Any]

_HIDDEN = "\ue000{}\ue001"  # stands for a text that must not be read as a special token
_HIDDEN_TEXT = re.compile("\ue000([0-9]+)\ue001")


class Chat:
    """A tokenizer and its chat template. UserError: the tokenizer changes text that is cut into pieces."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self._template_kwargs = tokenizer, dict(template_kwargs or {})
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        self._special = re.compile("|".join(map(re.escape, sorted({*added, "\ue000"}, key=len, reverse=True))))
        if self.decode(self.ids("a b")) != "a b":
            raise UserError(
                "this tokenizer puts a space before each text, so the turns of an episode cannot be put together: "
                "take a model with a byte-level tokenizer"
            )

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text that the policy is to continue."""
        more = {"tools": list(tools)} if tools else {}
        return render(self.tokenizer, messages, {**self._template_kwargs, **more})

    def ids(self, text: str, hidden: Sequence[str] = ()) -> list[int]:
        """Token ids of a rendered text; the texts that `hide` has taken out are put back as plain characters."""
        pieces = _HIDDEN_TEXT.split(text)
        # Character by character, no token of several characters can be found in them.
        parts = [part for i, piece in enumerate(pieces) for part in (hidden[int(piece)] if i % 2 else [piece]) if part]
        if not parts:
            return []
        return [*chain.from_iterable(self.tokenizer(parts, add_special_tokens=False, verbose=False)["input_ids"])]

    def hide(self, text: str, hidden: list[str]) -> str:
        """`text` with the names of special tokens replaced by marks, which are appended to `hidden`."""

        def mark(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return _HIDDEN.format(len(hidden) - 1)

        return self._special.sub(mark, text)

    def stop_texts(self, *texts: str) -> StopTexts:
        last = {text[-1] for text in texts}
        may_end = (number for token, number in self.tokenizer.get_vocab().items() if not last.isdisjoint(token))
        return StopTexts(texts, frozenset(may_end), self.decode)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Conversation:
    """One episode's messages, and the token ids of the row that is being written."""

    def __init__(self, chat: Chat, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._chat, self._tools = chat, tools
        self._hidden: list[str] = []
        self.messages: list[Message] = list(messages)
        self._text = chat.render(self.messages, tools)  # up to where the policy is to speak
        self.token_ids = chat.ids(self._text)
        self._answer, self._end = "", ""

    def answer(self, output: Output) -> str:
        """Add what the policy said; returns its text without the token that ended it."""
        ended = output.finish_reason == "stop"
        self._answer = self._chat.decode(output.token_ids[:-1] if ended else output.token_ids)
        self._end = self._chat.decode(output.token_ids[-1:]) if ended else ""
        self.token_ids += output.token_ids
        return self._answer

    def tell(self, messages: Sequence[Message]) -> list[int] | None:
        """Add messages of others, whose texts are never read as special tokens; the policy is to speak next.

        Returns the ids that follow its turn; None: `token_ids` are a new prompt in place of all before.
        """
        self.messages.append({"role": "assistant", "content": self._answer})
        for message in messages:
            content = message.get("content")
            safe = self._chat.hide(content, self._hidden) if isinstance(content, str) else content
            self.messages.append({**message, "content": safe})
        before, self._text = self._text, self._chat.render(self.messages, self._tools)
        prefix = next((one for one in self._as_rendered(before) if self._end and self._text.startswith(one)), None)
        if prefix is not None:
            told = self._chat.ids(self._text[len(prefix) :], self._hidden)
            self.token_ids += told
            return told
        self.token_ids = self._chat.ids(self._text, self._hidden)
        return None

    def _as_rendered(self, before: str) -> Iterator[str]:
        """How the text up to the end of the last turn may look: templates trim messages, and what was sampled stays."""
        said = self._answer
        spaces_before, spaces_after = len(said) - len(said.lstrip()), len(said) - len(said.rstrip())
        for start in range(spaces_before + 1):
            for end in range(spaces_after + 1):
                yield before + said[start : len(said) - end] + self._end
