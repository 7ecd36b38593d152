"""The embedded task: what the model and its tokenizer are, and what the data promise."""

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from valor.lab import arithmetic
from valor.rewards.gsm8k import grade_flexible as grade


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return arithmetic.make_model(tmp_path_factory.mktemp("task") / "model", seed=3)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> arithmetic.DataFiles:
    return arithmetic.make_data(tmp_path_factory.mktemp("task") / "data", seed=3, num_demonstrations=4000)


def test_worked_answers():
    assert arithmetic.question(58, 77) == "58+77="
    assert arithmetic.worked_answer(58, 77) == "15 1 13 135"
    assert arithmetic.worked_answer(58, 77, forget_carry=True) == "15 0 12 125"
    assert arithmetic.worked_answer(11, 22) == "03 0 03 33"
    assert arithmetic.worked_answer(11, 22, forget_carry=True) == "03 0 03 33"  # there is none to forget
    assert arithmetic.worked_answer(99, 99) == "18 1 19 198"


def test_every_problem_is_solved_by_its_worked_answer_and_by_no_forgetful_one():
    problems = arithmetic.make_problems(random.Random(0))
    assert len(set(problems)) == len(problems) == 4860  # 3645 pairs have a carry, a third as many others are added
    for a, b in problems:
        assert grade(arithmetic.DATA_SOURCE, arithmetic.worked_answer(a, b), str(a + b))["score"] == 1.0
        forgetful = grade(arithmetic.DATA_SOURCE, arithmetic.worked_answer(a, b, forget_carry=True), str(a + b))
        assert forgetful["score"] == (0.0 if a % 10 + b % 10 > 9 else 1.0)


def test_the_tokenizer_is_the_same_when_loaded_and_reads_any_text(model_dir):
    made, loaded = arithmetic.make_tokenizer(), AutoTokenizer.from_pretrained(model_dir)
    text = "<|user|>58+77=<|assistant|>15 1 13 135<|end|>\n é€ 1  2"
    ids = made(text)["input_ids"]
    assert loaded(text)["input_ids"] == ids
    assert loaded.decode(ids) == text
    assert loaded.decode(ids[:20], skip_special_tokens=True) == "58+77=15 1 13 135"
    assert (loaded.pad_token, loaded.eos_token, loaded.bos_token) == ("<|pad|>", "<|end|>", None)
    assert len(loaded) == 262


def test_the_chat_template_and_the_longest_texts(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chat = [{"role": "user", "content": "99+99="}, {"role": "assistant", "content": arithmetic.worked_answer(99, 99)}]
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert (prompt, whole) == ("<|user|>99+99=<|assistant|>", "<|user|>99+99=<|assistant|>18 1 19 198<|end|>")
    count = len(tokenizer(prompt)["input_ids"])
    assert (count, len(tokenizer(whole)["input_ids"]) - count) == (8, 12)


def test_the_model_is_small_and_a_function_of_the_seed(model_dir, tmp_path):
    state = torch.get_rng_state()
    again = arithmetic.make_model(tmp_path / "again", seed=3)
    other = arithmetic.make_model(tmp_path / "other", seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    first, second, third = (
        AutoModelForCausalLM.from_pretrained(p).model.layers[0].mlp.up_proj.weight for p in (model_dir, again, other)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert 500_000 < AutoModelForCausalLM.from_pretrained(model_dir).num_parameters() < 1_000_000


def test_problems_have_the_expected_columns_and_truths(files):
    for path, split, count in ((files.train, "train", 4604), (files.val, "val", 256)):
        rows = pq.read_table(path).to_pylist()
        assert len(rows) == count
        for i, row in enumerate(rows):
            assert row["data_source"] == "valor/arithmetic"
            assert row["ability"] == "math"
            (message,) = row["prompt"]
            assert message["role"] == "user"
            a, b = message["content"].rstrip("=").split("+")
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(int(a) + int(b))}
            assert row["extra_info"] == {"split": split, "index": i, "carry": int(a[-1]) + int(b[-1]) > 9}


def test_validation_problems_occur_nowhere_else(files):
    def questions(path: Path) -> set[str]:
        return {row["prompt"][0]["content"] for row in pq.read_table(path).to_pylist()}

    def demonstrated(path: Path) -> set[str]:
        return {row["messages"][0]["content"] for row in pq.read_table(path).to_pylist()}

    val = questions(files.val)
    assert len(val) == 256
    assert not val & (questions(files.train) | demonstrated(files.sft_train) | demonstrated(files.sft_val))


def test_the_teacher_forgets_six_carries_in_ten(files):
    forgot = carries = 0
    for row in pq.read_table(files.sft_train).to_pylist():
        user, assistant = row["messages"]
        a, b = map(int, user["content"].rstrip("=").split("+"))
        wrong = int(assistant["content"].split()[-1]) != a + b
        assert not wrong or a % 10 + b % 10 > 9
        carries += a % 10 + b % 10 > 9
        forgot += wrong
    assert carries / 4000 == pytest.approx(0.75, abs=0.03)  # four standard deviations
    assert forgot / carries == pytest.approx(0.6, abs=0.04)


def test_data_are_a_function_of_the_seed(files, tmp_path):
    again = arithmetic.make_data(tmp_path / "again", seed=3, num_demonstrations=4000)
    other = arithmetic.make_data(tmp_path / "other", seed=4, num_demonstrations=4000)
    for name in ("train", "val", "sft_train", "sft_val"):
        table = pq.read_table(getattr(files, name))
        assert table.equals(pq.read_table(getattr(again, name)))
        assert not table.equals(pq.read_table(getattr(other, name)))


def test_an_impossible_validation_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match="num_val"):
        arithmetic.make_data(tmp_path, num_val=4860)
