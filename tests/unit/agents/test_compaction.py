"""Rows that are cut: what the policy reads and writes, where the rows end, and what its tokens are worth."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from phase_runs import after, made
from valor.agents.chat import Chat
from valor.agents.env_loop import EnvLoop
from valor.agents.episode import Episode, episode_metrics, episode_rows
from valor.agents.loops import AgentLoop, Limits, LoopContext, Task
from valor.agents.record import as_json, episode_records, recorded_episode
from valor.config import load
from valor.config.loading import inert_settings
from valor.data.batch import Batch
from valor.errors import UserError
from valor.lab.arithmetic import make_tokenizer
from valor.report.samples import sample_groups
from valor.rollout.base import Output, SamplingParams, Span
from valor.trainer.phases.advantages import Advantages

ROLLOUT = "actor_rollout_ref.rollout"
COMPACTION = f"{ROLLOUT}.agent.compaction"
WORLD = """
from valor.agents import Env, Step

class World(Env):
    def step(self, text):
        return Step(f"you said {text}<|end|>", 0.5 if text == "half" else 0.0, text == "win")

    def score(self):
        return 2.0
"""
TOOLS = '''
from valor.agents import function_tool, register_format
from valor.agents.formats import Parsed, ToolCall

@function_tool
def echo(text: str) -> str:
    """Say it again.

    Args:
        text: What.
    """
    return f"you said {text}<|end|>"

@register_format("all_but_win")
def all_but_win(text, schemas):
    return Parsed([] if text == "win" else [ToolCall("echo", {"text": text})], text)
'''
MESSAGES = [{"role": "user", "content": "Go."}]
ROW = {"messages": MESSAGES, "ground_truth": None, "data_source": "d", "extra_info": {}, "uid": "0:1"}
START = "<|user|>Go.<|assistant|>"
TOLD = "<|end|><|user|>you said {}<|end|><|assistant|>"
ASKED = "<|end|><|user|>Sum up.<|assistant|>"


@pytest.fixture
def loop_of(tmp_path: Path):
    """A loop that cuts rows of 80 tokens: a turn needs 10 beside the 11 of the request and the 8 of a summary."""
    (tmp_path / "world.py").write_text(WORLD)
    (tmp_path / "tools.py").write_text(TOOLS)
    kinds = {
        "world": [f"{ROLLOUT}.agent.environment={tmp_path}/world.py:World"],
        "tools": [f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.function_tool_path={tmp_path}/tools.py"],
    }
    kinds["tools"].append(f"{ROLLOUT}.multi_turn.format=all_but_win")

    def make(kind: str = "world", *more: str, tokenizer: Any = None, limits: tuple[int, int] = (80, 1000)) -> AgentLoop:
        options = [
            "enable=true",
            "turn_length=10",
            "summary_length=8",
            "request='Sum up.'",
            "summary='Notes {summary}'",
        ]
        config = load([*kinds[kind], *(f"{COMPACTION}.{option}" for option in options), *more]).config
        return EnvLoop(LoopContext(config, Chat(tokenizer or make_tokenizer()), Limits(*limits)))

    return make


@dataclass
class Played:
    """An episode; of each turn the text and the size of what the policy read, and how many tokens it could say."""

    episode: Episode
    prompts: list[str]
    sizes: list[int]
    limits: list[int]


def play(loop: AgentLoop, *texts: str, aborts: str | None = None) -> Played:
    """The episode in which the policy says these texts."""
    prompts: list[str] = []
    sizes: list[int] = []
    limits: list[int] = []

    async def generate(prompt_ids: Sequence[int], params: SamplingParams, seed: Any) -> Output:
        text = texts[len(prompts)]
        prompts.append(loop.chat.decode(prompt_ids))
        sizes.append(len(prompt_ids))
        limits.append(params.max_tokens)
        ids = [*loop.chat.ids(text), loop.chat.tokenizer.eos_token_id]
        reason = "abort" if text == aborts else "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        return Output("", ids, [-1.0 / len(prompts)] * len(ids), reason, (Span(len(ids), 0),))

    task = Task((0, 0, 0), loop.chat.ids("Go."), SamplingParams(max_tokens=200), ROW)
    return Played(asyncio.run(loop.run(task, generate)), prompts, sizes, limits)


TEXTS = ("hello", "half", "a<|end|>b", "again", "half", "123456789", "win")


@pytest.mark.parametrize("kind", ["world", "tools"])
def test_an_episode_goes_on_from_its_summary(loop_of, kind: str) -> None:
    """What did not fit is in the next row, word by word; control tokens in a summary are characters there."""
    played = play(loop_of(kind), *TEXTS)
    episode, size = played.episode, played.sizes[0]
    told = TOLD if kind == "world" else TOLD.replace("user", "tool")
    second, third = (
        f"<|user|>Go.\nNotes {notes}\nyou said half<|end|><|assistant|>" for notes in ("a<|end|>b", "12345678")
    )
    assert played.prompts == [
        START,
        START + "hello" + told.format("hello"),
        START + "hello" + told.format("hello") + "half" + ASKED,
        second,
        second + "again" + told.format("again"),
        second + "again" + told.format("again") + "half" + ASKED,
        third,
    ]
    assert [turn.prompt_ids is not None for turn in episode.turns] == [False, False, False, True, False, False, True]
    # A turn leaves 19 tokens free, for the request and the summary, which has 8 of them.
    assert [played.limits[i] for i in (0, 2, 3, 5, 6)] == [61, 8, 61, 8, 61]
    assert played.limits[1] == 80 - (played.sizes[1] - size) - 19 >= 10
    assert [len(episode.turns[i].token_ids) for i in (2, 5)] == [4, 8]
    assert episode.info["compactions"] == [
        {"turn": i, "tokens": played.sizes[i - 1] + len(episode.turns[i - 1].token_ids) - played.sizes[i]}
        for i in (3, 6)
    ]
    assert loop_of().chat.tokenizer.eos_token_id not in episode.turns[3].prompt_ids
    assert (episode.finish_reason, len(episode.rows)) == ("stop", 3)
    if kind == "world":
        assert [turn.reward for turn in episode.turns] == [0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0] and episode.outcome == 2.0
    else:
        assert [call["turn"] for call in episode.info["calls"]] == [1, 2, 4, 5]


def test_without_compaction_the_episode_ends_at_the_limit(loop_of) -> None:
    episode = play(loop_of("world", f"{COMPACTION}.enable=false"), *TEXTS[:2], "a" * 90).episode
    assert (episode.finish_reason, len(episode.rows), "compactions" in episode.info) == ("length", 1, False)


def test_summaries_are_no_turns_of_the_limit(loop_of) -> None:
    played = play(loop_of("world", f"{ROLLOUT}.multi_turn.max_assistant_turns=4"), *TEXTS)
    assert (played.episode.finish_reason, len(played.episode.turns)) == ("turns", 5)


@pytest.mark.parametrize(
    ("more", "limits", "texts", "aborts", "end", "turns", "cuts"),
    [
        # The last row has no further summary: its turns have all the room, and one that fills it ends the episode.
        ([f"{COMPACTION}.max_compactions=1"], (80, 1000), (*TEXTS[:4], "9" * 90), None, "length", 5, 1),
        # What the new row begins with leaves too little for a turn and a summary.
        ([], (80, 58), ("hello", "note"), None, "length", 2, 0),
        ([], (80, 1000), (*TEXTS[:2], "x"), "x", "abort", 3, 0),
        # A turn that runs into what is left free for a summary ends the episode, as at any limit.
        ([], (80, 1000), ("9" * 90,), None, "length", 1, 0),
    ],
)
def test_ends(loop_of, more, limits, texts, aborts, end: str, turns: int, cuts: int) -> None:
    loop = loop_of("world", *more, limits=limits)
    episode = play(loop, *texts, aborts=aborts).episode
    assert (episode.finish_reason, len(episode.turns)) == (end, turns)
    assert len(episode.info["compactions"]) == cuts
    assert all(len(turn.observation_ids) + len(turn.token_ids) <= 80 for turn in episode.turns)


def test_thoughts_are_not_part_of_a_summary_and_templates_may_drop_them(loop_of) -> None:
    """Where the template rewrites history at the request, the request begins a row, and the next row another."""
    tokenizer = make_tokenizer()
    rewritten = "m.content.split('</think>')[-1] if not loop.last and m.role == 'assistant' else m.content"
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ " + rewritten + " }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    loop = loop_of("world", f"{COMPACTION}.summary_length=14", tokenizer=tokenizer, limits=(80, 100))
    played = play(loop, "a</think>half", "b</think>half", "c</think>d", "win")
    asked = START + "half" + TOLD.format("a</think>half") + "half" + ASKED
    assert played.prompts[2:] == [asked, "<|user|>Go.\nNotes d\nyou said b</think>half<|end|><|assistant|>"]
    assert len(played.episode.rows) == 4 and [cut["turn"] for cut in played.episode.info["compactions"]] == [3]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            f"{COMPACTION}.turn_length=70",
            r"compaction needs 89 tokens of a row: turn_length=70, 11 for .* has 80 after",
        ),
        (f"{COMPACTION}.summary=Notes", r"compaction.summary has no {summary}"),
    ],
)
def test_settings_that_cannot_work(loop_of, more: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        loop_of("world", more)


def test_without_a_loop_that_cuts_rows_the_keys_are_named(tmp_path: Path) -> None:
    settings = load([f"{COMPACTION}.enable=true"])
    assert inert_settings(settings.config, settings.explicit_keys) == {
        f"{COMPACTION}.enable": "no effect with multi_turn.enable=false"
    }


def rows_of(loop: AgentLoop) -> tuple[list[Episode], Batch]:
    """Two episodes of three rows, one of a single row and one that is cut off after a summary; with values."""
    episodes = [
        play(loop, *TEXTS).episode,
        play(loop, "half", "win").episode,
        play(loop, "half", "hello", "notes", "9" * 90).episode,
        play(loop, *TEXTS[:2], "notes", "half", "hello", "note", "win").episode,
    ]
    batch = episode_rows(episodes)
    batch["values"] = torch.randn(batch["responses"].shape, generator=torch.Generator().manual_seed(0))
    batch["token_level_scores"] = batch["turn_rewards"] + 0.0
    ends = {number: row for row, number in enumerate(batch["episode"].tolist())}
    for row in ends.values():
        batch["token_level_scores"][row, int(batch["response_lengths"][row]) - 1] += 2.0
    batch["token_level_rewards"] = batch["token_level_scores"]
    batch["bootstrap_values"] = torch.linspace(-1, 1, len(batch))
    batch.objects["uid"] = [str(number) for number in batch["episode"].tolist()]
    return episodes, batch


@pytest.mark.parametrize("bootstrap", [False, True])
def test_advantages_run_over_the_cut(loop_of, bootstrap: bool) -> None:
    """By hand: delta_t = r_t + gamma V_{t+1} - V_t, where t + 1 is the policy's next token, in whichever row."""
    episodes, batch = rows_of(loop_of())
    gamma, lam = 0.9, 0.8
    settings = {
        "gamma": gamma,
        "lam": lam,
        "adv_whitening": "none",
        "truncated_responses": "bootstrap" if bootstrap else "end",
    }
    out, _ = after(made(Advantages, settings), batch)
    for number, episode in enumerate(episodes):
        at = [
            (row, t)
            for row in (batch["episode"] == number).nonzero().flatten().tolist()
            for t in batch["response_mask"][row].nonzero().flatten().tolist()
        ]
        assert len(at) == sum(len(turn.token_ids) for turn in episode.turns)
        cut_off = bootstrap and episode.finish_reason in ("length", "turns")
        value, advantage = (float(batch["bootstrap_values"][at[-1][0]]) if cut_off else 0.0), 0.0
        for row, t in reversed(at):
            present = float(batch["values"][row, t])
            advantage = float(batch["token_level_rewards"][row, t]) + gamma * value - present + gamma * lam * advantage
            value = present
            assert float(out["advantages"][row, t]) == pytest.approx(advantage, abs=1e-5)
            assert float(out["returns"][row, t]) == pytest.approx(advantage + present, abs=1e-5)
    rows = [int(count) for count in batch["episode"].bincount()]
    assert rows == [3, 1, 2, 3] and [episode.finish_reason for episode in episodes].count("length") == 1


