"""Rollouts on disk: what is written is read back, from two kinds of rows; all else is refused in a line."""

import json
from contextlib import ExitStack
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from valor.collector.rollouts import (
    correct,
    draw_rollouts,
    outcomes,
    read_rollouts,
    rollout_records,
    same_prompt,
    write_rollouts,
)
from valor.config import CriticScoreConfig
from valor.data.batch import Batch
from valor.data.stored import Part, StoredColumn, to_stored
from valor.errors import UserError
from valor.lab import critic_score
from valor.lab.arithmetic import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def rollouts(tokenizer) -> Batch:
    """Two answers to one prompt, one to another; the last has a token that the policy did not write."""
    ask, other = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("1+1=", "20+2="))
    end = tokenizer.eos_token_id
    answers = [[5, 6, end], [7, end], [8, 9, end]]
    return Batch(
        {
            "prompts": torch.tensor([[*ask, 0], [*ask, 0], other]),
            "prompt_lengths": torch.tensor([4, 4, 5]),
            "responses": torch.tensor([answers[0], [*answers[1], 0], answers[2]]),
            "response_lengths": torch.tensor([3, 2, 3]),
            "response_mask": torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 0, 1]]),
            "scores": torch.tensor([1.0, 0.0, 0.5]),
        },
        {
            "uid": ["a", "a", "b"],
            "data_source": ["valor/arithmetic"] * 3,
            "ground_truth": ["2", "2", "22"],
            "extra_info": [{}, None, {"carry": True}],
            "messages": [[{"role": "user", "content": "1+1="}]] * 2 + [[{"role": "user", "content": "20+2="}]],
            "template_kwargs": [{}, {}, {"enable_thinking": False}],
            "finish_reason": ["stop", "stop", "length"],
            "reward_info": [{}, {}, {"acc": False}],
        },
    )


def test_what_is_written_is_read_back(tokenizer, tmp_path):
    batch = rollouts(tokenizer)
    for part in (0, 1):  # a folder of files, as trainer.rollout_data_dir leaves it
        rows = batch.take([[0, 1], [2]][part])
        write_rollouts(tmp_path / f"{part}.jsonl", rollout_records(rows, rows["scores"].tolist(), part, tokenizer))
    back = read_rollouts([str(tmp_path)], tokenizer)
    assert back.objects == batch.objects
    assert {name: column.tolist() for name, column in back.tensors.items()} == {
        name: column.tolist() for name, column in batch.tensors.items()
    }
    line = json.loads((tmp_path / "1.jsonl").read_text())
    assert (line["input"], line["gts"], line["step"]) == ("20+2=", "22", 1)  # verl's names


def test_rows_of_one_rollout_are_read_as_one(tokenizer, tmp_path):
    """The second answer goes on in a row of its own, whose prompt is not that of the question."""
    batch = rollouts(tokenizer).take([0, 1, 2, 2])
    batch["prompts"][2] += 1
    batch["episode"], batch["scores"] = torch.tensor([4, 7, 7, 8]), torch.tensor([1.0, 0.5, 0.5, 0.25])
    for step in (1, 2):
        records = rollout_records(batch, batch["scores"].tolist(), step, tokenizer)
        write_rollouts(tmp_path / f"{step}.jsonl", records)
    back = read_rollouts([str(tmp_path)], tokenizer)
    assert back["episode"].tolist() == [0, 1, 1, 2, 3, 4, 4, 5]
    assert same_prompt(batch) == [0, 0, 0, 1] and same_prompt(back) == [0, 0, 0, 1] * 2
    # Two policy tokens are on the second row: what is worth 0.5 in its end is discounted from there.
    assert outcomes(back, 0.5)[1:3].tolist() == [[0.0625, 0.125, 0], [0.25, 0, 0.5]]
    assert outcomes(back, 1.0)[3].tolist() == [0.25, 0, 0.25]


