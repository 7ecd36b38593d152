"""LoRA on one process: what trains, what a model computes with and without, what peft and transformers read."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, build_hf
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Glm4MoeConfig,
    PhimoeConfig,
)

from valor.config.engine import CriticModelConfig, ModelConfig
from valor.errors import UserError
from valor.models.export import export_hf, published_weights
from valor.models.load import load_policy, load_value_model
from valor.models.lora import adapted_layers, adapters_off
from valor.models.value import ValueHead

IDS = torch.arange(24).view(2, 12) % VOCAB


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    for name in ("qwen2_tied", "gpt2_dropout"):
        build_hf(name).save_pretrained(root / name)
    return {name: root / name for name in ("qwen2_tied", "gpt2_dropout")}


def settings(base: Path, **changes) -> ModelConfig:
    return ModelConfig(path=str(base), **{"lora_rank": 4, **changes})


def trained(model, seed: int = 3):
    """`model` as if its adapters and head had learnt something."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@torch.no_grad()
def logits(hf) -> torch.Tensor:
    return hf.eval()(input_ids=IDS, use_cache=False).logits


def plain(base: Path):
    return AutoModelForCausalLM.from_pretrained(base)


def test_new_adapters_change_nothing_and_alone_train(bases):
    before = torch.get_rng_state()
    policy = load_policy(settings(bases["qwen2_tied"]), dtype=torch.bfloat16)
    assert torch.equal(before, torch.get_rng_state()), "drawing them leaves the global generator alone"
    base = AutoModelForCausalLM.from_pretrained(bases["qwen2_tied"], dtype=torch.bfloat16)
    torch.testing.assert_close(logits(policy.hf), logits(base), rtol=0, atol=0)
    names = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert len(names) == 2 * 7 * 2 and all(".lora_A." in name or ".lora_B." in name for name in names)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    assert policy.logit_map is not None, "the head is applied at response tokens alone"


def test_the_seed_decides_new_adapters(bases):
    a, b, c = (load_policy(settings(bases["qwen2_tied"]), seed=seed).state_dict() for seed in (1, 1, 2))
    name = "hf.model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert torch.equal(a[name], b[name]) and not torch.equal(a[name], c[name])


@pytest.mark.parametrize("name", ["qwen2_tied", "gpt2_dropout"])
def test_an_export_is_a_merged_model_and_an_adapter(name, bases, tmp_path):
    policy = trained(load_policy(settings(bases[name], lora_alpha=6)))
    expected = logits(policy.hf)
    assert (expected - logits(plain(bases[name]))).abs().max() > 0.01
    export_hf(policy, tmp_path)
    torch.testing.assert_close(logits(plain(tmp_path)), expected, rtol=0, atol=1e-5)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(bases[name] / "model.safetensors").keys()
    by_peft = PeftModel.from_pretrained(plain(bases[name]), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(by_peft), expected, rtol=0, atol=0)
    again = load_policy(settings(bases[name], lora_alpha=6, lora_adapter_path=str(tmp_path / "adapter")))
    torch.testing.assert_close(logits(again.hf), expected, rtol=0, atol=0)
    torch.testing.assert_close(logits(policy.hf), expected, rtol=0, atol=0)  # exporting has not touched it


def test_generators_are_sent_merged_weights_under_plain_names(bases):
    policy = trained(load_policy(settings(bases["qwen2_tied"])))
    sent = dict(published_weights(policy, policy.state_dict().items()))
    other = plain(bases["qwen2_tied"])
    assert sent.keys() == dict(other.named_parameters()).keys()
    other.load_state_dict(sent, strict=False)
    torch.testing.assert_close(logits(other), logits(policy.hf), rtol=0, atol=1e-5)


def test_an_adapter_that_peft_made(bases, tmp_path):
    config = LoraConfig(r=8, lora_alpha=4, target_modules=["q_proj", "down_proj"], use_rslora=True, lora_dropout=0.1)
    theirs = trained(get_peft_model(plain(bases["qwen2_tied"]), config))
    theirs.save_pretrained(tmp_path)
    ours = load_policy(settings(bases["qwen2_tied"], lora_rank=8, lora_alpha=4, lora_adapter_path=str(tmp_path)))
    torch.testing.assert_close(logits(ours.hf), logits(theirs), rtol=0, atol=0)
    export_hf(ours, tmp_path / "merged")
    torch.testing.assert_close(logits(plain(tmp_path / "merged")), logits(theirs), rtol=0, atol=1e-5)


def test_without_its_adapters_a_policy_is_its_base(bases):
    policy = trained(load_policy(settings(bases["qwen2_tied"])))
    with adapters_off(policy.hf):
        torch.testing.assert_close(logits(policy.hf), logits(plain(bases["qwen2_tied"])), rtol=0, atol=0)
    assert all(p.requires_grad == ("lora_" in name) for name, p in policy.named_parameters())


