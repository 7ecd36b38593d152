"""Every mistake of a user's: one clear line that names it, exit code 2, no traceback, nothing written."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from valor.trainer.main_ppo import main


def stops_with(arguments: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    error = captured.err.strip()
    for word in words:
        assert word in error, error
    assert "Traceback" not in error and len([x for x in error.splitlines() if not x.startswith("note:")]) == 1, error
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.actor.optim.learning_rate=1", ["learning_rate", "actor_rollout_ref.actor.optim.lr"]),
        ("actor_rollout_ref.actor.optim.lr=fast", ["actor_rollout_ref.actor.optim.lr", "fast"]),
        ("critic.enable=false", ["gae", "critic"]),
        ("data.train_files=/nowhere/train.parquet", ["/nowhere/train.parquet"]),
        ("actor_rollout_ref.model.path=/nowhere/model", ["/nowhere/model"]),
        ("algorithm.adv_estimator=gea", ["gea", "gae"]),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanila", ["vanila", "vanilla"]),
        ("data.train_batch_size=100000", ["train_batch_size"]),
        ("trainer.resume_mode=resume_path", ["trainer.resume_from_path"]),
        ("reward.custom_reward_function.path=/nowhere/reward.py", ["/nowhere/reward.py"]),
    ],
)
def test_a_wrong_setting(override, words, overrides, tmp_path, capsys):
    stops_with(overrides(tmp_path / "run", override), tmp_path / "run", capsys, *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_gpus_that_are_not_there(overrides, tmp_path, capsys):
    arguments = overrides(tmp_path / "run", "trainer.device=auto", "trainer.n_gpus_per_node=8")
    stops_with(arguments, tmp_path / "run", capsys, "n_gpus_per_node=8", "trainer.device=cpu")


def test_unknown_keys_are_named_all_at_once(overrides, tmp_path, capsys):
    assert main(overrides(tmp_path / "run", "critic.optim.lrr=1", "data.trian_files=x")) == 2
    error = capsys.readouterr().err
    assert "critic.optim.lrr" in error and "data.trian_files" in error
    assert not (tmp_path / "run").exists()


def test_broken_data_files(overrides, tmp_path, capsys):
    malformed, empty, wrong = (tmp_path / f"{n}.parquet" for n in ("malformed", "empty", "wrong"))
    malformed.write_bytes(b"this is not parquet")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    pq.write_table(pa.table({"text": ["1+1"]}), wrong)
    for file in (malformed, empty, wrong):
        stops_with(overrides(tmp_path / "run", f"data.train_files={file}"), tmp_path / "run", capsys, file.name)


def test_a_model_folder_that_holds_no_model(overrides, tmp_path, capsys):
    (tmp_path / "nothing").mkdir()
    override = f"actor_rollout_ref.model.path={tmp_path / 'nothing'}"
    stops_with(overrides(tmp_path / "run", override), tmp_path / "run", capsys, str(tmp_path / "nothing"))


def test_episodes_that_are_longer_than_the_model_reads(overrides, tmp_path, capsys):
    key = "actor_rollout_ref.rollout.max_model_len"
    arguments = overrides(tmp_path / "run", f"{key}=1025", "actor_rollout_ref.rollout.multi_turn.enable=true")
    stops_with(arguments, tmp_path / "run", capsys, f"{key} is 1025 tokens", "has 1024 positions: set it lower")


def test_a_tokenizer_without_chat_template(tiny, overrides, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(tiny["model"])
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    override = f"actor_rollout_ref.model.tokenizer_path={tmp_path / 'tokenizer'}"
    stops_with(overrides(tmp_path / "run", override), tmp_path / "run", capsys, "chat template")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("chat.jinja", "custom_chat_template='chat.jinja' is no Jinja text, and no file"),
        ('"{{ eos_token }}"', "the chat template leaves out what the user says"),
        ('"{% if %}"', "refuses these messages"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_a_chat_template_of_no_use(template, words, dry, overrides, tmp_path, capsys):
    override = f"actor_rollout_ref.model.custom_chat_template={template}"
    assert main([*overrides(tmp_path / "run", override), *dry]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error and not (tmp_path / "run").exists()


def test_a_prompt_longer_than_the_limit(overrides, tmp_path, capsys):
    arguments = overrides(tmp_path / "run", "data.max_prompt_length=3", "data.truncation=error")
    stops_with(arguments, tmp_path / "run", capsys, "max_prompt_length", "truncation")
