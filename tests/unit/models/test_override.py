"""`model.override_config`: every key of it changes what the model computes, or is refused in a line that names it."""

import pytest
import torch
from tiny_models import SIZES, build_hf
from transformers import Gemma3TextConfig, LlavaConfig, Qwen3Config

from valor.config.engine import ModelConfig
from valor.errors import UserError
from valor.models.load import load_policy
from valor.models.override import override

WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    hf = build_hf("qwen2_tied")
    with torch.no_grad():
        for weight in hf.parameters():
            weight.mul_(10)
    hf.save_pretrained(path)
    return str(path)


@pytest.fixture
def scores(folder, rows):
    def of(**changes):
        model = ModelConfig(path=folder, override_config=changes, enable_gradient_checkpointing=False)
        return load_policy(model)(rows)["log_probs"]

    return of


@pytest.mark.parametrize(
    "changes",
    [
        WINDOW,
        {"rope_theta": 5.0},
        {"rope_parameters": {"rope_theta": 5.0}},
        {"rope_scaling": LINEAR},
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_parameters": LINEAR},
        {"rope_scaling": YARN},
        {"model_config": {"rms_norm_eps": 1.0}},
        {"hidden_act": "gelu"},
        {"num_hidden_layers": 1},
    ],
    ids=str,
)
def test_it_acts(changes, scores):
    assert (scores(**changes) - scores()).abs().max() > 1e-4


@pytest.mark.parametrize(
    "changes", [{"attention_dropout": 0.0}, {"use_sliding_window": False}, {"rope_scaling": None}, {"vocab_size": 61}]
)
def test_what_is_so_already_is_taken(changes, scores):
    assert torch.equal(scores(**changes), scores())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_epz": 1.0}, "override_config.rms_norm_epz: a config of type 'qwen2' has no such key; did you mean"),
        ({"to_dict": 1}, "override_config.to_dict: a config"),
        ({"partial_rotary_factor": 0.5}, "override_config.partial_rotary_factor: a config"),
        ({"num_hidden_layers": "two"}, "Field 'num_hidden_layers' expected int"),
        ({"rope_theta": "x"}, "override_config.rope_theta: expected a number"),
        ({"rope_scaling": "linear"}, "rope_parameters=linear: give a dict with rope_type"),
        ({"rope_scaling": {"factor": 8.0}}, "give a dict with rope_type"),
        ({"rope_scaling": {"rope_type": "lineer", "factor": 8.0}}, "one of default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "Missing required keys"),
        ({"rope_scaling": LINEAR | {"factor": "8"}}, "factor field must be"),
        ({"rope_parameters": LINEAR | {"fctor": 1}}, "Unrecognized keys"),
        ({"use_sliding_window": True}, "no layer gets another window"),
        ({"sliding_window": 3}, "sliding_window=3 has no effect: the other keys make it None"),
        (WINDOW | {"max_window_layers": 2}, "no layer gets another window"),
        ({"layer_types": ["sliding_attention"] * 2}, "set model.override_config.sliding_window"),
        ({"attention_dropout": 0.1}, "there is no dropout"),
        ({"use_cache": False}, "use_cache has no effect"),
        ({"torch_dtype": "float16"}, "set fsdp_config.model_dtype"),
        ({"hidden_size": 64}, "other sizes than its config.json says with model.override_config={'hidden_size': 64}"),
        ({"num_hidden_layers": 3}, "with model.override_config={'num_hidden_layers': 3} promises"),
    ],
    ids=str,
)
def test_it_is_refused(changes, words, scores):
    with pytest.raises(UserError) as caught:
        scores(**changes)
    assert words in str(caught.value) and "override_config" in str(caught.value)


def test_rotary_positions_of_each_kind_of_layer():
    config = Gemma3TextConfig(**SIZES, head_dim=16)
    changed = override(config, {"rope_parameters": {"full_attention": LINEAR}}, "o")
    assert changed.rope_parameters["full_attention"] == LINEAR | {"rope_theta": 1e6}
    assert changed.rope_parameters["sliding_attention"] == config.rope_parameters["sliding_attention"]
    with pytest.raises(UserError, match=r"o.rope_theta: give o.rope_parameters a dict for each kind of layer"):
        override(config, {"rope_theta": 5.0}, "o")


def test_what_is_derived_follows():
    changed = override(Qwen3Config(**SIZES, head_dim=16), WINDOW | {"max_window_layers": 1}, "o")
    assert changed.layer_types == ["full_attention", "sliding_attention"]


def test_keys_of_a_text_config():
    config = LlavaConfig(text_config=Qwen3Config(**SIZES).to_dict())
    changed = override(config, {"text_config": {"rope_theta": 5.0}}, "o")
    assert changed.text_config.rope_parameters["rope_theta"] == 5.0
    with pytest.raises(UserError, match=r"o.rms_norm_eps: .* no such key; set o.text_config.rms_norm_eps"):
        override(config, {"rms_norm_eps": 1.0}, "o")
