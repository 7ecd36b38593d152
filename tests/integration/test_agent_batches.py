"""Episodes of two turns, every other one in two rows, through everything that a step does with a batch."""

import json

import pytest
import torch
from runs import read_metrics, weights
from two_turns import settings

from valor.cli import main as valor
from valor.collector.collector import Collector
from valor.data.batch import Batch
from valor.trainer.main_ppo import main
from valor.trainer.phases.old_log_probs import RecomputedLogProbs
from valor.trainer.phases.reference import ReferenceLogProbs
from valor.trainer.phases.update_actor import UpdateActor
from valor.trainer.phases.update_critic import UpdateCritic
from valor.trainer.phases.values import Values

pytestmark = pytest.mark.slow

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def two_turns(overrides, tmp_path_factory):
    """The command line of two steps with these episodes."""
    loops = settings(tmp_path_factory.mktemp("loops"), forks=True, reward=0.5)

    def make(run_dir, *more):
        sizes = ["trainer.total_training_steps=2", "data.val_max_samples=4"]
        return overrides(run_dir, *sizes, *loops, *more)

    return make


REWARDS = ("response_mask", "token_level_scores", "token_level_rewards", "turn_rewards")


def disturbed(batch, amount=50.0):
    """The batch with other numbers at the places of observations and padding, but for rewards, which count anywhere."""
    mask = batch["response_mask"]
    columns = {
        name: column + amount * (mask == 0)
        for name, column in batch.tensors.items()
        if column.shape == mask.shape and column.is_floating_point() and name not in REWARDS
    }
    return (
        batch.union(Batch(columns)) if not columns else Batch({**batch.tensors, **columns}, batch.objects, batch.meta)
    )


def test_observations_have_no_gradient(two_turns, tmp_path, monkeypatch):
    """Other log-probs, values, advantages and returns at their places change no bit of the weights; their mask does."""
    settings = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.entropy_coeff=0.01"]
    settings += ["trainer.val_before_train=false", "trainer.test_freq=0", "algorithm.use_kl_in_reward=true"]
    assert main(two_turns(tmp_path / "plain", *settings)) == 0
    next_batch, collected = Collector.next_batch, list[Batch]()

    def collect(disturb, *args):
        batch, metrics = next_batch(*args)
        collected.append(disturb(batch))
        return collected[-1], metrics

    def evaluate(run, self, batch, step):
        columns, metrics = run(self, batch, step)
        masked = disturbed(Batch({"response_mask": collected[-1]["response_mask"], **columns.tensors}))
        return masked.select(list(columns.tensors)), metrics

    def update(run, change, self, batch, step):
        return run(self, change(batch), step)

    def flipped(batch):
        mask, ids = batch["response_mask"].clone(), collected[-1]["turn_ids"]
        row, place = next((r, t) for r, t in (mask == 0).nonzero().tolist() if ids[r, t:].any())
        mask[row, place] = 1.0
        return batch.union(Batch({"response_mask": mask}))

    def patch_phases(patched, change):
        for kind in (UpdateCritic, UpdateActor):
            patched.setattr(kind, "run", lambda *args, run=kind.run: update(run, change, *args))

    with monkeypatch.context() as patched:
        patched.setattr(Collector, "next_batch", lambda *args: collect(disturbed, *args))
        for kind in (RecomputedLogProbs, ReferenceLogProbs, Values):
            patched.setattr(kind, "run", lambda *args, run=kind.run: evaluate(run, *args))
        patch_phases(patched, disturbed)
        assert main(two_turns(tmp_path / "disturbed", *settings)) == 0
    with monkeypatch.context() as patched:
        patched.setattr(Collector, "next_batch", lambda *args: collect(lambda batch: batch, *args))
        patch_phases(patched, flipped)
        assert main(two_turns(tmp_path / "flipped", *settings)) == 0
    for role in ("actor", "critic"):
        plain, other, flipped = (weights(tmp_path / name, role) for name in ("plain", "disturbed", "flipped"))
        assert all(torch.equal(plain[name], other[name]) for name in plain), role
        assert any(not torch.equal(plain[name], flipped[name]) for name in plain), role


