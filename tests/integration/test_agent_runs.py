"""Whole runs whose policy has several turns: every way to say what it may do, and tools that misbehave."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import agent_tools
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from runs import assert_same_run, read_metrics
from talking_model import make_talking_model
from transformers import AutoTokenizer

from valor.agents.runner import EpisodeRunner
from valor.collector.collector import Collector
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

ROLLOUT = "actor_rollout_ref.rollout"
MULTI = f"{ROLLOUT}.multi_turn"
AGENT = f"{ROLLOUT}.agent"
TOOLS = agent_tools.__file__


@pytest.fixture(scope="session")
def talking(tmp_path_factory):
    return make_talking_model(tmp_path_factory.mktemp("talking") / "model")


@pytest.fixture(scope="session")
def agents(overrides, talking):
    """The command line of two steps in which the policy has turns."""

    def make(run_dir, *more):
        lengths = ["data.max_prompt_length=64", "data.max_response_length=96"]
        steps = ["trainer.total_training_steps=2", "data.train_batch_size=4", "data.val_max_samples=4"]
        return overrides(run_dir, f"actor_rollout_ref.model.path={talking}", *lengths, *steps, *more)

    return make


def multi_turn(*more):
    return [f"{MULTI}.enable=true", f"{MULTI}.max_assistant_turns=4", f"{MULTI}.format=any_text", *more]


class Recorded:
    """The episodes that were played, call by call of `EpisodeRunner.run`, and the batches that were trained on."""

    def __init__(self, monkeypatch):
        self.played, self.batches = [], []
        play, next_batch = EpisodeRunner.run, Collector.next_batch

        def recording_play(*args):
            self.played.append(play(*args))
            return self.played[-1]

        def recording_batch(*args):
            batch, metrics = next_batch(*args)
            self.batches.append(batch)
            return batch, metrics

        monkeypatch.setattr(EpisodeRunner, "run", recording_play)
        monkeypatch.setattr(Collector, "next_batch", recording_batch)

    @property
    def trained(self):
        """The episodes of the batches, by their keys."""
        episodes = {episode.key: episode for played in self.played for episode in played}
        return [[episodes[tuple(key)] for key in batch["episode_key"].tolist()] for batch in self.batches]


@pytest.fixture
def recorded(monkeypatch):
    return Recorded(monkeypatch)


def rows_of(episode):
    """The rows of an episode, turn by turn: prompt, and (token, turn, log-prob, reward) of all that follows."""
    rows = []
    for number, turn in enumerate(episode.turns, start=1):
        if number == 1 or turn.prompt_ids is not None:
            rows.append((list(episode.prompt_ids if number == 1 else turn.prompt_ids), []))
        assert turn.prompt_ids is None or not turn.observation_ids
        rewards = [0.0] * (len(turn.token_ids) - 1) + [turn.reward]
        rows[-1][1].extend((token, 0, 0.0, 0.0) for token in turn.observation_ids)
        own = zip(turn.token_ids, turn.log_probs, rewards, strict=True)
        rows[-1][1].extend((token, number, log_prob, reward) for token, log_prob, reward in own)
    return rows


def assert_rows_are_the_turns(recorded):
    """Prompts, tokens, masks, turns and log-probs of every batch, derived again from what was said and told."""
    for batch, episodes in zip(recorded.batches, recorded.trained, strict=True):
        seen = dict.fromkeys(episode.key for episode in episodes)
        expected = [row for key in seen for row in rows_of(next(e for e in episodes if e.key == key))]
        assert len(expected) == len(batch)
        for i, (prompt, following) in enumerate(expected):
            assert batch["prompts"][i, : batch["prompt_lengths"][i]].tolist() == prompt
            tokens, turns, log_probs, rewards = zip(*following, strict=True)
            length = int(batch["response_lengths"][i])
            assert batch["responses"][i].tolist() == [*tokens, *[0] * (batch["responses"].shape[1] - length)]
            assert batch["turn_ids"][i, :length].tolist() == list(turns)
            assert batch["response_mask"][i].tolist() == [float(turn > 0) for turn in batch["turn_ids"][i].tolist()]
            torch.testing.assert_close(batch["rollout_log_probs"][i, :length], torch.tensor(log_probs))
            torch.testing.assert_close(batch["turn_rewards"][i, :length], torch.tensor(rewards))
            assert not batch["turn_ids"][i, length:].any() and not batch["rollout_log_probs"][i, length:].any()


def assert_trained(run_dir, steps=2):
    rows = read_metrics(run_dir)[1:]
    assert len(rows) == steps
    for row in rows:
        assert row["episode/turns/mean"] > 1 and row["episode/failed"] == 0
        assert row["training/rollout_log_probs_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
    return rows


def test_an_environment_and_functions(agents, recorded, tmp_path, talking):
    decode = AutoTokenizer.from_pretrained(talking).decode
    tools = multi_turn(f"{AGENT}.environment={TOOLS}:World", f"{MULTI}.function_tool_path={TOOLS}")
    assert main(agents(tmp_path / "run", *tools)) == 0
    rows = assert_trained(tmp_path / "run")
    assert_rows_are_the_turns(recorded)
    episodes = [episode for played in recorded.played for episode in played]
    calls = [call for episode in episodes for call in episode.info["calls"]]
    assert {call["name"] for call in calls} == {"look", "letters"} and all(call["error"] is None for call in calls)
    for episode in episodes:  # the environment was its own
        looks = [call["text"] for call in episode.info["calls"] if call["name"] == "look"]
        assert [text.split()[0] for text in looks] == [str(i + 1) for i in range(len(looks))]
        assert episode.outcome == len(looks) % 2
        assert decode(episode.prompt_ids).endswith("go valor/arithmetic<|assistant|>")
    assert all(row["episode/tool_calls"] > 0 and row["episode/tool_errors"] == 0 for row in rows)


def test_tools_that_misbehave(agents, recorded, tmp_path, talking):
    tools = [f"{AGENT}.environment={TOOLS}:BadWorld", f"{MULTI}.tool_timeout=0.3", f"{MULTI}.format=bad_text"]
    lengths = ["data.max_response_length=320", f"{MULTI}.max_tool_response_length=40", "data.train_batch_size=8"]
    assert main(agents(tmp_path / "run", *multi_turn(*tools), *lengths)) == 0
    rows = assert_trained(tmp_path / "run")
    assert_rows_are_the_turns(recorded)
    for kind in ("malformed", "unknown", "exception", "timeout"):
        assert any(row.get(f"episode/tool_errors/{kind}", 0) > 0 for row in rows), kind
    tokenizer = AutoTokenizer.from_pretrained(talking)
    special = set(tokenizer.all_special_ids)
    role = tokenizer.convert_tokens_to_ids(["<|tool|>", "<|assistant|>", "<|end|>"])
    texts = set()
    for episode in (episode for played in recorded.played for episode in played):
        by_turn = {call["turn"]: call for call in episode.info["calls"]}
        for number, turn in enumerate(episode.turns[1:], start=1):
            texts.add(text := by_turn[number]["text"])
            assert len(text) <= 40 + len("...(truncated)...") or text.startswith("Error")
            if turn.prompt_ids is None:
                assert [token for token in turn.observation_ids if token in special] == role[:2]
                assert text in tokenizer.decode(turn.observation_ids)
    assert agent_tools.CONTROL[:20] in "".join(texts)
    assert any("(truncated)" in text for text in texts)


ONE_PROMPT = ["data.train_batch_size=1", f"{ROLLOUT}.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
ONE_PROMPT += ["critic.ppo_mini_batch_size=1", "trainer.val_before_train=false", "trainer.test_freq=0"]
PROGRAM = str(Path(__file__).with_name("openai_agent.py"))


def gateway(*more):
    agent = f"{ROLLOUT}.agent"
    return [
        f"{agent}.default_agent_loop=gateway_agent",
        f"{MULTI}.format=any_text",
        *(f"{agent}.gateway.{one}" for one in more),
    ]


def test_programs_with_a_client_of_their_own(agents, recorded, tmp_path, monkeypatch):
    """As a function and as a command: the same episodes, whatever proxy the environment names."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    for name, how in (("function", f"{PROGRAM}:play"), ("command", f"'{sys.executable} {PROGRAM}'")):
        more = ["trainer.total_training_steps=1", *ONE_PROMPT] if name == "command" else []
        assert main(agents(tmp_path / name, *gateway(f"{name}={how}"), *more)) == 0
    rows = assert_trained(tmp_path / "function")
    assert_rows_are_the_turns(recorded)
    assert all(row["episode/turns/mean"] == 4 and row["episode/rows"] >= 2 for row in rows)
    by_function, by_command = ({one.key: one for one in recorded.trained[i]} for i in (0, 2))
    assert len(by_command) == 2
    for key, episode in by_command.items():
        assert [turn.token_ids for turn in episode.turns] == [turn.token_ids for turn in by_function[key].turns]
        assert episode.outcome == by_function[key].outcome


