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

from tiny_reward_models import character_tokenizer
from valor.config import SFTConfig
from valor.data.demonstrations import Demonstration, DemonstrationDataset
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
    ],
)
def test_what_cannot_be_shown_is_one_line(columns: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        demonstrations(CHATML, tmp_path / "c.jsonl", **columns)
