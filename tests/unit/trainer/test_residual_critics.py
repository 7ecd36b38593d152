"""critic.target=residual and anchored: golden numbers, a computation of its own, and what it is refused with."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phase_runs import after, made
from valor.algorithms import compute_advantages
from valor.config import load
from valor.data.batch import Batch
from valor.errors import StepRefused
from valor.trainer.checks import check
from valor.trainer.phases.group_baseline import GroupBaseline
from valor.trainer.phases.update_critic import UpdateCritic
from valor.trainer.step_metrics import baseline_metrics

RESIDUAL = {"critic": {"target": "residual"}, "actor_rollout_ref": {"rollout": {"n": 3}}}


def batch_of(rewards, values, mask, uid, **more) -> Batch:
    columns = {"token_level_rewards": rewards, "values": values, "response_mask": mask, **more}
    columns = {name: torch.as_tensor(column, dtype=torch.float32) for name, column in columns.items()}
    lengths = torch.full((len(uid),), columns["values"].shape[1])
    return Batch({**columns, "response_lengths": lengths}, {"uid": list(uid)})


def phase(**algorithm):
    return made(GroupBaseline, algorithm, **RESIDUAL)


def test_values_by_hand():
    """Outcomes 1, 0, 1 of one prompt and 0, 0.5 of another: the others' means are 0.5, 1, 0.5 and 0.5, 0."""
    rewards = [[0, 1], [0, 0], [0, 1], [0, 0], [0.5, 0]]
    values = [[0.1, 0.2], [0.0, -0.5], [0.3, 0.0], [0.0, 0.0], [0.25, 9.0]]
    mask = [[1, 1], [1, 1], [1, 1], [1, 1], [1, 0]]
    out, metrics = after(phase(), batch_of(rewards, values, mask, "aaabb"))
    assert out["group_baseline"].tolist() == [0.5, 1.0, 0.5, 0.5, 0.0] and metrics == {}
    expected = torch.tensor([[0.6, 0.7], [1.0, 0.5], [0.8, 0.5], [0.5, 0.5], [0.25, 0.0]])
    torch.testing.assert_close(out["values"], expected)
    assert torch.equal(out["critic_outputs"], torch.tensor(values))


def test_anchored_values_by_hand():
    """They begin at the others' mean (0.5, 1, 0.5 and 0.5, 0) and change as the critic's do; it learns outcomes. The
    last one's first token is rejected: its second one has changed by then, as without a rejection."""
    rewards = [[0, 1], [0, 0], [0, 1], [0, 0], [0.5, 0]]
    values = [[0.1, 0.2], [0.5, 0.0], [0.3, 0.0], [0.0, 0.25], [0.75, 0.25]]
    mask = [[1, 1], [1, 1], [1, 1], [1, 1], [0, 1]]
    anchored = made(GroupBaseline, {}, critic={"target": "anchored"}, actor_rollout_ref={"rollout": {"n": 3}})
    out, _ = after(anchored, batch_of(rewards, values, mask, "aaabb"))
    expected = torch.tensor([[0.5, 0.6], [1.0, 0.5], [0.5, 0.2], [0.5, 0.75], [0.0, -0.5]])
    torch.testing.assert_close(out["values"], expected)
    assert "group_baseline" not in out
    tensors = {name: out[name] for name in ("values", "response_mask")}
    advantages, returns = compute_advantages("gae", rewards=out["token_level_rewards"], **tensors, whitening="none")
    torch.testing.assert_close(advantages[:4, 0], torch.tensor([0.5, -1.0, 0.5, -0.5]))  # those of rloo
    learnt = []
    update = made(UpdateCritic, {}, critic={"target": "anchored"}, actor_rollout_ref={"rollout": {"n": 3}})
    update.resources = SimpleNamespace(critics=SimpleNamespace(update=lambda rows, step: learnt.append(rows) or {}))
    update.run(out.union(Batch({"returns": returns})), 1)
    torch.testing.assert_close(learnt[0]["returns"][:4], torch.tensor([[1.0, 1], [0, 0], [1, 1], [0, 0]]))
    assert torch.equal(learnt[0]["values"], torch.tensor(values))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_advantages_and_targets_agree_with_numpy(seed, lam):
    """Targets are lambda-returns of the critic's outputs, with the outcome minus the others' mean at the end."""
    draw = np.random.default_rng(seed)
    mask = (np.arange(6) < draw.integers(1, 7, (8, 1))).astype(float)
    mask[:, 1:3] *= draw.integers(0, 2, (8, 1))  # observations in some rows
    mask[:, 0] = 1
    rewards, outputs = draw.normal(size=(8, 6)) * mask, draw.normal(size=(8, 6)) * mask
    uid = [*"aabbbbcc"]
    out, _ = after(phase(), batch_of(rewards, outputs, mask, uid))
    tensors = {name: out[name] for name in ("values", "response_mask")}
    advantages, returns = compute_advantages(
        "gae", rewards=out["token_level_rewards"], **tensors, lam=lam, whitening="none"
    )
    learnt = []
    critics = SimpleNamespace(update=lambda rows, step: learnt.append(rows) or {})
    update = made(UpdateCritic, {}, **RESIDUAL)
    update.resources = SimpleNamespace(critics=critics)
    update.run(out.union(Batch({"returns": returns})), 1)
    total = rewards.sum(1)
    for row in range(8):
        others = [total[other] for other in range(8) if uid[other] == uid[row] and other != row]
        base, where = np.mean(others), np.flatnonzero(mask[row])
        later, value_after, end = 0.0, 0.0, base
        for t in where[::-1]:  # the outputs alone, with the base taken off at the end of the response
            delta = rewards[row, t] - end + value_after - outputs[row, t]
            later, value_after, end = delta + lam * later, outputs[row, t], 0.0
            assert float(advantages[row, t]) == pytest.approx(later, abs=1e-5)
            assert float(learnt[0]["returns"][row, t]) == pytest.approx(later + outputs[row, t], abs=1e-5)
            assert float(learnt[0]["values"][row, t]) == pytest.approx(outputs[row, t], abs=1e-6)


