"""Checkpoints on disk: whole or absent, found again, cleared away."""

import pytest

from valor.errors import UserError
from valor.trainer.checkpoints import CheckpointStore


def write(store: CheckpointStore, step: int, keep: set[int] = frozenset()) -> None:
    store.save(step, {"step": step}, lambda folder: (folder / "actor").mkdir(), set(keep))


def test_saved_is_found_and_read(tmp_path):
    store = CheckpointStore(tmp_path)
    assert store.resume_folder("auto", None) is None
    write(store, 3)
    write(store, 10)
    assert store.steps() == [3, 10]
    assert store.resume_folder("auto", None) == tmp_path / "global_step_10"
    assert store.load_state(tmp_path / "global_step_3") == {"step": 3}
    assert store.resume_folder("disable", None) is None


def test_a_failed_save_leaves_no_checkpoint_and_the_next_clears_it(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1)

    def crash(folder):
        (folder / "actor").mkdir()
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        store.save(2, {"step": 2}, crash, set())
    assert store.steps() == [1]
    assert (tmp_path / "global_step_2.partial").exists()
    write(store, 2)
    assert store.steps() == [1, 2]
    assert not (tmp_path / "global_step_2.partial").exists()


def test_retention_keeps_the_newest_and_the_best_after_a_restart_too(tmp_path):
    for step in (1, 2, 3):
        write(CheckpointStore(tmp_path, max_to_keep=2), step, keep={1})
    assert CheckpointStore(tmp_path).steps() == [1, 2, 3]  # 1 is the best, 2 and 3 are the newest
    write(CheckpointStore(tmp_path, max_to_keep=2), 4, keep={1})
    assert CheckpointStore(tmp_path).steps() == [1, 3, 4]


def test_resuming_needs_a_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(UserError, match="resume_from_path"):
        store.resume_folder("resume_path", None)
    with pytest.raises(UserError, match="not a Valor checkpoint"):
        store.load_state(tmp_path / "global_step_9")
