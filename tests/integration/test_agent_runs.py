"""Whole runs whose policy has several turns: every way to say what it may do, and tools that misbehave."""

import sys
from pathlib import Path

import agent_tools
import pytest
import torch
from runs import read_metrics
from talking_model import make_talking_model
from transformers import AutoTokenizer

from valor.agents.agents import Agents
from valor.collector.collector import Collector
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

ROLLOUT = "actor_rollout_ref.rollout"
MULTI = f"{ROLLOUT}.multi_turn"
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
    """The episodes that were played, call by call of `Agents.play`, and the batches that were trained on."""

    def __init__(self, monkeypatch):
        self.played, self.batches = [], []
        play, next_batch = Agents.play, Collector.next_batch

        def recording_play(*args):
            self.played.append(play(*args))
            return self.played[-1]

        def recording_batch(*args):
            batch, metrics = next_batch(*args)
            self.batches.append(batch)
            return batch, metrics

        monkeypatch.setattr(Agents, "play", recording_play)
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
    tools = multi_turn(f"{MULTI}.environment={TOOLS}:World", f"{MULTI}.function_tool_path={TOOLS}")
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
    tools = [f"{MULTI}.environment={TOOLS}:BadWorld", f"{MULTI}.tool_timeout=0.3", f"{MULTI}.format=bad_text"]
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


def test_programs_with_a_client_of_their_own(agents, recorded, tmp_path):
    """As a function and as a command: the same episodes."""
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
    more = ["trainer.total_training_steps=1", "reward.max_error_ratio=0.5", f"{ROLLOUT}.agent.deterministic=true"]
    assert main(agents(tmp_path / "run", *gateway(f"function={PROGRAM}:hangs", "timeout=1.5"), *more)) == 0
    assert read_metrics(tmp_path / "run")[1]["episode/failed"] == 0.5
