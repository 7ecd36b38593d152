"""Prompts with images for servers: token ids are the policy's, and the server's log-probs those of training."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import read_metrics
from served import Starter, starter

from tiny_vision import make_model, picture
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("seeing")
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>" * (i % 3) + f"say {i}"}],
            "images": [{"bytes": picture(16, 24, 10 * i + k), "path": None} for k in range(i % 3)],
            "data_source": "digits",
            "reward_model": {"style": "rule", "ground_truth": "1"},
        }
        for i in range(6)
    ]
    pq.write_table(pa.Table.from_pylist(rows), root / "train.parquet")
    return {"model": make_model(root / "model"), "train": root / "train.parquet", "cache": root / "cache"}


@pytest.fixture(scope="module")
def servers(seeing: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    with starter(seeing["model"], tmp_path_factory.mktemp("served")) as started:
        yield started


@pytest.fixture(scope="module")
def by_server(seeing: dict[str, Path], overrides: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def make(run_dir: Path, url: str, *more: str) -> list[str]:
        return overrides(
            run_dir,
            f"data.train_files={seeing['train']}",
            "data.val_files=null",
            "data.image_key=images",
            f"data.image_cache={seeing['cache']}",
            "data.train_batch_size=6",
            "data.max_prompt_length=64",
            f"actor_rollout_ref.model.path={seeing['model']}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=6",
            f"reward.custom_reward_function.path={Path(__file__).with_name('digits_reward.py')}",
            "trainer.total_training_steps=2",
            f"{ROLLOUT}.name=server",
            f"{ROLLOUT}.server.base_url={url}/v1",
            f"{ROLLOUT}.server.model=m",
            f"{ROLLOUT}.temperature=0.7",
            *more,
        )

    return make


def test_a_run_with_a_vllm_server(servers: Starter, by_server: Any, tmp_path: Path) -> None:
    server = servers.start("vllm")
    assert main(by_server(tmp_path, server.url)) == 0
    rows = read_metrics(tmp_path)
    assert len(rows) == 2 and all(row["training/rollout_log_probs_diff_max"] <= 1e-5 for row in rows)
    assert all(row["critic/grad_norm"] > 0 for row in rows)
    asked = server.set()
    assert asked.count("/inference/v1/generate") >= 24 and asked.count("/reset_encoder_cache") >= 2
    server.kill()


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("old", 2, "takes no token ids with images (/inference/v1/generate, status 404)"),
        ("other", 2, "takes no token ids with images (/inference/v1/generate, status 200)"),
    ],
)
def test_a_server_that_cannot_is_told(
    servers: Starter, by_server: Any, tmp_path: Path, capsys: Any, fault: str, status: int, message: str
) -> None:
    server = servers.start("vllm", faults={fault: True})
    assert main(by_server(tmp_path / "run", server.url)) == status
    assert message in capsys.readouterr().err
    server.kill()


@pytest.mark.parametrize("name", ["sglang", "trtllm"])
def test_kinds_of_servers_that_tokenise_anew_are_refused(
    name: str, by_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = f"{ROLLOUT}.server.weight_updates=none"
    assert main(by_server(tmp_path / "run", "http://127.0.0.1:1", f"{ROLLOUT}.name={name}", kept)) == 2
    assert "rollout.name=native, vllm and server (vLLM's) alone take token ids with images" in capsys.readouterr().err
