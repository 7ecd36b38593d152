"""Mini-batches under way: how many a role has at once, and that the order of their results stays."""

from types import SimpleNamespace

import pytest
import torch

from valor.config import load
from valor.data.batch import Batch
from valor.errors import Diverged, UserError
from valor.trainer.run import SkippedUpdates
from valor.trainer.updates import Updates

ROWS = 8


class Worker:
    """Notes when an update is started and when it is waited for."""

    def __init__(self, apart: bool, skipped: float = 0.0) -> None:
        self.group, self.skipped, self.seen = SimpleNamespace(apart=apart), skipped, list[str]()
        self.made: list[str] = []
        self.batches: list[Batch] = []

    def start(self, method: str, batch: Batch):
        number = batch.meta["update"]
        self.batches.append(batch)
        self.seen.append(f"start {number}")

        def results() -> dict[str, float]:
            self.seen.append(f"wait {number}")
            return {"loss": float(number), "skipped": self.skipped}

        return results


class NotedUpdates(Updates):
    """Also notes when a mini-batch is made."""

    def mini_batches(self, *args, **kwargs):
        for rows in super().mini_batches(*args, **kwargs):
            self.roles["actor"].made.append(f"{len(self.roles['actor'].seen)}")
            yield rows


def run(worker: Worker, *overrides: str, rows: int = ROWS) -> dict[str, float]:
    lengths, shape = torch.full((rows,), 3), (rows, 3)
    names = ("response_mask", "advantages", "old_log_probs", "rollout_log_probs")
    columns = {"prompts": torch.ones(rows, 2, dtype=torch.long), "prompt_lengths": torch.full((rows,), 2)}
    columns |= {"responses": torch.ones(shape, dtype=torch.long), "response_lengths": lengths}
    batch = Batch(columns | {name: torch.ones(shape) for name in names})
    argv = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=2", *overrides]
    say = [].append
    updates = NotedUpdates(load(argv).config, {"actor": worker}, SkippedUpdates(2, say))  # type: ignore[arg-type]
    return updates.run("actor", batch, step=1)


def test_ranks_that_work_apart_have_the_next_mini_batch_before_they_are_done():
    worker = Worker(apart=True)
    assert run(worker)["actor/loss"] == 2.5
    order = "start 1, start 2, wait 1, start 3, wait 2, start 4, wait 3, wait 4"
    assert worker.seen == order.split(", ")
    assert worker.made == ["0", "1", "3", "5"]  # and each is made while the ranks are at work on the one before


def test_in_this_process_one_is_done_before_the_next():
    worker = Worker(apart=False)
    run(worker)
    assert worker.seen == [f"{what} {number}" for number in range(1, 5) for what in ("start", "wait")]


def test_a_step_whose_episodes_are_all_left_out_has_one_update_that_moves_the_schedule_alone():
    worker = Worker(apart=False)
    run(worker, rows=0)
    (batch,) = worker.batches
    assert len(batch) == 0 and batch.meta["last_of_step"] and not batch.meta["learns"]


def test_a_run_that_only_skips_ends_with_at_most_one_update_more():
    worker = Worker(apart=True, skipped=1.0)
    with pytest.raises(Diverged):
        run(worker)
    assert worker.seen.count("wait 2") == 1 and "start 4" not in worker.seen


def test_more_episodes_than_have_one_update_need_old_log_probs():
    """A phase of the user's own may choose episodes twice: of the second update the ratio is not 1."""
    worker = Worker(apart=False)
    sizes = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    with pytest.raises(UserError, match="has 2 updates in step 1"):
        run(worker, *sizes)
    assert worker.seen == []


def test_mini_batches_that_are_measured_by_the_present_weights_are_not_handed_out_ahead():
    calls: list[str] = []
    worker = Worker(apart=True)

    def compute_log_probs(batch: Batch, **_: bool) -> Batch:
        calls.append(f"{len(worker.seen)}")
        return Batch({"old_log_probs": torch.zeros(len(batch), 3)})

    worker.compute_log_probs = compute_log_probs  # type: ignore[attr-defined]
    bypass = [
        f"algorithm.rollout_correction.{key}" for key in ("bypass_mode=true", "loss_type=reinforce", "rollout_is=token")
    ]
    run(worker, *bypass)
    assert calls == ["0", "2", "4", "6"]  # each after the update before it was waited for
