"""A tiny model and its data, made once a session, and a way to run the real entry point on them."""

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from valor.lab import arithmetic

TRAIN_ROWS = 640  # more would be read and tokenised by every run, for nothing


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`model`, `train`, `val`: paths of the embedded task, as `valor demo` makes them, but for fewer prompts."""
    root = tmp_path_factory.mktemp("tiny")
    model = arithmetic.make_model(root / "model", seed=0)
    files = arithmetic.make_data(root / "data", seed=0, num_val=64, num_demonstrations=1, num_sft_val=1)
    pq.write_table(pq.read_table(files.train)[:TRAIN_ROWS], files.train)
    return {"model": model, "train": files.train, "val": files.val}


@pytest.fixture(scope="session")
def overrides(tiny: dict[str, Path]) -> Callable[..., list[str]]:
    """The command line of a small deterministic run into `run_dir`, with further overrides."""

    def make(run_dir: Path, *more: str) -> list[str]:
        return [
            f"data.train_files={tiny['train']}",
            f"data.val_files={tiny['val']}",
            "data.train_batch_size=8",
            "data.val_max_samples=16",
            "data.max_prompt_length=32",
            "data.max_response_length=8",
            f"actor_rollout_ref.model.path={tiny['model']}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "actor_rollout_ref.rollout.n=2",
            "critic.optim.lr=1e-3",
            "reward.num_workers=1",
            f"reward.custom_reward_function.path={Path(__file__).with_name('parity_reward.py')}",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            "trainer.report=false",
            "trainer.total_training_steps=4",
            f"trainer.default_local_dir={run_dir}",
            *more,
        ]

    return make
