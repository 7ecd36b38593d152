"""From a sweep's YAML to its runs: arms, names, command lines; and every mistake told before anything runs."""

import shlex
from pathlib import Path

import pytest

from valor.cli import main
from valor.errors import UserError
from valor.lab.sweep_plan import SweepConfig, expand, plan_sweep, read_sweep

BASE = {"data": {"train_files": "t.parquet", "train_batch_size": 256}, "trainer.total_training_steps": 2}


def sweep(**keys) -> SweepConfig:
    return SweepConfig.model_validate({"name": "s", "base": BASE, "seeds": [3, 5], "out": "out"} | keys)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_named_arms_cross_the_grid():
    arms = expand(sweep(arms={"a": None, "b": ["algorithm.gamma=0.9"]}, grid={"algorithm.lam": [0.9, 1.0]}))
    assert list(arms) == ["a-lam=0.9", "a-lam=1.0", "b-lam=0.9", "b-lam=1.0"]
    assert arms["b-lam=1.0"] == ["algorithm.gamma=0.9", "algorithm.lam=1.0"]
    grid = {"algorithm.lam": [0.9, 1.0], "algorithm.use_kl_in_reward": [True, False]}
    assert len(expand(sweep(grid=grid))) == 4


def test_every_arm_of_a_seed_differs_in_its_settings_alone():
    planned = plan_sweep(sweep(arms={"a": None, "b": {"algorithm": {"lam": 0.9}}}))
    assert [run.name for run in planned.runs] == ["a seed 3", "b seed 3", "a seed 5", "b seed 5"]
    first, second = (set(run.command) for run in planned.runs[:2])
    assert first ^ second == {
        "algorithm.lam=0.9",
        "trainer.experiment_name=s-a-seed_3",
        "trainer.experiment_name=s-b-seed_3",
        "trainer.default_local_dir=out/a/seed_3",
        "trainer.default_local_dir=out/b/seed_3",
    }
    assert "trainer.seed=3" in first and "trainer.resume_mode=auto" in first
    assert planned.differing == ("algorithm.lam",)  # lam_actor and lam_critic only follow it
    assert planned.control == "a"


def test_an_arm_refers_to_another_arm_s_run_of_the_same_seed():
    arms = {"ppo": None, "frozen": {"critic.freeze": True, "critic.model.path": "<run:ppo>/huggingface/critic"}}
    run = plan_sweep(sweep(arms=arms)).runs[3]
    assert run.after == {"ppo seed 5"}
    assert "critic.model.path=out/ppo/seed_5/huggingface/critic" in run.command
    moved = plan_sweep(sweep(arms=arms, out="elsewhere")).runs[3]
    assert moved.settings == run.settings  # the same run in another place
    assert run.settings["critic.model.path"] == "OUT/ppo/seed_0/huggingface/critic"


def test_values_reach_the_run_as_written():
    arms = {"a": {"trainer.rollout_data_dir": "<seed>/my files", "data.train_files": ["x.parquet", "y 1.parquet"]}}
    planned = plan_sweep(sweep(base={}, arms=arms))
    assert "trainer.rollout_data_dir=3/my files" in planned.runs[0].command
    assert planned.runs[0].settings["data.train_files"] == ["x.parquet", "y 1.parquet"]
    planned = plan_sweep(sweep(base=BASE | {"trainer.rollout_data_dir": "of/<seed>"}, arms={"a": None}))
    assert "trainer.rollout_data_dir=of/5" in planned.runs[1].command


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"arms": {}}, "nothing to compare"),
        ({"arms": {"a/b": None}}, "no name for a folder"),
        ({"arms": {"a": None}, "control": "c"}, "control: there is no arm 'c': there are a"),
        ({"arms": {"a": None}, "seeds": [1, 1]}, "names a seed twice"),
        (
            {"arms": {"a": None}, "entry": "pppo"},
            "entry: 'pppo' is no command to sweep: there are ppo, sft, rm train, critic pretrain",
        ),
        ({"arms": {"a": {"trainer.seed": 1}}}, "arm a: trainer.seed is set by the sweep"),
        ({"arms": {"a": {"data.seed": 1}}}, "arms of a seed get the same prompts"),
        ({"arms": {"a": {"trainer.seeed": 1}}}, "unknown key 'trainer.seeed': did you mean 'trainer.seed'"),
        ({"arms": {"a": {"critic.model.path": "<run:b>/x"}}}, "arm a: <run:b> is no arm"),
        ({"arms": {"a": {"critic.model.path": "<run:a>/x"}}}, "in a circle: a -> a"),
        ({"arms": {"a": None}, "base": {"critic.model.path": "<run:a>/x"}}, "in a circle: a -> a"),
        ({"arms": {"a": None}, "grid": {"algorithm.lam": [0.9, 0.9]}}, "two have the same name, 'a-lam=0.9'"),
    ],
)
def test_mistakes(keys, said):
    with pytest.raises(UserError) as caught:
        plan_sweep(sweep(**keys))
    assert said in str(caught.value)


