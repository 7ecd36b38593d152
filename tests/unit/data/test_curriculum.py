"""Samplers that learn: draws in the ratio of weights, pools by pass rates, exact resume, classes of one's own."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from valor.config import load
from valor.config.data import DifficultyConfig
from valor.data.batch import Batch
from valor.data.curriculum import ClassSampler, DifficultySampler, outcomes
from valor.data.sampler import PromptSampler
from valor.errors import UserError

OPTIONS = DifficultyConfig(enable=True, thresholds=[0.25, 0.75], weights=[0.5, 4.0, 1.0], new_weight=2.0)


def answered(*groups: tuple[int, list[float]]) -> Batch:
    """Outcomes of groups: the row, and the score of each sample, which is right above 0."""
    samples = [(number, row, score) for number, (row, scores) in enumerate(groups) for score in scores]
    numbers, rows, scores = zip(*samples, strict=True)
    columns = {"row": torch.tensor(rows), "scores": torch.tensor(scores), "correct": torch.tensor(scores) > 0}
    return Batch(columns, {"uid": [f"1.{number}:{row}" for number, row in zip(numbers, rows, strict=True)]})


def test_pools_pass_rates_and_groups_that_agree() -> None:
    sampler = DifficultySampler(10, 4, OPTIONS)
    first = sampler.update(answered((0, [0.0, 0.0]), (1, [1.0, 1.0]), (2, [1.0, 0.0]), (3, [2.0, 1.0])))
    assert first == {
        "sampler/0-0.25/drawn": 0.0,
        "sampler/0-0.25/rows": 1.0,
        "sampler/0.25-0.75/drawn": 0.0,
        "sampler/0.25-0.75/rows": 1.0,
        "sampler/0.75-1/drawn": 0.0,
        "sampler/0.75-1/rows": 2.0,
        "sampler/new/drawn": 4.0,
        "sampler/new/rows": 6.0,
        "sampler/new/zero_variance": 0.5,
    }
    # Row 1: 1 and then 0 are a half, in the middle pool; row 3 goes to 0.75, which belongs to the upper one.
    second = sampler.update(answered((1, [0.0, 0.0]), (3, [1.0, -1.0]), (0, [1.0, -2.0]), (0, [0.0, 0.0])))
    assert second["sampler/0.75-1/zero_variance"] == 0.5 and second["sampler/0-0.25/zero_variance"] == 0.5
    rates = dict(sampler.state_dict()["rates"])
    assert rates == {0: 0.125, 1: 0.5, 2: 0.5, 3: 0.75}  # row 0: 0, then 0.25, then half of that
    assert [second[f"sampler/{pool}/rows"] for pool in ("0-0.25", "0.25-0.75", "0.75-1", "new")] == [1, 2, 1, 6]


def test_draws_are_in_the_ratio_of_weights() -> None:
    """First draws of 6,000 batches: each row's share is its weight's of the sum, within four standard deviations."""
    sampler = DifficultySampler(6, 1, OPTIONS, seed=5)
    sampler.update(answered((0, [0.0]), (1, [1.0, 0.0]), (2, [1.0])))
    counts = Counter(sampler.next_batch()[0] for _ in range(6000))
    weights = np.array([0.5, 4.0, 1.0, 2.0, 2.0, 2.0])
    shares = weights / weights.sum()
    for row, share in enumerate(shares):
        assert abs(counts[row] / 6000 - share) < 4 * (share * (1 - share) / 6000) ** 0.5
    # The second row of a batch is drawn from the rest: P(1 is in a batch of two), by hand.
    pairs = DifficultySampler(6, 2, OPTIONS, seed=6)
    pairs.update(answered((0, [0.0]), (1, [1.0, 0.0]), (2, [1.0])))
    drawn = [pairs.next_batch() for _ in range(4000)]
    expected = shares[1] + sum(shares[i] * shares[1] / (1 - shares[i]) for i in (0, 2, 3, 4, 5))
    assert all(len(set(batch)) == 2 for batch in drawn)
    assert abs(sum(1 in batch for batch in drawn) / 4000 - expected) < 4 * (expected * (1 - expected) / 4000) ** 0.5


def test_difficulty_resumes_exactly() -> None:
    def steps(sampler: DifficultySampler, count: int) -> list[Any]:
        out = []
        for _ in range(count):
            rows = sampler.next_batch()
            out.append((rows, sampler.epoch, sampler.update(answered(*((row, [row % 3 / 2, 0.0]) for row in rows)))))
        return out

    whole = steps(DifficultySampler(20, 6, OPTIONS, seed=1), 9)
    first, second = (DifficultySampler(20, 6, OPTIONS, seed=1) for _ in range(2))
    assert steps(first, 4) == whole[:4]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert steps(second, 5) == whole[4:]
    assert [epoch for _, epoch, _ in whole] == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert steps(DifficultySampler(20, 6, OPTIONS, seed=2), 1)[0][0] != whole[0][0]
    with pytest.raises(UserError, match=r"another data\.sampler"):
        PromptSampler(20, 6).load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=r"another data\.sampler"):
        first.load_state_dict(PromptSampler(20, 6).state_dict())
    fewer = DifficultySampler(8, 4, OPTIONS, seed=1)  # of a run that goes on with some of the data
    fewer.load_state_dict(first.state_dict())
    known = dict(fewer.state_dict()["rates"])
    assert known == {row: rate for row, rate in first.state_dict()["rates"] if row < 8} and known


OWN = """
import random
import numpy as np
import torch

