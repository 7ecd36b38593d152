"""What responses are worth: penalties for length, and grading while others are still being generated."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from valor.agents.episode import Episode, place_rewards
from valor.collector.collector import Collector, _add_reward_info, _failing_tool, _informative_rows, _metric
from valor.collector.grading import Grading
from valor.config import PPOConfig
from valor.data.batch import Batch, pad_rows
from valor.errors import StepRefused, UserError
from valor.rewards.executor import RewardResult
from valor.rollout.base import Output, Span
from valor.trainer.advantage import component_scores


class Graders:
    """Scores a response by its length, and remembers what it was asked."""

    one_by_one = True

    def __init__(self):
        self.asked = []

    def submit(self, sample):
        return self.submit_all([sample])[0]

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
    responses, response_lengths = pad_rows([[1] * n for n in lengths], torch.long)
    mask = (responses > 0).float()
    columns = {"responses": responses, "response_lengths": response_lengths, "response_mask": mask}
    return Batch({"episode_key": keys, **columns}, objects)


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
    assert [r.score for r in grading.training(batch)[0]] == [3.0, 1.0, 2.0]
    assert graders.asked == ["xx", "xxx", "x"]


def test_two_generations_at_the_same_time_do_not_mix():
    grading = Grading(PPOConfig(), inputs_with(Graders()), {})
    first, second = batch_of([3, 1]), batch_of([2, 4])
    second["episode_key"][:, 1] = 2
    sinks = grading.sink(first), grading.sink(second)
    sinks[1](Episode((0, 2, 0), episode(0, 2).turns, "stop"))
    sinks[0](episode(0, 3))
    assert [r.score for r in grading.training(second)[0]] == [2.0, 4.0]
    assert [r.score for r in grading.training(first)[0]] == [3.0, 1.0]


def test_another_text_under_the_same_key_is_graded_for_itself():
    grading = Grading(PPOConfig(), inputs_with(Graders()), {})
    batch = batch_of([3])
    grading.sink(batch)(episode(0, 5))
    assert [r.score for r in grading.training(batch)[0]] == [3.0]


def test_a_source_without_a_grader_waits_for_the_batch():
    graders = Graders()
    batch = batch_of([3], ["unknown"])
    Grading(PPOConfig(), inputs_with(graders), {}).sink(batch)(episode(0, 3))
    assert graders.asked == []


def test_an_episode_that_could_not_be_played_is_an_error_whoever_would_have_judged_it():
    """Else runs whose tools all fail would go on by a reward model's opinion of nothing."""
    reward = {"reward_model": {"enable": True, "model_path": "x"}, "max_error_ratio": 0.5, "error_score": -1.0}
    grading = Grading(PPOConfig.model_validate({"reward": reward}), inputs_with(Graders()), {})
    grading.model = SimpleNamespace(grades=lambda batch: [RewardResult(0.7, {"rm_score": 0.7})] * len(batch))
    batch = batch_of([3, 1], ["unknown", "unknown"])
    batch.objects |= {"outcome": [None, None], "episode_error": [None, "EpisodeFailed: the tool is gone"]}
    for results in (grading.training(batch)[0], grading.validation(batch)):
        assert [r.error for r in results] == [None, "EpisodeFailed: the tool is gone"]
        assert [r.score for r in results] == [0.7, -1.0]


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
    out = Grading(PPOConfig.model_validate(config), inputs_with(graders), {}).training(batch_of([6, 7, 10]))[0]
    assert [r.score for r in out] == [1.0, 0.5, -2.0]
    assert [r.components["overlong_reward"] for r in out] == [0.0, -0.5, -2.0]
    assert [r.correct for r in out] == [True, True, False] and out[0].components["pred"] == "7"
    config["reward"] = reward | {"reward_manager": {"name": "naive"}}
    out = Grading(PPOConfig.model_validate(config), inputs_with(graders), {}).training(batch_of([6, 7, 10]))[0]
    assert [r.score for r in out] == [1.0, 1.0, 0.0] and "overlong_reward" not in out[0].components


def test_binary_rewards_keep_the_overlong_penalty():
    buffer = {"enable": True, "len": 4}
    reward = {"reward_manager": {"name": "dapo"}, "reward_kwargs": {"overlong_buffer_cfg": buffer}}
    config = PPOConfig.model_validate({"reward": reward, "algorithm": {"reward_binarize": True}})
    penalized = {"overlong_reward": -0.5}
    results = [RewardResult(0.4, penalized), RewardResult(-0.4, penalized), RewardResult(0.9, {})]
    assert Collector._outcomes(SimpleNamespace(config=config), results).tolist() == [0.5, -0.5, 1.0]


