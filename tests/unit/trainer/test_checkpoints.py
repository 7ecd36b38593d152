"""Checkpoints on disk: whole or absent, found again, cleared away."""

import json
import random
from contextlib import suppress

import pytest

from valor.errors import UserError
from valor.tracking.rundir import rewind
from valor.trainer.checkpoints import CheckpointStore, open_checkpoint
from valor.trainer.export import export_checkpoint


def write(store: CheckpointStore, step: int, keep: set[int] = frozenset()) -> None:
    store.save("PPO", {"step": step}, lambda folder: (folder / "actor").mkdir(), set(keep))


def found(store: CheckpointStore, mode: str = "auto"):
    return store.find(mode, None, lambda line: None)


def test_saved_is_found_and_read(tmp_path):
    store = CheckpointStore(tmp_path)
    assert found(store) is None
    write(store, 3)
    write(store, 10)
    assert store.steps() == [3, 10]
    assert found(store).folder == tmp_path / "global_step_10"
    checkpoint = open_checkpoint(tmp_path / "global_step_3")
    assert (checkpoint.step, checkpoint.kind, checkpoint.state) == (3, "PPO", {"step": 3})
    assert found(store, "disable") is None


def test_an_export_of_a_model_with_code_of_its_own_says_how_it_is_had(tmp_path):
    config = {"model_type": "of_its_own", "architectures": ["Own"], "auto_map": {"AutoConfig": "own.OwnConfig"}}

    def write_roles(folder):
        (folder / "actor" / "huggingface").mkdir(parents=True)
        (folder / "actor" / "huggingface" / "config.json").write_text(json.dumps(config))

    checkpoint = CheckpointStore(tmp_path).save("PPO", {"step": 7}, write_roles, set())
    with pytest.raises(UserError, match=r"code of its own.* trainer.total_training_steps=7, which writes"):
        export_checkpoint(checkpoint, tmp_path / "out", "actor")


def test_a_failed_save_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 1)

    def crash(folder):
        (folder / "actor").mkdir()
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        store.save("PPO", {"step": 2}, crash, set())
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


def test_the_next_save_clears_what_a_killed_one_left(tmp_path):
    (tmp_path / "global_step_2.partial" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_1.removed").mkdir()
    write(CheckpointStore(tmp_path), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_3"]


def test_retention_keeps_the_newest_and_the_best_after_a_restart_too(tmp_path):
    for step in (1, 2, 3):
        write(CheckpointStore(tmp_path, max_to_keep=2), step, keep={1})
    assert CheckpointStore(tmp_path).steps() == [1, 2, 3]  # 1 is the best, 2 and 3 are the newest
    write(CheckpointStore(tmp_path, max_to_keep=2), 4, keep={1})
    assert CheckpointStore(tmp_path).steps() == [1, 3, 4]


def test_resuming_needs_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="not a Valor checkpoint"):
        open_checkpoint(tmp_path / "global_step_9")


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 10, None])
@pytest.mark.parametrize("seed", range(6))
def test_after_every_save_the_newest_and_the_best_are_there_and_nothing_else(seed, number, tmp_path):
    """Any rhythm of saves, with new bests, resumes and rollbacks to earlier ones, saves that fail or are killed."""
    draw = random.Random(seed)
    store, there, best, step = CheckpointStore(tmp_path, number), [], None, 0
    for _ in range(40):
        step += draw.choice([1, 1, 1, 2, 7])
        event = draw.choice(["saved"] * 5 + ["best", "fails", "killed", "resumed"])
        end = {"fails": RuntimeError, "killed": KeyboardInterrupt}.get(event)
        if event == "resumed" and there:
            step = draw.choice(there)
            rewind(tmp_path, step)
            store, there = CheckpointStore(tmp_path, number), [one for one in there if one <= step]
            assert found(store).step == step
            continue
        best = step if event == "best" else best

        def write_roles(folder, source=store.last, end=end):
            (folder / "actor").mkdir()
            assert source is None or open_checkpoint(source.folder) == source  # until the next one is complete
            if end is not None:
                raise end

        with suppress(RuntimeError, KeyboardInterrupt):
            store.save("PPO", {"step": step}, write_roles, {best} - {None})
            there = sorted({*[*there, step][-number if number else None :], *({*there, step} & {best})})
        assert store.steps() == there
        assert event == "killed" or {one.name for one in tmp_path.glob("global_*")} == {
            f"global_step_{n}" for n in there
        }
