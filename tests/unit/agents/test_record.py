"""Records of episodes: all that the engine was asked is asked again, whatever became of the episode."""

import asyncio
import json

import pytest

from valor.agents.chat import Chat
from valor.agents.episode import Episode, Turn
from valor.agents.loops import Limits, Play, Task
from valor.agents.record import as_json, episode_record, play_again
from valor.errors import UserError
from valor.lab.arithmetic import make_tokenizer
from valor.rollout.base import Output, Request, SamplingParams, Span

CHAT = Chat(make_tokenizer())
MESSAGES = [{"role": "user", "content": "1+1="}]
TASK = Task((7, 3, 0), [3, 40, 4], SamplingParams(temperature=0.5, max_tokens=9), {"messages": MESSAGES})


class Engine:
    """Says what was asked of it, and its prompt's length as tokens; keeps the requests."""

    def __init__(self, more: int = 0) -> None:
        self.asked: list[tuple[Request, list[int]]] = []
        self.more = more

    async def generate(self, prompt_ids, params, seed) -> Output:
        tokens = [40 + len(prompt_ids) % 50, 41 + len(self.asked) * self.more]
        self.asked.append((Request("", list(prompt_ids), params, seed), tokens))
        return Output("", tokens, [-0.1, -1 / 3], "stop", (Span(2, 5),))


def again(record, engine, task=TASK) -> Episode:
    return asyncio.run(play_again(task, json.loads(json.dumps(record)), engine.generate, CHAT))


def recorded() -> tuple[Episode, Engine, dict]:
    """Three turns, the second in a row of its own, the third with a stop text."""
    engine = Engine()

    async def run() -> Episode:
        play = Play(TASK, engine.generate, Limits(60, 80), [*TASK.prompt_ids, 50])
        await play.turn(most=4)
        play.reward(0.25)
        assert play.new_row([3, 40, 4, 60, 61])
        await play.turn()
        assert play.observe([70, 71])
        await play.turn(stop=CHAT.stop_texts("</a>"))
        return play.end("turns", 0.5, {"calls": [{"turn": 1, "seconds": 0.1 + 0.2}]})

    episode = asyncio.run(run())
    return episode, engine, dict(episode_record(TASK, episode, engine.asked, CHAT))


def test_an_episode_comes_back_as_it_was_and_asks_the_same():
    episode, engine, record = recorded()
    second = Engine()
    assert as_json(_plain(again(record, second))) == as_json(_plain(episode))
    assert second.asked == engine.asked
    assert all(request.keys() == {"seed", "sampling"} for request in record["requests"])
    assert [turn["text"] for turn in record["turns"]] == [CHAT.decode(tokens) for _, tokens in engine.asked]
    assert record["turns"][2]["observation"] == CHAT.decode([70, 71]) and record["prompt_ids"] == [3, 40, 4, 50]


def test_what_a_failed_episode_had_asked_is_asked_again():
    engine = Engine()
    asyncio.run(engine.generate(TASK.prompt_ids, TASK.params, TASK.key))
    blank = Turn([], [], (Span(0, 0),), observation_ids=[4])
    failed = Episode(TASK.key, (blank,), "abort", TASK.prompt_ids, error="ToolboxError: it broke")
    second = Engine()
    assert again(episode_record(TASK, failed, engine.asked, CHAT), second).error == "ToolboxError: it broke"
    assert second.asked == engine.asked


def test_another_answer_or_another_prompt_stops_the_run():
    _, _, record = recorded()
    with pytest.raises(UserError, match=r"episode 0 of step 3 \(seed 7\), turn 2: the policy says .* recorded is"):
        again(record, Engine(more=1))
    other = Task(TASK.key, TASK.prompt_ids, TASK.params, {"messages": [{"role": "user", "content": "2+2="}]})
    with pytest.raises(UserError, match="recorded with another prompt"):
        again(record, Engine(), other)


def _plain(episode: Episode) -> dict:
    return {name: getattr(episode, name) for name in episode.__slots__ if name != "turns"} | {
        "turns": [{name: getattr(turn, name) for name in turn.__slots__} for turn in episode.turns]
    }
