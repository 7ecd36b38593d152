"""However a run ends, what it has learnt is saved, and its last line says where and how to go on."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from valor.config import SFTConfig, TrainerConfig
from valor.controller.placement import resolve_pool
from valor.data.sampler import PromptSampler
from valor.errors import Diverged, StepRefused, TrainingStopped, UserError, WorkerDied, exit_code
from valor.tracking import diagnosis
from valor.tracking.metrics import Histogram
from valor.tracking.rundir import LOCK_FILE
from valor.trainer import checkpoints
from valor.trainer.checkpoints import CheckpointStore, open_checkpoint
from valor.trainer.recorder import RunRecorder
from valor.trainer.run import Run


class Role:
    """A model of one number, which is how many updates it has had."""

    def __init__(self, *, dead: bool = False, stuck: bool = False) -> None:
        self.updates, self.dead = 0, dead
        self.group = SimpleNamespace(settled=lambda seconds: not stuck)

    def save(self, folder: Path) -> None:
        if self.dead:
            raise WorkerDied("rank 1 died")
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(self.updates))

    def load(self, folder: Path) -> None:
        self.updates = int((folder / "weights").read_text())

    def checkpoint_bytes(self) -> int:
        return 10

    def export(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)


class Counting(Run):
    """Ten steps; `at(step, place)` may end one, place: collect | update | validate | log."""

    trained_roles = ("actor",)

    def __init__(self, folder: Path, at=lambda step, place: None, role: Role | None = None, **trainer) -> None:
        trainer = {"default_local_dir": str(folder), "logger": ["file"], **trainer}
        config = SFTConfig(model={"path": "m"}, data={"train_files": ["t"]}, trainer=trainer)
        tokenizer = SimpleNamespace(save_pretrained=lambda folder: folder.mkdir(exist_ok=True))
        super().__init__(config, tokenizer, RunRecorder(config, "valor count", config.trainer.logger))
        self.placement = resolve_pool(TrainerConfig(num_threads=1, device="cpu"))
        self.sampler, self.total_steps, self.at, self.role = PromptSampler(100, 4), 10, at, role or Role()

    def start(self, stack, *, resuming):
        return {"actor": self.role}

    def train_step(self):
        rows = self.sampler.next_batch()
        self.at(self.step, "collect")
        self.skips.updating = True
        self.role.updates += 1
        self.at(self.step, "update")
        return {"rows": sum(rows), "rows/histogram": Histogram(0.0, 1.0, rows)}

    def validates_now(self):
        return True

    def validate(self):
        self.at(self.step, "validate")
        return {}

    def log(self, metrics):
        self.at(self.step, "log")
        super().log(metrics)


def ends(*where, by):
    """At this step and place `by` is raised, or called."""

    def at(step, place):
        if (step, place) == where:
            if isinstance(by, BaseException):
                raise by
            by()

    return at


@pytest.fixture(autouse=True)
def every_signal_is_a_request(monkeypatch):
    monkeypatch.setattr("valor.trainer.signals._ONE_REQUEST_SECONDS", 0.0)


def twice():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)


def twice_under_ray():
    try:
        twice()
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # Ray's own, whatever the signal's handler has raised


def last_line(run: Run, capsys) -> tuple[int, str]:
    code = exit_code(run.fit)
    return code, capsys.readouterr().err.strip()


CAUSES = {
    "too many batches filtered": TrainingStopped("step 4: 0 of 4 prompts have samples that differ"),
    "tools that hang": TrainingStopped("257 calls of tools hang"),
    "graders that fail": StepRefused("9 of 16 samples could not be graded"),
    "a bad row": UserError("data row 7 has no ground truth"),
    "out of memory": TrainingStopped("out of memory in a micro-batch of one sample"),
    "a server that has gone": TrainingStopped("the rollout server at http://x failed"),
    "a rollout process that died": WorkerDied("the process of rank 0 died"),
    "two signals": twice,
    "two signals while Ray is waited for": twice_under_ray,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    """What the driver knew at the end."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert Counting(folder).fit() == 0
    return {"folder": folder, **open_checkpoint(folder / "global_step_10").state}