def test_rows_of_messages_and_text_are_read(tokenizer, tmp_path):
    chat = {"messages": [{"role": "user", "content": "58+77="}], "data_source": "valor/arithmetic"}
    answers = {"15 1 13 135": 1.0, "15 1 13 125": 0.0, "so so": 0.25}
    rows = [{**chat, "response": response, "score": score} for response, score in answers.items()]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = read_rollouts([str(tmp_path / "chats.jsonl")], tokenizer)
    assert batch["scores"].tolist() == [1.0, 0.0, 0.25]
    assert correct(batch).tolist() == [True, False, True]
    first = batch["prompts"][0, : int(batch["prompt_lengths"][0])].tolist()
    assert tokenizer.decode(first) == "<|user|>58+77=<|assistant|>"
    assert batch["responses"][0, int(batch["response_lengths"][0]) - 1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_ids": None}, "needs prompt_ids"),
        ({"response_ids": []}, "has a prompt, a response"),
        ({"response_mask": [1]}, "as long as the response"),
        ({"prompt_ids": [99999]}, "token 99999 is none"),
        ({"score": "good"}, "must be a number"),
        ({"score": None}, "the score must be a number"),
    ],
)
def test_what_is_no_rollout_is_refused(change, message, tokenizer, tmp_path):
    record = {"prompt_ids": [1], "response_ids": [2, 3], "score": 1.0, "gts": "2", "data_source": "valor/arithmetic"}
    record = {key: value for key, value in {**record, **change}.items() if value is not None}
    (tmp_path / "r.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(UserError, match=message):
        read_rollouts([str(tmp_path / "r.jsonl")], tokenizer)


def test_an_empty_folder_is_refused(tokenizer, tmp_path):
    with pytest.raises(UserError, match="holds no rollouts"):
        read_rollouts([str(tmp_path)], tokenizer)


def test_outcomes_are_discounted_scores_at_every_policy_token(tokenizer):
    batch = rollouts(tokenizer)
    assert outcomes(batch, 1.0).tolist() == [[1, 1, 1], [0, 0, 0], [0.5, 0, 0.5]]
    # One policy token follows the first one of the last response: the token in between is not the policy's.
    assert outcomes(batch, 0.5).tolist() == [[0.25, 0.5, 1], [0, 0, 0], [0.25, 0, 0.5]]


def test_the_grader_says_what_is_right_and_prompts_are_known_by_their_tokens(tokenizer):
    batch = rollouts(tokenizer)
    assert correct(batch).tolist() == [True, False, False]  # the last one's acc speaks against its score
    assert same_prompt(batch) == [0, 0, 1]


class Ended(Part):
    """What a process holds; it cannot be read any more once `held` is empty."""

    held: ClassVar[list[torch.Tensor]] = []

    def __init__(self, tensor: torch.Tensor) -> None:
        self.held[:] = [tensor]
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    @staticmethod
    def read(parts):
        return [to_stored(Ended.held[0]) for _ in parts]


def test_what_is_drawn_and_judged_outlives_the_processes_that_hold_it(tokenizer, monkeypatch):
    """Policy and critic take turns, each with processes of its own."""
    batch = rollouts(tokenizer)
    plain, batch["token_level_scores"] = batch["responses"], batch["response_mask"]
    batch["responses"] = StoredColumn.of(Ended(plain))
    drawn = draw_rollouts(SimpleNamespace(responses=lambda *_: batch), [], 0)
    Ended.held.clear()
    assert torch.equal(drawn["responses"], plain)

    values = Batch({"values": StoredColumn.of(Ended(torch.ones(3, 3)))})
    pools = {"critic": SimpleNamespace(compute_values=lambda _: values)}
    monkeypatch.setattr(critic_score, "start_pools", lambda *_: pools)
    monkeypatch.setattr(critic_score, "closing", lambda _: ExitStack())
    config = CriticScoreConfig.model_validate({"actor_rollout_ref": {"model": {"path": "x"}}})
    judged = critic_score.values_of(config, None, drawn)
    Ended.held.clear()
    assert torch.equal(judged["values"], torch.ones(3, 3))
