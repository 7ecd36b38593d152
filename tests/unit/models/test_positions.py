"""Models whose rotary frequencies follow the length of a batch: read up to where they are constant, refused beyond."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from valor.data.batch import text_rows
from valor.data.positions import num_positions
from valor.errors import UserError
from valor.models.policy import PolicyModel
from valor.rollout.base import Request, SamplingParams
from valor.rollout.native.engine import NativeEngine

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
TINY = {"vocab_size": 83, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}


def phi3(original: int = 16) -> Phi3Config:
    rope = LONG | {"original_max_position_embeddings": original}
    return Phi3Config(**TINY, original_max_position_embeddings=original, rope_parameters=rope)


def llama(**rope) -> LlamaConfig:
    return LlamaConfig(**TINY, rope_parameters={"rope_theta": 1e4, **rope})


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (phi3(), 16),
        (phi3(128), 128),
        (llama(rope_type="default"), 128),
        (llama(rope_type="dynamic", factor=4.0), 128),
        (llama(rope_type="dynamic", factor=4.0, original_max_position_embeddings=32), 32),
        (llama(rope_type="linear", factor=4.0), 128),
        (llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=32), 128),
    ],
)
def test_where_a_model_ends(config, positions):
    assert num_positions(config.get_text_config()) == positions


def test_up_to_the_original_length_all_is_exact_and_beyond_it_is_refused():
    torch.manual_seed(0)
    policy = PolicyModel(AutoModelForCausalLM.from_config(phi3(), dtype=torch.float32))
    engine = NativeEngine(policy.hf, eos_token_ids=[], max_num_seqs=2)
    requests = [Request(str(n), [5 + n] * n, SamplingParams(max_tokens=40), (1, 0, n)) for n in (4, 9)]
    for request, out in zip(requests, engine.generate(requests), strict=True):
        assert len(request.prompt_ids) + len(out.token_ids) == 16 and out.finish_reason == "length"
        scored = policy(text_rows([list(request.prompt_ids)], [list(out.token_ids)]).tensors)["log_probs"][0]
        torch.testing.assert_close(scored, torch.tensor(out.log_probs), atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="changes with the batch beyond 16"):
        policy(text_rows([[3] * 4, [3] * 4], [[4] * 6, [4] * 13]).tensors)
    with pytest.raises(UserError, match="the model takes 16 tokens"):
        engine.generate([Request("x", [3] * 16, SamplingParams(max_tokens=2), (1, 0, 0))])
