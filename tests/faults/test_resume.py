"""A resumed run says how it differs from the run so far, has its folder to itself, and outlives what it lost."""

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from valor.config import PPOConfig, SFTConfig
from valor.config.tree import nested
from valor.engines.fsdp.engine import FSDPEngine
from valor.errors import Diverged, UserError
from valor.tracking.rundir import LOCK_FILE, locked
from valor.trainer.changes import changes, digests_of, settings_of
from valor.trainer.main_ppo import main
from valor.trainer.main_sft import main as main_sft
from valor.trainer.run import SkippedUpdates

pytestmark = pytest.mark.slow


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    [line] = [line for line in capsys.readouterr().err.strip().splitlines() if not line.startswith("note:")]
    return line


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def assert_same_weights(a: Path, b: Path) -> None:
    for role in ("actor", "critic"):
        ours, theirs = (load_file(one / "huggingface" / role / "model.safetensors") for one in (a, b))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# ---- which settings matter


def identity(config) -> dict:
    return json.loads(json.dumps({"settings": settings_of(config), "digests": digests_of(config)}))


def changed(*overrides: str) -> dict[str, bool]:
    """The keys that a resumed run of PPO would name, and whether each leaves it the same run."""
    flat = dict(one.split("=", 1) for one in overrides)
    flat = {key: yaml.safe_load(value) for key, value in flat.items()}
    before, now = identity(PPOConfig()), identity(PPOConfig(**nested(flat)))
    return {change.line.partition(":")[0]: change.exact for change in changes(PPOConfig, before, now)}


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.gamma=0.9",
        "algorithm.lam=0.9",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "critic.optim.lr=1e-4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.clip_ratio_low=0.1",
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.temperature=0.5",
        "actor_rollout_ref.model.path=other/model",
        "actor_rollout_ref.model.lora_rank=8",
        'actor_rollout_ref.model.override_config={"attn_implementation": "eager"}',
        "critic.value_loss=bce",
        'data.train_files=["/nowhere/other.parquet"]',
        "data.train_batch_size=512",
        "data.train_max_samples=100",
        "data.max_response_length=64",
        "data.shuffle=false",
        "trainer.seed=7",
        "trainer.critic_warmup=3",
        "reward.custom_reward_function.path=/nowhere/reward.py",
        'reward.custom_reward_function.reward_kwargs={"k": 1}',
        "reward.error_score=-1.0",
        "reward.reward_manager.name=dapo",
    ],
)
def test_settings_that_make_another_run(override):
    key = override.partition("=")[0]
    found = changed(override)
    named = [name for name in found if name == key or name.startswith(f"{key}.")]
    assert named and not any(found[name] for name in named), found


@pytest.mark.parametrize(
    "override",
    [
        "trainer.save_freq=5",
        "trainer.test_freq=5",
        'trainer.logger=["console"]',
        "trainer.default_local_dir=/elsewhere",
        "trainer.experiment_name=other",
        "trainer.max_ckpt_to_keep=2",
        "trainer.n_gpus_per_node=4",
        "trainer.num_threads=2",
        "trainer.nnodes=2",
        "trainer.total_epochs=60",
        "trainer.total_training_steps=500",
        "trainer.log_generations=9",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.fsdp_config.param_offload=true",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "ray_kwargs.ray_init.num_cpus=3",
        "reward.num_workers=3",
    ],
)
def test_settings_that_leave_the_run_the_same(override):
    found = changed(override)
    assert override.partition("=")[0] in found and all(found.values()), found


def test_a_key_that_follows_another_is_not_named():
    assert "data.seed" not in changed("trainer.seed=7")
    assert "critic.model.path" not in changed("actor_rollout_ref.model.path=other/model")


