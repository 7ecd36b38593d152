"""A critic in closed form, and critics of what a group's mean leaves, in whole runs."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from runs import read_metrics, weights
from safetensors.torch import load_file

from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.models.states import StateProjection, state_features
from valor.trainer.main_ppo import main
from valor.workers.host import RunFacts
from valor.workers.probe import PROBE_FILE, ProbeCritic

pytestmark = pytest.mark.slow

DIGITS = f"reward.custom_reward_function.path={Path(__file__).with_name('digits_reward.py')}"
PROBE = ["critic.kind=probe", "algorithm.lam=0.9", "critic.probe.features=128", DIGITS]
AUTO = [*PROBE, "algorithm.lam=auto"]


def assert_same(a, b):
    """Equal metrics, policies and coefficients, to the last bit."""
    assert read_metrics(a) == read_metrics(b)
    first, second = (load_file(folder / "huggingface" / "critic" / PROBE_FILE) for folder in (a, b))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(x, weights(b, "actor")[name]) for name, x in weights(a, "actor").items())


@pytest.mark.usefixtures("hosts")
def test_it_predicts_from_the_second_step_on_and_resumes_to_the_last_bit(overrides, tmp_path):
    one_update = "actor_rollout_ref.actor.ppo_mini_batch_size=8"
    settings = [*AUTO, "actor_rollout_ref.rollout.n=16", "trainer.total_training_steps=6", "trainer.test_freq=3"]
    assert main(overrides(tmp_path / "whole", *settings, one_update)) == 0
    steps = [row for row in read_metrics(tmp_path / "whole") if "critic/ridge" in row]
    assert len(steps) == 6 and steps[0]["critic/values/max"] == 0 == steps[0]["critic/values/min"]
    explained = [row["critic/vf_explained_var"] for row in steps]
    assert explained[-1] > 0.1, explained  # what is written so far is in the state
    assert all(row["critic/values/min"] >= 0 and row["critic/values/max"] <= 1 for row in steps)
    lambdas = [row["critic/lambda"] for row in steps]
    assert lambdas[0] == 1.0 and all(0 < lam <= 1 for lam in lambdas) and len({*lambdas}) > 1, lambdas
    assert all(row["critic/lambda/variance"] > 0 for row in steps) and any(
        row["critic/lambda/bias_squared"] > 0 for row in steps
    )
    assert "critic/lr" not in steps[0] and steps[0]["critic/skipped"] == 0
    parts = tmp_path / "parts"
    assert main(overrides(parts, *settings, one_update, "trainer.total_training_steps=3")) == 0
    assert main(overrides(parts, *settings, one_update, "trainer.resume_mode=auto")) == 0
    assert_same(tmp_path / "whole", parts)


@pytest.mark.usefixtures("hosts")
def test_a_pass_of_its_own_gives_the_same_values(overrides, tmp_path, monkeypatch):
    """Several updates of the actor, whose old log-probs need a pass: the critic's one update is as before."""
    more = [*AUTO, "algorithm.truncated_responses=bootstrap", "critic.probe.states=policy"]
    assert main(overrides(tmp_path / "bootstrap", *more)) == 0
    row = read_metrics(tmp_path / "bootstrap")[-1]
    assert np.isfinite(row["critic/vf_explained_var"])
    lora = ["actor_rollout_ref.model.lora_rank=4", *PROBE]
    assert main(overrides(tmp_path / "lora", *lora, "trainer.total_training_steps=2")) == 0