def test_the_overlong_penalty_is_of_an_episodes_longest_row():
    """The limit is that of a row: several short ones, as of a template that rewrites history, are no long answer."""
    reward = {"reward_manager": {"name": "dapo"}, "reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 4}}}
    batch = batch_of([6, 5, 7, 3])
    batch["episode"] = torch.tensor([0, 0, 1, 2])
    config = {"reward": reward, "data": {"max_response_length": 8}}
    results = Grading(PPOConfig.model_validate(config), inputs_with(Graders()), {}).training(batch)[0]
    assert [r.components["overlong_reward"] for r in results] == [-0.5, -0.75, 0.0]


def test_the_overlong_penalty_of_search_begins_before_the_end_of_the_episode():
    """Search-R1's `data.max_response_length` is that of a turn."""
    reward = {"reward_manager": {"name": "dapo"}, "reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 4}}}
    data = {"max_response_length": 8, "max_prompt_length": 20, "max_start_length": 10}
    config = PPOConfig.model_validate({"reward": reward, "data": data, "do_search": True})
    results = Grading(config, inputs_with(Graders()), {}).training(batch_of([14, 16, 18]))[0]
    assert [r.components["overlong_reward"] for r in results] == [0.0, -0.5, -1.0]


@pytest.mark.parametrize("by", ["length", "model"])
def test_a_failed_grader_has_the_error_score_in_every_component(by):
    """Also where the run adds components of its own: an estimator that compares them goes on."""
    reward: dict = {"max_error_ratio": 0.5, "error_score": -1.0}
    if by == "length":
        buffer = {"enable": True, "len": 4}
        reward |= {"reward_manager": {"name": "dapo"}, "reward_kwargs": {"overlong_buffer_cfg": buffer}}
    else:
        reward["reward_model"] = {"enable": True, "model_path": "x", "rule_weight": 1.0}
    graders, given = Graders(), iter([RewardResult(1.0, {"brief": 0.5}), RewardResult(-1.0, {}, "it is broken")])
    graders.submit_all = lambda samples: [_done(next(given)) for _ in samples]
    grading = Grading(PPOConfig.model_validate({"reward": reward}), inputs_with(graders), {})
    grading.model = SimpleNamespace(grades=lambda batch: [RewardResult(0.7, {"rm_score": 0.7})] * len(batch))
    batch = batch_of([6, 7])
    _add_reward_info(batch, grading.training(batch)[0])
    added = "overlong_reward" if by == "length" else "rm_score"
    found = component_scores(batch.objects["reward_info"], ["brief", added], -1.0)
    assert found["brief"].tolist() == [0.5, -1.0] and found[added][1] == -1.0


@pytest.mark.parametrize(("outcomes", "told"), [([0.0, 1.0], 1), ([0.0, None], 0)])
def test_a_function_that_is_never_asked_is_told_once(outcomes, told, caplog):
    reward = {"custom_reward_function": {"path": "mine.py"}}
    grading, batch = Grading(PPOConfig.model_validate({"reward": reward}), inputs_with(Graders()), {}), batch_of([2, 3])
    batch.objects["outcome"] = outcomes
    for _ in range(2):
        assert [r.score for r in grading.training(batch)[0]] == [0.0, 1.0 if told else 3.0]
    assert caplog.text.count("mine.py is not called: episodes come with the score of their environment") == told


def _done(result):
    future = Future()
    future.set_result(result)
    return future


def graded_with(*steps, mask=None):
    """A batch graded 1 with these steps, and the results."""
    graders, batch = Graders(), batch_of([4, 2])
    batch["response_mask"] = batch["response_mask"] if mask is None else torch.tensor(mask)
    results = iter([RewardResult(1.0, {}, steps=tuple(steps)), RewardResult(0.0, {})])

    def submit_all(samples):
        futures = [Future() for _ in samples]
        for future in futures:
            future.set_result(next(results))
        return futures

    graders.submit_all = submit_all
    columns = set(batch.tensors)
    results, added = Grading(PPOConfig(), inputs_with(graders), {}).training(batch)
    assert set(batch.tensors) == columns  # grading changes nothing
    return batch.union(Batch(added)), results


def test_steps_are_part_of_the_score_and_lie_where_they_were_earned():
    batch, results = graded_with(((0, 2), 0.5), (2, -0.25))
    assert [r.score for r in results] == [1.25, 0.0]
    assert results[0].components == {"acc": True, "step_reward": 0.25}
    assert batch["step_rewards"].tolist() == [[0, 0.5, -0.25, 0], [0, 0, 0, 0]]
    placed = place_rewards(torch.tensor([r.score for r in results]), batch)
    assert placed.tolist() == [[0, 0.5, -0.25, 1.0], [0, 0, 0, 0]]


def test_a_step_on_an_observation_belongs_to_the_policy_token_before_it():
    batch, _ = graded_with((2, 1.0), mask=[[1.0, 1, 0, 1], [1, 1, 0, 0]])
    assert batch["step_rewards"].tolist() == [[0, 1.0, 0, 0], [0, 0, 0, 0]]


def test_a_step_that_is_not_in_the_response_is_an_error_of_its_sample():
    batch, results = graded_with(((0, 9), 1.0))
    assert results[0].error == "step_rewards: there are no characters 0 to 9 in a response of 4"
    assert results[0].score == 0.0 and not batch["step_rewards"].any()


def played(*calls: tuple[str | None, str | None, str]) -> Batch:
    """Rows of two episodes with these calls (name, error, text) in the first one."""
    told = [{"name": name, "error": error, "text": text} for name, error, text in calls]
    batch = batch_of([1, 1])
    batch.objects["episode_info"] = [{"calls": told}, {}]
    return batch


DOWN = ("search", "failed", "Error: search: no\n answer.")
FOUND = ("search", None, "found")


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        ([], None),
        ([FOUND], None),
        ([DOWN, FOUND, FOUND], None),
        ([DOWN] * 3, "tool search: 3 of 3 calls failed; most often: Error: search: no answer."),
        ([DOWN, FOUND], "tool search: 1 of 2 calls failed; most often: Error: search: no answer."),
        ([("add", "timeout", str(i)) for i in range(3)] + [DOWN] * 2, "tool add: 3 of 3 calls failed; most often: 0"),
        (
            [(None, "malformed", "Error: bad.")],
            "tool calls that cannot be read: 1 of 1 calls failed; most often: Error",
        ),
        ([("serch", "unknown", "Error: unknown.")], "tool serch: 1 of 1 calls failed; most often: Error: unknown."),
    ],
)
def test_a_tool_that_fails_is_told(calls, line):
    found = _failing_tool(played(*calls), 1.0)
    assert found is None if line is None else found is not None and found.startswith(line)


