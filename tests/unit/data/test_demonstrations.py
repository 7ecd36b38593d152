"""Conversations with tools under the templates of three families: every assistant turn is learnt once, nothing else."""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tiny_reward_models import character_tokenizer
from valor.config import SFTConfig
from valor.data.demonstrations import Demonstration, DemonstrationDataset
from valor.data.prompts import check_fits, continued, token_owners
from valor.errors import UserError

# In the manner of Qwen2.5: ChatML, tools in the system message, calls as JSON, tool messages inside a user turn.
CHATML = """
{%- if tools %}<|system|>Tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|user|><tool_response>{{ m.content }}</tool_response><|end|>
{% else %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
# In the manner of Qwen3: the same, and thoughts before the last question of the user are dropped.
THINKING = """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content.split('</think>')[-1] if m.role == 'assistant' and loop.index0 < ns.last else m.content %}
{%- if m.role == 'tool' %}<|user|><tool_response>{{ content }}</tool_response><|end|>
{% else %}<|{{ m.role }}|>{{ content }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
# In the manner of Llama 3: headers, no newline after the end of a turn, tool messages in a role of their own.
HEADERS = """
{{- '<s>' }}{% for m in messages %}{{ '<h>' + ('ipython' if m.role == 'tool' else m.role) + '</h>\n\n' }}
{%- if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}{{ '<|end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<h>assistant</h>\n\n' }}{% endif %}"""

CHAT = [
    {"role": "user", "content": "Ask?"},
    {"role": "assistant", "content": "<think>t1</think>A1"},
    {"role": "tool", "content": "found <|end|> it"},
    {"role": "assistant", "content": "<think>t2</think>A2"},
    {"role": "user", "content": "More?"},
    {"role": "assistant", "content": "<think>t3</think>A3"},
]
CALL = {"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}


def tokenizer(template: str) -> Any:
    """A token a character, but for the end of a turn."""
    made = character_tokenizer(template=template)
    made.add_special_tokens({"eos_token": "<|end|>"})
    return made


def demonstrations(template: str, path: Path, **columns: Any) -> list[Demonstration]:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([columns]), path)
    else:
        path.write_text(json.dumps(columns))
    config = SFTConfig.model_validate({"data": {"train_files": [str(path)], "max_length": 2000}})
    return list(DemonstrationDataset(config.data, tokenizer(template), "train", seed=0))


def learnt(template: str, row: Demonstration) -> list[str]:
    """The stretches of tokens that count, as texts."""
    chosen = [token if counts else 0 for token, counts in zip(row.tokens, row.loss_mask, strict=True)]
    return [part for part in text_of(template, chosen).split("<pad>") if part]


def text_of(template: str, ids: Sequence[int]) -> str:
    return "".join(tokenizer(template).convert_ids_to_tokens(list(ids)))


@pytest.mark.parametrize("template", [CHATML, HEADERS], ids=["chatml", "headers"])
def test_every_assistant_turn_is_learnt_and_nothing_else(template: str, tmp_path: Path) -> None:
    (row,) = demonstrations(template, tmp_path / "c.jsonl", messages=CHAT)
    assert learnt(template, row) == [m["content"] + "<|end|>" for m in CHAT if m["role"] == "assistant"]
    whole = tokenizer(template).apply_chat_template(CHAT, tokenize=False)
    assert text_of(template, row.tokens) == whole.rstrip("\n")  # nothing is learnt of what follows the last turn


def test_the_token_that_ends_a_turn_is_learnt_whatever_the_tokenizer_ends_with(
    tmp_path: Path, monkeypatch: Any
) -> None:
    made = tokenizer(CHATML)
    made.add_special_tokens({"eos_token": "<|endoftext|>"})
    monkeypatch.setattr(sys.modules[__name__], "tokenizer", lambda template: made)
    (row,) = demonstrations(CHATML, tmp_path / "c.jsonl", messages=CHAT)
    assert learnt(CHATML, row) == [m["content"] + "<|end|>" for m in CHAT if m["role"] == "assistant"]


def test_a_template_that_drops_thoughts_makes_rows_of_what_each_turn_was_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        first, second = demonstrations(THINKING, tmp_path / "c.jsonl", messages=CHAT)
    assert "1 chats are 2 rows" in caplog.text
    assert learnt(THINKING, first) == ["<think>t1</think>A1<|end|>", "<think>t2</think>A2<|end|>"]
    assert learnt(THINKING, second) == ["<think>t3</think>A3<|end|>"]
    made = tokenizer(THINKING)
    for row, number in ((first, 4), (second, 6)):
        # What a rollout would be asked with, and what it would have to say, token for token.
        last = max(i for i, m in enumerate(CHAT[:number]) if m["role"] == "assistant")
        asked = made.apply_chat_template(CHAT[:last], tokenize=False, add_generation_prompt=True)
        said = CHAT[last]["content"] + "<|end|>\n"
        expected = made(asked + said, add_special_tokens=False)["input_ids"]
        assert list(row.tokens) == expected[: len(row.tokens)] and len(expected) - len(row.tokens) <= 1
    prompt = text_of(THINKING, second.tokens[: second.prompt_length])
    assert "t1" not in prompt and "A2" in prompt and prompt.endswith("More?<|end|>\n<|assistant|>")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("as_text", [False, True])
def test_calls_and_tools_are_shown_as_the_template_wants_them(kind: str, as_text: bool, tmp_path: Path) -> None:
    arguments = json.dumps(CALL["function"]["arguments"]) if as_text else CALL["function"]["arguments"]
    call = {"type": "function", "function": {"name": "search", "arguments": arguments}}
    chat = [
        CHAT[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        CHAT[2],
        {**CHAT[3], "tool_calls": None},
    ]
    schema = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
    tools = json.dumps([schema]) if as_text or kind == "parquet" else [schema]  # parquet has no empty dictionary
    (row,) = demonstrations(CHATML, tmp_path / f"c.{kind}", messages=chat, tools=tools)
    said = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call><|end|>'
    assert learnt(CHATML, row) == [said, "<think>t2</think>A2<|end|>"]
    text = text_of(CHATML, row.tokens)
    assert text.startswith(f"<|system|>Tools:{json.dumps(schema)}<|end|>\n<|user|>Ask?")
    assert "null" not in text and "None" not in text


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"messages": CHAT[:2], "tools": "search"}, "'tools' must be a list of function schemas"),
        ({"messages": CHAT[:2], "tools": ["search"]}, "'tools' must be a list of function schemas"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, "'content' of message 1 must be text"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": "a", "tool_calls": ["f"]}]}, "refuses these messages"),
        (
            {"messages": [{"role": "user", "content": "<image>?"}, CHAT[1]], "images": ["a.png"]},
            "this command reads text",
        ),
    ],
)
def test_what_cannot_be_shown_is_one_line(columns: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        demonstrations(CHATML, tmp_path / "c.jsonl", **columns)


SENTENCEPIECE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + before + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' + before }}{% endif %}"
)


