"""Roles on processes of their own: the same numbers as on shared ones, and updates at the same time."""

import json

import pytest
from runs import assert_same_run, read_metrics

from valor.config import PPOConfig, load
from valor.controller.placement import resolve_placement
from valor.errors import UserError
from valor.trainer.checks import check
from valor.trainer.main_ppo import main

ROLLOUT = "actor_rollout_ref.rollout"
APART = "resource_pools={values: {roles: [critic, ref]}}"


RUN = [
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.test_freq=1",
    f"{ROLLOUT}.temperature=0.8",
]


@pytest.fixture(scope="module")
def together(overrides, tmp_path_factory):
    """A run whose roles share one process."""
    folder = tmp_path_factory.mktemp("pools") / "together"
    assert main(overrides(folder, *RUN)) == 0
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("hosts")
def test_a_critic_and_a_reference_apart_change_nothing_and_are_updated_at_the_same_time(
    together, overrides, tmp_path, capsys
):
    assert main(overrides(tmp_path / "apart", *RUN, APART)) == 0
    said = capsys.readouterr().out
    assert "main" in said and "actor, rollout" in said and "critic" in said
    assert_same_run(together, tmp_path / "apart")
    rows = [json.loads(line) for line in (tmp_path / "apart" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    for row in rows[2:]:
        began = {role: row[f"timing_began_s/update_{role}"] for role in ("critic", "actor")}
        ended = {role: began[role] + row[f"timing_s/update_{role}"] for role in began}
        assert max(began.values()) < min(ended.values())
        # The critic's pool computes values while the actor's computes old log-probs, and nobody waits for both.
        passes = [(row[f"timing_began_s/{name}"], row[f"timing_s/{name}"]) for name in ("old_log_prob", "values")]
        assert max(at for at, _ in passes) < min(at + seconds for at, seconds in passes)
        for names in (("old_log_prob", "values"), ("update_critic", "update_actor")):
            assert sum(row.get(f"timing_hidden_s/{name}", 0.0) for name in names) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("hosts")
def test_generation_apart_changes_nothing(together, overrides, tmp_path, capsys):
    """Two processes that generate; the actor's weights reach them before every step and every validation."""
    buckets = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=1"
    apart = [f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2", buckets]
    assert main(overrides(tmp_path / "apart", *RUN, *apart)) == 0
    assert "2 x CPU process, 1 threads each on 1 node(s): rollout" in capsys.readouterr().out
    assert_same_run(together, tmp_path / "apart")
    rows = [json.loads(line) for line in (tmp_path / "apart" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["timing_s/update_weights"] > 0 for row in rows[1:])


@pytest.mark.slow
@pytest.mark.usefixtures("hosts")
def test_adapters_reach_generation_apart_as_merged_weights(overrides, tmp_path):
    lora = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.03", f"{ROLLOUT}.nnodes=1"]
    assert main(overrides(tmp_path / "run", *lora, "trainer.total_training_steps=3")) == 0
    for row in read_metrics(tmp_path / "run")[1:]:
        assert row["training/rollout_log_probs_diff_max"] < 1e-4 and row["actor/grad_norm"] > 0


def test_placement_says_who_shares_what():
    arguments = ["data.train_files=x", APART, "trainer.device=cpu", "trainer.num_threads=1"]
    placement = resolve_placement(load([*arguments, "actor_rollout_ref.actor.use_kl_loss=true"]).config)
    assert placement.controller == "ray" and placement.world_size == 2
    assert [placement.pool_of(role) for role in ("actor", "ref", "critic")] == ["main", "values", "values"]
    table = placement.table(["actor", "rollout", "critic", "ref"]).splitlines()
    assert table[0].startswith("main ") and table[0].endswith("actor, rollout")
    assert table[1].startswith("values") and table[1].endswith("critic, ref")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["resource_pools={a: {roles: critic}, b: {roles: critic}}"], "critic is in a and in b"),
        (["resource_pools={a: {roles: ref}}"], "ref, which this run does not have"),
        (["resource_pools={a: {roles: critic}}", "trainer.controller=local"], "use ray"),
        (["resource_pools={a: {roles: actor}}"], "'actor' is none of rollout, ref, teacher, critic, reward_model"),
        ([f"{ROLLOUT}.nnodes=1", "resource_pools={gen: {roles: rollout}}"], "rollout is in gen and in rollout"),
        ([f"{ROLLOUT}.nnodes=1", "resource_pools={rollout: {roles: critic}}"], "resource_pools.rollout: that is the"),
        ([f"{ROLLOUT}.nnodes=1", "trainer.controller=local"], "rollout: a pool has processes of its own"),
    ],
)
def test_mistakes(arguments, line):
    with pytest.raises(UserError, match=line):
        load(["data.train_files=x", *arguments], PPOConfig, check)
