"""What of a server's answer is believed: each dialect's reply, and the one check of all of them."""

import math

import pytest

from valor.config import RolloutConfig
from valor.rollout.base import SamplingParams, StopTexts
from valor.rollout.server.dialects import Completion, Reply, checked
from valor.rollout.server.fleet import DIALECTS

END, OTHER_END = 2, 3
STOP = StopTexts(("x",), frozenset({20}), lambda ids: "".join("x" if one == 20 else "." for one in ids))


def ask(most=4, stop=None, ends=(END, OTHER_END)):
    return Completion([5, 6], most, SamplingParams(max_tokens=most, stop=stop), 0, [*ends], "name", None)


def reply(ids, reason="stop", log_probs=None):
    return Reply(ids, [-0.1] * len(ids) if log_probs is None else log_probs, reason)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (reply([10, 11, END]), "stop"),
        (reply([10, OTHER_END]), "stop"),
        (reply([END]), "stop"),
        (reply([10, 11, 12, END], "length"), "stop"),  # the last token that it may have is a stop token
        (reply([10, 11, 12, 13], "length"), "length"),
        (reply([10, 11], "abort"), "abort"),
        (reply([10, END], "abort"), "stop"),  # it had ended before
        (reply([10, 11, 12, 13], "abort"), "length"),
        (reply([], "abort"), "abort"),
        (reply([10, END], log_probs=[1e-6, 0.0]), "stop"),
        (reply([10, END], log_probs=[math.nan, -0.1]), "lost"),  # asked for anew
        (reply([10, END], log_probs=[-math.inf, -0.1]), "lost"),
    ],
)
def test_answers_that_are_believed(answer, reason):
    assert checked(answer, ask(), 30) == answer._replace(reason=reason)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (reply([10, 11, 12]), "leaves out the stop token"),
        (reply([]), "leaves out the stop token"),
        (reply([10, END, 11, END]), "tokens behind a stop token"),
        (reply([END, END]), "tokens behind a stop token"),
        (reply([OTHER_END, 10, 11, 12], "length"), "tokens behind a stop token"),
        (reply([OTHER_END, 10], "abort"), "tokens behind a stop token"),
        (reply([10, 11, 12, 13, 14], "length"), "5 tokens where 4 were asked for"),
        (reply([10, 11], "length"), "cut a response of up to 4 tokens at 2"),
        (reply([], "length"), "cut a response of up to 4 tokens at 0"),
        (reply([10, END], log_probs=[0.5, -0.1]), "log-probs above 0"),
        (reply([10, END], log_probs=[-0.1, math.inf]), "log-probs above 0"),
        (reply([10, END], log_probs=[-0.1]), "2 tokens with 1 log-probs"),
        (reply([10, END], log_probs=[-0.1] * 3), "2 tokens with 3 log-probs"),
        (reply([30, END]), r"the token \[30\], which the policy does not have"),
        (reply([-1, END]), "which the policy does not have"),
        (reply([10.0, END]), "which the policy does not have"),
        (reply(["10", END]), "which the policy does not have"),
        (reply([10, END], "content_filter"), "for the reason 'content_filter'"),
        (reply([10, END], ""), "for the reason ''"),
    ],
)
def test_answers_that_nothing_can_be_learnt_from(answer, fault):
    with pytest.raises(ValueError, match=fault):
        checked(answer, ask(), 30)


def test_a_stop_text_ends_a_response_too():
    assert checked(reply([10, 20]), ask(stop=STOP), 30).reason == "stop"
    assert checked(reply([10, 20, 11], "length"), ask(stop=STOP), 30).reason == "length"  # cut where it is complete
    with pytest.raises(ValueError, match="leaves out the stop token"):
        checked(reply([10, 11]), ask(stop=STOP), 30)
    with pytest.raises(ValueError, match="leaves out the stop token"):
        checked(reply([10, 11]), ask(ends=()), 30)


OPENAI = {"token_ids": [10, END], "logprobs": {"token_logprobs": [-0.1, None]}, "finish_reason": "stop"}
SGLANG = {"output_token_logprobs": [[-0.1, 10], [-0.2, END]], "finish_reason": {"type": "stop"}}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        *((name, {"choices": []}) for name in ("server", "trtllm")),
        *((name, {"choices": [OPENAI | {"token_ids": None}]}) for name in ("server", "trtllm")),
        *((name, {"choices": [OPENAI | {"logprobs": None}]}) for name in ("server", "trtllm")),
        *((name, None) for name in ("server", "trtllm", "sglang")),
        ("sglang", {"output_ids": [10, END], "meta_info": SGLANG | {"output_token_logprobs": [[-0.1, 10]]}}),
        ("sglang", {"output_ids": None, "meta_info": SGLANG}),
        ("sglang", {"output_ids": [10, END], "meta_info": {}}),
    ],
)
def test_a_reply_of_another_shape_is_told(name, told):
    with pytest.raises((LookupError, TypeError, ValueError)):
        DIALECTS[name](RolloutConfig(name=name)).read(told)


def test_a_log_prob_that_is_missing_is_no_number():
    told = DIALECTS["server"](RolloutConfig(name="server")).read({"choices": [OPENAI]})
    assert checked(told, ask(), 30).reason == "lost"
