"""Training of a reward model: the loss, what a run leaves, resume, processes, and bad input."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_reward_models import TEMPLATE, make_backbone, make_classifier, make_deberta
from valor.trainer.main_sft import rm_train as main

pytestmark = pytest.mark.slow

WORDS = ["good", "fine", "kind", "calm", "bad", "rude", "dull", "mean"]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    return make_backbone(tmp_path_factory.mktemp("rm") / "model")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Answers that end with "yes" are preferred in source a, "no" ones in nobody's; length says nothing."""
    draw = random.Random(0)
    rows = []
    for i in range(48):
        words = [" ".join(draw.choices(WORDS, k=draw.randint(1, 3))) for _ in range(2)]
        chosen, rejected = f"{words[0]} yes", f"{words[1]} no"
        rows.append({"prompt": f"q{i}", "chosen": chosen, "rejected": rejected, "source": "ab"[i % 2]})
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def overrides(model: Path, files: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}",
        f"data.train_files={files}",
        "data.val_share=0.25",
        "data.train_batch_size=12",
        "data.max_length=64",
        "optim.lr=5e-3",
        "fsdp_config.dtype=float32",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        "trainer.total_training_steps=4",
        f"trainer.default_local_dir={run_dir}",
        *more,
    ]


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "huggingface" / "reward_model" / "model.safetensors")


@pytest.fixture(scope="module")
def trained(backbone, pairs, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    more = ("trainer.total_training_steps=40", "trainer.test_freq=20")
    assert main(overrides(backbone, pairs, run_dir, *more)) == 0
    return run_dir


def test_a_run_learns_and_says_how_well(trained):
    rows = metrics_of(trained)
    assert [row["step"] for row in rows if "val/accuracy" in row] == [20, 40]
    assert rows[0]["train/loss"] > 0.5 and rows[-1]["train/loss"] < 0.2
    assert rows[-1]["val/accuracy"] > 0.9 and {"val/accuracy/a", "val/accuracy/b", "val/loss"} <= rows[-1].keys()
    assert all(row["train/pairs"] == 12 for row in rows)


def test_the_model_is_an_ordinary_one(trained, without_valor):
    code = (
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer\n"
        f"path = {str(trained / 'huggingface' / 'reward_model')!r}\n"
        "tok, model = AutoTokenizer.from_pretrained(path), AutoModelForSequenceClassification.from_pretrained(path)\n"
        "chat = lambda a: [{'role': 'user', 'content': 'new'}, {'role': 'assistant', 'content': a}]\n"
        "texts = [tok.apply_chat_template(chat(a), tokenize=False) for a in ('calm yes', 'calm and kind no')]\n"
        "inputs = tok(texts, add_special_tokens=False, padding=True, return_tensors='pt')\n"
        "good, bad = model(**inputs).logits[:, 0].tolist()\n"
        "assert good > bad + 1, (good, bad)\n"
    )
    without_valor(code)


def test_a_resumed_run_is_the_uninterrupted_one(backbone, pairs, tmp_path):
    assert main(overrides(backbone, pairs, tmp_path / "whole")) == 0
    assert main(overrides(backbone, pairs, tmp_path / "parts", "trainer.total_training_steps=2")) == 0
    assert main(overrides(backbone, pairs, tmp_path / "parts")) == 0
    first, second = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_micro_batches_do_not_change_the_run(backbone, pairs, tmp_path):
    more = ("trainer.total_training_steps=2", "loss.margin=0.5", "loss.center_coef=0.1")
    assert main(overrides(backbone, pairs, tmp_path / "whole", *more)) == 0
    assert main(overrides(backbone, pairs, tmp_path / "rows", *more, "data.micro_batch_size_per_gpu=1")) == 0
    for a, b in zip(metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "rows"), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-3)


