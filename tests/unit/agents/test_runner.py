"""Many episodes beside an engine: their order, their seeds, whose error is whose, and that nothing stays behind."""

import asyncio
import itertools
import math
import os
import threading
import time
from collections import Counter
from contextlib import suppress

import pytest
from threaded_engine import ThreadedEngine, echo

from valor.agents.agents import Agents
from valor.agents.episode import Episode, episode_rows
from valor.agents.loops import AgentLoop, Limits, Play, Task
from valor.agents.runner import EpisodeRunner
from valor.errors import TrainingStopped, UserError
from valor.rollout.base import SamplingParams

LIMITS = Limits(100, 100)


def tasks(count):
    return [Task((7, 1, i), [1, 2], SamplingParams(max_tokens=5), {"extra_info": {}}) for i in range(count)]


async def three_turns(task, runner, pause=0.0):
    play = Play(task, runner.generate, LIMITS, task.prompt_ids)
    for _ in range(3):
        output = await play.turn()
        await asyncio.sleep(pause)
        assert play.observe([0])
    return play.end(output.finish_reason)


def run(engine, play, count, sink=None, most=64, **options):
    return EpisodeRunner(play, most=most, max_tokens=100, **options).run(engine, tasks(count), sink)


def no_threads_left(before):
    end = time.monotonic() + 5
    while (left := set(threading.enumerate()) - before) and time.monotonic() < end:
        time.sleep(0.01)
    return not left


def test_episodes_come_in_the_order_of_their_tasks_and_to_the_sink_in_the_calling_thread():
    told = []

    async def play(task, runner):
        return await three_turns(task, runner, pause=(20 - task.key[2]) / 1000)

    engine = ThreadedEngine()
    episodes = run(engine, play, 20, lambda episode: told.append((episode.key, threading.current_thread())))
    assert [episode.key for episode in episodes] == [(7, 1, i) for i in range(20)]
    assert sorted(key for key, _ in told) == [(7, 1, i) for i in range(20)]
    assert {thread for _, thread in told} == {threading.current_thread()}
    # The first turn's seed is that of a single answer; later ones have the number of the turn behind it.
    seeds = Counter(seed for batch in engine.batches for seed in batch)
    assert seeds == Counter((7, 1, i, *turn) for i in range(20) for turn in ((), (1,), (2,)))
    assert all([turn.token_ids for turn in one.turns] == [[one.key[2]], [1], [2]] for one in episodes)


def test_at_most_so_many_episodes_are_under_way():
    under_way, most = set(), 0

    async def play(task, runner):
        nonlocal most
        under_way.add(task.key)
        most = max(most, len(under_way))
        episode = await three_turns(task, runner, pause=0.001)
        under_way.discard(task.key)
        return episode

    assert len(run(ThreadedEngine(), play, 40, most=7)) == 40
    assert most == 7


@pytest.mark.parametrize("most", [64, 5])
def test_what_is_generated_together_does_not_depend_on_the_speed_of_tools(most):
    """Episodes of several lengths, whose tools take their time in one run and none in the other."""

    def batches(pause):
        async def play(task, runner):
            play = Play(task, runner.generate, LIMITS, task.prompt_ids)
            for turn in range(1 + task.key[2] % 4):
                await play.turn()
                await asyncio.sleep(pause * ((task.key[2] * 7 + turn) % 5))
                play.observe([0])
            return play.end("stop")

        engine = ThreadedEngine()
        run(engine, play, 16, most=most, deterministic=True)
        return engine.batches

    assert batches(0.0) == batches(0.004)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_episode_may_ask_for_several_turns_at_once_and_end_without_waiting_for_one(deterministic):
    async def play(task, runner):
        last = asyncio.ensure_future(runner.generate([1], task.params, (*task.key, 9)))
        if task.key[2] == 0:  # nobody will ever take its answer
            await asyncio.sleep(0)
            return Episode(task.key, (), "stop")
        await asyncio.gather(*(runner.generate([1], task.params, (*task.key, i)) for i in range(3)), last)
        return await three_turns(task, runner)

    assert len(run(ThreadedEngine(), play, 4, deterministic=deterministic)) == 4


