"""A critic with one update a batch computes its values in that update: the same run as with a pass of its own."""

import pytest
from runs import assert_same_run, read_metrics

from valor.trainer.main_ppo import main
from valor.trainer.updates import Critics

pytestmark = pytest.mark.slow

ONE_UPDATE = ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "algorithm.lam=0.9", "algorithm.gamma=0.95"]


@pytest.mark.parametrize(
    "more",
    [
        ["critic.model.value_head_init=normal", "critic.shuffle=true", "algorithm.reward_noise=0.1"],
        ["critic.value_loss=hl_gauss", "critic.freeze_steps=[2-2]", "critic.ppo_max_token_len_per_gpu=48"],
        pytest.param(["trainer.n_gpus_per_node=2", "algorithm.lam_critic=0.8"], marks=pytest.mark.long),
    ],
    ids=["mse", "hl_gauss", "two processes"],
)
@pytest.mark.usefixtures("hosts")
def test_the_run_is_the_same_to_the_last_bit(overrides, tmp_path, monkeypatch, more):
    assert main(overrides(tmp_path / "one", *ONE_UPDATE, *more)) == 0
    monkeypatch.setattr(Critics, "values_in_update", lambda *_: False)
    assert main(overrides(tmp_path / "two", *ONE_UPDATE, *more)) == 0
    assert_same_run(tmp_path / "one", tmp_path / "two")
    frozen = sum("freeze_steps" in setting for setting in more)  # a step in which values are all there is to compute
    for name, passes in (("one", frozen), ("two", 4)):
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert sum('"timing_s/values"' in row for row in rows) == passes, name
    assert all(row["critic/grad_norm"] > 0 for row in read_metrics(tmp_path / "one")[1:] if "critic/grad_norm" in row)