def prefixing_tokenizer(kind: str, before: str) -> PreTrainedTokenizerFast:
    """Puts a space (as "▁" or "Ġ") before texts, or not, as `kind` says; `before` stands before every message."""
    space = "Ġ" if kind.startswith("bytes") else "▁"
    byte_level = pre_tokenizers.ByteLevel.alphabet() if space == "Ġ" else []
    letters = [*byte_level] or list("▁abcdefghijklmnopqrstuvwxyzTY0123456789.,?!+=<>|\n")
    merges = [(word[:i], word[i]) for word in (f"{space}The", "The", f"{space}is") for i in range(1, len(word))]
    tokens = dict.fromkeys(["<s>", "</s>", "<unk>", *sorted(letters), *(a + b for a, b in merges)])
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, unk_token="<unk>")
    made = Tokenizer(model)
    if space == "Ġ":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "bytes behind a space")
        made.post_processor = processors.ByteLevel(trim_offsets=kind != "bytes with whole offsets")
        made.decoder = decoders.ByteLevel()
    elif kind == "normalizer":  # Llama 2's older files
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=kind, split=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = SENTENCEPIECE.replace("before", repr(before))
    return fast


KINDS = ["never", "first", "always", "normalizer", "bytes", "bytes with whole offsets", "bytes behind a space"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", ["", " ", "\n", ": </s>"])
@pytest.mark.parametrize("answers", [("The is 4", "Yes"), (" The", "\nthe")])
def test_what_is_learnt_is_what_the_whole_text_has(
    kind: str, before: str, answers: tuple[str, str], tmp_path: Path
) -> None:
    made = prefixing_tokenizer(kind, before)
    said = iter(answers)
    chat = [
        {"role": role, "content": next(said) if role == "assistant" else "a?"} for role in ("user", "assistant") * 2
    ]
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": chat}))
    config = SFTConfig.model_validate({"data": {"train_files": [str(path)]}})
    (row,) = DemonstrationDataset(config.data, made, "train", seed=0)
    whole = made(made.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
    assert list(row.tokens) == whole[: len(row.tokens)] and set(whole[len(row.tokens) :]) <= {*made("\n")["input_ids"]}
    counted = [[token for token, counts in zip(row.tokens, row.loss_mask, strict=True) if counts]]
    assert sum(token == made.eos_token_id for token in counted[0]) == 2
    # Each answer's tokens, wherever the prompt's own tokens are the beginning of the whole text's.
    expected: list[int] = []
    for end in (2, 4):
        text = made.apply_chat_template(chat[:end], tokenize=False)
        asked = made.apply_chat_template(chat[: end - 1], tokenize=False, add_generation_prompt=True)
        ids, prompt = (made(one, add_special_tokens=False)["input_ids"] for one in (text, asked))
        if ids[: len(prompt)] != prompt:
            return
        rest = ids[len(prompt) :]
        expected += rest[: rest.index(made.eos_token_id) + 1]
    assert counted[0] == expected


def test_a_token_across_an_edge_is_the_answers_and_nothing_is_said_without_offsets() -> None:
    made = prefixing_tokenizer("never", "")
    across = [-1, 0]  # "The" begins in the prompt and ends in the answer
    assert token_owners(made, [("aThe", [(2, 4)])])[0][1] == across
    assert token_owners(made, [("ab", [])]) == [(made("ab")["input_ids"], [-1, -1])]
    ((prompt, answer),) = continued(prefixing_tokenizer("always", ""), ["a</s>"], ["The"])
    assert prefixing_tokenizer("always", "").convert_ids_to_tokens([*prompt, *answer]) == ["▁", "a", "</s>", "▁The"]
    assert len(prompt) == 3 and continued(made, ["ab"], [""]) == [(made("ab")["input_ids"], [])]

    class Slow:
        is_fast = False

    with pytest.raises(UserError, match="Slow has no character offsets"):
        token_owners(Slow(), [("a", [])])


@pytest.mark.parametrize("key", ["loss_mask", "weight", "train", "training", "loss"])
@pytest.mark.parametrize("off", [0, 0.0, False])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_that_are_not_to_be_learnt_are_not(key: str, off: Any, kind: str, tmp_path: Path) -> None:
    on = type(off)(1)
    chat = [CHAT[0], {**CHAT[1], key: off}, CHAT[4], {**CHAT[5], key: on}, CHAT[4], CHAT[3]]
    (row,) = demonstrations(CHATML, tmp_path / f"c.{kind}", messages=chat)
    assert learnt(CHATML, row) == [m["content"] + "<|end|>" for m in chat[3::2]]
    assert text_of(CHATML, row.tokens[: row.prompt_length]).endswith("More?<|end|>\n<|assistant|>")
    with pytest.raises(UserError, match="no sample has an assistant token"):
        demonstrations(CHATML, tmp_path / "d.jsonl", messages=[CHAT[0], {**CHAT[1], key: off}])


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ({"weight": 0.5}, "message 1 has weight=0.5: a message is learnt"),
        ({"loss_mask": "no"}, "message 1 has loss_mask='no'"),
        ({"train_detail": []}, "train_detail=.* is not known here: name it loss_mask"),
        ({"is_masked": True}, "is_masked=True"),
        ({"loss_weight": 0}, "loss_weight=0"),
    ],
)
def test_flags_that_are_not_understood_are_refused(flag: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        demonstrations(CHATML, tmp_path / "c.jsonl", messages=[CHAT[0], {**CHAT[1], **flag}])
    demonstrations(CHATML, tmp_path / "d.jsonl", messages=[CHAT[0], {**CHAT[1], "train_note": "a text", "index": 0}])


def test_a_prompts_own_turns_are_not_learnt(tmp_path: Path) -> None:
    (row,) = demonstrations(CHATML, tmp_path / "c.jsonl", prompt=CHAT[:5], response="A3")
    assert learnt(CHATML, row) == ["A3<|end|>"]
    greeting = [{"role": "assistant", "content": "Hello", "weight": 0}, *CHAT[:2]]
    (row,) = demonstrations(CHATML, tmp_path / "d.jsonl", messages=greeting)
    assert learnt(CHATML, row) == [CHAT[1]["content"] + "<|end|>"]


def test_a_column_system_stands_before_a_chat_and_parts_are_one_text(tmp_path: Path) -> None:
    (row,) = demonstrations(CHATML, tmp_path / "c.jsonl", system="Be kind.", prompt="Q", response="A")
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Q"}]
    chat.append({"role": "assistant", "content": [{"type": "text", "text": "A"}]})
    (same,) = demonstrations(CHATML, tmp_path / "d.jsonl", messages=chat)
    (beside,) = demonstrations(CHATML, tmp_path / "e.jsonl", messages=chat[1:], system="Be kind.")
    assert row == same == beside and learnt(CHATML, row) == ["A<|end|>"] and "Be kind." in text_of(CHATML, row.tokens)


def test_a_part_of_the_question_in_a_column_of_its_own_is_told(tmp_path: Path, caplog: Any) -> None:
    """As in Alpaca's rows (input) and OpenOrca's (system_prompt)."""
    demonstrations(CHATML, tmp_path / "c.jsonl", prompt="Add.", input="1 2", system_prompt="Be kind.", response="3")
    assert "train: rows have 'input', 'system_prompt', which is not read: only 'prompt' is the prompt" in caplog.text
    caplog.clear()
    demonstrations(CHATML, tmp_path / "d.jsonl", prompt="Add.", input="", source="x", response="3")
    demonstrations(CHATML, tmp_path / "e.jsonl", messages=CHAT[:2], input="1 2")
    assert not caplog.text


def test_a_response_may_be_messages_of_which_those_of_the_assistant_are_learnt(tmp_path: Path) -> None:
    """As in TRL's rows of prompt and completion."""
    (row,) = demonstrations(CHATML, tmp_path / "c.jsonl", prompt=CHAT[:1], response=CHAT[1:4])
    assert learnt(CHATML, row) == [f"{CHAT[i]['content']}<|end|>" for i in (1, 3)]
    listed = '[{"role": "user"}]'  # an answer in JSON, and no message
    (row,) = demonstrations(CHATML, tmp_path / "d.jsonl", prompt="Q", response=listed)
    assert learnt(CHATML, row) == [f"{listed}<|end|>"]
    with pytest.raises(UserError, match=r"'response' must be text, or a list of messages .* got int"):
        demonstrations(CHATML, tmp_path / "e.jsonl", prompt="Q", response=4)


def test_the_column_of_messages_may_be_null_where_another_file_had_them(tmp_path: Path) -> None:
    """As it is in a table that was joined of both kinds of rows."""
    (row,) = demonstrations(CHATML, tmp_path / "c.parquet", messages=None, prompt=CHAT[:5], response="A3")
    assert learnt(CHATML, row) == ["A3<|end|>"]


SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"limit": {"default": None, "enum": [None, 1]}}}}


