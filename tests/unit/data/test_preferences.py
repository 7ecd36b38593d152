"""Preference pairs: what a row may look like, what is refused, what is held out, and how accuracy is counted."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tiny_reward_models import TEMPLATE, character_tokenizer
from valor.algorithms import bradley_terry_loss
from valor.config import RMConfig
from valor.data.preferences import (
    Preference,
    PreferenceDataset,
    load_preferences,
    preference_metrics,
    read_preferences,
)
from valor.data.reward_texts import RewardTexts
from valor.errors import UserError

USER = {"role": "user", "content": "Why?"}
SYSTEM = {"role": "system", "content": "Be kind."}
GOOD, BAD = {"role": "assistant", "content": "So."}, {"role": "assistant", "content": "No."}
PAIR = {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "source": "s"}


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(path: Path, **more) -> RMConfig:
    sections = {"data": {"train_files": [str(path)], "val_share": 0.0, **more.pop("data", {})}}
    return RMConfig.model_validate(sections | more)


def read(path: Path, **data) -> list:
    config = config_of(path, data=data)
    return read_preferences(config.data.train_files, config.data)


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {**PAIR, "prompt": [USER]},
        {**PAIR, "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD], "source": "s"},
        {**PAIR, "prompt": "ignored", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        *(
            {key: f"{start}Human: Why?\n\nAssistant: {says}" for key, says in (("chosen", "So."), ("rejected", "No."))}
            | {"source": "s"}
            for start in ("\n\n", "")
        ),
        {
            "prompt": "\n\nHuman: Why?\n\nAssistant:",
            "chosen": "\n\nHuman: Why?\n\nAssistant: So.",
            "rejected": "\n\nHuman: Why?\n\nAssistant: No.",
            "source": "s",
        },
    ],
)
def test_text_messages_and_whole_chats_are_the_same_pair(tmp_path, row):
    (pair,) = read(write(tmp_path / "p.jsonl", row))
    assert (pair.prompt, pair.chosen, pair.rejected, pair.source) == ([USER], GOOD, BAD, "s")


def test_a_transcript_may_end_with_an_empty_turn(tmp_path):
    row = {"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"}
    (pair,) = read(write(tmp_path / "p.jsonl", row | {"rejected": row["chosen"][:-1]}))
    assert [message["content"] for message in pair.prompt] == ["a", "b", "c"]
    assert (pair.chosen["content"], pair.rejected["content"]) == ("d", "")


@pytest.mark.parametrize("chat", [[], ["user"], ["system", "user"]])
def test_a_system_message_of_the_prompt_is_not_lost(tmp_path, chat):
    before = [message for message in (SYSTEM, USER) if message["role"] in chat]
    row = {"prompt": [SYSTEM, USER], "chosen": [*before, GOOD], "rejected": [*before, BAD]}
    (pair,) = read(write(tmp_path / "p.jsonl", row))
    assert (pair.prompt, pair.chosen, pair.rejected) == ([SYSTEM, USER], GOOD, BAD)
    if chat:
        row |= {"chosen": [*before, GOOD, USER, GOOD], "rejected": [*before, GOOD, USER, BAD]}
        (pair,) = read(write(tmp_path / "p.jsonl", row))
        assert pair.prompt == [SYSTEM, USER, GOOD, USER]


@pytest.mark.parametrize("prompt", ["Why?", [USER]])
def test_answers_of_several_turns_go_on_from_the_prompt(tmp_path, prompt):
    turns = [{"role": "assistant", "content": "Hm."}, {"role": "user", "content": "Well?"}]
    row = {"prompt": prompt, "chosen": [*turns, GOOD], "rejected": [*turns, BAD]}
    (pair,) = read(write(tmp_path / "p.jsonl", row))
    assert (pair.prompt, pair.chosen, pair.rejected) == ([USER, *turns], GOOD, BAD)


def test_a_column_system_stands_before_messages_without_one_alone(tmp_path):
    own, row = {"role": "system", "content": "Be brief."}, {**PAIR, "system": SYSTEM["content"]}
    for prompt, whole in (([USER], [SYSTEM, USER]), ([own, USER], [own, USER])):
        (pair,) = read(write(tmp_path / "p.jsonl", row | {"prompt": prompt}))
        assert pair.prompt == whole


def test_a_column_system_stands_before_a_prompt_of_text_and_before_whole_chats(tmp_path):
    chats = {"chosen": [USER, GOOD], "rejected": [USER, {**BAD, "content": [{"type": "text", "text": "No."}]}]}
    for row, prompt in ((PAIR, [SYSTEM, USER]), (PAIR | chats, [SYSTEM, USER]), (chats, [SYSTEM, USER])):
        (pair,) = read(write(tmp_path / "p.jsonl", row | {"system": "Be kind."}))
        assert (pair.prompt, pair.chosen, pair.rejected) == (prompt, GOOD, BAD)


@pytest.mark.parametrize("written", [json.dumps, str])
def test_messages_as_text_are_messages(tmp_path, written):
    """As a table that holds texts alone has them, in JSON or as Python prints them; and Anthropic's prompts."""
    row = {"prompt": written([USER]), "chosen": written([USER, GOOD]), "rejected": written([BAD])}
    (pair,) = read(write(tmp_path / "p.jsonl", row))
    assert (pair.prompt, pair.chosen, pair.rejected) == ([USER], GOOD, BAD)
    asked = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    (pair,) = read(write(tmp_path / "p.jsonl", {**PAIR, "prompt": asked}))
    assert [message["content"] for message in pair.prompt] == ["a", "b", "c"]
    (pair,) = read(write(tmp_path / "p.jsonl", {**PAIR, "prompt": "Human: a\n\nAssistant: b", "chosen": "[{}]"}))
    assert (pair.prompt[0]["content"], pair.chosen["content"]) == ("Human: a\n\nAssistant: b", "[{}]")