class Backwards:  # a function of the epoch alone
    def __init__(self, data_source, data_config):
        self.rows, self.epochs, self.seed = data_source, 0, data_config.seed

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        self.epochs += 1
        yield from reversed(range(self.epochs - 1, len(self.rows)))

class Learning(Backwards):
    at = 0

    def __iter__(self):
        while True:
            self.at += 1
            yield self.at % len(self.rows)

    def update(self, batch):
        self.at += int(batch["scores"].sum())

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

class Forgetful(Learning):
    state_dict = property()

class Unwritable(Learning):
    def state_dict(self):
        return {"at": {1}}

class Odd(Backwards):
    def __iter__(self):
        yield from [0, "x", 99]

class Short(Backwards):
    def __iter__(self):
        yield 0

class Broken:
    def __init__(self, rows):
        pass

class Thrice(Backwards):  # verl's dataloader has as many rows as its sampler says
    def __len__(self):
        return 3 * len(self.rows)

class Silent:
    def __init__(self, data_source, data_config):
        pass

class Lucky(Backwards):  # draws from global generators, in the middle of an epoch too
    def __iter__(self):
        for row in torch.randperm(len(self.rows)).tolist():
            yield (row + random.randrange(len(self.rows)) + int(np.random.randint(len(self.rows)))) % len(self.rows)
"""


@pytest.fixture
def own(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)

    def make(name: str, rows: int = 7, size: int = 2, seed: int = 1) -> ClassSampler:
        settings = [f"data.sampler.class_path={tmp_path}/own.py", f"data.sampler.class_name={name}"]
        settings.append(f"data.seed={seed}")
        return ClassSampler(load(settings).config.data, [SimpleNamespace()] * rows, size)

    return make


def test_a_class_in_verls_shape(own) -> None:
    sampler = own("Backwards")
    drawn = [(sampler.next_batch(), sampler.epoch) for _ in range(6)]
    assert drawn == [([6, 5], 0), ([4, 3], 0), ([2, 1], 0), ([6, 5], 1), ([4, 3], 1), ([2, 1], 1)]
    assert sampler.update(answered((0, [1.0]))) == {}
    again = own("Backwards")
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert (
        [again.next_batch() for _ in range(3)] == [sampler.next_batch() for _ in range(3)] == [[6, 5], [4, 3], [6, 5]]
    )


def test_what_a_class_draws_from_global_generators_depends_on_seed_and_epoch_alone(own) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    sampler = own("Lucky")
    drawn = [sampler.next_batch() for _ in range(8)]
    assert torch.equal(torch.rand(2), expected), "the session's own draws are left as they were"
    other = own("Lucky", seed=2)
    assert drawn[:3] != drawn[3:6] and drawn[:3] != [other.next_batch() for _ in range(3)]
    for steps in (0, 2, 3, 4):
        first, again = own("Lucky"), own("Lucky")
        assert [first.next_batch() for _ in range(steps)] == drawn[:steps]
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [again.next_batch() for _ in range(8 - steps)] == drawn[steps:]


def test_an_epoch_is_as_long_as_the_class_says(own) -> None:
    assert own("Thrice").steps_per_epoch == 10 and own("Backwards").steps_per_epoch == 3


def test_what_fails_in_a_class_is_a_line(own) -> None:
    sampler = own("Learning")
    with pytest.raises(UserError, match=r"own.py:Learning fails in update\(\) \(KeyError"):
        sampler.update(Batch({"row": torch.ones(2)}))


def test_a_class_that_learns_keeps_its_own_state(own) -> None:
    sampler = own("Learning")
    assert sampler.next_batch() == [1, 2]
    sampler.update(answered((1, [2.0, 1.0]), (2, [0.0])))
    assert sampler.next_batch() == [6, 0]
    again = own("Learning")
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert again.next_batch() == sampler.next_batch() == [1, 2]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Odd", r"own.py:Odd yields 'x', and rows are 0 to 6"),
        ("Short", r"own.py:Short yields fewer than a batch of 2 rows in an epoch"),
        ("Broken", r"own.py:Broken fails in the class \(TypeError: .*data_source"),
        ("Silent", r"own.py:Silent has no __iter__"),
        ("Forgetful", r"own.py:Forgetful has update\(\) and no state_dict\(\)"),
        ("Unwritable", r"own.py:Unwritable state_dict\(\) is not JSON"),
        ("Backward", r"has no 'Backward'; did you mean Backwards"),
    ],
)
def test_a_class_that_cannot_be_used_is_a_line(own, name: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        own(name).next_batch()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["difficulty.enable=true", "difficulty.weights=[1,2]"], "2 thresholds make 3 pools"),
        (["difficulty.enable=true", "difficulty.thresholds=[0.9,0.1]"], "must ascend"),
        (["class_path=x.py"], "needs data.sampler.class_name"),
        (["class_path=x.py", "class_name=X", "difficulty.enable=true"], "are two samplers"),
    ],
)
def test_settings_that_contradict_each_other(settings: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        load([f"data.sampler.{setting}" for setting in settings])


VERL = """
from torch.utils.data import Sampler