@pytest.mark.parametrize(
    ("cause", "place"), [*((cause, "collect") for cause in CAUSES), ("two signals", "validate"), ("a bad row", "log")]
)
def test_the_last_complete_step_is_saved_and_goes_on_to_the_same_end(cause, place, undisturbed, tmp_path, capsys):
    code, line = last_line(Counting(tmp_path / "run", ends(4, place, by=CAUSES[cause])), capsys)
    step = 3 if place == "collect" else 4
    assert code in (1, 2, 128 + signal.SIGTERM) and len(line.splitlines()) == 1
    assert line.endswith(f"the same command goes on from '{tmp_path / 'run' / f'global_step_{step}'}'")
    again = Counting(tmp_path / "run")
    assert again.fit() == 0 and again.role.updates == 10
    assert open_checkpoint(tmp_path / "run" / "global_step_10").state["sampler"] == undisturbed["sampler"]


@pytest.mark.parametrize("step", [4, 10])
@pytest.mark.parametrize("cause", ["two signals", "a bad row"])
def test_a_step_that_was_not_validated_is_validated_when_the_run_goes_on(step, cause, undisturbed, tmp_path, capsys):
    assert last_line(Counting(tmp_path / "run", ends(step, "validate", by=CAUSES[cause])), capsys)[0] != 0
    seen = []
    again = Counting(tmp_path / "run", lambda *place: seen.append(place))
    assert again.fit() == 0 and again.role.updates == 10
    assert seen[:2] == [(step, "validate"), (step, "log")] and len(seen) == 2 + 4 * (10 - step)
    files = [(folder / "metrics.jsonl").read_text() for folder in (undisturbed["folder"], tmp_path / "run")]
    assert files[0] == files[1]
    seen.clear()
    assert Counting(tmp_path / "run", lambda *place: seen.append(place)).fit() == 0
    assert not seen  # it is measured once


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), MemoryError(), KeyError("x"), StopIteration(), ZeroDivisionError()]
)
def test_an_error_that_nobody_expects_keeps_its_traceback_and_names_the_checkpoint(error, tmp_path):
    run = Counting(tmp_path / "run", ends(3, "collect", by=error))
    with pytest.raises((type(error), RuntimeError)) as raised:
        run.fit()
    assert raised.value.__notes__ == [f"the same command goes on from '{tmp_path / 'run' / 'global_step_2'}'"]
    assert open_checkpoint(tmp_path / "run" / "global_step_2").step == 2


