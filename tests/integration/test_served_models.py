"""SGLang's and TensorRT-LLM's protocols, spoken by servers with a real tiny model: whole runs, and engines alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from runs import read_metrics
from served import Served, Starter, starter
from transformers import AutoModelForCausalLM, PreTrainedModel

from interruptions import aborted, assert_log_probs, resumed, served, teacher_forced
from valor.config import RolloutConfig
from valor.engines.distributed import init_process_group, leave_process_group
from valor.errors import TrainingStopped, WorkersReplaced
from valor.models.export import published_weights
from valor.models.policy import PolicyModel
from valor.rollout.base import Output, Request, SamplingParams, Span
from valor.rollout.server import client as client_module
from valor.rollout.server.engine import ServerEngine
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

ROLLOUT = "actor_rollout_ref.rollout"
GAP = "training/rollout_log_probs_diff_max"


@pytest.fixture(scope="module")
def servers(tiny, tmp_path_factory) -> Iterator[Starter]:
    with starter(tiny["model"], tmp_path_factory.mktemp("served")) as found:
        yield found


@pytest.fixture
def group(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(client_module, "_PATIENCE", 0.5)
    monkeypatch.setattr(client_module, "_FIRST_PAUSE", 0.02)
    init_process_group("cpu")
    yield
    leave_process_group()


def asks(*servers: Served, name: str = "sglang") -> list[str]:
    urls = ",".join(one.url + ("/v1" if name == "trtllm" else "") for one in servers)
    return [f"{ROLLOUT}.name={name}", f"{ROLLOUT}.server.base_url=[{urls}]", f"{ROLLOUT}.temperature=0.7"]


STEPS = ["trainer.total_training_steps=2"]


@pytest.mark.parametrize("sleep", [False, True])
def test_a_run_with_sglang(sleep, servers, overrides, tmp_path):
    server = servers.start("sglang")
    more = [f"{ROLLOUT}.server.sleep={str(sleep).lower()}", f"{ROLLOUT}.top_k=40"]
    assert main(overrides(tmp_path, *STEPS, *asks(server), *more)) == 0
    rows = read_metrics(tmp_path)[1:]
    assert len(rows) == 2 and all(row[GAP] < 1e-4 for row in rows)
    asked = server.set()
    assert asked.count("/update_weights_from_disk") >= 2
    assert (asked.count("/release_memory_occupation") >= 2) == sleep
    server.kill()


def test_a_run_with_trtllm(servers, overrides, tmp_path, capsys):
    """Its weights stay: the critic learns for two steps, and the policy in a third, which is seen."""
    server = servers.start("trtllm")
    run = [*asks(server, name="trtllm"), f"{ROLLOUT}.server.model=m"]
    assert main(overrides(tmp_path / "refused", *STEPS, *run)) == 2
    assert "trtllm-serve takes no weights over HTTP" in capsys.readouterr().err
    run += [f"{ROLLOUT}.server.weight_updates=none", "trainer.critic_warmup=2", "trainer.total_training_steps=4"]
    assert main(overrides(tmp_path / "run", *run)) == 0
    first, second, third, fourth = (row[GAP] for row in read_metrics(tmp_path / "run")[1:])
    assert max(first, second, third) < 1e-4 and fourth > 1e-3
    server.kill()


# ---- the engine alone

WORK = [
    Request(f"r{i}", list(range(5, 15 + i // 2)), SamplingParams(0.8, max_tokens=40, ignore_eos=True), (3, 1, i))
    for i in range(4)
]
FIRST = Request("first", [5, 6], SamplingParams(max_tokens=20, ignore_eos=True), (3, 1, 9))  # while the others run


def engine_of(*servers: Served, name: str = "sglang", **more: object) -> ServerEngine:
    urls = [one.url + ("/v1" if name == "trtllm" else "") for one in servers]
    section = {"base_url": urls, "model": "m", "timeout": 30.0, **more}
    config = RolloutConfig.model_validate({"name": name, "server": section, "dtype": "float32"})
    return ServerEngine(config, eos_token_ids=[1])


def changed(folder: Path, seed: int) -> PreTrainedModel:
    """What an optimizer step does: every weight moves a little."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return model


def sync(engine: ServerEngine, model: PreTrainedModel, version: int) -> None:
    policy = PolicyModel(model)
    engine.sync_weights(published_weights(policy, policy.state_dict().items()), version=version)


def assert_true(model: PreTrainedModel, outputs: Sequence[Output]) -> None:
    for request, output in zip(WORK, outputs, strict=True):
        assert_log_probs(output, teacher_forced(model, request, output), 1e-4)


