"""Graders read what the policy says: not its calls, and not what tools or environments say."""

import asyncio
import json
import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from valor.agents.chat import Chat
from valor.agents.env_loop import EnvLoop
from valor.agents.episode import Episode, episode_rows, last_rows, own_words, with_text
from valor.agents.loops import Limits, LoopContext, Task
from valor.agents.record import as_json, episode_records, recorded_episode
from valor.collector.grading import Grading
from valor.config import PPOConfig, load
from valor.data.batch import Batch
from valor.lab.arithmetic import make_tokenizer
from valor.rewards import code
from valor.rewards.custom import CustomFunction
from valor.rewards.functions import RewardFunctions
from valor.rewards.worker import Grading as Worker
from valor.rewards.worker import RewardResult, Sample
from valor.rollout.base import Output, SamplingParams, Span
from valor.user_files import pickled

TOOLS = """
from valor.agents import function_tool

@function_tool
def say(text: str) -> str:
    \"\"\"Say it.

    Args:
        text: What.
    \"\"\"
    return text
"""
ROLES: Any = {}
ENTRY = {"answer": "3", "question": "", "metadata": {"source_dataset": "letter_counting"}}
RIGHT: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "math": ("42", r"\boxed{42}", {}),
    "openai/gsm8k": ("42", "#### 42", {}),
    "openai/gsm8k-flexible": ("42", "It is 42", {}),
    "cais/mmlu": ("B", "Answer: B", {}),
    "nq": (["Paris"], "<answer>Paris</answer>", {}),
    "searchR1_nq": ({"target": ["Paris"]}, "<answer>Paris</answer>", {}),
    "countdown": ({"target": 24, "numbers": [4, 6]}, "4 * 6 = 24", {}),
    "apps": ({"inputs": ["1"], "outputs": ["1"]}, "```python\nprint(1)\n```", {}),
    "reasoning_gym/letter_counting": ("3", "<answer>3</answer>", {"entry": ENTRY}),
    "valor/walk": ('{"leads": [[0]], "gains": [[1.0]], "length": 1}', "a0", {}),
}


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Verdicts are looked at here, not time limits: a busy machine may take long for a program."""
    monkeypatch.setattr(code, "_seconds", 60.0)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> EnvLoop:
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(TOOLS)
    key = "actor_rollout_ref.rollout.multi_turn"
    settings = [f"{key}.enable=true", f"{key}.function_tool_path={path}", f"{key}.max_assistant_turns=3"]
    return EnvLoop(LoopContext(load(settings).config, Chat(make_tokenizer()), Limits(900, 2000)))


def call(text: str) -> str:
    return f'<tool_call>{{"name": "say", "arguments": {json.dumps({"text": text})}}}</tool_call>'


def play(loop: EnvLoop, *texts: str, cut: bool = False) -> Episode:
    said = iter(texts)

    async def generate(prompt_ids: Sequence[int], params: SamplingParams, seed: Any) -> Output:
        ids = [*loop.chat.ids(next(said)), loop.chat.tokenizer.eos_token_id]
        return Output("", ids, [-1.0] * len(ids), "length" if cut else "stop", (Span(len(ids), 0),))

    row = {"messages": [{"role": "user", "content": "Go."}], "extra_info": {}}
    return asyncio.run(loop.run(Task((0, 0, 0), loop.chat.ids("Go."), SamplingParams(max_tokens=900), row), generate))


class Graders:
    """A grader process, here."""

    one_by_one = grades_everything = True

    def __init__(self, custom: CustomFunction | None = None) -> None:
        self.worker: Any = Worker(custom, 0.0)
        self.graded: list[Sample] = []

    def submit(self, sample: Sample) -> Future[RewardResult]:
        self.graded.append(sample)
        future: Future[RewardResult] = Future()
        future.set_result(self.worker.grade(pickle.dumps(sample)))
        return future

    def submit_all(self, samples: Sequence[Sample]) -> list[Future[RewardResult]]:
        return [self.submit(sample) for sample in samples]


def decode(ids: Sequence[Sequence[int]]) -> list[str]:
    return make_tokenizer().batch_decode(ids, skip_special_tokens=True)


def batch_of(episode: Episode, source: str, truth: Any, extra: dict[str, Any]) -> Batch:
    rows = with_text(episode_rows([episode]), decode)
    count = len(rows)
    objects = {"data_source": [source], "ground_truth": [truth], "extra_info": [extra], "messages": [[]]}
    rows.objects |= {name: column * count for name, column in objects.items()}
    rows["episode_key"] = torch.tensor([episode.key] * count)
    return rows


def graded(episode: Episode, source: str, truth: Any, extra: dict[str, Any], custom: Any = None) -> RewardResult:
    """What the episode is worth: graded when it ends, and again with its batch."""
    batch, results = batch_of(episode, source, truth, extra), []
    for early in (True, False):
        graders = Graders(custom)
        inputs: Any = SimpleNamespace(rewards=graders, has_grader=lambda source: True, decode=decode, judge=None)
        grading = Grading(PPOConfig(), inputs, ROLES)
        if early:
            sink = grading.sink(batch)
            assert sink is not None
            sink(episode)
        results += grading.training(batch)[0]
        assert len(graders.graded) == 1
    assert results[0]._replace(seconds=0.0) == results[1]._replace(seconds=0.0)
    return results[0]


@pytest.mark.parametrize("source", RIGHT)
def test_a_call_and_its_result_are_no_answer(loop: EnvLoop, source: str) -> None:
    if source.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
    truth, right, extra = RIGHT[source]
    silent, said = play(loop, f"So:{call(right)}", ""), play(loop, f"So:{call('?')}", right)
    assert right in decode([silent.response_ids])[0]
    assert graded(silent, source, truth, extra).score == 0.0
    assert graded(said, source, truth, extra).score == 1.0
    assert graded(play(loop, right), source, truth, extra).score == 1.0
    assert graded(play(loop, call(right), cut=True), source, truth, extra).score == 0.0
    assert graded(play(loop, *[call(right)] * 3), source, truth, extra).score == 0.0


def test_a_single_answer_is_the_same_sample_as_without_tools(loop: EnvLoop) -> None:
    episode = play(loop, "<think>so</think>4")
    assert episode.turn_texts_by(decode) == ["<think>so</think>4"]
    sample = Sample.of_turns(["a"], "a", "nq", "b", None)
    assert sample == Sample("nq", "a", "b", None)


GRADER = """
def plain(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "read": solution_str}

