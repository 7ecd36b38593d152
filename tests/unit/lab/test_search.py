"""Search with a critic, on a language of digits whose values are known."""

from pathlib import Path as Path_

import pytest
import torch

from valor.data.batch import Batch
from valor.lab.critic_search import choose, results, table
from valor.rollout.base import Output, SamplingParams
from valor.user_files import load_file

END = 9
EXAMPLE = load_file(str(Path_(__file__).parents[3] / "examples/search/beam_and_tree.py"), "the example")
Path, Searcher = EXAMPLE.Path, EXAMPLE.Searcher


class Digits:
    """Draws digits 0 to 3 by the request's own number; a response of four tokens ends with END."""

    def __init__(self):
        self.asked = []

    def generate(self, requests):
        outputs = []
        for request in requests:
            self.asked.append(request)
            generator = torch.Generator().manual_seed(request.seed[2])
            so_far = len(request.prompt_ids) - 1
            ids = []
            while len(ids) < request.params.max_tokens and (not ids or ids[-1] != END):
                last = so_far + len(ids) == 3
                ids.append(END if last else int(torch.randint(4, (1,), generator=generator)))
            reason = "stop" if ids[-1] == END else "length"
            outputs.append(Output(request.request_id, ids, [0.0] * len(ids), reason))
        return outputs


class Sum:
    """V before response token t is the sum of the digits before it."""

    def __call__(self, rows):
        ids = rows["responses"].float().masked_fill(rows["responses"] == END, 0.0)
        return {"values": ids.cumsum(1) - ids}


def searcher(prompts=2, **more):
    params = SamplingParams(max_tokens=4)
    return Searcher(Digits(), Sum(), [[7]] * prompts, params, seed=0, **more)


def test_values_are_of_the_state_after_a_path_and_tokens_are_counted():
    search = searcher(1)
    (begun,) = search.extend([(0, Path())], 2)
    assert not begun.ended and begun.value == sum(begun.ids)
    assert (search.spent.sampled, search.spent.read) == (2, 4)  # prompt, two tokens, the place of a third
    (whole,) = search.extend([(0, begun)])
    assert whole.ended and whole.ids[:2] == begun.ids and whole.value == sum(whole.ids[:3])
    assert (search.spent.sampled, search.spent.read) == (4, 9)


def test_the_values_do_not_depend_on_how_many_are_read_at_once():
    few, many = searcher(most_read=5).samples(6), searcher().samples(6)
    assert few == many and len(few) == 2 and len(few[0]) == 6


def test_a_beam_goes_on_with_the_best_beginnings():
    search = searcher(3)
    beams, drawn = EXAMPLE.beam(search, 8, 2, 1), searcher(3).samples(8)
    assert all(len(beam) == 8 and all(path.ended for path in beam) for beam in beams)
    best = [sum(max(p.value for p in one) for one in found) for found in (beams, drawn)]
    assert best[0] > best[1]  # of a sum, greedy is best
    second = search.engine.asked[24:48]
    for prompt in range(3):
        ways = [tuple(r.prompt_ids[1:]) for r in second[prompt * 8 : prompt * 8 + 8]]
        assert len(set(ways)) <= 2  # the same two beginnings, four ways each


def test_a_tree_finds_large_sums_and_depends_on_the_seed_alone():
    found = EXAMPLE.tree(searcher(3), 8, 4, 1, 1.0)
    assert found == EXAMPLE.tree(searcher(3), 8, 4, 1, 1.0)
    assert all(path.ended and len(path.ids) == 4 for (path,) in found)
    drawn = searcher(3).samples(1)
    assert sum(p.value for (p,) in found) > sum(p.value for (p,) in drawn)


def test_puct_by_hand():
    root = EXAMPLE.Node(Path(), visits=4)
    root.expand([Path((1,), value=1.0), Path((2,), value=0.0), Path((1,), value=1.0), Path((3,), True, 0.5)])
    assert [child.prior for child in root.children] == [0.5, 0.25, 0.25]
    assert root.mean_of_children() == pytest.approx(0.5 + 0.125)
    assert [child.score(4, 2.0) for child in root.children] == [1.0 + 2.0, 0.0 + 1.0, 0.5 + 1.0]
    root.children[0].visits, root.children[0].total = 3, 0.6
    assert root.children[0].score(4, 2.0) == pytest.approx(0.2 + 2 * 0.5 * 2 / 4)
    assert root.descend(2.0)[-1] is root.children[2]


def test_choices_by_hand():
    values, answers = [0.9, 0.2, 0.3, 0.1], ["7", "8", "8", None]
    assert [choose(values, answers, how) for how in ("best", "majority", "weighted")] == [0, 1, 0]
    assert choose([*values, 0.5], [*answers, "8"], "weighted") == 1
    assert choose([0.1, 0.9], [None] * 2, "majority") == 0  # the critic has no say in a vote


def test_results_by_hand():
    """Two prompts, two answers each: the critic likes the wrong one of the first prompt, and its last value decides."""
    answers = Batch(
        {
            "values": torch.tensor([[0.1, 0.9], [0.8, 0.0], [0.5, 0.2], [0.0, 0.7]]),
            "response_lengths": torch.tensor([2, 1, 2, 2]),
            "prompt_lengths": torch.tensor([3, 3, 4, 4]),
            "scores": torch.tensor([0.0, 1.0, 0.0, 1.0]),
        },
        {"reward_info": [{"pred": text} for text in "1234"]},
    )
    rows = {(row["method"], row["n"]): row for row in results(answers, 2, [1, 2])}
    assert rows["best-of-N", 1]["accuracy"] == rows["any right (pass@N)", 1]["accuracy"] == 0.0
    assert (rows["best-of-N", 2]["accuracy"], rows["any right (pass@N)", 2]["accuracy"]) == (0.5, 1.0)
    assert (rows["weighted majority", 1]["sampled"], rows["weighted majority", 1]["read"]) == (2.0, 5.5)
    assert (rows["majority vote", 2]["sampled"], rows["majority vote", 2]["read"]) == (3.5, 0.0)
    answers.objects["reward_info"] = [{"pred": answer} for answer in ("", 0, "", "4")]  # "" is none, and 0 is one
    voted = {(row["method"], row["n"]): row for row in results(answers, 2, [2])}
    assert voted["majority vote", 2]["accuracy"] == 1.0
    answers.objects["reward_info"] = [{}] * 4
    without = list(results(answers, 2, [2]))
    assert [row["method"] for row in without] == ["best-of-N", "any right (pass@N)"]
    assert "the grader reports no `pred`" in table(without) and "`pred`" not in table(list(rows.values()))