@pytest.mark.parametrize("schedule", ["actor.optim.lr_scheduler_type=cosine", "actor.optim.lr_warmup_steps_ratio=0.1"])
def test_the_length_matters_where_a_learning_rate_depends_on_it(schedule):
    key, _, value = f"actor_rollout_ref.{schedule}".partition("=")
    same = {key: value if value == "cosine" else float(value)}
    first = PPOConfig(**nested({**same, "trainer.total_training_steps": 10}))
    longer = PPOConfig(**nested({**same, "trainer.total_training_steps": 20}))
    [change] = changes(PPOConfig, identity(first), identity(longer))
    assert change == ("trainer.total_training_steps: 10 -> 20", False)
    epochs = PPOConfig(**nested({**same, "trainer.total_training_steps": 10, "trainer.total_epochs": 7}))
    assert [change.exact for change in changes(PPOConfig, identity(first), identity(epochs))] == [True]  # not read


@pytest.mark.parametrize("value", [None, 0, 3, "x", [], {}])
def test_keys_of_another_version_are_named_and_ignored(value):
    before, now = identity(PPOConfig()), identity(PPOConfig())
    before["settings"] |= {"trainer.gone": value, "actor_rollout_ref.old.deep.key": value}
    del before["settings"]["algorithm.lam"]  # and one that the earlier version did not have
    line = "ignored, this version has no such keys: trainer.gone, actor_rollout_ref.old.deep.key"
    assert list(changes(PPOConfig, before, now)) == [(line, True)]
    before["settings"] |= {"algorithm.gamma": 0.5, "algorithm.adv_kwargs.mine": 1}  # real differences stay ones
    found = {change.line.partition(":")[0]: change.exact for change in changes(PPOConfig, before, now)}
    assert not found["algorithm.gamma"] and not found["algorithm.adv_kwargs.mine"]


# ---- what files hold


def contents(tmp_path: Path, **files: bytes) -> SFTConfig:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    data = {"train_files": [str(tmp_path / "train.jsonl")]}
    return SFTConfig(model={"path": str(tmp_path / "model")}, data=data)


FILES = {"train.jsonl": b"1\n2\n", "model/config.json": b"{}", "model/model.safetensors": bytes(70 << 20)}


@pytest.mark.parametrize(
    ("file", "change", "key"),
    [
        ("train.jsonl", lambda content: content[::-1], "data.train_files"),
        ("model/config.json", lambda content: b"[]", "model.path"),
        ("model/model.safetensors", lambda content: b"x" * len(content), "model.path"),
        ("model/model.safetensors", lambda content: content + b"x", "model.path"),
        ("model/tokenizer.json", lambda content: b"{}", "model.path"),
    ],
)
def test_other_content_under_the_same_name(file, change, key, tmp_path):
    before = identity(contents(tmp_path, **FILES))
    after = identity(contents(tmp_path, **{file: change(FILES.get(file, b""))}))
    lines = [one.line for one in changes(SFTConfig, before, after)]
    assert len(lines) == 1 and lines[0].startswith(f"{key}: ") and lines[0].endswith("has other content")


def test_the_same_content_under_another_name(tmp_path):
    before = identity(contents(tmp_path / "a", **FILES))
    found = list(changes(SFTConfig, before, identity(contents(tmp_path / "b", **FILES))))
    assert found and all(one.exact for one in found) and any("the same content" in one.line for one in found)


# ---- whole runs