def whole(data_source, solution_str, ground_truth, extra_info=None, transcript=""):
    return {"score": 1.0, "read": transcript}

def batches(data_sources, solution_strs, ground_truths, extra_infos, transcripts):
    return [{"score": 1.0, "read": text} for text in transcripts]

def steps(data_source, solution_str, ground_truth, extra_info=None):
    first, last = solution_str.index("So"), solution_str.index("9")
    return {"score": 0.0, "step_rewards": [((first, first + 2), 0.25), ((last, last + 1), 0.5)]}

def outside(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.0, "step_rewards": [((0, 99), 0.25)]}
"""


def test_functions_of_the_users_own(loop: EnvLoop, tmp_path: Path) -> None:
    path = tmp_path / "graders.py"
    path.write_text(GRADER)
    episode = play(loop, f"So:{call('17')}", "I say 9")

    def read(name: str, **more: Any) -> Any:
        return graded(episode, "mine", None, {}, CustomFunction(str(path), name, **more)).components["read"]

    assert read("plain") == "So:\nI say 9"
    assert read("whole") == decode([episode.response_ids])[0]
    assert read("whole", kwargs={"transcript": "x"}) == "x"
    worker = Worker(CustomFunction(str(path), "batches", whole_batch=True), 0.0)
    samples = [Sample("s", "a", None), Sample("s", "b", None, None, ["b"], "said b")]
    found: Any = worker.grade(pickle.dumps(samples))
    assert [result.components["read"] for result in found] == ["a", "said b"]


def test_steps_of_the_own_words_lie_on_their_tokens(loop: EnvLoop, tmp_path: Path) -> None:
    path = tmp_path / "graders.py"
    path.write_text(GRADER)
    episode = play(loop, f"So:{call('17')}", "I say 9")
    batch = batch_of(episode, "mine", None, {})
    inputs: Any = SimpleNamespace(
        rewards=Graders(CustomFunction(str(path), "steps")), has_grader=lambda source: True, decode=decode, judge=None
    )
    (result,), columns = Grading(PPOConfig(), inputs, ROLES).training(batch)
    assert result.error is None and result.score == 0.75
    (row,) = columns["step_rewards"].tolist()
    texts = [decode([batch["responses"][0, : i + 1].tolist()])[0] for i in range(len(row))]
    assert [texts[i][-1] for i, reward in enumerate(row) if reward] == ["o", "9"]
    result = graded(episode, "mine", None, {}, CustomFunction(str(path), "steps"))
    assert result.score == 0.75
    inputs.rewards = Graders(CustomFunction(str(path), "outside"))
    config = PPOConfig.model_validate({"reward": {"max_error_ratio": 1.0}})
    (result,), _ = Grading(config, inputs, ROLES).training(batch_of(episode, "mine", None, {}))
    size = len("\n".join(episode.turn_texts_by(decode)))
    assert result.error == f"step_rewards: there are no characters 0 to 99 in a response of {size}"


def test_functions_of_a_session(loop: EnvLoop, tmp_path: Path) -> None:
    def trl(completions: list[str], transcript: list[str]) -> list[float]:
        return [float("17" in text) - ("17" in said) for text, said in zip(transcript, completions, strict=True)]

    def words(completions: list[str]) -> list[float]:
        return [float("17" in said) for said in completions]

    def verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, transcript: str) -> float:
        return float("17" in transcript and "17" not in solution_str)

    path = tmp_path / "functions.pkl"
    path.write_bytes(pickled(RewardFunctions([trl, words, verl]), "reward", "key"))
    result = graded(play(loop, f"So:{call('17')}", "9"), "mine", None, {}, CustomFunction(str(path)))
    assert result.error is None
    assert result.components == {"trl": 1.0, "words": 0.0, "verl": 1.0}
    path.write_bytes(pickled(RewardFunctions([words]), "reward", "key"))
    assert graded(play(loop, f"So:{call('17')}", "9"), "mine", None, {}, CustomFunction(str(path))).score == 0.0


def test_a_judge_reads_them_too_and_a_replay_has_them(loop: EnvLoop) -> None:
    episode = play(loop, f"So:{call('17')}", "9")
    ends = last_rows(batch_of(episode, "mine", None, {}))
    assert own_words(ends) == ["So:\n9"]
    prompts = Batch({"episode_key": ends["episode_key"]}, {"messages": [[]]})
    (record,) = episode_records(prompts, episode_rows([episode]), loop.chat)
    replayed = recorded_episode(as_json(record))
    assert replayed.turn_texts_by(decode) == episode.turn_texts_by(decode) == ["So:", "9"]


def test_rows_that_a_template_has_split_are_read_as_one_episode(loop: EnvLoop) -> None:
    episode = play(loop, f"So:{call('17')}", "9")
    first, second = episode.turns
    split = Episode(
        episode.key,
        (first, type(second)(second.token_ids, second.log_probs, second.spans, prompt_ids=[1, 2])),
        "stop",
        episode.prompt_ids,
        info=episode.info,
    )
    ends = last_rows(batch_of(split, "openai/gsm8k-flexible", "17", {}))
    assert len(ends) == 1 and own_words(ends) == ["So:\n9"]
    assert graded(split, "openai/gsm8k-flexible", "17", {}).score == 0.0
