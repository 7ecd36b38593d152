"""The walk: its outcomes by hand, its optimum, and values of a policy against a recursion over single prefixes."""

import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from valor.config import PPOConfig
from valor.config.engine import ModelConfig
from valor.data.batch import Batch
from valor.errors import UserError
from valor.lab import walk
from valor.models.load import load_policy, load_tokenizer
from valor.models.rows import ROW_FIELDS
from valor.rewards.registry import compute_score
from valor.rewards.walk import Walk
from valor.user_files import load_file

EXAMPLE = Path(__file__).parents[3] / "examples" / "phases" / "exact_values.py"
walk_values = load_file(str(Path(__file__).parents[3] / "benchmarks" / "walk_values.py"), "path")

# From room 0 door a stays cheap and leads to the rich room 1, door b pays at once and leads to the poor room 2.
BY_HAND = Walk(leads=[[1, 2], [1, 0], [2, 0]], gains=[[0.0, 0.5], [1.0, 0.0], [0.0, 0.25]], length=3)


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ("a1a1a1", 2 / 3),  # the best: 0, 1, 1
        ("b2b0b2", 1.25 / 3),  # 0.5, 0.25, 0.5: what pays most at once
        ("b2a2a2", 0.5 / 3),
        ("a1a1", None),
        ("a1a1a1a1", None),
        ("a2a1a1", None),  # door a does not lead to room 2
        ("c1a1a1", None),
        (" a1a1a1", None),
    ],
)
def test_outcomes_by_hand(response, outcome):
    graded = compute_score(walk.DATA_SOURCE, response, json.dumps(asdict(BY_HAND)))
    assert graded["score"] == pytest.approx(outcome or 0.0)
    assert graded["whole"] == (outcome is not None)
    assert graded["acc"] == (response == "a1a1a1")
    assert graded["regret"] == pytest.approx(2 / 3 - (outcome or 0.0))


def test_the_optimum_and_the_random_walk_by_hand():
    assert BY_HAND.to_go()[1] == [0.5, 1.0, 0.25]
    assert BY_HAND.to_go()[2] == [1.0, 2.0, 0.75]
    assert BY_HAND.to_go()[3][0] == 2.0
    assert BY_HAND.to_go(uniform=True)[1] == [0.25, 0.5, 0.125]
    assert BY_HAND.to_go(uniform=True)[2][0] == pytest.approx(0.25 + (0.5 + 0.125) / 2)


@pytest.mark.parametrize("doors", [2, 3])
def test_the_optimum_is_that_of_all_walks(doors):
    made = walk.make_walk(5, length=5, doors=doors)
    for room in range(8):
        start = replace(made, start=room)
        every = [start.outcome(walk.written(start, taken)) for taken in product(range(doors), repeat=5)]
        assert max(every) * 5 == pytest.approx(start.to_go()[5][room])
        assert np.mean(every) * 5 == pytest.approx(start.to_go(uniform=True)[5][room])


def test_greed_is_not_enough():
    """Else a critic would have nothing to look ahead for."""
    made = walk.make_walk(0)
    room, total = 0, 0.0
    for _ in range(made.length):
        door = int(np.argmax(made.gains[room]))
        total, room = total + made.gains[room][door], made.leads[room][door]
    assert total < made.to_go()[-1][0] - 0.2


@pytest.mark.parametrize("wrong", [{"rooms": 11}, {"doors": 9}, {"length": 0}])
def test_maps_that_cannot_be(wrong):
    with pytest.raises(UserError, match="2 to 10 rooms"):
        walk.make_walk(0, **wrong)


def test_data_and_demonstrations(tmp_path):
    files = walk.make_data(tmp_path, 1, length=4, num_train=40, num_sft=50)
    rows = pq.read_table(files.train).to_pylist()
    for row in rows:
        truth = json.loads(row["reward_model"]["ground_truth"])
        assert str(truth["start"]) == row["prompt"][0]["content"]
    chats = [row["messages"] for row in pq.read_table(files.sft_train).to_pylist()]
    assert all(
        replace(files.walk, start=int(asked["content"])).outcome(said["content"]) is not None for asked, said in chats
    )
    assert pq.read_metadata(files.val).num_rows == 8


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("walk")
    model = walk.make_model(folder / "model", 0)
    critic = AutoModelForTokenClassification.from_pretrained(model, num_labels=1)
    torch.nn.init.normal_(critic.score.weight, std=0.5)
    critic.save_pretrained(folder / "critic")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "critic")
    return model, folder / "critic"


