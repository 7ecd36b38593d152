"""Muon: hidden matrices as torch's own Muon, all else as AdamW, and back from a checkpoint to the bit."""

import pytest
import torch
from tiny_engine import loss_fn, ragged_batch, tiny_engine, tiny_policy, weights
from torch import nn
from transformers import RobertaConfig, RobertaForCausalLM

from valor.engines.optim import build_optimizer
from valor.errors import UserError
from valor.models.rows import ROW_FIELDS

pytestmark = pytest.mark.usefixtures("alone")

TOKENS = 27.0
BATCH = ragged_batch()


def update(engine) -> None:
    engine.forward_backward(BATCH, loss_fn(TOKENS), temperature=0.8)
    engine.optimizer_step()


def test_updates_equal_torch_on_a_plain_module():
    engine, policy = tiny_engine(optimizer="Muon", clip_grad=None), tiny_policy()
    hidden = {n: p for n, p in policy.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n}
    others = [p for n, p in policy.named_parameters() if n not in hidden]
    assert len(hidden) == 2 * 7
    muon = torch.optim.Muon([*hidden.values()], lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=1e-2, weight_decay=0.01)
    for _ in range(3):
        update(engine)
        out = policy({name: BATCH[name] for name in ROW_FIELDS}, temperature=0.8)
        loss_fn(TOKENS)(out, BATCH)[0].backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in weights(engine).items():
        expected = dict(policy.named_parameters())[name].data
        torch.testing.assert_close(value, expected, rtol=0, atol=2e-3 if name in hidden else 2e-4, msg=name)


def test_matrices_of_tokens_and_outputs_are_adamws():
    module = tiny_policy(tie_word_embeddings=False)
    optimizer = build_optimizer(module, tiny_engine(optimizer="Muon").optim)
    names = {id(p): name for name, p in module.named_parameters()}
    groups = [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]
    assert {"hf.lm_head.weight", "hf.model.embed_tokens.weight", "hf.model.norm.weight"} <= groups[1]
    assert groups[0] | groups[1] == set(names.values()) and not groups[0] & groups[1]
    assert all("proj" in name for name in groups[0])


def test_the_head_is_known_by_what_the_model_says_and_not_by_its_name():
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8, "num_hidden_layers": 1}
    module = RobertaForCausalLM(RobertaConfig(vocab_size=16, is_decoder=True, tie_word_embeddings=False, **sizes))
    muon, adamw = build_optimizer(module, tiny_engine(optimizer="Muon").optim).param_groups
    assert module.lm_head.decoder.weight in {*adamw["params"]} and module.lm_head.dense.weight in {*muon["params"]}


def test_a_checkpoint_continues_to_the_bit(tmp_path):
    engine, again = tiny_engine(optimizer="Muon"), tiny_engine(1, optimizer="Muon")
    update(engine)
    engine.save(tmp_path)
    again.load(tmp_path)
    for each in (engine, again):
        update(each)
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(engine).items())
    with pytest.raises(UserError, match=r"holds the state of Muon, not of AdamW"):
        tiny_engine().load(tmp_path)


def test_a_module_without_hidden_matrices_is_adamws_alone():
    module = nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3))
    optimizer = build_optimizer(module, tiny_engine(optimizer="Muon").optim)
    assert len(optimizer.param_groups) == 1
