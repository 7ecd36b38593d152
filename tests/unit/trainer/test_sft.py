"""Supervised training: which tokens count, the loss against transformers' own, resume, and bad input."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from valor.config import SFTConfig, load
from valor.data.batch import Batch
from valor.data.demonstrations import DemonstrationDataset
from valor.errors import UserError
from valor.lab import arithmetic
from valor.trainer.export import export_checkpoint
from valor.trainer.main_sft import main
from valor.trainer.supervised import SFTRun
from valor.workers.sft import token_loss

pytestmark = pytest.mark.slow

CHAT = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "3+4="},
    {"role": "assistant", "content": "07"},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return arithmetic.make_model(tmp_path_factory.mktemp("sft") / "model", seed=0)


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return AutoTokenizer.from_pretrained(model_dir)


def write(path: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def chats(tmp_path) -> Path:
    """Eight chats of one or two turns, so of different lengths."""
    singles = [CHAT[:2], CHAT[2:], [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "46"}]]
    return write(tmp_path / "chats.parquet", messages=[*singles, CHAT, CHAT[:2], CHAT, *singles[1:]])


def overrides(model_dir: Path, files: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        f"model.path={model_dir}",
        f"data.train_files={files}",
        "data.train_batch_size=4",
        "data.max_length=32",
        "optim.lr=1e-3",
        "fsdp_config.dtype=float32",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        "trainer.total_training_steps=4",
        f"trainer.default_local_dir={run_dir}",
        *more,
    ]


def dataset(tokenizer, path: Path, **data) -> DemonstrationDataset:
    config = SFTConfig.model_validate({"data": {"train_files": [str(path)], "max_length": 64, **data}})
    return DemonstrationDataset(config.data, tokenizer, "train", seed=0)


def text_of(tokenizer, row, counted: int | None = None) -> str:
    """The sample's text, or that of its tokens which count (1) or do not (0)."""
    chosen = [t for t, c in zip(row.tokens, row.loss_mask, strict=True) if counted is None or c == counted]
    return tokenizer.decode(chosen)


def test_assistant_tokens_count_and_nothing_else(tokenizer, tmp_path):
    (row,) = dataset(tokenizer, write(tmp_path / "c.parquet", messages=[CHAT]))
    assert text_of(tokenizer, row) == "<|user|>1+1=<|assistant|>2<|end|><|user|>3+4=<|assistant|>07<|end|>"
    assert text_of(tokenizer, row, counted=1) == "2<|end|>07<|end|>"
    assert tokenizer.decode(row.tokens[: row.prompt_length]) == "<|user|>1+1=<|assistant|>"


def test_the_batch_has_the_layout_of_every_batch(tokenizer, tmp_path):
    data = dataset(tokenizer, write(tmp_path / "c.parquet", messages=[CHAT, CHAT[2:]]))
    batch = data.batch([1, 0])
    assert batch["prompt_lengths"].tolist() == [6, 6]
    assert batch["response_lengths"].tolist() == [3, 11]
    assert batch["response_mask"].tolist() == [[1.0] * 3 + [0.0] * 8, [1.0, 1.0] + [0.0] * 6 + [1.0] * 3]
    assert batch["responses"][0, :3].tolist() == tokenizer("07<|end|>")["input_ids"]
    assert batch.meta == {"num_tokens": 8.0, "num_sequences": 2.0}


def test_prompt_and_response_columns_are_the_same_chat(tokenizer, tmp_path):
    as_text = write(tmp_path / "t.parquet", question=["1+1="], response=["2"])
    as_chat = write(tmp_path / "m.parquet", prompt=[CHAT[:1]], response=["2"])
    expected = dataset(tokenizer, write(tmp_path / "c.parquet", messages=[CHAT[:2]]))[0]
    assert dataset(tokenizer, as_text, prompt_key="question")[0] == expected
    assert dataset(tokenizer, as_chat)[0] == expected


@pytest.mark.parametrize(
    ("side", "kept", "counted", "prompt_length"),
    [
        # What is left of the second question would teach nothing.
        ("right", "<|user|>1+1=<|assistant|>2<|end|>", "2<|end|>", 6),
        # The first token that is left has nothing before it that could predict it, so it becomes the prompt.
        ("left", "2<|end|><|user|>3+4=<|assistant|>07<|end|>", "<|end|>07<|end|>", 1),
        ("middle", "<|user|>1+1=4=<|assistant|>07<|end|>", "07<|end|>", 5),
    ],
)
def test_truncation_cuts_that_side(tokenizer, tmp_path, side, kept, counted, prompt_length):
    (row,) = dataset(tokenizer, write(tmp_path / "c.parquet", messages=[CHAT]), max_length=11, truncation=side)
    assert text_of(tokenizer, row) == kept
    assert text_of(tokenizer, row, counted=1) == counted
    assert row.prompt_length == prompt_length


