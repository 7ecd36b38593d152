"""Prompts with images in vLLM: our token ids, the policy's numbers, and a vision tower that follows the policy."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tiny_vision import END, IMAGE, make_model, picture
from valor.config import ModelConfig, RolloutConfig
from valor.data.images import ImageFiles, in_parts
from valor.engines.distributed import init_process_group, leave_process_group
from valor.models.export import published_weights
from valor.models.internals import processor_without_video
from valor.models.policy import PolicyModel
from valor.rollout.base import Request, RolloutEngine, SamplingParams
from valor.rollout.native.engine import NativeEngine
from valor.rollout.registry import GENERATION_ENGINES
from valor.rollout.spec import BuildContext
from valor.rollout.vllm.options import IMAGE_FAMILIES

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VIDEO = {"video_processor_type": "Qwen2VLVideoProcessor", "size": {"shortest_edge": 64, "longest_edge": 1024}}
CONTENTS = [("none", 0), ("<image> one", 1), ("a <image> b <image>", 2)]


@pytest.fixture(scope="module", params=IMAGE_FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torchvision", reason="vLLM reads images with torchvision")
    path = make_model(tmp_path_factory.mktemp("vision") / "model", request.param, wide=True)
    patches = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    (path / "video_preprocessor_config.json").write_text(json.dumps(VIDEO | patches))
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RolloutEngine]:
    init_process_group("cpu")
    config = RolloutConfig(name="vllm", dtype="float32", max_model_len=128, max_num_seqs=8, gpu_memory_utilization=0.05)
    context = BuildContext(config, ModelConfig(path=str(model)), [END], torch.device("cpu"), None, {})
    made = GENERATION_ENGINES["vllm"].build(context)
    yield made
    made.close()
    leave_process_group()


def test_samples_and_log_probs_are_those_of_the_policy_after_each_update(
    model: Path, engine: RolloutEngine, tmp_path: Path
) -> None:
    hf: Any = AutoModelForImageTextToText.from_pretrained(model).eval()
    processor = processor_without_video(AutoConfig.from_pretrained(model)).from_pretrained(model, video_processor=None)
    files, requests = ImageFiles(processor, IMAGE, str(tmp_path), {}, apart=True), list[Request]()
    params = SamplingParams(temperature=0.8, max_tokens=12)
    for i, (content, count) in enumerate(CONTENTS):
        parts = in_parts([{"role": "user", "content": content}], count, "row")
        text = processor.tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
        ids, images = files.encode(text, [picture(16, 24, 10 * i + k) for k in range(count)], "row")
        requests += [Request(f"{i}-{k}", ids, params, (i, k), images=images) for k in range(2)]
    earlier: list[list[int]] = []
    for version in (1, 2):
        policy = PolicyModel(hf)
        engine.sync_weights(published_weights(policy, policy.state_dict().items()), version=version)
        outputs = engine.generate(requests)
        expected = NativeEngine(hf, eos_token_ids=[END], images=True).generate(requests)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        for output, other in zip(outputs, expected, strict=True):
            assert output.log_probs == pytest.approx(other.log_probs, abs=1e-4)
        assert [output.token_ids for output in outputs] != earlier
        earlier = [output.token_ids for output in outputs]
        with torch.no_grad():  # the vision tower alone
            for parameter in hf.model.visual.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.2)