@pytest.fixture
def half(finished_ppo, tmp_path) -> Path:
    """The folder of a run that was ended after two of three steps."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished_ppo, run_dir)
    for lost in ("global_step_3", "huggingface"):
        shutil.rmtree(run_dir / lost)
    return run_dir


def test_a_changed_setting_stops_the_run_or_is_said(half, ppo_arguments, capsys):
    before = sorted(path.name for path in half.iterdir())
    other = ["algorithm.gamma=0.5", "trainer.seed=3"]
    assert main(ppo_arguments(half, *other)) == 2
    line = one_line(capsys)
    assert all(word in line for word in ("gamma: 1.0 -> 0.5", "trainer.seed: 42 -> 3", "trainer.resume_changed=allow"))
    assert sorted(path.name for path in half.iterdir()) == before
    assert main(ppo_arguments(half, *other, "trainer.resume_changed=allow")) == 0
    out = said(capsys)
    assert "changed since global_step_2: algorithm.gamma: 1.0 -> 0.5" in out and "resumed from" in out


def test_harmless_settings_are_said_and_the_run_is_the_same(half, ppo_arguments, finished_ppo, capsys):
    assert main(ppo_arguments(half, "trainer.save_freq=2", "trainer.max_ckpt_to_keep=2")) == 0
    assert "changed since global_step_2: trainer.save_freq: 1 -> 2" in said(capsys)
    assert_same_weights(half, finished_ppo)


@pytest.mark.parametrize("what", ["reordered", "other answers"])
def test_changed_data_with_as_many_rows(what, half, ppo_arguments, tiny, tmp_path, capsys):
    table = pq.read_table(tiny["train"])
    rows = table.to_pylist()
    if what == "reordered":
        rows.reverse()
    else:
        rows[0]["reward_model"]["ground_truth"] += "1"
    other = tmp_path / "train.parquet"
    pq.write_table(type(table).from_pylist(rows, schema=table.schema), other)
    assert main(ppo_arguments(half, f"data.train_files={other}")) == 2
    assert "data.train_files" in one_line(capsys)
    shutil.copy(tiny["train"], other)
    assert main(ppo_arguments(half, f"data.train_files={other}")) == 0
    assert "the same content" in said(capsys)


def test_another_grader_in_the_same_file(half, ppo_arguments, tmp_path, capsys):
    grader = tmp_path / "grader.py"
    grader.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    assert main(ppo_arguments(half, f"reward.custom_reward_function.path={grader}")) == 2
    assert "reward.custom_reward_function.path" in one_line(capsys)


def test_a_longer_run_goes_on(half, ppo_arguments, capsys):
    assert main(ppo_arguments(half, "trainer.total_training_steps=4")) == 0
    assert "resumed from" in said(capsys) and (half / "global_step_4" / "manifest.json").is_file()


def test_a_run_of_another_kind_in_the_folder(half, sft_arguments, capsys):
    assert main_sft(sft_arguments(half)) == 2
    assert "a checkpoint of a PPO run, this is a SFT run" in one_line(capsys)


def test_a_fresh_start_leaves_no_checkpoint_that_a_later_resume_could_take(half, ppo_arguments):
    again = ["trainer.resume_mode=disable", "trainer.total_training_steps=1"]
    assert main(ppo_arguments(half, *again)) == 0
    assert [path.name for path in half.glob("global_step_*")] == ["global_step_1"]
    assert {path.name for path in (half / "previous" / "1").glob("g*")} == {"global_step_1", "global_step_2"}


def test_an_earlier_checkpoint_ends_the_branch_after_it(half, ppo_arguments):
    given = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={half / 'global_step_1'}"]
    assert main(ppo_arguments(half, *given, "trainer.save_freq=-1")) == 0
    assert {path.name for path in half.glob("global_step_*")} == {"global_step_1", "global_step_3"}
    assert (half / "previous" / "1" / "global_step_2").is_dir()


def test_checkpoints_name_the_class_that_was_trained(finished_ppo):
    for role, name in (("actor", "Qwen2ForCausalLM"), ("critic", "Qwen2ForTokenClassification")):
        config = json.loads((finished_ppo / "global_step_1" / role / "huggingface" / "config.json").read_text())
        assert config["architectures"] == [name]


def test_a_step_is_logged_before_it_is_saved(sft_arguments, tmp_path, monkeypatch):
    """A run that dies in its checkpoint has the step's line, and repeats it."""

    class Killed(BaseException):
        pass

    def die(run, state=None):
        raise Killed

    monkeypatch.setattr("valor.trainer.run.Run.save", die)
    with pytest.raises(Killed):
        main_sft(sft_arguments(tmp_path / "run"))
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == [1]


