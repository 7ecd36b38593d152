"""Episodes whose environments and tools answer with images: these are observations, and the models see them."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from runs import assert_same_weights, read_metrics
from transformers import AutoModelForImageTextToText

from tiny_vision import END, IMAGE, make_model, picture
from valor.agents.agents import Agents
from valor.agents.episode import episode_rows
from valor.agents.loops import Task
from valor.config import PPOConfig
from valor.config.engine import CriticModelConfig, ModelConfig
from valor.config.loading import load
from valor.data.images import image_files
from valor.models.load import load_image_files, load_policy, load_policy_tokenizer, load_value_model
from valor.rollout.base import SamplingParams
from valor.rollout.native.engine import NativeEngine
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

ENVIRONMENT = Path(__file__).with_name("picture_environment.py")
AGENT = "actor_rollout_ref.rollout.agent"


def ends_turns(path: Path) -> Path:
    """The model, whose turns end about every tenth token: one direction of its states is the same everywhere."""
    hf = AutoModelForImageTextToText.from_pretrained(path)
    with torch.no_grad():
        for layer in hf.model.language_model.layers:
            layer.self_attn.v_proj.bias.fill_(1.0)
        attention = hf.model.language_model.layers[-1].self_attn
        groups = attention.o_proj.in_features // attention.v_proj.out_features
        constant = attention.o_proj(attention.v_proj.bias.repeat(groups))
        hf.lm_head.weight[END] = constant / constant.norm() * 2
    hf.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pictures")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"<image>say {i}"}],
            "images": [{"bytes": picture(16, 24, 100 + i), "path": None}],
            "data_source": "digits",
            "reward_model": {"style": "rule", "ground_truth": "1"},
        }
        for i in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), root / "train.parquet")
    model = ends_turns(make_model(root / "model"))
    return {"model": model, "train": root / "train.parquet", "cache": root / "cache"}


@pytest.fixture(scope="module")
def with_pictures(seeing: dict[str, Path], overrides: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def make(run_dir: Path, name: str, *more: str) -> list[str]:
        return overrides(
            run_dir,
            f"data.train_files={seeing['train']}",
            "data.val_files=null",
            "data.image_key=images",
            f"data.image_cache={seeing['cache']}",
            "data.train_batch_size=4",
            "data.max_prompt_length=64",
            "data.max_response_length=160",
            f"actor_rollout_ref.model.path={seeing['model']}",
            "actor_rollout_ref.rollout.max_model_len=400",
            f"{AGENT}.environment={ENVIRONMENT}:{name}",
            "reward.custom_reward_function.path=null",
            "trainer.total_training_steps=2",
            *more,
        )

    return make


def played(command: list[str], seeing: dict[str, Path]) -> tuple[Any, Any]:
    """Rows of six episodes, and the agents' reader of images."""
    config = load(command, PPOConfig).config
    tokenizer = load_policy_tokenizer(config)
    images = load_image_files(config, tokenizer)
    agents = Agents(config, tokenizer, images)
    message, content = {"role": "user", "content": "<image>say"}, picture(16, 24, 0)
    text = agents.chat.render([{**message, "content": [{"type": "image"}, {"type": "text", "text": "say"}]}])
    ids, files = images.encode(text, [content], "row")
    rows = {"extra_info": {}, "messages": [message], "images": files, "uid": "0", "data_source": "", "ground_truth": ""}
    params = SamplingParams(max_tokens=60)
    tasks = [Task((0, 0, i), ids, params, {**rows, "episode_key": [0, 0, i]}) for i in range(6)]
    policy = load_policy(ModelConfig(path=str(seeing["model"])))
    engine = NativeEngine(policy.hf, eos_token_ids=[END], images=True)
    return episode_rows(agents.runner().run(engine, tasks)), images


