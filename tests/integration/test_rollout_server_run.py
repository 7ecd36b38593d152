"""A vLLM server in processes of its own: weight updates into it, and a whole run with rollout.name=server."""

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from ranks import free_port
from runs import read_metrics
from test_distillation_runs import ALONE, ONE_UPDATE, SIGNAL, make_teacher
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from two_turns import settings

from forked import Forked, Forks
from interruptions import aborted, assert_log_probs, resumed, served, teacher_forced
from valor.config import RolloutConfig
from valor.engines.distributed import init_process_group, leave_process_group
from valor.errors import TrainingStopped, WorkersReplaced
from valor.models.export import published_weights
from valor.models.policy import PolicyModel
from valor.rollout.base import Output, Request, SamplingParams, Span
from valor.rollout.server.engine import ServerEngine
from valor.trainer.main_ppo import main

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROLLOUT = "actor_rollout_ref.rollout"
RESTARTS = max(int(os.environ.get("VALOR_KILLS", "7")) // 10, 1)  # of a server that a run uses
START_SECONDS = 600  # on a machine with a lot else to do
# As docs/rollout.md says, and what makes it small and quick to start.
COMMAND = ["--dtype", "float32", "--logprobs-mode", "processed_logprobs", "--no-enable-chunked-prefill"]
COMMAND += ["--worker-extension-cls", "valor.rollout.server.receiver.WeightReceiver"]
COMMAND += ["--enforce-eager", "--block-size", "32", "--max-model-len", "800", "--kv-cache-memory-bytes", "33554432"]
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
ENVIRONMENT |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
MODULES = ["vllm.entrypoints.openai.api_server", "vllm.v1.engine.async_llm", "vllm.v1.engine.core"]
MODULES += ["vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen2", "valor.rollout.server.receiver"]
# The leader of a process group. On a CPU vLLM would spawn the engine's process, which would import all of it again.
CODE = """
import multiprocessing, os, runpy
os.setsid()
get_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: get_context("fork")
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
"""


@dataclass
class Server:
    """A server with a model of `folder`."""

    folder: Path
    vllm: Forks
    process: Forked
    url: str

    def settings(self, *more: str) -> list[str]:
        """The arguments of a run that uses it."""
        used = [f"actor_rollout_ref.model.path={self.folder}", f"{ROLLOUT}.server.base_url={self.url}"]
        return [*used, f"{ROLLOUT}.name=server", f"{ROLLOUT}.temperature=0.7", *more]


def start(vllm: Forks, folder: Path, port: int) -> Forked:
    arguments = [*COMMAND, "--model", folder, "--host", "127.0.0.1", "--port", port]
    return vllm.start(CODE, *arguments, log=folder / "server.log")


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory) -> Iterator[Server]:
    """One with the tiny model, whose LM head is tied; an untied one's update differs in nothing but vLLM's layers."""
    folder = tmp_path_factory.mktemp("server") / "model"
    shutil.copytree(tiny["model"], folder)
    port = free_port()
    with closing(Forks(*MODULES, **ENVIRONMENT)) as vllm:
        started = Server(folder, vllm, start(vllm, folder, port), f"http://127.0.0.1:{port}/v1")
        try:
            deadline = time.monotonic() + START_SECONDS
            while not answers(started.url):
                ended = started.process.poll() is not None or time.monotonic() > deadline
                assert not ended, (folder / "server.log").read_text()[-3000:]
                time.sleep(0.5)
            yield started
        finally:
            end(started)


def end(started: Server) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(started.process.pid, signal.SIGTERM)
    try:
        started.process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()


def start_again(server: Server) -> None:
    """Kill it, and start another one in its place, once none of its processes holds the port any more."""
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    with suppress(ProcessLookupError):
        while True:
            os.killpg(server.process.pid, 0)
            time.sleep(0.01)
    server.process = start(server.vllm, server.folder, int(server.url.split(":")[-1].removesuffix("/v1")))


def answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/models").status_code == 200
    except httpx2.TransportError:
        return False


def trained(model: PreTrainedModel, seed: int) -> None:
    """What an optimizer step does: every weight moves a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def gap(model: PreTrainedModel, work: list[Request], outputs: list[Output]) -> Tensor:
    """|Δ log p| of all sampled tokens, between the server and a full forward at the request's temperature."""
    gaps = []
    for request, output in zip(work, outputs, strict=True):
        ids, start = torch.tensor([[*request.prompt_ids, *output.token_ids]]), len(request.prompt_ids)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits.float() / (request.params.temperature or 1.0)
        expected = logits.log_softmax(-1)[0, start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        gaps.append((expected - torch.tensor(output.log_probs)).abs())
    return torch.cat(gaps)


@pytest.fixture
def engine(server) -> Iterator[ServerEngine]:
    init_process_group("cpu")
    section = {"base_url": server.url, "model": str(server.folder), "timeout": 120}
    yield ServerEngine(RolloutConfig(name="server", server=section, dtype="float32"), eos_token_ids=[1])
    leave_process_group()
    print((server.folder / "server.log").read_text()[-8000:])  # shown where the test has failed


def sync(engine: ServerEngine, model: PreTrainedModel, version: int, without: str = "") -> None:
    policy = PolicyModel(model)
    weights = published_weights(policy, policy.state_dict().items())
    engine.sync_weights(((name, tensor) for name, tensor in weights if name != without), version=version)


PROMPT = torch.randint(3, 260, (100,), generator=torch.Generator().manual_seed(1)).tolist()
PARAMS = [SamplingParams(max_tokens=12, temperature=temperature) for temperature in (0.7, 1.3, 0.0)]
WORK = [Request(f"r{i}", PROMPT[: 100 - i % 2], PARAMS[i % 3], (7, i)) for i in range(9)]


def test_it_teaches_as_the_same_model_that_is_loaded(server, tiny, overrides, tmp_path):
    """Before any update of it: the log-probs that vLLM gives of prompts are the teacher's."""
    student = make_teacher(tiny["model"], tmp_path / "student", 5)
    runs = []
    for name, of in (("here", f"model_path={server.folder}"), ("served", f"url={server.url}")):
        teach = ["distillation.enabled=true", f"distillation.teacher_models.one.{of}", *SIGNAL, *ALONE, *ONE_UPDATE]
        assert main(overrides(tmp_path / name, f"actor_rollout_ref.model.path={student}", *teach)) == 0
        runs.append(read_metrics(tmp_path / name)[1])
    here, there = runs
    assert here["distillation/reverse_kl"] > 0.01
    for key in ("distillation/reverse_kl", "actor/distillation/loss", "actor/grad_norm"):
        assert there[key] == pytest.approx(here[key], rel=1e-4), key


def test_log_probs_are_the_trainers_after_every_update(server, engine):
    model = AutoModelForCausalLM.from_pretrained(server.folder).eval()
    assert model.config.tie_word_embeddings
    checksums = set()
    for version in range(3):
        trained(model, version)
        sync(engine, model, version)
        checksums.add(engine.weights_checksum)
        # The prompt is in the prefix cache from the round before, with the old weights' keys and values.
        outputs = engine.generate(WORK)
        assert gap(model, WORK, outputs).max() < 1e-4
        trained(model, 100 + version)
        assert gap(model, WORK, outputs).max() > 1e-2  # with the next weights it would have been seen
    assert len(checksums) == 3
    assert [o.token_ids for o in engine.generate(WORK)] == [o.token_ids for o in outputs]


def test_an_update_that_did_not_happen_as_it_should_is_noticed(server, engine, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(server.folder).eval()
    sync(engine, model, 0)
    trained(model, 0)
    dialect = type(engine._dialect)
    body = dialect.body

    def unsalted(self: Any, ask: Any) -> dict[str, Any]:
        return {key: value for key, value in body(self, ask).items() if key != "cache_salt"}

    with monkeypatch.context() as patched:  # cached keys and values of the old weights
        patched.setattr(dialect, "body", unsalted)
        engine.generate(WORK)
        sync(engine, model, 1)
        assert gap(model, WORK, engine.generate(WORK)).max() > 1e-2
    trained(model, 1)
    with pytest.raises(TrainingStopped, match=r"has not taken weights 2: RuntimeError: .*the engine holds"):
        sync(engine, model, 2, without="model.norm.weight")
    sync(engine, model, 3)
    assert gap(model, WORK, engine.generate(WORK)).max() < 1e-4
    other = ServerEngine(engine._config, eos_token_ids=[1])
    sync(other, model, 3)
    with pytest.raises(TrainingStopped, match="no longer holds the weights that this run sent"):
        engine.generate(WORK)


# Prompts that share most of their tokens, and are in the cache.
TOKENS = 700
ENDLESS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
LONG = [replace(one, prompt_ids=one.prompt_ids[:64], params=ENDLESS) for one in WORK]
FIRST = replace(LONG[0], request_id="first", params=SamplingParams(max_tokens=20, ignore_eos=True))


def cut_off(engine: ServerEngine, first: int) -> list[Output]:
    """Sequences from the `first` on are aborted. A busy machine's client may be too late for that: then once more."""
    for _ in range(5):
        outputs = served(engine, [FIRST, *LONG], aborted(LONG[first:]), at="first")
        if "length" not in {one.finish_reason for one in outputs[1 + first :]}:
            break
    return outputs


@pytest.mark.alone  # a busy machine's client is too late five times
def test_an_aborted_sequence_goes_on_from_what_it_has(server, engine):
    model = AutoModelForCausalLM.from_pretrained(server.folder).eval()
    sync(engine, model, 1)
    _, *cut = cut_off(engine, 0)
    lengths = [len(one.token_ids) for one in cut]
    assert {one.finish_reason for one in cut} == {"abort"} and 0 < max(lengths) < TOKENS
    new = deepcopy(model)
    trained(new, 1)
    sync(engine, new, 2)
    outputs = engine.generate(resumed(LONG, cut))
    assert {(one.finish_reason, len(one.token_ids)) for one in outputs} == {("length", TOKENS)}
    for request, output, n in zip(LONG, outputs, lengths, strict=True):
        expected = torch.cat([teacher_forced(model, request, output)[:n], teacher_forced(new, request, output)[n:]])
        assert_log_probs(output, expected, 1e-4)
        assert output.spans == ((Span(n, 1), Span(TOKENS - n, 2)) if n else (Span(TOKENS, 2),))
    _, unaborted, *others = cut_off(engine, 1)
    assert unaborted.finish_reason == "length" and {one.finish_reason for one in others} == {"abort"}


def test_prompts_of_more_tokens_than_a_step_reads(server, engine):
    model = AutoModelForCausalLM.from_pretrained(server.folder).eval()
    sync(engine, model, 1)
    generator = torch.Generator().manual_seed(2)
    work = [replace(one, prompt_ids=torch.randint(3, 260, (700,), generator=generator).tolist()) for one in WORK]
    assert gap(model, work, engine.generate(work)).max() < 1e-4


def test_a_run(server, overrides, tmp_path):
    kept = tmp_path / "weights"
    kept.mkdir()
    settings = server.settings("trainer.total_training_steps=2", f"{ROLLOUT}.server.weights_dir={kept}")
    assert main(overrides(tmp_path / "run", *settings)) == 0
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 2
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-4 for row in rows)
    assert not list(kept.iterdir())


def test_episodes(server, overrides, tmp_path):
    """Every other one in two rows; the first turn ends at the first of these letters, of which vLLM takes four."""
    letters, kept = set("aeio"), tmp_path / "weights"
    kept.mkdir()
    loops = settings(tmp_path, forks=True, reward=0.5, stop="aeio")
    kinds = [f"{ROLLOUT}.server.weights_dir={kept}", f"trainer.episode_data_dir={tmp_path / 'episodes'}"]
    assert main(overrides(tmp_path / "run", *server.settings("trainer.total_training_steps=2"), *loops, *kinds)) == 0
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 2 and all(row["episode/rows"] == 1.5 and row["episode/turns/mean"] == 2 for row in rows)
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-4 for row in rows)
    lines = [line for step in (1, 2) for line in (tmp_path / "episodes" / f"{step}.jsonl").read_text().splitlines()]
    decode = AutoTokenizer.from_pretrained(server.folder).decode
    turns = [list(map(decode, json.loads(line)["turns"][0]["token_ids"])) for line in lines]
    assert len(turns) == 32 and any(letters & set(last) for *_, last in turns)
    assert not any(letters & set("".join(before)) for *before, _ in turns)


