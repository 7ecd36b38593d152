"""Data files and models that are broken or hostile: one line that names the file, exit code 2, nothing written."""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from valor.cli import main

pytestmark = pytest.mark.slow

ROW = {
    "data_source": "valor/arithmetic",
    "prompt": [{"role": "user", "content": "12+34="}],
    "reward_model": {"style": "rule", "ground_truth": "46"},
}


def refused(arguments: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    assert main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note:")]
    assert len(lines) == 1 and "Traceback" not in lines[0] and len(lines[0]) < 1000, lines
    for word in words:
        assert word in lines[0]
    assert not run_dir.exists()


def rows(**change: Any) -> list[dict[str, Any]]:
    """Sixteen good rows, of which the last one is changed; None takes a key away."""
    last = {key: value for key, value in (ROW | change).items() if value is not None}
    return [ROW] * 15 + [last]


def chat(**change: Any) -> list[dict[str, Any]]:
    return rows(prompt=[ROW["prompt"][0] | change])


def truth(value: Any) -> list[dict[str, Any]]:
    return rows(reward_model={"style": "rule", "ground_truth": value})


LINES: dict[str, list[dict[str, Any]]] = {
    "no prompt": rows(prompt=None),
    "a prompt of text": rows(prompt="12+34="),
    "a prompt that is a number": rows(prompt=46),
    "an empty prompt": rows(prompt=[]),
    "a message that is text": rows(prompt=["12+34="]),
    "a message without a role": rows(prompt=[{"content": "12+34="}]),
    "content that is nothing": chat(content=None),
    "content that is a number": chat(content=46),
    "content that is a list": chat(content=[12]),
    "half of a surrogate pair": chat(content="12+\ud800="),
    "the other half": chat(content="\udfff"),
    "half of a pair as truth": truth("4\ud8006"),
    "no source": rows(data_source=None),
    "a source that is a number": rows(data_source=3),
    "an unknown source": rows(data_source="nobody/knows"),
    "no reward model": rows(reward_model=None),
    "a reward model of text": rows(reward_model="46"),
    "no truth": rows(reward_model={"style": "rule"}),
    "truth that is nothing": truth(None),
    "empty truth": truth(""),
    "truth of spaces": truth("  "),
    "truth without items": truth([]),
    "extra information of text": rows(extra_info="hard"),
    "a prompt that is too long": chat(content="1" * 500),
    "too few rows": [ROW],
}


@pytest.mark.parametrize("name", LINES)
def test_rows(name, ppo, tmp_path, capsys, counts):
    counts("broken data")
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in LINES[name]))
    refused(ppo(tmp_path / "run", f"data.train_files={file}"), tmp_path / "run", capsys)


GOOD = "".join(json.dumps(ROW) + "\n" for _ in range(16)).encode()
FILES: dict[str, tuple[str, bytes]] = {
    "not JSON": ("train.jsonl", GOOD + b"{]\n"),
    "half a line": ("train.jsonl", GOOD[:-20]),
    "a list in lines": ("train.jsonl", b"[1, 2]\n"),
    "not UTF-8": ("train.jsonl", GOOD + b'{"prompt": "\xff\xfe"}\n'),
    "binary": ("train.jsonl", bytes(range(256))),
    "deep JSON": ("train.json", b"[" * 100_000),
    "an object": ("train.json", b"{}"),
    "nothing": ("train.parquet", b""),
    "garbage": ("train.parquet", b"PAR1" + bytes(100) + b"PAR1"),
    "text as parquet": ("train.parquet", GOOD),
    "cut gzip": ("train.jsonl.gz", gzip.compress(GOOD)[:-10]),
    "no gzip": ("train.jsonl.gz", GOOD),
    "an unknown kind": ("train.csv", GOOD),
}


@pytest.mark.faults
@pytest.mark.parametrize("name", FILES)
def test_files(name, ppo, tmp_path, capsys, counts):
    counts("broken data")
    file, content = FILES[name]
    (tmp_path / file).write_bytes(content)
    refused(ppo(tmp_path / "run", f"data.train_files={tmp_path / file}"), tmp_path / "run", capsys, file)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["folder", "missing", "cut parquet", "no columns", "no rows"])