def test_a_step_with_too_many_failed_calls_is_refused():
    mistakes = [(None, "malformed", "Error: bad."), ("search", "arguments", "Error: wrong.")]
    assert _failing_tool(played(DOWN, FOUND, *mistakes), 0.5)
    with pytest.raises(StepRefused, match=r"tool search: 2 of 3 .*max_tool_error_ratio=0.5 allows"):
        _failing_tool(played(DOWN, DOWN, FOUND), 0.5)
    with pytest.raises(StepRefused, match="max_tool_error_ratio=0 allows"):
        _failing_tool(played(DOWN, FOUND, FOUND), 0.0)
    assert _failing_tool(played(*mistakes), 0.0)
    assert _failing_tool(batch_of([1, 2]), 0.0) is None


def test_dynamic_sampling_does_not_count_an_episode_that_failed_as_a_wrong_answer():
    """Nothing is learnt from it, so a prompt whose other samples agree teaches nothing."""
    batch = batch_of([3, 2, 1, 3, 2, 1])
    batch["response_mask"][2] = batch["response_mask"][5] = 0.0
    batch.objects["uid"] = ["a"] * 3 + ["b"] * 3
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5, 0.0])
    results = [RewardResult(float(score), {}) for score in scores]
    config = PPOConfig.model_validate({"algorithm": {"filter_groups": {"enable": True}}})
    assert _informative_rows(batch, results, scores, config).objects["uid"] == ["b"] * 3


def test_a_grader_that_could_not_decide_reports_nothing_to_learn_from():
    """GDPO then takes `error_score` for each component, as for any that failed; not for a score alone."""
    batch = batch_of([2, 3])
    decided, undecided = RewardResult(1.0, {"a": 1.0}), RewardResult(-1.0, {"pred": "x"}, "why", kind="undecided")
    _add_reward_info(batch, [decided, undecided])
    assert component_scores(batch.objects["reward_info"], ["a"], -1.0)["a"].tolist() == [1.0, -1.0]
    _add_reward_info(batch, [decided, RewardResult(1.0, {})])
    with pytest.raises(UserError, match="'a' is not a number that every sample's grader reports"):
        component_scores(batch.objects["reward_info"], ["a"], -1.0)


def test_verl_s_score_is_that_before_the_length_penalty():
    results = [RewardResult(-p, {"overlong_reward": -p}) for p in (0.0, 0.25)]  # both are wrong, one is longer
    scores = torch.tensor([result.score for result in results])
    chosen = {
        name: _metric(
            results,
            scores,
            PPOConfig.model_validate({"algorithm": {"filter_groups": {"enable": True, "metric": name}}}),
        ).tolist()
        for name in ("score", "acc", None)
    }
    assert chosen == {"score": [0, 0], "acc": [0, 0], None: [0, -0.25]}