def test_settings_that_do_not_fit_are_one_line(server, overrides, tmp_path, capsys):
    for override, words in (
        ("actor_rollout_ref.rollout.dtype=bfloat16", "computes in float32"),
        ("data.max_prompt_length=900", "--max-model-len 908"),
        ("actor_rollout_ref.rollout.server.model=gpt", "not 'gpt'"),
    ):
        assert main(overrides(tmp_path, *server.settings(override))) == 2
        error = capsys.readouterr().err
        assert words in error and "Traceback" not in error, error


@pytest.mark.long
def test_a_server_that_is_started_again_while_it_is_used(server, engine):
    """It is waited for, sent the weights again, and asked again."""
    model = AutoModelForCausalLM.from_pretrained(server.folder).eval()
    trained(model, 5)
    sync(engine, model, 5)

    def again() -> list[Request]:
        start_again(server)
        return []

    with pytest.raises(WorkersReplaced, match="started anew"):
        served(engine, [FIRST, *LONG], again, at="first")
    assert engine.weights_version is None
    sync(engine, model, 5)
    assert gap(model, LONG, engine.generate(LONG)).max() < 1e-4


@pytest.mark.long
def test_a_server_that_is_started_again_while_generation_runs_ahead(server, overrides, tmp_path, caplog):
    """What was in flight begins anew, and each prompt is trained on once. VALOR_KILLS=210: 21 times, in runs of 30."""
    left, draw = RESTARTS, random.Random(7)
    steps = 30 if RESTARTS > 1 else 10
    while left:
        run_dir, rollouts = tmp_path / f"run_{left}", tmp_path / f"rollouts_{left}"
        moments = sorted(draw.sample(range(2, steps - 2), min(left, 7)))

        def in_the_middle(rollouts=rollouts, moments=moments) -> None:
            for done in moments:
                while not rollouts.exists() or len(list(rollouts.iterdir())) < done:
                    time.sleep(0.05)
                time.sleep(draw.uniform(0.0, 0.5))
                start_again(server)

        killer = threading.Thread(target=in_the_middle)
        killer.start()
        ahead = ["trainer.v1.trainer_mode=separate_async", "trainer.controller=local"]
        ahead += ["trainer.v1.sampler.max_off_policy_threshold=1"]
        ahead += [f"trainer.total_training_steps={steps}", f"trainer.rollout_data_dir={rollouts}"]
        assert main(overrides(run_dir, *server.settings(*ahead))) == 0
        killer.join()
        assert "does not answer" in caplog.text
        rows = read_metrics(run_dir)
        assert len(rows) == steps + 1 and all(row["off_policy/age/max"] <= 1 for row in rows[1:])
        # The first update moves the weights most; a new server's, of the beginning, would be further away.
        assert all(row["training/rollout_log_probs_diff_max"] < 1.0 for row in rows[3:])
        lines = [line for file in rollouts.iterdir() for line in file.read_text().split("\n") if line]
        prompts = Counter(json.loads(line)["uid"] for line in lines)
        assert set(prompts.values()) == {2} and len(prompts) == steps * 8
        assert {int(uid.partition(".")[0]) for uid in prompts} == set(range(1, steps + 1))
        left -= len(moments)
