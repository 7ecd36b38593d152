"""Adapters in engines of one and two ranks, in checkpoints, as their own reference, and in a whole run."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from runs import read_metrics
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from tiny_reward_models import make_backbone
from valor.config import PPOConfig
from valor.config.engine import CriticModelConfig, FSDPConfig, ModelConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines import distributed
from valor.engines.fsdp.engine import FSDPEngine
from valor.errors import UserError
from valor.models.load import load_policy, load_value_model
from valor.trainer.export import export_checkpoint
from valor.trainer.main_ppo import main
from valor.trainer.main_sft import main as train_policy
from valor.trainer.main_sft import rm_train as train_reward_model
from valor.workers.host import RunFacts, WorkerContext
from valor.workers.reference import ReferenceWorker

pytestmark = pytest.mark.slow

VOCAB, ROWS, WIDTH = 61, 7, 7
CPU = torch.device("cpu")
SHARES = ([0, 2, 3, 5, 6], [1, 4])


def make_base(path: Path, seed: int = 0) -> Path:
    """Sizes that do not divide by two: 61 vocabulary rows, 3 layers, 33 units; adapters of rank 3."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 33, "vocab_size": VOCAB}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def build(base: Path, seed: int = 0, *, master: torch.dtype = torch.float32, **changes):
    """An engine whose adapters have learnt something; `seed` draws it."""
    keys = {"lora_rank": 3, **{k: v for k, v in changes.items() if k.startswith("lora_")}}
    fsdp = FSDPConfig(**{"dtype": "float32", **{k: v for k, v in changes.items() if not k.startswith("lora_")}})
    policy = load_policy(ModelConfig(path=str(base), **keys), dtype=master, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    optim = OptimConfig(lr=1e-2, lr_warmup_steps=2, clip_grad=0.05)
    return FSDPEngine(policy, fsdp=fsdp, optim=optim, device=CPU, total_steps=9)


def build_critic(base: Path, seed: int = 0) -> FSDPEngine:
    model = CriticModelConfig(path=str(base), lora_rank=3, value_head_init="normal")
    value = load_value_model(model, seed=seed)
    fsdp = FSDPConfig(dtype="float32")
    return FSDPEngine(value, fsdp=fsdp, optim=OptimConfig(lr=1e-2), device=CPU, total_steps=9)


def whole_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([4, 7, 0, 5, 7, 1, 3])
    mask = (torch.arange(WIDTH) < lengths[:, None]).float()
    columns = {
        "prompts": torch.randint(3, VOCAB, (ROWS, 6), generator=generator),
        "prompt_lengths": torch.tensor([6, 2, 3, 1, 4, 6, 5]),
        "responses": torch.randint(3, VOCAB, (ROWS, WIDTH), generator=generator),
        "response_lengths": lengths,
        "response_mask": mask,
        "advantages": torch.randn(ROWS, WIDTH, generator=generator) * mask,
    }
    return Batch(columns, meta={"temperature": 0.8})


def loss_fn(outputs, micro):
    loss = -(outputs["log_probs"] * micro["advantages"]).sum() / 27.0
    if "full_kl" in outputs:
        loss = loss + (outputs["full_kl"] * micro["response_mask"]).sum() / 27.0
    return loss, {"loss": loss.detach()}


def value_loss(outputs, micro):
    error = (outputs["values"] - micro["advantages"]) ** 2 * micro["response_mask"]
    return error.sum() / 27.0, {"loss": error.detach().sum() / 27.0}


def step(engine: FSDPEngine, share: Batch, reference=None) -> dict:
    metrics = engine.forward_backward(share, loss_fn, max_tokens=14, temperature=0.8, reference=reference)
    return {**metrics, **engine.optimizer_step()}


def value_step(engine: FSDPEngine, share: Batch) -> dict:
    return {**engine.forward_backward(share, value_loss, max_tokens=14), **engine.optimizer_step()}


def gradients(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor() for n, p in engine.module.named_parameters() if p.grad is not None}


class Beside:
    """What a reference looks for beside it: an actor with this engine."""

    def __init__(self, engine: FSDPEngine) -> None:
        self.engine, self.on_device = engine, lambda: nullcontext(engine)


def reference_of(engine: FSDPEngine | None, base: Path) -> ReferenceWorker:
    keys = {"model": {"path": str(base), "lora_rank": 3}, "ref": {"fsdp_config": {"dtype": "float32"}}}
    config = PPOConfig.model_validate({"actor_rollout_ref": keys})
    roles = {"actor": Beside(engine)} if engine is not None else {}
    return ReferenceWorker(WorkerContext(0, 1, CPU, roles=roles), config=config, facts=RunFacts(0, []))


def kl_gradients(base: Path, share: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Of the loss with the exact KL to the policy's own base."""
    engine = build(base)
    with reference_of(engine, base).reference() as reference:
        metrics = engine.forward_backward(share, loss_fn, max_tokens=14, temperature=0.8, reference=reference)
    return metrics.get("loss", 0.0), gradients(engine)


def base_weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in engine._unsharded_tensors() if "lora_" not in n and "score" not in n}


def run_rank(out: Path) -> None:
    """Everything the tests ask of one rank of two, left as files under `out`."""
    rank = dist.get_rank()
    share, log = whole_batch().take(SHARES[rank]), {}
    base = out / "base"

    engine = build(base)
    before = base_weights(engine)
    engine.forward_backward(share, loss_fn, max_tokens=14, temperature=0.8)
    grads = gradients(engine)
    engine.optimizer.zero_grad()
    log["steps"] = [step(engine, share) for _ in range(3)]
    engine.save(out / "from_two")
    log["after_save"] = [step(engine, share) for _ in range(2)]
    after = base_weights(engine)
    log["base_kept"] = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)

    again = build(base, seed=6)
    again.load(out / "from_two")
    log["bitwise"] = [step(again, share) for _ in range(2)]
    other = build(base, seed=7)
    other.load(out / "from_one")
    log["from_one"] = [step(other, share) for _ in range(2)]
    log["kl"], kl_grads = kl_gradients(base, share)

    mixed = build(base, master=torch.bfloat16, dtype="bfloat16")
    log["mixed"] = [step(mixed, share) for _ in range(3)]
    log["masters"] = sorted({str(p.dtype) for p in mixed.module.parameters() if p.requires_grad})
    critic = build_critic(base)
    log["critic"] = [value_step(critic, share) for _ in range(3)]
    again.export(out / "hf")
    if rank == 0:
        save_file(grads, out / "grads.safetensors")
        save_file(kl_grads, out / "kl_grads.safetensors")
    (out / f"log_{rank}.json").write_text(json.dumps(log))


