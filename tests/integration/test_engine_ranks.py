"""Two ranks against one: the same losses, gradients, samples' outputs, skips and checkpoints."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForTokenClassification

from valor.config.engine import FSDPConfig, OptimConfig
from valor.data.batch import Batch
from valor.engines import distributed
from valor.engines.fsdp.engine import FSDPEngine
from valor.models.policy import PolicyModel
from valor.models.value import ValueModel

pytestmark = pytest.mark.slow

VOCAB, ROWS, WIDTH = 61, 7, 7
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 33,
    "vocab_size": VOCAB,
}
# Rank 0 takes five rows, rank 1 two: micro-batches differ in number and in size.
SHARES = ([0, 2, 3, 5, 6], [1, 4])


def build(seed: int = 0, frozen: bool = False, **fsdp) -> FSDPEngine:
    """An engine whose sizes do not divide by two: 61 vocabulary rows, 3 layers."""
    torch.manual_seed(seed)
    config = Qwen2Config(**SIZES, tie_word_embeddings=True)
    optim = None if frozen else OptimConfig(lr=1e-2, lr_warmup_steps=2, clip_grad=0.05)
    policy = PolicyModel(AutoModelForCausalLM.from_config(config))
    return FSDPEngine(
        policy, fsdp=FSDPConfig(**{"dtype": "float32", **fsdp}), optim=optim, device=torch.device("cpu"), total_steps=9
    )


def build_critic(seed: int = 0) -> FSDPEngine:
    """Its head has one row, so one of two ranks holds none of it."""
    torch.manual_seed(seed)
    config = Qwen2Config(**SIZES, num_labels=1)
    value = ValueModel(Qwen2ForTokenClassification(config))
    return FSDPEngine(value, fsdp=FSDPConfig(), optim=OptimConfig(lr=1e-2), device=torch.device("cpu"), total_steps=9)


def value_loss(outputs, micro):
    error = (outputs["values"] - micro["advantages"]) ** 2 * micro["response_mask"]
    return error.sum() / 27.0, {"loss": error.detach().sum() / 27.0, "rows": float(len(micro))}


def whole_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([4, 7, 0, 5, 7, 1, 3])
    mask = (torch.arange(WIDTH) < lengths[:, None]).float()
    return Batch(
        {
            "prompts": torch.randint(3, VOCAB, (ROWS, 6), generator=generator),
            "prompt_lengths": torch.tensor([6, 2, 3, 1, 4, 6, 5]),
            "responses": torch.randint(3, VOCAB, (ROWS, WIDTH), generator=generator),
            "response_lengths": lengths,
            "response_mask": mask,
            "advantages": torch.randn(ROWS, WIDTH, generator=generator) * mask,
        }
    )


def loss_fn(outputs, micro):
    loss = -(outputs["log_probs"] * micro["advantages"]).sum() / 27.0
    return loss, {"loss": loss.detach(), "rows": float(len(micro))}


def step(engine: FSDPEngine, share: Batch) -> dict:
    metrics = engine.forward_backward(share, loss_fn, max_tokens=14, temperature=0.8)
    return {**metrics, **engine.optimizer_step()}


def kl_loss_fn(outputs, micro):
    return (outputs["full_kl"] * micro["response_mask"]).sum() / 27.0, {"kl": outputs["full_kl"].detach().sum()}


def kl_gradients(share: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Of the exact KL to a reference that is sharded as the policy is."""
    engine, reference = build(), build(seed=4, frozen=True)
    with reference.reference() as other:
        metrics = engine.forward_backward(share, kl_loss_fn, max_tokens=14, temperature=0.8, reference=other)
    grads = {n: p.grad.full_tensor() for n, p in engine.module.named_parameters()}
    assert all(p.grad is None and isinstance(p, DTensor) for p in reference.module.parameters())
    return metrics.get("kl", 0.0), grads


def value_step(engine: FSDPEngine, share: Batch) -> dict:
    return {**engine.forward_backward(share, value_loss, max_tokens=14), **engine.optimizer_step()}


