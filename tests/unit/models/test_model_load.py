"""What a user hears when a model or tokenizer cannot be loaded."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub.utils
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build_hf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from valor.config.engine import ModelConfig
from valor.errors import UserError
from valor.hub import hub_answers
from valor.models.load import load_policy, load_tokenizer
from valor.models.lora import read_adapter_config


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No retries against a hub: the constant is read when huggingface_hub is imported."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def model_dir(tmp_path):
    build_hf("llama_dropout").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def section(path, **keys) -> ModelConfig:
    return ModelConfig(path=str(path), **{"enable_gradient_checkpointing": False, **keys})


def refused(path, **keys) -> str:
    with pytest.raises(UserError) as caught:
        load_policy(section(path, **keys))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_loads_in_float32_and_in_bfloat16(model_dir):
    exact, half = load_policy(section(model_dir)), load_policy(section(model_dir), dtype=torch.bfloat16)
    assert {p.dtype for p in exact.parameters()} == {torch.float32}
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert not exact.training


def test_a_model_of_text_has_no_vision_tower_to_freeze(model_dir):
    assert all(weight.requires_grad for weight in load_policy(section(model_dir), frozen_vision=True).parameters())


def test_no_directory(tmp_path):
    assert "no model directory" in refused(tmp_path / "nothing")


def test_directory_without_config(tmp_path):
    assert "no config.json" in refused(tmp_path)


def test_directories_of_something_else_say_what_to_give(model_dir, tmp_path):
    def made(name: str, *files: str) -> Path:
        for file in files:
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text("{}")
        return tmp_path / name

    adapters = made("adapters", "adapter_config.json", "tokenizer_config.json")
    assert "holds adapters: set model.path to their base, and model.lora_adapter_path" in refused(adapters)
    run = made("run", "config.yaml", "huggingface/actor/config.json", "global_step_2/manifest.json")
    assert f"such as '{run}/huggingface/actor'" in refused(run) and "huggingface/actor'" in refused(run / "huggingface")
    shutil.copytree(model_dir, run / "global_step_2/actor/huggingface", ignore=lambda *_: ["model.safetensors"])
    for part in ("", "actor", "actor/huggingface"):
        assert f"`valor export {run}/global_step_2 OUT`" in refused(run / "global_step_2" / part)
        with pytest.raises(UserError, match="valor export"):
            load_tokenizer(str(run / "global_step_2" / part))
    with pytest.raises(UserError, match=r"give .*/actor/adapter'"):
        read_adapter_config(made("exported/actor", "adapter/adapter_config.json"))


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "x.bin").write_text("x")
    assert "is a file" in refused(tmp_path / "x.bin")


def test_unknown_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "martian", "architectures": ["Martian"]}))
    assert "architecture" in refused(tmp_path)


def test_config_without_weights(model_dir):
    (model_dir / "model.safetensors").unlink()
    assert "no weights" in refused(model_dir)


def test_checkpoint_that_lacks_a_weight(model_dir):
    file = model_dir / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refused(model_dir)


def test_damaged_weights(model_dir):
    (model_dir / "model.safetensors").write_bytes(b"not a tensor file")
    assert "damaged" in refused(model_dir)


def test_hub_name_without_a_hub():
    assert "cannot be reached" in refused("nobody/no-such-model")


def test_a_hub_out_of_reach_is_asked_once_and_not_by_the_libraries(monkeypatch, capsys):
    class Session:
        asked = 0

        def head(self, url, timeout):
            assert timeout <= 5
            Session.asked += 1
            raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.utils, "get_session", Session)
    hub_answers.cache_clear()
    try:
        for name in ("nobody/no-such-model", "nobody/another"):
            assert "give a directory that holds it (`hf download" in refused(name)
    finally:
        hub_answers.cache_clear()
    assert Session.asked == 1 and capsys.readouterr().err.count("cannot be reached (no route)") == 1


@pytest.mark.parametrize("path", ["/no/where", "./model", "~/model", "models/of/mine"])
def test_a_path_that_is_no_directory(path):
    assert refused(path) == f"there is no model directory '{path}'".replace("~", os.path.expanduser("~"))


def test_missing_library(model_dir):
    assert "no_such_library" in refused(model_dir, external_lib="no_such_library")


def test_override_of_a_config_attribute(model_dir):
    assert load_policy(section(model_dir, override_config={"rms_norm_eps": 0.5})).hf.config.rms_norm_eps == 0.5
    assert "rms_norm_epz" in refused(model_dir, override_config={"rms_norm_epz": 0.5})


def test_override_of_the_attention_implementation(model_dir):
    policy = load_policy(section(model_dir, override_config={"attn_implementation": "eager"}))
    assert policy.hf.config._attn_implementation == "eager"
    assert load_policy(section(model_dir, use_remove_padding=False)).hf.config._attn_implementation == "sdpa"
    assert load_policy(section(model_dir)).hf.config._attn_implementation == "valor_packed"


def test_gradient_checkpointing_is_switched_on(model_dir):
    def layers_checkpoint(**keys) -> set[bool]:
        return {layer.gradient_checkpointing for layer in load_policy(section(model_dir, **keys)).hf.model.layers}

    assert layers_checkpoint(enable_gradient_checkpointing=True) == {True}
    assert layers_checkpoint() == {False}


def save_tokenizer(path, chat_template=None):
    words = Tokenizer(models.WordLevel({"<eos>": 0, "hello": 1, "world": 2, "!": 3}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", clean_up_tokenization_spaces=True)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(path)


def test_tokenizer_gets_a_padding_token(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.pad_token == "<eos>" and tokenizer("hello world")["input_ids"] == [1, 2]


def test_texts_are_those_of_the_tokens_whatever_the_tokenizer_would_clean_up(tmp_path):
    save_tokenizer(tmp_path)
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).batch_decode([[1, 3]]) == ["hello!"]
    assert load_tokenizer(str(tmp_path)).batch_decode([[1, 3]]) == ["hello !"]


def test_chat_template_is_required_only_when_asked(tmp_path):
    save_tokenizer(tmp_path)
    with pytest.raises(UserError, match="chat template"):
        load_tokenizer(str(tmp_path), require_chat_template=True)
    given = load_tokenizer(str(tmp_path), custom_chat_template="{{ messages }}", require_chat_template=True)
    assert given.chat_template == "{{ messages }}"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ \'old\' }}"}')  # of a processor
    assert load_tokenizer(str(tmp_path), require_chat_template=True).chat_template == "{{ 'old' }}"
    save_tokenizer(tmp_path, chat_template="{{ 'hi' }}")
    assert load_tokenizer(str(tmp_path), require_chat_template=True).chat_template == "{{ 'hi' }}"


def test_directory_without_tokenizer(model_dir, tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer: put its files there"):
        load_tokenizer(str(model_dir))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(str(tmp_path / "empty"))
