"""Whole runs scored by a learned reward model, a published critic or a judge, in this process and under Ray."""

import json
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from runs import read_metrics

from json_http import JsonHandler
from tiny_reward_models import make_backbone, make_classifier, make_deberta
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow
SOURCE = "valor/arithmetic"
JUDGE = "reward.reward_model.judge"


def with_model(path: Path, *more: str) -> list[str]:
    return ["reward_model.enable=True", f"reward_model.path={path}", "trainer.total_training_steps=2", *more]


def samples(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples" / f"step_{step}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def deberta(tmp_path_factory) -> Path:
    return make_deberta(tmp_path_factory.mktemp("deberta") / "rm")


@pytest.mark.usefixtures("hosts")
def test_a_cross_encoder_with_its_own_tokenizer_scores_a_run(overrides, deberta, tmp_path):
    fp32 = "reward.reward_model.fsdp_config.dtype=float32"
    assert main(overrides(tmp_path / "local", *with_model(deberta, fp32))) == 0
    ray = ("trainer.controller=ray", "trainer.n_gpus_per_node=2")
    assert main(overrides(tmp_path / "ray", *with_model(deberta, fp32, *ray))) == 0
    rows = {name: read_metrics(tmp_path / name) for name in ("local", "ray")}
    for local, two in zip(rows["local"], rows["ray"], strict=True):
        assert local.keys() == two.keys()
    first, same = rows["local"][1], rows["ray"][1]
    assert first[f"reward/{SOURCE}/rm_score"] == first["critic/score/mean"] != 0
    assert first["critic/score/mean"] == pytest.approx(same["critic/score/mean"], abs=1e-5)
    assert first["reward_model/cut_texts"] == 0
    assert f"val-core/{SOURCE}/reward/mean@1" in rows["local"][0]  # by rule: the source has a grader
    scores = {sample["reward"] for sample in samples(tmp_path / "local", 1)}
    assert len(scores) > 1 and all("rm_score" in sample["reward_info"] for sample in samples(tmp_path / "local", 1))


def test_model_and_rule_add_up_by_their_weights(overrides, tmp_path):
    model = make_classifier(tmp_path / "rm")
    weights = ("reward.reward_model.weight=0.5", "reward.reward_model.rule_weight=2", "data.val_files=null")
    assert main(overrides(tmp_path / "run", *with_model(model, *weights, "reward.reward_model.max_length=8"))) == 0
    for step in (1, 2):
        for sample in samples(tmp_path / "run", step):
            info = sample["reward_info"]
            assert sample["reward"] == pytest.approx(0.5 * info["rm_score"] + 2 * info["rule_score"], abs=1e-6)
    row = read_metrics(tmp_path / "run")[0]
    assert row["reward_model/cut_texts"] == 16  # every text is longer than 8 tokens
    assert row[f"reward/{SOURCE}/rm_cut"] == 1


def test_an_exported_critic_scores_as_the_value_at_the_last_token(overrides, tmp_path):
    first = tmp_path / "first"
    assert main(overrides(first, "trainer.total_training_steps=2", "data.val_files=null")) == 0
    critic = first / "huggingface" / "critic"
    more = (f"critic.model.path={critic}", "data.val_files=null", "trainer.log_generations=16")
    fp32 = ("reward.reward_model.fsdp_config.dtype=float32", "critic.fsdp_config.dtype=float32")
    assert main(overrides(tmp_path / "second", *with_model(critic, *more, *fp32))) == 0
    seen = samples(tmp_path / "second", 1)
    assert len(seen) == 16 and len({sample["reward"] for sample in seen}) > 1
    for sample in seen:  # the run's critic is the same model and has not been trained yet
        assert sample["reward"] == pytest.approx(sample["values"][-1], abs=1e-4)


def test_remax_scores_its_greedy_baseline_by_the_model(overrides, tmp_path):
    model = make_classifier(tmp_path / "rm")
    more = ("algorithm.adv_estimator=remax", "data.val_files=null", "trainer.total_training_steps=1")
    assert main(overrides(tmp_path / "run", *with_model(model), *more)) == 0
    assert "critic/score/mean" in read_metrics(tmp_path / "run")[0]


@pytest.fixture
def ungraded(tiny, tmp_path) -> Path:
    """Prompts of a source that has no grader."""
    path = tmp_path / "people.jsonl"
    row = {"data_source": "people/chat", "reward_model": {"style": "model", "ground_truth": None}}
    prompts = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}], **row} for i in range(16)]
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path


