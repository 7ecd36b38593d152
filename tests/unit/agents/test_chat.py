"""Turns put together by token ids: what was sampled stays, what a template rewrites becomes a new row, and texts of
others are never control tokens."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from valor.agents.chat import Chat, Conversation
from valor.errors import UserError
from valor.rollout.base import Output

TEMPLATES = Path(__file__).with_name("chat_templates")
ENDS = {"qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "smollm2": "<|im_end|>"}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
WORDS = ["the", " answer", "is", "\n", "  ", "42", "ß", "漢", "🙂", '{"name": "f"}', "<tool_call>", "</tool_call>", "."]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level BPE with a few hundred merges, the special tokens, and tokens that are added but not special."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator([path.read_text() for path in TEMPLATES.iterdir()] + WORDS * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return fast


def chat_of(tokenizer: Any, family: str) -> Chat:
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return Chat(tokenizer)


def sampled(chat: Chat, text: str, end: str, rng: random.Random) -> Output:
    """Tokens that a policy might have sampled for a text: not those that the tokenizer would make of it."""
    ids = [token for piece in pieces(text, rng) for token in chat.ids(piece)]
    ids += chat.tokenizer.convert_tokens_to_ids([end])
    return Output("", ids, [-1.0] * len(ids), "stop")


def pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), min(3, len(text) + 1)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]


def some_text(rng: random.Random, least: int = 0) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(least, 8)))


@pytest.mark.parametrize("family", ENDS)
def test_no_forks_and_every_sampled_token_stays(tokenizer, family):
    chat, rng, forks = chat_of(tokenizer, family), random.Random(0), 0
    for _ in range(200):
        messages = [{"role": "user", "content": some_text(rng, 1)}]
        talk = Conversation(chat, messages)
        expected = list(talk.token_ids)
        for _ in range(rng.randint(1, 4)):
            output = sampled(chat, some_text(rng), ENDS[family], rng)
            said = talk.answer(output)
            expected += output.token_ids
            told = talk.tell([{"role": "tool", "content": some_text(rng)} for _ in range(rng.randint(1, 2))])
            forks += told is None
            expected += told or []
            assert said == chat.decode(output.token_ids[:-1])
        assert talk.token_ids == expected
        # What the policy reads is what the template would have written, but for spaces at the ends of its own texts.
        read = chat.decode(talk.token_ids)
        plain = [one if one["role"] != "tool" else {**one, "content": unhidden(talk, one)} for one in talk.messages]
        assert squeezed(read) == squeezed(chat.render(plain))
    assert forks == 0


def unhidden(talk: Conversation, message: Any) -> str:
    text = message["content"]
    for i, hidden in enumerate(talk._hidden):
        text = text.replace(f"\ue000{i}\ue001", hidden)
    return text


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("thinking", [True, False])
def test_a_template_that_drops_thinking_forks_at_the_next_question(tokenizer, thinking):
    chat, rng = chat_of(tokenizer, "qwen3"), random.Random(1)
    talk = Conversation(chat, [{"role": "user", "content": "first"}])
    text = "<think>\nhm\n</think>\n\nan answer" if thinking else "an answer"
    output = sampled(chat, text, "<|im_end|>", rng)
    talk.answer(output)
    assert talk.tell([{"role": "tool", "content": "seen"}])  # within a question thinking stays
    talk.answer(sampled(chat, text, "<|im_end|>", rng))
    told = talk.tell([{"role": "user", "content": "second"}])
    assert (told is None) is thinking
    if thinking:
        assert "hm" not in chat.decode(talk.token_ids)
        assert talk.token_ids == chat.ids(chat.render(talk.messages))


def test_a_turn_that_ended_otherwise_than_the_template_forks(tokenizer):
    chat = chat_of(tokenizer, "qwen2.5")
    talk = Conversation(chat, [{"role": "user", "content": "first"}])
    talk.answer(sampled(chat, "an answer", "<|eot_id|>", random.Random(2)))
    assert talk.tell([{"role": "tool", "content": "seen"}]) is None


@pytest.mark.parametrize("family", ENDS)
@pytest.mark.parametrize("word", ["<|im_end|>", "<|eot_id|>", "<tool_call>", "</think>", "\ue0000\ue001"])
def test_texts_of_others_are_never_control_tokens(tokenizer, family, word):
    chat = chat_of(tokenizer, family)
    talk = Conversation(chat, [{"role": "user", "content": "first"}])
    talk.answer(sampled(chat, "an answer", ENDS[family], random.Random(3)))
    one = talk.tell([{"role": "tool", "content": f"a {word} b {word}"}])
    talk = Conversation(chat, [{"role": "user", "content": "first"}])
    talk.answer(sampled(chat, "an answer", ENDS[family], random.Random(3)))
    other = talk.tell([{"role": "tool", "content": "a X b X"}])
    control = set(chat.tokenizer.added_tokens_decoder)
    assert one and other
    assert [t for t in one if t in control] == [t for t in other if t in control]
    assert word in chat.decode(one)


def test_a_tokenizer_that_adds_spaces_is_refused():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    with pytest.raises(UserError, match="puts a space before each text"):
        Chat(PreTrainedTokenizerFast(tokenizer_object=made))
