"""Runs whose training passes choose the experts that generation chose."""

import pytest
import torch
from runs import assert_same_weights, read_metrics
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from valor.collector.collector import Collector
from valor.config import PPOConfig, load
from valor.errors import UserError
from valor.models.routing import ROUTES
from valor.models.rows import RowReader
from valor.trainer.checks import check
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

R3 = "actor_rollout_ref.actor.router_replay.mode=R3"
LOCAL, GRPO = "trainer.controller=local", "algorithm.adv_estimator=grpo"
AHEAD = ["trainer.v1.trainer_mode=separate_async", "trainer.v1.sampler.max_off_policy_threshold=1"]
AHEAD += ["trainer.v1.deterministic=true"]


@pytest.fixture(scope="module")
def mixture(tiny, tmp_path_factory):
    """A mixture of experts in which every update changes the choices of many tokens."""
    folder, tokenizer = tmp_path_factory.mktemp("mixture"), AutoTokenizer.from_pretrained(tiny["model"])
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, **experts, **ends, head_dim=8, intermediate_size=48, vocab_size=len(tokenizer))
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"actor_rollout_ref.model.path={folder}"


@pytest.fixture
def passes(monkeypatch):
    """The routes of each pass of a model, in order; and those of each batch."""
    read, batches, compact, next_batch = [], [], RowReader.compact, Collector.next_batch

    def reading(self, rows):
        out = compact(self, rows)
        if self.routers is not None:
            read.append(out.routes)
        return out

    def collecting(*args):
        out = next_batch(*args)
        batches.append(out[0][ROUTES])
        return out

    monkeypatch.setattr(RowReader, "compact", reading)
    monkeypatch.setattr(Collector, "next_batch", collecting)
    return read, batches


def test_a_synchronous_run_has_no_gap_between_generation_and_training(overrides, mixture, tmp_path, passes):
    assert main(overrides(tmp_path / "run", mixture, GRPO, R3, LOCAL)) == 0
    read, batches = passes
    assert len(read) == 4 * 3 and all(routes is not None for routes in read)  # old log-probs and two updates a step
    for number, batch in enumerate(batches):
        choices = batch.unflatten(1, (-1, 4))
        assert int((choices > 0).all(-1).sum()) == len(read[3 * number]) and bool((choices > 0).any())
    assert all(row["training/rollout_log_probs_diff_max"] <= 1e-5 for row in read_metrics(tmp_path / "run")[1:])


def test_samples_of_older_weights_and_those_of_a_checkpoint_keep_their_experts(overrides, mixture, tmp_path, passes):
    fixed = [mixture, GRPO, R3, LOCAL, *AHEAD, "trainer.save_freq=2"]
    assert main(overrides(tmp_path / "run", *fixed)) == 0
    rows = read_metrics(tmp_path / "run")
    assert [row["off_policy/age/mean"] for row in rows[1:]] == [0, 1, 1, 1]
    assert passes[0] and all(routes is not None for routes in passes[0])
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'run' / 'global_step_2'}"]
    before = [routes.clone() for routes in passes[1][2:]]
    assert main(overrides(tmp_path / "resumed", *fixed, *resumed)) == 0
    assert all(torch.equal(a, b) for a, b in zip(before, passes[1][4:], strict=True))
    assert read_metrics(tmp_path / "resumed") == rows[-2:]
    assert_same_weights(tmp_path / "resumed", tmp_path / "run")


def test_a_dense_model_is_refused_in_one_line(overrides, tmp_path, capsys):
    assert main(overrides(tmp_path / "run", GRPO, R3, LOCAL)) == 2
    assert "has no routers that choose experts by one top-k each: set actor_rollout_ref" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["actor_rollout_ref.actor.router_replay.mode=R2"], "router_replay.mode"),
        (["actor_rollout_ref.rollout.name=vllm"], "rollout.name=vllm does not record which experts it chose"),
        (["actor_rollout_ref.actor.strategy=megatron"], "strategy=megatron routes tokens by itself"),
        (["actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"], "R3 is for single answers"),
    ],
)
def test_what_records_or_replays_no_experts_is_refused(overrides, mixture, tmp_path, more, line):
    with pytest.raises(UserError, match=line):
        load(overrides(tmp_path, mixture, GRPO, R3, *more), PPOConfig, check)
