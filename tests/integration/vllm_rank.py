"""A rank of a vLLM engine that is split over two, of which the first has the source."""

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
    # What ranks share has no name any more that would stay when they are killed.
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/valor-" in line]
    assert shared and all(line.endswith(" (deleted)") for line in shared)
    old = AutoModelForCausalLM.from_pretrained(model).eval()
    policy = PolicyModel(old)
    engine.sync_weights(published_weights(policy, policy.state_dict().items()), version=1)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    work = [Request(f"r{i}", [5, 9, 23 + i, 8], params, (i,)) for i in range(3)]
    late = Request("late", [5, 9, 23, 8], params, (9,))

    if dist.get_rank():
        engine.serve(Elsewhere())
        return
    source = Scripted(work, lambda: [late, Abort("r2")], at=6)
    source.everywhere = False
    engine.serve(source)
    for request in (*work, late):
        output = source.outputs[request.request_id]
        assert len(output.token_ids) > 0 and output.spans == (Span(len(output.token_ids), 1),)
        assert len(output.token_ids) == TOKENS or request.request_id == "r2"
        assert_log_probs(output, teacher_forced(old, request, output), 1e-4)
    assert source.outputs["r2"].finish_reason == "abort"