@pytest.mark.parametrize("name", ["Pictures", "Opened"])
def test_rows_with_pictures_between_turns_are_read_alike_everywhere(
    name: str, with_pictures: Any, seeing: dict[str, Path], tmp_path: Path
) -> None:
    rows, images = played(with_pictures(tmp_path, name), seeing)
    assert rows.objects["episode_error"] == [None] * 6
    counts = [len(image_files(named)) for named in rows.objects["images"]]
    assert max(counts) == 3 and int(rows["turn_ids"].max()) == 3
    mask, tokens = rows["response_mask"], rows["responses"] == IMAGE
    assert int((tokens & (mask == 0)).sum()) > 0
    critic = CriticModelConfig(path=str(seeing["model"]), enable_gradient_checkpointing=False, value_head_init="normal")
    values = list[torch.Tensor]()
    for options in ({"use_remove_padding": False}, {"share_prefixes": False}, {}):
        model = ModelConfig(path=str(seeing["model"]), enable_gradient_checkpointing=False, **options)
        with torch.no_grad():
            log_probs = load_policy(model)(rows)["log_probs"]
            values.append(load_value_model(critic.model_copy(update=options))(rows)["values"] * mask)
        assert ((log_probs - rows["rollout_log_probs"]) * mask).abs().max() <= 1e-5
    assert max((values[0] - other).abs().max() for other in values[1:]) <= 1e-5
    assert _compared_with_transformers(rows, images, seeing) >= 3


def _compared_with_transformers(rows: Any, images: Any, seeing: dict[str, Path]) -> int:
    """Number of rows whose log-probs are those of transformers' own pass: all without sampled image tokens."""
    hf, compared = AutoModelForImageTextToText.from_pretrained(seeing["model"]).eval(), 0
    from safetensors.torch import load_file

    for i, named in enumerate(rows.objects["images"]):
        start, length = int(rows["prompt_lengths"][i]), int(rows["response_lengths"][i])
        prompt, response = rows["prompts"][i, :start], rows["responses"][i, :length]
        if bool((response[rows["response_mask"][i, :length] > 0] == IMAGE).any()):
            continue
        read = [load_file(file) for file, _ in image_files(named)]
        pixels = {name: torch.cat([tensors[name] for tensors in read]) for name in read[0]}
        ids = torch.cat([prompt, response])[None]
        hf.model.rope_deltas = None
        with torch.no_grad():
            logits = hf(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **pixels).logits[0, start - 1 : -1]
        own = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        sampled = rows["response_mask"][i, :length]
        assert ((own - rows["rollout_log_probs"][i, :length]) * sampled).abs().max() <= 1e-5
        compared += 1
    return compared


def test_ppo_learns_from_pictures_between_turns_and_goes_on(with_pictures: Any, tmp_path: Path) -> None:
    recorded = [f"trainer.episode_data_dir={tmp_path / 'episodes'}", "trainer.save_freq=1", "trainer.report=true"]
    assert main(with_pictures(tmp_path / "run", "Pictures", *recorded)) == 0
    rows = read_metrics(tmp_path / "run")
    assert all(row["training/rollout_log_probs_diff_max"] <= 1e-5 for row in rows)
    assert all(row["critic/grad_norm"] > 0 and row["episode/turns/max"] > 1 for row in rows)
    assert all(row["episode/failed"] == 0 and row["episode/observation_tokens"] > 0 for row in rows)
    (shown, *_) = [json.loads(line) for line in (tmp_path / "run/samples/step_1.jsonl").read_text().splitlines()]
    assert Image.open(io.BytesIO(_bytes(shown["images"]))).width >= 16
    replay = with_pictures(tmp_path / "replayed", "Pictures", f"{AGENT}.replay_dir={tmp_path / 'episodes'}")
    assert main(replay) == 0
    assert_same_weights(tmp_path / "replayed", tmp_path / "run")


def _bytes(uri: str) -> bytes:
    import base64

    return base64.b64decode(uri.partition(",")[2])


@pytest.mark.parametrize(
    "more",
    [
        ["trainer.v1.trainer_mode=separate_async", "trainer.v1.sampler.max_off_policy_threshold=1"],
        ["algorithm.adv_estimator=remax"],
        ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.use_remove_padding=false"],
    ],
)
def test_other_ways_to_train(with_pictures: Any, tmp_path: Path, more: list[str]) -> None:
    assert main(with_pictures(tmp_path / "run", "Opened", "trainer.controller=local", *more)) == 0
    rows = read_metrics(tmp_path / "run")
    assert rows[0]["training/rollout_log_probs_diff_max"] <= 1e-5 and rows[0]["episode/turns/max"] > 1


def test_a_picture_that_cannot_be_read_fails_its_episode(with_pictures: Any, seeing: Any, tmp_path: Path) -> None:
    rows, _ = played(with_pictures(tmp_path, "Broken"), seeing)
    assert all("is no image that can be read" in error for error in rows.objects["episode_error"])
    with torch.no_grad():
        assert load_policy(ModelConfig(path=str(seeing["model"])))(rows)["log_probs"].isfinite().all()