def test_sequences_that_go_on_with_other_weights(servers, tiny, group):
    """Each part has the log-probs of a full forward by its own weights."""
    server = servers.start("sglang")
    engine, models = engine_of(server), {version: changed(tiny["model"], version) for version in (4, 5)}
    sync(engine, models[4], 4)
    server.set(slow=0.03)
    *cut, _ = served(engine, [*WORK, FIRST], aborted(WORK), at="first")
    lengths = [len(one.token_ids) for one in cut]
    assert all(0 < n < 40 for n in lengths) and {one.finish_reason for one in cut} == {"abort"}
    assert_true(models[4], cut)
    sync(engine, models[5], 5)
    for request, output, had, n in zip(WORK, engine.generate(resumed(WORK, cut)), cut, lengths, strict=True):
        assert output.token_ids[:n] == had.token_ids and output.spans == (Span(n, 4), Span(40 - n, 5))
        parts = [teacher_forced(models[version], request, output) for version in (4, 5)]
        assert_log_probs(output, torch.cat([parts[0][:n], parts[1][n:]]), 1e-4)
    server.kill()


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"fails": True}, "status 400: .*shape mismatch"),
        ({"stale": True}, "has not taken weights 2: it says that it holds .*-1"),
        ({"torn": 0, "unreadable": False}, "has not taken weights 2: .* begins with .* was sent"),
        ({"torn": 20}, "has not taken weights 2: model.layers.* begins with"),
    ],
)
def test_an_update_that_did_not_happen_as_it_should_is_noticed(faults, words, servers, tiny, group):
    server = servers.start("sglang")
    engine = engine_of(server)
    sync(engine, changed(tiny["model"], 1), 1)
    server.set(**faults)
    with pytest.raises(TrainingStopped, match=words):
        sync(engine, changed(tiny["model"], 2), 2)
    assert engine.weights_version is None
    with pytest.raises(ValueError, match="no weights"):
        engine.generate(WORK)
    server.set()
    sync(engine, model := changed(tiny["model"], 3), 3)
    assert_true(model, engine.generate(WORK))
    server.kill()


def test_a_torn_update_of_one_server_among_several(servers, tiny, group):
    """Its values cannot be read back, but its checksum is another one."""
    both = [servers.start("sglang") for _ in range(2)]
    both[0].set(unreadable=True)
    both[1].set(unreadable=True, torn=20)
    with pytest.raises(TrainingStopped, match="were sent the same weights 1 and hold different ones"):
        sync(engine_of(*both), changed(tiny["model"], 1), 1)
    for one in both:
        one.kill()


def test_answers_by_other_weights_are_not_used(servers, tiny, group):
    server = servers.start("sglang")
    engine = engine_of(server)
    for version in (1, 2):
        sync(engine, changed(tiny["model"], version), version)
    name = engine._fleet.name
    for says, error, words in (
        (name[:31] + ("0" if name[31] != "0" else "1") + name[32:], TrainingStopped, "another run uses it"),
        ("default", WorkersReplaced, "was started anew"),
    ):
        server.set(says=says)
        with pytest.raises(error, match=words):
            engine.generate(WORK)
    server.kill()


def test_a_server_that_dies_in_the_middle_and_comes_back(servers, tiny, group):
    """Its requests go to another one; it gets the weights before it is asked again."""
    one, two = (servers.start("sglang") for _ in range(2))
    engine, model = engine_of(one, two), changed(tiny["model"], 1)
    sync(engine, model, 1)
    one.set(die="generate")
    assert_true(model, engine.generate(WORK))
    assert engine._fleet.out == {one.url} and engine.weights_version == 1
    port = int(one.url.split(":")[-1])
    one = servers.start("sglang", port)
    assert_true(model, engine.generate(WORK))
    assert engine._fleet.out == {one.url} and "/generate" not in one.set()  # it has other weights
    assert engine.weights_version is None  # so that they are sent
    sync(engine, model, 1)
    assert engine._fleet.out == set() and engine.weights_version == 1
    assert_true(model, engine.generate(WORK))
    assert "/generate" in one.set()
    two.set(die="update")
    sync(engine, model := changed(tiny["model"], 2), 2)
    assert engine._fleet.out == {two.url}
    assert_true(model, engine.generate(WORK))
    one.set(die="generate")  # nobody is left
    engine._client.timeout = 0.5
    with pytest.raises(TrainingStopped, match=f"{one.url}/.* failed: .*: start it again"):
        engine.generate(WORK)
