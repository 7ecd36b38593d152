"""The engine in a group of one against plain torch: losses, gradients, updates, generation."""

import copy
import math
from types import SimpleNamespace

import psutil
import pytest
import torch
from tiny_engine import CPU, gradients, loss_fn, ragged_batch, tiny_engine, tiny_policy, weights

from posed_device import DEVICE, PosedDevice
from valor.config.engine import FSDPConfig, OptimConfig
from valor.engines.fsdp import sharding
from valor.engines.fsdp.engine import FSDPEngine
from valor.models.internals import checkpoint_layers
from valor.models.policy import PolicyModel
from valor.models.rows import ROW_FIELDS

pytestmark = pytest.mark.usefixtures("alone")

TOKENS = 27.0
BATCH = ragged_batch()


def plain_step(policy, optimizer=None, limit=None):
    """Loss and gradient norm of the whole batch in one piece."""
    out = policy({name: BATCH[name] for name in ROW_FIELDS}, temperature=0.8)
    loss, _ = loss_fn(TOKENS)(out, BATCH)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), limit or math.inf)
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), norm.item()


def test_loss_and_gradients_equal_plain_torch():
    engine, policy = tiny_engine(), tiny_policy()
    metrics = engine.forward_backward(BATCH, loss_fn(TOKENS), max_tokens=24, temperature=0.8)
    loss, _ = plain_step(policy)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["tokens"] == TOKENS
    assert metrics["rows_max"] == 3.0  # a maximum, not a sum
    for name, grad in gradients(engine).items():
        torch.testing.assert_close(grad, dict(policy.named_parameters())[name].grad, rtol=1e-4, atol=1e-6)


def test_metrics_of_all_micro_batches_are_waited_for_once():
    engine, expected = tiny_engine(), tiny_engine().forward_backward(BATCH, loss_fn(TOKENS), max_rows=1)

    def far_metrics(outputs, rows):
        loss, values = loss_fn(TOKENS)(outputs, rows)
        return loss, {"lr": 0.0} | {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in values.items()}

    with PosedDevice() as device:
        found = engine.forward_backward(BATCH, far_metrics, max_rows=1)
    assert found == {"lr": 0.0} | expected
    assert device.waits == {"copy to the host": 1}


def test_updates_equal_plain_adamw():
    engine, policy = tiny_engine(clip_grad=0.05), tiny_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.01)
    for _ in range(3):
        engine.forward_backward(BATCH, loss_fn(TOKENS), max_tokens=24, temperature=0.8)
        step = engine.optimizer_step()
        _, norm = plain_step(policy, optimizer, limit=0.05)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-4) and step["grad_norm"] > 0.05
        assert (step["lr"], step["skipped"]) == (1e-2, 0.0)
    for name, value in weights(engine).items():
        torch.testing.assert_close(value, dict(policy.named_parameters())[name].data, rtol=0, atol=2e-4)


@pytest.mark.parametrize("bounds", [{"max_tokens": 8}, {"max_tokens": 30}, {"max_rows": 1}, {"max_rows": 3}])
def test_micro_batches_do_not_change_gradients(bounds):
    whole, cut = tiny_engine(), tiny_engine()
    whole.forward_backward(BATCH, loss_fn(TOKENS))
    cut.forward_backward(BATCH, loss_fn(TOKENS), **bounds)
    expected = gradients(whole)
    for name, grad in gradients(cut).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


def test_gradients_add_up_over_calls():
    once, twice = tiny_engine(), tiny_engine()
    once.forward_backward(BATCH, loss_fn(TOKENS))
    for rows in ([0, 1, 2], [3, 4, 5, 6]):
        twice.forward_backward(BATCH.take(rows), loss_fn(TOKENS))
    expected = gradients(once)
    for name, grad in gradients(twice).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


def test_forward_keeps_the_order_of_rows():
    engine, policy = tiny_engine(), tiny_policy()
    with torch.no_grad():
        expected = policy({name: BATCH[name] for name in ROW_FIELDS}, temperature=0.8, with_entropy=True)
    got = engine.forward(BATCH, max_tokens=20, temperature=0.8, with_entropy=True)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-5)


def test_forward_after_an_update_uses_the_new_weights():
    engine = tiny_engine()
    before = engine.forward(BATCH)["log_probs"]
    engine.forward_backward(BATCH, loss_fn(TOKENS))
    engine.optimizer_step()
    after = engine.forward(BATCH)["log_probs"]
    fresh = tiny_policy()
    fresh.load_state_dict(engine.state_dict())
    with torch.no_grad():
        expected = fresh({name: BATCH[name] for name in ROW_FIELDS})["log_probs"]
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)


def test_an_empty_batch_is_served():
    engine = tiny_engine()
    empty = BATCH.take([])
    assert engine.forward(empty)["log_probs"].shape == (0, 7)
    assert engine.forward_backward(empty, loss_fn(TOKENS)) == {}
    assert engine.optimizer_step()["grad_norm"] == 0.0