MORE = [
    pytest.param(
        ["algorithm.use_kl_in_reward=true", f"{ROLLOUT}.val_kwargs.n=2", f"{ROLLOUT}.val_kwargs.temperature=1.0"],
        id="ppo",
    ),
    pytest.param(
        ["algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true", "data.gen_batch_size=4"],
        id="dynamic sampling",
        marks=pytest.mark.long,
    ),
    pytest.param(
        ["algorithm.adv_estimator=remax", "algorithm.use_kl_in_reward=true"], id="remax", marks=pytest.mark.long
    ),
]


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("more", MORE)
def test_local_and_ray_are_the_same(more, two_turns, tmp_path):
    places = {"local": [], "ray": ["trainer.controller=ray"], "two": ["trainer.n_gpus_per_node=2"]}
    for name, place in places.items():
        assert main(two_turns(tmp_path / name, *more, *place)) == 0
    local, ray, two = (read_metrics(tmp_path / name) for name in places)
    assert local == ray
    for one, other in zip(local, two, strict=True):
        for name in ("critic/score/mean", "episode/turns/mean", "episode/rows", "response_length/mean"):
            assert one.get(name) == pytest.approx(other.get(name)), name
    for row in local[1:]:
        assert row["episode/turns/mean"] == 2 and row["training/rollout_log_probs_diff_max"] < 1e-4
        assert row["episode/rows"] == 1.5


def test_ratios_of_episodes_in_several_rows_do_not_depend_on_micro_batches(two_turns, tmp_path):
    """GSPO, in whose second update ratios are not 1: rows alone, and all at once. GMPO is refused."""
    actor = "actor_rollout_ref.actor"
    gspo = [f"{actor}.policy_loss.loss_mode=gspo", f"{actor}.clip_ratio_low=3e-4", f"{actor}.clip_ratio_high=4e-4"]
    sizes = {"alone": 1, "together": 64}
    for name, rows in sizes.items():
        assert main(two_turns(tmp_path / name, *gspo, f"{actor}.ppo_micro_batch_size_per_gpu={rows}")) == 0
    alone, together = (weights(tmp_path / name, "actor") for name in sizes)
    for name, tensor in together.items():
        torch.testing.assert_close(alone[name], tensor, atol=2e-5, rtol=1e-4)
    assert any(row["actor/pg_clipfrac"] > 0 for row in read_metrics(tmp_path / "alone")[1:])
    assert main(two_turns(tmp_path / "gmpo", f"{actor}.policy_loss.loss_mode=geo_mean")) == 1
    assert not [row for row in read_metrics(tmp_path / "gmpo") if "actor/loss" in row]


def test_a_critic_is_pretrained_and_scored_on_episodes(two_turns, tmp_path, capsys):
    """48 rows are 32 rollouts: in training, in what is held out, in the scorecard; turns are counted over rows."""
    alone = ["trainer.total_training_steps=1", "trainer.total_epochs=1", "pretrain.holdout=0.25"]
    drawn = [*alone, f"{ROLLOUT}.n=4", "data.train_max_samples=8", "critic.ppo_mini_batch_size=4"]
    assert valor(["critic", "pretrain", *two_turns(tmp_path / "critic", *drawn)]) == 0
    assert "24 rollouts of 6 prompts to learn from, 8 of 2 held out" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "critic" / "rollouts.jsonl").read_text().splitlines()]
    assert len(records) == 48 and len({record["episode"] for record in records}) == 32
    keys = two_turns(tmp_path / "unused")
    kept = ("actor_rollout_ref.model.path", "data.max_", "trainer.device")
    asked = [f"score.rollouts={tmp_path / 'critic' / 'rollouts.jsonl'}", f"score.out={tmp_path / 'card'}"]
    assert valor(["critic", "score", *asked, *(key for key in keys if key.startswith(kept))]) == 0
    card = json.loads((tmp_path / "card" / "scorecard.json").read_text())
    assert (card["responses"], card["prompts"]) == (32, 8)
    assert [turn["responses"] for turn in card["turns"]] == [32, 32]
