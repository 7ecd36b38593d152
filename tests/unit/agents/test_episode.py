"""Episodes as rows: what is the policy's own, which turn and which weights a token comes from."""

import asyncio

import torch

from valor.agents.episode import Episode, Turn, episode_rows, last_rows, place_rewards, turn_rewards
from valor.agents.loops import Limits, Play, Task
from valor.rollout.base import Output, SamplingParams, Span


def test_a_single_answer_is_an_episode_of_one_turn():
    answers = [
        Output("0", [5, 6, 7], [-0.1, -0.2, -0.3], "stop", (Span(3, 4),)),
        Output("1", [8], [-0.4], "length", (Span(1, 4),)),
    ]
    rows = episode_rows([Episode.of_one_turn((0, 1, i), answer) for i, answer in enumerate(answers)])
    assert rows["responses"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert rows["response_lengths"].tolist() == [3, 1]
    assert rows["response_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert rows["turn_ids"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert rows["weights_versions"].tolist() == [[4, 4, 4], [4, 0, 0]]
    torch.testing.assert_close(rows["rollout_log_probs"], torch.tensor([[-0.1, -0.2, -0.3], [-0.4, 0.0, 0.0]]))
    assert rows.objects["finish_reason"] == ["stop", "length"]


def test_observations_are_neither_the_policys_nor_of_a_turn():
    turns = (
        Turn([1, 2], [-0.5, -0.6], (Span(1, 3), Span(1, 4))),
        Turn([3], [-0.7], (Span(1, 4),), observation_ids=[9, 9]),
    )
    rows = episode_rows([Episode((0, 1, 0), turns, "stop")])
    assert rows["responses"].tolist() == [[1, 2, 9, 9, 3]]
    assert rows["response_mask"].tolist() == [[1, 1, 0, 0, 1]]
    assert rows["turn_ids"].tolist() == [[1, 1, 0, 0, 2]]
    assert rows["weights_versions"].tolist() == [[3, 4, 0, 0, 4]]
    torch.testing.assert_close(rows["rollout_log_probs"], torch.tensor([[-0.5, -0.6, 0.0, 0.0, -0.7]]))


def test_an_episode_that_said_nothing_is_a_row_without_tokens():
    rows = episode_rows([Episode((0, 1, 0), (Turn([], [], ()),), "abort"), Episode((0, 1, 1), (), "abort")])
    assert len(rows) == 2 and rows["response_lengths"].tolist() == [0, 0]


def test_the_last_row_of_an_episode_has_the_rewards_of_all_its_turns():
    def turn(reward, prompt=None):
        return Turn([5, 6], [-1.0, -1.0], (Span(2, 0),), prompt_ids=prompt, reward=reward)

    forked = Episode((0, 0, 0), (turn(1.0), turn(2.0, [7]), turn(4.0, [7, 8])), "stop", prompt_ids=[1])
    whole = Episode((0, 0, 1), (turn(8.0), turn(16.0)), "stop", prompt_ids=[1])
    batch = episode_rows([forked, whole])
    batch.objects["response_text"] = ["a", "b", "c", "d"]
    ends = last_rows(batch)
    assert batch["episode"].tolist() == [0, 0, 0, 1] and len(ends) == 2
    assert turn_rewards(ends).tolist() == turn_rewards(batch).tolist() == [7.0, 24.0]


def said_nothing_at_the_end():
    """Two rows, of which the second has no policy token, and a row that is told something at its end."""
    last = Turn([], [], (), [8, 9], [7])
    forked = Episode((0, 0, 0), (Turn([5, 6], [-1.0, -1.0], (Span(2, 0),), reward=1.0), last), "stop", [1])
    told = Episode((0, 0, 1), (Turn([5], [-1.0], (Span(1, 0),)), Turn([], [], (), [8, 9])), "stop", [1])
    return episode_rows([forked, told])


def test_a_turn_without_tokens_moves_no_reward():
    batch = said_nothing_at_the_end()
    assert batch["turn_rewards"].shape == batch["responses"].shape
    assert batch["turn_rewards"].tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]


def test_the_score_is_at_the_last_policy_token_whichever_row_that_is_in():
    batch = said_nothing_at_the_end()
    batch["step_rewards"] = batch["turn_rewards"]
    placed = place_rewards(torch.tensor([5.0, 3.0]), batch)
    assert placed.tolist() == [[0, 5, 0], [0, 0, 0], [3, 0, 0]]
    assert place_rewards(torch.tensor([1.0, 0.0]), batch, at_end=True).tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    batch.objects["response_text"] = ["a", "b", "c"]
    assert turn_rewards(last_rows(batch)).tolist() == [1.0, 0.0]


def test_what_is_told_in_pieces_is_told_whole():
    """The row that the policy has read is the row that is trained on."""
    read = []

    async def generate(prompt_ids, params, seed):
        read.append(list(prompt_ids))
        return Output("", [5], [-1.0], "stop", (Span(1, 0),))

    async def run():
        play = Play(Task((0, 0, 0), [1], SamplingParams(), {}), generate, Limits(50, 50), [1])
        await play.turn()
        assert play.observe([8]) and play.observe([9])
        await play.turn()
        assert play.observe([8]) and play.new_row([2, 3]) and play.observe([9])
        await play.turn()
        return play.end("stop")

    rows = episode_rows([asyncio.run(run())])
    assert read == [[1], [1, 5, 8, 9], [2, 3, 9]]
    assert rows["prompts"].tolist() == [[1, 0], [2, 3]]
    assert rows["responses"].tolist() == [[5, 8, 9, 5], [9, 5, 0, 0]]
