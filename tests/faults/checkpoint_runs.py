"""Small runs whose folders are then damaged, and ways to damage them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest

from valor.lab import arithmetic
from valor.trainer.main_ppo import main

GRADER = Path(__file__).parents[1] / "integration" / "parity_reward.py"


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`model`, `train`, `val`, `demonstrations`, `root`: paths of the embedded task, with few prompts."""
    root = tmp_path_factory.mktemp("tiny_task")
    model = arithmetic.make_model(root / "model", seed=0)
    files = arithmetic.make_data(root / "data", seed=0, num_val=16, num_demonstrations=64, num_sft_val=1)
    pq.write_table(pq.read_table(files.train)[:64], files.train)
    return {"model": model, "train": files.train, "val": files.val, "demonstrations": files.sft_train, "root": root}


@pytest.fixture(scope="session")
def ppo_arguments(tiny_task: dict[str, Path]) -> Callable[..., list[str]]:
    """The command line of a run of PPO into `run_dir`: three steps, saved after each."""

    def make(run_dir: Path, *more: str) -> list[str]:
        return [
            f"data.train_files={tiny_task['train']}",
            "data.train_batch_size=4",
            "data.max_prompt_length=32",
            "data.max_response_length=4",
            f"actor_rollout_ref.model.path={tiny_task['model']}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "actor_rollout_ref.rollout.n=2",
            "critic.optim.lr=1e-3",
            "reward.num_workers=1",
            f"reward.custom_reward_function.path={GRADER}",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            "trainer.report=false",
            "trainer.save_freq=1",
            "trainer.total_training_steps=3",
            f"trainer.default_local_dir={run_dir}",
            *more,
        ]

    return make


@pytest.fixture(scope="session")
def sft_arguments(tiny_task: dict[str, Path]) -> Callable[..., list[str]]:
    """The command line of a supervised run into `run_dir`: three steps, saved after each."""

    def make(run_dir: Path, *more: str) -> list[str]:
        return [
            f"data.train_files={tiny_task['demonstrations']}",
            "data.train_batch_size=8",
            "data.max_length=64",
            f"model.path={tiny_task['model']}",
            "optim.lr=1e-3",
            "fsdp_config.dtype=float32",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            "trainer.save_freq=1",
            "trainer.total_training_steps=3",
            f"trainer.default_local_dir={run_dir}",
            *more,
        ]

    return make


@pytest.fixture(scope="session")
def finished_ppo(ppo_arguments: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run. Not to be changed: copy it."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    assert main(ppo_arguments(run_dir)) == 0
    return run_dir


def flip_a_bit(file: Path) -> None:
    content, random = bytearray(file.read_bytes()), Random(file.name)
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def flip_the_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garbage(file: Path) -> None:
    file.write_bytes(Random(0).randbytes(file.stat().st_size))


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def delete(file: Path) -> None:
    file.unlink()


def turn_into_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = (flip_a_bit, flip_the_last_bit, truncate, empty, garbage, lengthen, delete, turn_into_a_folder)
