"""A prompt and a response as the tokens that a reward model reads: its own tokenizer, its own chat template.

The same function makes the texts that a reward model is trained on and those that it scores in a run.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from valor.data.batch import Batch, text_rows, unpadded
from valor.data.messages import Messages
from valor.data.prompts import continued, render
from valor.data.templates import end_tokens
from valor.errors import UserError

_WITH_ANSWER = {"add_generation_prompt": False, "continue_final_message": False}
_TOO_LARGE = 1_000_000  # tokenizers without a limit name one such as 1e30


class Encoded(NamedTuple):
    """Token ids, and whether the beginning was cut off to fit."""

    ids: list[int]
    is_cut: bool


def prompt_text(messages: Messages) -> str:
    """A prompt as plain text: the content of a single message; of several, each behind its role."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


class RewardTexts:
    """How one sequence classifier reads a conversation.

    Through its chat template when it has one, with the response as the assistant's message. Else, when the tokenizer
    has a separator token (encoders), prompt and response as a pair of texts; else both as one text, a blank line
    between them. Special tokens are those of the template or those that the tokenizer adds, never both. Texts of more
    than `max_length` tokens lose their first ones, the prompt's before the response's; special tokens stay.
    """

    def __init__(self, tokenizer: Any, max_length: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length or 0
        self.as_chat = bool(getattr(tokenizer, "chat_template", None))
        self.as_pair = not self.as_chat and tokenizer.sep_token_id is not None

    @property
    def separator_id(self) -> int | None:
        """The token after which the second text of a pair begins, for models with token types; else None."""
        has_types = self.as_pair and "token_type_ids" in self.tokenizer.model_input_names
        return self.tokenizer.sep_token_id if has_types else None

    def encode(
        self,
        prompts: Sequence[Messages],
        responses: Sequence[str | Mapping[str, Any]],
        where: str = "prompt",
        row_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Encoded]:
        """One text a response, which is text or a message of the assistant; `row_options` are those of its row.

        UserError: the chat template refuses a conversation (`where` names it), or none could show its tools.
        """
        options: dict[str, Any] = {"return_special_tokens_mask": True, "verbose": False}
        by_row = row_options or [{}] * len(prompts)
        answers = [{"role": "assistant", "content": r} if isinstance(r, str) else r for r in responses]
        if self.as_chat:
            texts = [
                render(self.tokenizer, [*prompt, answer], {**more, **_WITH_ANSWER}, where)
                for prompt, answer, more in zip(prompts, answers, by_row, strict=True)
            ]
            return self._fitted(self.tokenizer(texts, add_special_tokens=False, **options))
        if any("tools" in more for more in by_row) or any("tool_calls" in answer for answer in answers):
            raise UserError(f"{where}: rows have tools, and the tokenizer has no chat template to show them")
        contents = [str(answer["content"]) for answer in answers]
        if self.as_pair:
            return self._fitted(self.tokenizer([prompt_text(p) for p in prompts], contents, **options))
        both = zip(prompts, contents, strict=True)
        return self._fitted(self.tokenizer([f"{prompt_text(p)}\n\n{r}" for p, r in both], **options))

    def _fitted(self, out: Mapping[str, Any]) -> list[Encoded]:
        return [
            self._fit(ids, special) for ids, special in zip(out["input_ids"], out["special_tokens_mask"], strict=True)
        ]

    def rows(self, batch: Batch) -> tuple[Batch, list[bool]]:
        """The texts of a batch's `messages` and `response_text` as rows for the reward model, and which were cut."""
        columns = batch.objects
        shown = columns["template_kwargs"] if self.as_chat else None  # of plain texts tools are no part
        texts = self.encode(columns["messages"], columns["response_text"], row_options=shown)
        return text_rows([text.ids for text in texts]), [text.is_cut for text in texts]

    def _fit(self, ids: list[int], special: list[int]) -> Encoded:
        if not ids:  # an empty text of a tokenizer that adds nothing: the model needs one token
            return Encoded([self.tokenizer.pad_token_id or 0], False)
        over = len(ids) - self.max_length if self.max_length else 0
        if over <= 0:
            return Encoded(ids, False)
        bos = self.tokenizer.bos_token_id
        loose = [i for i, is_special in enumerate(special) if not is_special and not (i == 0 and ids[0] == bos)]
        dropped = set(loose[:over])
        return Encoded([token for i, token in enumerate(ids) if i not in dropped], True)


class CriticTexts:
    """How a published critic reads a conversation: the prompt up to the assistant's turn, then the response's tokens.

    Where its tokenizer is that of the policy (same tokens, same template), the policy's own ids are taken; else the
    text is rendered and tokenised again, with the end token behind a finished response. Rows of more than `max_length`
    tokens lose the first ones of the prompt. `reads_end`: the model was made to be read behind the last token too, as
    process reward models are; a critic's last value is the one before it.
    """

    separator_id = None

    def __init__(
        self, tokenizer: Any, policy_tokenizer: Any, max_length: int | None = None, *, reads_end: bool = False
    ) -> None:
        self.tokenizer, self.reads_end = tokenizer, reads_end
        self.max_length = max_length or 0
        self.agrees = (
            tokenizer.get_vocab() == policy_tokenizer.get_vocab()
            and tokenizer.chat_template == policy_tokenizer.chat_template
        )

    def rows(self, batch: Batch) -> tuple[Batch, list[bool]]:
        """Prompts and responses as rows for the critic, and which prompts were cut."""
        if self.agrees:
            prompts, responses = unpadded(batch, "prompt"), unpadded(batch, "response")
        else:
            prompts, responses = self._tokenized(batch)
        limits = [max(1, self.max_length - len(r)) if self.max_length else None for r in responses]
        cut = [prompt[-limit:] if limit else prompt for prompt, limit in zip(prompts, limits, strict=True)]
        return text_rows(cut, responses), [len(a) < len(b) for a, b in zip(cut, prompts, strict=True)]

    def token_starts(
        self, messages: Messages, response: str, template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int] | None:
        """The character at which each token of a response begins; None where the tokens are the policy's own."""
        if self.agrees:
            return None
        before = render(self.tokenizer, messages, template_kwargs)
        text, options = before + response, {"add_special_tokens": False, "verbose": False}
        offsets = self.tokenizer(text, return_offsets_mapping=True, **options)["offset_mapping"]
        _, ids = continued(self.tokenizer, [before], [response])[0]
        return [max(start - len(before), 0) for start, _ in offsets[len(offsets) - len(ids) :]]

    def _tokenized(self, batch: Batch) -> tuple[list[list[int]], list[list[int]]]:
        rows = zip(batch.objects["messages"], batch.objects["template_kwargs"], strict=True)
        texts = [render(self.tokenizer, messages, kwargs) for messages, kwargs in rows]
        pairs = continued(self.tokenizer, texts, batch.objects["response_text"])
        end = end_tokens(self.tokenizer)[:1]
        finished = [reason == "stop" for reason in batch.objects["finish_reason"]]
        return [prompt for prompt, _ in pairs], [
            ids + end if done or not ids else ids for (_, ids), done in zip(pairs, finished, strict=True)
        ]


def longest_text(tokenizer: Any, positions: int | None) -> int | None:
    """The most tokens that a tokenizer's and a model's own limits allow; None without either."""
    limits = [n for n in (tokenizer.model_max_length, positions) if n is not None and 0 < n < _TOO_LARGE]
    return int(min(limits)) if limits else None