def test_non_finite_gradients_skip_the_update():
    engine = tiny_engine()
    before = weights(engine)
    broken = copy.copy(BATCH).take(range(7))
    broken["advantages"][3, 0] = math.nan
    engine.forward_backward(broken, loss_fn(TOKENS), max_tokens=20)
    step = engine.optimizer_step()
    assert step["skipped"] == 1.0 and math.isnan(step["grad_norm"])
    assert all(torch.equal(before[n], w) for n, w in weights(engine).items())
    assert (engine.counters.updates, engine.counters.skipped, engine.counters.schedule_steps) == (0, 1, 1)
    engine.forward_backward(BATCH, loss_fn(TOKENS), max_tokens=20)  # the bad gradients are gone
    assert engine.optimizer_step()["skipped"] == 0.0
    assert engine.counters.updates == 1


def test_without_a_token_to_learn_from_momentum_and_decay_move_nothing():
    engine = tiny_engine(weight_decay=0.1)
    engine.forward_backward(BATCH, loss_fn(TOKENS))
    engine.optimizer_step()
    before = weights(engine)
    for _ in range(2):
        engine.forward_backward(BATCH.take([]), loss_fn(TOKENS))
        assert engine.optimizer_step(learns=False)["skipped"] == 0.0
    assert all(torch.equal(before[n], w) for n, w in weights(engine).items())
    assert (engine.counters.updates, engine.counters.skipped, engine.counters.schedule_steps) == (1, 0, 3)
    engine.forward_backward(BATCH.take([]), loss_fn(TOKENS))
    engine.optimizer_step()  # a gradient of 0 that counts
    assert any(not torch.equal(before[n], w) for n, w in weights(engine).items())


def test_updates_that_share_a_schedule_step():
    engine = tiny_engine(lr_warmup_steps=4)
    rates = []
    for advance in (False, True, False, True):
        engine.forward_backward(BATCH, loss_fn(TOKENS))
        rates.append(engine.optimizer_step(advance_schedule=advance)["lr"])
    assert rates == pytest.approx([0.0025, 0.0025, 0.005, 0.005])


def test_generation_inside_unsharded_sees_the_current_weights():
    engine = tiny_engine()
    ids = BATCH["prompts"][:2, :2]
    seen = []
    for _ in range(2):  # before any forward of the engine, and after an update
        with engine.unsharded() as module:
            first = module.hf(input_ids=ids[:, :1], use_cache=True)
            cached = module.hf(input_ids=ids[:, 1:], past_key_values=first.past_key_values).logits[:, -1]
        fresh = tiny_policy(seed=9)
        fresh.load_state_dict(engine.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(cached, fresh.hf(input_ids=ids).logits[:, -1], rtol=0, atol=1e-5)
        seen.append(cached)
        engine.forward_backward(BATCH, loss_fn(TOKENS))
        engine.optimizer_step()
    assert (seen[0] - seen[1]).abs().max() > 1e-2


def test_unsharded_holds_the_computing_dtype_and_training_goes_on_after_it():
    engine = tiny_engine(dtype="bfloat16")
    with engine.unsharded() as module:
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    engine.forward_backward(BATCH, loss_fn(TOKENS))
    assert engine.optimizer_step()["grad_norm"] > 0


def test_bfloat16_computes_near_float32_and_keeps_float32_weights():
    half, exact = tiny_engine(dtype="bfloat16"), tiny_engine()
    a = half.forward_backward(BATCH, loss_fn(TOKENS), max_tokens=24)
    b = exact.forward_backward(BATCH, loss_fn(TOKENS), max_tokens=24)
    assert a["loss"] == pytest.approx(b["loss"], abs=0.02) and a["loss"] != b["loss"]
    assert half.optimizer_step()["grad_norm"] == pytest.approx(exact.optimizer_step()["grad_norm"], rel=0.05)


def test_gradient_checkpointing_gives_the_same_gradients():
    plain = tiny_engine()
    policy = tiny_policy()
    checkpoint_layers(policy.hf)
    calls = []
    policy.hf.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    saving = FSDPEngine(policy, fsdp=FSDPConfig(dtype="float32"), optim=OptimConfig(), device=CPU)
    plain.forward_backward(BATCH, loss_fn(TOKENS))
    saving.forward_backward(BATCH, loss_fn(TOKENS))
    assert len(calls) == 2  # forward, and again going back
    expected = gradients(plain)
    for name, grad in gradients(saving).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7)


