"""When the critic's one update of a batch computes the values too."""

from unittest.mock import Mock

import pytest
import torch

from valor.config import load
from valor.data.batch import Batch
from valor.trainer.advantage import targets_by_ranks
from valor.trainer.updates import Critics, Updates

ONE_UPDATE = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]


def test_it_has_the_settings_of_the_run():
    options = targets_by_ranks(
        load(
            [
                *ONE_UPDATE,
                "algorithm.gamma=0.9",
                "algorithm.lam_critic=0.7",
                "algorithm.adv_kwargs.reward_on_masked=drop",
            ]
        ).config
    )
    assert options["whitening"] == "none"
    assert (options["gamma"], options["lam"], options["lam_critic"]) == (0.9, 1.0, 0.7)
    assert options["reward_on_masked"] == "drop"


@pytest.mark.parametrize(
    "more",
    [
        ["critic.ppo_mini_batch_size=4"],
        ["critic.ppo_epochs=2"],
        ["resource_pools={values: {roles: [critic]}}"],
        ["critic.freeze=true", "critic.model.path=a"],
        ["critic.ensemble_size=2", "critic.model.value_head_init=normal"],
        ["actor_rollout_ref.actor.strategy=megatron", "critic.megatron.pipeline_model_parallel_size=2"],
        ["algorithm.adv_estimator=vtrace"],
        ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"],
        ["algorithm.gae_unit=turn"],
        ["algorithm.use_kl_in_reward=true"],
        ["algorithm.truncated_responses=bootstrap"],
        ["algorithm.reward_mask_ratio=0.5"],
        ["algorithm.reward_source=critic"],
        ["algorithm.branch_values.share=0.1"],
        ["algorithm.rollout_correction.rollout_is=token"],
    ],
    ids=lambda more: more[0],
)
def test_what_needs_more_has_a_pass_of_its_own(more):
    assert targets_by_ranks(load([*ONE_UPDATE, *more]).config) is None


def test_so_do_steps_with_episodes_of_several_rows_or_more_rows_than_one_update_has():
    config = load([*ONE_UPDATE, "critic.freeze_steps=[2-2]"]).config
    roles, skips = Mock(), Mock()
    critics = Critics(config, roles, Updates(config, roles, skips))
    batch = Batch({"response_mask": torch.ones(8, 2)})
    assert critics.values_in_update(batch, 1) and not critics.values_in_update(batch, 2)
    assert not critics.values_in_update(batch.repeat(2), 1)
    batch["episode"] = torch.tensor([0, 0, 1, 2, 3, 4, 5, 6])
    assert not critics.values_in_update(batch, 1)