def test_five_hundred_episodes():
    began = time.monotonic()
    episodes = run(ThreadedEngine(), three_turns, 500, most=512)
    assert [episode.key[2] for episode in episodes] == list(range(500))
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("error", [UserError("wrong"), TrainingStopped("stop")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_error_of_the_whole_run_ends_all_episodes_and_closes_their_tools(error, deterministic):
    before, opened, closed = set(threading.enumerate()), [], []

    async def play(task, runner):
        opened.append(task.key)
        try:
            if task.key[2] == 3:
                await runner.generate([1], task.params, task.key)
                raise error
            while True:
                await three_turns(task, runner, pause=0.001)
        finally:
            await asyncio.sleep(0)  # closing may take a moment of the loop
            closed.append(task.key)

    with pytest.raises(type(error), match=str(error)):
        run(ThreadedEngine(), play, 8, deterministic=deterministic)
    assert sorted(opened) == sorted(closed) and len(closed) == 8
    assert no_threads_left(before)


def test_an_error_of_the_engine_ends_all_episodes_and_closes_their_tools():
    before, closed = set(threading.enumerate()), []

    def answer(request):
        if request.seed == (7, 1, 2, 1):
            raise RuntimeError("the device is gone")
        return echo(request)

    async def play(task, runner):
        try:
            return await three_turns(task, runner, pause=30.0 if task.key[2] == 5 else 0.001)
        finally:
            await asyncio.sleep(0)
            closed.append(task.key[2])

    with pytest.raises(RuntimeError, match="the device is gone"):
        run(ThreadedEngine(answer), play, 8)
    assert sorted(closed) == list(range(8))
    assert no_threads_left(before)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("fails", [(7, 1, 5), (7, 1, 2, 2)], ids=["at its beginning", "later"])
def test_episodes_that_outlive_an_error_of_the_engine_can_begin_anew_and_pause(fails):
    """More of them than there are places, so that none may be kept by one of before."""
    before, told, begun = set(threading.enumerate()), [], []
    runner = EpisodeRunner(three_turns, most=3, max_tokens=100)

    def answer(request):
        if request.seed == fails:
            raise TrainingStopped("the server was started anew")
        return echo(request)

    def listen():
        if not begun:
            begun.append(runner.add(tasks(8)))
        if len(told) == 8:
            runner.pause()

    with pytest.raises(TrainingStopped, match="anew"):
        runner.serve(ThreadedEngine(answer), lambda episode, attempt: told.append(episode), listen)
    begun.clear()
    told.clear()
    runner.serve(ThreadedEngine(), lambda episode, attempt: told.append(episode), listen)
    assert sorted(one.key for one in told) == [(7, 1, i) for i in range(8)]
    assert all([turn.token_ids for turn in one.turns] == [[one.key[2]], [1], [2]] for one in told)
    runner.close()
    assert no_threads_left(before)


@pytest.mark.timeout(30)
def test_an_episode_that_ends_while_it_is_dropped_is_not_taken_for_the_one_that_is_begun_anew():
    at_work, go_on, told, plays = threading.Event(), threading.Event(), [], itertools.count(1)

    async def play(task, runner):
        if (number := next(plays)) == 1:
            at_work.set()
            assert go_on.wait(20)  # its thread hears of nothing before it has ended
        return Episode(task.key, (), "stop", info={"play": number})

    runner = EpisodeRunner(play, most=1, max_tokens=100)

    def listen():
        if not at_work.is_set():
            runner.add(tasks(1))
            assert at_work.wait(20)
            runner.drop([task.key for task in tasks(1)])
            runner.add(tasks(1), attempt=1)
            go_on.set()
        if told:
            runner.pause()

    runner.serve(ThreadedEngine(), lambda *ended: told.append(ended), listen)
    runner.close()
    assert [(episode.info, attempt) for episode, attempt in told] == [({"play": 2}, 1)]


@pytest.mark.timeout(20)
def test_an_episode_that_does_not_heed_its_end_ends_nobody_else():
    """A program may catch what ends it, and go on to its own end."""
    told, begun = [], []

    async def play(task, runner):
        if task.key[2] == 0:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            return Episode(task.key, (), "stop")
        return await three_turns(task, runner, pause=0.05)

    runner = EpisodeRunner(play, most=3, max_tokens=100)

    def listen():
        if not begun:
            begun.append(runner.add(tasks(2)))
        elif len(begun) == 1:
            begun.append(runner.drop([(7, 1, 0)]))
        if told:
            runner.pause()

    runner.serve(ThreadedEngine(), lambda episode, attempt: told.append(episode), listen)
    runner.close()
    assert [one.key for one in told] == [(7, 1, 1)]


@pytest.mark.timeout(20)
def test_episodes_that_are_begun_before_their_thread_works_are_played(monkeypatch):
    """It comes to work a moment after it was started, as on a machine with much else to do."""
    told, begun, work = [], [], threading.Thread.run

    def late(thread):
        time.sleep(0.2)
        work(thread)

    monkeypatch.setattr(threading.Thread, "run", late)
    runner = EpisodeRunner(three_turns, most=3, max_tokens=100)

    def listen():
        if not begun:
            begun.append(runner.add(tasks(2)))
        if len(told) == 2:
            runner.pause()

    runner.serve(ThreadedEngine(), lambda episode, attempt: told.append(episode), listen)
    runner.close()
    assert sorted(one.key for one in told) == [(7, 1, 0), (7, 1, 1)]


def test_an_error_of_the_sink_ends_the_run():
    before = set(threading.enumerate())

    def sink(episode):
        raise ValueError("grading")

    with pytest.raises(ValueError, match="grading"):
        run(ThreadedEngine(), three_turns, 8, sink)
    assert no_threads_left(before)


def test_nothing_stays_behind():
    run(ThreadedEngine(), three_turns, 4)
    before, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        run(ThreadedEngine(threads=1), three_turns, 4)
    assert no_threads_left(before)
    assert len(os.listdir("/proc/self/fd")) <= files


class Raises(AgentLoop):
    """Raises what the task's number says, after a turn."""

    def __init__(self, errors):
        self.errors = errors

    async def run(self, task, generate):
        play = Play(task, generate, LIMITS, task.prompt_ids)
        await play.turn()
        if error := self.errors.get(task.key[2]):
            raise error
        return play.end("stop")


def agents_with(loop):
    """Agents whose every row is played by `loop`, without a configuration."""
    agents = object.__new__(Agents)
    agents.loop_of = lambda extra_info: loop
    return agents


class Pays(AgentLoop):
    """Gives the reward of a turn and the outcome that are there for the task's number."""

    def __init__(self, pay):
        self.pay = pay

    async def run(self, task, generate):
        play = Play(task, generate, LIMITS, task.prompt_ids)
        await play.turn()
        reward, outcome = self.pay[task.key[2]]
        play.reward(reward)
        return play.end("stop", outcome)


def test_a_reward_that_is_not_finite_is_the_episodes_error_and_not_in_the_batch():
    pay = [(0.5, 1.0), (math.nan, 1.0), (0.0, math.nan), (-math.inf, None), (0.5, None)]
    episodes = run(ThreadedEngine(), agents_with(Pays(pay))._play, len(pay))
    errors = [f"ValueError: its rewards are {said}" for said in ("[nan, 1.0]", "[0.0, nan]", "[-inf, 0.0]")]
    assert [episode.error for episode in episodes] == [None, *errors, None]
    batch = episode_rows(episodes)
    assert batch["turn_rewards"].sum(1).tolist() == [0.5, 0.0, 0.0, 0.0, 0.5]
    assert batch.objects["outcome"] == [1.0, None, None, None, None]


def test_no_text_of_an_episode_holds_half_a_surrogate_pair():
    class Notes(AgentLoop):
        def __init__(self):
            pass

        async def run(self, task, generate):
            if task.key[2]:
                raise RuntimeError("half: \ud83d")
            play = Play(task, generate, LIMITS, task.prompt_ids)
            await play.turn()
            return play.end("stop", info={"calls": [{"metrics": {"\udc00": "half: \ud83d"}}]})

    played, failed = run(ThreadedEngine(), agents_with(Notes())._play, 2)
    assert played.info == {"calls": [{"metrics": {"\ufffd": "half: \ufffd"}}]}
    assert failed.error == "RuntimeError: half: \ufffd"


def test_an_episode_without_a_turn_is_an_error_and_not_the_end_of_the_batch():
    class Silent(AgentLoop):
        def __init__(self):
            pass

        async def run(self, task, generate):
            return Episode(task.key, (), "stop", task.prompt_ids)

    episodes = run(ThreadedEngine(), agents_with(Silent())._play, 2)
    assert [episode.error for episode in episodes] == ["ValueError: it has no turn"] * 2
    assert episode_rows(episodes)["response_mask"].sum() == 0


def test_what_an_episode_raises_is_its_own_error():
    errors = {
        1: RuntimeError("bad tool"),
        3: SystemExit(2),
        4: asyncio.CancelledError(),
        5: ExceptionGroup("g", [OSError()]),
    }
    episodes = run(ThreadedEngine(), agents_with(Raises(errors))._play, 6)
    assert [episode.finish_reason for episode in episodes] == ["stop", "abort", "stop", "abort", "abort", "abort"]
    assert episodes[1].error == "RuntimeError: bad tool"
    assert episodes[3].error == "SystemExit: 2" and episodes[4].error == "CancelledError"
    with pytest.raises(UserError, match="no such tool"):
        run(ThreadedEngine(), agents_with(Raises({2: UserError("no such tool")}))._play, 6)