@pytest.mark.usefixtures("hosts")
def test_two_processes_read_the_states_that_one_reads(overrides, tmp_path):
    for run, processes in (("one", 1), ("two", 2)):
        more = ("trainer.total_training_steps=2", f"trainer.n_gpus_per_node={processes}")
        assert main(overrides(tmp_path / run, *AUTO, *more)) == 0
    one, two = (read_metrics(tmp_path / run)[-1] for run in ("one", "two"))
    assert one["critic/values/max"] > one["critic/values/min"]
    for name in (
        "critic/values/mean",
        "critic/values/max",
        "critic/vf_loss",
        "actor/grad_norm",
        "critic/lambda/variance",
    ):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4), name


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(("target", "kind"), [("residual", "model"), ("residual", "probe"), ("anchored", "model")])
def test_critics_beside_the_groups_mean(overrides, tmp_path, target, kind):
    beside = [*PROBE, f"critic.target={target}", f"critic.kind={kind}", "actor_rollout_ref.rollout.n=4"]
    beside += ["algorithm.lam_critic=1"] * (target == "anchored")
    assert main(overrides(tmp_path / "run", *beside)) == 0
    rows = [row for row in read_metrics(tmp_path / "run") if "critic/vf_loss" in row]
    # A critic that says 0 leaves exactly the variance that the mean of the others leaves.
    ratio = "critic/baseline_variance/critic", "critic/baseline_variance/group_mean"
    assert rows[0][ratio[0]] == pytest.approx(rows[0][ratio[1]], rel=1e-5)
    assert rows[-1][ratio[0]] != pytest.approx(rows[-1][ratio[1]], rel=1e-5)
    if kind == "model":
        saved = tmp_path / "run" / "huggingface" / "critic"
        assert ('"value_target": "residual"' in (saved / "config.json").read_text()) == (target == "residual")
        start, one_step = f"critic.model.path={saved}", "trainer.total_training_steps=1"
        assert main(overrides(tmp_path / "next", *beside, start, one_step)) == 0
        assert main(overrides(tmp_path / "other", start, one_step)) == (2 if target == "residual" else 0)


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("fewer", ["turns", "rejection"])
def test_it_learns_from_the_features_that_it_predicts_by(overrides, tmp_path, monkeypatch, fewer):
    """Also where it learns at fewer tokens: what they are left out for is no part of a state."""
    seen, learnt = [], []

    def features(states, log_probs, mask, longest):
        seen.append(state_features(states, log_probs, mask, longest))
        return seen[-1]

    def evidence(self, features, returns, mask, half):
        learnt.append(int(mask.sum()))
        return record(self, features, returns, mask, half)

    record = ProbeCritic._evidence
    monkeypatch.setattr("valor.workers.probe.state_features", features)
    monkeypatch.setattr(ProbeCritic, "_evidence", evidence)
    odd = lambda x, mask, *_: (mask * (torch.arange(mask.shape[1]) % 2), {})  # noqa: E731
    monkeypatch.setattr(sys.modules["valor.algorithms.rollout_correction"], "rejection_mask", odd)
    less = {
        "turns": ["algorithm.gae_unit=turn", "algorithm.lam=1"],
        "rejection": [f"algorithm.rollout_correction.{x}" for x in ("rollout_rs=token_k3", "rollout_rs_threshold=1")],
    }[fewer]
    assert main(overrides(tmp_path / "run", *PROBE, *less, "trainer.total_training_steps=1")) == 0
    predicted, again = seen
    assert torch.equal(predicted, again)
    assert 0 < learnt[0] <= 16 * 8 / 2


@pytest.mark.usefixtures("hosts")
def test_a_fit_to_other_features_is_refused_in_a_line(overrides, tmp_path, capsys):
    one_step = "trainer.total_training_steps=1"
    assert main(overrides(tmp_path / "run", *PROBE, one_step)) == 0
    start = f"critic.probe.path={tmp_path / 'run' / 'huggingface' / 'critic'}"
    assert main(overrides(tmp_path / "next", *PROBE, one_step, start)) == 0
    assert main(overrides(tmp_path / "other", *PROBE, one_step, start, "critic.probe.features=64")) == 2
    assert "was fitted to" in capsys.readouterr().err
    assert main(overrides(tmp_path / "frozen", *AUTO, one_step, start, "critic.freeze=true")) == 2
    assert "was fitted without it" in capsys.readouterr().err


