"""A run started once per node: it trains over both, ends with one line when a node dies, and goes on with the rest."""

import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
import torch
from runs import read_metrics, weights
from two_nodes import Node, two_nodes

from forked import Forked
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow
PORT = 26379


def form(node: Node, rank: int, *, nnodes: int = 2) -> list[str]:
    """The arguments that say which node this is."""
    return [
        f"trainer.nnodes={nnodes}",
        f"trainer.node_rank={rank}",
        f"trainer.master_addr={node.address}",
        f"trainer.master_port={PORT}",
        "trainer.node_timeout=90",
        "data.val_files=null",
    ]


def wait_for(path: Path, process: Forked, log: Path, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.05)


def end(*processes: Forked) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def raylet_of(process: Forked) -> psutil.Process:
    """The raylet among a node's processes."""
    return next(p for p in psutil.Process(process.pid).children(recursive=True) if p.name() == "raylet")


@pytest.mark.alone  # Ray gives a node 30 s to start
def test_two_nodes_train_as_one_machine_and_leave_together(forks, overrides, tmp_path):
    run_dir, alone, logs = tmp_path / "nodes", tmp_path / "alone", [tmp_path / "0.log", tmp_path / "1.log"]
    with two_nodes() as (first, second):
        arguments = overrides(run_dir, "trainer.total_training_steps=2", "trainer.n_gpus_per_node=1")
        processes = [n.start(forks, [*arguments, *form(first, i)], logs[i]) for i, n in enumerate((first, second))]
        try:
            assert processes[0].wait(timeout=300) == 0, logs[0].read_text()[-2000:]
            two = ["trainer.total_training_steps=2", "trainer.n_gpus_per_node=2", "data.val_files=null"]
            reference = Node("127.0.0.1").start(forks, overrides(alone, *two), tmp_path / "alone.log")
            processes.append(reference)  # while the other node still waits for the first to come back
            assert reference.wait(timeout=300) == 0, (tmp_path / "alone.log").read_text()[-2000:]
            assert processes[1].wait(timeout=60) == 0, logs[1].read_text()[-2000:]
        finally:
            end(*processes)
    assert "node 1: joins" in logs[1].read_text() and "the run at" in logs[1].read_text()
    assert read_metrics(alone) == read_metrics(run_dir)
    for name, tensor in weights(alone, "actor").items():
        assert torch.equal(tensor, weights(run_dir, "actor")[name]), name


@pytest.mark.long
def test_a_node_that_dies_ends_the_run_which_goes_on_with_what_is_left(forks, overrides, tmp_path):
    run_dir, logs = tmp_path / "dies", [tmp_path / "0.log", tmp_path / "1.log"]
    arguments = overrides(run_dir, "trainer.total_training_steps=4", "trainer.save_freq=1")
    with two_nodes() as (first, second):
        processes = [n.start(forks, [*arguments, *form(first, i)], logs[i]) for i, n in enumerate((first, second))]
        try:
            wait_for(run_dir / "samples" / "step_1.jsonl", processes[0], logs[0])
            raylet_of(processes[1]).kill()
            assert processes[0].wait(timeout=120) == 1, logs[0].read_text()[-2000:]
        finally:
            end(*processes)
        said = logs[0].read_text().splitlines()[-1]
        assert said.startswith("stopped: the process of rank 1 on node") and second.address in said
        rest = first.start(forks, [*arguments, *form(first, 0, nnodes=1)], tmp_path / "rest.log")
        try:
            assert rest.wait(timeout=300) == 0, (tmp_path / "rest.log").read_text()[-2000:]
        finally:
            end(rest)
    assert [row["step"] for row in read_metrics(run_dir)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["trainer.nnodes=2", "trainer.node_rank=1", "trainer.master_addr=127.0.0.1", "trainer.master_port=1"],
            ["nothing answers at trainer.master_addr=127.0.0.1, port 1", "node_timeout=1 s"],
        ),
        (["trainer.nnodes=2", "trainer.node_rank=2", "trainer.master_addr=a"], ["trainer.node_rank=2 counts from 0"]),
        (["trainer.nnodes=2", "trainer.node_rank=0"], ["set trainer.master_addr"]),
        (["trainer.master_addr=a"], ["set trainer.node_rank on each"]),
    ],
)
def test_mistakes(arguments, words, overrides, tmp_path, capsys):
    assert main(overrides(tmp_path / "run", "trainer.node_timeout=1", *arguments)) == 2
    [line] = [one for one in capsys.readouterr().err.splitlines() if not one.startswith("note:")]
    assert all(word in line for word in words)


def test_a_node_that_cannot_join_is_no_success(overrides, tmp_path, capsys, monkeypatch):
    def refused(command, stdout, **_):
        stdout.write(b"RuntimeError: Version mismatch:\n    Python: 3.12.1\n")

    monkeypatch.setattr("subprocess.run", refused)
    with socket.create_server(("127.0.0.1", 0)) as listens:
        at = ["trainer.master_addr=127.0.0.1", f"trainer.master_port={listens.getsockname()[1]}"]
        assert main(overrides(tmp_path / "run", "trainer.nnodes=2", "trainer.node_rank=1", *at)) == 2
    error = capsys.readouterr().err.strip()
    assert "node 1 could not join Ray" in error and error.endswith("Version mismatch: Python: 3.12.1")
