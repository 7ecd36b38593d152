"""Ray is needed by runs of several processes alone."""

import pytest
import torch

from valor.config import load
from valor.controller import placement
from valor.errors import UserError
from valor.trainer.checks import placed


def test_without_ray_one_process_runs_and_several_are_refused_in_a_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    one = ["trainer.device=cpu", "trainer.n_gpus_per_node=1"]
    assert placed(_config(*one)).controller == "local"
    for several in (["trainer.n_gpus_per_node=2"], [*one, "trainer.controller=ray"]):
        with pytest.raises(UserError, match="pip install ray"):
            placed(_config(*several))


def _config(*overrides: str):
    return load(["data.train_files=x", "actor_rollout_ref.model.path=x", *overrides]).config
