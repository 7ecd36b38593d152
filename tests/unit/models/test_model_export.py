"""Exported directories load with plain transformers, in a process that never imports Valor."""

import json

import pytest
import torch
from tiny_models import build_hf
from transformers import AutoModelForTokenClassification

from valor.models.export import export_hf
from valor.models.policy import PolicyModel
from valor.models.value import ValueModel

LOAD = """
import json, sys, torch, transformers
path, auto = sys.argv[1:]
model, info = getattr(transformers, auto).from_pretrained(path, output_loading_info=True)
out = model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits
print(json.dumps({"class": type(model).__name__, "dtype": str(out.dtype), "labels": model.config.num_labels,
                  "missing": len(info["missing_keys"]), "sum": out.double().sum().item()}))
"""


@pytest.mark.slow
def test_policy_loads_with_plain_transformers(without_valor, tmp_path):
    policy = PolicyModel(build_hf("qwen2_tied"))
    export_hf(policy, tmp_path)
    found = json.loads(without_valor(LOAD, tmp_path, "AutoModelForCausalLM").splitlines()[-1])
    expected = policy.hf(input_ids=torch.tensor([[3, 4, 5, 6]])).logits.double().sum().item()
    assert found["class"] == "Qwen2ForCausalLM" and found["missing"] == 0
    assert abs(found["sum"] - expected) < 1e-4


@pytest.mark.slow
def test_critic_loads_with_plain_transformers(without_valor, tmp_path):
    build_hf("llama_dropout").save_pretrained(tmp_path / "lm")
    hf = AutoModelForTokenClassification.from_pretrained(tmp_path / "lm", num_labels=1)
    value = ValueModel(hf)
    export_hf(value, tmp_path / "critic")
    found = json.loads(without_valor(LOAD, tmp_path / "critic", "AutoModelForTokenClassification").splitlines()[-1])
    expected = hf(input_ids=torch.tensor([[3, 4, 5, 6]])).logits.double().sum().item()
    assert (found["class"], found["labels"], found["missing"]) == ("LlamaForTokenClassification", 1, 0)
    assert abs(found["sum"] - expected) < 1e-4


def test_given_weights_are_what_is_written(tmp_path):
    policy = PolicyModel(build_hf("llama_dropout"))
    zeros = {name: torch.zeros_like(value) for name, value in policy.state_dict().items()}
    export_hf(policy, tmp_path, state_dict=zeros)
    from safetensors.torch import load_file

    assert all(not t.any() for t in load_file(tmp_path / "model.safetensors").values())


@pytest.mark.parametrize("family", ["llama_dropout", "gpt2_dropout", "gpt_neox"])
def test_the_config_keeps_the_dropout_that_training_is_without(family, tmp_path):
    hf = build_hf(family)
    rates = {key: value for key, value in hf.config.to_dict().items() if "drop" in key}
    policy = PolicyModel(hf)
    assert any(rates.values())
    for folder in (tmp_path / "once", tmp_path / "twice"):
        export_hf(policy, folder)
        written = json.loads((folder / "config.json").read_text())
        assert {key: value for key, value in written.items() if "drop" in key} == rates
        assert not any(value for key, value in hf.config.to_dict().items() if "drop" in key)
        assert not any(m.p for m in policy.modules() if isinstance(m, torch.nn.Dropout))
