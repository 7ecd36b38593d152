"""A rank of a vLLM engine that is split over two: the first has the source, both give the weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from interruptions import Scripted, assert_log_probs, teacher_forced
from valor.config import ModelConfig, RolloutConfig
from valor.models.export import published_weights
from valor.models.policy import PolicyModel
from valor.rollout.base import Abort, Elsewhere, Request, SamplingParams, Span
from valor.rollout.registry import GENERATION_ENGINES
from valor.rollout.spec import BuildContext

TOKENS = 20


def generate(model: Path) -> None:
    settings = {"max_model_len": 64, "max_num_seqs": 8, "tensor_model_parallel_size": 2}
    config = RolloutConfig(name="vllm", dtype="float32", gpu_memory_utilization=0.05, **settings)
    context = BuildContext(config, ModelConfig(path=str(model)), [1], torch.device("cpu"), None)
    engine = GENERATION_ENGINES["vllm"].build(context)
    old, new = (AutoModelForCausalLM.from_pretrained(model).eval() for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)

    def sync(policy: PolicyModel, version: int) -> None:
        engine.sync_weights(published_weights(policy, policy.state_dict().items()), version=version)

    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    work = [Request(f"r{i}", [5, 9, 23 + i, 8], params, (i,)) for i in range(3)]
    late = Request("late", [5, 9, 23, 8], params, (9,))

    def change() -> Sequence[Request | Abort]:
        sync(PolicyModel(new), 2)
        return [late, Abort("r2")]

    class Follower(Elsewhere):
        def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
            assert wait
            change()
            return None

    sync(PolicyModel(old), 1)
    if dist.get_rank():
        engine.serve(Follower())
        return
    source = Scripted(work, change, at=6)
    source.everywhere = False
    engine.serve(source)
    for request in (*work, late):
        output, exact = source.outputs[request.request_id], {1: old, 2: new}
        if request is late:
            assert output.spans == (Span(TOKENS, 2),)
            assert_log_probs(output, teacher_forced(exact[2], request, output), 1e-4)
            continue
        n = output.spans[0].num_tokens
        rest = () if output.finish_reason == "abort" else (Span(TOKENS - n, 2),)
        assert 0 < n < TOKENS and output.spans == (Span(n, 1), *rest)
        before = teacher_forced(exact[1], request, output)[:n]
        assert_log_probs(replace(output, log_probs=output.log_probs[:n]), before, 1e-4)
    assert source.outputs["r2"].finish_reason == "abort"