def test_parquet_and_paths(name, tiny, ppo, tmp_path, capsys, counts):
    counts("broken data")
    file = tmp_path / "train.parquet"
    if name == "folder":
        file.mkdir()
    elif name == "cut parquet":
        file.write_bytes(tiny["train"].read_bytes()[:-100])
    elif name == "no columns":
        pq.write_table(pa.table({"colour": ["red"]}), file)
    elif name == "no rows":
        pq.write_table(pq.read_table(tiny["train"])[:0], file)
    refused(ppo(tmp_path / "run", f"data.train_files={file}"), tmp_path / "run", capsys, "train.parquet")


def change_json(file: str, **change: Any) -> Callable[[Path], None]:
    def change_file(model: Path) -> None:
        content = json.loads((model / file).read_text()) if (model / file).exists() else {}
        (model / file).write_text(json.dumps(content | change))

    return change_file


def change_weights(change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def change_file(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        changed = {name: change(name, weight) for name, weight in weights.items()}
        save_file({n: w for n, w in changed.items() if w is not None}, model / "model.safetensors", {"format": "pt"})

    return change_file


def write(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda model: (model / file).write_bytes(content) and None


def cut(file: str) -> Callable[[Path], None]:
    return lambda model: (model / file).write_bytes((model / file).read_bytes()[:-50]) and None


def remove(*files: str) -> Callable[[Path], None]:
    def remove_files(model: Path) -> None:
        for pattern in files:
            for file in model.glob(pattern):
                file.unlink()

    return remove_files


class Hostile:
    """What runs a program when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch /tmp/valor_hostile_pickle",)


def hostile(model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Hostile()}, model / "pytorch_model.bin")


def binary_garbage(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"garbage" * 100)


MODELS: dict[str, Callable[[Path], None]] = {
    "no folder": shutil.rmtree,
    "a file": lambda model: (shutil.rmtree(model), model.write_text("model"))[0],
    "an empty folder": lambda model: (shutil.rmtree(model), model.mkdir())[0],
    "no config": remove("config.json"),
    "garbage config": write("config.json", b"{"),
    "a list as config": write("config.json", b"[]"),
    "an unknown architecture": change_json("config.json", model_type="perceptron"),
    "another size": change_json("config.json", hidden_size=48),
    "a negative size": change_json("config.json", num_hidden_layers=-1),
    "a size of text": change_json("config.json", hidden_size="many"),
    "few positions": change_json("config.json", max_position_embeddings=16),
    "few tokens": change_json("config.json", vocab_size=5),
    "an end outside the vocabulary": change_json("generation_config.json", eos_token_id=999_999),
    "no weights": remove("*.safetensors"),
    "cut weights": cut("model.safetensors"),
    "garbage weights": write("model.safetensors", b"garbage" * 100),
    "empty weights": write("model.safetensors", b""),
    "a weight is missing": change_weights(lambda name, weight: None if "layers.0.mlp.up" in name else weight),
    "another shape": change_weights(lambda name, weight: weight[:3].clone() if "layers.0.mlp.up" in name else weight),
    "whole numbers": change_weights(lambda name, weight: weight.to(torch.int8)),
    "weights that are no numbers": change_weights(lambda name, weight: weight * float("nan")),
    "a hostile pickle": hostile,
    "a garbage pickle": binary_garbage,
    "no tokenizer": remove("token*", "vocab*", "merges*"),
    "garbage tokenizer": write("tokenizer.json", b"{"),
    "garbage tokenizer config": write("tokenizer_config.json", b"]"),
    "a template that cannot be read": write("chat_template.jinja", b"{% if %}"),
    "a template that refuses": write("chat_template.jinja", b"{{ raise_exception('no') }}"),
    "a template that gives nothing": write("chat_template.jinja", b"{# #}"),
}


@pytest.mark.faults
@pytest.mark.parametrize("name", MODELS)
def test_models(name, tiny, ppo, tmp_path, capsys, counts):
    counts("broken or hostile models")
    mark = Path("/tmp/valor_hostile_pickle")
    mark.unlink(missing_ok=True)
    shutil.copytree(tiny["model"], tmp_path / "model")
    MODELS[name](tmp_path / "model")
    refused(ppo(tmp_path / "run", f"actor_rollout_ref.model.path={tmp_path / 'model'}"), tmp_path / "run", capsys)
    assert not mark.exists()
