"""Damaged checkpoints are named and never read; a process killed at any moment leaves a whole one."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from damages import DAMAGES, lengthen
from safetensors.torch import load_file, save_file

from valor.engines import checkpoint as engine_checkpoint
from valor.engines import distributed
from valor.errors import Diverged, UserError
from valor.trainer.checkpoints import MANIFEST_FILE, CheckpointStore, open_checkpoint, write_manifest
from valor.trainer.export import export_checkpoint
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

FILES = (
    "manifest.json",
    "trainer.json",
    "actor/engine.json",
    "actor/shard-00000.safetensors",
    "actor/huggingface/config.json",
    "critic/engine.json",
    "critic/shard-00000.safetensors",
    "critic/huggingface/config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
)


@pytest.fixture
def run_dir(finished_ppo, tmp_path) -> Path:
    """The finished run's folder with its checkpoints 2 and 3, to be damaged."""
    for step in (2, 3):
        shutil.copytree(finished_ppo / f"global_step_{step}", tmp_path / f"global_step_{step}")
    return tmp_path


def assert_named(run_dir: Path, *words: str) -> None:
    """The newest checkpoint is refused in one line with these words, and the one before is taken."""
    with pytest.raises(UserError) as refused:
        open_checkpoint(run_dir / "global_step_3")
    assert "\n" not in str(refused.value)
    said: list[str] = []
    found = CheckpointStore(run_dir).find("auto", None, said.append)
    assert found is not None and found.folder.name == "global_step_2"
    assert len(said) == 1 and all(word in said[0] for word in ("global_step_3", *words)), said


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file(file, damage, run_dir):
    if (file, damage) == (MANIFEST_FILE, lengthen):
        pytest.skip("white space behind the JSON is no damage")
    damage(run_dir / "global_step_3" / file)
    assert_named(run_dir, Path(file).name)


def test_a_shard_of_the_other_role(run_dir):
    newest = run_dir / "global_step_3"
    shutil.copy(newest / "critic/shard-00000.safetensors", newest / "actor/shard-00000.safetensors")
    assert_named(run_dir, "actor/shard-00000.safetensors")


@pytest.mark.parametrize("what", ["actor", "critic", "tokenizer", "trainer.json", "actor/engine.json"])
def test_a_part_of_another_step(what, run_dir):
    newest, other = run_dir / "global_step_3" / what, run_dir / "global_step_2" / what
    if newest.is_file():
        shutil.copy(other, newest)
        assert_named(run_dir, what)
        return
    shutil.rmtree(newest)
    shutil.copytree(other, newest)
    if what == "tokenizer":  # which no step changes
        assert open_checkpoint(run_dir / "global_step_3").step == 3
    else:
        assert_named(run_dir, f"{what}/")


def test_a_shard_of_another_run(run_dir):
    shard = run_dir / "global_step_3" / "actor/shard-00000.safetensors"
    tensors = load_file(shard)
    tensors["model.hf.model.norm.weight"] = tensors["model.hf.model.norm.weight"] + 1
    save_file(tensors, shard)
    assert_named(run_dir, "actor/shard-00000.safetensors")


@pytest.mark.parametrize("name", ["actor/shard-00001.safetensors", "critic/model.bin", "more.json"])
def test_a_file_too_many(name, run_dir):
    (run_dir / "global_step_3" / name).write_bytes(b"x")
    assert_named(run_dir, name)


def test_a_whole_role_is_missing(run_dir):
    shutil.rmtree(run_dir / "global_step_3" / "critic")
    assert_named(run_dir, "critic/")


def test_a_checkpoint_under_the_name_of_a_later_step(run_dir):
    shutil.rmtree(run_dir / "global_step_3")
    shutil.copytree(run_dir / "global_step_2", run_dir / "global_step_3")
    said: list[str] = []
    found = CheckpointStore(run_dir).find("auto", None, said.append)
    assert found is not None and found.folder.name == "global_step_2" and "of step 2" in said[0]


