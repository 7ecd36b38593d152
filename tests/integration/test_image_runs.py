"""Whole runs on prompts with images: they train what they say, resume exactly, and leave models that load again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_rank import image_step
from ranks import run_ranks
from runs import assert_same_weights, read_metrics, weights
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tiny_vision import IMAGE, make_model, picture
from valor import cli
from valor.config import ModelConfig
from valor.data.batch import Batch, pad_rows
from valor.data.images import ImageFiles, in_parts
from valor.models.internals import processor_without_video
from valor.models.load import load_policy
from valor.trainer.export import export_checkpoint
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`model`, `train`: a tiny model, and prompts with none, one and two images."""
    root = tmp_path_factory.mktemp("seeing")
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>" * (i % 3) + f"say {i}"}],
            "images": [{"bytes": picture(16, 24, 10 * i + k), "path": None} for k in range(i % 3)],
            "data_source": "digits",
            "reward_model": {"style": "rule", "ground_truth": "1"},
        }
        for i in range(12)
    ]
    pq.write_table(pa.Table.from_pylist(rows), root / "train.parquet")
    return {"model": make_model(root / "model"), "train": root / "train.parquet", "cache": root / "cache"}


@pytest.fixture(scope="session")
def on_images(seeing: dict[str, Path], overrides: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def make(run_dir: Path, *more: str) -> list[str]:
        return overrides(
            run_dir,
            f"data.train_files={seeing['train']}",
            f"data.val_files={seeing['train']}",
            "data.image_key=images",
            f"data.image_cache={seeing['cache']}",
            "data.train_batch_size=6",
            "data.max_prompt_length=64",
            f"actor_rollout_ref.model.path={seeing['model']}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=3",
            f"reward.custom_reward_function.path={Path(__file__).with_name('digits_reward.py')}",
            "trainer.total_training_steps=2",
            *more,
        )

    return make


@pytest.fixture(scope="session")
def with_critic(on_images: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("images") / "ppo"
    assert main(on_images(run_dir, "trainer.save_freq=1")) == 0
    return run_dir


def changed(model: Path, run_dir: Path) -> dict[bool, bool]:
    """Whether weights outside (False) and inside (True) the vision tower are others than those of `model`."""
    before, after = load_file(model / "model.safetensors"), weights(run_dir, "actor")
    assert before.keys() == after.keys()
    others = {name for name in before if not torch.equal(before[name], after[name])}
    return {inside: any(name.startswith("visual") == inside for name in others) for inside in (False, True)}


def test_ppo_trains_text_and_vision_with_a_critic(seeing: dict[str, Path], with_critic: Path) -> None:
    rows = read_metrics(with_critic)
    assert all(row["training/rollout_log_probs_diff_max"] <= 1e-5 for row in rows if row["step"])
    assert all(row["critic/grad_norm"] > 0 and row["actor/grad_norm"] > 0 for row in rows if row["step"])
    assert changed(seeing["model"], with_critic) == {False: True, True: True}
    assert any("visual" in name for name in weights(with_critic, "critic"))


def test_models_of_a_run_load_again(with_critic: Path, tmp_path: Path) -> None:
    actor = with_critic / "huggingface" / "actor"
    hf = AutoModelForImageTextToText.from_pretrained(actor)
    assert (actor / "processor_config.json").is_file()
    policy = load_policy(ModelConfig(path=str(actor)))
    assert all(torch.equal(a, b) for a, b in zip(hf.parameters(), policy.hf.parameters(), strict=True))
    for role in ("actor", "critic"):
        export_checkpoint(with_critic / "global_step_2", tmp_path / role, role)
        exported, left = load_file(tmp_path / role / "model.safetensors"), weights(with_critic, role)
        assert exported.keys() == left.keys() and all(torch.equal(exported[name], left[name]) for name in left)
        assert (tmp_path / role / "processor_config.json").is_file()


def test_a_run_goes_on_from_its_checkpoint(
    seeing: dict[str, Path], with_critic: Path, on_images: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "resumed"
    assert main(on_images(run_dir, "trainer.save_freq=1", "trainer.total_training_steps=1")) == 0
    (seeing["cache"] / "another_run.safetensors").write_bytes(b"")
    assert main(on_images(run_dir, "trainer.save_freq=1")) == 0
    assert read_metrics(run_dir)[-1] == read_metrics(with_critic)[-1]
    assert_same_weights(run_dir, with_critic)


def test_grpo_leaves_a_frozen_vision_tower_alone(seeing: dict[str, Path], on_images: Any, tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    frozen = [f"{actor}.freeze_vision_tower=true", f"{actor}.use_kl_loss=true", "algorithm.adv_estimator=grpo"]
    padded = "actor_rollout_ref.model.use_remove_padding=false"
    assert main(on_images(tmp_path / "grpo", *frozen, padded)) == 0
    assert changed(seeing["model"], tmp_path / "grpo") == {False: True, True: False}
    assert all(row["training/rollout_log_probs_diff_max"] <= 1e-5 for row in read_metrics(tmp_path / "grpo")[1:])


def test_a_greedy_baseline_and_adapters_see_the_images(on_images: Any, tmp_path: Path) -> None:
    more = ["algorithm.adv_estimator=remax", "actor_rollout_ref.model.lora_rank=2"]
    assert main(on_images(tmp_path / "remax", *more)) == 0
    assert all(row["training/rollout_log_probs_diff_max"] <= 1e-5 for row in read_metrics(tmp_path / "remax")[1:])


AHEAD = ["trainer.v1.sampler.max_off_policy_threshold=1", "trainer.controller=local"]


def test_batches_drawn_ahead_and_a_resumed_run_keep_their_images(on_images: Any, tmp_path: Path) -> None:
    fixed = ["trainer.v1.trainer_mode=separate_async", "trainer.v1.deterministic=true", *AHEAD]
    fixed += ["trainer.total_training_steps=3", "trainer.save_freq=1"]
    assert main(on_images(tmp_path / "all", *fixed)) == 0
    rows = read_metrics(tmp_path / "all")[1:]
    assert [row["off_policy/age/mean"] for row in rows] == [0, 1, 1]
    assert rows[0]["training/rollout_log_probs_diff_max"] <= 1e-5
    source = tmp_path / "all" / "global_step_2"
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={source}"]
    assert main(on_images(tmp_path / "resumed", *fixed, *resumed)) == 0
    assert read_metrics(tmp_path / "resumed") == read_metrics(tmp_path / "all")[-1:]
    assert_same_weights(tmp_path / "resumed", tmp_path / "all")


def test_prompts_answered_without_a_pause_keep_their_images(on_images: Any, tmp_path: Path) -> None:
    assert main(on_images(tmp_path / "run", "trainer.v1.trainer_mode=colocate_async", *AHEAD)) == 0
    rows = read_metrics(tmp_path / "run")[1:]
    assert rows[0]["training/rollout_log_probs_diff_max"] <= 1e-5 and rows[-1]["off_policy/age/max"] <= 1


@pytest.mark.usefixtures("hosts")
def test_two_processes_under_ray_train_as_one(on_images: Any, with_critic: Path, tmp_path: Path) -> None:
    assert main(on_images(tmp_path / "ray", "trainer.n_gpus_per_node=2")) == 0
    one, two = (read_metrics(run_dir) for run_dir in (with_critic, tmp_path / "ray"))
    for name in ("actor/pg_loss", "critic/vf_loss", "critic/score/mean", "actor/grad_norm"):
        assert [row[name] for row in two[1:]] == pytest.approx([row[name] for row in one[1:]], rel=1e-3, abs=1e-5)
    assert all(row["training/rollout_log_probs_diff_max"] <= 1e-5 for row in two[1:])


@pytest.mark.parametrize("family", ["gemma3", "smolvlm"])
def test_other_families_train_with_a_critic(family: str, on_images: Any, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family)
    more = [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.actor.freeze_vision_tower=true"]
    assert main(on_images(tmp_path / "run", *more, "data.max_prompt_length=256")) == 0
    rows = read_metrics(tmp_path / "run")[1:]
    assert all(row["training/rollout_log_probs_diff_max"] <= 1e-5 for row in rows)
    assert all(row["critic/grad_norm"] > 0 and row["actor/grad_norm"] > 0 for row in rows)
    towers = ("model.vision_tower", "model.vision_model", "vision_tower", "vision_model")
    before, after = load_file(model / "model.safetensors"), weights(tmp_path / "run", "actor")
    changed = {name.startswith(towers) for name in before if not torch.equal(before[name], after[name])}
    assert changed == {False} and any(name.startswith(towers) for name in before)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "huggingface" / "actor")


def test_the_report_shows_images_beside_the_answers(on_images: Any, tmp_path: Path) -> None:
    assert main(on_images(tmp_path / "run", "trainer.report=true", "trainer.total_training_steps=1")) == 0
    records = [json.loads(line) for line in (tmp_path / "run/samples/step_1.jsonl").read_text().splitlines()]
    assert any("images" in record for record in records)
    for record in records:
        assert ("<image>" in record["prompt"]) == record.get("images", "").startswith("data:image/jpeg;base64,")
        assert "<image><image>" not in record["prompt"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(f'<img src="{record["images"]}"' in page for record in records[:8] if "images" in record)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["actor_rollout_ref.rollout.name=sglang"],
            "vllm and server (vLLM's) alone take token ids with images",
        ),
        (["do_search=true"], "do_search=true plays text episodes"),
        (["data.video_key=videos"], "no video and no audio"),
        (["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], "divides rows of text"),
        (["critic.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"], "divides rows of text"),
    ],
)
def test_what_images_do_not_go_with_is_told(
    on_images: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(on_images(tmp_path / "run", *more)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_of_text_is_told(
    tiny: dict[str, Path], on_images: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(on_images(tmp_path / "policy", f"actor_rollout_ref.model.path={tiny['model']}")) == 2
    assert "is a model of type qwen2, and images are read by" in capsys.readouterr().err
    assert main(on_images(tmp_path / "critic", f"critic.model.path={tiny['model']}")) == 2
    assert "reads no images" in capsys.readouterr().err


def test_a_rank_whose_rows_have_no_images_keeps_step(seeing: dict[str, Path], forks: Any, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(seeing["model"])
    processor = processor_without_video(config).from_pretrained(seeing["model"])
    files, prompts = ImageFiles(processor, IMAGE, str(seeing["cache"]), {}), list[tuple[list[int], str]]()
    for content, images in [("<image>a", 1), ("<image>b<image>", 2), ("<image>c", 1), ("d", 0), ("e", 0), ("f", 0)]:
        parts = in_parts([{"role": "user", "content": content}], images, "row")
        text = processor.tokenizer.apply_chat_template(parts, tokenize=False)
        prompts.append(files.encode(text, [picture(16, 24, seed) for seed in range(images)], "row"))
    ids, lengths = pad_rows([ids for ids, _ in prompts], torch.long)
    responses = torch.arange(6 * 4).view(6, 4) + 20
    columns = {"prompts": ids, "prompt_lengths": lengths, "responses": responses}
    rows = Batch({**columns, "response_lengths": torch.full((6,), 4)}, {"images": [file for _, file in prompts]})
    for world in (1, 2):
        run_ranks(forks, tmp_path, world, image_step, seeing["model"], rows, tmp_path)
    expected, outputs = (
        load_file(tmp_path / "1.0.outputs")["log_probs"],
        torch.cat([load_file(tmp_path / f"2.{rank}.outputs")["log_probs"] for rank in range(2)]),
    )
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5)
    alone, together = (load_file(tmp_path / f"{world}.gradients") for world in (1, 2))
    assert any("visual" in name and gradient.abs().max() > 0 for name, gradient in alone.items())
    for name, gradient in alone.items():
        torch.testing.assert_close(together[name], gradient, rtol=1e-4, atol=1e-5)


def test_evaluation_answers_prompts_with_images(seeing: dict[str, Path], with_critic: Path, tmp_path: Path) -> None:
    command = [
        "eval",
        f"data.val_files={seeing['train']}",
        "data.image_key=images",
        f"data.image_cache={seeing['cache']}",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={with_critic / 'huggingface' / 'actor'}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"reward.custom_reward_function.path={Path(__file__).with_name('digits_reward.py')}",
        "reward.num_workers=1",
        "trainer.device=cpu",
        f"eval.out={tmp_path / 'evaluation'}",
    ]
    assert cli.main(command) == 0
    (answers,) = (tmp_path / "evaluation").rglob("answers_*.jsonl")
    recorded = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(recorded) == 12 and len({tuple(record["response_ids"]) for record in recorded}) > 1