def run_rank(out: Path) -> None:
    """Everything the tests ask of one rank of two, left as files under `out`."""
    rank, batch = dist.get_rank(), whole_batch()
    share = batch.take(SHARES[rank])
    log: dict = {}

    engine = build()
    engine.forward_backward(share, loss_fn, max_tokens=14, temperature=0.8)
    grads = {n: p.grad.full_tensor() for n, p in engine.module.named_parameters()}
    engine.forward_backward(share, loss_fn, max_tokens=14, temperature=0.8)
    twice = {n: p.grad.full_tensor() for n, p in engine.module.named_parameters()}
    engine.optimizer_step()

    log["kl"], kl_grads = kl_gradients(share)

    engine = build()
    forward = engine.forward(share, max_tokens=14, temperature=0.8, with_entropy=True)
    save_file(forward, out / f"forward_{rank}.safetensors")
    log["steps"] = [step(engine, share) for _ in range(3)]
    engine.save(out / "from_two")
    log["after_save"] = [step(engine, share) for _ in range(2)]

    everything_on_one = batch if rank == 0 else batch.take([])
    lonely = build()
    log["one_rank_has_all"] = [step(lonely, everything_on_one) for _ in range(2)]

    broken = share.take(range(len(share)))
    if rank == 1:
        broken["advantages"][0, 0] = math.nan
    before = lonely.state_dict()
    log["broken"] = step(lonely, broken)
    after = lonely.state_dict()
    log["unchanged"] = all(torch.equal(before[n], after[n]) for n in before)

    resumed = build(seed=5)
    resumed.load(out / "from_one")
    log["from_one"] = [step(resumed, share) for _ in range(2)]
    again = build(seed=6)
    again.load(out / "from_two")
    log["bitwise"] = [step(again, share) for _ in range(2)]

    copies = build(fsdp_size=1)
    log["copies"] = [step(copies, share) for _ in range(3)]
    copies.save(out / "from_copies")

    critic = build_critic()
    log["critic"] = [value_step(critic, share) for _ in range(2)]
    critic.save(out / "critic")
    log["critic_after_save"] = [value_step(critic, share) for _ in range(2)]
    critic = build_critic(seed=5)
    critic.load(out / "critic")
    log["critic_bitwise"] = [value_step(critic, share) for _ in range(2)]

    with again.unsharded() as module:
        ids = batch["prompts"][:2, :3]
        cache = module.hf(input_ids=ids[:, :2], use_cache=True).past_key_values
        cached = module.hf(input_ids=ids[:, 2:], past_key_values=cache).logits[:, -1]
    weights = again.state_dict()
    reference = PolicyModel(AutoModelForCausalLM.from_config(again.module.hf.config))
    if rank == 0:
        reference.load_state_dict(weights)
        with torch.no_grad():
            log["generation"] = (cached - reference.hf(input_ids=ids).logits[:, -1]).abs().max().item()
        save_file(grads, out / "grads.safetensors")
        save_file(twice, out / "twice.safetensors")
        save_file(kl_grads, out / "kl_grads.safetensors")
    again.export(out / "hf")
    frozen = build(frozen=True, reshard_after_forward=False)
    log["frozen"] = list(frozen.forward(everything_on_one)["log_probs"].shape)
    (out / f"log_{rank}.json").write_text(json.dumps(log))


@pytest.fixture(scope="module")
def root(forks, tmp_path_factory):
    """One run of two ranks for all tests, given a checkpoint of one rank; this process is a group of one."""
    path = tmp_path_factory.mktemp("ranks")
    distributed.init_process_group("cpu")
    single = build()
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
    engine = build()
    return [step(engine, whole_batch()) for _ in range(5)]


def assert_same_steps(pair: tuple[list[dict], list[dict]], expected: list[dict]) -> None:
    for first, second, one in zip(*pair, expected, strict=True):
        assert first.get("loss", 0.0) + second.get("loss", 0.0) == pytest.approx(one["loss"], abs=1e-4)
        assert first.get("rows", 0.0) + second.get("rows", 0.0) == one["rows"] == ROWS
        for rank in (first, second):
            assert rank["grad_norm"] == pytest.approx(one["grad_norm"], abs=1e-4)
            assert (rank["lr"], rank["skipped"]) == (one["lr"], one["skipped"])


def test_outputs_of_each_rank_equal_those_of_one(root):
    expected = build().forward(whole_batch(), max_tokens=100, temperature=0.8, with_entropy=True)
    for rank, rows in enumerate(SHARES):
        got = load_file(root / f"forward_{rank}.safetensors")
        for name in ("log_probs", "entropy"):
            torch.testing.assert_close(got[name], expected[name][rows], rtol=0, atol=1e-5)


