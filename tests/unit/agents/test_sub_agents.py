"""A tool that is an episode of the same policy: what is read and said, in which rows, and what each turn is worth."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from valor.agents.chat import Chat
from valor.agents.env_loop import EnvLoop
from valor.agents.episode import Episode, episode_rows
from valor.agents.loops import Limits, LoopContext, Task
from valor.config import load
from valor.errors import UserError
from valor.lab.arithmetic import make_tokenizer
from valor.rollout.base import Output, SamplingParams, Span

MULTI = "actor_rollout_ref.rollout.multi_turn"
FILES = {
    "tools.yaml": "tools:\n  - class_name: sub_agent\n    config: {max_turns: MOST, system: S, reward: REWARD}\n",
    "judge.py": "def judge(task, answer):\n    return 0.5 if (task, answer) == ('find', 'found') else 0.0\n",
    "functions.py": '''
from valor.agents import ToolResult, function_tool

@function_tool
def look(where: str) -> str:
    """Look.

    Args:
        where: a place
    """
    return ToolResult(f"{where} seen", reward=0.25)
''',
}
FIRST = "<|user|>Go.<|assistant|>"
LOOK = '<tool_call>{"name": "look", "arguments": {"where": "here"}}</tool_call>'
DELEGATE = '<tool_call>{"name": "delegate", "arguments": {"task": "find"}}</tool_call>'


def play(
    tmp_path: Path, *texts: str, most: int = 3, limits: tuple[int, int] = (900, 2000)
) -> tuple[Episode, list[str]]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace("REWARD", f"{tmp_path}/judge.py:judge").replace("MOST", str(most)))
    keys = {
        "enable": "true",
        "tool_config_path": tmp_path / "tools.yaml",
        "function_tool_path": tmp_path / "functions.py",
        "max_parallel_calls": 2,
        "max_assistant_turns": 3,
    }
    config = load([f"{MULTI}.{key}={value}" for key, value in keys.items()]).config
    loop, prompts = EnvLoop(LoopContext(config, Chat(make_tokenizer()), Limits(900, 2000))), list[list[int]]()

    async def generate(prompt_ids: Sequence[int], params: SamplingParams, seed: Any) -> Output:
        assert seed == ((0, 0, 0) if not prompts else (0, 0, 0, len(prompts)))
        ids = [*loop.chat.ids(texts[len(prompts)]), loop.chat.tokenizer.eos_token_id]
        prompts.append(list(prompt_ids))
        return Output("", ids, [-float(len(prompts))] * len(ids), "stop", (Span(len(ids), 0),))

    row = {"messages": [{"role": "user", "content": "Go."}], "extra_info": {}, "ground_truth": None, "uid": "0:1"}
    task = Task((0, 0, 0), loop.chat.ids(FIRST), SamplingParams(max_tokens=900), row)
    episode = asyncio.run(loop.run(task, generate))
    # The rows that are trained on are what the policy read and said, token for token.
    batch, said = episode_rows([episode]), list[list[int]]()
    for r in range(len(batch)):
        ids = batch["prompts"][r, : batch["prompt_lengths"][r]].tolist()
        numbers = batch["turn_ids"][r, : batch["response_lengths"][r]].tolist()
        for i, token in enumerate(batch["responses"][r, : batch["response_lengths"][r]].tolist()):
            if numbers[i] and (not i or numbers[i - 1] != numbers[i]):
                said.append(list(ids))
            ids.append(token)
    assert said == prompts
    return episode, [loop.chat.decode(ids) for ids in prompts]


def test_a_sub_agent_reads_its_task_alone_and_the_episode_goes_on(tmp_path: Path) -> None:
    episode, prompts = play(tmp_path, DELEGATE, LOOK, "found", "done")
    assert [prompt.startswith("<|system|>S<|user|>find") for prompt in prompts] == [False, True, True, False]
    assert prompts[2].endswith("here seen<|assistant|>") and "delegate" not in prompts[1]
    assert prompts[3] == prompts[0] + DELEGATE + "<|end|><|tool|>found<|assistant|>"
    assert (episode.finish_reason, [*map(len, episode.rows)]) == ("stop", [1, 2, 1])
    # Of the call of `look` its turn; of the sub-agent's own reward its last turn.
    assert [turn.reward for turn in episode.turns] == [0.0, 0.25, 0.5, 0.0]
    assert [(call["turn"], call["name"], call["error"]) for call in episode.info["calls"]] == [
        (2, "look", None),
        (1, "delegate", None),
    ]
    assert episode.info["sub_agents"] == [{"first": 2, "last": 3}]
    assert {number: episode.info["said"][number] for number in "123"} == {"1": "", "2": "", "3": ""}


def test_two_at_once_play_one_after_the_other(tmp_path: Path) -> None:
    episode, prompts = play(tmp_path, DELEGATE + DELEGATE, "found", "lost", "done")
    assert prompts[3].endswith("<|tool|>found<|tool|>lost<|assistant|>")
    assert [turn.reward for turn in episode.turns] == [0.0, 0.5, 0.0, 0.0]
    assert episode.info["sub_agents"] == [{"first": 2, "last": 2}, {"first": 3, "last": 3}]


def test_limits_of_turns_are_its_own(tmp_path: Path) -> None:
    episode, _ = play(tmp_path, DELEGATE, LOOK, LOOK, "more", "done", most=2)
    calls = [(call["name"], call["error"]) for call in episode.info["calls"]]
    # Its second turn was the last: the call in it is not done, and its text is the answer.
    assert calls == [("look", None), ("delegate", "failed")]
    assert (len(episode.turns), episode.finish_reason) == (4, "stop")


def test_a_sub_agent_has_no_sub_agent(tmp_path: Path) -> None:
    episode, prompts = play(tmp_path, DELEGATE, DELEGATE, "found", "done")
    assert "unknown tool 'delegate'" in prompts[2] and len(episode.info["sub_agents"]) == 1


def test_settings_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tools.yaml: tools\[0\]: sub_agent: max_turns=0 must be at least 1"):
        play(tmp_path, most=0)
