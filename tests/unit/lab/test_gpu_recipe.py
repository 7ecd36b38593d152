"""The commands of docs/gpu.md: complete on data as they make it, and within the memory of the cards they name."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from valor import cli
from valor.config import PPOConfig
from valor.lab import arithmetic
from valor.trainer import checks
from valor.trainer.command import load_checked
from valor.trainer.memory_plan import GIB, Machine, estimate

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/gpu.md").read_text()
COMMANDS = [
    shlex.split(text.replace("\\\n", " "))
    for text in re.findall(r"```bash\n((?:valor ppo|python ex).*?)```", PAGE, re.S)
]
RUNS = [words[2:] for words in COMMANDS if words[:2] == ["valor", "ppo"]]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The config.json of a model of the shape of Qwen2.5-0.5B."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True).save_pretrained(folder)
    return folder


def test_there_is_a_command_for_each_algorithm():
    assert [words[1] for words in RUNS] == ["ppo_config", "grpo_config"]


@pytest.mark.parametrize("words", RUNS, ids=lambda words: words[1])
def test_a_dry_run_finds_nothing_missing(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for split, count in (("train", 300), ("test", 20)):
        rows = ({"question": f"What is {i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(count))
        (tmp_path / f"gsm8k_{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (prepare,) = (words for words in COMMANDS if words[0] == "python")
    script = [sys.executable, ROOT / prepare[1], *prepare[2:], "--local_dataset_path", tmp_path]
    subprocess.run(script, check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True)
    model = arithmetic.make_model(tmp_path / "model")
    lengths = ["data.max_prompt_length=240", "data.max_response_length=16", f"actor_rollout_ref.model.path={model}"]
    assert cli.main(["ppo", *words, *lengths, "--dry-run"]) == 0, capsys.readouterr()


@pytest.mark.parametrize("gib", [24, 80])
@pytest.mark.parametrize("words", RUNS, ids=lambda words: words[1])
def test_it_fits_and_the_page_says_with_which_micro_batches(words, gib, small, monkeypatch):
    monkeypatch.setattr(checks, "gpu_bytes", lambda: gib * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = load_checked([*words, f"actor_rollout_ref.model.path={small}"], PPOConfig).config
    card = Machine("cuda", 1, gib * GIB)
    assert estimate(config, card).fits(card)
    column = 1 if words[1] == "ppo_config" else 2
    (row,) = [line.split("|")[1:] for line in PAGE.splitlines() if line.startswith("| micro-batches chosen")]
    chosen = row[column].replace(",", "").split("/")[gib == 80]
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == int(chosen)
    limits = [f"{name}.ppo_max_token_len_per_gpu=32768" for name in ("actor_rollout_ref.actor", "critic")]
    plain = load_checked([*words, f"actor_rollout_ref.model.path={small}", *limits], PPOConfig).config
    expected = estimate(plain, card)
    (row,) = [line.split("|")[1:] for line in PAGE.splitlines() if line.startswith("| memory at most")]
    assert float(row[column].split()[0]) == pytest.approx(expected.peak(expected.worst) / GIB, abs=0.06)
    if gib == 80:
        off = [f"{name}.model.enable_gradient_checkpointing=false" for name in ("actor_rollout_ref", "critic")]
        config = load_checked([*words, f"actor_rollout_ref.model.path={small}", *off[: 3 - column]], PPOConfig).config
        assert estimate(config, card).fits(card)
