"""Presets of critics, values by branching, examples of phases: they do what they say, and resume to the bit."""

import json
from pathlib import Path

import pytest
import torch
from runs import assert_same_weights, read_metrics, weights

from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

SMALL = ["data.val_files=null", "actor_rollout_ref.rollout.n=4", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=3"]


def with_phases(name: str) -> list[str]:
    return [f"algorithm.phases_path={Path(__file__).parents[2] / 'examples' / 'phases' / name}.py"]


ARMS = {
    "evpo": ["--config-name=evpo_config"],
    "evpo smooth": ["--config-name=evpo_config", "+algorithm.adv_kwargs={gate: smooth, baseline: group}"],
    "agreement mask": [*with_phases("agreement_mask"), "critic.ensemble_size=2", "critic.model.value_head_init=normal"],
    "resampling": with_phases("resampling"),
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
    CHECKS[arm](rows, whole)
    assert (" gate 0.00 " in capsys.readouterr().out) == (CHECKS[arm] is gated)


def gated(rows: list[dict[str, float]], run_dir: Path) -> None:
    for row in rows:
        explained, weight = row["critic/gate_explained_var"], row["critic/gate"]
        assert weight in (max(explained, 0.0), float(explained > 0))
    assert rows[0]["critic/gate"] == 0.0  # a new head gives 0 everywhere: it explains nothing


def parted(rows: list[dict[str, float]], run_dir: Path) -> None:
    """Heads of their own part the critics from the first step on."""
    assert all(row["critic/ensemble_std"] > 0 and 0.15 < row["critic/agreement_masked"] <= 0.2 for row in rows)
    first, second = (weights(run_dir, name)["score.weight"] for name in ("critic", "critic_2"))
    assert not torch.equal(first, second)


def drawn(rows: list[dict[str, float]], run_dir: Path) -> None:
    """Weights are squares of scores, 0 or 1: of answers that are not all wrong, right ones alone are drawn."""
    for row in rows:
        assert 0 < row["training/pf_ppo/distinct_ratio"] < 1
        assert row["critic/score/mean"] == 0 or row["training/pf_ppo/score_after"] == 1.0


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


CHECKS = {
    "evpo": gated,
    "evpo smooth": gated,
    "agreement mask": parted,
    "resampling": drawn,
    "vapo": imitates,
    "branches": branched,
}
