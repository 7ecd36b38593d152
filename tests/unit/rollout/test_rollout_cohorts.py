"""The native engine with models that only their own cache can decode: hybrids, state-space models, learnt biases."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from valor.rollout.base import Abort, Output, Request, SamplingParams
from valor.rollout.native.cohorts import has_cache
from valor.rollout.native.engine import NativeEngine

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
STATE = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61, "eos_token_id": None, "pad_token_id": 0}
FAMILIES = {
    "qwen3_5_text": {**COMMON, **LINEAR, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {
        **COMMON,
        **LINEAR,
        **{"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]},
    },
    "lfm2": {**COMMON, "layer_types": ["conv", "full_attention"], "block_dim": 32},
    "granitemoehybrid": {
        **COMMON,
        **MAMBA,
        **{"layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1},
    },
    "mamba": {**STATE, "state_size": 8},
    "falcon": {**COMMON, "alibi": True},
    "rwkv": {**STATE, "attention_hidden_size": 32, "context_length": 64},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **FAMILIES[request.param])
    hf = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in hf.parameters():  # random models hardly tell tokens apart
            parameter.mul_(1.5)
    return hf


def requests(tokens: int, **more) -> list[Request]:
    """Samples of four prompts of three lengths, which end at different times."""
    prompts = ([5, 9, 23, 40, 11], [7, 8, 9, 10, 12], [3], [4, 30, 2, 6, 17, 18, 50])
    return [
        Request(f"{i}-{j}", prompt, SamplingParams(max_tokens=tokens - 3 * j, **more), (i, j))
        for i, prompt in enumerate(prompts)
        for j in range(2)
    ]


def training_log_probs(hf: PreTrainedModel, request: Request, output: Output) -> torch.Tensor:
    """Of the sampled tokens, by one pass over the row alone."""
    ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
    with torch.no_grad():
        log_probs = hf(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    start = len(request.prompt_ids)
    return log_probs[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]


def test_samples_have_the_log_probs_of_training(model):
    engine, asked = NativeEngine(model, eos_token_ids=[]), requests(12)
    outputs = engine.generate(asked)
    for request, output in zip(asked, outputs, strict=True):
        assert output.finish_reason == "length" and len(output.token_ids) == request.params.max_tokens
        expected = training_log_probs(model, request, output)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-5)
    assert len({tuple(output.token_ids[:9]) for output in outputs}) > 4


def test_greedy_tokens_are_those_of_a_pass_over_all_tokens(model):
    asked = requests(10, temperature=0.0)
    for request, output in zip(asked, NativeEngine(model, eos_token_ids=[]).generate(asked), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits[0].argmax(-1)[len(request.prompt_ids) - 1 : -1]
        assert output.token_ids == expected.tolist()


def test_a_sample_does_not_depend_on_what_is_beside_it(model):
    asked = requests(10)
    together = NativeEngine(model, eos_token_ids=[]).generate(asked)
    few = NativeEngine(model, eos_token_ids=[], max_num_seqs=3).generate(asked)
    alone = [NativeEngine(model, eos_token_ids=[]).generate([request])[0] for request in asked]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone] == [one.token_ids for one in few]


def test_rows_end_at_stop_tokens_and_go_on_from_what_they_have(model):
    asked = requests(12)
    free = NativeEngine(model, eos_token_ids=[]).generate(asked)
    end = free[0].token_ids[4]
    for output, whole in zip(NativeEngine(model, eos_token_ids=[end]).generate(asked), free, strict=True):
        ends = whole.token_ids.index(end) + 1 if end in whole.token_ids else len(whole.token_ids)
        assert output.token_ids == whole.token_ids[:ends]
    begun = replace(free[1], token_ids=free[1].token_ids[:3], log_probs=free[1].log_probs[:3], spans=())
    again = NativeEngine(model, eos_token_ids=[]).generate([replace(asked[1], so_far=begun)])[0]
    assert again.token_ids == free[1].token_ids


class Interrupted:
    """Two requests of one prompt and one of another length; after some steps one of each is aborted."""

    everywhere, max_requests, max_tokens = True, 3, 40

    def __init__(self, receive) -> None:
        params = SamplingParams(max_tokens=20)
        self.requests = [
            Request(name, prompt, params, (0,), on_finish=receive)
            for name, prompt in (("a", [5, 6, 7]), ("b", [5, 6, 7]), ("c", [5, 6]))
        ]
        self.polls = 0

    def poll(self, *, wait):
        self.polls += 1
        if self.polls == 1:
            return self.requests
        if self.polls == 8:
            return [Abort("a"), Abort("c")]
        return [] if self.polls < 12 else None


def test_aborted_requests_give_what_they_have(model):
    outputs: dict[str, Output] = {}
    engine = NativeEngine(model, eos_token_ids=[])
    engine.serve(Interrupted(lambda output: outputs.__setitem__(output.request_id, output)))
    assert {name: output.finish_reason for name, output in outputs.items()} == {
        "a": "abort",
        "b": "length",
        "c": "abort",
    }
    assert 0 < len(outputs["a"].token_ids) < 20 and outputs["c"].token_ids == [] and len(outputs["b"].token_ids) == 20


def test_which_caches_work(model):
    assert has_cache(model) == (model.config.model_type != "rwkv")
