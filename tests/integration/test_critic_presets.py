"""The presets of critics and values by branching: they run, do what they say, and resume to the bit."""

import json
from pathlib import Path

import pytest
import torch
from runs import assert_same_weights, read_metrics, weights

from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

SMALL = ["data.val_files=null", "actor_rollout_ref.rollout.n=4", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=3"]
ARMS = {
    "evpo": ["--config-name=evpo_config"],
    "evpo smooth": ["--config-name=evpo_config", "+algorithm.adv_kwargs={gate: smooth, baseline: group}"],
    "asyppo": ["--config-name=asyppo_config"],
    "vapo": ["--config-name=vapo_config", "trainer.critic_warmup=1", "critic.unclipped_steps=1-1"],
    "branches": ["algorithm.branch_values={share: 0.3, branches: 2}", "+algorithm.adv_kwargs.lam_positions=[1.0,0.5]"],
}


@pytest.mark.parametrize("arm", ARMS)
def test_two_steps_and_a_resume(arm, overrides, tmp_path, capsys) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    settings = [*ARMS[arm], *SMALL, "trainer.total_training_steps=2"]
    assert main(overrides(whole, *settings)) == 0
    start = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole / 'global_step_1'}"]
    assert main(overrides(resumed, *settings, *start)) == 0
    assert_same_weights(whole, resumed)
    rows = read_metrics(whole)
    assert read_metrics(resumed) == rows[1:]
    check = {"evpo": gated, "evpo smooth": gated, "asyppo": parted, "vapo": imitates, "branches": branched}[arm]
    check(rows, whole)
    assert (" gate 0.00 " in capsys.readouterr().out) == (check is gated)


def gated(rows: list[dict[str, float]], run_dir: Path) -> None:
    for row in rows:
        explained, weight = row["critic/gate_explained_var"], row["critic/gate"]
        assert weight in (max(explained, 0.0), float(explained > 0))
    assert rows[0]["critic/gate"] == 0.0  # a new head gives 0 everywhere: it explains nothing


def parted(rows: list[dict[str, float]], run_dir: Path) -> None:
    """A new head is zero in both: they agree everywhere, and nothing is masked; what they learn from parts them."""
    assert [rows[0][f"critic/{name}"] for name in ("ensemble_std", "agreement_masked", "divergence_masked")] == [
        0,
        0,
        0,
    ]
    assert rows[1]["critic/ensemble_std"] > 0
    for name in ("agreement_masked", "divergence_masked"):
        assert 0.15 < rows[1][f"critic/{name}"] <= 0.2
    first, second = (weights(run_dir, name)["score.weight"] for name in ("critic", "critic_2"))
    assert not torch.equal(first, second)


def imitates(rows: list[dict[str, float]], run_dir: Path) -> None:
    assert "actor/positive_nll" not in rows[0] and rows[1]["actor/positive_nll"] > 0  # the first step is the critic's
    assert rows[0]["critic/vf_clipfrac"] == 0


def branched(rows: list[dict[str, float]], run_dir: Path) -> None:
    for row in rows:
        assert row["branches/samples"] == 2 * row["branches/states"]
        assert 0.2 < row["branches/states"] / (row["response_length/mean"] * 32) < 0.5
        assert row["branches/tokens_ratio"] > 0.2
    timed = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert timed["timing_s/gen_branches"] > 0


def test_no_entropy_bonus_where_the_critics_part(overrides, tmp_path) -> None:
    """With the whole bonus left out, but for one token, the policy's gradient is all but that without a bonus. The
    first step's critics agree to the bit, and mask nothing: heads of their own make them part at once."""
    settings = [
        "--config-name=asyppo_config",
        *SMALL,
        "critic.model.value_head_init=normal",
        "algorithm.agreement_mask=0",
    ]
    kinds = {"none": (1e-9, 0.0), "masked": (10.0, 1.0), "full": (10.0, 0.0)}
    norms = {}
    for name, (weight, share) in kinds.items():
        more = [f"actor_rollout_ref.actor.entropy_coeff={weight}", f"algorithm.divergence_mask={share}"]
        assert main(overrides(tmp_path / name, *settings, *more, "trainer.total_training_steps=1")) == 0
        norms[name] = read_metrics(tmp_path / name)[0]["actor/grad_norm"]
    assert abs(norms["masked"] - norms["none"]) < 0.2 * abs(norms["full"] - norms["none"])