def test_one_signal_lets_the_step_end_and_saves_it(tmp_path, capsys):
    run = Counting(tmp_path / "run", ends(4, "collect", by=lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert last_line(run, capsys) == (128 + signal.SIGTERM, "")
    assert CheckpointStore(tmp_path / "run").steps() == [4]


class Swallowing(Counting):
    """Gets a signal at its start where an exception goes nowhere, as in numba's callbacks from C."""

    def swallowed(self):
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)

    def start(self, stack, *, resuming):
        if self.step_of_signal == "start":
            self.swallowed()
        return super().start(stack, resuming=resuming)

    def before_steps(self):
        if self.step_of_signal == "before_steps":
            self.swallowed()
        return super().before_steps()


@pytest.mark.parametrize("at", ["start", "before_steps"])
def test_a_signal_before_the_first_step_ends_the_run_where_its_exception_is_swallowed(at, tmp_path, capsys):
    run = Swallowing(tmp_path / "run")
    run.step_of_signal = at
    code, line = last_line(run, capsys)
    assert (code, run.step, line.split(":")[0]) == (128 + signal.SIGTERM, 0, "SIGTERM")


def test_a_signal_that_comes_twice_within_a_second_is_one(tmp_path, capsys, monkeypatch):
    """Of a batch system, to a run and to the sweep that passes it on; of `timeout`, to its command and to the group."""
    monkeypatch.setattr("valor.trainer.signals._ONE_REQUEST_SECONDS", 1.0)
    assert last_line(Counting(tmp_path / "run", ends(4, "collect", by=twice)), capsys) == (128 + signal.SIGTERM, "")
    assert CheckpointStore(tmp_path / "run").steps() == [4]


class Signalled(Role):
    """Gets signals while it is saved."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def save(self, folder: Path) -> None:
        for _ in range(self.count):
            os.kill(os.getpid(), signal.SIGTERM)
        super().save(folder)


@pytest.mark.parametrize(("count", "steps"), [(1, [4]), (2, [4]), (3, [])])
def test_signals_while_it_is_saved_leave_what_is_complete_but_for_the_third(count, steps, tmp_path, capsys):
    run = Counting(tmp_path / "run", role=Signalled(count), save_freq=4)
    assert last_line(run, capsys)[0] == 128 + signal.SIGTERM
    assert CheckpointStore(tmp_path / "run").steps() == steps


def test_a_signal_in_the_step_and_one_while_that_is_saved(tmp_path, capsys):
    stops = ends(4, "collect", by=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert last_line(Counting(tmp_path / "run", stops, role=Signalled(1)), capsys)[0] == 128 + signal.SIGTERM
    assert CheckpointStore(tmp_path / "run").steps() == [4]


def test_a_folder_that_user_code_changes_to_is_not_where_the_run_is(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Counting(Path("run"), ends(2, "collect", by=lambda: os.chdir("other"))).fit() == 0
    assert CheckpointStore(tmp_path / "run").steps()[-1] == 10 and not any((tmp_path / "other").iterdir())


PIPED = """
import os, signal, sys
from pathlib import Path
from test_early_ends import Counting, ends
from valor.errors import exit_code
def interrupt():
    os.close(int(sys.argv[2]))
    signal.raise_signal(signal.SIGTERM)
run = Counting(Path(sys.argv[1]), ends(4, "collect", by=interrupt))
os._exit(exit_code(run.fit))
"""


def test_a_signal_that_ends_the_reader_of_what_is_printed_too(tmp_path):
    """Ctrl-C on `valor ppo ... | tee log`: both get it, and the run still ends its step."""
    reader, writer = os.pipe()
    path = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parent)])
    command = [sys.executable, "-c", PIPED, str(tmp_path / "run"), str(reader)]
    env = os.environ | {"PYTHONPATH": path}
    process = subprocess.Popen(command, stdout=writer, stderr=writer, env=env, pass_fds=[reader])
    os.close(reader)
    os.close(writer)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert CheckpointStore(tmp_path / "run").steps() == [4]


def test_a_step_that_was_learning_says_so_when_it_is_saved_and_when_it_is_resumed(tmp_path, capsys):
    run = Counting(tmp_path / "run", ends(4, "update", by=MemoryError()))
    with pytest.raises(MemoryError):
        run.fit()
    assert "a part of the updates of step 4" in " ".join(capsys.readouterr().out.split())
    again = Counting(tmp_path / "run")
    assert again.fit() == 0
    assert "after step 3, with a part of the next step's updates" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("role", [Role(dead=True), Role(stuck=True)], ids=["dead", "stuck"])
def test_where_the_weights_cannot_be_had_the_last_checkpoint_is_named(role, tmp_path, capsys):
    whole = Counting(tmp_path / "run", ends(3, "collect", by=TrainingStopped("first")))
    assert last_line(whole, capsys)[0] == 1
    error = WorkerDied("the process of rank 1 died")
    code, line = last_line(Counting(tmp_path / "run", ends(7, "collect", by=error), role=role), capsys)
    assert code == 1 and line.endswith(f"goes on from '{tmp_path / 'run' / 'global_step_2'}'")
    assert CheckpointStore(tmp_path / "run").steps() == [2] and not list((tmp_path / "run").glob("*.partial"))


def test_a_disk_that_is_full_is_told_with_the_checkpoint_that_is_left(tmp_path, capsys, monkeypatch):
    run, writes = Counting(tmp_path / "run", save_freq=2), []

    def write_manifest(folder, **facts):
        writes.append(folder.name)
        if len(writes) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        original(folder, **facts)

    original = checkpoints.write_manifest
    monkeypatch.setattr(checkpoints, "write_manifest", write_manifest)
    code, line = last_line(run, capsys)
    assert (
        code == 2 and "No space left" in line and line.endswith(f"goes on from '{tmp_path / 'run' / 'global_step_2'}'")
    )
    assert writes == ["global_step_2.partial", "global_step_4.partial"]


def test_a_folder_that_is_moved_away_is_made_anew(tmp_path, capsys):
    folder = tmp_path / "run"
    run = Counting(folder, ends(4, "collect", by=lambda: folder.rename(tmp_path / "moved")), save_freq=2)
    assert run.fit() == 0 and CheckpointStore(folder).steps() == [4, 6, 8, 10]
    said = capsys.readouterr().out
    assert said.count("was removed or moved away") == 1 and f"'{folder}'" in said
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()] == [*range(4, 11)]
    assert not (folder / LOCK_FILE).exists() and (tmp_path / "moved" / LOCK_FILE).exists()


HOLD = (
    "import sys\nfrom pathlib import Path\nfrom valor.tracking.rundir import locked\n"
    "with locked(Path(sys.argv[1]), print):\n    print('held', flush=True)\n    sys.stdin.read()\n"
)


@pytest.mark.parametrize("place", ["collect", "update", "log"])
def test_nothing_is_written_into_a_folder_that_another_run_has_begun_anew(place, tmp_path, capsys):
    folder, pipes = tmp_path / "run", {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    others = []

    def replace_folder():
        shutil.rmtree(folder)
        others.append(subprocess.Popen([sys.executable, "-c", HOLD, folder], **pipes))
        others[0].stdout.readline()

    code, line = last_line(Counting(folder, ends(3, place, by=replace_folder), save_freq=2), capsys)
    kept = [path.name for path in folder.iterdir()]
    others[0].communicate()
    assert code == 2 and "is the folder of a run that is going on" in line and len(line.splitlines()) == 1
    assert kept == [LOCK_FILE]


def test_lost_weights_are_not_saved(tmp_path, capsys):
    code, line = last_line(Counting(tmp_path / "run", ends(4, "update", by=Diverged("gone")), save_freq=2), capsys)
    assert code == 1 and CheckpointStore(tmp_path / "run").steps() == [2] and "global_step_2" in line


@pytest.mark.parametrize("mode", ["disable", "auto"])
def test_the_way_on_is_one_that_resumes(mode, tmp_path, capsys):
    run = Counting(tmp_path / "run", ends(3, "collect", by=TrainingStopped("no")), resume_mode=mode)
    line = last_line(run, capsys)[1]
    assert ("the same command with trainer.resume_mode=auto goes on from" in line) == (mode == "disable")


def test_an_end_before_anything_was_learnt_says_that_too(tmp_path, capsys):
    line = last_line(Counting(tmp_path / "run", ends(1, "collect", by=TrainingStopped("no"))), capsys)[1]
    assert line == "stopped: no; there is no checkpoint yet" and CheckpointStore(tmp_path / "run").steps() == []


@pytest.mark.parametrize(("skipped", "steps"), [(True, [3]), (False, [])])
def test_a_run_that_only_skips_is_saved_where_there_is_no_checkpoint_yet(skipped, steps, tmp_path, capsys):
    def skip():
        for _ in range(run.config.trainer.max_skipped_updates):
            run.skips.count("actor", True, 4)

    run = Counting(tmp_path / "run", ends(4, "update", by=skip if skipped else Diverged("exploded")))
    code, line = last_line(run, capsys)
    assert code == 1 and CheckpointStore(tmp_path / "run").steps() == steps
    assert ("the last good checkpoint is" in line) == skipped


class Rows(PromptSampler):
    """Gives the list of its draws, and goes on writing in it."""

    def __init__(self) -> None:
        super().__init__(100, 4)
        self.drawn: list[int] = []

    def next_batch(self):
        self.drawn += (rows := super().next_batch())
        return rows

    def state_dict(self):
        return {**super().state_dict(), "drawn": self.drawn}


def test_the_state_of_the_last_step_is_not_that_of_the_one_that_failed(tmp_path):
    run = Counting(tmp_path, ends(3, "collect", by=RuntimeError("no more")), test_freq=-1)
    run.sampler = Rows()
    with pytest.raises(RuntimeError):
        run.fit()
    state = open_checkpoint(tmp_path / "global_step_2").state
    assert len(state["sampler"]["drawn"]) == 8 and len(run.sampler.drawn) == 12


def test_a_diagnosis_that_fails_ends_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(diagnosis.Diagnosis, "add", lambda *_: 1 / 0)
    run = Counting(tmp_path / "run")
    code = exit_code(run.fit)
    assert code == 0 and run.step == 10
    assert capsys.readouterr().out.count("the diagnosis failed, and the run goes on: ZeroDivisionError") == 1
