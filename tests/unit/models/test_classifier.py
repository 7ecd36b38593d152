"""Critics and reward models of families for which transformers has no classifier."""

import json

import pytest
import torch
from tiny_models import SIZES, sequences
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from valor.config.engine import BackboneConfig, CriticModelConfig, ModelConfig
from valor.errors import UserError
from valor.models.export import export_hf
from valor.models.hf import reads_later_tokens
from valor.models.load import load_policy, load_sequence_classifier, load_value_model
from valor.models.reward import RewardModel
from valor.models.value import ValueHead

GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 16}
MIXTURE = {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
HYBRID = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES = {
    "gemma3_text": {**GROUPED, "sliding_window": 4},
    "granite": {**SIZES, "num_key_value_heads": 1},
    "cohere": {**SIZES, "num_key_value_heads": 1},
    "olmo3": {**SIZES, "num_key_value_heads": 1, "sliding_window": 4},
    "glm4_moe": {**GROUPED, **MIXTURE, "n_group": 1, "topk_group": 1},
    "lfm2": {**SIZES, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"], "block_dim": 32},
    "falcon_h1": {**SIZES, **MAMBA, "num_key_value_heads": 1},  # buffers that no checkpoint holds
    "bailing_hybrid": {**GROUPED, **MIXTURE, **LATENT, "num_hidden_layers": 2},  # weights of other names in files
    "qwen3_5_text": {**GROUPED, **HYBRID, "layer_types": ["linear_attention", "full_attention"]},
}
PLAIN = """
import json, sys
import torch, transformers
from transformers import AutoModelForTokenClassification
folder, ids = sys.argv[1], json.loads(sys.argv[2])
transformers.utils.logging.disable_progress_bar()
model = AutoModelForTokenClassification.from_pretrained(folder, trust_remote_code=True).eval()
print("outputs", json.dumps(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :, 0].tolist()))
"""


@pytest.fixture(params=[kind for kind in FAMILIES if kind in CONFIG_MAPPING_NAMES])
def causal_dir(request, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **FAMILIES[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


def section(path, **keys) -> CriticModelConfig:
    return CriticModelConfig(path=str(path), **{"enable_gradient_checkpointing": False, **keys})


def test_a_critic_reads_the_hidden_states_of_the_policy_and_is_loaded_again(causal_dir, rows, tmp_path):
    critic = load_value_model(section(causal_dir, value_head_init="normal"))
    policy = AutoModelForCausalLM.from_pretrained(causal_dir).eval()
    with torch.no_grad():
        values = critic(rows)["values"]
        for i, p, r, ids in sequences(rows):
            hidden = policy.base_model(input_ids=ids, use_cache=False).last_hidden_state
            expected = critic.head(hidden)[0, p - 1 : p - 1 + r, 0]
            torch.testing.assert_close(values[i, :r], expected, rtol=0, atol=1e-5)
    assert values.abs().max() > 0
    export_hf(critic, tmp_path / "critic")
    again = load_value_model(section(tmp_path / "critic"), head=ValueHead())
    torch.testing.assert_close(again(rows)["values"], values, rtol=0, atol=0)


@pytest.mark.slow
def test_an_exported_critic_is_loaded_without_valor(causal_dir, tmp_path, without_valor):
    critic = load_value_model(section(causal_dir, value_head_init="normal"))
    export_hf(critic, tmp_path / "critic")
    ids = [5, 9, 17, 3, 4]
    outputs = json.loads(without_valor(PLAIN, tmp_path / "critic", json.dumps(ids)).partition("outputs ")[2])
    with torch.no_grad():
        expected = critic.hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :, 0]
    torch.testing.assert_close(torch.tensor(outputs), expected, rtol=0, atol=1e-6)


def test_a_reward_model_lends_a_critic_its_head(causal_dir, tmp_path, rows):
    backbone = BackboneConfig(path=str(causal_dir), enable_gradient_checkpointing=False)
    export_hf(RewardModel(load_sequence_classifier(backbone, new_head_seed=1)), tmp_path / "rm")
    hf = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    critic = load_value_model(section(tmp_path / "rm"))
    assert torch.equal(critic.head.weight, hf.score.weight) and not critic.head.bias.any()


def test_an_encoder_is_refused(tmp_path):
    config = BertConfig(**SIZES, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="read later ones"):
        load_value_model(section(tmp_path))
    with pytest.raises(UserError, match="read later ones"):
        load_policy(ModelConfig(path=str(tmp_path)))
    for kind in ("doge", "xlnet", "bert-generation"):
        assert reads_later_tokens(AutoConfig.for_model(kind))
    assert not any(reads_later_tokens(AutoConfig.for_model(kind)) for kind in ("gpt_neox", "qwen2", "gpt2"))
