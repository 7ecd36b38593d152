"""`valor.train` and the runs behind it do what the command line does, with what a Python session gives."""

import re
import shlex
import signal
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from runs import assert_same_run, read_metrics, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

import valor
from valor import algorithms, cli
from valor.config import SFTDataConfig
from valor.errors import UserError
from valor.lab.given import demonstration_row, model_settings

pytestmark = pytest.mark.slow


def settings(run_dir, **more):
    return {
        "train_batch_size": 8,
        "max_prompt_length": 32,
        "max_response_length": 8,
        "actor__ppo_mini_batch_size": 8,
        "actor__optim__lr": 1e-3,
        "actor__fsdp_config__dtype": "float32",
        "rollout.n": 2,
        "reward.num_workers": 1,
        "trainer": {"device": "cpu", "num_threads": 1, "report": False, "default_local_dir": run_dir},
        "total_training_steps": 3,
        **more,
    }


SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 26) for b in (11, 12)]
CRITIC = {"ppo_mini_batch_size": 8, "optim": {"lr": 1e-3}}


def test_steps_from_python_are_those_of_the_command_line(tiny, tmp_path):
    """Also with an evaluation and a look at the models between two of them."""
    wanted = {str(n) for n in range(5)}

    def digits(completions, answer, **columns):  # a closure: it has to travel to the grader
        return [sum(d in wanted for d in text) + len(right) for text, right in zip(completions, answer, strict=True)]

    made = settings(tmp_path / "python", critic=CRITIC)
    run = valor.PPO(tiny["model"], SUMS, val_data=SUMS[:4], reward=digits, **made)
    before = run.evaluate(SUMS[4:6])
    assert before.keys() == run.evaluate().keys() == {"val-core/own/reward/mean@1"}
    steps = []
    for metrics in run:
        steps.append(metrics["training/global_step"])
        if steps[-1] == 2:
            held = run.policy.state_dict()
            assert run.critic.num_labels == 1 and run.evaluate() == run.evaluate()
            break
    assert run.train() is run and steps == [1, 2]
    assert [one["training/global_step"] for one in run.metrics] == [1, 2, 3]
    assert all("critic/score/mean" in one for one in run.metrics)
    assert "val-core/own/reward/mean@1" in run.metrics_before and "critic/score/mean" not in run.metrics_before
    trained = run.policy.state_dict()
    assert any(not torch.equal(held[name], trained[name]) for name in trained)
    assert run.evaluate() == {k: v for k, v in run.metrics[-1].items() if k.startswith("val-core/")}
    assert list(run) == [] and run.metrics[-1]["training/global_step"] == 3

    command = shlex.split(run.command)
    assert command[:2] == ["valor", "ppo"]
    assert cli.main([*command[1:], f"trainer.default_local_dir={tmp_path / 'typed'}"]) == 0
    assert_same_run(tmp_path / "python", tmp_path / "typed")