def test_exact_values_of_sampled_rows_are_those_of_all_states(saved):
    """The phase of the examples, which reads rows of a step, against the table of all states."""
    policy, made = saved[0], walk.make_walk(2, length=3, rooms=3)
    states = walk_values.exact_values(made, policy, temperature=0.5)
    model, tokenizer = load_policy(ModelConfig(path=str(policy))), load_tokenizer(str(policy))

    def compute_log_probs(rows: Batch, *, with_entropy: bool) -> Batch:
        with torch.no_grad():
            return Batch(
                {"old_log_probs": model(rows.select(ROW_FIELDS), temperature=rows.meta["temperature"])["log_probs"]}
            )

    inputs = SimpleNamespace(tokenizer=tokenizer)
    kind = load_file(str(EXAMPLE), "path").ExactValues
    config = {"data": {"max_response_length": 6}, "critic": {"kind": "probe"}}
    phase = kind(PPOConfig.model_validate(config))
    actor = SimpleNamespace(compute_log_probs=compute_log_probs)
    phase.resources = SimpleNamespace(roles={"actor": actor}, collector=SimpleNamespace(inputs=inputs))
    rows = states.rows.take([5, 0, 23, 8])
    rooms = [json.dumps(asdict(replace(made, start=row // 8))) for row in (5, 0, 23, 8)]
    rows.objects["ground_truth"], rows.meta["temperature"] = rooms, 0.5
    rows["responses"][3, 2] = 0  # no walk any more, from the fourth state on
    values = phase.run(rows, 1)[0]["values"]
    width = [8, 4, 4, 2, 2, 1]  # walks that begin as the state does
    for i, row in enumerate((5, 0, 23, 8)):
        for t in range(6):
            of_state = (states.row == row - row % width[t]) & (states.token == t)
            expected = 0.0 if i == 3 and t > 2 else float(states.value[of_state])
            assert float(values[i, t]) == pytest.approx(expected, rel=1e-5), (i, t)


def test_values_agree_with_a_recursion_over_single_prefixes(saved):
    """One prefix at a time through plain transformers, each chance and each value by itself."""
    made = walk.make_walk(2, length=2, rooms=3)
    policy, critic = saved
    states = walk_values.exact_values(made, policy, temperature=0.5)
    tokenizer, model = AutoTokenizer.from_pretrained(policy), AutoModelForCausalLM.from_pretrained(policy)
    reader = AutoModelForTokenClassification.from_pretrained(critic)
    found = {}

    def visit(start: Walk, text: str, chance: float) -> tuple[float, float]:
        if len(text) == 4:
            return start.outcome(text), start.outcome(text)
        ids = torch.tensor([tokenizer(f"<|user|>{start.start}<|assistant|>{text}")["input_ids"]])
        with torch.no_grad():
            p = (model(ids).logits[0, -1].double() / 0.5).softmax(-1)
            value = float(reader(ids).logits[0, -1, 0])
        nexts = {w[len(text)] for t in product(range(2), repeat=2) if (w := walk.written(start, t)).startswith(text)}
        chances = {c: float(p[tokenizer.convert_tokens_to_ids(c)]) for c in nexts}
        below = {c: visit(start, text + c, chance * chances[c]) for c in nexts}
        mine = sum(chances[c] * below[c][0] for c in nexts), max(best for _, best in below.values())
        found[start.start, text] = (*mine, chance, value)
        return mine

    scores = [visit(replace(made, start=room), "", 1.0)[0] for room in range(3)]
    assert states.score == pytest.approx(np.mean(scores), rel=1e-4)
    written = tokenizer.batch_decode(states.rows["responses"])
    keys = [(int(row) // 4, written[row][:token]) for row, token in zip(states.row, states.token, strict=True)]
    assert len(keys) == len(found) == 3 * (1 + 2 + 2 + 4)
    theirs = np.array([found[key] for key in keys])
    ours = torch.stack([states.value, states.best, states.chance], 1).numpy()
    np.testing.assert_allclose(ours, theirs[:, :3], rtol=1e-4)
    judged = states.judge([critic])
    expected = walk_values.against_truth(*(torch.tensor(theirs[:, i]) for i in (3, 0, 2)))
    assert judged == pytest.approx(expected, rel=1e-3)
    assert states.judge([critic, critic], lambda v: v.amin(0)) == pytest.approx(judged)


def test_too_many_walks_are_refused(saved):
    with pytest.raises(UserError, match="131072"):
        walk_values.exact_values(walk.make_walk(0, length=18), saved[0])


def test_agreement_with_scipy_and_by_hand():
    draw = np.random.default_rng(0)
    v, truth = draw.normal(size=50).round(1), draw.normal(size=50).round(1)
    found = walk_values.against_truth(torch.tensor(v), torch.tensor(truth), torch.full((50,), 0.3))
    assert found["rank_correlation"] == pytest.approx(stats.spearmanr(v, truth).statistic)
    assert found["explained_variance"] == pytest.approx(1 - np.var(truth - v) / np.var(truth))
    assert found["bias"] == pytest.approx((v - truth).mean())
    # A weight of 2 is the row twice; a weight of 0 is no row.
    weighted = walk_values.against_truth(
        torch.tensor([1.0, 2, 3, 9]), torch.tensor([1.0, 3, 2, 0]), torch.tensor([2.0, 1, 1, 0])
    )
    twice = walk_values.against_truth(torch.tensor([1.0, 1, 2, 3]), torch.tensor([1.0, 1, 3, 2]), torch.ones(4))
    assert weighted == pytest.approx(twice)
    assert np.isnan(walk_values.against_truth(torch.ones(3), torch.arange(3.0), torch.ones(3))["rank_correlation"])
