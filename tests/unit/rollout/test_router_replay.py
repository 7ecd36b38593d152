"""Experts that were chosen in generation, chosen again in training: log-probs that a changed router leaves alone."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rollout_models import SIZES, architecture
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from valor.agents.episode import Episode, episode_rows
from valor.data.batch import Batch, pad_rows
from valor.engines.base import rows_of
from valor.engines.fsdp.loading import _structure
from valor.errors import UserError
from valor.models.internals import checkpoint_layers
from valor.models.policy import PolicyModel
from valor.models.routing import ROUTES, Routers
from valor.models.rows import Sharing
from valor.rollout.base import Abort, Output, Request, SamplingParams
from valor.rollout.native.engine import NativeEngine

PROMPTS = [[5, 9, 11, 23, 7, 3, 40, 41, 42, 13], [8], [17, 30, 31], [5, 9, 11, 23, 7, 3, 40, 41, 42, 13]]
ROUTERS = "mlp.gate.weight"


def mixture(experts_of_token: int = 2, experts: int = 4) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "num_experts": experts,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "initializer_range": 0.3,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, num_experts_per_tok=experts_of_token)).eval()


def policy(hf, **options) -> PolicyModel:
    model = PolicyModel(hf, **{"packed": True, "shared": True, **options})
    model.replay_experts()
    return model


def requests(max_tokens: int = 12) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [Request(str(i), prompt, params, (i,)) for i, prompt in enumerate(PROMPTS)]


def generated(hf, outputs: list[Output] | None = None) -> Batch:
    """A batch with what the policy, whose experts are recorded, has answered."""
    if outputs is None:
        outputs = NativeEngine(hf, eos_token_ids=[2], records=True).generate(requests())
    rows = episode_rows([Episode.of_one_turn((0, 0, i), output) for i, output in enumerate(outputs)])
    rows["prompts"], rows["prompt_lengths"] = pad_rows(PROMPTS, torch.long)
    return rows


def perturb(hf, how) -> None:
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if name.endswith(ROUTERS):
                how(weight)


def gap(model, rows) -> float:
    with torch.no_grad():
        return float((model(rows)["log_probs"] - rows["rollout_log_probs"]).abs().max())


@pytest.mark.parametrize(("experts", "dtype"), [(4, torch.uint8), (300, torch.int16)])
def test_a_column_has_the_experts_of_every_token_that_a_model_reads(experts, dtype):
    hf = mixture(2, experts)
    model = policy(hf)
    rows = generated(hf)
    assert rows[ROUTES].dtype is dtype and model.routers.choices == 2 * 2
    choices = rows[ROUTES].unflatten(1, (-1, 4))
    for number, (prompt, length) in enumerate(zip(PROMPTS, rows["response_lengths"].tolist(), strict=True)):
        read = len(prompt) + length - 1
        assert bool((choices[number, :read] > 0).all()) and not bool(choices[number, read:].any())
    assert experts / 2 < choices.max() <= experts
    assert gap(model, rows) <= 1e-5


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_log_probs_and_gradients_are_those_of_the_experts_that_generated(packed, checkpointing):
    hf = mixture(1)  # one expert a token, whose weight is 1 whatever the router says
    rows, model = generated(hf), policy(hf, packed=packed)
    assert model.packed is packed and not model.shared
    assert gap(model, rows) <= 1e-5
    model(rows)["log_probs"].sum().backward()
    expected = {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}
    hf.zero_grad(set_to_none=True)
    perturb(hf, torch.nn.init.normal_)
    without = rows.select([name for name in rows.tensors if name != ROUTES])
    assert gap(model, without) > 0.01  # what this router chooses
    if checkpointing:
        checkpoint_layers(hf)
        hf.train()
    assert gap(model, rows) <= 1e-5
    model(rows)["log_probs"].sum().backward()
    for name, grad in expected.items():
        if not name.endswith(ROUTERS):
            torch.testing.assert_close(hf.get_parameter(name).grad, grad, rtol=1e-4, atol=1e-5)


def test_weights_of_experts_are_those_of_the_present_router_and_train_it():
    hf = mixture()
    rows, model = generated(hf), policy(hf)
    perturb(hf, lambda weight: weight.add_(1e-7 * torch.randn_like(weight)))
    assert gap(model, rows) <= 1e-5
    perturb(hf, lambda weight: weight.mul_(2))  # the same experts, weighed in another way
    assert gap(model, rows) > 1e-3
    model(rows)["log_probs"].sum().backward()
    router = hf.model.layers[0].mlp.gate.weight
    slope, step = router.grad.clone(), 1e-3 * torch.nn.functional.normalize(router.grad, dim=None)
    ends = []
    with torch.no_grad():
        for sign in (1, -1):
            router.add_(sign * step if sign > 0 else -2 * step)
            ends.append(float(model(rows)["log_probs"].double().sum()))
    assert (ends[0] - ends[1]) / 2 == pytest.approx(float((slope * step).sum()), rel=0.05)


def test_near_ties_are_broken_as_in_generation():
    hf = mixture()
    perturb(hf, lambda weight: weight[1].copy_(weight[0]))  # two experts that no router tells apart
    rows, model = generated(hf), policy(hf)
    perturb(hf, lambda weight: weight[0].add_(1e-7 * torch.randn(weight[0].shape)))
    assert gap(model, rows) <= 1e-5
    assert gap(model, rows.select([name for name in rows.tensors if name != ROUTES])) > 1e-3


def test_a_sequence_that_was_cut_off_keeps_the_experts_of_its_beginning():
    hf = mixture(1)
    engine = NativeEngine(hf, eos_token_ids=[2], records=True)
    outputs: dict[str, Output] = {}
    asked = [replace(r, on_finish=lambda o: outputs.__setitem__(o.request_id, o)) for r in requests(40)]
    polls = iter([asked, [], [Abort(r.request_id) for r in asked], None])
    engine.serve(SimpleNamespace(max_requests=4, max_tokens=64, everywhere=True, poll=lambda wait: next(polls, None)))
    begun = [outputs[r.request_id] for r in asked]
    assert all(output.finish_reason == "abort" for output in begun)
    parts = [len(output.token_ids) for output in begun]
    whole = engine.generate([replace(r, so_far=output) for r, output in zip(requests(40), begun, strict=True)])
    for one, first, prompt, count in zip(whole, begun, PROMPTS, parts, strict=True):
        assert len(one.routes) == len(prompt) + 40 - 1
        assert 0 < count < 40 and torch.equal(one.routes[: len(prompt) + count - 1], first.routes)
    assert gap(policy(hf), generated(hf, whole)) <= 1e-5


def test_an_engine_gets_them_with_its_micro_batches_and_ranks_divide_them():
    hf = mixture(1)
    rows, model = generated(hf), policy(hf)
    perturb(hf, torch.nn.init.normal_)
    assert gap(model, rows_of(rows, [0, 1, 2, 3]).union(rows.select(["rollout_log_probs"]))) <= 1e-5
    model.sharing = Sharing(multiple=64)  # rows are filled up
    assert gap(model, rows) <= 1e-5
    assert gap(model, Batch.concat([rows.take([2, 1]), rows.take([0])])) <= 1e-5


def test_ranks_that_are_sent_the_model_replay_too():
    sent = pickle.loads(_structure(policy(mixture())))
    routers = sent.hf.routers
    assert sent.routers is routers and not sent.shared
    for number, layer in enumerate(sent.hf.model.layers):
        assert layer.mlp.gate.forward.args == (routers, number, layer.mlp.gate)


def test_a_row_of_which_nothing_is_known_is_routed_freely():
    hf = mixture()
    outputs = NativeEngine(hf, eos_token_ids=[2], records=True).generate(requests())
    outputs[1] = replace(outputs[1], routes=None)
    rows = generated(hf, outputs)
    assert not bool(rows[ROUTES][1].any()) and bool(rows[ROUTES][0].any())
    assert gap(policy(hf), rows) <= 1e-5


def test_another_family():
    torch.manual_seed(0)
    hf = architecture("gpt-oss").eval()  # its weights are a softmax over the chosen ones
    rows, model = generated(hf), policy(hf)
    assert gap(model, rows) <= 1e-5
    assert bool((rows[ROUTES] > 0).any())


def test_a_model_without_such_routers_is_refused():
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"first_k_dense_replace": 0, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}  # chosen after groups
    sizes = SIZES | {"num_key_value_heads": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    in_groups = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **ranks, **experts))
    for hf in (architecture("qwen2"), in_groups):
        with pytest.raises(UserError, match="has no routers that choose experts by one top-k each: set actor_rollout"):
            Routers(hf)
