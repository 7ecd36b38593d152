"""Records of episodes: what is written is read back as it was."""

import asyncio

import numpy as np
import torch

from valor.agents.chat import Chat
from valor.agents.episode import Episode, Turn, episode_rows
from valor.agents.loops import Limits, Play, Task
from valor.agents.record import as_json, episode_records, recorded_episode
from valor.data.batch import Batch
from valor.lab.arithmetic import make_tokenizer
from valor.rollout.base import Output, SamplingParams, Span

CHAT = Chat(make_tokenizer())
MESSAGES = [{"role": "user", "content": "1+1="}]
TASK = Task((7, 3, 0), [3, 40, 4], SamplingParams(temperature=0.5, max_tokens=9), {"messages": MESSAGES})


def test_an_episode_comes_back_as_it_was():
    """Three turns, the second in a row of its own, the third with a stop text."""
    said: list[list[int]] = []

    async def generate(prompt_ids, params, seed) -> Output:
        said.append([40 + len(prompt_ids) % 50, 41 + len(said)])
        return Output("", said[-1], [-0.125, -1 / 3], "stop", (Span(2, 5),))

    async def run() -> Episode:
        play = Play(TASK, generate, Limits(60, 80), [*TASK.prompt_ids, 50])
        await play.turn(most=4)
        play.reward(0.25)
        assert play.new_row([3, 40, 4, 60, 61])
        await play.turn()
        assert play.observe([70, 71])
        await play.turn(stop=CHAT.stop_texts("</a>"))
        return play.end("turns", 0.5, {"calls": [{"turn": 1, "metrics": {"depth": np.float32(0.5)}}]})

    episode = asyncio.run(run())
    record = _record(episode)
    assert_same_rows(episode_rows([recorded_episode(record)]), episode_rows([episode]))
    assert [turn["text"] for turn in record["turns"]] == [CHAT.decode(tokens) for tokens in said]
    assert record["turns"][2]["observation"] == CHAT.decode([70, 71]) and record["prompt_ids"] == [3, 40, 4, 50]


def test_a_failed_episode_comes_back_with_its_error():
    blank = Turn([], [], (Span(0, 0),), observation_ids=[4])
    failed = Episode(TASK.key, (blank,), "abort", TASK.prompt_ids, error="EpisodeFailed: it broke")
    assert_same_rows(episode_rows([recorded_episode(_record(failed))]), episode_rows([failed]))


def _record(episode: Episode) -> dict:
    prompts = Batch({"episode_key": torch.tensor([TASK.key])}, {"messages": [MESSAGES]})
    (record,) = episode_records(prompts, episode_rows([episode]), CHAT)
    return as_json(record)


def assert_same_rows(found: Batch, expected: Batch) -> None:
    assert found.objects == expected.objects and found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(column, expected[name]) for name, column in found.tensors.items())
