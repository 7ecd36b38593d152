"""Conversations as token ids: sampled tokens stay as they are, and observations are appended to them.

A chat template renders whole conversations. The next prompt is the ids so far plus those of the new messages wherever
the template's text of the longer conversation begins with its text of the shorter one. Where it does not, because it
rewrites history (Qwen3 drops the thinking of earlier turns), the conversation continues in a new row.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import chain
from typing import Any

from valor.agents.episode import EpisodeFailed
from valor.agents.formats import BUILT_IN, FORMATS, OF_TOKENS, Format, Parsed, Schema, ToolCall
from valor.data.images import IMAGES, PLACEHOLDER, ImageFiles, image_files, parse_images, with_images, with_parts
from valor.data.messages import kind_of, with_calls
from valor.data.prompts import render
from valor.data.templates import PROBE, keeps, written_call
from valor.errors import UserError
from valor.rollout.base import Output, StopTexts

Message = Mapping[str, Any]

_HIDDEN = "\ue000{}\ue001"  # around the bytes, in hexadecimal, of a text that must not be read as a special token
_HIDDEN_TEXT = re.compile("\ue000((?:[0-9a-f]{2})+)\ue001")
_ANSWER = "\ue000\ue001"  # in the place of an answer
_OPEN_THOUGHT = re.compile(r"<think>\s*\Z")


def format_of(tokenizer: Any, call: str | None) -> str | None:
    """The format that reads a call of `PROBE` as the template writes it. Where it writes none, or JSON without tags (so
    does vLLM's for Phi-4-mini, and asks for another form), by the tokenizer's tokens, else hermes."""
    fitting = [name for name, read in BUILT_IN.items() if call and read(call, ()) == ([ToolCall(PROBE, {})], "")]
    if call is None or call.startswith("{"):
        fitting = [name for token, name in OF_TOKENS.items() if token in tokenizer.get_added_vocab()] or fitting
    return fitting[0] if fitting else None if call else "hermes"


class Chat:
    """A tokenizer and its chat template. UserError: the tokenizer changes text that is cut into pieces.

    images: reads images, which messages have as parts {"type": "image", "file": file}; None: messages are texts.
    """

    def __init__(
        self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, images: ImageFiles | None = None
    ) -> None:
        self.tokenizer, self._template_kwargs, self._images = tokenizer, dict(template_kwargs or {}), images
        self._shown: dict[str, bool] = {}
        self._format: Format | None = None
        added = [*tokenizer.added_tokens_decoder.values()]
        self._control = {"\ue000", *(str(token) for token in added if token.special)}
        names = sorted(self._control.union(map(str, added)), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)))
        if self.decode(self.ids("a b")) != "a b":
            raise UserError(
                "this tokenizer puts a space before each text, so the turns of an episode cannot be put together: "
                "take a model with a byte-level tokenizer"
            )

    def use_format(self, name: str) -> None:
        """Take the format of calls of this name; `auto`: the one that the template writes."""
        self._format = None if name == "auto" else FORMATS[name]

    @property
    def format(self) -> Format:
        """The format of calls. UserError: no format reads what the template writes."""
        if self._format is None:
            call = written_call(self.tokenizer, self._template_kwargs)
            if (name := format_of(self.tokenizer, call)) is None:
                written = f"the chat template writes tool calls that no format reads with certainty ({call!r:.150})"
                raise UserError(
                    f"{written}: set rollout.multi_turn.format to one of {', '.join(FORMATS)}, or to one of yours"
                )
            self._format = FORMATS[name]
        return self._format

    def parse(self, text: str, schemas: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        return self.format(text, schemas)

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), **options: Any) -> str:
        """The text that the policy is to continue."""
        more = {"tools": list(tools)} if tools else {}
        return render(self.tokenizer, messages, {**self._template_kwargs, **more, **options})

    def shows(self, part: str) -> bool:
        """Whether the template renders this part of conversations (`valor.data.templates`). One that it refuses by
        itself counts: the conversation that has it is refused too, or is another one."""
        if part not in self._shown:
            self._shown[part] = True
            with suppress(UserError):
                self._shown[part] = keeps(self.tokenizer, part, self._template_kwargs)
        return self._shown[part]

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendered text; what `safe` has hidden in it becomes plain characters."""
        pieces = _HIDDEN_TEXT.split(text)
        # Tokenized character by character, they hold no token of several characters.
        plain = (bytes.fromhex(piece).decode(errors="replace") if i % 2 else [piece] for i, piece in enumerate(pieces))
        parts = [part for piece in plain for part in piece if part]
        if not parts:
            return []
        return [*chain.from_iterable(self.tokenizer(parts, add_special_tokens=False, verbose=False)["input_ids"])]

    def ids_with_images(self, text: str, files: Sequence[str]) -> tuple[list[int], str]:
        """Token ids of a rendered text, and its images as `valor.data.images.IMAGES` has them.

        EpisodeFailed: the text has another number of images than `files`.
        """
        pieces = [text] if self._images is None else text.split(self._images.processor.image_token)
        if len(pieces) - 1 != len(files):
            raise EpisodeFailed(f"the chat template shows {len(pieces) - 1} of {len(files)} images")
        return with_images(self.ids(pieces[0]), zip(files, map(self.ids, pieces[1:]), strict=True))

    def row_messages(self, row: Mapping[str, Any]) -> list[Message]:
        """The messages of a row, with parts for its images."""
        if not row.get(IMAGES):
            return row["messages"]
        files = (file for file, _ in image_files(row[IMAGES]))
        messages = [with_parts(message, PLACEHOLDER) for message in row["messages"]]
        for message in messages:
            parts = message["content"]
            message["content"] = [part | {"file": next(files)} if part["type"] == "image" else part for part in parts]
        return [*messages]

    def files(self, images: Sequence[Any], where: str) -> list[str]:
        """The files of images, which are what a row of the data may have. EpisodeFailed: one is none, or the run has no
        images."""
        if self._images is None:
            raise EpisodeFailed(f"{where} answered with an image, and the run reads text: set data.image_key")
        try:
            sources = parse_images(images, where)
            return [self._images.file_of(source, f"{where}, image {i}") for i, source in enumerate(sources)]
        except UserError as error:
            raise EpisodeFailed(str(error)) from None

    def read(self, messages: Any, where: str) -> list[Message]:
        """Messages of others with their parts {"type": "image", "image": image} in files. EpisodeFailed: as `files`, or
        a part is neither that nor {"type": "text", "text": text}."""
        several = isinstance(messages, Iterable) and not isinstance(messages, Mapping)
        said: list[Any] = [*messages] if several else [messages]  # one message may stand alone
        if not all(isinstance(message, Mapping) for message in said):
            raise EpisodeFailed(f"{where} answered with {kind_of(messages)}, which is neither a text nor messages")
        shown = [with_calls(message, where, "messages") for message in said]
        for message in shown:
            parts = message.get("content")
            if not isinstance(parts, list):
                continue
            for part in parts:
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind not in ("text", "image") or part.get(kind) is None:
                    raise EpisodeFailed(f"{where} answered with a part of a message that is neither text nor an image")
            if self._images is None and all(part["type"] == "text" for part in parts):
                message["content"] = "".join(part["text"] for part in parts)
                continue
            files = iter(self.files([part["image"] for part in parts if part["type"] == "image"], where))
            message["content"] = [
                {"type": "image", "file": next(files)} if part["type"] == "image" else part for part in parts
            ]
        return [*shown]

    def safe(self, value: Any, *, answer: bool = False) -> Any:
        """A text of others, or messages and schemas, with the names of special tokens hidden from template and
        tokenizer. An `answer` of the assistant has tokens for thoughts and calls: there only control tokens are."""

        def hidden(name: re.Match[str]) -> str:
            is_own = answer and name[0] not in self._control
            return name[0] if is_own else _HIDDEN.format(name[0].encode(errors="replace").hex())

        if isinstance(value, str):
            return self._names.sub(hidden, value)
        if isinstance(value, Mapping):
            said = "content" if value.get("role") == "assistant" else None
            return {
                self.safe(key): part if key == "role" else self.safe(part, answer=key == said)
                for key, part in value.items()
            }
        return [self.safe(part) for part in value] if isinstance(value, list | tuple) else value

    def stop_texts(self, *texts: str) -> StopTexts:
        last = {text[-1] for text in texts} | {"\ufffd"}  # which stands for a part of a character
        vocabulary = self.tokenizer.get_vocab()
        decoded = self.tokenizer.batch_decode([[number] for number in vocabulary.values()])
        pairs = zip(vocabulary.items(), decoded, strict=True)
        may_end = (number for (name, number), text in pairs if not last.isdisjoint(name + text))
        return StopTexts(texts, frozenset(may_end), self.decode)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Conversation:
    """One episode's messages, and the token ids of the row that is being written.

    `messages` are read as they are. `opening`: a text of others at the end of the last one.
    `images`: those of the row, as `valor.data.images.IMAGES` has them.
    """

    def __init__(
        self, chat: Chat, messages: Sequence[Message], tools: Sequence[Schema] = (), opening: str | None = None
    ) -> None:
        self._chat, self._tools = chat, chat.safe(tools)
        self._begin(messages, opening)
        self._first = self.messages

    def restart(self, text: str) -> list[int]:
        """Begin anew with the first messages, and a text of others at the end of the last one; returns the prompt."""
        self._begin(self._first, text)
        return self.token_ids

    def answer(self, output: Output) -> str:
        """Add the policy's turn; returns its text without the token that ended it."""
        ended = output.finish_reason == "stop"
        self._answer = self._chat.decode(output.token_ids[:-1] if ended else output.token_ids)
        self._end = self._chat.decode(output.token_ids[-1:]) if ended else ""
        self.token_ids += output.token_ids
        return self._answer

    def tell(self, messages: Sequence[Message]) -> list[int] | None:
        """Add messages of others, whose texts are never read as special tokens; the policy is to speak next.

        Returns the ids that follow its turn; None: `token_ids` are a new prompt in place of all before.
        """
        added = self._chat.safe(messages)
        start = self._start_of(added)
        if start is None:
            self.token_ids, self.images = self._chat.ids_with_images(self._text, _files(self.messages))
            return None
        ids, images = self._chat.ids_with_images(self._text[start:], _files(added))
        self.images = _joined(self.images, images, len(self.token_ids))
        self.token_ids += ids
        return ids

    def _start_of(self, added: Sequence[Message]) -> int | None:
        """Add the answer and what follows; where, in the text, that starts. None: the text has another history.

        The answer is content, in its own words. Where these cannot be found again, or the template knows calls, results
        and thoughts in fields of their own alone, it is a message in parts.
        """
        before, earlier, said = self._text, self.messages, {"role": "assistant", "content": self._answer}
        in_words: tuple[list[Message], str] | None = None

        def render(answer: Message) -> None:
            self.messages = [*earlier, answer, *added]
            self._text = self._chat.render(self.messages, self._tools)

        with suppress(UserError):
            if any(m["role"] == "tool" for m in added) and not self._chat.shows("tool_answers_text"):
                raise UserError("the template shows results behind calls in a field of their own alone")
            render(said)
            if (start := self._end_of_answer(before)) is not None:
                return start
            # The prompt may have opened what the answer goes on with, such as a thought: then it is part of the answer.
            marked = [*earlier, {**said, "content": _ANSWER}, *added]
            header, mark, _ = self._chat.render(marked, self._tools).partition(_ANSWER)
            thought = _OPEN_THOUGHT.search(before)  # behind a header with another one, as Nemotron's template writes
            opened = (
                before.removeprefix(header) if mark and before.startswith(header) else thought[0] if thought else ""
            )
            render({**said, "content": opened + self._answer})
            if (start := self._end_of_answer(before)) is not None:
                return start
            in_words = self.messages, self._text
        with suppress(UserError) if in_words else nullcontext():
            parts = self._in_parts(added)
            if in_words is None or "tool_calls" in parts:
                try:
                    render(parts)
                except UserError:  # by what the policy wrote, maybe
                    render(parts := {**parts, "content": ""})
                if (start := self._end_of_parts(earlier, parts)) is not None or in_words is None:
                    return start
        if in_words is not None:
            self.messages, self._text = in_words
        return None

    def _in_parts(self, added: Sequence[Message]) -> Message:
        """The answer with its calls apart, and their ids as in the results that are added."""
        calls, content = self._chat.parse(self._answer, self._tools)
        thoughts, end, _ = self._answer.rpartition("</think>")
        ids = [str(result.get("tool_call_id") or "") for result in added if result["role"] == "tool"]
        shown = [(call.name, call.arguments) if isinstance(call, ToolCall) else ("malformed", {}) for call in calls]
        written = [
            {"id": name_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for (name, arguments), name_id in zip(shown, [*ids, *ids[-1:] * len(shown)], strict=False)
        ]
        said: dict[str, Any] = {"role": "assistant", "content": thoughts + end + content}
        return {**said, "tool_calls": written} if written else said

    def _end_of_parts(self, earlier: Sequence[Message], answer: Message) -> int | None:
        """As `_end_of_answer`, where the answer is in parts: the template shows them, and changes nothing before."""
        so_far, turn = (
            self._chat.render(messages, self._tools, add_generation_prompt=False)
            for messages in (earlier, [*earlier, answer])
        )
        words = [part.strip() for part in re.split("</?think>", answer["content"])]
        if not (self._end and self._text.startswith(turn) and turn.startswith(so_far)):
            return None
        if not all(part in turn[len(so_far) :] for part in words):
            return None
        end = self._text.find(self._end, len(turn.rstrip().removesuffix(self._end)))
        between = self._text[len(turn) : max(end, 0)]
        return None if end < 0 or between.strip() else end + len(self._end)

    def _begin(self, messages: Sequence[Message], opening: str | None) -> None:
        self.messages: list[Message] = list(messages)
        if opening is not None:
            content, opening = messages[-1].get("content"), self._chat.safe(opening)
            if isinstance(content, list):
                joined = [*content, {"type": "text", "text": f"\n{opening}"}]
            else:
                joined = "\n".join(part for part in (content, opening) if part)
            self.messages[-1] = {**messages[-1], "content": joined}
        self._text = self._chat.render(self.messages, self._tools)  # up to where the policy is to speak
        self.token_ids, self.images = self._chat.ids_with_images(self._text, _files(self.messages))
        self._answer, self._end = "", ""

    def _end_of_answer(self, before: str) -> int | None:
        """Where, in the text, the token ends that ended the answer to `before`. None: the text has another answer, or
        another end. Templates trim messages, and what was sampled stays: spaces around the answer may be missing."""
        if not (self._end and self._text.startswith(before)):
            return None
        rest, words = self._text[len(before) :], self._answer.strip()
        end = rest.find(self._end, rest.find(words) + len(words))
        shown = rest[: max(end, 0)]
        if end < 0 or shown.strip() != words or shown not in self._answer:
            return None
        return len(before) + end + len(self._end)


def _files(messages: Iterable[Message]) -> list[str]:
    contents = (message.get("content") for message in messages)
    return [part["file"] for content in contents if isinstance(content, list) for part in content if "file" in part]


def _joined(images: str, following: str, length: int) -> str:
    """The images of a row of `length` tokens and of those that follow it."""
    later = (f"{file}\t{start + length}" for file, start in image_files(following))
    return "\n".join([*images.splitlines(), *later])