def test_a_sample_that_is_too_long_is_named(tokenizer, tmp_path):
    path = write(tmp_path / "c.parquet", messages=[CHAT[:2], CHAT])
    with pytest.raises(UserError, match=r"c\.parquet, row 1: the sample has 17 tokens, data\.max_length is 16"):
        dataset(tokenizer, path, max_length=16)


def test_samples_without_an_answer_left_are_dropped(tokenizer, tmp_path, caplog):
    long = [{"role": "user", "content": "1" * 20}, CHAT[1]]
    data = dataset(
        tokenizer, write(tmp_path / "c.parquet", messages=[long, CHAT[:2]]), max_length=12, truncation="right"
    )
    assert [text_of(tokenizer, row, counted=1) for row in data] == ["2<|end|>"]
    assert "1 of 2 samples have no assistant token left" in caplog.text
    with pytest.raises(UserError, match="no sample has an assistant token"):
        dataset(tokenizer, write(tmp_path / "d.parquet", messages=[long]), max_length=12, truncation="right")


def test_what_a_template_adds_after_the_end_token_does_not_count(model_dir, tmp_path):
    other = AutoTokenizer.from_pretrained(model_dir)
    other.chat_template = other.chat_template.replace("{{ eos_token }}", "{{ eos_token + '\\n' }}")
    (row,) = dataset(other, write(tmp_path / "c.parquet", messages=[CHAT]))
    assert text_of(other, row, counted=1) == "2<|end|>07<|end|>"
    assert text_of(other, row).endswith("07<|end|>")
    assert "2<|end|>\n<|user|>" in text_of(other, row)


def test_a_template_whose_question_is_no_part_of_the_answered_one_is_refused(model_dir, tmp_path):
    other = AutoTokenizer.from_pretrained(model_dir)
    other.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="renders message 1 otherwise than it asks for it"):
        dataset(other, write(tmp_path / "c.parquet", messages=[CHAT]))
    other.chat_template = (  # in the manner of Nemotron 3
        "{% for m in messages %}<|{{ m.role }}|>{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{{ '+' if thinks else '</think>' }}{% endif %}"
    )
    path = write(tmp_path / "c.parquet", messages=[CHAT[:2]])
    assert len(dataset(other, path)) == 1
    with pytest.raises(UserError, match=r"\('ant\|><think>\+', and then 'ant\|><think></think>2<\|end\|>'\)"):
        dataset(other, path, apply_chat_template_kwargs={"thinks": True})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["1+1=2"]}, "needs a column 'messages', or 'prompt' and 'response'"),
        ({"messages": [CHAT[:1]]}, "needs an assistant message"),
        ({"messages": [CHAT[1:]]}, "something before the first one"),
        ({"messages": ["1+1=2"]}, "'messages' must be a list of messages"),
        ({"prompt": ["1+1="], "response": [2]}, "'response' must be text, or a list of messages"),
    ],
)
def test_malformed_rows_are_named(tokenizer, tmp_path, columns, message):
    with pytest.raises(UserError, match=message) as caught:
        dataset(tokenizer, write(tmp_path / "c.parquet", **columns))
    assert "c.parquet, row 0" in str(caught.value)


def test_a_subset_is_a_function_of_the_seed(tokenizer, chats):
    whole = list(dataset(tokenizer, chats))
    assert list(dataset(tokenizer, chats, train_max_samples=3, shuffle=False)) == whole[:3]
    assert len(dataset(tokenizer, chats, train_max_samples=3)) == 3


def test_loss_divides_by_the_tokens_of_the_whole_batch():
    rows = Batch({"response_mask": torch.tensor([[1.0, 1.0, 0.0]])}, meta={"num_tokens": 8.0})
    loss, metrics = token_loss({"log_probs": torch.tensor([[-1.0, -3.0, -50.0]])}, rows)
    assert loss.item() == pytest.approx(0.5)
    assert metrics["loss"].item() == pytest.approx(0.5)


@pytest.fixture
def trainer(model_dir, chats, tmp_path):
    """A trainer whose group is up, as `fit` would have it before the first step."""
    from valor.controller.start import start_pools
    from valor.workers.host import RoleSpec
    from valor.workers.sft import SFTWorker

    config = load(overrides(model_dir, chats, tmp_path / "run", f"data.val_files={chats}"), SFTConfig).config
    trainer = SFTRun(config, "valor sft")
    spec = RoleSpec(SFTWorker, {"config": config, "total_steps": 4})
    trainer.roles = start_pools(trainer.placement, {"actor": spec})
    yield trainer
    trainer.roles.close()


def test_loss_and_accuracy_are_those_of_transformers(trainer, model_dir):
    hf = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    total, hits, count = 0.0, 0, 0
    with torch.no_grad():
        for row in trainer.val:
            ids = torch.tensor([row.tokens.tolist()])
            labels = torch.where(torch.tensor([row.loss_mask.tolist()]) > 0, ids, -100)
            n = int((labels != -100).sum())
            out = hf(input_ids=ids, labels=labels)
            total, count = total + float(out.loss) * n, count + n
            hits += int((out.logits[:, :-1].argmax(-1) == labels[:, 1:]).sum())
    metrics = trainer.validate()
    assert metrics["val/loss"] == pytest.approx(total / count, abs=1e-5)
    assert metrics["val/token_accuracy"] == pytest.approx(hits / count)