class _States:
    """Hidden states that depend on a row's tokens alone."""

    data_parallel_rank = 0

    def states(self, rows: Batch, projection: StateProjection) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.cat([rows["prompts"], rows["responses"]], 1).double().cumsum(1)[:, -rows["responses"].shape[1] :]
        states = torch.stack([seen.sin(), (1.7 * seen).cos(), (0.3 * seen).sin()], -1)
        return states.float(), -rows["responses"].float() / 10


def _batches(seed: int) -> list[Batch]:
    draw, batches = torch.Generator().manual_seed(seed), []
    for _ in range(3):
        lengths = torch.randint(1, 7, (20,), generator=draw)
        mask = (torch.arange(6) < lengths[:, None]).float()
        columns = {
            "prompts": torch.randint(1, 50, (20, 3), generator=draw),
            "prompt_lengths": torch.full((20,), 3),
            "responses": torch.randint(1, 50, (20, 6), generator=draw),
            "response_lengths": lengths,
            "response_mask": mask,
            "returns": torch.randn(20, 6, generator=draw) * mask,
        }
        batches.append(Batch(columns))
    return batches


def _critic(share: int) -> ProbeCritic:
    source = _States()
    source.data_parallel_rank = share
    context = SimpleNamespace(device=torch.device("cpu"), roles={"ref": source})
    config = PPOConfig.model_validate({"critic": {"kind": "probe"}, "data": {"max_response_length": 6}})
    return ProbeCritic(context, config=config, facts=RunFacts(3, []))


def learn_by_rank(folder, world, shares):
    import torch.distributed as dist

    rank = dist.get_rank()
    critic, share = _critic(shares[rank]), shares[rank]
    rows = [*range(share, 20, max(shares) + 1)] if max(shares) else [*range(20)]
    if world == 2 and shares == [0, 1]:
        rows = [*range(20)] if rank == 0 else []  # one that has none
    metrics = [critic.update(batch.take(rows)) for batch in _batches(0)]
    torch.save({"metrics": metrics, **critic._fit.state}, folder / f"state_{world}_{rank}.pt")


@pytest.mark.parametrize(
    "shares", [[0, 1], [0, 1, 2], [0, 0, 1]], ids=["one is empty", "three shares", "two share one"]
)
def test_ranks_have_the_same_coefficients_as_one_alone(forks, tmp_path, shares):
    run_ranks(forks, tmp_path, 1, learn_by_rank, tmp_path, 1, [0])
    run_ranks(forks, tmp_path, len(shares), learn_by_rank, tmp_path, len(shares), shares)
    alone = torch.load(tmp_path / "state_1_0.pt")
    ranks = [torch.load(tmp_path / f"state_{len(shares)}_{rank}.pt") for rank in range(len(shares))]
    for state in ranks:
        assert state["metrics"] == ranks[0]["metrics"]
        for name in ("sums", "weights", "errors", "low", "high"):
            assert torch.equal(state[name], ranks[0][name]), name
            torch.testing.assert_close(state[name], alone[name], rtol=1e-7, atol=1e-9)


def test_what_contradicts_it_is_one_line(overrides, tmp_path, capsys):
    assert main(overrides(tmp_path / "run", "critic.kind=probe", "critic.ensemble_size=2")) == 2
    assert "critic.kind=probe is one regression" in capsys.readouterr().err
    for more in ("critic.kind=model", "algorithm.adv_estimator=vtrace", "algorithm.gae_unit=turn"):
        assert main(overrides(tmp_path / "run", *AUTO, more)) == 2
        assert "algorithm.lam=auto reads the error of a critic in closed form" in capsys.readouterr().err
    assert main(overrides(tmp_path / "run", *AUTO, "algorithm.adaptive_lam_alpha=0.1")) == 2
    assert "each say what advantages are made of" in capsys.readouterr().err
