"""Prompts as tokens: template, limits, subsets."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from valor.config import DataConfig
from valor.data.prompts import PromptDataset, render
from valor.errors import UserError


def data_file(path: Path, contents: list[str], **more: Any) -> str:
    records = [
        {
            "data_source": "even" if i % 2 == 0 else "odd",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
            **more,
        }
        for i, text in enumerate(contents)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def config(path: str, **options: Any) -> DataConfig:
    return DataConfig(**{"train_files": [path], "val_files": [path], "seed": 42, **options})


def rendered(text: str) -> str:
    return f"<user>{text}<assistant>"


def test_rows_are_rendered_and_tokenised(tmp_path: Path, tokenizer: Any) -> None:
    dataset = PromptDataset(config(data_file(tmp_path / "a.jsonl", ["hi", "1 + 1?", "\u00fc"])), tokenizer)
    assert len(dataset) == 3
    assert [tokenizer.decode(r.prompt_ids) for r in dataset] == [rendered(t) for t in ("hi", "1 + 1?", "\u00fc")]
    row = dataset[1]
    assert (row.index, row.uid, row.data_source, row.ground_truth) == (1, "1", "odd", "1")
    assert row.messages == [{"role": "user", "content": "1 + 1?"}]
    assert row.extra_info == {"index": 1}
    assert isinstance(row.prompt_ids, list) and all(type(i) is int for i in row.prompt_ids)


def test_template_arguments(tmp_path: Path, tokenizer: Any) -> None:
    path = data_file(tmp_path / "a.jsonl", ["hi"])
    options = {"think": False, "add_generation_prompt": False}
    dataset = PromptDataset(config(path, apply_chat_template_kwargs=options), tokenizer)
    assert tokenizer.decode(dataset[0].prompt_ids) == "<user>hi<think=False>"


SHOWS = "{{ tools | tojson if tools else '' }}{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_row_brings_its_tools_and_its_arguments_of_the_template(tmp_path: Path, tokenizer: Any, caplog: Any) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = SHOWS
    more = {"tools": [{"name": "f", "default": None}], "chat_template_kwargs": '{"mood": "calm"}'}
    path = data_file(tmp_path / "a.jsonl", ["hi"], **more)
    options = {"apply_chat_template_kwargs": {"mood": "cross"}}
    (row,) = PromptDataset(config(path, **options), tokenizer)
    assert tokenizer.decode(row.prompt_ids) == '[{"name": "f", "default": null}]calmhi'
    assert row.template_kwargs == {"mood": "calm", "tools": more["tools"]}  # for a reward model's template, too
    # A run with agents shows its own tools, and says so.
    (row,) = PromptDataset(config(path, **options), tokenizer, tools_of=lambda info: [{"name": "g"}])
    assert tokenizer.decode(row.prompt_ids) == '[{"name": "g"}]crosshi'
    assert row.template_kwargs == {"mood": "cross", "tools": [{"name": "g"}]}
    assert "train: the rows' own mood, tools: not shown" in caplog.text


def test_columns_with_the_names_of_what_the_run_gives_are_told(tmp_path: Path, tokenizer: Any, caplog: Any) -> None:
    info = {"completions": ["a"], "uid": 3, "answer": "4"}
    PromptDataset(config(data_file(tmp_path / "a.jsonl", ["hi"], extra_info=info)), tokenizer)
    assert "train: the rows' own completions, uid: not shown" in caplog.text


# The second prompt is <user>abcdefg<assistant>: 24 tokens.
@pytest.mark.parametrize(
    ("side", "limit", "text"),
    [
        ("left", 15, "defg<assistant>"),
        ("right", 20, "<user>abcdefg<assist"),
        ("middle", 20, "<user>abcd" + "assistant>"),
        ("middle", 5, "<u" + "nt>"),
    ],
)
def test_truncation_acts(tmp_path: Path, tokenizer: Any, side: str, limit: int, text: str) -> None:
    path = data_file(tmp_path / "a.jsonl", [".", "abcdefg"])
    dataset = PromptDataset(config(path, max_prompt_length=limit, truncation=side), tokenizer)
    assert tokenizer.decode(dataset[1].prompt_ids) == text
    assert len(dataset[1].prompt_ids) == limit


def test_a_prompt_over_the_limit_stops_the_run_by_default(tmp_path: Path, tokenizer: Any) -> None:
    path = data_file(tmp_path / "a.jsonl", ["ab", "abcdefg", "abcdefgh"])
    PromptDataset(config(path, max_prompt_length=25), tokenizer)
    with pytest.raises(UserError) as error:
        PromptDataset(config(path, max_prompt_length=20), tokenizer)
    text = str(error.value)
    assert text.startswith(f"{path}, line 2: the prompt has 24 tokens, data.max_prompt_length is 20")
    assert "filter_overlong_prompts" in text and "\n" not in text
    with pytest.raises(UserError, match="without images or agents"):  # an episode begins with the messages, uncut
        PromptDataset(config(path, max_prompt_length=20, truncation="left"), tokenizer, tools_of=lambda info: [])


def test_overlong_prompts_can_be_left_out(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = data_file(tmp_path / "a.jsonl", ["ab", "abcdefg", "abc", "abcd"])
    options = config(path, max_prompt_length=20, filter_overlong_prompts=True)
    with caplog.at_level(logging.WARNING):
        dataset = PromptDataset(options, tokenizer)
    assert [r.index for r in dataset] == [0, 2]  # exactly at the limit stays
    assert "train: 2 of 4 over data.max_prompt_length=20 tokens left out" in caplog.text
    with pytest.raises(UserError, match=r"all 4 prompts are longer than data.max_prompt_length=5"):
        PromptDataset(config(path, max_prompt_length=5, filter_overlong_prompts=True), tokenizer)


def test_sample_limits(tmp_path: Path, tokenizer: Any) -> None:
    path = data_file(tmp_path / "a.jsonl", [str(i) for i in range(100)])

    def indices(split: Any = "train", **options: Any) -> list[int]:
        return [r.index for r in PromptDataset(config(path, **options), tokenizer, split)]

    assert indices(train_max_samples=3, shuffle=False) == [0, 1, 2]
    some = indices(train_max_samples=10)
    assert len(set(some)) == 10 and some == sorted(some) and some != list(range(10))
    assert some == indices(train_max_samples=10)
    assert some != indices(train_max_samples=10, seed=43)
    assert indices(train_max_samples=1000) == list(range(100))
    assert indices("val", train_max_samples=3, val_max_samples=5, shuffle=False) == [0, 1, 2, 3, 4]
    assert indices("val") == list(range(100))


def test_a_tokenizer_without_a_template_and_messages_it_refuses(tmp_path: Path, tokenizer: Any) -> None:
    path = data_file(tmp_path / "a.jsonl", ["x"], prompt=[{"role": "tool", "content": "x"}])
    with pytest.raises(UserError, match=r"a.jsonl, line 1: the chat template refuses these messages: no tools here"):
        PromptDataset(config(path), tokenizer)

    class Plain:
        chat_template = None

    with pytest.raises(UserError, match=r"no chat template.*custom_chat_template"):
        render(Plain(), [{"role": "user", "content": "x"}])  # type: ignore[arg-type]


def test_no_validation_files_is_a_user_error(tmp_path: Path, tokenizer: Any) -> None:
    path = data_file(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(UserError, match="no data file"):
        PromptDataset(config(path, val_files=None), tokenizer, "val")
