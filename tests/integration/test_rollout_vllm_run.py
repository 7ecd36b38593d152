"""Whole runs with rollout.name=vllm: the native engine's run with another engine in its place."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from runs import read_metrics
from transformers import AutoModelForCausalLM
from two_turns import settings
from vllm_rank import generate

from valor.trainer.main_ppo import main

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROLLOUT = "actor_rollout_ref.rollout"
STEPS = ["trainer.total_training_steps=3", f"{ROLLOUT}.temperature=0.7"]
VLLM = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.1"]


@pytest.fixture(scope="module")
def untied(tiny, tmp_path_factory):
    """The tiny model with an LM head of its own, as the argument that names it."""
    folder = tmp_path_factory.mktemp("engines") / "untied"
    shutil.copytree(tiny["model"], folder)
    model = AutoModelForCausalLM.from_pretrained(tiny["model"])
    head = model.lm_head.weight.detach().clone()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(folder)
    return f"actor_rollout_ref.model.path={folder}"


@pytest.fixture(scope="module")
def native_run(overrides, untied, tmp_path_factory):
    """A run with the native engine: of the tiny model as it is (tied), or of another model."""
    folder = tmp_path_factory.mktemp("engines")
    names: dict[tuple[str, ...], str] = {}

    def run(*model: str) -> Path:
        run_dir = folder / names.setdefault(model, str(len(names)))
        if not run_dir.exists():
            assert main(overrides(run_dir, *STEPS, *model)) == 0
        return run_dir

    return run


def assert_same_training(native: Path, run_dir: Path) -> None:
    """Equal samples and losses, and log-probs that are the trainer's after every update."""
    one, other = read_metrics(native), read_metrics(run_dir)
    assert len(one) == len(other) == 4
    for a, b in zip(one[1:], other[1:], strict=True):
        assert a["critic/score/mean"] == b["critic/score/mean"]
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-3)
        assert b["training/rollout_log_probs_diff_max"] < 1e-4
    timed = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(row["timing_s/update_weights"] > 0 for row in timed[1:])


def test_in_this_process(native_run, overrides, tmp_path):
    assert main(overrides(tmp_path / "run", *STEPS, *VLLM)) == 0
    assert_same_training(native_run(), tmp_path / "run")


def test_adapters_arrive_merged(native_run, overrides, tmp_path):
    lora = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.01"]
    assert main(overrides(tmp_path / "run", *STEPS, *VLLM, *lora)) == 0
    assert_same_training(native_run(*lora), tmp_path / "run")


SPLIT = f"{ROLLOUT}.tensor_model_parallel_size=2"


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("is_tied", "placed"),
    [
        pytest.param(True, ["trainer.n_gpus_per_node=2"], id="two replicas beside two actors"),
        pytest.param(False, ["trainer.n_gpus_per_node=2", SPLIT], id="one that is split over two actors"),
        pytest.param(
            True,
            ["trainer.n_gpus_per_node=2", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2", SPLIT],
            id="one that is split over a pool of its own",
            marks=pytest.mark.long,
        ),
    ],
)
def test_under_ray(is_tied, placed, native_run, untied, overrides, tmp_path):
    model = [] if is_tied else [untied]
    assert main(overrides(tmp_path / "run", *STEPS, *VLLM, *placed, *model)) == 0
    assert_same_training(native_run(*model), tmp_path / "run")


@pytest.mark.long
def test_requests_and_aborts_reach_all_ranks_of_one_that_is_split(forks, untied, tmp_path):
    """The first rank's source alone has requests."""
    run_ranks(forks, tmp_path, 2, generate, Path(untied.split("=")[1]))


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    """Episodes of two turns with a deterministic loop, every other one in two rows; the first turn ends at a text."""
    return settings(tmp_path_factory.mktemp("loops"), forks=True, reward=0.5, stop="<>aeiou")


@pytest.mark.parametrize("placed", [[], ["trainer.n_gpus_per_node=2", SPLIT]], ids=["here", "split over two"])
def test_episodes(placed, native_run, episodes, overrides, tmp_path, request):
    if placed:
        request.getfixturevalue("hosts")
    assert main(overrides(tmp_path / "run", *STEPS, *VLLM, *placed, *episodes)) == 0
    assert_same_training(native_run(*episodes), tmp_path / "run")
    assert all(row["episode/rows"] == 1.5 for row in read_metrics(tmp_path / "run")[1:])


def test_what_does_not_fit_is_one_line(overrides, tmp_path, capsys):
    for override, words in (
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=4", "2 key-value heads"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.blok_size=16", "did you mean block_size"),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size=2", "set it to 1"),
    ):
        assert main(overrides(tmp_path / "run", *STEPS, *VLLM, override)) == 2
        error = capsys.readouterr().err
        assert words in error and "Traceback" not in error, error