def test_another_step_in_the_state(run_dir):
    file = run_dir / "global_step_3" / "trainer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "step": 9}))
    write_manifest(run_dir / "global_step_3", step=3, kind="PPO")
    assert_named(run_dir, "step 9")


def test_a_later_format(run_dir, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr("valor.trainer.checkpoints._FORMAT", 99)
        write_manifest(run_dir / "global_step_3", step=3, kind="PPO")
    assert_named(run_dir, "format 99")


@pytest.mark.parametrize("kind", ["a file", "an empty folder", "a link to nowhere"])
def test_something_else_under_the_name_of_a_checkpoint(kind, run_dir):
    newest = run_dir / "global_step_3"
    shutil.rmtree(newest)
    if kind == "a file":
        newest.write_text("notes")
    elif kind == "an empty folder":
        newest.mkdir()
    else:
        newest.symlink_to(run_dir / "nowhere")
    assert_named(run_dir)


def test_hidden_files_are_no_damage(run_dir):
    (run_dir / "global_step_3" / "actor" / ".DS_Store").write_bytes(b"x")
    assert open_checkpoint(run_dir / "global_step_3").step == 3


def test_only_damaged_ones_stop_the_run(run_dir, ppo_arguments, capsys):
    for step in (2, 3):
        DAMAGES[0](run_dir / f"global_step_{step}" / "actor" / "shard-00000.safetensors")
    assert main(ppo_arguments(run_dir)) == 2
    error = capsys.readouterr().err.strip()
    assert "global_step_2" in error and "global_step_3" in error and "resume_mode=disable" in error
    assert "\n" not in error and sorted(path.name for path in run_dir.iterdir()) == ["global_step_2", "global_step_3"]


def test_the_run_goes_on_from_the_one_before(run_dir, finished_ppo, ppo_arguments, capsys):
    DAMAGES[0](run_dir / "global_step_3" / "critic" / "shard-00000.safetensors")
    shutil.copy(finished_ppo / "metrics.jsonl", run_dir)
    assert main(ppo_arguments(run_dir)) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "critic/shard-00000.safetensors has other content" in said and "resumed from" in said
    for role in ("actor", "critic"):
        ours, theirs = (load_file(one / "huggingface" / role / "model.safetensors") for one in (run_dir, finished_ppo))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (run_dir / "previous" / "1" / "global_step_3").is_dir()  # the damaged one is not deleted


def test_a_given_damaged_one_stops_the_run(run_dir, ppo_arguments, capsys):
    DAMAGES[0](run_dir / "global_step_3" / "actor" / "shard-00000.safetensors")
    given = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={run_dir / 'global_step_3'}"]
    assert main(ppo_arguments(run_dir, *given)) == 2
    error = capsys.readouterr().err.strip()
    assert "actor/shard-00000.safetensors has other content" in error and "\n" not in error


def test_an_export_of_a_damaged_one(run_dir):
    DAMAGES[0](run_dir / "global_step_3" / "actor" / "shard-00000.safetensors")
    with pytest.raises(UserError, match="other content"):
        export_checkpoint(run_dir / "global_step_3", run_dir / "out", "actor")
    export_checkpoint(run_dir / "global_step_3", run_dir / "out", "critic")
    with pytest.raises(UserError, match=r"holds no \.\.: it has actor, critic"):
        export_checkpoint(run_dir / "global_step_3", run_dir / "beside", "..")


# ---- killed at any moment


class Killed(BaseException):
    """In place of SIGKILL: nothing catches it to tidy up."""


CALLS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "open")