class Curriculum(Sampler):  # as verl's AbstractCurriculumSampler asks for, and with a state
    def __init__(self, data_source, data_config):
        self.rows, self.seen = data_source, {}
        assert data_config.get("seed") == data_config.seed and data_config.get("nothing", 7) == 7

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        while True:
            yield min(range(len(self.rows)), key=lambda row: (self.seen.get(row, 0.0), row))

    def update(self, batch):
        rewards = batch.batch["token_level_scores"].sum(-1)
        for row, uid, reward in zip(batch.non_tensor_batch["index"], batch.non_tensor_batch["uid"], rewards):
            assert uid.endswith(str(row))
            self.seen[int(row)] = self.seen.get(int(row), 0.0) + float(reward) + 1.0

    def state_dict(self):
        return {"seen": [*self.seen.items()]}

    def load_state_dict(self, state):
        self.seen = dict(map(tuple, state["seen"]))
"""


class Rows(list[int]):
    """So many rows, of which a sampler asks for the length and the numbers."""

    def number_of(self, uid: str) -> int:
        return int(uid.rpartition(":")[2])


def test_a_class_for_verl_reads_scores_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "curriculum_of_verl.py").write_text(VERL)
    monkeypatch.syspath_prepend(tmp_path)
    for path in (f"{tmp_path}/curriculum_of_verl.py", "pkg://curriculum_of_verl"):
        data = load([f"data.sampler.class_path={path}", "data.sampler.class_name=Curriculum"]).config.data
        rows: Any = Rows(range(4))
        sampler, drawn = ClassSampler(data, rows, 1), []
        for _ in range(4):
            (row,) = sampler.next_batch()
            drawn.append(row)
            judged = [(f"1.0:{row}", SimpleNamespace(score=float(right), correct=right)) for right in (False, True)]
            sampler.update(outcomes(rows, judged))
        assert drawn == [0, 1, 2, 3]


def test_predicted_rates_weigh_rows_until_they_are_answered() -> None:
    options = OPTIONS.model_copy(update={"predictor": "critic"})
    sampler = DifficultySampler(6, 1, options, seed=5)
    sampler.update(answered((0, [0.0]), (1, [1.0])))
    assert len(sampler.unknown(3)) == 3 and sorted(sampler.unknown(10)) == [2, 3, 4, 5]
    sampler.predict([2, 3, 4], [-0.5, 0.5, 1.5])  # pools of weights 0.5, 4 and 1; row 5 stays new, of 2
    counts = Counter(sampler.next_batch()[0] for _ in range(6000))
    weights = np.array([0.5, 1.0, 0.5, 4.0, 1.0, 2.0])
    for row, share in enumerate(weights / weights.sum()):
        assert abs(counts[row] / 6000 - share) < 4 * (share * (1 - share) / 6000) ** 0.5
    again = DifficultySampler(6, 1, options, seed=5)
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert [again.next_batch() for _ in range(50)] == [sampler.next_batch() for _ in range(50)]
    metrics = again.update(answered((3, [1.0, 1.0, 1.0, 0.0]), (4, [0.0])))
    assert metrics["sampler/predictor/error"] == (0.25 + 1.0) / 2
    assert [row for row, _ in again.state_dict()["predicted"]] == [2]
    assert "predicted" not in DifficultySampler(6, 1, OPTIONS).state_dict()