def test_a_step_trains_on_the_batch_of_its_turn(trainer, model_dir):
    hf = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    rows = [trainer.train[i] for i in trainer.sampler.order(0)[: trainer.sampler.batch_size]]
    expected = -sum(
        hf(torch.tensor([r.tokens.tolist()])).logits[0].log_softmax(-1)[i - 1, r.tokens[i]].item()
        for r in rows
        for i in range(len(r.tokens))
        if r.loss_mask[i]
    ) / sum(sum(r.loss_mask) for r in rows)
    assert trainer.train_step()["train/loss"] == pytest.approx(expected, abs=1e-5)


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "huggingface" / "actor" / "model.safetensors")


def test_a_run_learns_and_leaves_a_plain_model(model_dir, chats, tmp_path):
    run_dir = tmp_path / "run"
    more = ("trainer.total_training_steps=30", f"data.val_files={chats}", "trainer.test_freq=10")
    assert main(overrides(model_dir, chats, run_dir, *more)) == 0
    rows = metrics_of(run_dir)
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert [row["step"] for row in rows if "val/loss" in row] == [10, 20, 30]
    assert rows[-1]["val/loss"] < 0.5 < 4 < rows[0]["train/loss"]
    assert rows[-1]["val/token_accuracy"] > 0.9
    folder = run_dir / "huggingface" / "actor"
    tokenizer, hf = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("<|user|>12+34=<|assistant|>", return_tensors="pt").input_ids
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == "46<|end|>"


def test_every_export_has_the_settings_of_generation_and_the_tokenizer(model_dir, chats, tmp_path):
    """The run's, that of hf_model in a checkpoint, and that of `valor export`."""
    model = shutil.copytree(model_dir, tmp_path / "model")
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [5, 7]}
    GenerationConfig(**settings).save_pretrained(model)
    more = ("trainer.total_training_steps=1", "checkpoint.save_contents=[model,optimizer,extra,hf_model]")
    assert main(overrides(model, chats, tmp_path / "run", *more)) == 0
    checkpoint = tmp_path / "run" / "global_step_1"
    export_checkpoint(checkpoint, tmp_path / "exported", "actor")
    ends = [5, 7, AutoTokenizer.from_pretrained(model_dir).eos_token_id]
    folders = (tmp_path / "run" / "huggingface" / "actor", checkpoint / "actor" / "huggingface", tmp_path / "exported")
    for folder in folders:
        found = GenerationConfig.from_pretrained(folder).to_dict()
        assert {name: found[name] for name in settings} == settings | {"eos_token_id": ends}, folder
        assert AutoTokenizer.from_pretrained(folder).chat_template and AutoModelForCausalLM.from_pretrained(folder)


def test_a_resumed_run_is_the_uninterrupted_one(model_dir, chats, tmp_path):
    assert main(overrides(model_dir, chats, tmp_path / "whole")) == 0
    assert main(overrides(model_dir, chats, tmp_path / "parts", "trainer.total_training_steps=2")) == 0
    assert main(overrides(model_dir, chats, tmp_path / "parts")) == 0
    first, second = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(first[name], second[name]) for name in first)
    losses = [[row["train/loss"] for row in metrics_of(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_micro_batches_do_not_change_the_run(model_dir, chats, tmp_path):
    assert main(overrides(model_dir, chats, tmp_path / "whole")) == 0
    assert main(overrides(model_dir, chats, tmp_path / "rows", "data.micro_batch_size_per_gpu=1")) == 0
    whole, rows = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "rows")
    for a, b in zip(whole, rows, strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-4)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-3)


@pytest.mark.usefixtures("hosts")
def test_two_processes_take_the_same_steps_as_one(model_dir, chats, tmp_path):
    assert main(overrides(model_dir, chats, tmp_path / "one")) == 0
    assert main(overrides(model_dir, chats, tmp_path / "two", "trainer.n_gpus_per_node=2")) == 0
    for a, b in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two"), strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.train_files=/nowhere/chats.parquet", "no such file"),
        ("model.path=/nowhere/model", "no model directory"),
        ("data.max_length=8", "data.max_length is 8"),
        ("data.train_batch_size=100", "fewer than one batch of 100"),
        ("data.max_lenght=8", "data.max_length"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(model_dir, chats, tmp_path, capsys, setting, message):
    assert main(overrides(model_dir, chats, tmp_path / "run", setting)) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_dry_run_says_what_would_be_done(model_dir, chats, tmp_path, capsys):
    assert main(overrides(model_dir, chats, tmp_path / "run", "--dry-run")) == 0
    assert "4 samples per update" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