def test_an_encoder_learns_from_pairs_of_texts(pairs, tmp_path):
    model = make_deberta(tmp_path / "deberta")
    more = ("trainer.total_training_steps=6", "optim.lr=2e-3", "model.enable_gradient_checkpointing=false")
    assert main(overrides(model, pairs, tmp_path / "run", *more)) == 0
    rows = metrics_of(tmp_path / "run")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


@pytest.mark.usefixtures("hosts")
def test_two_processes_take_the_same_steps_as_one(backbone, pairs, tmp_path):
    assert main(overrides(backbone, pairs, tmp_path / "one")) == 0
    assert main(overrides(backbone, pairs, tmp_path / "two", "trainer.n_gpus_per_node=2")) == 0
    for a, b in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two"), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-4)
    assert metrics_of(tmp_path / "two")[-1]["val/accuracy"] == metrics_of(tmp_path / "one")[-1]["val/accuracy"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.train_files=/nowhere/pairs.jsonl", "no such file"),
        ("model.path=/nowhere/model", "no model directory"),
        ("data.train_batch_size=100", "fewer than one batch of 100"),
        ("data.val_share=0", None),
        ("data.chosenkey=x", "data.chosenkey"),
        ("data.chosen_key=better", "column 'better' missing"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(backbone, pairs, tmp_path, capsys, setting, message):
    if message is None:  # the one that is fine
        assert main(overrides(backbone, pairs, tmp_path / "run", setting, "trainer.total_training_steps=1")) == 0
        assert not any("val/accuracy" in row for row in metrics_of(tmp_path / "run"))
        return
    assert main(overrides(backbone, pairs, tmp_path / "run", setting)) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_classifier_of_several_labels_is_no_backbone(pairs, tmp_path, capsys):
    model = make_classifier(tmp_path / "m", num_labels=2, template=TEMPLATE)
    assert main(overrides(model, pairs, tmp_path / "run")) == 2
    assert "classifies into 2 labels; a reward model has 1" in capsys.readouterr().err


def test_equal_scores_count_one_half(pairs, tmp_path):
    model = make_classifier(tmp_path / "m", template=TEMPLATE)
    weights = load_file(model / "model.safetensors")
    save_file(weights | {"score.weight": weights["score.weight"] * 0}, model / "model.safetensors", {"format": "pt"})
    assert main(overrides(model, pairs, tmp_path / "run", "optim.lr=0", "trainer.total_training_steps=1")) == 0
    (row,) = metrics_of(tmp_path / "run")
    assert row["train/accuracy"] == row["val/accuracy"] == 0.5 and row["train/margin"] == 0


def test_dry_run_says_what_would_be_done(backbone, pairs, tmp_path, capsys):
    assert main(overrides(backbone, pairs, tmp_path / "run", "--dry-run")) == 0
    out = capsys.readouterr().out
    assert "12 pairs per update" in out
    assert not (tmp_path / "run").exists()


def test_a_template_gets_the_arguments_of_the_run(backbone, pairs, tmp_path, capsys):
    template = "{{ raise_exception('in which language?') if not language }}" + TEMPLATE
    argv = overrides(
        backbone, pairs, tmp_path / "run", f"model.custom_chat_template='{template.replace(chr(39), chr(34))}'"
    )
    assert main([*argv, "trainer.total_training_steps=1", "data.apply_chat_template_kwargs={language: en}"]) == 0
    assert main(argv) == 2
    assert "in which language?" in capsys.readouterr().err


def test_real_pairs_are_measured_by_source(shared_dir, backbone, tmp_path, capsys):
    files = shared_dir / "data" / "preference_pairs_sample.jsonl"
    more = ("data.max_length=96", "data.val_share=0.3", "trainer.total_training_steps=1")
    assert main(overrides(backbone, files, tmp_path / "run", *more)) == 0
    found = metrics_of(tmp_path / "run")[-1]
    sources = [key.removeprefix("val/accuracy/") for key in found if key.startswith("val/accuracy/")]
    assert len(sources) == 9
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("accuracy ")]
    assert all(source in line for source in sources)
