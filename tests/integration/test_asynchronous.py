"""Generation that runs ahead of training: equal to synchronous training at age 0, repeatable where ages are prescribed,
bounded in age and complete where it runs freely."""

import json
import os
import signal
import threading
from concurrent.futures import wait

import pytest
import ray
import torch
from runs import assert_same_run, assert_same_weights, read_metrics

from valor.collector.ahead import PromptSupply
from valor.collector.collector import Collector
from valor.config import PPOConfig, load
from valor.controller import ray_group
from valor.controller.ray_group import RayGroup
from valor.data.sampler import shuffled
from valor.errors import UserError
from valor.trainer.checks import check
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

V1 = "trainer.v1"
SEPARATE, COLOCATED = f"{V1}.trainer_mode=separate_async", f"{V1}.trainer_mode=colocate_async"
LOCAL = "trainer.controller=local"
OLDEST = f"{V1}.sampler.max_off_policy_threshold"
GRPO = "algorithm.adv_estimator=grpo"


class Watched:
    """The episodes that were trained on in each step, and the metrics."""

    def __init__(self, monkeypatch):
        self.keys, self.batches = [], []
        next_batch = Collector.next_batch

        def recording(*args):
            batch, metrics = next_batch(*args)
            self.keys.append([tuple(key) for key in batch["episode_key"].tolist()])
            self.batches.append(batch)
            return batch, metrics

        monkeypatch.setattr(Collector, "next_batch", recording)

    def assert_each_once(self):
        every = [key for keys in self.keys for key in keys]
        assert len(every) == len(set(every))


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


@pytest.fixture(scope="module")
def synchronous(overrides, tmp_path_factory):
    made = {}

    def run(*more):
        if more not in made:
            made[more] = tmp_path_factory.mktemp("synchronous") / "run"
            assert main(overrides(made[more], *more)) == 0
        return made[more]

    return run


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("algorithm", [(), (GRPO,)], ids=["ppo", "grpo"])
@pytest.mark.parametrize("where", [(LOCAL,), ()], ids=["local", "ray"])
def test_at_age_0_it_is_the_synchronous_run(algorithm, where, overrides, synchronous, tmp_path):
    more = [*algorithm, "trainer.test_freq=2"]
    assert main(overrides(tmp_path / "run", *more, SEPARATE, f"{OLDEST}=0", *where)) == 0
    assert_same_run(synchronous(*more), tmp_path / "run")


@pytest.mark.usefixtures("hosts")
def test_prescribed_ages_repeat_bit_for_bit_and_so_does_a_resumed_run(overrides, tmp_path, watched):
    steps = ["trainer.total_training_steps=6", "trainer.test_freq=3", "trainer.save_freq=1"]
    fixed = [SEPARATE, f"{OLDEST}=2", f"{V1}.deterministic=true", *steps]
    assert main(overrides(tmp_path / "ray", *fixed)) == 0
    assert main(overrides(tmp_path / "local", *fixed, LOCAL)) == 0
    assert_same_run(tmp_path / "ray", tmp_path / "local")
    rows = read_metrics(tmp_path / "local")[1:]
    assert [row["off_policy/age/mean"] for row in rows] == [0, 1, 2, 2, 2, 2]
    assert rows[0]["rollout_corr/k3_kl"] < 1e-6 < rows[-1]["rollout_corr/k3_kl"]
    assert rows[-1]["rollout_corr/eff_sample_size"] < 1
    source = tmp_path / "local" / "global_step_3"
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={source}"]
    assert main(overrides(tmp_path / "resumed", *fixed, LOCAL, *resumed)) == 0
    assert read_metrics(tmp_path / "resumed") == read_metrics(tmp_path / "local")[-3:]
    assert_same_weights(tmp_path / "resumed", tmp_path / "local")


def test_vtrace_weighs_the_returns_of_stale_samples_alone(overrides, tmp_path):
    """Fresh samples of the first step: as GAE, but for rounding; at age 1, of the same samples, by the ratio."""
    fixed = [SEPARATE, LOCAL, f"{OLDEST}=1", f"{V1}.deterministic=true", "actor_rollout_ref.actor.optim.lr=1e-3"]
    rows = []
    for more in ([], ["algorithm.adv_estimator=vtrace", "algorithm.rollout_correction.rollout_is=prefix"]):
        assert main(overrides(tmp_path / f"run{len(more)}", *fixed, *more)) == 0
        rows.append(read_metrics(tmp_path / f"run{len(more)}"))
    (first, second), (same, weighed) = (found[1:3] for found in rows)
    assert [first["off_policy/age/mean"], second["off_policy/age/mean"]] == [0, 1]
    assert same["critic/returns/mean"] == pytest.approx(first["critic/returns/mean"], abs=1e-5)
    assert weighed["critic/score/mean"] == second["critic/score/mean"]
    assert abs(weighed["critic/returns/mean"] - second["critic/returns/mean"]) > 1e-4
    assert weighed["rollout_corr/rollout_is_std"] > 1e-3


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    "more",
    [
        [SEPARATE],
        [SEPARATE, LOCAL, f"{V1}.num_warmup_batches=2", f"{V1}.sampler.max_off_policy_strategy=wait"],
        [SEPARATE, LOCAL, "algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=50"],
        [COLOCATED],
        [COLOCATED, "trainer.controller=ray"],
    ],
    ids=["ray", "waits", "dynamic sampling", "colocated", "colocated, ray"],
)
def test_samples_are_complete_each_trained_on_once_and_not_too_old(more, overrides, tmp_path, watched):
    steps = ["trainer.total_training_steps=6", "trainer.test_freq=3", f"{OLDEST}=2"]
    assert main(overrides(tmp_path / "run", *steps, *more)) == 0
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 6 == len(watched.batches)
    watched.assert_each_once()
    for batch, row in zip(watched.batches, rows, strict=True):
        assert len(batch) == 16
        groups = [batch.objects["uid"].count(uid) for uid in batch.objects["uid"]]
        assert set(groups) == {2}
        assert row["off_policy/age/max"] <= 2
        assert bool((batch["weights_versions"][batch["response_mask"] > 0] >= 0).all())
    assert any(row["off_policy/age/max"] > 0 for row in rows)