def test_an_output_of_0_is_rloo():
    draw = torch.Generator().manual_seed(0)
    rewards, mask = torch.randn(6, 4, generator=draw), torch.ones(6, 4)
    rewards[:, :-1] = 0
    out, _ = after(phase(), batch_of(rewards, torch.zeros(6, 4), mask, "aaabbb"))
    shared = {"rewards": rewards, "response_mask": mask, "group_ids": out.objects["uid"]}
    gae = compute_advantages("gae", **shared, values=out["values"], whitening="none")[0]
    torch.testing.assert_close(gae, compute_advantages("rloo", **shared)[0])
    metrics = baseline_metrics(out, 1.0)
    assert metrics["critic/baseline_variance/critic"] == pytest.approx(metrics["critic/baseline_variance/group_mean"])


def test_episodes_of_several_rows_are_one_sample():
    """Rows 0 and 1 are one episode, whose outcome is in its last row."""
    rewards, mask = [[0, 0], [0, 1], [0, 0]], [[1, 1], [1, 1], [1, 1]]
    rows = batch_of(rewards, [[0, 0]] * 3, mask, "aaa", bootstrap_values=[0, 0.25, 0])
    rows["episode"] = torch.tensor([0, 0, 1])
    out, _ = after(phase(truncated_responses="bootstrap"), rows)
    assert out["group_baseline"].tolist() == [0.0, 0.0, 1.0]
    assert out["values"].tolist() == [[0, 0], [0, 0], [1, 1]] and out["bootstrap_values"].tolist() == [0, 0.25, 1]


def test_a_rejected_sample_says_nothing_of_the_others():
    """Rejected are the first sample of prompt a, and one of the two of prompt b, whose other one is compared with all
    that are left."""
    rewards, mask = [[9.0], [1.0], [0.0], [9.0], [2.0]], [[0], [1], [1], [0], [1]]
    batch = batch_of(rewards, [[0.0]] * 5, mask, "aaabb")
    out, _ = after(phase(), batch)
    assert out["group_baseline"].tolist() == [0, 0, 1, 0, 0.5] and out["values"][:, 0].tolist() == [0, 0, 1, 0, 0.5]
    metrics = baseline_metrics(batch, 1.0)
    assert metrics["critic/baseline_variance/group_mean"] == pytest.approx(np.var([1 - 0, 0 - 1, 2 - 0.5]))
    alone, _ = after(phase(), batch_of([[9.0], [1.0]], [[0.0]] * 2, [[0], [1]], "aa"))
    assert alone["values"].tolist() == [[0.0], [0.0]]


def test_a_prompt_with_one_sample_is_refused():
    with pytest.raises(StepRefused, match="1 prompts of this step have one"):
        phase().refuse(batch_of([[1.0]] * 3, [[0.0]] * 3, [[1]] * 3, "aab"))
    phase().refuse(batch_of([[1.0]] * 4, [[0.0]] * 4, [[1]] * 4, "aabb"))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["actor_rollout_ref.rollout.n=1"], "rollout.n to at least 2"),
        (["algorithm.gamma=0.9"], "algorithm.gamma=1"),
        (["critic.value_loss=bce"], "which critic.value_loss=bce has not"),
        (["critic.value_loss=hl_gauss"], "value_min"),
        (["algorithm.reward_mask_ratio=0.5"], "reward_mask_ratio take away"),
        (["critic.target=anchored", "algorithm.lam=0.9"], "set algorithm.lam_critic=1"),
        (["critic.target=anchored", "algorithm.gae_unit=turn", "algorithm.lam_turn=0.5"], "and algorithm.lam_turn=1"),
        (["critic.target=anchored", "algorithm.gae_unit=bilevel", "algorithm.lam_turn=0.5"], "and algorithm.lam_turn"),
        (["critic.target=anchored", "algorithm.adv_estimator=vtrace"], "vtrace makes the critic's targets of them"),
        (
            ["critic.target=anchored", "algorithm.truncated_responses=bootstrap"],
            "would teach the critic the moved values",
        ),
        (["critic.target=anchored", "actor_rollout_ref.rollout.n=1"], "critic.target=anchored compares samples"),
    ],
)
def test_what_contradicts_it_is_said_in_a_line(settings, line):
    common = ["data.train_files=x", "critic.target=residual", "actor_rollout_ref.rollout.n=4"]
    (found,) = check(load([*common, *settings]).config)
    assert line in found


def test_the_variance_a_critic_leaves_by_hand():
    """Two prompts, two samples each, one token: outcomes 0, 2, 4, 6; the others' means 2, 0, 6, 4."""
    batch = batch_of([[0], [2], [4], [6]], [[1], [1], [5], [4]], [[1]] * 4, "aabb")
    found = baseline_metrics(batch, 1.0)
    assert found["critic/baseline_variance/critic"] == pytest.approx(np.var([-1, 1, -1, 2]))
    assert found["critic/baseline_variance/group_mean"] == pytest.approx(np.var([-2, 2, -2, 2]))
    alone = baseline_metrics(batch_of([[0], [2], [4]], [[0]] * 3, [[1]] * 3, "abc"), 1.0)
    assert alone["critic/baseline_variance/group_mean"] == pytest.approx(np.var([-3, 0, 3]))
