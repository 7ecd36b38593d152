"""A generative judge: a language model behind an OpenAI-compatible server says what a response is worth."""

from __future__ import annotations

import json
import re
import time
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from valor.errors import UserError
from valor.http_client import Server
from valor.rewards.worker import RewardResult, gather

if TYPE_CHECKING:
    from valor.config.reward import JudgeConfig

_PROMPT = Path(__file__).with_name("judge_prompt.txt")
_FIELD = re.compile(r"\{(prompt|response|transcript|ground_truth)\}")
# A verdict, as it begins a line of a reply.
_DASHES = str.maketrans("\u2212\u2013\u2014", "---")
_MARKS = re.compile(r"[*_`#|\"'~]+|\\boxed(?=\{)|\$")
_LABEL = (
    r"(?:(?:my|the|final|overall|total|numeric|numerical|最终|最后|综合|总体|我的|的|本题)\s*){0,4}"
    r"(?:score|rating|grade|mark|verdict|评分|得分|分数|打分|总分)(?:\s*\([^()\n]{0,30}\))?"
)
_NUMBER = r"([-+]?\s?(?:\d+(?:\.\d+)?|\.\d+))"
_MOST = (
    r"\s*(?:分|points?)?\s*(?:(?:/|out\s+of|of|\(满分)\s*(\d+(?:\.\d+)?)\s*(?:分|points?)?\)?|(%))?\s*(?:分|points?)?"
)
_BETWEEN = r"(?:\s*(?:[:=]|\bis\b|\bof\b|[是为])\s*:?\s*|\s+-\s+|\s+)"
_VERDICT = re.compile(
    rf"[\s>{{(\[\-]*(?:{_LABEL}{_BETWEEN}[\s({{\[]*{_NUMBER}|\[\[\s*{_NUMBER}|\{{\s*{_NUMBER}){_MOST}[\s)}}\]]*",
    re.IGNORECASE,
)
_LABEL_LINE = re.compile(rf"^([ \t]*{_LABEL}[ \t]*:?)[ \t]*\n\s*(?=[-+\[]*\d)", re.IGNORECASE | re.MULTILINE)
_TAG = re.compile(rf"(?:<{_LABEL}>|\[(?:result|{_LABEL})\]\s*:?)\s*|</{_LABEL}>", re.IGNORECASE)
_JSON = re.compile(r"^[ \t`]*(?:json)?[ \t]*(?=\{)", re.MULTILINE)
_ALONE = re.compile(rf"\s*{_NUMBER}{_MOST}\s*\.?\s*")
_COMMENT = re.compile(
    r"$|[.。;!]|,(?!\s*\d)|-\s|\(|(?:because|since|as|due to)\b|因为|由于", re.IGNORECASE
)  # what may follow a verdict on its line
_SENTENCE = re.compile(r"(?<=[.!?。!?;])\s*|[{,]\s*(?=score\b)", re.IGNORECASE)


class Question(NamedTuple):
    """What the judge is asked about. `transcript`: the response with what tools and environments said in it."""

    prompt: str
    response: str
    ground_truth: Any = None
    transcript: str = ""


_PROBE, _PROBE_SECONDS = Question("2 + 2 = ?", "4", "4", "4"), 30.0