@pytest.mark.usefixtures("hosts")
def test_unfinished_samples_go_on_with_new_weights(overrides, tmp_path, watched, monkeypatch):
    """In the trainer's processes: few at a time and of many lengths, so that some of every batch are cut off."""
    receive = PromptSupply._receive

    def graded_at_once(self, item):
        receive(self, item)
        wait([grade for _, grade in self.grading._early.values()])

    # Else a fast model answers all it has before the first grades are there.
    monkeypatch.setattr(PromptSupply, "_receive", graded_at_once)
    few = [COLOCATED, "actor_rollout_ref.rollout.max_num_seqs=5", "data.max_response_length=40"]
    assert main(overrides(tmp_path / "run", *few, "trainer.total_training_steps=5")) == 0
    rows = read_metrics(tmp_path / "run")[1:]
    assert any(row["off_policy/partial_ratio"] > 0 for row in rows)
    for batch in watched.batches:
        versions, mask = batch["weights_versions"], batch["response_mask"]
        assert bool((versions[:, 1:] >= versions[:, :-1])[mask[:, 1:] > 0].all())
        lengths, whole = batch["response_lengths"], batch["responses"]
        last = whole.gather(1, lengths[:, None] - 1)[:, 0]
        assert int(lengths.max()) <= 40 and len(last[lengths < 40].unique()) <= 1  # it ends by itself or by its length


def test_what_is_too_old_is_dropped_and_drawn_again(overrides, tmp_path, watched, monkeypatch):
    """One prompt of the first batch never ends until its age is over."""
    hold, receive = threading.Event(), PromptSupply._receive

    def slow(self, item):
        episode, attempt = item
        if episode.key[1:] == (1, 0) and attempt == 0:
            hold.set()
            return
        receive(self, item)

    monkeypatch.setattr(PromptSupply, "_receive", slow)
    assert main(overrides(tmp_path / "run", SEPARATE, LOCAL, f"{OLDEST}=1", "trainer.total_training_steps=6")) == 0
    assert hold.is_set()
    rows = read_metrics(tmp_path / "run")[1:]
    assert rows[-1]["off_policy/dropped_prompts"] == 1
    watched.assert_each_once()
    at = next(step for step, keys in enumerate(watched.keys) if any(key[1:] == (1, 0) for key in keys))
    assert at >= 2 and max(row["off_policy/age/max"] for row in rows) <= 1


@pytest.mark.usefixtures("hosts")
def test_a_free_run_goes_on_from_its_queue(overrides, tmp_path, watched):
    steps = [SEPARATE, LOCAL, "trainer.save_freq=2", "trainer.total_training_steps=6"]
    assert main(overrides(tmp_path / "run", *steps)) == 0
    before = watched.keys[:4]
    kept = json.loads((tmp_path / "run" / "global_step_4" / "collector" / "queue.json").read_text())
    assert kept["draws"] == 5 and len(kept["items"]) == 8
    watched.keys.clear()
    source = tmp_path / "run" / "global_step_4"
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={source}"]
    assert main(overrides(tmp_path / "resumed", *steps, *resumed)) == 0
    again = [key for keys in watched.keys for key in keys]
    assert len(again) == 2 * 16 and not {*again} & {key for keys in before for key in keys}
    assert {key[1] for key in again} == {5, 6}


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("before", "after", "size"),
    [
        ([SEPARATE, f"{OLDEST}=2", f"{V1}.deterministic=true"], ["actor_rollout_ref.rollout.n=3"], 8),
        ([SEPARATE], ["actor_rollout_ref.rollout.n=3", "data.train_batch_size=6"], 6),
        ([SEPARATE], ["reward.error_score=-1"], 8),
        ([SEPARATE], [f"{V1}.deterministic=true", f"{OLDEST}=1"], 8),
        ([SEPARATE, f"{OLDEST}=2", f"{V1}.deterministic=true"], [f"{V1}.trainer_mode=sync"], 8),
        ([COLOCATED], [f"{V1}.trainer_mode=sync"], 8),
    ],
    ids=["samples", "batch", "grades", "batches", "synchronous", "colocated to synchronous"],
)
def test_after_a_change_the_prompts_that_were_ahead_are_answered_anew(
    before, after, size, overrides, tmp_path, watched
):
    """Each once, before any others; the answers that there were are of the run as it was."""
    steps = ["data.val_files=null", "trainer.save_freq=1"]
    assert main(overrides(tmp_path / "run", *steps, *before)) == 0
    trained = [row for batch in watched.batches[:2] for row in rows_of(batch)]
    watched.batches.clear()
    changed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'run' / 'global_step_2'}"]
    changed.append("trainer.resume_changed=allow")
    assert main(overrides(tmp_path / "resumed", *steps, *before, *after, *changed)) == 0
    later = [rows_of(batch) for batch in watched.batches]
    assert list(map(len, later)) == [size, size]
    assert sorted([*trained, *later[0], *later[1]]) == sorted(shuffled(640, 42, 0)[: 16 + 2 * size].tolist())