def test_columns_may_have_other_names(tmp_path):
    row = {"question": "Why?", "better": "So.", "worse": "", "strength": 2, "source": "x"}
    keys = {"prompt_key": "question", "chosen_key": "better", "rejected_key": "worse"}
    (pair,) = read(write(tmp_path / "p.jsonl", row), margin_key="strength", **keys)
    assert (pair.chosen, pair.rejected, pair.source, pair.margin) == (GOOD, {**BAD, "content": ""}, "x", 2)


def test_a_column_margin_is_read_as_trl_does(tmp_path, caplog):
    path = write(tmp_path / "p.jsonl", {**PAIR, "margin": 2.5}, PAIR, {**PAIR, "margin": None})
    assert [pair.margin for pair in read(path)] == [2.5, None, None]
    assert "1 of 3 pairs are to be won by the margin in their column 'margin'" in caplog.text
    assert [pair.margin for pair in read(path, margin_key=None)] == [None] * 3


@pytest.mark.parametrize(
    ("row", "data", "message"),
    [
        (
            {**PAIR, "prompt": "[{'role': 'user', 'content': '?'}\n {'role'"},
            {},
            "'prompt' is a list of messages as text, and not in JSON: write it with json.dumps",
        ),
        ({**PAIR, "prompt": [{"role": "human", "content": "?"}]}, {}, "message 0 is 'human': templates call it 'user'"),
        ({**PAIR, "prompt": [{"role": "System", "content": "?"}]}, {}, "'System': templates call it 'system'"),
        ({**PAIR, "prompt": [{"from": "human", "value": "?"}]}, {}, r"got nothing \(it has from, value: rename them\)"),
        (PAIR, {"margin_key": "strength"}, "'strength' must be a number of at least 0, got nothing"),
        ({**PAIR, "margin": "much"}, {}, "got str .* \\(data.margin_key=null leaves it unread\\)"),
        ({**PAIR, "tools": ["f"]}, {}, "'tools' must be a list of function schemas"),
        ({**PAIR, "chat_template_kwargs": 3}, {}, "'chat_template_kwargs' must be a dictionary"),
        ({**PAIR, "chosen": "a\ud83d"}, {}, "'chosen' has half of a surrogate pair"),
        ({"prompt": "Why?", "chosen": "So."}, {}, "column 'rejected' missing"),
        ({**PAIR, "prompt": "<image>Why?", "image": "a.png"}, {}, "its column 'image' is not read: this command reads"),
        ({"chosen": "So.", "rejected": "No."}, {}, "there is no prompt"),
        ({**PAIR, "chosen": [USER]}, {}, "'chosen' must end with an assistant message"),
        ({**PAIR, "chosen": 3}, {}, "'chosen' must be text, or a list of messages"),
        ({"chosen": [USER, GOOD], "rejected": [{**USER, "content": "?"}, BAD]}, {}, "answer different prompts"),
        ({**PAIR, "margin": "much"}, {"margin_key": "margin"}, "'margin' must be a number of at least 0, got str"),
        (
            {**PAIR, "margin": float("nan")},
            {"margin_key": "margin"},
            r"'margin' must be a number of .*, got float \('nan'\)",
        ),
        (
            {**PAIR, "margin": -2},
            {"margin_key": "margin"},
            r"'margin' must be a number of at least 0, got int \('-2'\)",
        ),
        (
            {"prompt": [SYSTEM, {**USER, "content": "?"}], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            {},
            "'chosen' and 'prompt' have different messages before the response",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, data, message):
    with pytest.raises(UserError, match=message) as caught:
        read(write(tmp_path / "p.jsonl", {**PAIR, "margin": 1, "strength": 1}, row), **data)
    assert "p.jsonl, line 2" in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_an_empty_file_is_one_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n")
    with pytest.raises(UserError, match="the file holds no rows"):
        read(path)


def pairs(n: int, source: str = "s") -> list[dict]:
    return [{**PAIR, "prompt": f"{source}{i // 2}", "chosen": f"yes {i}", "source": source} for i in range(n)]


def load(path: Path, **more) -> tuple[PreferenceDataset, PreferenceDataset | None]:
    return load_preferences(config_of(path, **more), RewardTexts(character_tokenizer(template=TEMPLATE)))


def test_prompts_of_every_source_are_held_out_whole(tmp_path):
    path = write(tmp_path / "p.jsonl", *pairs(40, "a"), *pairs(20, "b"))
    train, val = load(path, data={"val_share": 0.2})
    assert val is not None and Counter(p.source for p in val) == {"a": 8, "b": 4}
    assert Counter(p.source for p in train) == {"a": 32, "b": 16}
    assert not {str(p.prompt) for p in train} & {str(p.prompt) for p in val}
    again = load(path, data={"val_share": 0.2})[1]
    other = load(path, data={"val_share": 0.2}, trainer={"seed": 1})[1]
    assert list(again or []) == list(val) != list(other or [])


def test_a_share_that_leaves_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.val_share=0\.1 of 1 prompts leaves no pair for validation"):
        load(write(tmp_path / "p.jsonl", *pairs(2)), data={"val_share": 0.1})
    with pytest.raises(UserError, match="leaves no pair for training"):
        load(write(tmp_path / "p.jsonl", *pairs(2)), data={"val_share": 1.0})


def test_a_batch_is_two_texts_a_row(tmp_path):
    rows = [PAIR, {**PAIR, "rejected": "Never.", "m": 0.5}]
    train, val = load(write(tmp_path / "p.jsonl", *rows), loss={"margin": 0.25})
    batch, tokenizer = train.batch([1, 0]), character_tokenizer()
    texts = [
        [tokenizer.decode(r[:n]).replace(" ", "") for r, n in zip(batch[f"{c}s"], batch[f"{c}_lengths"], strict=True)]
        for c in ("prompt", "response")
    ]
    assert texts[0] == ["<s>[user]Why?</s>[assistant]So.</s>"] * 2
    assert texts[1] == ["<s>[user]Why?</s>[assistant]Never.</s>", "<s>[user]Why?</s>[assistant]No.</s>"]
    assert val is None and batch["margin"].tolist() == [0.25, 0.25] and batch.meta == {"num_pairs": 2.0}


TRIMS = TEMPLATE.replace("{{ m.content }}", "{{ m.content | trim }}")


@pytest.mark.parametrize(
    ("template", "longest", "chosen", "rejected"),
    [
        (TEMPLATE, None, "So.", "So."),
        (TEMPLATE, None, "", ""),
        (TEMPLATE, 24, "GOOD" + "x" * 40, "BAD!" + "x" * 40),
        (TRIMS, None, "yes", " yes\n"),
        (None, 10, "a" + "x" * 40, "b" + "x" * 40),
    ],
)
def test_pairs_of_the_same_tokens_are_left_out_and_counted(tmp_path, caplog, template, longest, chosen, rejected):
    texts = RewardTexts(character_tokenizer(template=template), longest)
    same = {**PAIR, "chosen": chosen, "rejected": rejected}
    config = config_of(write(tmp_path / "p.jsonl", same, PAIR, same))
    train, _ = load_preferences(config, texts)
    assert [pair.chosen["content"] for pair in train] == ["So."] and len(train) == len(train.lengths) == 1
    assert "2 of 3 pairs are left out: their two texts are the same tokens" in caplog.text
    assert train.batch([0])["margin"].tolist() == [0.0]
    with pytest.raises(
        UserError,
        match=r"p\.jsonl, line 1: its two texts are the same tokens, as are those of all \d pairs of its split",
    ):
        load_preferences(config_of(write(tmp_path / "p.jsonl", same)), texts)


CALLS = TEMPLATE.replace(
    "{{ m.content }}", "{{ m.content }}{{ (m.tool_calls or []) | tojson }}{{ tools | tojson }}{{ mood }}"
)


def test_what_a_row_gives_the_template_is_shown_and_calls_are_read(tmp_path):
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": '{"q": null}'}}],
    }
    row = {"prompt": "Why?", "chosen": [call], "rejected": "No.", "tools": [{"name": "f"}]}
    row |= {"chat_template_kwargs": {"mood": "calm"}}
    train, _ = load_preferences(
        config_of(write(tmp_path / "p.jsonl", row)), RewardTexts(character_tokenizer(template=CALLS))
    )
    batch = train.batch([0])
    text = "".join(character_tokenizer().convert_ids_to_tokens(batch["prompts"][0].tolist()))
    assert '{"q": null}' in text and text.count('[{"name": "f"}]') == 2 and text.count("calm") == 2
    with pytest.raises(UserError, match="rows have tools, and the tokenizer has no chat template to show them"):
        load_preferences(config_of(write(tmp_path / "p.jsonl", row)), RewardTexts(character_tokenizer()))


def pair_of_lengths(source: str, chosen: int, rejected: int) -> Preference:
    answers = ({"role": "assistant", "content": "x" * length} for length in (chosen, rejected))
    return Preference("", [USER], *answers, source, None)


def test_accuracy_counts_by_hand():
    pairs = [pair_of_lengths(*of) for of in (("a", 5, 3), ("a", 1, 4), ("b", 2, 2), ("b", 8, 6))]
    found = preference_metrics([1.0, 2.0, 0.0, 3.0], [0.0, 2.0, 1.0, 1.0], pairs)
    assert (found["accuracy"], found["margin"]) == (0.625, 0.5)
    assert (found["accuracy/a"], found["accuracy/b"]) == (0.75, 0.5)
    assert found["length/longer_is_better"] == 0.625
    assert found["length/accuracy_chosen_longer"] == 1.0 and found["length/accuracy_chosen_shorter"] == 0.5
    # of (1, 0, -1, 2) and (2, -3, 0, 2)
    assert found["length/difference_correlation"] == pytest.approx(5.5 / (5 * 16.75) ** 0.5)


def test_what_cannot_be_measured_is_no_metric():
    found = preference_metrics([1.0], [0.0], [pair_of_lengths("a", 3, 3)])
    assert found == {"accuracy": 1.0, "margin": 1.0, "accuracy/a": 1.0, "length/longer_is_better": 0.5}


def test_the_loss_is_minus_the_log_likelihood_that_the_better_one_wins():
    import math

    import torch

    chosen, rejected = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
    wins = [math.e / (1 + math.e), 0.5]
    assert bradley_terry_loss(chosen, rejected).tolist() == pytest.approx([-math.log(p) for p in wins])
    shifted = bradley_terry_loss(chosen, rejected, margin=torch.tensor([1.0, 0.0]))
    assert shifted.tolist() == pytest.approx([math.log(2), math.log(2)])
    centered = bradley_terry_loss(chosen, rejected, center_coef=0.5) - bradley_terry_loss(chosen, rejected)
    assert centered.tolist() == pytest.approx([0.5, 0.0])
