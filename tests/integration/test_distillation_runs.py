"""Students that learn from teachers: every form of the signal, two teachers, a pool of their own, a resumed run."""

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from runs import assert_same_run, assert_same_weights, read_metrics
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributions import Categorical, kl_divergence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from json_http import JsonHandler
from valor.config.distillation import TeacherConfig
from valor.data.batch import Batch
from valor.errors import TrainingStopped
from valor.trainer.main_ppo import main
from valor.trainer.served_teacher import served_log_probs

LOSS = "distillation.distillation_loss"
ALONE = ("algorithm.adv_estimator=grpo", f"{LOSS}.use_task_rewards=false")
SIGNAL = (f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=true")
ONE_UPDATE = ("trainer.total_training_steps=1", "actor_rollout_ref.actor.ppo_mini_batch_size=8")


def make_teacher(student: Path, path: Path, seed: int) -> Path:
    """The student's model with other weights, and its tokenizer."""
    path.mkdir()
    for file in student.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    model = AutoModelForCausalLM.from_pretrained(student)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def teacher(tiny, tmp_path_factory) -> Path:
    return make_teacher(tiny["model"], tmp_path_factory.mktemp("teacher") / "a", 5)


def taught(teacher: Path, *more: str) -> list[str]:
    return ["distillation.enabled=true", f"distillation.teacher_models.teacher_model.model_path={teacher}", *more]


def distributions(model: Path, rows: list[dict]) -> list[Categorical]:
    """At the response tokens of each row, by plain transformers."""
    hf = AutoModelForCausalLM.from_pretrained(model)
    out = []
    for row in rows:
        ids, start = torch.tensor([row["prompt_ids"] + row["response_ids"]]), len(row["prompt_ids"]) - 1
        with torch.no_grad():
            out.append(Categorical(logits=hf(ids).logits[0, start:-1].float()))
    return out


def tokens(row: dict) -> torch.Tensor:
    return torch.tensor(row["response_ids"])


def k3(student: Categorical, teacher: Categorical, chosen: torch.Tensor) -> torch.Tensor:
    x = teacher.log_prob(chosen) - student.log_prob(chosen)
    return x.exp() - 1 - x


def jsd(student: Categorical, teacher: Categorical, beta: float) -> torch.Tensor:
    mixture = Categorical(probs=(1 - beta) * student.probs + beta * teacher.probs)
    return beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(student, mixture)


def of_four(student: Categorical, teacher: Categorical) -> torch.Tensor:
    top = teacher.probs.topk(4).indices
    parts = [
        torch.cat([x.probs.gather(1, top), 1 - x.probs.gather(1, top).sum(1, True)], 1) for x in (teacher, student)
    ]
    return kl_divergence(*map(Categorical, parts))


FORMS: dict[str, tuple[tuple[str, ...], Callable]] = {
    "k3": ((), k3),
    "k1 as advantage": (SIGNAL, lambda s, t, chosen: s.log_prob(chosen) - t.log_prob(chosen)),
    "forward_kl": ((f"{LOSS}.loss_mode=forward_kl",), lambda s, t, _: kl_divergence(t, s)),
    "reverse_kl": ((f"{LOSS}.loss_mode=reverse_kl",), lambda s, t, _: kl_divergence(s, t)),
    "jsd": ((f"{LOSS}.loss_mode=jsd", f"{LOSS}.beta=0.3"), lambda s, t, _: jsd(s, t, 0.3)),
    "adapters, padded": (
        (
            f"{LOSS}.loss_mode=reverse_kl",
            f"{LOSS}.loss_max_clamp=50",
            "actor_rollout_ref.model.lora_rank=4",
            "actor_rollout_ref.model.use_remove_padding=false",
        ),
        lambda s, t, _: kl_divergence(s, t),
    ),
    "topk": ((f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=4"), lambda s, t, _: of_four(s, t)),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_distance_of_a_run_is_that_of_plain_transformers(form, tiny, teacher, overrides, tmp_path):
    settings, distance = FORMS[form]
    data = f"trainer.rollout_data_dir={tmp_path / 'rows'}"
    assert main(overrides(tmp_path, *taught(teacher, *settings, *ALONE, *ONE_UPDATE, data))) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows" / "1.jsonl").read_text().splitlines()]
    pairs = zip(distributions(tiny["model"], rows), distributions(teacher, rows), map(tokens, rows), strict=True)
    expected = torch.cat([distance(*pair) for pair in pairs]).mean()
    step = next(step for step in read_metrics(tmp_path) if "actor/distillation/loss" in step)
    assert step["actor/distillation/loss"] == pytest.approx(float(expected), rel=1e-4)
    assert "actor/pg_loss" in step if form == "k1 as advantage" else "actor/pg_loss" not in step
    samples = [json.loads(line) for line in (tmp_path / "samples" / "step_1.jsonl").read_text().splitlines()]
    if form in ("k3", "k1 as advantage"):  # the report shows how likely the teacher finds each sampled token
        by_teacher = [d.log_prob(tokens(row)) for d, row in zip(distributions(teacher, rows), rows, strict=True)]
        shown = torch.tensor(samples[0]["teacher_log_probs"])
        assert any(len(shown) == len(one) and torch.allclose(shown, one, atol=1e-4) for one in by_teacher)
    else:
        assert "teacher_log_probs" not in samples[0]


def test_a_teacher_reads_tokens_of_the_policys_padding_as_its_last_one(tiny, teacher, overrides, tmp_path):
    policy, size = tmp_path / "policy", AutoConfig.from_pretrained(teacher).vocab_size
    model = AutoModelForCausalLM.from_pretrained(tiny["model"])
    model.resize_token_embeddings(size + 64, mean_resizing=False)
    model.save_pretrained(policy)
    AutoTokenizer.from_pretrained(tiny["model"]).save_pretrained(policy)
    more = (f"actor_rollout_ref.model.path={policy}", f"trainer.rollout_data_dir={tmp_path / 'rows'}")
    assert main(overrides(tmp_path / "run", *taught(teacher, *ALONE, *ONE_UPDATE, *more))) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows" / "1.jsonl").read_text().splitlines()]
    assert max(max(row["response_ids"]) for row in rows) >= size
    read = [{**row, "response_ids": [min(i, size - 1) for i in row["response_ids"]]} for row in rows]
    students, teachers = distributions(policy, rows), distributions(teacher, read)
    pairs = zip(students, teachers, rows, read, strict=True)
    gaps = [student.log_prob(tokens(a)) - teacher.log_prob(tokens(b)) for student, teacher, a, b in pairs]
    step = next(step for step in read_metrics(tmp_path / "run") if "distillation/reverse_kl" in step)
    assert step["distillation/reverse_kl"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-4)


def test_a_teacher_alone_needs_no_grader(tiny, teacher, overrides, tmp_path, capsys):
    rows = [{"prompt": row["prompt"]} for row in pq.read_table(tiny["train"]).to_pylist()]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [f"data.train_files={tmp_path / 'asked.jsonl'}", "data.val_files=null", *ONE_UPDATE]
    asked.append("reward.custom_reward_function.path=null")
    assert main(overrides(tmp_path / "run", *taught(teacher, *SIGNAL, *ALONE, *asked))) == 0
    step = next(step for step in read_metrics(tmp_path / "run") if "actor/distillation/loss" in step)
    assert step["actor/grad_norm"] > 0 and step["reward/errors"] == 0 and "reward/own/correct" not in step
    assert main(overrides(tmp_path / "beside", *taught(teacher, *SIGNAL, *ALONE[:1], *asked))) == 2
    assert "no grader for data_source 'own'" in capsys.readouterr().err


def test_with_a_critic_the_signal_is_a_reward_and_a_resumed_run_is_the_same(teacher, overrides, tmp_path):
    more = taught(teacher, *SIGNAL, f"{LOSS}.signal=reward", f"{LOSS}.distillation_loss_coef=0.5")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main(overrides(whole, *more, "trainer.save_freq=2")) == 0
    checkpoint = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole / 'global_step_2'}")
    assert main(overrides(resumed, *more, *checkpoint)) == 0
    assert read_metrics(whole)[-2:] == read_metrics(resumed)[-2:]
    assert_same_weights(whole, resumed)
    for step in read_metrics(whole)[1:]:
        assert step["critic/rewards/mean"] != pytest.approx(step["critic/score/mean"], abs=1e-3)


def test_each_of_two_teachers_scores_its_rows(tiny, teacher, overrides, tmp_path):
    other = make_teacher(tiny["model"], tmp_path / "b", 6)
    table = pq.read_table(tiny["train"]).to_pylist()
    for number, row in enumerate(table):
        row["extra_info"] = {**(row.get("extra_info") or {}), "half": str(number % 2)}
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "train.parquet")
    pair = [
        "distillation.enabled=true",
        "distillation.teacher_key=half",
        *(f"distillation.teacher_models.t{i}.model_path={path}" for i, path in enumerate((teacher, other))),
        *(f"distillation.teacher_models.t{i}.key='{i}'" for i in range(2)),
        f"data.train_files={tmp_path / 'train.parquet'}",
    ]
    for name, more in {"samples": SIGNAL, "distributions": (f"{LOSS}.loss_mode=reverse_kl",)}.items():
        run = tmp_path / name
        data = f"trainer.rollout_data_dir={run / 'rows'}"
        assert main(overrides(run, *pair, *more, *ALONE, *ONE_UPDATE, data)) == 0
        rows = [json.loads(line) for line in (run / "rows" / "1.jsonl").read_text().splitlines()]
        by_teacher = [distributions(path, rows) for path in (teacher, other)]
        students, gaps = distributions(tiny["model"], rows), []
        for number, row in enumerate(rows):
            student, mine = students[number], by_teacher[int(row["extra_info"]["half"])][number]
            sampled = student.log_prob(tokens(row)) - mine.log_prob(tokens(row))
            gaps.append(sampled if name == "samples" else kl_divergence(student, mine))
        assert {row["extra_info"]["half"] for row in rows} == {"0", "1"}
        step = next(step for step in read_metrics(run) if "actor/distillation/loss" in step)
        assert step["actor/distillation/loss"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-4)


def test_the_policy_that_reads_the_answer_is_a_teacher(tiny, overrides, tmp_path):
    template = "distillation.teacher_models.me.prompt_template='{prompt} is {ground_truth}, {carry}'"
    data = f"trainer.rollout_data_dir={tmp_path / 'rows'}"
    more = ["distillation.enabled=true", template, *SIGNAL, *ALONE, *ONE_UPDATE, data]
    assert main(overrides(tmp_path, *more)) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows" / "1.jsonl").read_text().splitlines()]
    tokenizer, gaps = AutoTokenizer.from_pretrained(tiny["model"]), []
    for row in rows:
        told = f"{row['messages'][0]['content']} is {row['gts']}, {row['extra_info']['carry']}"
        prompt = tokenizer(f"<|user|>{told}<|assistant|>", add_special_tokens=False)["input_ids"]
        student, teacher = distributions(tiny["model"], [row, {**row, "prompt_ids": prompt}])
        gaps.append(student.log_prob(tokens(row)) - teacher.log_prob(tokens(row)))
    step = next(step for step in read_metrics(tmp_path) if "actor/distillation/loss" in step)
    assert step["actor/distillation/loss"] == pytest.approx(float(torch.cat(gaps).mean()), rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("hosts")
def test_a_teacher_in_a_pool_of_its_own_changes_nothing(teacher, overrides, tmp_path):
    more = taught(teacher, *SIGNAL, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=2")
    assert main(overrides(tmp_path / "together", *more)) == 0
    pool = ("distillation.nnodes=1", "distillation.n_gpus_per_node=1")
    assert main(overrides(tmp_path / "apart", *more, *pool)) == 0
    assert_same_run(tmp_path / "together", tmp_path / "apart")


MISTAKES = {
    "has another tokenizer than the policy": ("tokenizer",),
    "no teacher has that key (they have a, b)": (
        "distillation.teacher_models.teacher_model.key=a",
        "distillation.teacher_models.other.model_path={teacher}",
        "distillation.teacher_models.other.key=b",
    ),
    "no teacher has that key (they have a): set": ("distillation.teacher_models.teacher_model.key=a",),
    "a row has no 'subject' in extra_info, where": (
        "distillation.teacher_models.teacher_model.key=a",
        "distillation.teacher_key=subject",
    ),
    "has {hint} in it, and a row has no such column": (
        "distillation.teacher_models.teacher_model.prompt_template='{prompt} {hint}'",
    ),
    "has 16 positions: set it lower": ("positions",),
    "more than the 1024 positions of": (
        "distillation.teacher_models.teacher_model.prompt_template='{prompt}" + " and think" * 120 + "'",
    ),
    "set distillation.nnodes=0": (f"{LOSS}.loss_mode=forward_kl", "distillation.nnodes=1"),
    "would learn for nothing": ("algorithm.adv_estimator=gae",),
    "use_policy_gradient=false, or loss_mode=k1": (f"{LOSS}.loss_mode=jsd", f"{LOSS}.use_policy_gradient=true"),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line(line, tiny, teacher, overrides, tmp_path, capsys):
    more = [text.replace("{teacher}", str(teacher)) for text in MISTAKES[line]]
    if more in (["tokenizer"], ["positions"]):
        other = make_teacher(tiny["model"], tmp_path / "other", 7)
        config = AutoConfig.from_pretrained(other)
        config.max_position_embeddings = 16 if more == ["positions"] else config.max_position_embeddings
        config.save_pretrained(other)
    if more == ["positions"]:
        more = [f"distillation.teacher_models.teacher_model.model_path={other}"]
    if more == ["tokenizer"]:
        vocabulary = {token: number for number, token in enumerate("abcdefgh")}
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary))).save_pretrained(other)
        more = [f"distillation.teacher_models.teacher_model.model_path={other}"]
    assert main(overrides(tmp_path / "run", *taught(teacher, *ALONE), *more)) == 2
    (said,) = [text for text in capsys.readouterr().err.splitlines() if line in text]
    assert "Traceback" not in said and not (tmp_path / "run").exists()


class TeacherServer:
    """What vLLM and SGLang answer to `echo` with `logprobs`, by plain transformers. `fault`: what it does wrong."""

    def __init__(self, model: Path) -> None:
        self.hf, self.tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        self.fault, self.models, self.requests, self.refuses_from = "", ["m"], 0, sys.maxsize
        server = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": name} for name in server.models]})

            def do_POST(self) -> None:
                self.reply(*server.completion(self.request_json()))

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def completion(self, body: dict) -> tuple[int, dict]:
        assert body["model"] == "m" and body["echo"] and body["temperature"] == 1.0 and body["max_tokens"] == 1
        self.requests += 1
        ids = body["prompt"]
        if isinstance(ids, str):
            ids = self.tokenizer(ids)["input_ids"] + ([5] if self.fault == "other tokenizer" else [])
        with torch.no_grad():
            table = self.hf(torch.tensor([ids])).logits[0].log_softmax(-1)
        sampled = float(table[-1, self.requests % 5])
        numbers = [None, *(float(table[i, token]) for i, token in enumerate(ids[1:])), sampled]
        if self.fault == "refuses" or self.requests >= self.refuses_from:
            return 400, {"message": "prompt logprobs are off"}
        if self.fault == "short" and len(ids) + 1 > 40:
            return 400, {"message": "the maximum context length is 40 tokens, and you requested 41"}
        return 200, {"choices": [{"logprobs": None if self.fault == "silent" else {"token_logprobs": numbers}}]}


@pytest.fixture
def served(teacher) -> Iterator[TeacherServer]:
    server = TeacherServer(teacher)
    yield server
    server.http.shutdown()


def behind(server: TeacherServer, *more: str) -> list[str]:
    return ["distillation.enabled=true", f"distillation.teacher_models.one.url={server.url}", *SIGNAL, *more]


def test_a_teacher_behind_a_server_is_the_one_that_is_loaded(teacher, served, overrides, tmp_path, capsys):
    more = (*ALONE, "trainer.total_training_steps=2", "trainer.save_freq=1")
    assert main(overrides(tmp_path / "here", *taught(teacher, *SIGNAL, *more))) == 0
    served.refuses_from = 3 + 16 + 1  # the checks, a request a row, and then no more
    assert main(overrides(tmp_path / "served", *behind(served, *more))) == 1
    assert f"the teacher at {served.url} failed: status 400" in capsys.readouterr().err
    served.refuses_from = sys.maxsize
    assert main(overrides(tmp_path / "served", *behind(served, *more, "trainer.resume_mode=auto"))) == 0
    runs = (read_metrics(tmp_path / run) for run in ("here", "served"))
    steps = [[step for step in run if "distillation/reverse_kl" in step] for run in runs]
    for here, there in zip(*steps, strict=True):
        for key in ("distillation/reverse_kl", "actor/distillation/loss", "actor/pg_loss", "actor/grad_norm"):
            assert there[key] == pytest.approx(here[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("other tokenizer", "its model has another tokenizer than the policy"),
        ("silent", "it gives no log-probs of a prompt"),
        ("refuses", "status 400: .*prompt logprobs are off"),
        ("short", "does not score a row of .* = 40 tokens: .*context length is 40.*: serve it with a context of 41"),
    ],
)
def test_a_server_that_cannot_teach_is_one_line(fault, line, served, overrides, tmp_path, capsys):
    served.fault = fault
    assert main(overrides(tmp_path, *behind(served, *ALONE))) == 2
    assert re.search(f"distillation.teacher_models.one.url=http://.*{line}", capsys.readouterr().err)


def test_what_a_served_teacher_does_not_go_with_is_one_line(served, overrides, tmp_path, capsys):
    for more, line in {
        f"{LOSS}.loss_mode=reverse_kl": "a server scores sampled tokens: set",
        "actor_rollout_ref.rollout.temperature=0.7": "a server scores at temperature 1",
        "distillation.teacher_models.one.override_config.attention_dropout=0.0": "the server has loaded its model",
        "distillation.teacher_models.two.model_path=x": "some are models here, some behind a url",
    }.items():
        assert main(overrides(tmp_path, *behind(served, *ALONE, f"{LOSS}.use_policy_gradient=false", more))) == 2
        assert line in capsys.readouterr().err
    served.models = ["a", "b"]
    assert main(overrides(tmp_path, *behind(served, *ALONE))) == 2
    assert "say which of the served models it is: a, b" in capsys.readouterr().err
    served.http.shutdown()
    served.http.server_close()
    assert main(overrides(tmp_path, *behind(served, *ALONE))) == 2
    assert "no server at distillation.teacher_models.one.url" in capsys.readouterr().err


def test_a_server_that_has_gone_between_steps_stops_the_run():
    teacher = TeacherConfig(url="http://127.0.0.1:9/v1")
    row = {name: torch.ones(1, 2, dtype=torch.long) for name in ("prompts", "responses")}
    lengths = {f"{name}_lengths": torch.tensor([2]) for name in ("prompt", "response")}
    with pytest.raises(TrainingStopped, match="the same command goes on"):
        served_log_probs(teacher, Batch({**row, **lengths}))