class Judge:
    """Asks `concurrency` questions at once; one without a score after all attempts gets `error_score`."""

    def __init__(self, config: JudgeConfig, error_score: float) -> None:
        assert config.url is not None and config.model is not None, "a configuration that enables a judge names both"
        self.config, self.error_score, self.url = config, error_score, config.url.rstrip("/")
        low, high = (f"{bound:g}" for bound in config.score_range)
        default = _PROMPT.read_text(encoding="utf-8").replace("{low}", low).replace("{high}", high)
        self._template = config.prompt_template or default
        self._server = Server(config.url, api_key_env=config.api_key_env, max_concurrent=config.concurrency)

    def check(self) -> None:
        """Before a run: UserError when nobody listens at the address, or the key, or a question, is refused."""
        keys = "reward.reward_model.judge"
        self._server.check(f"{self.url}/models", "judge", f"{keys}.url", f"{keys}.api_key_env")
        with suppress(TimeoutError):  # it is slow, or busy: whoever waits longer sees
            try:
                self._server.submit(self._post(_PROBE, _PROBE_SECONDS, 1)).result()
            except RuntimeError as error:
                raise UserError(
                    f"the judge at {self.url} refuses a question ({error}): see {keys}.url (it ends with the version, "
                    f"such as /v1), {keys}.model={self.config.model} and {keys}.request"
                ) from None

    def score(self, questions: Sequence[Question]) -> list[RewardResult]:
        """One result a question, in order; never raises for what the server does."""
        return gather([self._server.submit(self._judge(question)) for question in questions])

    def close(self) -> None:
        """End the thread that asks."""
        self._server.close()

    async def _judge(self, question: Question) -> RewardResult:
        began, config = time.perf_counter(), self.config
        try:
            for attempts in range(1 + config.retries, 0, -1):
                reply = await self._post(question, config.timeout, attempts)
                try:
                    choice = reply.json()["choices"][0]
                    text, is_cut = (
                        str.strip(choice["message"]["content"] or ""),
                        choice.get("finish_reason") == "length",
                    )
                except Exception:
                    raise RuntimeError(f"no chat completion: {' '.join(reply.text.split())[:200]}") from None
                if not is_cut:
                    return RewardResult(self.read(text), {}, None, time.perf_counter() - began)
            reason = "the reply was cut at its limit: raise max_tokens in reward.reward_model.judge.request"
        except (TimeoutError, RuntimeError) as error:
            reason = str(error)
        return RewardResult(self.error_score, {}, f"judge: {reason}", time.perf_counter() - began)

    async def _post(self, question: Question, seconds: float, attempts: int) -> Any:
        messages = [{"role": "user", "content": self.ask(question)}]
        body = json.dumps({**self.config.request, "model": self.config.model, "messages": messages})
        return await self._server.post(f"{self.url}/chat/completions", body, seconds=seconds, attempts=attempts)

    def ask(self, question: Question) -> str:
        """The text of the request. What stands in prompt or response is never taken for a field of the template."""
        values = question._asdict()
        return _FIELD.sub(lambda field: str(values[field[1]]), self._template)

    def read(self, reply: str) -> float:
        """The score in a reply, its thoughts aside. Raises RuntimeError when it has none, or one out of range."""
        low, high = self.config.score_range
        score = read_verdict(without_thoughts(reply), high)
        if score is None:
            raise RuntimeError(f"no score in the reply: {' '.join(reply.split())[-80:]!r}")
        if not low <= score <= high:
            raise RuntimeError(f"the score {score:g} is outside {low:g} to {high:g}")
        return score


def without_thoughts(reply: str) -> str:
    """What a reply says behind its thoughts; nothing where these never end."""
    return reply.rpartition("</think>")[2].partition("<think>")[0]


def read_verdict(reply: str, highest: float) -> float | None:
    """The score that a reply ends with: "Score: -3", "**Rating:** 7", "评分：7", "[[7]]", "<score>7</score>",
    {"score": 7}, or a number alone; None without one.

    The last line that begins with a verdict counts, else a verdict that is the last sentence. "7/10" and "70%" are
    parts of `highest`.
    """
    text = _MARKS.sub("", unicodedata.normalize("NFKC", _without_json(reply)).translate(_DASHES))
    if alone := _ALONE.fullmatch(text):
        return _value(alone, highest)
    text = _TAG.sub(lambda tag: "\n" if tag[0].startswith("</") else "\nscore: ", text)
    lines = [line.strip() for line in _LABEL_LINE.sub(r"\1 ", text).splitlines() if line.strip()]
    for line in reversed(lines):
        match = _VERDICT.match(line)
        if match and _COMMENT.match(line, match.end()) and not line.endswith("?"):
            last = _last_sentence(line, highest)
            return _value(match, highest) if last is None else last
    return _last_sentence(lines[-1], highest) if lines else None


def _without_json(reply: str) -> str:
    """The reply with a line such as "score: 7" for each JSON object that begins a line and has a score."""
    parts, end = list[str](), 0
    for begin in (match.end() for match in _JSON.finditer(reply)):
        with suppress(ValueError, RecursionError):
            entries, behind = json.JSONDecoder().raw_decode(reply, begin)
            scores = [v for name, v in entries.items() if re.fullmatch(_LABEL, _MARKS.sub("", name), re.IGNORECASE)]
            if scores and begin >= end:
                parts += [reply[end:begin], f"\nscore: {scores[-1]}\n"]
                end = behind
    return "".join([*parts, reply[end:]])


def _last_sentence(line: str, highest: float) -> float | None:
    parts = [part for part in _SENTENCE.split(line) if part.strip(" .。!")]
    match = _VERDICT.fullmatch(parts[-1].strip(" .。!")) if parts else None
    return _value(match, highest) if match else None


def _value(match: re.Match[str], highest: float) -> float:
    *numbers, most, percent = match.groups()
    score = float("".join(next(number for number in numbers if number is not None).split()))
    scale = 100.0 if percent else float(most) if most else highest
    return score if scale == highest or not scale else score * highest / scale
