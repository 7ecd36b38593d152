"""Sequences that are aborted, and go on from what they have, with the same weights or others."""

from collections.abc import Sequence

import pytest
import torch
from rollout_models import random_model
from transformers import PreTrainedModel

from interruptions import aborted, assert_log_probs, resumed, served, teacher_forced
from valor.models.policy import PolicyModel
from valor.rollout.base import Abort, Output, Request, SamplingParams, Span
from valor.rollout.native.engine import NativeCopy, NativeEngine

TOKENS = 90


def requests(count: int = 3) -> list[Request]:
    params = SamplingParams(max_tokens=TOKENS)
    return [Request(str(i), [5, 9, 23, 40 + i % 2], params, (i,)) for i in range(count)]


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_an_aborted_sequence_goes_on_as_if_nothing_had_been(qwen: PreTrainedModel, max_num_seqs: int) -> None:
    engine = NativeEngine(qwen, eos_token_ids=[], max_num_seqs=max_num_seqs)
    whole = engine.generate(requests())
    cut = served(engine, requests(), aborted(requests()))
    assert {one.finish_reason for one in cut} == {"abort"}
    lengths = [len(one.token_ids) for one in cut]
    assert 0 < max(lengths) < TOKENS
    assert min(lengths) == 0 or max_num_seqs > 1  # some had not started
    for after, before in zip(engine.generate(resumed(requests(), cut)), whole, strict=True):
        assert after.token_ids == before.token_ids and after.finish_reason == before.finish_reason
        assert after.spans == before.spans
        torch.testing.assert_close(after.log_probs, before.log_probs, rtol=0, atol=1e-5)


def test_only_the_named_one_ends(qwen: PreTrainedModel) -> None:
    engine = NativeEngine(qwen, eos_token_ids=[])
    whole = engine.generate(requests())
    first, *others = served(engine, requests(), lambda: [Abort("0"), Abort("not there")])
    assert first.finish_reason == "abort" and first.token_ids == whole[0].token_ids[: len(first.token_ids)]
    assert [one.token_ids for one in others] == [one.token_ids for one in whole[1:]]


def copies() -> tuple[NativeCopy, PreTrainedModel, PreTrainedModel]:
    """An engine with the weights of version 1, and models with those of versions 1 and 2."""
    old, new = random_model("qwen2"), random_model("qwen2")
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    engine = NativeCopy(PolicyModel(random_model("qwen2")), eos_token_ids=[], max_num_seqs=8)
    engine.sync_weights(old.named_parameters(), version=1)
    return engine, old, new


def test_an_error_in_the_middle_leaves_nothing_of_the_layout_behind() -> None:
    """Weights that come later would be packed at once, and the model compute with that copy outside of generation."""
    model = random_model("gpt-neox")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = NativeCopy(PolicyModel(model), eos_token_ids=[], max_num_seqs=8)
    engine.sync_weights(weights.items(), version=1)

    def fails() -> list[Request]:
        raise RuntimeError("its server is gone")

    with pytest.raises(RuntimeError, match="its server"):
        served(engine, requests(), fails)
    engine.sync_weights(weights.items(), version=2)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_a_copy_that_was_sent_no_weights_does_not_generate_with_those_of_the_files() -> None:
    engine = NativeCopy(PolicyModel(random_model("qwen2")), eos_token_ids=[], max_num_seqs=8)
    with pytest.raises(ValueError, match="no weights"):
        engine.generate(requests())


def test_a_sequence_that_goes_on_with_other_weights_has_their_log_probs() -> None:
    engine, old, new = copies()
    cut = served(engine, requests(), aborted(requests()))
    engine.sync_weights(new.named_parameters(), version=2)
    for request, output, had in zip(requests(), engine.generate(resumed(requests(), cut)), cut, strict=True):
        n = len(had.token_ids)
        assert output.spans == (Span(n, 1), Span(TOKENS - n, 2)) and output.token_ids[:n] == had.token_ids
        expected = torch.cat([teacher_forced(old, request, output)[:n], teacher_forced(new, request, output)[n:]])
        assert_log_probs(output, expected, 1e-5)


class TakenBack:
    """When all is done it brings a request and its end at once, then another request."""

    max_requests, max_tokens, everywhere = 8, 100, False

    def __init__(self, first: Request, second: Request, third: Request) -> None:
        self._brings = [[first], [], [], [second], [Abort(second.request_id)], [], [third], []]

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        return self._brings.pop(0) if self._brings else None


def test_requests_that_are_taken_back_at_once_do_not_end_the_generation(qwen: PreTrainedModel) -> None:
    outputs: dict[str, Output] = {}
    params = SamplingParams(max_tokens=3)
    asked = [
        Request(name, [5, 9], params, on_finish=lambda output: outputs.update({output.request_id: output}))
        for name in "abc"
    ]
    NativeEngine(qwen, eos_token_ids=[]).serve(TakenBack(*asked))
    assert {name: one.finish_reason for name, one in outputs.items()} == {"a": "length", "b": "abort", "c": "length"}
