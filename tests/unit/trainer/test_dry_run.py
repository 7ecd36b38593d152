"""`--dry-run`: what is wrong at any stage is told together, and before anything is loaded."""

import json
import time

import pytest

from valor import cli
from valor.lab import arithmetic

GOOD = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "data_source": "valor/arithmetic",
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return arithmetic.make_model(tmp_path_factory.mktemp("model"))


def run(capsys, words, *overrides):
    code = cli.main([*words.split(), "--dry-run", "data.train_batch_size=1", *overrides])
    said = capsys.readouterr()
    return code, said.out, said.err.splitlines()


def rows(path, *records):
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def test_six_mistakes_of_six_stages_come_together(model, tmp_path, capsys):
    (tmp_path / "reward.py").write_text("def score(text):\n    return 1\n")
    planted = {
        "data.trian_batch_size=8": "unknown key 'data.trian_batch_size': did you mean 'data.train_batch_size'",
        "critic.optim.lr=fast": "critic.optim.lr: expected number >= 0, got 'fast'",
        "trainer.val_only=true": "trainer.val_only=true needs validation prompts",
        "algorithm.adv_estimator=gea": "unknown advantage estimator 'gea'; did you mean gae?",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}": "has no 'compute_score' (it",
        f"data.train_files={rows(tmp_path / 'a.jsonl', GOOD | {'prompt': 'text'})}": "'prompt' must be a list of mess",
    }
    began = time.monotonic()
    code, out, lines = run(capsys, "ppo", f"actor_rollout_ref.model.path={model}", *planted)
    assert time.monotonic() - began < 10
    assert (code, out) == (2, "")
    assert len(lines) == len(planted)
    for told in planted.values():
        assert sum(told in line for line in lines) == 1, (told, lines)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("actor_rollout_ref.model.path=/nowhere", "there is no model directory '/nowhere'"),
        ("critic.model.path=/nowhere", "there is no model directory '/nowhere'"),
        ("data.max_response_length=2000", "= {} positions: set it lower"),
        ("data.val_files=/no/file.parquet", "/no/file.parquet: no such file"),
        ("data.train_files=/no/file.parquet", "/no/file.parquet: no such file"),
        ("trainer.device=cuda", "0 GPUs found"),
        ("trainer.default_local_dir=/dev/null/run", "nothing can be written to '/dev/null'"),
        ("actor_rollout_ref.rollout.name=vllm", None),
        ("trainer.resume_mode=resume_path trainer.resume_from_path=/no/step_4", "'/no/step_4' is not a Valor checkp"),
        ("data.max_prompt_length=4", "the prompt has 6 tokens, data.max_prompt_length is 4"),
        ("data.train_files=[]", "no data file given: set data.train_files"),
    ],
)
def test_the_plan_is_shown_and_what_this_machine_lacks(override, told, model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    if told is None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
        told = "vllm"
    path = rows(tmp_path / "a.jsonl", GOOD)
    given = [f"actor_rollout_ref.model.path={model}", f"data.train_files={path}", *override.split()]
    code, out, lines = run(capsys, "ppo", "data.max_response_length=64", *given)
    lines = [line for line in lines if not line.startswith("note: ")]
    assert code == 2 and "training data" in out
    assert len(lines) == 1 and told.replace("= {}", "has 1024") in lines[0], lines


def test_what_several_checks_find_is_said_once(model, capsys):
    given = [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=nope", "data.train_files=[]"]
    code, _, lines = run(capsys, "ppo", *given)
    assert code == 2 and sum("unknown actor_rollout_ref.rollout.name 'nope'" in line for line in lines) == 1, lines


def test_a_run_that_lacks_nothing(model, tmp_path, capsys):
    path = rows(tmp_path / "a.jsonl", GOOD)
    given = [f"actor_rollout_ref.model.path={model}", f"data.train_files={path}", "trainer.n_gpus_per_node=1"]
    code, out, lines = run(capsys, "ppo", "data.max_response_length=64", f"data.val_files={path}", *given)
    assert (code, lines) == (0, []), lines
    assert "1 CPU process on this machine" in out
    assert not list(tmp_path.glob("checkpoints"))


def test_what_graders_would_miss(model, tmp_path, capsys):
    unknown, without = GOOD | {"data_source": "nobody"}, GOOD | {"reward_model": {"style": "rule"}}
    for record, told in ((unknown, "no grader for data_source 'nobody'"), (without, "no reward_model.ground_truth")):
        path = rows(tmp_path / "a.jsonl", GOOD, record)
        given = [f"actor_rollout_ref.model.path={model}", f"data.train_files={path}", "data.max_response_length=64"]
        code, _, lines = run(capsys, "ppo", *given)
        assert code == 2 and len(lines) == 1 and told in lines[0]


@pytest.mark.parametrize("words", ["ppo", "sft"])
def test_more_rows_a_step_than_there_are(words, model, tmp_path, capsys):
    told = "the training data has 3 prompts, fewer than one batch of 4: lower data.train_batch_size"
    record = GOOD if words == "ppo" else {"prompt": "1+1=", "response": "2"}
    given = [f"data.train_files={rows(tmp_path / 'a.jsonl', *[record] * 3)}", "data.train_batch_size=4"]
    given += [f"{'actor_rollout_ref.' * (words == 'ppo')}model.path={model}"]
    given += ["data.max_response_length=64"] * (words == "ppo")
    code, _, lines = run(capsys, words, *given)
    assert code == 2 and len(lines) == 1 and told in lines[0], lines
    assert run(capsys, words, *given, "data.train_batch_size=3")[0] == 0


def test_supervised_runs_are_checked_too(model, tmp_path, capsys):
    path = rows(tmp_path / "a.jsonl", {"prompt": "1+1", "answer": "2"})
    code, out, lines = run(capsys, "sft", f"model.path={model}", f"data.train_files={path}")
    assert code == 2 and "model" in out and len(lines) == 1 and "needs a column 'messages'" in lines[0]
    code, _, lines = run(capsys, "rm train", f"model.path={model}", f"data.train_files={path}")
    assert code == 2 and len(lines) == 1 and "column 'chosen', 'rejected' missing" in lines[0]


VERL_REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1\n"
TRL_REWARD = "def compute_score(completions, **columns):\n    return [1.0] * len(completions)\n"


@pytest.mark.parametrize(
    ("reward", "column", "noted"),
    [
        (VERL_REWARD, "anwser", "the reward gets None; did you mean answer?"),
        (VERL_REWARD, "other", "the reward gets None"),
        (VERL_REWARD, "answer", ""),
        (TRL_REWARD, "anwser", "the reward gets None; did you mean answer?"),
        (TRL_REWARD, "other", ""),
    ],
)
def test_rows_without_a_ground_truth_are_noted_where_the_reward_reads_it(
    reward, column, noted, model, tmp_path, capsys, caplog
):
    (tmp_path / "reward.py").write_text(reward)
    line = [f"actor_rollout_ref.model.path={model}", "data.train_batch_size=1"]
    line += [f"reward.custom_reward_function.path={tmp_path / 'reward.py'}"]
    data = rows(tmp_path / "rows.jsonl", {"question": "1+1=", column: "2"})
    assert run(capsys, "ppo", *line, f"data.train_files={data}")[0] == 0
    assert caplog.messages == [f"no train prompt has a ground truth (ground_truth, answer, solution): {noted}"] * bool(
        noted
    )