@pytest.fixture(scope="module")
def root(forks, tmp_path_factory):
    """One run of two ranks for all tests, given a checkpoint of one rank; this process is a group of one."""
    path = tmp_path_factory.mktemp("lora")
    make_base(path / "base")
    distributed.init_process_group("cpu")
    single = build(path / "base")
    for _ in range(3):
        step(single, whole_batch())
    single.save(path / "from_one")
    run_ranks(forks, path, 2, run_rank, path)
    yield path
    distributed.leave_process_group()


@pytest.fixture(scope="module")
def logs(root) -> list[dict]:
    return [json.loads((root / f"log_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone(root) -> list[dict]:
    """Five steps of one rank that has the whole batch."""
    engine = build(root / "base")
    return [step(engine, whole_batch()) for _ in range(5)]


def assert_same_steps(logs: list[dict], key: str, expected: list[dict]) -> None:
    for first, second, one in zip(logs[0][key], logs[1][key], expected, strict=True):
        assert first["loss"] + second["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert first["grad_norm"] == second["grad_norm"] == pytest.approx(one["grad_norm"], abs=1e-4)


def assert_close(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys() and len(got) == 3 * 7 * 2 and all("lora_" in name for name in got)
    for name in got:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)


def test_gradients_of_two_ranks_are_those_of_one(root):
    engine = build(root / "base")
    engine.forward_backward(whole_batch(), loss_fn, temperature=0.8)
    assert_close(load_file(root / "grads.safetensors"), gradients(engine))


def test_steps_and_checkpoints_of_two_ranks_are_those_of_one(root, logs, alone):
    assert_same_steps(logs, "steps", alone[:3])
    assert_same_steps(logs, "from_one", alone[3:])
    engine = build(root / "base", seed=7)
    engine.load(root / "from_two")
    for got, expected in zip([step(engine, whole_batch()) for _ in range(2)], alone[3:], strict=True):
        assert got == pytest.approx(expected, abs=1e-4)


def test_resume_is_bitwise(root, logs, tmp_path):
    for log in logs:
        assert log["bitwise"] == log["after_save"]
    engine = build(root / "base")
    step(engine, whole_batch())
    engine.save(tmp_path)
    expected = [step(engine, whole_batch()) for _ in range(2)]
    again = build(root / "base", seed=8)
    again.load(tmp_path)
    assert [step(again, whole_batch()) for _ in range(2)] == expected
    for name, value in engine.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_the_base_is_never_touched(root, logs):
    assert all(log["base_kept"] for log in logs)
    engine = build(root / "base")
    with engine.unsharded() as module:
        generated = module.hf(input_ids=whole_batch()["prompts"]).logits
    assert generated.shape[-1] == VOCAB
    step(engine, whole_batch())
    stored = load_file(root / "base" / "model.safetensors")
    for name, value in base_weights(engine).items():
        if "lm_head" not in name:
            assert torch.equal(value, stored[name.removeprefix("hf.").replace(".base_layer", "")]), name


def test_a_bfloat16_base_has_float32_adapters(logs):
    for log in logs:
        assert log["masters"] == ["torch.float32"]
        assert [entry["skipped"] for entry in log["mixed"]] == [0.0] * 3
    losses = [sum(log["mixed"][i]["loss"] for log in logs) for i in range(3)]
    exact = [sum(log["steps"][i]["loss"] for log in logs) for i in range(3)]
    assert losses == pytest.approx(exact, abs=0.02) and losses[2] < losses[0]


def test_a_critic_of_two_ranks(root, logs):
    critic = build_critic(root / "base")
    assert_same_steps(logs, "critic", [value_step(critic, whole_batch()) for _ in range(3)])


def test_the_exact_kl_to_the_own_base(root, logs):
    loss, grads = kl_gradients(root / "base", whole_batch())
    assert sum(log["kl"] for log in logs) == pytest.approx(loss, abs=1e-4)
    assert_close(load_file(root / "kl_grads.safetensors"), grads)
    engine = build(root / "base")
    with reference_of(None, root / "base").reference() as reference:  # a model of its own
        metrics = engine.forward_backward(whole_batch(), loss_fn, temperature=0.8, reference=reference)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert_close(gradients(engine), grads)


def test_the_actor_without_adapters_is_the_reference(root):
    engine = build(root / "base")
    step(engine, whole_batch())
    shared = reference_of(engine, root / "base").compute_log_probs(whole_batch())["ref_log_probs"]
    own = reference_of(None, root / "base").compute_log_probs(whole_batch())["ref_log_probs"]
    torch.testing.assert_close(shared, own, rtol=0, atol=0)
    actor = engine.forward(whole_batch(), temperature=0.8)["log_probs"]
    assert (actor - shared).abs().max() > 0.01


def test_a_checkpoint_holds_what_trains(root):
    weights = {}
    for shard in (root / "from_two").glob("*.safetensors"):
        weights |= load_file(shard)
    assert all("lora_" in name for name in weights)
    assert {name.split(".")[0] for name in weights} == {"model", "optimizer"}


def test_a_checkpoint_fits_its_own_adapters_alone(root, tmp_path):
    def refused(base: Path, path: Path = root / "from_two", **changes) -> str:
        with pytest.raises(UserError) as caught:
            build(base, **changes).load(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    base = root / "base"
    assert "was written with lora_rank=3, this run has lora_rank=4" in refused(base, lora_rank=4)
    assert "was written with lora_alpha=16.0, this run has lora_alpha=8.0" in refused(base, lora_alpha=8)
    assert "was written with lora_rank=3, this run has lora_rank=0" in refused(base, lora_rank=0)
    assert "adapters of another base model" in refused(make_base(tmp_path / "other", seed=1))
    full = build(base, lora_rank=0)
    full.save(tmp_path / "full")
    assert "was written with lora_rank=0, this run has lora_rank=3" in refused(base, tmp_path / "full")


def test_an_export_of_two_ranks(root):
    engine = build(root / "base", seed=9)
    engine.load(root / "from_two")
    for _ in range(2):
        step(engine, whole_batch())
    ids = whole_batch()["prompts"]
    with engine.unsharded() as module:
        expected = module.hf(input_ids=ids).logits
    got = AutoModelForCausalLM.from_pretrained(root / "hf")(input_ids=ids).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)
    assert (root / "hf" / "adapter" / "adapter_model.safetensors").exists()


LORA = [
    "actor_rollout_ref.model.lora_rank=4",
    "critic.model.lora_rank=4",
    "critic.model.exclude_modules=[down_proj]",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
]


@pytest.fixture(scope="module")
def finished(overrides, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("lora_runs") / "undisturbed"
    assert main(overrides(run_dir, *LORA)) == 0
    return run_dir


def test_a_run_trains(finished, tiny):
    rows = [row for row in read_metrics(finished) if row["step"]]
    assert len(rows) == 4
    for row in rows:
        assert row["training/rollout_log_probs_diff_max"] < 1e-5
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
    kl = [row["actor/kl_loss"] for row in rows]
    assert 0 <= kl[0] < kl[-1], "the actor leaves its base, which stays where it is"
    before = load_file(tiny["model"] / "model.safetensors")
    after = load_file(finished / "huggingface" / "actor" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all("_proj" in name for name in moved)


def test_a_run_exports_plain_models_and_adapters(finished, tiny, without_valor):
    code = (
        "import torch\n"
        "from pathlib import Path\n"
        "from transformers import AutoModelForCausalLM, AutoModelForTokenClassification\n"
        f"root, base = Path({str(finished / 'huggingface')!r}), {str(tiny['model'])!r}\n"
        "ids = torch.arange(3, 9)[None]\n"
        "actor = AutoModelForCausalLM.from_pretrained(root / 'actor')(ids).logits\n"
        "critic = AutoModelForTokenClassification.from_pretrained(root / 'critic')(ids).logits\n"
        "from peft import PeftModel\n"
        "def by_peft(kind, role, **keys):\n"
        "    hf = kind.from_pretrained(base, **keys)\n"
        "    return PeftModel.from_pretrained(hf, str(root / role / 'adapter'))(ids).logits\n"
        "assert (actor - by_peft(AutoModelForCausalLM, 'actor')).abs().max() < 1e-4\n"
        "assert (critic - by_peft(AutoModelForTokenClassification, 'critic', num_labels=1)).abs().max() < 1e-4\n"
        "assert critic.abs().max() > 0\n"
    )
    without_valor(code)


def test_a_checkpoint_is_small_and_can_be_exported(finished, tiny, tmp_path):
    for role in ("actor", "critic"):
        folder = finished / "global_step_4" / role
        size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        assert size < (tiny["model"] / "model.safetensors").stat().st_size
        export_checkpoint(finished / "global_step_4", tmp_path / role, role)
        assert_equal_files(tmp_path / role / "model.safetensors", finished / "huggingface" / role / "model.safetensors")
        name = "adapter/adapter_model.safetensors"
        assert_equal_files(tmp_path / role / name, finished / "huggingface" / role / name)


def assert_equal_files(a: Path, b: Path) -> None:
    first, second = load_file(a), load_file(b)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_a_resumed_run_equals_the_undisturbed_one(finished, overrides, tmp_path):
    run_dir = tmp_path / "resumed"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={finished / 'global_step_2'}"]
    assert main(overrides(run_dir, *LORA, *resume)) == 0
    assert read_metrics(run_dir) == [row for row in read_metrics(finished) if row["step"] > 2]
    for role in ("actor", "critic"):
        assert_equal_files(*(d / "huggingface" / role / "model.safetensors" for d in (finished, run_dir)))


def test_a_run_goes_on_from_adapters(finished, overrides, tmp_path):
    start = [
        f"{model}.lora_adapter_path={finished / 'huggingface' / role / 'adapter'}"
        for model, role in (("actor_rollout_ref.model", "actor"), ("critic.model", "critic"))
    ]
    quick = ["trainer.total_training_steps=1", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    assert main(overrides(tmp_path / "more", *LORA, *start, *quick)) == 0
    [row] = [row for row in read_metrics(tmp_path / "more") if row["step"]]
    assert row["actor/kl_loss"] > 0, "the reference is the base model, not the adapters that the run starts from"
    assert row["training/rollout_log_probs_diff_max"] < 1e-5


def test_the_exact_kl_and_an_ensemble_of_critics(overrides, tmp_path):
    more = [
        "actor_rollout_ref.actor.kl_loss_type=full",
        "critic.ensemble_size=2",
        "critic.model.value_head_init=normal",
        "trainer.total_training_steps=1",
        "trainer.save_freq=-1",
    ]
    assert main(overrides(tmp_path / "run", *LORA, *more)) == 0
    [row] = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert row["actor/kl_loss"] > 0 and row["critic/grad_norm"] > 0
    first, second = (
        load_file(tmp_path / "run" / "huggingface" / role / "adapter" / "adapter_model.safetensors")
        for role in ("critic", "critic_2")
    )
    assert first.keys() == second.keys() and not all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lora_adapter_path=ADAPTER", ["actor_rollout_ref.model.lora_adapter_path", "set it to that adapter's rank"]),
        ("lora_rank=-1", ["actor_rollout_ref.model.lora_rank", "-1"]),
        ("lora_alpha=-8", ["actor_rollout_ref.model.lora_alpha", "-8"]),
        ("lora_rank=4 target_modules=[nothing]", ["target_modules", "no module 'nothing'"]),
        ("lora_rank=8 lora_adapter_path=ADAPTER", ["has lora_rank=4", "set model.lora_rank=4"]),
    ],
)
def test_a_mistake_is_one_line(override, words, finished, overrides, tmp_path, capsys):
    adapter = str(finished / "huggingface" / "actor" / "adapter")
    keys = [f"actor_rollout_ref.model.{key}" for key in override.replace("ADAPTER", adapter).split()]
    assert main(overrides(tmp_path / "run", *keys)) == 2
    error = capsys.readouterr().err.strip()
    for word in words:
        assert word in error, error
    assert "Traceback" not in error and len([x for x in error.splitlines() if not x.startswith("note:")]) == 1, error


MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("train", "role", "row", "more", "heads"),
    [
        (train_policy, "actor", {"messages": MESSAGES}, [], []),
        (
            train_reward_model,
            "reward_model",
            {"prompt": "q", "chosen": "yes", "rejected": "no"},
            ["data.val_share=0"],
            ["base_model.model.score.weight"],
        ),
    ],
)
def test_supervised_runs_train_adapters(train, role, row, more, heads, tmp_path):
    run_dir, data = tmp_path / "run", tmp_path / "data.jsonl"
    data.write_text(f"{json.dumps(row)}\n" * 4)
    argv = [
        f"model.path={make_backbone(tmp_path / 'base')}",
        "model.lora_rank=4",
        f"data.train_files={data}",
        "data.train_batch_size=2",
        "data.max_length=64",
        "optim.lr=1e-2",
        "fsdp_config.dtype=float32",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={run_dir}",
    ]
    assert train([*argv, *more]) == 0
    exported = run_dir / "huggingface" / role
    adapter = load_file(exported / "adapter" / "adapter_model.safetensors")
    assert [name for name in adapter if "lora_" not in name] == heads
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
    export_checkpoint(run_dir / "global_step_2", tmp_path / "out", role)
    assert_equal_files(tmp_path / "out" / "model.safetensors", exported / "model.safetensors")