def test_targets_and_exceptions(bases):
    def adapted(**changes) -> set[str]:
        policy = load_policy(settings(bases["qwen2_tied"], **changes))
        return {name.split(".lora_A")[0].removeprefix("hf.model.layers.") for name, p in policy.named_parameters()
                if ".lora_A." in name}  # fmt: skip

    assert adapted(target_modules=["q_proj", "1.mlp.up_proj"]) == {
        "0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj"
    }  # fmt: skip
    assert adapted(target_modules=r".*\.1\.self_attn\.[qk]_proj") == {"1.self_attn.q_proj", "1.self_attn.k_proj"}
    everything = adapted()
    assert len(everything) == 14 and everything - adapted(exclude_modules=["up_proj"]) == {
        "0.mlp.up_proj", "1.mlp.up_proj"
    }  # fmt: skip


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_peft(checkpointing, bases, rows, tmp_path):
    policy = trained(load_policy(settings(bases["qwen2_tied"], enable_gradient_checkpointing=checkpointing)))
    export_hf(policy, tmp_path)
    policy.train(checkpointing)
    policy(rows)["log_probs"].sum().backward()
    theirs = PeftModel.from_pretrained(plain(bases["qwen2_tied"]), str(tmp_path / "adapter"), is_trainable=True).eval()
    total = torch.zeros(())
    for i, (p, r) in enumerate(zip(rows["prompt_lengths"].tolist(), rows["response_lengths"].tolist(), strict=True)):
        ids = torch.cat([rows["prompts"][i, :p], rows["responses"][i, :r]])
        log_p = theirs(input_ids=ids[None]).logits[0, p - 1 : p - 1 + r].log_softmax(-1)
        total = total + log_p.gather(1, ids[p:, None]).sum()
    total.backward()
    expected = {name.removeprefix("base_model.model."): p.grad for name, p in theirs.named_parameters()}
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is None) == ("lora_" not in name)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name.removeprefix("hf.")], rtol=1e-4, atol=1e-5)


def critic(base: Path, head: ValueHead | None = None, **changes):
    return load_value_model(CriticModelConfig(path=str(base), **{"lora_rank": 4, **changes}), head=head)


def test_a_critic_trains_its_head_beside_its_adapters(bases, tmp_path):
    model = critic(bases["qwen2_tied"])
    heads = {"hf.score.weight", "hf.score.bias"}
    assert {name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name} == heads
    expected = logits(trained(model).hf)
    export_hf(model, tmp_path)
    merged = AutoModelForTokenClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    base = AutoModelForTokenClassification.from_pretrained(bases["qwen2_tied"], num_labels=1)
    by_peft = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(by_peft), expected, rtol=0, atol=0)
    again = critic(bases["qwen2_tied"], lora_adapter_path=str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(again.hf), expected, rtol=0, atol=0)


def test_a_critics_adapter_says_how_its_head_is_read(bases, tmp_path):
    bins = ValueHead("bins", 5, -1.0, 1.0)
    model = trained(critic(bases["qwen2_tied"], bins))
    export_hf(model, tmp_path)
    start = {"lora_adapter_path": str(tmp_path / "adapter")}
    again = critic(bases["qwen2_tied"], **start)
    assert again.reading == bins
    torch.testing.assert_close(logits(again.hf), logits(model.hf), rtol=0, atol=0)
    with pytest.raises(UserError, match="gives 5 bins from -1 to 1, and this run trains one that gives a value"):
        critic(bases["qwen2_tied"], ValueHead(), **start)


def test_a_critic_starts_from_the_policys_adapters(bases, tmp_path):
    policy = trained(load_policy(settings(bases["qwen2_tied"])))
    export_hf(policy, tmp_path)
    model = critic(bases["qwen2_tied"], lora_adapter_path=str(tmp_path / "adapter"))
    states = policy.hf.base_model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(model.hf.base_model(input_ids=IDS).last_hidden_state, states, rtol=0, atol=0)
    assert not model.head.weight.any()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"target_modules": ["q_proj", "qproj"]}, "target_modules: Qwen2ForCausalLM has no module 'qproj'"),
        ({"exclude_modules": ["qproj"]}, "exclude_modules: Qwen2ForCausalLM has no module 'qproj'"),
        ({"target_modules": "q_proj.*"}, "target_modules=q_proj"),
        ({"target_modules": "(q_proj"}, "target_modules="),
        ({"target_modules": ["lm_head"]}, "lm_head of Qwen2ForCausalLM can have no adapter"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens of Qwen2ForCausalLM can have no adapter"),
        ({"target_modules": ["norm"]}, "target_modules="),
        ({"lora_adapter_path": "/nowhere"}, "'/nowhere' is no adapter directory"),
    ],
)
def test_what_cannot_have_adapters_is_one_line(changes, line, bases):
    with pytest.raises(UserError) as caught:
        load_policy(settings(bases["qwen2_tied"], **changes))
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_an_adapter_that_does_not_fit_is_one_line(bases, tmp_path):
    policy = load_policy(settings(bases["qwen2_tied"]))
    export_hf(policy, tmp_path)
    folder = tmp_path / "adapter"

    def refused(base: str = "qwen2_tied", **changes) -> str:
        with pytest.raises(UserError) as caught:
            load_policy(settings(bases[base], lora_adapter_path=str(folder), **changes))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert refused(lora_rank=8).endswith("has lora_rank=4: set model.lora_rank=4")
    assert refused(lora_alpha=8).endswith("has lora_alpha=16.0: set model.lora_alpha=16.0")
    assert "Target modules" in refused("gpt2_dropout")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    for change, line in (
        ({name: torch.zeros(4, 40)}, f"has {name} of shape (4, 40), this model of (4, 32)"),
        ({name.replace("1", "7", 1): torch.zeros(4, 32)}, "which this model has not"),
    ):
        save_file({**tensors, **change}, folder / "adapter_model.safetensors")
        assert line in refused()
    save_file({k: v for k, v in tensors.items() if k != name}, folder / "adapter_model.safetensors")
    assert f"lacks {name}" in refused()
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**described, "use_dora": True}))
    assert refused().endswith("is not plain LoRA: it sets use_dora")
    (folder / "adapter_config.json").write_text(json.dumps({**described, "peft_type": "IA3"}))
    assert "peft's type IA3" in refused()