def test_a_program_that_hangs_is_one_failed_episode(agents, tmp_path):
    # A slow first request may fail too, in the validation before the first step.
    more = ["trainer.total_training_steps=1", "reward.max_error_ratio=1", f"{ROLLOUT}.agent.deterministic=true"]
    assert main(agents(tmp_path / "run", *gateway(f"function={PROGRAM}:hangs", "timeout=1.5"), *more)) == 0
    assert read_metrics(tmp_path / "run")[1]["episode/failed"] == 0.5
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples" / "step_1.jsonl").read_text().splitlines()]
    errors = [sample["episode"]["error"] for sample in samples if sample["finish_reason"] == "abort"]
    assert errors and all("the function gave no answer within 1.5 s" in error for error in errors)


def test_tools_and_loops_of_verl(agents, recorded, tmp_path, tiny):
    """Rows that name a tool's arguments or a loop, beside the loop that is registered in a file."""
    here = Path(__file__).parent
    table = pq.read_table(tiny["train"]).slice(0, 16).to_pylist()
    for i, row in enumerate(table):
        row["extra_info"] = {**row["extra_info"], "tools_kwargs": {"echo": {"create_kwargs": {"word": f"word{i}"}}}}
        row["agent_name"] = ("tool_agent", "twice", "told_more")[i % 3]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    schema = {"type": "function", "function": {"name": "echo", "description": "", "parameters": parameters}}
    target = f"{here / 'verl_agent.py'}:"
    tools = {"tools": [{"class_name": f"{target}Echo", "config": {"type": "native"}, "tool_schema": schema}]}
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump(tools))
    loops = [{"name": "twice", "_target_": f"{target}Twice", "told": "why?"}]
    (tmp_path / "loops.yaml").write_text(yaml.safe_dump(loops))
    keys = [f"{MULTI}.tool_config_path={tmp_path / 'tools.yaml'}", f"{MULTI}.function_tool_path={TOOLS}"]
    keys += [f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}", "data.train_batch_size=6"]
    run = agents(tmp_path / "run", *multi_turn(*keys), f"data.train_files={tmp_path / 'rows.parquet'}")
    assert main(run) == 0
    assert_trained(tmp_path / "run")
    assert_rows_are_the_turns(recorded)
    names = [name for batch in recorded.batches for name in (one["agent_name"] for one in batch.objects["extra_info"])]
    assert {"tool_agent", "twice", "told_more"} == set(names)
    for batch, episodes in zip(recorded.batches, recorded.trained, strict=True):
        for info, episode in zip(batch.objects["extra_info"], episodes, strict=True):
            if info["agent_name"] != "tool_agent":
                assert len(episode.turns) == 2 and episode.outcome is not None
                continue
            word = info["tools_kwargs"]["echo"]["create_kwargs"]["word"]
            echoes = [call for call in episode.info["calls"] if call["name"] == "echo"]
            assert all((call["text"], call["reward"]) == (word, 0.25) for call in echoes)
            assert sum(turn.reward for turn in episode.turns) == 0.25 * len(echoes)
            assert episode.info["tool_reward"] == 1.0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "words.jsonl"
    words = [f"{a}{b}" for a in "abc" for b in "abc"]
    path.write_text("".join(json.dumps({"contents": f'"{word}"\n{word} <|end|>'}) + "\n" for word in words))
    return path


