"""`valor chat` through a pipe: answers, and the critic's values against transformers' own forward pass."""

import io
import re
import subprocess
import sys

import pytest
import torch
from talking_model import make_talking_model
from transformers import AutoModelForTokenClassification, AutoTokenizer

from valor.cli import main as valor

pytestmark = pytest.mark.slow

SETTINGS = ["data.max_response_length=12", "trainer.device=cpu", "trainer.num_threads=1"]
SETTINGS += [f"actor_rollout_ref.{key}=float32" for key in ("rollout.dtype", "actor.fsdp_config.dtype")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A run's folder `huggingface` with an actor that speaks in letters, and a critic whose head is not 0."""
    folder = tmp_path_factory.mktemp("run") / "huggingface"
    actor = make_talking_model(folder / "actor")
    torch.manual_seed(0)
    critic = AutoModelForTokenClassification.from_pretrained(actor, num_labels=1)
    torch.nn.init.normal_(critic.score.weight)
    critic.save_pretrained(folder / "critic")
    return folder


@pytest.fixture
def chat(monkeypatch, capsys):
    """`chat(lines, word, …)`: exit code, output and errors, in this process."""

    def talk(lines, *words):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = valor(["chat", *map(str, words)])
        return code, *capsys.readouterr()

    return talk


def test_a_value_beside_each_answer_is_that_of_the_critic(models):
    command = [sys.executable, "-m", "valor", "chat", str(models / "actor"), *SETTINGS]
    done = subprocess.run(command, input="12+34=\n\n/new\n5+6=\n", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^(.*)\n\[value (\S+) at the last token, (\S+) before the first\]$", done.stdout, re.MULTILINE)
    assert len(said) == 2
    tokenizer = AutoTokenizer.from_pretrained(models / "actor")
    critic = AutoModelForTokenClassification.from_pretrained(models / "critic")
    for question, (answer, last, first) in zip(("12+34=", "5+6="), said, strict=True):
        prompt = tokenizer(f"<|user|>{question}<|assistant|>", add_special_tokens=False)["input_ids"]
        written = tokenizer(f"{answer}<|end|>", add_special_tokens=False)["input_ids"][:12]
        with torch.no_grad():
            values = critic(torch.tensor([[*prompt, *written]])).logits[0, :, 0]
        assert float(first) == pytest.approx(float(values[len(prompt) - 1]), abs=6e-4)
        assert float(last) == pytest.approx(float(values[len(prompt) + len(written) - 2]), abs=6e-4)


def test_a_standard_input_that_is_closed_is_one_line(models, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert valor(["chat", str(models / "actor"), *SETTINGS]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("valor chat reads lines from standard input")


def test_bytes_of_another_encoding_and_brackets_in_a_path(models, tmp_path):
    (tmp_path / "it's, (2)").symlink_to(models / "actor")
    command = [sys.executable, "-m", "valor", "chat", str(tmp_path / "it's, (2)"), *SETTINGS]
    done = subprocess.run(command, input=b"1\xff=\n5+6=\n", capture_output=True, timeout=300)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr.decode()


def test_the_conversation_goes_on_until_there_is_no_room_and_a_critic_may_be_missing(models, chat, tmp_path):
    (tmp_path / "alone").symlink_to(models / "actor")
    small = ["data.max_prompt_length=28", "actor_rollout_ref.rollout.max_model_len=40"]
    code, said, _ = chat("12+34=\n" * 6 + "/new\n5+6=\n", tmp_path / "alone", "--system", "12", *small, *SETTINGS)
    assert code == 0 and "[value" not in said
    lines = said.splitlines()
    refused = ["no room for an answer within 40 tokens" in line for line in lines]
    assert len(lines) == 7 and (refused[0], refused[5], refused[6]) == (False, True, False)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--critic"], "requires an argument"),
        (["algorithm.gamma=0.5"], "algorithm.gamma=0.5: valor chat reads actor_rollout_ref.*, data.*, trainer.*"),
        (["--critic", "nowhere"], "nowhere"),
        (["--dry-run"], "valor chat has no --dry-run"),
    ],
)
def test_mistakes_are_a_line(models, chat, words, line):
    code, _, told = chat("", models / "actor", *words)
    assert code == 2 and line in told and "Traceback" not in told