def test_records_and_metrics(loop_of) -> None:
    loop = loop_of()
    episodes, _ = rows_of(loop)
    batch = episode_rows(episodes)
    prompts = Batch({"episode_key": torch.zeros(4, 3).long()}, {"messages": [MESSAGES] * 4})
    records = [json.loads(json.dumps(as_json(record))) for record in episode_records(prompts, batch, loop.chat)]
    again = episode_rows([recorded_episode(record) for record in records])
    assert again.objects == batch.objects
    assert all(torch.equal(column, again[name]) for name, column in batch.tensors.items())
    metrics, cuts = episode_metrics(batch), [cut for episode in episodes for cut in episode.info["compactions"]]
    assert metrics["episode/compactions"] == 5 / 4 and metrics["episode/rows"] == 9 / 4
    assert metrics["episode/compacted_tokens"] == sum(cut["tokens"] for cut in cuts) / 4
    plain = play(loop_of("world", f"{COMPACTION}.enable=false"), "win").episode
    assert "episode/compactions" not in episode_metrics(episode_rows([plain]))


def test_the_report_shows_the_cut() -> None:
    """Turns 1 to 3, the second a summary; then a row by compaction and one by the chat template."""
    record = {
        "prompt": "Go.",
        "tokens": [*"abcdef"],
        "mask": [1, 0, 1, 1, 1, 1],
        "turns": [1, 0, 2, 3, 4, 4],
        "reward": 1.0,
        "episode": {
            "calls": [],
            "compactions": [{"turn": 2, "tokens": 47}],
            "turn_rewards": [0.0, 0.0, 0.5, 0.0],
            "rows": [{"at": 3, "prompt": "Go. Notes c"}, {"at": 4, "prompt": "Go. Notes c, rewritten"}],
        },
    }
    (group,) = sample_groups([{"step": 1, "records": [record]}])
    parts = group["cards"][0]["parts"]
    assert [part["title"].split(",")[-1] for part in parts if not part["told"]] == [
        " turn 1",
        " its summary",
        " turn 3 · reward 0.500",
        " turn 4",
    ]
    assert [(part["prompt"], part["rewritten"]) for part in parts if part["prompt"]] == [
        ("Go. Notes c", "Cut here, 47 tokens shorter: the policy goes on from its summary"),
        ("Go. Notes c, rewritten", "The chat template has rewritten what came before"),
    ]