# ---- one run a folder

HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom valor.tracking.rundir import locked\n"
    "with locked(Path(sys.argv[1]), print):\n    print('held', flush=True)\n    time.sleep(600)\n"
)


@pytest.fixture
def holder(tmp_path):
    """Another process that has the folder `run`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_names_the_first(holder, ppo_arguments, tmp_path, capsys):
    assert main(ppo_arguments(tmp_path / "run")) == 2
    assert f"process {holder.pid} on {socket.gethostname()}" in one_line(capsys)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK_FILE]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_ends_with_its_process(number, holder, tmp_path):
    holder.send_signal(number)
    holder.wait()
    with locked(tmp_path / "run", pytest.fail):
        assert (tmp_path / "run" / LOCK_FILE).exists()
    assert not (tmp_path / "run" / LOCK_FILE).exists()


FORKED = HOLD.replace("    print('held'", "    import os\n    child = os.fork()\n    child and print(child, 'held'")


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """A grader may outlive a driver that is killed."""
    process = subprocess.Popen([sys.executable, "-c", FORKED, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[0])
    try:
        with pytest.raises(UserError, match="going on"), locked(tmp_path, pytest.fail):
            pass
        process.kill()
        process.wait()
        with locked(tmp_path, pytest.fail):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    lines: list[str] = []
    with locked(tmp_path, lines.append):
        pass
    assert len(lines) == 1 and "has no locks" in lines[0]


def test_a_folder_that_was_made_for_the_lock_alone_goes_away(tmp_path):
    with locked(tmp_path / "new", pytest.fail):
        pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with locked(tmp_path / "old", pytest.fail):
        pass
    assert (tmp_path / "old").is_dir()


# ---- weights and processes that are lost


def fail_once(monkeypatch: pytest.MonkeyPatch, call: int, error: Exception) -> None:
    """The optimizer step with this number, over all roles, ends with an error."""
    step, calls = FSDPEngine.optimizer_step, []

    def optimizer_step(engine, **options):
        calls.append(engine)
        if len(calls) == call:
            raise error
        return step(engine, **options)

    monkeypatch.setattr(FSDPEngine, "optimizer_step", optimizer_step)


def test_lost_weights_end_the_run_with_the_last_good_checkpoint(ppo_arguments, tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patched:
        fail_once(patched, 5, Diverged("the weights are gone"))
        assert main(ppo_arguments(run_dir)) == 1
    line = one_line(capsys)
    assert line.startswith("stopped: the weights are gone") and f"'{run_dir / 'global_step_2'}'" in line
    assert main(ppo_arguments(run_dir)) == 0
    assert "resumed from" in said(capsys)


def test_saves_are_put_off_while_updates_are_skipped(ppo_arguments, tmp_path, monkeypatch):
    """The checkpoint of the step before the first skipped update is the newest one, until an update counts again."""
    step, calls = FSDPEngine.optimizer_step, []

    def optimizer_step(engine, **options):
        calls.append(engine)
        if len(calls) in (3, 4):  # critic and actor of the second step
            next(p for p in engine.module.parameters() if p.grad is not None).grad.fill_(torch.nan)
        return step(engine, **options)

    monkeypatch.setattr(FSDPEngine, "optimizer_step", optimizer_step)
    assert main(ppo_arguments(tmp_path / "run", "trainer.total_training_steps=4", "trainer.save_freq=2")) == 0
    assert {path.name for path in (tmp_path / "run").glob("global_step_*")} == {"global_step_3", "global_step_4"}


def test_updates_that_are_always_skipped_end_the_run():
    skips = SkippedUpdates(2, lambda line: None)
    skips.count("actor", True, 1)
    with pytest.raises(Diverged, match="2 updates in a row had non-finite gradients"):
        skips.count("actor", True, 2)
