"""Models that read images: generation, training and critic see what transformers' own passes see."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from tiny_vision import END, IMAGE, make_model, picture
from valor.config.engine import CriticModelConfig, ModelConfig
from valor.data.batch import Batch, pad_rows
from valor.data.images import ImageFiles, in_parts
from valor.engines.fsdp.sharding import transformer_layers
from valor.errors import UserError
from valor.models.export import export_hf
from valor.models.images import FAMILIES, IN_BLOCKS, vision_tower
from valor.models.internals import processor_without_video
from valor.models.load import load_policy, load_value_model
from valor.rollout.base import Output, Request, SamplingParams
from valor.rollout.native.engine import NativeEngine

NEW = 14
PROMPTS = [("<image> what", [1]), ("<image> what", [2]), ("a <image> b <image> c", [3, 4]), ("none", [])]


class Seen:
    """A tiny model, prompts with images for it, and samples by the native engine."""

    def __init__(self, path: Path, family: str) -> None:
        self.path, self.family = str(make_model(path / "model", family)), family
        config = AutoConfig.from_pretrained(self.path)
        self.hf = AutoModelForImageTextToText.from_pretrained(self.path).eval()
        processor = processor_without_video(config).from_pretrained(self.path, video_processor=None)
        files = ImageFiles(processor, IMAGE, str(path / "cache"), {})
        self.inputs, self.prompts = list[dict[str, Tensor]](), list[tuple[list[int], str]]()
        for content, seeds in PROMPTS:
            images = [picture(16, 24, seed) for seed in seeds]
            parts = in_parts([{"role": "user", "content": content}], len(images), "row")
            text = processor.tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
            self.prompts.append(files.encode(text, images, "row"))
            pictures = [_opened(image) for image in images] or None
            self.inputs.append(dict(processor(text=[text], images=pictures, return_tensors="pt")))
        self.requests, self.outputs = self.sample(samples=3, temperature=1.0)

    def sample(self, samples: int, temperature: float) -> tuple[list[Request], list[Output]]:
        params = SamplingParams(temperature=temperature, max_tokens=NEW)
        engine = NativeEngine(self.policy().hf, eos_token_ids=[END], images=True)
        requests = [
            Request(f"{i}-{sample}", ids, params, (i, sample), images=file)
            for i, (ids, file) in enumerate(self.prompts)
            for sample in range(samples)
        ]
        return requests, engine.generate(requests)

    def policy(self, **options: Any) -> Any:
        return load_policy(ModelConfig(path=self.path, enable_gradient_checkpointing=False, **options))

    def own_states(self, number: int) -> Any:
        """What transformers computes from the pixels of a sample, whose tokens are no placeholders."""
        request, output = self.requests[number], self.outputs[number]
        ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
        inputs = {**self.inputs[number // 3], "input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int()}
        inputs.pop("attention_mask")
        self.hf.model.rope_deltas = None
        with torch.no_grad():
            return self.hf(**inputs, output_hidden_states=True)

    @property
    def rows(self) -> Batch:
        prompts, prompt_lengths = pad_rows([request.prompt_ids for request in self.requests], torch.long)
        responses, lengths = pad_rows([output.token_ids for output in self.outputs], torch.long)
        columns = {"prompts": prompts, "prompt_lengths": prompt_lengths}
        columns |= {"responses": responses, "response_lengths": lengths}
        return Batch(columns, {"images": [request.images for request in self.requests]})

    @property
    def log_probs(self) -> Tensor:
        return pad_rows([output.log_probs for output in self.outputs], torch.float32)[0]


def _opened(content: bytes) -> Any:
    import io

    from PIL import Image

    return Image.open(io.BytesIO(content))


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tmp_path_factory.mktemp(request.param), request.param)


def test_greedy_answers_are_those_of_generate(seen: Seen) -> None:
    _, outputs = seen.sample(samples=1, temperature=0.0)
    for inputs, output in zip(seen.inputs, outputs, strict=True):
        seen.hf.model.rope_deltas = None
        ids = seen.hf.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=END, pad_token_id=0)
        assert output.token_ids == ids[0, inputs["input_ids"].shape[1] :].tolist()
    one, two = (outputs[number].log_probs[0] for number in (0, 1))
    assert abs(one - two) > 1e-4, "two pictures, one question"


def test_rollout_log_probs_are_those_of_training_however_rows_are_laid_out(seen: Seen) -> None:
    rows = seen.rows
    for options in ({"use_remove_padding": False}, {"share_prefixes": False}, {}):
        policy = seen.policy(**options)
        packs = seen.family not in IN_BLOCKS
        assert policy.packed == (packs and options != {"use_remove_padding": False})
        assert policy.shared == (packs and not options)
        with torch.no_grad():
            trained = policy(rows)["log_probs"]
        assert (trained - seen.log_probs).abs().max() <= 1e-5


def test_log_probs_and_values_are_those_of_the_own_passes_of_transformers(seen: Seen) -> None:
    model = CriticModelConfig(path=seen.path, enable_gradient_checkpointing=False, value_head_init="normal")
    critic = load_value_model(model)
    with torch.no_grad():
        values = critic(seen.rows)["values"]
    compared = 0
    for number, (request, output) in enumerate(zip(seen.requests, seen.outputs, strict=True)):
        if IMAGE in output.token_ids:
            continue
        own, length = seen.own_states(number), len(output.token_ids)
        before = slice(len(request.prompt_ids) - 1, -1)
        log_probs = own.logits[0, before].log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert (log_probs - torch.tensor(output.log_probs)).abs().max() <= 1e-5
        expected = critic.head(own.hidden_states[-1][0, before])[:, 0]
        assert (values[number, :length] - expected).abs().max() <= 1e-5
        compared += 1
    assert compared > 6


def test_a_sampled_placeholder_is_a_token(seen: Seen) -> None:
    rows = seen.rows
    rows["responses"][:, 1] = IMAGE
    policies = [seen.policy(use_remove_padding=packed) for packed in (False, True)]
    with torch.no_grad():
        padded, packed = (policy(rows)["log_probs"] for policy in policies)
    assert (padded - packed).abs().max() <= 1e-5


def test_an_image_that_rows_share_gets_the_gradient_of_all(seen: Seen) -> None:
    gradients = []
    for options in ({"use_remove_padding": False}, {}):
        policy = seen.policy(**options)
        policy(seen.rows)["log_probs"].sum().backward()
        gradients.append({name: p.grad for name, p in policy.hf.named_parameters() if p.grad is not None})
    first, second = gradients
    assert first.keys() == second.keys() and any("vis" in name and x.norm() > 0 for name, x in first.items())
    for name, gradient in first.items():
        assert (gradient - second[name]).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def test_rows_whose_images_were_left_out_are_refused(seen: Seen) -> None:
    with pytest.raises(UserError, match="prompts have image tokens, and there are no images with them"):
        seen.policy()(Batch(seen.rows.tensors))


def test_a_file_that_is_gone_is_told(seen: Seen) -> None:
    rows = seen.rows
    rows.objects["images"] = [file.replace("cache", "emptied") for file in rows.objects["images"]]
    with pytest.raises(UserError, match=r"data\.image_cache must be a folder that all processes share"):
        seen.policy()(rows)


def test_a_critic_reads_tokens_that_only_the_policys_padding_has_as_its_last_one(seen: Seen) -> None:
    critic = load_value_model(
        CriticModelConfig(path=seen.path, enable_gradient_checkpointing=False, value_head_init="normal")
    )
    size, read = critic.hf.config.get_text_config().vocab_size, []
    for token in (size + 2, size - 1):
        rows = seen.rows
        rows["responses"] = rows["responses"].index_fill(1, torch.tensor([0]), token)
        with torch.no_grad():
            read.append(critic(rows)["values"])
    assert torch.equal(*read)


def test_a_critic_is_published_and_loads_without_valor(seen: Seen, tmp_path: Path, without_valor: Any) -> None:
    model = CriticModelConfig(path=seen.path, enable_gradient_checkpointing=False, value_head_init="normal")
    critic, rows = load_value_model(model), seen.rows
    export_hf(critic, tmp_path / "critic")
    again = load_value_model(CriticModelConfig(path=str(tmp_path / "critic"), enable_gradient_checkpointing=False))
    with torch.no_grad():
        assert torch.allclose(again(rows)["values"], critic(rows)["values"], atol=1e-6)
        torch.save(critic.hf(input_ids=rows["prompts"]).logits, tmp_path / "logits.pt")
    torch.save(rows["prompts"], tmp_path / "ids.pt")
    without_valor(
        "import torch\nfrom pathlib import Path\nfrom transformers import AutoModelForTokenClassification\n"
        f"root = Path({str(tmp_path)!r})\n"
        "model = AutoModelForTokenClassification.from_pretrained(root / 'critic', trust_remote_code=True)\n"
        "logits = model(input_ids=torch.load(root / 'ids.pt')).logits\n"
        "assert torch.allclose(logits, torch.load(root / 'logits.pt'), atol=1e-6)\n"
    )


def test_the_vision_tower_can_be_frozen_and_is_not_sharded_by_layers(seen: Seen) -> None:
    model = ModelConfig(path=seen.path, enable_gradient_checkpointing=False)
    policy = load_policy(model, frozen_vision=True)
    tower = vision_tower(policy.hf)
    assert tower is not None and len(transformer_layers(policy)) == 2
    frozen = {id(p) for p in policy.parameters() if not p.requires_grad}
    assert frozen == {id(p) for p in tower.parameters()} and len(frozen) > 10
    assert not {id(part) for part in tower.modules()} & {id(layer) for layer in transformer_layers(policy)}