def test_prompts_without_a_grader_are_scored_and_validated_by_the_model(overrides, ungraded, tmp_path, capsys):
    files = (f"data.train_files={ungraded}", f"data.val_files={ungraded}", "reward.custom_reward_function.path=null")
    assert main(overrides(tmp_path / "none", *files)) == 2
    assert "no grader for data_source 'people/chat'" in capsys.readouterr().err
    model = make_classifier(tmp_path / "rm")
    assert main(overrides(tmp_path / "run", *files, *with_model(model))) == 0
    rows = read_metrics(tmp_path / "run")
    assert "val-core/people/chat/reward/mean@1" in rows[0]
    assert rows[1]["reward/people/chat/mean"] == rows[1]["reward/people/chat/rm_score"]
    assert main(overrides(tmp_path / "both", *files, *with_model(model, "reward.reward_model.rule_weight=1"))) == 2


class JudgeServer(JsonHandler):
    """Gives every answer as many points as it has characters; fails for every fourth."""

    asked = 0

    def do_GET(self) -> None:
        self.reply(200, {})

    def do_POST(self) -> None:
        request = self.request_json()
        answer = request["messages"][0]["content"].partition("[Answer]\n")[2].partition("\n[End of the answer]")[0]
        JudgeServer.asked += 1
        text = f"Score: {len(answer)}" if JudgeServer.asked % 4 else "no idea"
        self.reply(200, {"choices": [{"message": {"content": text}}]})


def test_a_judge_scores_a_run_and_its_failures_are_counted(overrides, tmp_path):
    http = ThreadingHTTPServer(("127.0.0.1", 0), JudgeServer)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    judge = (
        "reward.reward_model.enable=true",
        f"{JUDGE}.url=http://127.0.0.1:{http.server_port}/v1",
        f"{JUDGE}.model=any",
    )
    more = ("data.val_files=null", "trainer.total_training_steps=1", "reward.error_score=-1")
    try:
        assert main(overrides(tmp_path / "run", *judge, *more)) == 0
    finally:
        http.shutdown()
        http.server_close()
    (row,) = read_metrics(tmp_path / "run")
    assert row["reward/errors"] == 4
    for sample in samples(tmp_path / "run", 1):
        assert sample["reward"] == -1 or sample["reward"] == sample["reward_info"]["rm_score"] >= 0


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("Is {response} as good as {ground_truth}?", "asks for {ground_truth}, which 16 of 16 train prompts lack"),
        ("How good is {response} for {question}?", "has {question} in it, for which nothing is put in"),
    ],
)
def test_a_judges_template_without_its_texts_is_one_line(overrides, ungraded, tmp_path, capsys, template, message):
    files = (f"data.train_files={ungraded}", "data.val_files=null", "reward.custom_reward_function.path=null")
    judge = ("reward.reward_model.enable=true", f"{JUDGE}.url=http://127.0.0.1:9/v1", f"{JUDGE}.model=any")
    argv = overrides(tmp_path / "run", *files, *judge, f"{JUDGE}.prompt_template='{template}'")
    assert_one_line(argv, tmp_path / "run", capsys, message)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (lambda p: p, [], "there is no model directory"),
        (make_backbone, [], "has no reward head"),
        (lambda p: make_classifier(p, num_labels=2), [], "classifies into 2 labels"),
        (make_classifier, ["reward.reward_model.tokenizer_path=/nowhere"], "there is no model directory"),
        (make_classifier, [f"{JUDGE}.url=http://x", f"{JUDGE}.model=m"], "has both"),
        (make_classifier, ["reward.reward_model.weight=0"], "leaves the reward model without effect"),
        (make_classifier, ["reward.reward_model.custom_chat_template='{{ raise_exception(\"no\") }}'"], "refuses"),
    ],
)
def test_bad_input_is_one_line(overrides, tmp_path, capsys, make, settings, message):
    model = make(tmp_path / "rm")
    assert_one_line(overrides(tmp_path / "run", *with_model(model, *settings)), tmp_path / "run", capsys, message)


def test_a_model_without_a_tokenizer_is_one_line(overrides, tmp_path, capsys):
    model = make_classifier(tmp_path / "rm")
    for file in [*model.glob("token*"), *model.glob("chat*")]:
        file.unlink()
    assert_one_line(overrides(tmp_path / "run", *with_model(model)), tmp_path / "run", capsys, "tokenizer")


def test_nothing_to_score_with_is_one_line(overrides, tmp_path, capsys):
    assert_one_line(overrides(tmp_path / "run", "reward_model.enable=True"), tmp_path / "run", capsys, "has neither")


def assert_one_line(argv: list[str], run_dir: Path, capsys, message: str) -> None:
    capsys.readouterr()  # what was said before
    assert main(argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line and not line.startswith("note:")]
    assert len(lines) == 1 and message in lines[0], lines
    assert not run_dir.exists()
