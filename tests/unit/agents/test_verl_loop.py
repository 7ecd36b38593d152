"""What a loop of verl's shape calls `server_manager`: a seed for every call, and no prompt that is too long."""

import asyncio

import pytest
from threaded_engine import echo

from valor.agents.loops import Task
from valor.agents.verl_loop import AgentLoopOutput, _Server
from valor.rollout.base import Request, SamplingParams

TASK = Task((7, 1, 3), [1, 2], SamplingParams(max_tokens=5), {"extra_info": {}})


def server(asked):
    async def generate(prompt_ids, params, seed):
        asked.append((params.max_tokens, seed))
        await asyncio.sleep(0)
        return echo(Request("", prompt_ids, params, seed))

    return _Server(TASK, generate, 10)


def test_calls_at_the_same_time_draw_other_numbers():
    async def play():
        one = server(asked := [])
        await asyncio.gather(*(one.generate("a", prompt_ids=[1] * n, sampling_params={}) for n in (2, 7, 9)))
        return asked

    assert asyncio.run(play()) == [(5, (7, 1, 3)), (3, (7, 1, 3, 1)), (1, (7, 1, 3, 2))]


def test_a_prompt_that_is_too_long_is_the_loops_own_error():
    with pytest.raises(ValueError, match="leaves no room"):
        asyncio.run(server([]).generate("a", prompt_ids=[1] * 10, sampling_params={}))


def test_rows_come_from_the_mask_and_log_probs_from_what_was_generated():
    one = server([])
    asyncio.run(one.generate("a", prompt_ids=[1, 2], sampling_params={}))
    turns = one.turns(AgentLoopOutput([1, 2], [3, 9, 9], [1, 0, 0]), new_row=False)
    assert [(t.token_ids, t.log_probs, list(t.observation_ids)) for t in turns] == [([3], [-0.5], []), ([], [], [9, 9])]
    with pytest.raises(ValueError, match="need response_logprobs"):
        one.turns(AgentLoopOutput([1, 2], [4], [1]), new_row=False)
    with pytest.raises(ValueError, match="differ in length"):
        one.turns(AgentLoopOutput([1, 2], [3], [1, 0]), new_row=False)
