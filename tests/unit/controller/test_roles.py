"""A role of one's own: a worker class, a row in the table of roles, and the phase that calls it. Nothing else."""

from types import SimpleNamespace

import pytest
import torch

from valor.config import PPOConfig, load
from valor.controller.placement import check_placement, resolve_placement
from valor.controller.start import start_pools
from valor.data.batch import Batch
from valor.tracking.metrics import Timer
from valor.trainer.phases.base import Phase
from valor.trainer.phases.schedule import Schedule
from valor.workers.dispatch import Dispatch
from valor.workers.roles import ROLES, Role, role_specs


class LengthWorker:
    def __init__(self, context, *, config, facts):
        self.scale = config.actor_rollout_ref.rollout.n

    @Dispatch("dp", reads=("prompts", "prompt_lengths", "response_lengths"))
    def measure(self, batch: Batch) -> Batch:
        return Batch({"lengths": batch["response_lengths"] * self.scale})


class Lengths(Phase):
    """Lengths by the role."""

    name = role = "lengths"
    reads = frozenset(("prompts", "prompt_lengths", "response_lengths"))
    adds = frozenset(("lengths",))

    def run(self, batch, step):
        return self.resources.roles["lengths"].measure(batch), {"lengths/rows": len(batch)}


@pytest.fixture
def table(monkeypatch):
    row = Role(
        LengthWorker, lambda config: config.trainer, wanted=lambda config: config.actor_rollout_ref.rollout.n > 1
    )
    monkeypatch.setitem(ROLES, "lengths", row)


def config(*overrides: str) -> PPOConfig:
    return load(["data.train_files=x", "actor_rollout_ref.model.path=x", "trainer.device=cpu", *overrides]).config


@pytest.mark.usefixtures("table")
def test_a_role_in_three_places():
    run = config("actor_rollout_ref.rollout.n=2")
    specs = role_specs(run, total_steps=1, eos_token_ids=[])
    assert [*specs][-1] == "lengths" and specs["lengths"].replaceable
    roles = start_pools(resolve_placement(run), {"lengths": specs["lengths"]})
    schedule = Schedule([Lengths(run)])
    schedule.bind(SimpleNamespace(roles=roles))
    columns = {"prompts": torch.ones(3, 1, dtype=torch.long), "prompt_lengths": torch.ones(3, dtype=torch.long)}
    batch = Batch({**columns, "response_lengths": torch.tensor([3, 1, 2])})
    batch, metrics = schedule.run(batch, 1, Timer(), roles)
    assert batch["lengths"].tolist() == [6, 2, 4] and metrics == {"lengths/rows": 3}
    roles.close()
    assert "lengths" not in role_specs(config(), total_steps=1, eos_token_ids=[])


@pytest.mark.usefixtures("table")
def test_it_may_have_a_pool_of_its_own():
    apart = "resource_pools={apart: {roles: [lengths]}}"
    assert not [*check_placement(config(apart, "actor_rollout_ref.rollout.n=2"))]
    assert resolve_placement(config(apart, "actor_rollout_ref.rollout.n=2")).pool_of("lengths") == "apart"
    (line,) = check_placement(config(apart))
    assert "names lengths, which this run does not have" in line


def test_members_of_an_ensemble_live_together():
    run = config(
        "critic.ensemble_size=3", "critic.model.value_head_init=normal", "resource_pools={values: {roles: [critic]}}"
    )
    names = [name for name in role_specs(run, total_steps=4, eos_token_ids=[]) if name.startswith("critic")]
    assert names == ["critic", "critic_2", "critic_3"]
    assert {resolve_placement(run).pool_of(name) for name in names} == {"values"}