@pytest.mark.usefixtures("hosts")
def test_after_another_change_the_samples_that_were_ahead_are_trained_on(overrides, tmp_path, watched, capsys):
    fixed = [SEPARATE, f"{OLDEST}=2", f"{V1}.deterministic=true", "trainer.save_freq=1", "data.val_files=null"]
    assert main(overrides(tmp_path / "run", *fixed)) == 0
    before = watched.batches[2]
    watched.batches.clear()
    changed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'run' / 'global_step_2'}"]
    changed += ["trainer.resume_changed=allow", "algorithm.gamma=0.9"]
    assert main(overrides(tmp_path / "resumed", *fixed, *changed)) == 0
    assert "anew" not in capsys.readouterr().out
    assert torch.equal(before["responses"], watched.batches[0]["responses"])


def rows_of(batch):
    """The rows of the data that a batch has samples of."""
    return sorted({int(uid.rpartition(":")[2]) for uid in batch.objects["uid"]})


@pytest.fixture
def killed(monkeypatch):
    """The generator is killed, once, when an answer has come after the third draw. Who was."""
    receive, start, pids, killed = PromptSupply._receive, RayGroup._start, [], []

    def remembered(group):
        start(group)
        if [*group.specs] == ["rollout"]:
            pids.append(ray.get(group._actors[0].__ray_call__.remote(lambda host: os.getpid())))

    def deadly(self, item):
        receive(self, item)
        if self.draws >= 3 and not killed:
            killed.append(pids[0])
            os.kill(pids[0], signal.SIGKILL)

    monkeypatch.setattr(RayGroup, "_start", remembered)
    monkeypatch.setattr(PromptSupply, "_receive", deadly)
    return killed


@pytest.mark.usefixtures("cluster")
def test_a_generator_that_dies_is_replaced_and_nothing_is_lost(overrides, tmp_path, watched, killed, capsys):
    assert main(overrides(tmp_path / "run", SEPARATE, "trainer.total_training_steps=6")) == 0
    assert len(killed) == 1 and "begin anew" in capsys.readouterr().out
    assert len(watched.keys) == 6
    watched.assert_each_once()


@pytest.mark.usefixtures("cluster")
def test_when_none_is_left_the_run_ends_with_a_line_and_a_checkpoint(
    overrides, tmp_path, watched, killed, monkeypatch, capsys
):
    monkeypatch.setattr(ray_group, "_MOST_REPLACEMENTS", 0)
    command = overrides(tmp_path / "run", SEPARATE, "trainer.total_training_steps=6")
    assert main(command) == 1
    said = capsys.readouterr().err
    assert len(killed) == 1 and "died" in said and "Traceback" not in said
    done = len(watched.keys)
    assert (tmp_path / "run" / f"global_step_{done}" / "collector" / "queue.json").exists()
    assert main(command) == 0
    assert len(read_metrics(tmp_path / "run")) == 7
    watched.assert_each_once()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([COLOCATED, f"{OLDEST}=0"], "nothing to carry over"),
        ([COLOCATED, "actor_rollout_ref.rollout.nnodes=1"], "use separate_async"),
        ([SEPARATE, f"{V1}.num_warmup_batches=3", f"{OLDEST}=2"], "set it to 2 or less"),
        ([SEPARATE, f"{V1}.separate_async.parameter_sync_step=3", "data.train_batch_size=8"], "a multiple of that"),
        ([SEPARATE, "algorithm.adv_estimator=remax"], "remax compares"),
        ([SEPARATE, "resource_pools={values: {roles: [critic]}}"], "needs processes for generation"),
        ([SEPARATE, "resource_pools={apart: {roles: [rollout, critic]}}"], "leave rollout alone in its pool"),
        (["async_training.staleness_threshold=0.1"], "trainer.v1.trainer_mode=separate_async"),
        ([f"{V1}.separate_async.hybrid_rollout.enable_switch=true"], "keep their processes"),
    ],
)
def test_mistakes(arguments, line):
    base = ["data.train_files=x", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    with pytest.raises(UserError, match=line):
        load([*base, *arguments], PPOConfig, check)
