"""vLLM servers in processes of their own: weight updates into them, and whole runs with rollout.name=server."""

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
from valor.models.export import published_weights
from valor.models.policy import PolicyModel
from valor.rollout.base import Output, Request, SamplingParams
from valor.rollout.server import ServerEngine
from valor.trainer.main_ppo import main

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROLLOUT = "actor_rollout_ref.rollout"
START_SECONDS = 600  # on a machine with a lot else to do
# As docs/rollout.md says, and what makes it small and quick to start.
COMMAND = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32"]
COMMAND += ["--logprobs-mode", "processed_logprobs"]
COMMAND += ["--worker-extension-cls", "valor.rollout.server_weights.WeightReceiver"]
COMMAND += ["--enforce-eager", "--block-size", "32", "--max-model-len", "128", "--kv-cache-memory-bytes", "33554432"]
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
ENVIRONMENT |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}


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
def servers(tiny, tmp_path_factory) -> Iterator[dict[str, Server]]:
    """One with the tiny model as it is (tied), one with an LM head of its own."""
    root = tmp_path_factory.mktemp("servers")
    for name in ("tied", "untied"):
        shutil.copytree(tiny["model"], root / name)
    model = AutoModelForCausalLM.from_pretrained(tiny["model"])
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(root / "untied")
    started = {name: start(root / name) for name in ("tied", "untied")}
    try:
        deadline = time.monotonic() + START_SECONDS
        for server in started.values():
            while not answers(server.url):
                ended = server.process.poll() is not None or time.monotonic() > deadline
                assert not ended, (server.folder / "server.log").read_text()[-3000:]
                time.sleep(0.5)
        yield started
    finally:
        for server in started.values():
            os.killpg(server.process.pid, signal.SIGTERM)
        for server in started.values():
            try:
                server.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()


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


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_log_probs_are_the_trainers_after_every_update(kind, servers):
    server = servers[kind]
    model = AutoModelForCausalLM.from_pretrained(server.folder).eval()
    assert model.config.tie_word_embeddings == (kind == "tied")
    section = {"base_url": server.url, "model": str(server.folder)}
    config = RolloutConfig(name="server", server=section, dtype="float32")
    prompt = torch.randint(3, 260, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    kinds = [{"temperature": 0.7}, {"temperature": 1.3}, {"temperature": 0.0}]
    work = [
        Request(f"r{i}", prompt[: 100 - i % 2], SamplingParams(max_tokens=12, **kinds[i % 3]), (7, i)) for i in range(9)
    ]
    init_process_group("cpu")
    try:
        engine = ServerEngine(config, eos_token_ids=[1])
        checksums = set()
        for version in range(3):
            trained(model, version)
            policy = PolicyModel(model)
            engine.sync_weights(published_weights(policy, policy.state_dict().items()), version=version)
            checksums.add(engine.weights_checksum)
            # The prompt is in the prefix cache from the round before, with the old weights' keys and values.
            outputs = engine.generate(work)
            assert gap(model, work, outputs).max() < 1e-4
            trained(model, 100 + version)
            assert gap(model, work, outputs).max() > 1e-2  # with the next weights it would have been seen
        assert len(checksums) == 3
        assert [o.token_ids for o in engine.generate(work)] == [o.token_ids for o in outputs]
    finally:
        destroy_process_group()


def test_a_run(servers, overrides, tmp_path):
    kept = tmp_path / "weights"
    kept.mkdir()
    settings = servers["tied"].settings("trainer.total_training_steps=2", f"{ROLLOUT}.server.weights_dir={kept}")
    assert main(overrides(tmp_path / "run", *settings)) == 0
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 2
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-4 for row in rows)
    assert not list(kept.iterdir())


def test_settings_that_do_not_fit_are_one_line(servers, overrides, tmp_path, capsys):
    for override, words in (
        ("actor_rollout_ref.rollout.dtype=bfloat16", "computes in float32"),
        ("data.max_prompt_length=500", "--max-model-len 508"),
        ("actor_rollout_ref.rollout.server.model=gpt", "not 'gpt'"),
    ):
        assert main(overrides(tmp_path, *servers["untied"].settings(override))) == 2
        error = capsys.readouterr().err
        assert words in error and "Traceback" not in error, error
