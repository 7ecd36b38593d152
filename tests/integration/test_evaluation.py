"""`valor eval`: the numbers of a run's own validation, the same after a stop, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from runs import read_metrics
from transformers import AutoModelForCausalLM

from valor.cli import main as valor
from valor.lab import arithmetic

pytestmark = pytest.mark.slow


@pytest.fixture
def settings(tiny) -> list[str]:
    """Four sampled answers to each of 16 prompts, graded by digits: some are right even of random models."""
    return [
        f"data.val_files={tiny['val']}",
        "data.val_max_samples=16",
        "data.max_prompt_length=32",
        "data.max_response_length=8",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        f"reward.custom_reward_function.path={Path(__file__).with_name('parity_reward.py')}",
        "reward.num_workers=1",
        "trainer.device=cpu",
        "trainer.num_threads=1",
    ]


def numbers(out: Path) -> dict:
    results = json.loads((out / "eval.json").read_text())
    del results["command"]
    return results


def test_two_models_are_measured_compared_and_measured_again_after_a_stop(
    tiny, settings, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("valor.lab.evaluation._AT_ONCE", 16)  # four prompts at a time
    other = arithmetic.make_model(tmp_path / "other", seed=1)
    line = ["eval", str(tiny["model"]), str(other), *settings, f"eval.out={tmp_path / 'out'}"]
    assert valor(line) == 0
    before = numbers(tmp_path / "out")
    first, second = before["policies"]
    assert (first["name"], second["name"]) == ("model", "other")
    means = [next(iter(of["sources"].values()))["metrics"]["mean@4"] for of in (first, second)]
    assert all(0 < mean["low"] < mean["value"] < mean["high"] < 1 for mean in means)
    (gap,) = before["comparisons"]
    assert gap["value"] == pytest.approx(means[1]["value"] - means[0]["value"])
    assert gap["low"] < gap["value"] < gap["high"] and 0 < gap["p_signs"] <= 1
    assert gap["better"] + gap["worse"] <= gap["prompts"] == 16

    answers = sorted((tmp_path / "out" / "other").glob("answers_*.jsonl"))
    assert len(answers) == 4 and sum(len(file.read_text().splitlines()) for file in answers) == 64
    text = answers[2].read_text()
    answers[2].unlink()
    (tmp_path / "out" / "eval.json").unlink()
    assert valor(line) == 0
    assert answers[2].read_text() == text and numbers(tmp_path / "out") == before
    assert "other: 3 of 4 files of answers are there" in capsys.readouterr().out
    page = (tmp_path / "out" / "eval.html").read_text()
    assert all(word in page for word in ("pass@4", "other", "permutation test"))

    assert valor([*line, "data.max_response_length=4"]) == 2
    error = capsys.readouterr().err
    assert "data.max_response_length: 8 -> 4" in error and error.count("\n") == 1


def test_a_checkpoint_has_the_numbers_of_its_own_runs_validation(overrides, settings, tmp_path, capsys):
    sampling = [word for word in settings if ".val_kwargs." in word]
    run = ["trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.test_freq=1", *sampling]
    assert valor(["ppo", *overrides(tmp_path / "run", *run)]) == 0
    validated = {k: v for k, v in read_metrics(tmp_path / "run")[-1].items() if k.startswith("val-core/")}
    checkpoint = tmp_path / "run" / "global_step_1"
    line = ["eval", str(checkpoint), *settings, f"eval.out={tmp_path / 'out'}"]
    assert valor([*line, "--dry-run"]) == 0 and not (tmp_path / "out").exists()
    assert valor(line) == 0
    (policy,) = numbers(tmp_path / "out")["policies"]
    measured = {
        f"val-core/{source}/reward/{name}": estimate["value"]
        for source, of in policy["sources"].items()
        for name, estimate in of["metrics"].items()
    }
    assert measured == pytest.approx(validated)

    # Another run's checkpoint of the same name is neither answered by this one's export nor mixed with its answers.
    assert valor(["ppo", *overrides(tmp_path / "other", "trainer.seed=7", *run[:2])]) == 0
    namesake = tmp_path / "other" / "global_step_1"
    assert valor(["eval", str(namesake), *settings, f"eval.out={tmp_path / 'out'}"]) == 2
    assert "holds answers under other settings (actor_rollout_ref.model.path" in capsys.readouterr().err


def test_models_of_one_name_have_folders_of_their_own(tiny, settings, tmp_path):
    models = [arithmetic.make_model(tmp_path / name / "model", seed=seed) for seed, name in enumerate("abc")]
    assert valor(["eval", *map(str, models), *settings, "data.val_max_samples=2", f"eval.out={tmp_path / 'out'}"]) == 0
    named = {policy["name"]: policy["path"] for policy in numbers(tmp_path / "out")["policies"]}
    assert named == dict(zip(("model", "model-2", "model-3"), map(str, models), strict=True))


def test_a_model_by_a_path_of_dots_has_a_folder_of_its_own(tiny, settings, tmp_path, monkeypatch):
    """And nothing outside of `eval.out` is touched."""
    model = arithmetic.make_model(tmp_path / "mine" / "actor", seed=0)
    (model / "work" / "model").mkdir(parents=True)
    (model / "work" / "model" / "notes").write_text("")
    monkeypatch.chdir(model / "work")
    assert valor(["eval", "..", *settings, "data.val_max_samples=2", "eval.out=out"]) == 0
    assert [policy["name"] for policy in numbers(Path("out"))["policies"]] == ["mine"]
    assert Path("model", "notes").exists() and list(Path("out", "mine").glob("answers_*"))


def test_an_adapter_is_that_of_the_first_model_alone(tiny, settings, tmp_path):
    adapter = tmp_path / "adapter"
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny["model"]), LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj"])
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.fill_(1.0)
    model.save_pretrained(adapter)
    lora = [f"actor_rollout_ref.model.{key}" for key in ("lora_rank=2", f"lora_adapter_path={adapter}")]
    line = ["eval", str(tiny["model"]), str(tiny["model"]), *settings, "data.val_max_samples=4"]
    assert valor([*line, *lora, f"eval.out={tmp_path / 'out'}"]) == 0
    assert valor([*line, f"eval.out={tmp_path / 'plain'}"]) == 0
    texts = [
        (tmp_path / of).joinpath("answers_0000000.jsonl").read_text()
        for of in ("out/model", "out/model-2", "plain/model")
    ]
    assert texts[0] != texts[1] == texts[2]


def test_answers_that_cannot_be_graded_are_told_and_too_many_end_the_command(tiny, settings, tmp_path, capsys):
    broken = f"reward.custom_reward_function.path={Path(__file__).with_name('sometimes_broken_reward.py')}"
    line = ["eval", str(tiny["model"]), *settings, broken, f"eval.out={tmp_path / 'out'}"]
    assert valor([*line, "reward.max_error_ratio=0.9"]) == 0
    said = capsys.readouterr().out
    (of,) = numbers(tmp_path / "out")["policies"][0]["sources"].values()
    assert 0 < of["errors"] < 64 and f"{of['errors']} errors" in said and "the grader is broken" in said
    always = "+reward.custom_reward_function.reward_kwargs.always=true"
    assert valor([*line[:-1], always, f"eval.out={tmp_path / 'all'}"]) == 1
    assert "64 of 64 samples could not be graded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor_rollout_ref.rollout.val_kwargs.do_sample=false", "greedy answers are the same"),
        ("data.val_files=null", "there is nothing to answer: set data.val_files"),
        ("eval.others=[/nowhere/model]", "there is no model directory '/nowhere/model'"),
        ("eval.othres=[a]", "did you mean 'eval.others'?"),
    ],
)
def test_a_mistake_is_one_line(setting, message, tiny, settings, tmp_path, capsys):
    assert valor(["eval", str(tiny["model"]), *settings, f"eval.out={tmp_path / 'out'}", setting]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_policies_are_compared_on_the_prompts_that_both_answered(tiny, settings, tmp_path, monkeypatch, capsys):
    """A longer template leaves another model fewer prompts; a command with a mistake in it leaves no answers."""
    tokenizer = arithmetic.make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("['content']", "['content'] + '      '")
    other = arithmetic.make_model(tmp_path / "other", seed=1, tokenizer=tokenizer)
    questions = ((text, "2", {"i": i}) for i, text in enumerate(("1+1=", "1000000+1=", "10000000+1=", "2+2=", "3+3=")))
    arithmetic.write_prompts(tmp_path / "val.parquet", "sums", "math", questions)
    line = ["eval", str(tiny["model"]), str(other), *settings, f"eval.out={tmp_path / 'out'}"]
    line += [f"data.val_files={tmp_path / 'val.parquet'}", "data.max_prompt_length=16"]
    line += ["data.filter_overlong_prompts=true"]
    assert valor([*line, "data.max_prompt_length=2"]) == 2
    assert "val.parquet: all 5 prompts are longer than data.max_prompt_length=2" in capsys.readouterr().err
    assert valor(line) == 0
    assert "other: compared on the 3 prompts of sums that model answered too" in capsys.readouterr().out
    results = numbers(tmp_path / "out")
    assert [of["sources"]["sums"]["prompts"] for of in results["policies"]] == [5, 3]
    (gap,) = results["comparisons"]
    scores = []
    for name in ("model", "other"):
        (file,) = (tmp_path / "out" / name).glob("answers_*.jsonl")
        answers = [json.loads(text) for text in file.read_text().splitlines()]
        scores.append([sum(a["score"] for a in answers if a["uid"].endswith(f":{i}")) / 4 for i in (0, 3, 4)])
    assert gap["prompts"] == 3
    assert gap["value"] == pytest.approx(sum(b - a for a, b in zip(*scores, strict=True)) / 3)