def kill_at(number: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Call `number` of the file system's calls that change something does not return; the calls so far."""
    calls: list[str] = []

    def counted(name, function):
        def call(*args, **kwargs):
            calls.append(name)
            if len(calls) == number:
                raise Killed
            return function(*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    return calls


def save(store: CheckpointStore, step: int, mark: str) -> None:
    def write_roles(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights").write_text(mark * 10)

    store.save("PPO", {"step": step, "mark": mark}, write_roles, set())


@pytest.mark.parametrize("keep", [None, 1])
def test_killed_while_a_step_is_replaced(keep, tmp_path, monkeypatch):
    """Before every call of the file system: afterwards the old checkpoint of the step is whole, or the new one."""
    marks, number = set(), 0
    while True:
        number += 1
        run_dir = tmp_path / str(number)
        for step in (1, 2):
            save(CheckpointStore(run_dir), step, "old")
        with monkeypatch.context() as patched:
            calls = kill_at(number, patched)
            with suppress(Killed):
                save(CheckpointStore(run_dir, keep), 2, "new")
        found = CheckpointStore(run_dir).find("auto", None, pytest.fail)
        assert found is not None and found.step == 2
        assert (found.folder / "actor" / "weights").read_text() == found.state["mark"] * 10
        marks.add(found.state["mark"])
        save(CheckpointStore(run_dir), 3, "next")
        left = {path.name for path in run_dir.iterdir()}
        assert left <= {"global_step_1", "global_step_2", "global_step_3"}
        if len(calls) < number:
            break
    assert marks == {"old", "new"} and number > 15


def test_killed_while_old_ones_are_deleted(tmp_path, monkeypatch):
    for number in range(1, 30):
        run_dir = tmp_path / str(number)
        for step in (1, 2, 3):
            save(CheckpointStore(run_dir), step, "old")
        with monkeypatch.context() as patched:
            kill_at(number, patched)
            with suppress(Killed):
                save(CheckpointStore(run_dir, 1), 4, "new")
        found = CheckpointStore(run_dir).find("auto", None, pytest.fail)
        assert found is not None and found.step in (3, 4)
        for step in CheckpointStore(run_dir).steps():  # what still has its name is whole
            open_checkpoint(run_dir / f"global_step_{step}")


# ---- numbers that are not finite


@pytest.fixture(scope="module")
def alone():
    distributed.init_process_group("cpu")
    yield
    distributed.leave_process_group()


@pytest.fixture
def module(tiny, alone):
    from transformers import AutoModelForCausalLM

    from valor.models.policy import PolicyModel

    return PolicyModel(AutoModelForCausalLM.from_pretrained(tiny["model"]))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_not_saved(number, module, tmp_path):
    with torch.no_grad():
        module.hf.model.norm.weight[3] = number
    with pytest.raises(Diverged, match=r"model\.norm\.weight is not finite"):
        engine_checkpoint.save(tmp_path / "actor", module, None, engine_checkpoint.Counters())
    assert not (tmp_path / "actor").exists()


def test_optimizer_state_that_is_not_finite_is_not_saved(module, tmp_path):
    optimizer = torch.optim.AdamW(module.parameters())
    weight = module.hf.model.norm.weight
    optimizer.state[weight] = {"step": torch.tensor(1.0), "exp_avg_sq": torch.full_like(weight, torch.inf)}
    with pytest.raises(Diverged, match=r"exp_avg_sq of .*norm"):
        engine_checkpoint.save(tmp_path / "actor", module, optimizer, engine_checkpoint.Counters())


def test_weights_that_are_not_finite_are_not_loaded(module, tmp_path):
    engine_checkpoint.save(tmp_path, module, None, engine_checkpoint.Counters())
    tensors = load_file(tmp_path / "shard-00000.safetensors")
    with torch.no_grad():
        tensors["model.hf.model.norm.weight"][0] = torch.nan
    from safetensors import safe_open

    with safe_open(tmp_path / "shard-00000.safetensors", framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, tmp_path / "shard-00000.safetensors", metadata=metadata)
    with pytest.raises(UserError, match="not finite"):
        engine_checkpoint.load(tmp_path, module, None)


@pytest.mark.parametrize("rate", ["1e30", "1e4", "1e38"])
def test_a_learning_rate_that_ruins_the_weights(rate, ppo_arguments, tmp_path, capsys):
    """Nothing of it is saved, and the line names what is left."""
    assert main(ppo_arguments(tmp_path / "run", f"actor_rollout_ref.actor.optim.lr={rate}")) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("stopped: an update has ruined the weights") and "no checkpoint yet" in error
    assert not list((tmp_path / "run").glob("global_step_*")) and not (tmp_path / "run" / "huggingface").exists()