def test_search_in_this_process_and_by_a_server(agents, recorded, tmp_path, corpus):
    """The same run either way."""
    command = [sys.executable, "-m", "valor", "retrieve", str(corpus), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split(": ")[0]
            places = {
                "local": ["retriever.url=null", f"retriever.corpus_path={corpus}"],
                "server": [f"retriever.url={url}"],
            }
            for name, place in places.items():
                search = ["do_search=true", "max_turns=2", "data.max_start_length=32", "data.max_obs_length=80"]
                lengths = ["data.max_prompt_length=350", "data.max_response_length=24", "retriever.topk=1"]
                lengths += [f"{ROLLOUT}.agent.deterministic=true"]  # what runs together decides about the last bits
                lengths += [f"{ROLLOUT}.n=6"]  # this policy searches now and then
                assert main(agents(tmp_path / name, *search, *lengths, *place)) == 0
        finally:
            server.send_signal(signal.SIGINT)
    rows, other = assert_trained(tmp_path / "local"), assert_trained(tmp_path / "server")
    assert [without_clock(row) for row in rows] == [without_clock(row) for row in other]
    assert_rows_are_the_turns(recorded)
    assert sum(row["episode/tool_calls"] for row in rows) > 0 and all(row["episode/tool_errors"] == 0 for row in rows)
    episodes = [episode for played in recorded.played for episode in played]
    assert {episode.finish_reason for episode in episodes} >= {"stop"}
    assert any("<|end|>" in call["text"] for episode in episodes for call in episode.info["calls"])
    assert any(episode.info["invalid_actions"] for episode in episodes)


def without_clock(row):
    return {name: value for name, value in row.items() if name != "episode/tool_seconds"}


def by_program(folder):
    """The arguments of a run whose episodes are played by a program, which is in this file."""
    program = folder / "program.py"
    program.write_text(Path(PROGRAM).read_text())
    return program, gateway(f"function={program}:play")


def by_loop_of_verl(folder):
    """Those of one with a loop in verl's shape."""
    program = folder / "loop.py"
    program.write_text(Path(PROGRAM).with_name("verl_agent.py").read_text().partition('@register("told_more")')[0])
    (folder / "loops.yaml").write_text(yaml.safe_dump([{"name": "mine", "_target_": f"{program}:Twice"}]))
    agent = f"{ROLLOUT}.agent"
    return program, [f"{agent}.agent_loop_config_path={folder / 'loops.yaml'}", f"{agent}.default_agent_loop=mine"]


@pytest.mark.parametrize("played", [by_program, by_loop_of_verl])
def test_a_run_is_replayed_without_its_program(agents, tmp_path, played):
    program, keys = played(tmp_path)
    keys = [*keys, f"{ROLLOUT}.agent.deterministic=true"]
    assert main(agents(tmp_path / "first", *keys, f"trainer.episode_data_dir={tmp_path / 'kept'}")) == 0
    assert_trained(tmp_path / "first")
    program.unlink()
    assert main(agents(tmp_path / "second", *keys, f"{ROLLOUT}.agent.replay_dir={tmp_path / 'kept'}")) == 0
    assert_same_run(tmp_path / "first", tmp_path / "second")
