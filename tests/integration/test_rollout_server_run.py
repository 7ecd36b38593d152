"""A vLLM server in processes of its own: weight updates into it, and a whole run with rollout.name=server."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
import torch
from runs import read_metrics
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from valor.config import RolloutConfig
from valor.engines.distributed import destroy_process_group, init_process_group
from valor.errors import TrainingStopped
from valor.models.export import published_weights
from valor.models.policy import PolicyModel
from valor.rollout.base import Output, Request, SamplingParams
from valor.rollout.server.engine import ServerEngine
from valor.trainer.main_ppo import main

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROLLOUT = "actor_rollout_ref.rollout"
START_SECONDS = 600  # on a machine with a lot else to do
# As docs/rollout.md says, and what makes it small and quick to start.
COMMAND = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32"]
COMMAND += ["--logprobs-mode", "processed_logprobs"]
COMMAND += ["--worker-extension-cls", "valor.rollout.server.receiver.WeightReceiver"]
COMMAND += ["--enforce-eager", "--block-size", "32", "--max-model-len", "128", "--kv-cache-memory-bytes", "33554432"]
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
ENVIRONMENT |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


@dataclass
class Server:
    """A server with a model of `folder`."""

    folder: Path
    process: subprocess.Popen
    url: str

    def settings(self, *more: str) -> list[str]:
        """The arguments of a run that uses it."""
        used = [f"actor_rollout_ref.model.path={self.folder}", f"{ROLLOUT}.server.base_url={self.url}"]
        return [*used, f"{ROLLOUT}.name=server", f"{ROLLOUT}.temperature=0.7", *more]


def start(folder: Path) -> Server:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(
        [*COMMAND, "--model", str(folder), "--host", "127.0.0.1", "--port", str(port)],
        env=os.environ | ENVIRONMENT,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Server(folder, process, f"http://127.0.0.1:{port}/v1")


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory) -> Iterator[Server]:
    """One with the tiny model, whose LM head is tied; an untied one's update differs in nothing but vLLM's layers."""
    folder = tmp_path_factory.mktemp("server") / "model"
    shutil.copytree(tiny["model"], folder)
    started = start(folder)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(started.url):
            ended = started.process.poll() is not None or time.monotonic() > deadline
            assert not ended, (folder / "server.log").read_text()[-3000:]
            time.sleep(0.5)
        yield started
    finally:
        os.killpg(started.process.pid, signal.SIGTERM)
        try:
            started.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(started.process.pid, signal.SIGKILL)
            started.process.wait()


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
    section = {"base_url": server.url, "model": str(server.folder)}
    yield ServerEngine(RolloutConfig(name="server", server=section, dtype="float32"), eos_token_ids=[1])
    destroy_process_group()


def sync(engine: ServerEngine, model: PreTrainedModel, version: int, without: str = "") -> None:
    policy = PolicyModel(model)
    weights = published_weights(policy, policy.state_dict().items())
    engine.sync_weights(((name, tensor) for name, tensor in weights if name != without), version=version)


PROMPT = torch.randint(3, 260, (100,), generator=torch.Generator().manual_seed(1)).tolist()
PARAMS = [SamplingParams(max_tokens=12, temperature=temperature) for temperature in (0.7, 1.3, 0.0)]
WORK = [Request(f"r{i}", PROMPT[: 100 - i % 2], PARAMS[i % 3], (7, i)) for i in range(9)]


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
    engine.generate(WORK)
    trained(model, 0)

    async def keep(*_: object) -> None:
        pass

    with monkeypatch.context() as patched:  # cached keys and values of the old weights
        patched.setattr(ServerEngine, "_forget", keep)
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


def test_a_run(server, overrides, tmp_path):
    kept = tmp_path / "weights"
    kept.mkdir()
    settings = server.settings("trainer.total_training_steps=2", f"{ROLLOUT}.server.weights_dir={kept}")
    assert main(overrides(tmp_path / "run", *settings)) == 0
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 2
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-4 for row in rows)
    assert not list(kept.iterdir())


def test_settings_that_do_not_fit_are_one_line(server, overrides, tmp_path, capsys):
    for override, words in (
        ("actor_rollout_ref.rollout.dtype=bfloat16", "computes in float32"),
        ("data.max_prompt_length=500", "--max-model-len 508"),
        ("actor_rollout_ref.rollout.server.model=gpt", "not 'gpt'"),
    ):
        assert main(overrides(tmp_path, *server.settings(override))) == 2
        error = capsys.readouterr().err
        assert words in error and "Traceback" not in error, error
