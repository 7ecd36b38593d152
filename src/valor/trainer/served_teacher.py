"""Teachers behind OpenAI-compatible servers (vLLM, SGLang), which give the log-probs of the tokens they are sent."""

import json
import math
from contextlib import closing
from typing import Any

import httpx2
import torch
from torch import Tensor

from valor.config.distillation import TeacherConfig
from valor.data.batch import Batch, unpadded
from valor.errors import TrainingStopped, UserError
from valor.http_client import Server, ask, describe

_KEY_ENV = "OPENAI_API_KEY"
_CONCURRENT, _ATTEMPTS, _SECONDS = 64, 5, 600.0  # requests; of each; for each attempt
_PROBE = "The sum of 12 and 30 is 42, isn't it?"
_SAME = 0.1  # nats by which log-probs of the same tokens may differ from request to request


def served_log_probs(teacher: TeacherConfig, rows: Batch) -> Tensor:
    """[B, T] log-probs that the teacher at `teacher.url` gives the rows' responses, at temperature 1; 0 behind them.

    TrainingStopped: it does not answer, or not with log-probs.
    """
    assert teacher.url is not None
    prompts, responses = unpadded(rows, "prompt"), unpadded(rows, "response")
    out = torch.zeros(rows["responses"].shape)
    with closing(Server(teacher.url, api_key_env=_KEY_ENV, max_concurrent=_CONCURRENT)) as server:
        texts = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
        try:
            name = _served_name(teacher)
            replies = [server.submit(_scored(server, name, ids)) for ids in texts]
            for row, reply in enumerate(replies):
                out[row, : len(responses[row])] = torch.tensor(reply.result()[len(prompts[row]) : len(texts[row])])
        except (RuntimeError, TimeoutError, ValueError, UserError) as error:  # the last one: it has gone
            raise TrainingStopped(
                f"the teacher at {teacher.url} failed: {error}: start it again, and the same command goes on from the "
                "last checkpoint"
            ) from error
    return out


def check_served(name: str, teacher: TeacherConfig, tokenizer: Any, longest: int) -> None:
    """UserError: nobody answers at the teacher's address, it gives no log-probs, its tokens are not `tokenizer`'s, or
    it does not read a row of `longest` tokens.

    The server reads a text once as text and once as the tokens of `tokenizer`: it must find both equally likely.
    """
    assert teacher.url is not None
    key = f"distillation.teacher_models.{name}"
    ids = tokenizer(_PROBE)["input_ids"]
    with closing(Server(teacher.url, api_key_env=_KEY_ENV, max_concurrent=1)) as server:
        model = _served_name(teacher, key)
        try:
            text_log_probs, token_log_probs = (
                server.submit(_scored(server, model, prompt)).result() for prompt in (_PROBE, ids)
            )
        except (RuntimeError, TimeoutError, ValueError) as error:
            raise UserError(f"{key}.url={teacher.url}: {error}") from None
        try:
            server.submit(_scored(server, model, (ids * longest)[:longest])).result()
        except (RuntimeError, TimeoutError, ValueError) as error:
            raise UserError(
                f"{key}.url={teacher.url}: it does not score a row of data.max_prompt_length + data.max_response_length"
                f" = {longest} tokens: {error}: serve it with a context of {longest + 1}, or set one of these lower"
            ) from None
    pairs = zip(text_log_probs[:-1], token_log_probs[:-1], strict=False)  # the last one's token is sampled
    if len(text_log_probs) != len(token_log_probs) or any(abs(a - b) > _SAME for a, b in pairs):
        raise UserError(
            f"{key}.url={teacher.url}: its model has another tokenizer than the policy: serve one that has the "
            "policy's, or train on its answers by valor sft"
        )


def _served_name(teacher: TeacherConfig, key: str = "distillation.teacher_models.<name>") -> str:
    """`model_path`, or the name of the only model there is. UserError: no answer, or several models."""
    if teacher.model_path is not None:
        return teacher.model_path
    try:
        reply = ask("GET", f"{teacher.url}/models", api_key_env=_KEY_ENV, timeout=30.0)
        names = [model["id"] for model in reply.json()["data"]]
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise UserError(f"no server at {key}.url={teacher.url}: {describe(error)}") from None
    except (ValueError, LookupError, TypeError):
        raise UserError(
            f"{key}.url={teacher.url}: {teacher.url}/models has no list of models (status {reply.status_code}): the "
            f"address ends in /v1, and a key is in the environment variable {_KEY_ENV}"
        ) from None
    if len(names) != 1:
        raise UserError(f"{key}.model_path is not set: say which of the served models it is: {', '.join(names)}")
    return names[0]


async def _scored(server: Server, model: str, prompt: str | list[int]) -> list[float]:
    """Log-probs of the prompt's tokens, nan of the first, and of a new one. ValueError: the reply has none."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 1.0}
    reply = await server.post(f"{server.url}/completions", json.dumps(body), seconds=_SECONDS, attempts=_ATTEMPTS)
    answer = reply.json()
    try:
        numbers = [math.nan, *map(float, answer["choices"][0]["logprobs"]["token_logprobs"][1:])]
    except (LookupError, TypeError, ValueError):
        raise ValueError("it gives no log-probs of a prompt (echo with logprobs)") from None
    if isinstance(prompt, list) and len(numbers) < len(prompt):
        raise ValueError(f"it gives {len(numbers)} log-probs of a prompt of {len(prompt)} tokens")
    if any(not math.isfinite(number) or number > 1e-3 for number in numbers[1:]):
        raise ValueError("its log-probs of a prompt are not finite numbers below 0")
    return numbers
