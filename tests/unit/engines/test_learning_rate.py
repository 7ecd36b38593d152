"""The learning-rate schedule at hand-computed points."""

import pytest

from valor.config import PPOConfig
from valor.config.engine import OptimConfig
from valor.engines.optim import lr_factor
from valor.workers.roles import role_specs


def factors(total: int, **keys) -> list[float]:
    return [lr_factor(step, OptimConfig(**keys), total) for step in range(total)]


def test_constant_without_warm_up():
    assert factors(3) == [1.0, 1.0, 1.0]


def test_warm_up_never_spends_a_step_at_rate_zero():
    assert factors(6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warm_up_as_a_share_of_the_run():
    assert factors(10, lr_warmup_steps_ratio=0.2)[:3] == [0.5, 1.0, 1.0]


def test_steps_win_over_the_share():
    assert factors(10, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5)[0] == 1.0


def test_linear_falls_from_one_to_the_floor():
    assert factors(4, lr_scheduler_type="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert factors(4, lr_scheduler_type="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_after_warm_up():
    got = factors(6, lr_scheduler_type="cosine", lr_warmup_steps=2)
    # Quarters of a half wave: 1, (1 + sqrt(1/2)) / 2, 1/2, (1 - sqrt(1/2)) / 2.
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_beyond_the_end_stays_at_the_floor(kind):
    config = OptimConfig(lr_scheduler_type=kind, min_lr_ratio=0.1)
    assert lr_factor(8, config, 8) == pytest.approx(0.1) and lr_factor(20, config, 8) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "actor", "critic"),
    [
        ({}, 8, 8),
        ({"trainer": {"critic_warmup": 3}}, 5, 8),
        ({"trainer": {"critic_warmup": 8}}, 0, 8),
        ({"trainer": {"critic_warmup": 20}}, 0, 8),
        ({"critic": {"freeze_steps": ["2-4", "7"]}}, 8, 4),
        ({"critic": {"freeze_steps": ["1-3", "2-5", "8-99"]}, "trainer": {"critic_warmup": 1}}, 7, 2),
    ],
)
def test_a_schedule_ends_with_the_last_update_of_its_role(settings, actor, critic):
    optim = {"lr_scheduler_type": "cosine", "lr_warmup_steps_ratio": 0.2}
    settings = {"critic": {}, **settings, "actor_rollout_ref": {"actor": {"optim": optim}}}
    config = PPOConfig.model_validate({**settings, "critic": {**settings["critic"], "optim": optim}})
    specs = role_specs(config, total_steps=8, eos_token_ids=[])
    for role, updates in (("actor", actor), ("critic", critic)):
        assert specs[role].kwargs["facts"].learning_steps == updates
        if updates == 0:  # nothing is scheduled
            continue
        rates = [*factors(updates, **optim), lr_factor(updates, OptimConfig(**optim), updates)]
        assert min(rates) == rates[-1] == 0
