"""The planner's sizes against models that are built, by hand where that is short; what fits and what would make it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from valor import cli
from valor.config import BackboneConfig, PPOConfig, load
from valor.errors import UserError
from valor.lab import arithmetic
from valor.models.load import load_policy
from valor.trainer import checks, memory_plan
from valor.trainer.command import load_checked
from valor.trainer.memory_plan import GIB, Machine, estimate, shape_of

SEVEN = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def with_own_code(folder):
    """A model whose classes are in Python files beside its weights."""
    folder.mkdir()
    (folder / "own_llama.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    maps = {"AutoConfig": "own_llama.OwnConfig", "AutoModelForCausalLM": "own_llama.OwnForCausalLM"}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "own_llama", "auto_map": maps, "vocab_size": 64, **sizes})
    )
    return folder


@pytest.fixture(scope="module")
def seven(tmp_path_factory):
    """A model of seven thousand million weights, as far as its config.json goes."""
    folder = tmp_path_factory.mktemp("seven")
    Qwen2Config(**SEVEN).save_pretrained(folder)
    return folder


def cuda(gpus, memory):
    return Machine("cuda", gpus, memory * GIB)


def config(model, *overrides):
    sizes = [
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "critic.ppo_mini_batch_size=64",
    ]
    return load([f"actor_rollout_ref.model.path={model}", *sizes, *overrides], PPOConfig).config


def test_a_model_with_code_of_its_own_is_planned_where_that_is_trusted(tmp_path):
    path = str(with_own_code(tmp_path / "own"))
    trusted = shape_of(BackboneConfig(path=path, trust_remote_code=True))
    assert trusted.weights == 2 * 64 * 32 + 32 + 2 * (2 * 32 + 4 * 32 * 32 + 3 * 32 * 48)
    with pytest.raises(UserError, match=r"code of its own.*trust_remote_code=true"):
        shape_of(BackboneConfig(path=path))


def test_weights_are_counted_as_they_are_built(tmp_path):
    model = arithmetic.make_model(tmp_path / "model")
    built = AutoModelForCausalLM.from_pretrained(model)
    shape = shape_of(BackboneConfig(path=str(model)))
    assert shape.weights == shape.trained == sum(p.numel() for p in built.parameters())
    assert shape.largest_part == max(sum(p.numel() for p in built.model.layers[0].parameters()),
                                     sum(p.numel() for p in built.model.embed_tokens.parameters()) + 128)  # fmt: skip
    lora = {"path": str(model), "lora_rank": 4}
    adapters = [p for p in load_policy(load([f"actor_rollout_ref.model.{k}={v}" for k, v in lora.items()]).config
                .actor_rollout_ref.model).parameters() if p.requires_grad]  # fmt: skip
    assert shape_of(BackboneConfig(**lora)).trained == sum(p.numel() for p in adapters)
    some = BackboneConfig(**lora, target_modules=["q_proj"])
    assert shape_of(some).trained == 3 * 4 * (128 + 128)


def test_a_large_model_by_hand(seven):
    """7.6e9 weights in float32 with two moments: 85 GiB, an eighth on each of eight GPUs."""
    weights = shape_of(BackboneConfig(path=str(seven))).weights
    assert weights == 7_615_616_512  # as its card says
    expected = estimate(config(seven, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"), cuda(8, 80))
    assert expected.resident["actor"] == weights * 12 / 8
    assert expected.phases["update_actor"]["gradients"] == weights * 4 / 8
    roles = ("actor_rollout_ref.actor", "critic")
    kinds = ("param_offload", "optimizer_offload")
    offloaded = config(seven, *(f"{role}.fsdp_config.{kind}=true" for role in roles for kind in kinds))
    expected = estimate(offloaded, cuda(8, 80))
    assert expected.resident["actor"] == expected.resident["critic"] == 0
    assert expected.phases["update_actor"]["weights and optimizer, back"] == weights * 12 / 8


@pytest.mark.parametrize(
    ("more", "keeps"),
    [("critic.ensemble_size=3", "critic"), ("actor_rollout_ref.actor.use_kl_loss=true", "ref")],
)
def test_roles_that_are_there(seven, more, keeps):
    fixed = "critic.model.value_head_init=normal"
    without, having = (estimate(config(seven, fixed, *one), cuda(8, 80)).resident for one in ((), (more,)))
    expected = 3 * without["critic"] if keeps == "critic" else shape_of(BackboneConfig(path=str(seven))).weights * 4 / 8
    assert having[keeps] == expected


def test_the_command_says_what_fits_and_which_key_would_help(seven, capsys):
    given = [f"actor_rollout_ref.model.path={seven}", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
    assert cli.main(["plan", "--gpus", "8", "--memory", "80", *given]) == 0
    said = capsys.readouterr().out
    assert said.endswith("it fits\n") and "8 x GPU (80.0 GiB)" in said and "update_actor" in said
    assert cli.main(["plan", "--gpus", "16", "--memory", "180", *given]) == 0
    off = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
    assert capsys.readouterr().out.endswith(f"it fits\nand without computing forward passes twice: {off}\n")
    assert cli.main(["plan", "--gpus", "16", "--memory", "180", *given, off]) == 0
    assert capsys.readouterr().out.endswith("it fits\n")
    assert cli.main(["plan", "--gpus", "4", "--memory", "40", *given]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("it does not fit in ") and "fsdp_config." in said
    override = said.partition(": set ")[2].split()
    assert cli.main(["plan", "--gpus", "4", "--memory", "40", *given, *override]) == 0
    assert cli.main(["plan", "--gpus", "1", "--memory", "4", *given]) == 1
    assert "a smaller model, or more GPUs" in capsys.readouterr().out


def test_generation_on_a_cpu_has_a_second_copy_of_what_it_multiplies_with(seven):
    """In the layout of its processor; the table of embeddings, which is only read, stays as it is."""
    given = config(seven, "actor_rollout_ref.actor.fsdp_config.dtype=float32")
    here, there = (
        estimate(given, machine).phases["generate"] for machine in (Machine("cpu", 2, 64 * GIB), cuda(2, 80))
    )
    assert here["weights, packed"] == 4 * (7_615_616_512 - 152_064 * 3_584)
    assert "weights, packed" not in there


def test_products_of_bfloat16_in_float32_take_a_copy_of_the_head(seven, monkeypatch):
    """Beside wider products: 2^27 of their numbers, twice, one for the gradient."""
    activations, dtype = [], "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"
    given = config(seven, "algorithm.adv_estimator=grpo", dtype)
    for slow in (False, True):
        monkeypatch.setattr(memory_plan, "bfloat16_is_slow", lambda slow=slow: slow)
        expected = estimate(given, Machine("cpu", 1, 64 * GIB))
        activations.append(expected.phases["update_actor"]["activations"])
    assert activations[1] - activations[0] == 4 * 152_064 * 3_584 + 2 * 2 * 2**27


@pytest.mark.parametrize(
    ("settings", "phases"),
    [
        (["algorithm.adv_estimator=grpo"], ["generate", "update_actor"]),
        (
            ["algorithm.use_kl_in_reward=true"],
            ["generate", "values", "old_log_prob", "ref", "update_critic", "update_actor"],
        ),
        (["algorithm.rollout_correction.bypass_mode=true"], ["generate", "values", "update_critic", "update_actor"]),
        (["actor_rollout_ref.rollout.nnodes=1"], ["values", "update_critic", "update_actor"]),
        (["actor_rollout_ref.rollout.name=server"], ["values", "update_critic", "update_actor"]),
    ],
)
def test_the_phases_are_those_of_the_run(seven, settings, phases):
    if "server" in settings[0]:
        settings = [*settings, "actor_rollout_ref.rollout.server.base_url=http://localhost:1"]
    assert list(estimate(config(seven, *settings), cuda(8, 80)).phases) == phases


def test_nodes(seven, capsys):
    def said(*arguments):
        assert cli.main(["plan", *arguments, f"actor_rollout_ref.model.path={seven}"]) in (0, 1)
        return capsys.readouterr().out

    assert said("--gpus", "8", "--nodes", "2").startswith("memory of each of 16 x GPU (80.0 GiB)")
    assert said("--gpus", "8", "trainer.nnodes=3").startswith("memory of each of 24 x GPU (80.0 GiB)")


def test_mistakes_are_one_line(capsys, seven):
    assert cli.main(["plan", "--gpus", "8", "actor_rollout_ref.model.path=/nowhere"]) == 2
    assert capsys.readouterr().err == "there is no model directory '/nowhere'\n"
    at = f"actor_rollout_ref.model.path={seven}"
    lora = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[nope]"]
    for arguments, told in {
        ("--gpus", "0", at): "'--gpus': 0 is not in the range x>=1",
        ("--gpus", "8", "--nodes", "0", at): "'--nodes': 0 is not in the range",
        ("--gpus", "8", "--memory", "-3", at): "'--memory': -3.0 is not in the range x>0",
        ("--gpus", "8", at, "actor_rollout_ref.actor.strategy=megatron"): "leave out strategy=megatron",
        (
            "--gpus",
            "8",
            at,
            "actor_rollout_ref.actor.fsdp_config.fsdp_size=3",
        ): "fsdp_config.fsdp_size=3 does not divide the 8 processes",
        ("--gpus", "8", at, *lora): "model.target_modules=['nope']: Target modules",
    }.items():
        assert cli.main(["plan", *arguments]) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1, error


@pytest.fixture
def small(tmp_path):
    """The shape of Qwen2.5-0.5B."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    heads = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
    Qwen2Config(**sizes, **heads).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("gib", "overrides", "expected"),
    [
        (24, [], (32768, 32768, 32768)),
        (80, [], (65536, 65536, 65536)),
        (80, ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20000"], (20000, 65536, 20000)),
        (12, [], (16384, 32768, 16384)),
        (None, [], (16384, 32768, 16384)),
        (80, ["trainer.device=cpu"], (16384, 32768, 16384)),
    ],
)
def test_micro_batches_are_as_large_as_the_gpu_allows(gib, overrides, expected, small, monkeypatch):
    monkeypatch.setattr(checks, "gpu_bytes", lambda: gib and gib * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    lengths = ["data.max_prompt_length=512", "data.max_response_length=1024"]
    found = load_checked([f"actor_rollout_ref.model.path={small}", *lengths, *overrides], PPOConfig).config
    policy = found.actor_rollout_ref
    limits = policy.actor.ppo_max_token_len_per_gpu, found.critic.ppo_max_token_len_per_gpu
    assert (*limits, policy.rollout.log_prob_max_token_len_per_gpu) == expected
    if gib and expected[1] > 32768:
        assert estimate(found, cuda(1, gib)).fits(cuda(1, gib))


def test_the_memory_of_a_gpu_is_asked_of_its_driver(monkeypatch):
    class Driver:
        def cuInit(self, flags):
            return 0

        def cuDeviceGet(self, device, ordinal):
            return 0

        def cuDeviceTotalMem_v2(self, size, device):
            size._obj.value = 24 * 2**30
            return 0

    assert memory_plan.gpu_bytes() is None or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory_plan.ctypes, "CDLL", lambda name: Driver())
    assert memory_plan.gpu_bytes() == 24 * GIB
    monkeypatch.setattr(Driver, "cuInit", lambda self, flags: 100)
    assert memory_plan.gpu_bytes() is None