def test_checkpointing_does_not_make_routers_choose_at_random():
    """Phi's routers add noise to their choice of experts in training mode, in which alone layers are checkpointed."""
    from transformers import AutoModelForCausalLM, PhimoeConfig

    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_local_experts": 8}
    config = PhimoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=61, router_jitter_noise=0.3)
    seen = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        policy = PolicyModel(AutoModelForCausalLM.from_config(config))
        if checkpointed:
            checkpoint_layers(policy.hf)
        engine = FSDPEngine(policy, fsdp=FSDPConfig(dtype="float32"), optim=OptimConfig(), device=CPU)
        engine.forward_backward(BATCH, loss_fn(TOKENS))
        seen.append(gradients(engine))
    for name, grad in seen[1].items():
        torch.testing.assert_close(grad, seen[0][name], rtol=1e-5, atol=1e-7)


def test_the_value_head_stays_float32_under_bfloat16():
    from transformers import Qwen2Config, Qwen2ForTokenClassification

    from valor.models.value import ValueModel

    config = Qwen2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48,
        vocab_size=61, num_labels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    engine = FSDPEngine(
        ValueModel(Qwen2ForTokenClassification(config)), fsdp=FSDPConfig(), optim=OptimConfig(), device=CPU
    )
    seen = []
    engine.module.head.register_forward_hook(lambda m, args, out: seen.append((m.weight.dtype, args[0].dtype)))

    def loss(outputs, micro):
        return ((outputs["values"] - 1.0) ** 2 * micro["response_mask"]).sum() / TOKENS, {}

    engine.forward_backward(BATCH, loss)
    assert seen == [(torch.float32, torch.float32)]
    assert engine.module.head.bias.grad.full_tensor().abs().item() > 0


def test_a_frozen_engine_only_evaluates():
    engine = tiny_engine(frozen=True)
    assert engine.forward(BATCH)["log_probs"].shape == (7, 7)
    assert not any(p.requires_grad for p in engine.module.parameters())
    with pytest.raises(AssertionError, match="frozen"):
        engine.forward_backward(BATCH, loss_fn(TOKENS))
    with pytest.raises(AssertionError, match="frozen"):
        engine.optimizer_step()


def test_offloading_on_a_cpu_changes_nothing():
    engine = tiny_engine()
    before = engine.forward(BATCH)["log_probs"]
    engine.offload()
    engine.onload()
    assert torch.equal(engine.forward(BATCH)["log_probs"], before)


def test_progress_is_reported_in_rows(monkeypatch):
    from valor.tracking.progress import Phase, phase

    heard = []
    monkeypatch.setattr(Phase, "report", lambda self, done, total: heard.append((done, total)))
    with phase("train", 7):
        tiny_engine().forward_backward(BATCH, loss_fn(TOKENS), max_rows=3)
    assert [pair for pair in heard if pair[0] > 0][:3] == [(3, 7), (6, 7), (7, 7)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_one_part_gives_the_bits_of_one_in_layers(dtype, monkeypatch, tmp_path):
    """As one GPU has it: fewer hooks, the same numbers, and checkpoints that each reads of the other."""
    layered = tiny_engine(dtype=dtype)
    monkeypatch.setattr(sharding, "is_one_part", lambda *_: True)
    one = tiny_engine(dtype=dtype)
    assert len(one._parts) < len(layered._parts)
    for engine in (layered, one):
        checkpoint_layers(engine.module.hf)
    for limit in (20, None):
        metrics = [engine.forward_backward(BATCH, loss_fn(TOKENS), max_tokens=limit) for engine in (layered, one)]
        steps = [engine.optimizer_step() for engine in (layered, one)]
        assert metrics[0] == metrics[1] and steps[0] == steps[1]
    for path, writer, reader in (("a", layered, one), ("b", one, layered)):
        (tmp_path / path).mkdir()
        writer.save(tmp_path / path)
        reader.forward_backward(BATCH, loss_fn(TOKENS))
        reader.optimizer_step()
        reader.load(tmp_path / path)
        for (name, mine), other in zip(reader.state_dict().items(), writer.state_dict().values(), strict=True):
            assert torch.equal(mine, other), name
    monkeypatch.undo()
    assert sharding.is_one_part(one.module, FSDPConfig(), torch.device("cuda"))
    assert not sharding.is_one_part(one.module, FSDPConfig(offload_policy=True), torch.device("cuda"))
    assert not sharding.is_one_part(one.module, FSDPConfig(), CPU)


@pytest.mark.parametrize("room", [2**40, 2**10])
def test_what_is_offloaded_is_pinned_where_there_is_room(room, monkeypatch):
    engine, calls, waits = tiny_engine(), [], []
    engine.forward_backward(BATCH, loss_fn(TOKENS))
    engine.optimizer_step()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=room, total=room))
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    plain = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda x, *a, **k: (calls.append(k.get("non_blocking", len(a) > 2 and a[2])), plain(x, *a, **k))[1],
    )
    engine._fsdp = FSDPConfig(param_offload=True, optimizer_offload=True)
    engine._host_resident = False
    engine.offload()
    assert waits == ([CPU] if room > 2**20 else [])
    engine.onload()
    assert calls and set(calls) == {room > 2**20} and len(waits) <= 2
