"""The same run in this process, in one Ray process and in two: one semantics."""

import pytest
import torch
from runs import assert_same_run, read_metrics, weights

from forked import VALOR
from valor.data.stored import StoredColumn
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

STEPS = "trainer.total_training_steps=2"


@pytest.fixture(scope="module")
def local_run(overrides, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("controllers") / "local"
    assert main(overrides(run_dir, STEPS)) == 0
    return run_dir


def test_ray_with_one_process_is_the_local_run_bit_for_bit(local_run, forks, overrides, tmp_path):
    """As a user starts it: a process that starts Ray, and ends it."""
    command, log = overrides(tmp_path / "ray", STEPS, "trainer.controller=ray"), tmp_path / "log"
    assert forks.start(f"import os\nos.setsid()\n{VALOR}", "ppo", *command, log=log).wait() == 0, log.read_text()
    assert_same_run(local_run, tmp_path / "ray")


@pytest.mark.usefixtures("hosts")
def test_two_processes_draw_the_same_samples_and_take_the_same_steps(local_run, overrides, tmp_path, monkeypatch):
    read, tensor = [], StoredColumn.tensor
    monkeypatch.setattr(StoredColumn, "tensor", lambda self: read.append((self._dtype, len(self))) or tensor(self))
    run_dir = tmp_path / "two"
    few = ["trainer.log_generations=1", "trainer.log_val_generations=1"]
    assert main(overrides(run_dir, STEPS, "trainer.n_gpus_per_node=2", *few)) == 0
    # Token ids stay with the processes but for those of the samples that are shown; GAE needs masks and values here.
    assert {rows for kind, rows in read if kind == torch.int64} == {1}
    assert max(rows for kind, rows in read if kind == torch.float32) > 1
    one, two = read_metrics(local_run), read_metrics(run_dir)
    for name in ("critic/score/mean", "response_length/mean", "response_length/max"):
        assert [r.get(name) for r in one] == [r.get(name) for r in two]
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "critic/values/mean"):
        for a, b in zip(one[1:], two[1:], strict=True):
            assert a[name] == pytest.approx(b[name], abs=1e-4, rel=1e-4), name
    for role in ("actor", "critic"):
        for name, tensor in weights(local_run, role).items():
            assert torch.allclose(tensor, weights(run_dir, role)[name], atol=1e-3), name


@pytest.mark.usefixtures("hosts")
@pytest.mark.long
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_back(overrides, tmp_path):
    run_dir = tmp_path / "moves"
    two = ["trainer.n_gpus_per_node=2"]
    assert main(overrides(run_dir, "trainer.total_training_steps=1", *two)) == 0
    assert main(overrides(run_dir, "trainer.total_training_steps=2")) == 0
    assert main(overrides(run_dir, "trainer.total_training_steps=3", *two)) == 0
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1, 2, 3]


@pytest.mark.usefixtures("hosts")
def test_an_error_in_a_ray_process_is_one_clear_line(overrides, tmp_path, capsys):
    arguments = overrides(tmp_path / "bad", STEPS, "trainer.controller=ray", f"critic.model.path={tmp_path}")
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert str(tmp_path) in error and "Traceback" not in error
