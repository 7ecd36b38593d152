"""Whole runs through the entry point: they train, are repeatable to the bit, and survive being killed."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import assert_same_run, read_metrics

from forked import VALOR
from valor.report.page import build_report
from valor.trainer import recorder
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def finished(overrides, tmp_path_factory) -> Path:
    """A four-step PPO run, saved every step, never disturbed: what the others are compared with."""
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert main(overrides(run_dir, "trainer.save_freq=1", "trainer.test_freq=2")) == 0
    return run_dir


def test_a_run_leaves_what_it_promises(finished):
    rows = read_metrics(finished)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for name in (
        "critic/score/mean",
        "critic/vf_explained_var",
        "critic/vf_loss",
        "critic/grad_norm",
        "actor/pg_loss",
        "actor/ppo_kl",
        "actor/grad_norm",
        "actor/lr",
        "response_length/mean",
        "response_length/clip_ratio",
        "training/rollout_log_probs_diff_max",
    ):
        assert all(name in row for row in rows[1:]), name
    assert "val-core/valor/arithmetic/reward/mean@1" in rows[0]
    assert (finished / "global_step_4" / "trainer.json").exists()
    assert not list(finished.glob("*.partial"))


def test_rollout_and_training_log_probs_agree(finished):
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-5 for row in read_metrics(finished)[1:])


def test_exported_models_load_without_valor(finished, without_valor):
    code = (
        "from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer\n"
        f"root = {str(finished / 'huggingface')!r}\n"
        "tok = AutoTokenizer.from_pretrained(root + '/actor')\n"
        "actor = AutoModelForCausalLM.from_pretrained(root + '/actor')\n"
        "critic = AutoModelForTokenClassification.from_pretrained(root + '/critic')\n"
        "ids = tok('1+1', return_tensors='pt').input_ids\n"
        "assert actor(ids).logits.shape[:2] == ids.shape and critic(ids).logits.shape == (*ids.shape, 1)\n"
        "assert critic(ids).logits.abs().sum() > 0\n"
    )
    without_valor(code)


def test_same_seed_same_bits(finished, overrides, tmp_path):
    assert main(overrides(tmp_path / "again", "trainer.save_freq=1", "trainer.test_freq=2")) == 0
    assert_same_run(finished, tmp_path / "again")


def test_another_seed_is_another_run(finished, overrides, tmp_path):
    assert main(overrides(tmp_path / "other", "trainer.seed=7", "trainer.test_freq=2")) == 0
    assert read_metrics(tmp_path / "other")[1] != read_metrics(finished)[1]


def test_a_resumed_run_equals_the_undisturbed_one(finished, overrides, tmp_path):
    run_dir = tmp_path / "resumed"
    # The schedule's length is part of the run, so the first half is cut off by a signal-free route: max steps 2 of 4.
    common = ["trainer.save_freq=1", "trainer.test_freq=2"]
    assert main(overrides(run_dir, *common)) == 0
    for step in (3, 4):
        _remove(run_dir / f"global_step_{step}")
    _remove(run_dir / "huggingface")
    assert main(overrides(run_dir, *common)) == 0
    assert_same_run(finished, run_dir)


@pytest.mark.parametrize("awaited", ["global_step_2", "global_step_2.partial", "samples/step_3.jsonl"])
def test_killed_and_resumed_equals_the_undisturbed_run(awaited, finished, forks, overrides, tmp_path):
    """Killed right after a checkpoint, while one is being written, and in the middle of a step."""
    run_dir = tmp_path / "killed"
    arguments = overrides(run_dir, "trainer.save_freq=1", "trainer.test_freq=2")
    process = forks.start(VALOR, "ppo", *arguments)
    deadline = time.monotonic() + 120
    while not (run_dir / awaited).exists():
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (run_dir / "huggingface").exists()
    assert main(arguments) == 0
    assert_same_run(finished, run_dir)


def test_sigterm_finishes_the_step_and_saves(finished, forks, overrides, tmp_path):
    run_dir = tmp_path / "stopped"
    arguments = overrides(run_dir, "trainer.test_freq=2")  # no save_freq: only the signal saves
    process = forks.start(VALOR, "ppo", *arguments)
    deadline = time.monotonic() + 120
    while not (run_dir / "samples" / "step_1.jsonl").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert list(run_dir.glob("global_step_*/trainer.json"))
    assert main(arguments) == 0
    assert_same_run(finished, run_dir)


def test_grpo_needs_no_critic(overrides, tmp_path):
    run_dir = tmp_path / "grpo"
    assert main(overrides(run_dir, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=2")) == 0
    assert (run_dir / "huggingface" / "actor").exists() and not (run_dir / "huggingface" / "critic").exists()
    assert not any("vf_loss" in key for key in read_metrics(run_dir)[-1])


def test_a_single_update_has_ratio_one_and_no_extra_pass(overrides, tmp_path):
    run_dir = tmp_path / "single"
    single = ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.total_training_steps=2"]
    assert main(overrides(run_dir, *single)) == 0
    text = (run_dir / "metrics.jsonl").read_text()
    assert "timing_s/old_log_prob" not in text
    for row in read_metrics(run_dir)[1:]:
        assert row["actor/ppo_kl"] == 0.0 and row["actor/pg_clipfrac"] == 0.0
        assert row["training/rollout_log_probs_diff_max"] < 1e-5


def test_kl_in_reward_and_kl_loss_use_the_reference(overrides, tmp_path):
    run_dir = tmp_path / "kl"
    kl = [
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "trainer.total_training_steps=3",
    ]
    assert main(overrides(run_dir, *kl)) == 0
    rows = read_metrics(run_dir)[1:]
    assert rows[0]["actor/reward_kl_penalty"] == 0.0  # the actor still is the reference
    assert rows[-1]["actor/reward_kl_penalty"] != 0.0
    assert rows[-1]["actor/reward_kl_penalty_coeff"] != rows[0]["actor/reward_kl_penalty_coeff"]
    assert all(row["actor/kl_loss"] >= 0 for row in rows)


def test_gradients_that_are_never_finite_stop_the_run_with_the_reason(overrides, tmp_path, capsys, monkeypatch):
    run_dir, built = tmp_path / "nan", []
    monkeypatch.setattr(recorder, "_FIRST_REPORT", 0.0)  # seconds
    monkeypatch.setattr(
        recorder, "build_report", lambda run, live=False: built.append(live) or build_report(run, live=live)
    )
    broken = [
        f"algorithm.custom_path={Path(__file__).with_name('broken_loss.py')}",
        "actor_rollout_ref.actor.policy_loss.loss_mode=broken",
        "trainer.max_skipped_updates=3",
        "trainer.report=true",
        "algorithm.adv_estimator=grpo",
    ]
    assert main(overrides(run_dir, *broken)) == 1
    captured = capsys.readouterr()
    assert captured.err.strip().splitlines()[-1].startswith("stopped: 3 updates in a row had non-finite gradients")
    assert captured.out.count("update skipped") == 3
    assert "actor/grad_norm not finite: such updates are skipped" in captured.out
    report = (run_dir / "report.html").read_text(encoding="utf-8")  # also of a run that has ended badly
    assert "lower actor_rollout_ref.actor.optim.lr (" in report.lower() and '"live":false' in report
    assert built == [True, False]  # once while it went on, once when it had ended
    rows = read_metrics(run_dir)
    assert rows[1]["actor/skipped"] == 1.0  # two updates a step: the third one is in the second step


def test_retention_keeps_the_newest(overrides, tmp_path):
    run_dir = tmp_path / "kept"
    assert main(overrides(run_dir, "trainer.save_freq=1", "trainer.max_ckpt_to_keep=2")) == 0
    assert sorted(p.name for p in run_dir.glob("global_step_*")) == ["global_step_3", "global_step_4"]


def _remove(path: Path) -> None:
    subprocess.run(["rm", "-r", os.fspath(path)], check=True)
