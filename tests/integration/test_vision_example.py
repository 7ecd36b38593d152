"""examples/vision with few steps: made, warm-started, and trained by PPO and GRPO as its files say."""

import subprocess
import sys
from pathlib import Path

import pytest
from runs import read_metrics

from valor.trainer.main_ppo import main
from valor.user_files import load_file

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shapes")
    sizes = ["--steps=2", "--train=8", "--val=4"]
    subprocess.run([sys.executable, ROOT / "examples/vision/shapes.py", f"--out={out}", *sizes], check=True)
    return out


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_pictures_train_a_model_that_was_made_here(algorithm: str, made: Path, tmp_path: Path) -> None:
    command = [
        f"--config-path={ROOT / 'examples/vision'}",
        f"--config-name=shapes_{algorithm}",
        *(f"data.{split}_files={made / 'data' / split}.parquet" for split in ("train", "val")),
        f"data.image_cache={made / 'cache'}",
        f"actor_rollout_ref.model.path={made / 'model'}",
        f"reward.custom_reward_function.path={ROOT / 'examples/vision/shapes.py'}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        *["critic.ppo_mini_batch_size=4", "trainer.critic_warmup=0"] * (algorithm == "ppo"),
        "trainer.total_training_steps=1",
    ]
    assert main(command) == 0
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 2 and rows[1]["training/rollout_log_probs_diff_max"] <= 1e-5
    assert "data:image/jpeg" in (tmp_path / "run" / "report.html").read_text()


def test_an_answer_is_right_with_colour_and_shape() -> None:
    score = load_file(str(ROOT / "examples/vision/shapes.py"), "the example").compute_score
    answers = ("red circle", " red  circle", "red square", "circle red", "red", "")
    assert [score("shapes", answer, "red circle") for answer in answers] == [1, 1, 0, 0, 0, 0]
