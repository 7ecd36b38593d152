"""`valor serve`: a real client, several sessions at once, and records whose log-probs a training forward confirms."""

import asyncio
import json
import os
import signal
import threading
from itertools import chain
from pathlib import Path

import openai
import pytest
import torch
from openai import OpenAI
from openai_agent import play

from forked import VALOR
from valor.agents.episode import Episode
from valor.cli import main as valor
from valor.config import ModelConfig
from valor.lab import commands, serve
from valor.models.load import load_policy
from valor.rollout.base import SamplingParams
from valor.rollout.native.engine import NativeEngine

pytestmark = pytest.mark.slow

KEY = os.environ["HOME"]  # any variable that the server's process has as well
SETTINGS = [
    "data.max_prompt_length=64",
    "data.max_response_length=64",
    "actor_rollout_ref.rollout.max_model_len=150",
    "actor_rollout_ref.rollout.agent.max_concurrent_episodes=3",
    "trainer.device=cpu",
    "trainer.num_threads=1",
    *(f"actor_rollout_ref.{key}=float32" for key in ("rollout.dtype", "actor.fsdp_config.dtype")),
]


@pytest.fixture
def address(tiny, forks, tmp_path):
    """Of a server that records; in the end it is asked to stop, and does."""
    log = tmp_path / "log"
    options = ["--port", 0, "--record", tmp_path / "records", "--api-key-env", "HOME"]
    process = forks.start(VALOR, "serve", tiny["model"], *options, *SETTINGS, log=log)
    while not log.exists() or "/v1: " not in log.read_text():
        assert process.poll() is None, log.read_text()
    yield log.read_text().rpartition("/v1: ")[0].rpartition("\n")[2]
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0, log.read_text()


def records(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / "records").glob("*.jsonl")}


def test_agents_are_served_and_their_episodes_recorded(address, tiny, tmp_path):
    row = {"messages": [{"role": "user", "content": "12+34="}]}
    names = ("one", "two")
    players = [threading.Thread(target=play, args=(f"{address}/sessions/{name}/v1", KEY, row)) for name in names]
    for player in players:
        player.start()
    with OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        messages = [*row["messages"]]
        for _ in range(2):
            said = client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
            messages += [said.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
        for player in players:
            player.join()
        for _ in range(3):
            client.chat.completions.create(model="policy", messages=row["messages"], max_tokens=4)
        found = records(tmp_path)
        assert sorted(len(one["turns"]) for one in found.values()) == [1, 1, 1, 2, 4, 4]
        for name in names:
            assert found[name]["messages"] == row["messages"]
            assert found[name]["turns"][-1]["prompt_ids"] is not None  # its history is rewritten
        assert found["one"]["key"] != found["two"]["key"]  # other random numbers for the same prompt
        again = client.with_options(base_url=f"{address}/sessions/one/v1")
        with pytest.raises(openai.ConflictError, match="a record of session one already"):  # three came after it
            again.chat.completions.create(model="policy", messages=row["messages"])
        with pytest.raises(openai.AuthenticationError, match="the key is missing or wrong"):
            client.with_options(api_key="another").chat.completions.create(model="policy", messages=row["messages"])
        with pytest.raises(openai.BadRequestError, match="context_length_exceeded"):
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1" * 200}])
        assert [model.id for model in client.models.list()] == ["policy"]
    model = load_policy(ModelConfig(path=str(tiny["model"])))
    for record in found.values():
        assert all(check(model, turns) <= 1e-4 for turns in rows(record))


def test_what_sessions_ask_at_once_is_generated_at_once(tiny, monkeypatch):
    together, decode = [], NativeEngine._decode_segment

    def watched(self, cache, rows, longest):
        together.append(len(rows))
        decode(self, cache, rows, longest)

    async def play(context, task, runner, host):
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        said = await asyncio.gather(*(runner.generate([5, 6], params, (0, 0, number, 0)) for number in range(5)))
        assert all(len(one.token_ids) == 30 for one in said)
        return Episode((), (), "stop")

    monkeypatch.setattr(NativeEngine, "_decode_segment", watched)
    serve.beside_engine(commands._config(str(tiny["model"]), SETTINGS, "serve", {}), play)
    assert max(together) == 3  # max_concurrent_episodes


def rows(record):
    """The turns of each row, the first with the row's prompt."""
    first, *more = record["turns"]
    found = [[{**first, "prompt_ids": record["prompt_ids"]}]]
    for turn in more:
        found.append([turn]) if turn["prompt_ids"] is not None else found[-1].append(turn)
    return found


def check(model, turns) -> float:
    """The largest distance of a row's recorded log-probs from a forward of the whole row."""
    prompt = turns[0]["prompt_ids"]
    pieces = [(turn["observation_ids"], turn["token_ids"], turn["log_probs"]) for turn in turns]
    response = [*chain.from_iterable([*told, *said] for told, said, _ in pieces)]
    own = torch.tensor([*chain.from_iterable([0] * len(told) + [1] * len(said) for told, said, _ in pieces)])
    sampled = torch.tensor([*chain.from_iterable(log_probs for *_, log_probs in pieces)])
    with torch.no_grad():
        out = model.hf(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float((out.gather(1, torch.tensor(response)[:, None])[:, 0][own == 1] - sampled).abs().max())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in"),
        (["algorithm.gamma=1"], "algorithm.gamma=1: valor serve reads actor_rollout_ref.*, data.*, trainer.*"),
        (["--dry-run"], "no --dry-run"),
        (["trainer.n_gpus_per_node=2", "trainer.device=cpu"], "trainer.controller=local runs one process"),
        (["--port", "99999"], "cannot listen"),
        (["--port", "0", "--record", "/dev/null"], "'/dev/null': File exists"),
        (["--port", "0", "actor_rollout_ref.rollout.multi_turn.format=hermess", *SETTINGS], "did you mean hermes?"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments, words, tiny, capsys):
    assert valor(["serve", str(tiny["model"]), *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