@pytest.mark.parametrize("as_text", [False, True])
def test_nulls_that_a_row_has_are_shown_and_those_of_arrow_are_not(as_text: bool, tmp_path: Path) -> None:
    arguments = {"q": None, "ids": [{"a": None}]}
    call = {"id": None, "function": {"name": "f", "arguments": json.dumps(arguments) if as_text else arguments}}
    chat = [CHAT[0], {"role": "assistant", "content": None, "name": None, "tool_calls": [call]}]
    tools = json.dumps([SCHEMA]) if as_text else [SCHEMA]
    (row,) = demonstrations(CHATML, tmp_path / "c.jsonl", messages=chat, tools=tools)
    text = text_of(CHATML, row.tokens)
    assert json.dumps(arguments) in text and json.dumps(SCHEMA) in text
    (row,) = demonstrations(CHATML, tmp_path / "c.parquet", messages=chat, tools=tools)
    assert (json.dumps(arguments) in text_of(CHATML, row.tokens)) == as_text
    two = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": 1}, {"b": [{"c": 2}, {"d": 3}]})]
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": two}]
    (row,) = demonstrations(CHATML, tmp_path / "d.parquet", messages=chat)
    assert "null" not in text_of(CHATML, row.tokens) and '{"b": [{"c": 2}, {"d": 3}]}' in text_of(CHATML, row.tokens)


@pytest.mark.parametrize("tokens", [5, 10**6])
@pytest.mark.parametrize("positions", [9, None])
def test_rows_beyond_the_model_are_named(tokens: int, positions: int | None) -> None:
    class Described:
        vocab_size, max_position_embeddings = tokens, positions

    ids = torch.arange(12).tolist()
    if tokens == 5:
        with pytest.raises(UserError, match="row 3: has token 11, and the model 'm' knows 5 tokens"):
            check_fits("m", Described, ids, "row 3")
    elif positions is not None:
        with pytest.raises(UserError, match="row 3: has 12 tokens, and the model 'm' has 9 positions"):
            check_fits("m", Described, ids, "row 3")
    else:
        check_fits("m", Described, ids, "row 3")
