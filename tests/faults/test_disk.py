"""Disks that are full, folders that cannot be written, files in the way: one line that says what to do, exit code 2."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from forked import VALOR
from valor.trainer.checkpoints import CheckpointStore
from valor.trainer.main_ppo import main
from valor.trainer.main_sft import main as main_sft

pytestmark = pytest.mark.slow

Usage = namedtuple("Usage", "total used free")
TROUBLES = ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO", "EFBIG")


def stops_in_one_line(code: int, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    error = [line for line in capsys.readouterr().err.strip().splitlines() if not line.startswith("note:")]
    assert code == 2 and len(error) == 1, error
    assert "Traceback" not in error[0] and all(word in error[0] for word in words), error


@pytest.mark.parametrize("folder", ["/proc/run", "/sys/run", "/dev/null/run", "/proc/1/root/../mem/run"])
def test_a_place_where_no_folder_can_be(folder, sft_arguments, capsys):
    stops_in_one_line(main_sft(sft_arguments(Path(folder))), capsys, "trainer.default_local_dir")


def test_a_name_that_is_too_long(sft_arguments, tmp_path, capsys):
    stops_in_one_line(
        main_sft(sft_arguments(tmp_path / ("n" * 300))), capsys, "at most 255 bytes", "trainer.default_local_dir"
    )


def test_a_link_to_itself(sft_arguments, tmp_path, capsys):
    (tmp_path / "run").symlink_to(tmp_path / "run")
    stops_in_one_line(main_sft(sft_arguments(tmp_path / "run")), capsys, "trainer.default_local_dir")


def test_a_file_where_the_folder_should_be(sft_arguments, tmp_path, capsys):
    (tmp_path / "run").write_text("notes")
    stops_in_one_line(main_sft(sft_arguments(tmp_path / "run")), capsys, str(tmp_path / "run"), "move it away")
    assert (tmp_path / "run").read_text() == "notes"


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "run.json", "huggingface", "samples", ".run.lock"])
def test_something_of_another_kind_in_the_way(name, finished_ppo, ppo_arguments, tmp_path, capsys):
    """A folder where a file should be, or the other way round, where a run goes on."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished_ppo / "global_step_2", run_dir / "global_step_2")
    (run_dir / name).mkdir() if "." in name else (run_dir / name).write_text("notes")
    stops_in_one_line(main(ppo_arguments(run_dir)), capsys, name)
    assert (run_dir / name).exists()


def test_a_fresh_start_moves_away_what_has_its_names(sft_arguments, tmp_path):
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    for name in ("samples", "global_step_1"):
        (tmp_path / "run" / name).write_text("notes")
    assert main_sft(sft_arguments(tmp_path / "run", "trainer.resume_mode=disable")) == 0
    kept = tmp_path / "run" / "previous" / "1"
    assert (kept / "global_step_1").read_text() == (kept / "samples").read_text() == "notes"
    assert (kept / "metrics.jsonl").is_dir() and (tmp_path / "run" / "global_step_1" / "manifest.json").is_file()


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("where", ["shard", "trainer.json", "manifest.json", "global_step_2.partial"])
def test_a_checkpoint_that_cannot_be_written(where, trouble, sft_arguments, tmp_path, monkeypatch, capsys):
    """The step before stays, nothing half written is left, and the same command goes on when there is room."""
    number, run_dir = getattr(errno, trouble), tmp_path / "run"
    error = OSError(number, os.strerror(number))
    with monkeypatch.context() as patched:
        refuse_second_write(patched, where, error)
        stops_in_one_line(main_sft(sft_arguments(run_dir)), capsys, str(run_dir), os.strerror(number))
    assert CheckpointStore(run_dir).find("auto", None, pytest.fail).step == 1
    assert not list(run_dir.glob("*.partial")) and not (run_dir / ".run.lock").exists()
    if trouble == "ENOSPC":
        assert main_sft(sft_arguments(run_dir)) == 0
        assert "resumed from" in capsys.readouterr().out.replace("\n", " ")


def refuse_second_write(patched: pytest.MonkeyPatch, where: str, error: OSError) -> None:
    """From the second checkpoint on, writing (or making, for a folder) `where` fails."""
    if where == "shard":
        from safetensors import SafetensorError

        from valor.engines import checkpoint

        save = checkpoint.save_file

        def save_file(tensors, file, metadata):
            if "global_step_1" in str(file):
                return save(tensors, file, metadata)
            Path(file).write_bytes(b"half")
            raise SafetensorError(f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})")

        patched.setattr(checkpoint, "save_file", save_file)
        return
    write, make = Path.write_text, Path.mkdir

    def write_text(path, *args, **kwargs):
        if path.name == where and "global_step_1" not in str(path):
            write(path, "half")
            raise error
        return write(path, *args, **kwargs)

    def mkdir(path, *args, **kwargs):
        if path.name == where:
            raise error
        return make(path, *args, **kwargs)

    patched.setattr(Path, "write_text", write_text)
    patched.setattr(Path, "mkdir", mkdir)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_metrics_that_cannot_be_written(trouble, sft_arguments, tmp_path, monkeypatch, capsys):
    number = getattr(errno, trouble)

    def log(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("valor.tracking.loggers.FileLogger.log", log)
    stops_in_one_line(main_sft(sft_arguments(tmp_path / "run")), capsys, str(tmp_path / "run"), os.strerror(number))


LIMIT = 1_500_000  # bytes: the models have more
LIMITED = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT}, {LIMIT}))\n{VALOR}"


def test_a_real_limit_on_the_size_of_files(forks, ppo_arguments, tmp_path):
    """RLIMIT_FSIZE, which the kernel holds against every writer, the one in Rust too."""
    log = tmp_path / "log"
    code = forks.start(LIMITED, "ppo", *ppo_arguments(tmp_path / "run"), log=log).wait()
    said = log.read_text()
    assert code == 2 and "File too large" in said and "Traceback" not in said, said
    assert not list((tmp_path / "run").glob("global_step_*"))


def test_space_is_looked_at_before_the_first_step(sft_arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 9, 1))
    stops_in_one_line(main_sft(sft_arguments(tmp_path / "run")), capsys, "GB left", "needs", "no checkpoint yet")
    assert not (tmp_path / "run").exists()


def test_space_is_looked_at_before_each_checkpoint(sft_arguments, tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    free = lambda path: Usage(10, 0, 0 if (run_dir / "global_step_2").exists() else 1 << 40)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", free)
    stops_in_one_line(main_sft(sft_arguments(run_dir)), capsys, "GB left", "global_step_2")
    assert CheckpointStore(run_dir).steps() == [1, 2]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", b"\x00\xff\xfe\n" * 3),
        ("metrics.jsonl", b'{"step": 1}\n{"loss": 2}\n{"step": 3}\n'),
        ("metrics.jsonl", b"[1]\n[2]\n"),
        ("run.json", b"\xff\xff"),
        ("run.json", b"[1, 2"),
        ("run.json", b"3"),
    ],
)
def test_records_that_are_garbage(name, content, finished_ppo, ppo_arguments, tmp_path, capsys):
    run_dir = tmp_path / "run"
    shutil.copytree(finished_ppo / "global_step_2", run_dir / "global_step_2")
    (run_dir / name).write_bytes(content)
    stops_in_one_line(main(ppo_arguments(run_dir)), capsys, name)
    assert (run_dir / name).read_bytes() == content
