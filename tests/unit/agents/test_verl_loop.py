"""What a loop of verl's shape calls `server_manager`: a seed for every call, and no prompt that is too long."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from threaded_engine import echo

from valor.agents.chat import Chat
from valor.agents.loops import Limits, Task
from valor.agents.verl_loop import AgentLoopBase, AgentLoopOutput, VerlLoop, _ServerManager
from valor.errors import UserError
from valor.lab.arithmetic import make_tokenizer
from valor.rollout.base import Output, Request, SamplingParams, Span

TASK = Task((7, 1, 3), [1, 2], SamplingParams(max_tokens=5), {"extra_info": {}})


def server(asked):
    async def generate(prompt_ids, params, seed):
        asked.append((params.max_tokens, seed))
        await asyncio.sleep(0)
        return echo(Request("", prompt_ids, params, seed))

    return _ServerManager(TASK, generate, 10, None)


def test_calls_at_the_same_time_draw_other_numbers():
    async def play():
        one = server(asked := [])
        await asyncio.gather(*(one.generate("a", prompt_ids=[1] * n, sampling_params={}) for n in (2, 7, 9)))
        return asked

    assert asyncio.run(play()) == [(5, (7, 1, 3)), (3, (7, 1, 3, 1)), (1, (7, 1, 3, 2))]


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_an_episode_ends_as_its_last_turn_did(reason):
    class Loop(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            said = await self.server_manager.generate(prompt_ids=[1, 2], sampling_params=sampling_params)
            note = {"note": "half: \ud83d"}
            return AgentLoopOutput([1, 2], said.token_ids, [1] * len(said.token_ids), extra_fields=note)

    async def generate(prompt_ids, params, seed):
        return Output("", [3], [-0.5], reason, (Span(1, 0),))

    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=None), data=SimpleNamespace(image_key=None))
    context = SimpleNamespace(config=config, chat=SimpleNamespace(tokenizer=None), limits=Limits(10, 20))
    row = {"extra_info": {}, "messages": []}
    played = asyncio.run(VerlLoop(context, cls=Loop, options={}).run(replace(TASK, row=row), generate))
    assert (played.finish_reason, played.info["note"]) == (reason, "half: \ud83d")


@pytest.mark.parametrize(("prompt", "response", "room"), [(2, 10, None), (2, 11, 10), (15, 5, None), (15, 6, 5)])
def test_a_row_that_is_too_long_is_an_error(prompt, response, room):
    """Such a row could be beyond the positions of the model."""

    class Loop(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            return AgentLoopOutput([1] * prompt, [3] * response, [1] * response, [-0.5] * response, 1.0)

    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=None), data=SimpleNamespace(image_key=None))
    context = SimpleNamespace(config=config, chat=SimpleNamespace(tokenizer=None), limits=Limits(10, 20))
    task = replace(TASK, row={"extra_info": {}, "messages": []})
    play = VerlLoop(context, cls=Loop, options={}).run(task, None)
    if room is None:
        assert len(asyncio.run(play).turns[0].token_ids) == response
    else:
        with pytest.raises(ValueError, match=rf"returned {response} response_ids, .* leave {room} of this row: cut"):
            asyncio.run(play)


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


def sampling(*outputs):
    """What remembers calls that returned these tokens, each behind the given ones."""
    left = iter(outputs)

    async def generate(prompt_ids, params, seed):
        tokens, log_probs, spans = next(left)
        return Output("", tokens, log_probs, "stop", spans)

    return _ServerManager(TASK, generate, 100, None)


def asked(one, *prompts):
    for prompt in prompts:
        asyncio.run(one.generate("a", prompt_ids=prompt, sampling_params={}))


def test_equal_tokens_of_two_turns_keep_their_own_log_probs():
    one = sampling(([3, 4], [-0.1, -0.2], (Span(2, 5),)), ([3, 4], [-0.7, -0.8], (Span(1, 5), Span(1, 6))))
    asked(one, [1, 2], [1, 2, 3, 4, 9])
    first, second = one.turns(AgentLoopOutput([1, 2], [3, 4, 9, 3, 4], [1, 1, 0, 1, 1]), new_row=False)
    assert (first.log_probs, first.spans) == ([-0.1, -0.2], (Span(2, 5),))
    assert (second.log_probs, second.spans) == ([-0.7, -0.8], (Span(1, 5), Span(1, 6)))


def test_own_tokens_may_be_those_of_several_calls_or_the_beginning_of_one():
    one = sampling(
        ([3], [-0.1], (Span(1, 5),)), ([3, 4, 5], [-0.2, -0.3, -0.4], (Span(3, 6),)), ([6], [-0.9], (Span(1, 7),))
    )
    asked(one, [1], [1], [1, 3, 4])
    (turn,) = one.turns(AgentLoopOutput([1], [3, 4], [1, 1]), new_row=False)
    assert (turn.log_probs, turn.spans) == ([-0.2, -0.3], (Span(2, 6),))
    one = sampling(([3, 4], [-0.2, -0.3], (Span(2, 6),)), ([6], [-0.9], (Span(1, 7),)))
    asked(one, [1], [1, 3, 4])
    (turn,) = one.turns(AgentLoopOutput([1], [3, 4, 6], [1, 1, 1]), new_row=False)
    assert (turn.log_probs, turn.spans) == ([-0.2, -0.3, -0.9], (Span(2, 6), Span(1, 7)))


def test_tokens_that_were_sampled_behind_others_are_not_the_rows():
    one = sampling(([3], [-0.1], (Span(1, 5),)))
    asked(one, [1, 2])
    row = AgentLoopOutput([1, 7], [3], [1])
    with pytest.raises(ValueError, match="no call of generate returned there"):
        one.turns(row, new_row=False)
    row.response_logprobs = [-0.4]
    (turn,) = one.turns(row, new_row=False)
    assert (turn.log_probs, turn.spans) == ([-0.4], (Span(1, 5),))


def test_given_log_probs_do_without_a_call_that_sampled_anything():
    one = sampling(([3], [-0.1], (Span(1, 5),)), ([], [], ()))
    asked(one, [1], [1, 3])
    (turn,) = one.turns(AgentLoopOutput([2], [4], [1], [-0.4]), new_row=False)
    assert (turn.log_probs, turn.spans) == ([-0.4], (Span(1, 5),))


def test_what_a_call_asks_for_is_done_or_refused():
    """verl hands all of it to its engine: a text that ends a turn counts, and what has no place here is refused."""
    chat, params = Chat(make_tokenizer()), []

    async def generate(prompt_ids, asked, seed):
        params.append(asked)
        return Output("", [3], [-0.5], "stop", (Span(1, 0),))

    def ask(sampling, **more):
        one = _ServerManager(TASK, generate, 10, chat.stop_texts)
        asyncio.run(one.generate("a", prompt_ids=[1], sampling_params=sampling, **more))

    ask({"temperature": 0.5, "stop": ["</a>", "!"], "include_stop_str_in_output": True, "logprobs": True, "min_p": 0.0})
    assert params[-1].temperature == 0.5 and params[-1].stop.texts == ("</a>", "!")
    ask({"stop": "!", "repetition_penalty": 1.0, "top_k": 0, "n": 1}, image_data=None, video_data=[])
    assert params[-1].stop.texts == ("!",)
    ask({"stop": None})
    assert params[-1].stop is None
    for wrong in ({"repetition_penalty": 1.1}, {"n": 2}, {"min_tokens": 3}, {"stop": [""]}, {"no_such": 1}):
        with pytest.raises(UserError, match=f"sampling_params: {next(iter(wrong))}="):
            ask(wrong)
    with pytest.raises(UserError, match="image_data"):
        ask({}, image_data=["picture.png"])
