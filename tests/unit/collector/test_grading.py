"""What responses are worth: penalties for length, and grading while others are still being generated."""

from concurrent.futures import Future
from types import SimpleNamespace

import torch

from valor.agents.episode import Episode
from valor.collector.grading import Grading
from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.rewards.executor import RewardResult
from valor.rollout.base import Output, Span


class Graders:
    """Scores a response by its length, and remembers what it was asked."""

    one_by_one = True

    def __init__(self):
        self.asked = []

    def submit_all(self, samples):
        self.asked += [sample.solution_str for sample in samples]
        futures = []
        for sample in samples:
            futures.append(Future())
            futures[-1].set_result(RewardResult(float(len(sample.solution_str)), {}))
        return futures


def inputs_with(graders) -> SimpleNamespace:
    return SimpleNamespace(
        rewards=graders,
        judge=None,
        has_grader=lambda source: source != "unknown",
        decode=lambda rows: ["x" * len(row) for row in rows],
    )


def batch_of(lengths: list[int], sources: list[str] | None = None) -> Batch:
    count = len(lengths)
    objects = {
        "data_source": sources or ["s"] * count,
        "ground_truth": [None] * count,
        "extra_info": [{}] * count,
        "response_text": ["x" * n for n in lengths],
    }
    keys = torch.tensor([[0, 1, number] for number in range(count)])
    return Batch({"episode_key": keys, "response_lengths": torch.tensor(lengths)}, objects)


def episode(number: int, length: int) -> Episode:
    return Episode.of_one_turn((0, 1, number), Output("r", [1] * length, [0.0] * length, "stop", (Span(length, 0),)))


def test_an_episode_is_graded_once_when_it_ends_whatever_the_order():
    graders = Graders()
    grading = Grading(PPOConfig(), inputs_with(graders), {})
    batch = batch_of([3, 1, 2])
    sink = grading.sink(batch)
    for number, length in ((2, 2), (0, 3)):
        sink(episode(number, length))
    assert graders.asked == ["xx", "xxx"]
    assert [r.score for r in grading.training(batch)] == [3.0, 1.0, 2.0]
    assert graders.asked == ["xx", "xxx", "x"]


def test_two_generations_at_the_same_time_do_not_mix():
    grading = Grading(PPOConfig(), inputs_with(Graders()), {})
    first, second = batch_of([3, 1]), batch_of([2, 4])
    second["episode_key"][:, 1] = 2
    sinks = grading.sink(first), grading.sink(second)
    sinks[1](Episode((0, 2, 0), episode(0, 2).turns, "stop"))
    sinks[0](episode(0, 3))
    assert [r.score for r in grading.training(second)] == [2.0, 4.0]
    assert [r.score for r in grading.training(first)] == [3.0, 1.0]


def test_another_text_under_the_same_key_is_graded_for_itself():
    grading = Grading(PPOConfig(), inputs_with(Graders()), {})
    batch = batch_of([3])
    grading.sink(batch)(episode(0, 5))
    assert [r.score for r in grading.training(batch)] == [3.0]


def test_a_source_without_a_grader_waits_for_the_batch():
    graders = Graders()
    batch = batch_of([3], ["unknown"])
    Grading(PPOConfig(), inputs_with(graders), {}).sink(batch)(episode(0, 3))
    assert graders.asked == []


def test_graders_that_want_the_whole_batch_get_no_single_episodes():
    graders = Graders()
    graders.one_by_one = False
    assert Grading(PPOConfig(), inputs_with(graders), {}).sink(batch_of([3])) is None


def test_the_overlong_penalty_is_a_component_and_leaves_the_verdict():
    buffer = {"enable": True, "len": 4, "penalty_factor": 2.0}
    reward = {"reward_manager": {"name": "dapo"}, "reward_kwargs": {"overlong_buffer_cfg": buffer}}
    config = {"reward": reward, "data": {"max_response_length": 10}}
    graders = Graders()
    given = iter([RewardResult(1.0, {"pred": "7"}), RewardResult(1.0, {}), RewardResult(0.0, {})] * 2)

    def submit_all(samples):
        futures = [Future() for _ in samples]
        for future in futures:
            future.set_result(next(given))
        return futures

    graders.submit_all = submit_all
    out = Grading(PPOConfig.model_validate(config), inputs_with(graders), {}).training(batch_of([6, 7, 10]))
    assert [r.score for r in out] == [1.0, 0.5, -2.0]
    assert [r.components["overlong_reward"] for r in out] == [0.0, -0.5, -2.0]
    assert [r.correct for r in out] == [True, True, False] and out[0].components["pred"] == "7"
    config["reward"] = reward | {"reward_manager": {"name": "naive"}}
    out = Grading(PPOConfig.model_validate(config), inputs_with(graders), {}).training(batch_of([6, 7, 10]))
    assert [r.score for r in out] == [1.0, 1.0, 0.0] and "overlong_reward" not in out[0].components