def test_gradients_add_up_to_those_of_one(root):
    engine = build()
    engine.forward_backward(whole_batch(), loss_fn, temperature=0.8)
    got = load_file(root / "grads.safetensors")
    for name, parameter in engine.module.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad.full_tensor(), rtol=1e-4, atol=1e-6)


def test_gradients_of_two_calls_add_up(root):
    once, twice = load_file(root / "grads.safetensors"), load_file(root / "twice.safetensors")
    for name, grad in once.items():
        torch.testing.assert_close(twice[name], 2 * grad, rtol=1e-5, atol=1e-7)


def test_the_exact_kl_adds_up_to_that_of_one(root, logs):
    kl, grads = kl_gradients(whole_batch())
    assert kl > 0.01 and logs[0]["kl"] + logs[1]["kl"] == pytest.approx(kl, rel=1e-4)
    got = load_file(root / "kl_grads.safetensors")
    for name, grad in grads.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-6)


def test_steps_equal_those_of_one(logs, alone):
    assert_same_steps((logs[0]["steps"], logs[1]["steps"]), alone[:3])


def test_a_rank_without_rows_takes_part(logs, alone):
    assert_same_steps((logs[0]["one_rank_has_all"], logs[1]["one_rank_has_all"]), alone[:2])
    assert "loss" not in logs[1]["one_rank_has_all"][0]


def test_a_bad_gradient_on_one_rank_skips_the_update_on_all(logs):
    for log in logs:
        assert log["broken"]["skipped"] == 1.0 and math.isnan(log["broken"]["grad_norm"])
        assert log["unchanged"]


def test_resume_at_two_ranks_is_bitwise(logs):
    for log in logs:
        assert log["bitwise"] == log["after_save"]


def test_checkpoint_of_one_rank_resumes_on_two(logs, alone):
    assert_same_steps((logs[0]["from_one"], logs[1]["from_one"]), alone[3:])


def test_checkpoint_of_two_ranks_resumes_on_one(root, alone):
    engine = build(seed=7)
    engine.load(root / "from_two")
    for got, expected in zip([step(engine, whole_batch()) for _ in range(2)], alone[3:], strict=True):
        assert got == pytest.approx(expected, abs=1e-4)
    assert engine.counters.updates == 5


def test_ranks_that_hold_copies_equal_one(logs, root, alone):
    assert_same_steps((logs[0]["copies"], logs[1]["copies"]), alone[:3])
    engine = build(seed=7)
    engine.load(root / "from_copies")
    assert step(engine, whole_batch()) == pytest.approx(alone[3], abs=1e-4)


def test_a_critic_whose_head_only_one_rank_holds(logs, root):
    for log in logs:
        assert log["critic_bitwise"] == log["critic_after_save"]
    engine = build_critic(seed=7)
    engine.load(root / "critic")
    for first, second in zip(logs[0]["critic_after_save"], logs[1]["critic_after_save"], strict=True):
        got = value_step(engine, whole_batch())
        assert got["loss"] == pytest.approx(first["loss"] + second["loss"], abs=2e-3)  # the backbone is bfloat16
        assert got["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-2)


def test_each_rank_writes_its_own_file(root):
    names = sorted(p.name for p in (root / "from_two").iterdir())
    assert names == [
        "engine.json",
        "huggingface",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    assert json.loads((root / "from_two" / "engine.json").read_text())["world_size"] == 2


def test_generation_with_gathered_weights(logs):
    assert logs[0]["generation"] < 1e-5


def test_a_frozen_engine_serves_unequal_shares(logs):
    assert [log["frozen"] for log in logs] == [[ROWS, WIDTH], [0, WIDTH]]


def test_export_from_two_ranks(root, alone):
    engine = build(seed=8)
    engine.load(root / "from_two")
    for _ in range(2):
        step(engine, whole_batch())
    assert "lm_head.weight" not in load_file(root / "hf" / "model.safetensors"), "tied weights are written once"
    hf = AutoModelForCausalLM.from_pretrained(root / "hf")
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(hf.state_dict()[name.removeprefix("hf.")], value, rtol=0, atol=1e-3)
