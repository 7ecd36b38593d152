"""The fault suite: what it runs on, and its table in benchmarks/results/faults.md.

Environment: VALOR_KILLS, the number of SIGKILLs (a few without it); VALOR_FAULT_SEED, what decides when they come;
VALOR_FAULT_TABLE, the page whose table is written anew. `make test-faults` sets all three. With VALOR_FAULT_MORE=1 the
table keeps the rows of kinds that this run has not tried.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fault_settings import PARITY

from valor.lab import arithmetic

# Tests that try one fault each (or as many as their property "attempts" says), also in other folders: what a test of
# that file (whose name has this in it) tries.
ONE_EACH = {
    ("test_damaged_checkpoints.py", ""): "damaged checkpoints, and kills while one is replaced",
    ("test_disk.py", ""): "disk and path faults",
    ("test_resume.py", ""): "resumes that differ, two runs in a folder, lost weights",
    ("test_sandbox_attacks.py", "test_forgery_fails"): "forged verdicts of code",
    ("test_sandbox_attacks.py", "not_taken_from_the_response"): "forged verdicts of code",
    ("test_sandbox_attacks.py", "test_break_out_fails"): "attempts to break out of the sandbox",
    ("test_sandbox_attacks.py", "test_excess_ends"): "attempts to exhaust the machine from the sandbox",
    ("test_rewards_disturbed.py", ""): "graders that disturb their process",
}
USER = "as root" if os.geteuid() == 0 else "as another user"


@pytest.fixture
def counts(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    """`counts(kind, number)`: this test tries so many faults of that kind."""

    def count(kind: str, number: int = 1) -> None:
        record_property("fault", (kind, number))

    return count


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`model`, `train`, `val`, `sft`: the embedded task, with few rows."""
    root = tmp_path_factory.mktemp("tiny")
    model = arithmetic.make_model(root / "model", seed=0)
    files = arithmetic.make_data(root / "data", seed=0, num_val=16, num_demonstrations=64, num_sft_val=8)
    pq.write_table(pq.read_table(files.train)[:64], files.train)
    return {"model": model, "train": files.train, "val": files.val, "sft": files.sft_train}


@pytest.fixture(scope="session")
def ppo(tiny: dict[str, Path]) -> Callable[..., list[str]]:
    """The command line of a small PPO run into a folder, with further settings."""

    def make(run_dir: Path, *more: str) -> list[str]:
        return [
            "ppo",
            f"data.train_files={tiny['train']}",
            "data.train_batch_size=8",
            "data.max_prompt_length=32",
            "data.max_response_length=8",
            f"actor_rollout_ref.model.path={tiny['model']}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "critic.optim.lr=1e-3",
            "critic.model.enable_gradient_checkpointing=false",
            "reward.num_workers=1",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            "trainer.report=false",
            "trainer.save_freq=1",
            "trainer.max_ckpt_to_keep=2",
            "trainer.total_training_steps=4",
            f"trainer.default_local_dir={run_dir}",
            *more,
        ]

    return make


@pytest.fixture(scope="session")
def ppo_arguments(ppo: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The same without its command: three steps of four prompts, two samples each; every checkpoint stays."""
    smaller = ["data.train_batch_size=4", "data.max_response_length=4", "actor_rollout_ref.rollout.n=2"]
    place = ["trainer.max_ckpt_to_keep=null", "trainer.total_training_steps=3"]
    return lambda run_dir, *more: ppo(run_dir, PARITY, *smaller, *place, *more)[1:]


@pytest.fixture(scope="session")
def sft_arguments(tiny: dict[str, Path]) -> Callable[..., list[str]]:
    """The command line of a supervised run into `run_dir`: three steps, saved after each."""

    def make(run_dir: Path, *more: str) -> list[str]:
        return [
            f"data.train_files={tiny['sft']}",
            "data.train_batch_size=8",
            "data.max_length=64",
            f"model.path={tiny['model']}",
            "optim.lr=1e-3",
            "fsdp_config.dtype=float32",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            "trainer.save_freq=1",
            "trainer.total_training_steps=3",
            f"trainer.default_local_dir={run_dir}",
            *more,
        ]

    return make


@pytest.fixture(scope="session")
def finished_ppo(ppo_arguments: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run. Not to be changed: copy it."""
    from valor.trainer.main_ppo import main

    run_dir = tmp_path_factory.mktemp("finished") / "run"
    assert main(ppo_arguments(run_dir)) == 0
    return run_dir


def _count(terminalreporter: pytest.TerminalReporter) -> tuple[Counter[str], Counter[str]]:
    """What was tried and what held, by kind; the reports are those of all folders."""
    tried, held = Counter[str](), Counter[str]()
    for report in (*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")):
        if report.when != "call":
            continue
        found = [value for name, value in report.user_properties if name == "fault"]
        attempts = dict(report.user_properties).get("attempts", 1)
        for (file, name), kind in ONE_EACH.items():
            if file in report.nodeid and name in report.nodeid:
                level = re.search(r"\[(landlock|seccomp|rlimits)\b", report.nodeid)
                found.append((f"{kind}, level {level[1]}, {USER}" if level else kind, attempts))
        for kind, number in found:
            tried[kind] += number
            held[kind] += number if report.passed else 0
    return tried, held


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, and write it into the page that VALOR_FAULT_TABLE names."""
    tried, held = _count(terminalreporter)
    page = Path(os.environ["VALOR_FAULT_TABLE"]) if "VALOR_FAULT_TABLE" in os.environ else None
    if page and os.environ.get("VALOR_FAULT_MORE"):
        for kind, *numbers in re.findall(r"^\| ([^|*]+) \| (\d+) \| (\d+) \|$", page.read_text(), flags=re.M):
            if kind not in tried:
                tried[kind], held[kind] = map(int, numbers)
    rows = ["| fault | tried | withstood |", "|---|---|---|"]
    rows += [f"| {kind} | {count} | {held[kind]} |" for kind, count in sorted(tried.items())]
    rows.append(f"| **all** | {tried.total()} | {held.total()} |")
    terminalreporter.write_line("\n".join(rows))
    if page:
        table = "\n".join(["<!-- faults -->", *rows, "<!-- /faults -->"])
        page.write_text(re.sub("<!-- faults -->.*<!-- /faults -->", table, page.read_text(), flags=re.S))