def test_the_tokenizer_is_that_of_the_run(tiny, tmp_path):
    """With the chat template that the run renders prompts by, not the one that lies beside the model."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    made = settings(tmp_path / "run", actor_rollout_ref__model__custom_chat_template=template)
    run = valor.PPO(tiny["model"], SUMS, reward=lambda completions: [0.0], **made)
    assert run.tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False) == "1+1="


@pytest.mark.parametrize(("critic", "has"), [({}, "no critic"), ({"kind": "probe", "enable": True}, "a regression")])
def test_a_run_without_a_value_model_has_none_to_give(critic, has, tiny, tmp_path):
    made = settings(tmp_path / "run", critic=critic)
    run = valor.PPO(tiny["model"], SUMS, reward=lambda completions: [0.0], algorithm="grpo", **made)
    with pytest.raises(UserError, match=f"this run has {has}.* and no value model"):
        run.critic  # noqa: B018


def test_two_runs_of_a_process_do_not_write_into_one_folder(tiny, tmp_path):
    def start():
        return valor.PPO(
            tiny["model"], SUMS, reward=lambda completions: [1.0], algorithm="grpo", **settings(tmp_path / "run")
        )

    first = start()
    next(first)
    with pytest.raises(UserError, match=r"is the folder of a run of this process that goes on: .*close\(\)"):
        next(start())
    first.close()
    with start() as second:
        next(second)
    third = start()
    next(third)
    third = start()  # a cell of a notebook once more, which forgets the run that it had left
    next(third)
    third.close()


def test_two_runs_step_by_step_are_those_alone(tiny, tmp_path):
    def start(folder, algorithm):
        reward = lambda completions: [float(sum(map(str.isdigit, text))) for text in completions]  # noqa: E731
        return valor.PPO(tiny["model"], SUMS, reward=reward, algorithm=algorithm, **settings(tmp_path / folder))

    assert len(list(zip(start("grpo", "grpo"), start("ppo", "ppo"), strict=True))) == 3
    for algorithm in ("grpo", "ppo"):
        start(f"{algorithm} alone", algorithm).train()
        assert_same_run(tmp_path / algorithm, tmp_path / f"{algorithm} alone")


def test_what_a_session_sets_in_torch_is_no_setting_of_a_run(tiny, tmp_path):
    """Numbers of another type, or none at all, would come out: the command line's are those of float32."""

    def norms(folder):
        reward = lambda completions: [len(set(text)) for text in completions]  # noqa: E731
        made = settings(tmp_path / folder, critic=CRITIC, total_training_steps=1)
        run = valor.train(tiny["model"], SUMS, val_data=SUMS[:2], reward=reward, **made)
        assert run.evaluate() and run.critic.dtype == torch.float32
        return [run.metrics[-1][f"{role}/grad_norm"] for role in ("actor", "critic")]

    wanted = norms("plain")
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            assert norms("set") == wanted
            assert torch.ones(1).dtype == torch.float64 and not torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_a_session_may_leave_the_folder_it_was_in(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reward = lambda completions: [1.0]  # noqa: E731
    run = valor.train(tiny["model"], SUMS, reward=reward, algorithm="grpo", **settings("run", total_training_steps=1))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert run.policy.num_parameters() and run.evaluate(SUMS[:2]) == {"val-core/own/reward/mean@1": 1.0}
    assert list(Path().iterdir()) == []


def test_runs_of_a_process_end_in_any_order(tiny, tmp_path):
    """Each ends without what the others need, and leaves what it found."""

    def start(name, **more):
        reward = lambda completions, **columns: [len(set(completions[0]))]  # noqa: E731
        return valor.PPO(tiny["model"], SUMS, reward=reward, algorithm="grpo", **settings(tmp_path / name, **more))

    hook = sys.excepthook
    first, second = start("first"), start("second")
    next(first)
    next(second)
    first.close()
    second.train()
    start("third", total_training_steps=1).train()  # a cell beside one that was left
    next(first)
    went_on = weakref.ref(first._run)
    with ThreadPoolExecutor() as elsewhere:
        elsewhere.submit(first.train).result()
    assert read_metrics(tmp_path / "first")[-3:] == read_metrics(tmp_path / "second")
    with pytest.raises(KeyboardInterrupt) as stopped:
        signal.raise_signal(signal.SIGINT)
    assert stopped.type is KeyboardInterrupt  # of Python's own handler
    assert sys.excepthook is hook or sys.excepthook.__module__ == "valor.lab.api"  # not torch's, once for each run
    assert not dist.is_initialized()
    assert went_on() is None  # its models need not wait for the next garbage collection


def test_a_run_that_was_left_goes_on(tiny, tmp_path):
    def start(steps, folder="run"):
        made = settings(tmp_path / folder, total_training_steps=steps)
        reward = lambda completions: [len(set(completions[0]))]  # noqa: E731  # lambdas travel too
        return valor.PPO(tiny["model"], SUMS, reward=reward, algorithm="grpo", **made)

    with pytest.raises(KeyError, match="'rewards'"), start(2) as run:  # a mistake of the loop's body
        next(run)["rewards"]
    assert (tmp_path / "run/global_step_1").is_dir()
    assert start(2).train().metrics[-1]["training/global_step"] == 2
    resumed = start(3).train()
    assert [one["training/global_step"] for one in resumed.metrics] == [1, 2, 3]
    again = start(3).train()  # the same script once more: nothing is left to do, and it shows the same
    assert again.metrics == resumed.metrics
    start(3, "whole").train()
    assert read_metrics(tmp_path / "run") == read_metrics(tmp_path / "whole")


SCRIPT = """
import sys
import valor
from test_python_api import SUMS, settings

model, folder = sys.argv[1:]
inputs = dict(train_data=SUMS, reward=lambda completions: [1.0], algorithm="grpo")
runs = [valor.PPO(model, **inputs, **settings(folder + name)) for name in "ab"]
next(runs[0])
for metrics in runs[1]:
    metrics["rewards"]
"""


def test_a_script_that_ends_between_two_steps_ends_its_runs(tiny, tmp_path):
    """An error in a loop's body saves what was trained, as one inside a step does."""
    command = [sys.executable, "-c", SCRIPT, str(tiny["model"]), f"{tmp_path}/"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300)
    error = done.stderr[done.stderr.index("Traceback") :]
    assert done.returncode == 1 and "KeyError: 'rewards'" in error and "Exception ignored" not in error
    assert "src/valor" not in error, "the user's error, and the way to it, alone"
    assert "goes on from" in error
    assert [(tmp_path / run / "global_step_1").is_dir() for run in "ab"] == [True, True]


def test_under_ray_with_a_loaded_model(tiny, tmp_path, hosts):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny["model"]), AutoTokenizer.from_pretrained(tiny["model"])
    made = settings(tmp_path / "run", total_training_steps=1)
    made["trainer"] |= {"controller": "ray"}
    given = {"reward": lambda completions, **columns: [1.0], "algorithm": "grpo", "tokenizer": tokenizer}
    run = valor.train(model, SUMS, **given, **made)
    assert run.metrics[0]["critic/score/mean"] == 1.0
    assert weights(run.folder, "actor").keys() >= {"model.embed_tokens.weight"}
    algorithms.register_policy_loss("of_this_session")(lambda log_probs, response_mask: log_probs.mean())
    try:
        with pytest.raises(UserError, match="'of_this_session' was registered in this process, and under Ray others"):
            valor.PPO(model, SUMS, **given, **made, loss_mode="of_this_session")
    finally:
        del algorithms.POLICY_LOSSES["of_this_session"]