def test_all_mistakes_of_all_arms_at_once():
    arms = {"a": {"algorithm.lam": 2}, "b": {"algoritm.lam": 1}, "c": None}
    with pytest.raises(UserError) as caught:
        plan_sweep(sweep(base=BASE | {"critic.enabel": True}, arms=arms))
    lines = str(caught.value).splitlines()
    assert "arm a: algorithm.lam: expected number from 0 to 1 or auto, got 2" in lines and len(lines) == 3
    assert {line.partition(" key")[0] for line in lines} >= {"every arm: unknown", "arm b: unknown"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arms: {a: }\ncontrl: a\n", "unknown key 'contrl': did you mean 'control'?"),
        ("arms: {a: }\nseeds: three\n", "seeds: expected integer >= 0 or a list of them, got 'three'"),
        ("arms: [\n", "line 2: not valid yaml"),
        ("- a\n", "must hold keys"),
    ],
)
def test_a_file_with_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys, text, said):
    path = write(tmp_path / "sweep.yaml", text)
    assert main(["lab", "sweep", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_no_such_file(tmp_path, capsys):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    assert main(["lab", "sweep", str(tmp_path / "binary.yaml")]) == 2
    assert "binary.yaml: not valid yaml ('utf-8' codec" in capsys.readouterr().err
    assert main(["lab", "sweep", str(tmp_path / "nothing.yaml")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_dry_run_shows_the_commands(tmp_path, capsys):
    path = write(tmp_path / "mine.yaml", "arms: {a: , b: {algorithm.lam: 0.9}}\nseeds: [0]\n")
    assert read_sweep(path).out == "runs/sweeps/mine"
    files = [f"data.train_files={tmp_path / 'a.parquet'}", f"actor_rollout_ref.model.path={tmp_path / 'model'}"]
    words = ["lab", "sweep", str(path), "--out", str(tmp_path / "o"), "algorithm.gamma=0.5", *files]
    assert main([*words, "--dry-run"]) == main(words) == 2, "neither begins a run that lacks a file"
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2 and "algorithm.gamma=0.5" in shlex.split(out.splitlines()[0])
    assert "a.parquet: no such file" in err and "there is no model directory" in err
    (tmp_path / "a.parquet").write_text("rows")
    (tmp_path / "model").mkdir()
    assert main([*words, "--dry-run"]) == 0 and not (tmp_path / "o").exists()


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[3] / "examples" / "lab").glob("*.yaml")))
def test_the_examples_can_run(file, monkeypatch):
    monkeypatch.chdir(file.parents[2])
    planned = plan_sweep(read_sweep(file))
    assert len(planned.runs) == len(planned.arms) * len(planned.config.seeds) and planned.differing


def test_a_sweep_s_name_and_folder_may_have_brackets():
    planned = plan_sweep(sweep(name="gae (1)", out="my, runs (2)/gae", arms={"a": {"critic.model.path": "x"}}))
    assert "trainer.experiment_name='gae (1)-a-seed_3'" in planned.runs[0].command
    assert planned.runs[0].folder == Path("my, runs (2)/gae/a/seed_3")