def test_fused_experts_and_routers_stay_frozen_and_that_is_told(tmp_path, caplog, rows):
    """A router that is a subclass of nn.Linear and gives a tuple, and experts in one tensor."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": VOCAB}
    hf = PhimoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(hf).save_pretrained(tmp_path)
    model = {"path": str(tmp_path), "lora_rank": 2, "enable_gradient_checkpointing": False}
    policy = load_policy(ModelConfig(**model))
    assert policy(rows)["log_probs"].isfinite().all()
    assert {name.rpartition(".")[2] for name in adapted_layers(policy.hf)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    told = [line for line in caplog.messages if "leaves frozen" in line]
    assert len(told) == 1 and "model.layers.*.mlp.experts.gate_up_proj" in told[0] and "mlp.router.weight" in told[0]
    for modules in (["router"], ["experts"], ["lm_head"]):
        with pytest.raises(UserError, match=r"set it to all-linear, or to some of \[q_proj,k_proj,v_proj,o_proj\]"):
            load_policy(ModelConfig(**model, target_modules=modules))


@pytest.mark.parametrize("modules", ["all-linear", ["gate_proj", "down_proj"], r".*\.(gate|down)_proj"])
def test_shared_experts_and_dense_layers_beside_fused_experts_have_adapters(modules, tmp_path, caplog, rows):
    """By itself peft takes their names for those of transformers 4's experts, in DeepSeek, GLM and others."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "first_k_dense_replace": 1, "n_group": 1}
    hf = Glm4MoeConfig(**sizes, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, vocab_size=VOCAB)
    AutoModelForCausalLM.from_config(hf).save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "enable_gradient_checkpointing": False}
    policy = trained(load_policy(ModelConfig(**model, lora_rank=2, target_modules=modules)))
    adapted = {*adapted_layers(policy.hf)}
    assert {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.shared_experts.down_proj"} <= adapted
    assert not any("experts" in name and "shared" not in name for name in adapted)
    assert any("misread by peft" in line for line in caplog.messages)
    export_hf(policy, tmp_path / "merged")
    merged, base = (load_policy(ModelConfig(**model | {"path": str(tmp_path / name)})) for name in ("merged", "base"))
    with torch.no_grad():
        expected = policy(rows)["log_probs"]
        torch.testing.assert_close(merged(rows)["log_probs"], expected, rtol=0, atol=1e-5)
        assert not torch.allclose(base(rows)["log_probs"], expected, atol=1e-3)


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
JAMBA = {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
ZAMBA = {"layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "n_mamba_heads": 8}
ZAMBA |= {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_headdim": 8, "adapter_rank": 4}


@pytest.mark.parametrize(
    ("kind", "own", "without"),
    [
        ("falcon_h1", {"mamba_d_ssm": 64, **MAMBA}, "model.layers.0.mamba.out_proj"),
        ("jamba", JAMBA, "model.layers.0.mamba.dt_proj"),
        ("zamba2", {**ZAMBA, "num_hidden_layers": 4}, "model.layers.3.shared_transformer.self_attn.q_proj"),
    ],
)
def test_weights_that_kernels_or_two_layers_read_have_no_adapters(kind, own, without, tmp_path, rows):
    """By such a weight a block computes without the adapter, and a merged export would compute with it."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | own)).save_pretrained(tmp_path / "base")
    model = {"path": str(tmp_path / "base"), "enable_gradient_checkpointing": False}
    policy = trained(load_policy(ModelConfig(**model, lora_rank=2)))
    assert adapted_layers(policy.hf) and without not in adapted_layers(policy.hf)
    export_hf(policy, tmp_path / "merged")
    merged = load_policy(ModelConfig(**model | {"path": str(tmp_path / "merged")}))
    with torch.no_grad():
        torch.testing.assert_close(merged(rows)["log_probs"], policy(rows)["log_probs"], rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="can have no adapter"):
        load_policy(ModelConfig(**model, lora_rank=2, target_modules=[without]))