def test_supervised_runs_and_reward_models(tiny, tmp_path):
    common = {k: v for k, v in settings(tmp_path / "sft").items() if k in ("train_batch_size", "trainer")}
    rows = [{"prompt": one["prompt"], "completion": one["answer"]} for one in SUMS]
    del common["trainer"]["report"]
    common |= {"lr": 1e-2, "total_training_steps": 20}
    sft = valor.train(tiny["model"], rows, algorithm="sft", val_data=rows[:4], **common)
    assert sft.evaluate(rows)["loss"] < sft.metrics[0]["train/loss"] / 2
    assert sft.policy.config.vocab_size and "val/loss" in sft.metrics[-1]
    common["trainer"] = common["trainer"] | {"default_local_dir": tmp_path / "rm"}
    pairs = [{"prompt": one["prompt"], "chosen": one["answer"], "rejected": "no"} for one in SUMS]
    rm = valor.RewardModel(sft.folder / "huggingface" / "actor", pairs, **common)
    assert rm.train().evaluate(pairs)["accuracy"] == 1.0
    assert rm.reward_model.num_labels == 1


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"train_data": {"train": SUMS}}, "train_data is a dict (train): give one split, or a list of rows"),
        ({"train_data": [{"text": "1+1"}]}, "a row has no 'prompt' (it has text): rename"),
        ({"train_data": [{"prompt": "1+1", "image": object()}]}, "train_data, row 0: object is no JSON"),
        ({"train_data": []}, "train_data has no rows"),
        ({"train_data": SUMS, "reward": lambda text: 0}, "must take (data_source, solution_str"),
        ({"train_data": SUMS, "reward_weights": [1]}, "reward_weights are those of reward functions"),
        ({"train_data": SUMS, "model": 42}, "a model is a path, a hub name or a transformers model, got int"),
        ({"train_data": SUMS, "config": {"data": {}}}, "config: a yaml file, or the name of a configuration"),
        ({"train_data": SUMS, "algorithm": 5}, "unknown advantage estimator '5'; known: gae"),
        ({"train_data": SUMS, "default_local_dir": "/dev/null/run"}, "'/dev/null/run"),
        ({"train_data": SUMS, "algorithm": "gea"}, "unknown advantage estimator 'gea'; did you mean gae?"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(given, line, tmp_path):
    with pytest.raises(UserError, match=re.escape(line)) as error:
        valor.PPO(**{"model": "nowhere", "default_local_dir": tmp_path / "run", **given})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists() or not (tmp_path / "run" / "config.yaml").exists()


def test_rows_and_tokenizers_as_others_write_them():
    said = [{"role": "assistant", "content": "2"}]
    chat = [{"role": "user", "content": "1+1="}, *said]
    row_of = partial(demonstration_row, data=SFTDataConfig())
    assert row_of({"prompt": "1+1=", "completion": said})["messages"] == chat
    begun = row_of({"prompt": chat, "completion": said})["messages"]
    assert begun == [chat[0], {**said[0], "loss_mask": 0}, *said]  # a prompt's own turns are not learnt
    assert row_of({"prompt": chat[:1], "completion": said})["messages"] == chat
    named = SFTDataConfig(prompt_key="asked", response_key="said", messages_key="chat")
    assert demonstration_row({"asked": "1+1=", "completion": said}, named)["chat"] == chat
    for answer in ("2", 2):  # a number is for the reader of rows to refuse
        assert demonstration_row({"asked": "1+1=", "completion": answer}, named)["said"] == answer
    with pytest.raises(UserError, match="a row has no 'prompt'"):
        row_of({"completion": said})
    assert model_settings("model", "policy", "tokens") == {"model.path": "policy", "model.tokenizer_path": "tokens"}


def test_a_grader_of_files_still_goes_by_data_source(tiny, tmp_path):
    rows = pq.read_table(tiny["train"]).to_pylist()[:8]
    made = settings(tmp_path / "run", total_training_steps=1)
    run = valor.train(tiny["model"], rows, algorithm="grpo", **made)
    assert "reward/valor/arithmetic/mean" in run.metrics[0]
    typo = lambda completions, answr: [1.0]  # noqa: E731
    with pytest.raises(UserError, match="asks for 'answr', and no train row has such a column"):
        valor.train(tiny["model"], SUMS, algorithm="grpo", reward=typo, resume_mode="disable", **made)
    with pytest.raises(UserError, match="no grader for data_source 'own'"):
        valor.train(tiny["model"], SUMS, algorithm="grpo", resume_mode="disable", **made)
