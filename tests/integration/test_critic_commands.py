"""A critic's life: pre-trained from rollouts, resumed, scored, published, loaded by others, and used in a run."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from runs import read_metrics
from safetensors.torch import save_file
from transformers import AutoModelForTokenClassification, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from tiny_vision import make_model as make_vision_model
from valor.cli import main as valor
from valor.collector.rollouts import read_rollouts
from valor.config import CriticModelConfig, load
from valor.errors import UserError
from valor.lab import arithmetic
from valor.lab.publish import publish
from valor.models.load import load_value_model
from valor.report.skeleton import model_name
from valor.trainer import main_ppo
from valor.trainer.ppo import PPORun

pytestmark = pytest.mark.slow

SMALL = [
    "data.max_prompt_length=32",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "reward.num_workers=1",
    "trainer.device=cpu",
    "trainer.num_threads=1",
]


@pytest.fixture(scope="session")
def rollouts(tiny, tmp_path_factory) -> Path:
    """240 answers to 60 sums, one digit four times over, right when it is at least 5: easy to read off the text."""
    rng = random.Random(0)
    lines = []
    for number in range(240):
        digit = rng.choice("0123456789")
        chat = [{"role": "user", "content": arithmetic.question(10 + number % 60, 11)}]
        lines.append(json.dumps({"messages": chat, "response": digit * 4, "score": float(digit >= "5")}) + "\n")
    path = tmp_path_factory.mktemp("rollouts") / "digits.jsonl"
    path.write_text("".join(lines))
    return path


def pretraining(tiny, rollouts: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        *("critic", "pretrain", *SMALL, f"pretrain.rollouts={rollouts}", "pretrain.holdout=0.2"),
        *(f"actor_rollout_ref.model.path={tiny['model']}", "actor_rollout_ref.rollout.n=4"),
        *("data.train_batch_size=16", "critic.ppo_mini_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        *("critic.optim.lr=1e-3", "critic.model.enable_gradient_checkpointing=false", "trainer.save_freq=3"),
        *("trainer.total_epochs=4", f"trainer.default_local_dir={run_dir}", *more),
    ]


@pytest.fixture(scope="session")
def pretrained(tiny, rollouts, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("pretrained") / "run"
    assert valor(pretraining(tiny, rollouts, run_dir)) == 0
    return run_dir


def test_pretraining_tells_right_from_wrong_on_prompts_it_has_not_seen(pretrained):
    rows = read_metrics(pretrained)
    assert [row["step"] for row in rows] == list(range(13))  # 48 prompts to learn from: three steps an epoch
    judged = {row["step"]: row for row in rows if "critic/holdout/auc" in row}
    assert list(judged) == [0, 3, 6, 9, 12]
    assert judged[0]["critic/holdout/auc"] == 0.5 and abs(judged[0]["critic/holdout/vf_explained_var"]) < 1e-6
    assert judged[12]["critic/holdout/auc"] > 0.9 and judged[12]["critic/holdout/vf_explained_var"] > 0.3
    assert all({"critic/vf_loss", "critic/vf_explained_var", "critic/lr"} <= row.keys() for row in rows[1:])
    assert (pretrained / "report.html").exists()


def test_the_best_epoch_is_exported(pretrained, tmp_path):
    """Its values on the held-out rollouts give the best line's numbers; here the best is the last or the one before."""
    rows = {r["step"]: r["critic/holdout/vf_explained_var"] for r in read_metrics(pretrained) if r["step"] % 3 == 0}
    best = max(rows, key=lambda step: rows[step])
    publish(pretrained / f"global_step_{best}", tmp_path / "best")
    exported, checkpoint = (
        AutoModelForTokenClassification.from_pretrained(path).state_dict()
        for path in (pretrained / "huggingface" / "critic", tmp_path / "best")
    )
    assert all(torch.equal(exported[name], checkpoint[name]) for name in exported)


def test_a_resumed_pretraining_equals_the_undisturbed_one(tiny, rollouts, pretrained, tmp_path):
    run_dir = tmp_path / "run"
    assert valor(pretraining(tiny, rollouts, run_dir, "trainer.total_training_steps=12")) == 0
    for step in (9, 12):  # as if it had been killed in the seventh step
        _remove(run_dir / f"global_step_{step}")
    _remove(run_dir / "huggingface")
    assert valor(pretraining(tiny, rollouts, run_dir, "trainer.total_training_steps=12")) == 0
    assert read_metrics(run_dir) == read_metrics(pretrained)


@pytest.mark.parametrize("loss", ["bce", "hl_gauss"])
def test_other_value_losses(tiny, rollouts, tmp_path, loss, monkeypatch, capsys):
    arguments = pretraining(tiny, rollouts, tmp_path / "run", f"critic.value_loss={loss}", "trainer.total_epochs=2")
    assert valor(arguments) == 0
    judged = read_metrics(tmp_path / "run")[-1]
    assert judged["critic/holdout/auc"] > 0.8
    source, out = tmp_path / "run" / "huggingface" / "critic", tmp_path / "published"
    assert valor(["critic", "publish", str(source), str(out)]) == 0
    # The card's lines of Python turn this head's output into the values that valor reads from it.
    capsys.readouterr()
    monkeypatch.chdir(out)
    found: dict = {}
    exec(_code_of_card(out), found)
    model = load_value_model(CriticModelConfig(path=str(source)))
    text = found["text"]
    ids = found["tokenizer"](text, add_special_tokens=False)["input_ids"]
    rows = {
        "prompts": torch.tensor([ids[:1]]),
        "prompt_lengths": torch.tensor([1]),
        "responses": torch.tensor([[*ids[1:], 0]]),  # the value before a token is that after the one in front of it
        "response_lengths": torch.tensor([len(ids)]),
    }
    with torch.no_grad():
        values = model(rows)["values"][0].tolist()
    assert found["values"].tolist() == pytest.approx(values, abs=1e-5) and 0 < min(values) <= max(values) < 1


@pytest.fixture(scope="session")
def scored(tiny, pretrained, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("scored") / "card"
    parity = Path(__file__).with_name("parity_reward.py")
    arguments = [
        *("critic", "score", *SMALL, f"data.val_files={tiny['val']}", "data.val_max_samples=12"),
        *(f"actor_rollout_ref.model.path={tiny['model']}", "actor_rollout_ref.rollout.n=4"),
        *(f"critic.model.path={pretrained / 'huggingface' / 'critic'}", "algorithm.gamma=0.9"),
        *(f"reward.custom_reward_function.path={parity}", "score.mc=6", "score.positions=3", "score.responses=8"),
        f"score.out={out}",
    ]
    assert valor(arguments) == 0
    return out


def test_a_scorecard_is_numbers_a_page_and_the_rollouts(scored, pretrained):
    card = json.loads((scored / "scorecard.json").read_text())
    assert card["responses"] == 48 and card["prompts"] == 12 and card["critic"].endswith("huggingface/critic")
    assert 0 <= card["auc"]["low"] <= card["auc"]["value"] <= card["auc"]["high"] <= 1
    found = card["monte_carlo"]
    assert found["branches"] == 6 and found["responses"] == 8 and 8 <= found["points"] <= 24
    assert [by["lam"] for by in found["lambdas"]] == [0.0, 0.5, 0.7, 0.9, 0.95, 1.0]
    assert f"<title>{model_name(card['critic'])}, scorecard" in (scored / "scorecard.html").read_text()
    lines = [json.loads(line) for line in (scored / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 48 and all(len(one["values"]) == len(one["response_ids"]) for one in lines)
    # The states' values are those that plain transformers gives.
    critic = AutoModelForTokenClassification.from_pretrained(pretrained / "huggingface" / "critic").eval()
    one = lines[0]
    with torch.no_grad():
        outputs = critic(input_ids=torch.tensor([one["prompt_ids"] + one["response_ids"]])).logits[0, :, 0]
    before = outputs[len(one["prompt_ids"]) - 1 : -1].tolist()
    assert before == pytest.approx(one["values"], abs=1e-5)


def test_branches_from_the_last_token_are_worth_what_their_ends_are(tiny, scored):
    """From the state before the last token of a cut response one token is left: parity flips by chance alone there."""
    card = json.loads((scored / "scorecard.json").read_text())
    truth = card["monte_carlo"]["scatter"]["truth"]
    assert all(0.0 <= one <= 1.0 for one in truth) and len(set(truth)) > 2


def test_scores_from_files_equal_those_of_the_same_rollouts(tiny, scored, pretrained, tmp_path):
    arguments = [
        *("critic", "score", *SMALL, f"score.rollouts={scored / 'rollouts.jsonl'}", f"score.out={tmp_path / 'again'}"),
        *(f"actor_rollout_ref.model.path={tiny['model']}", "algorithm.gamma=0.9"),
        f"critic.model.path={pretrained / 'huggingface' / 'critic'}",
    ]
    assert valor(arguments) == 0
    first, again = (json.loads((path / "scorecard.json").read_text()) for path in (scored, tmp_path / "again"))
    for name in ("auc", "explained_variance", "calibration", "positions", "weights"):
        assert first[name] == again[name], name


def test_a_fresh_critic_is_at_chance_and_said_to_be_one(tiny, scored, overrides, tmp_path, caplog, capsys):
    arguments = [
        *("critic", "score", *SMALL, f"score.rollouts={scored / 'rollouts.jsonl'}", f"score.out={tmp_path / 'fresh'}"),
        f"actor_rollout_ref.model.path={tiny['model']}",
    ]
    assert valor(arguments) == 0
    card = json.loads((tmp_path / "fresh" / "scorecard.json").read_text())
    assert card["auc"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    line = "has no value head, and a new one knows nothing"
    assert line in caplog.text
    other = tmp_path / "other"  # than the policy by its path
    other.symlink_to(tiny["model"])
    assert main_ppo.main(overrides(tmp_path / "run", f"critic.model.path={other}", "critic.freeze=true")) == 2
    assert line in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_published_critic_speaks_for_itself(pretrained, scored, without_valor, tmp_path):
    """The card's own example runs where valor is not, and gives what the critic gave here."""
    source, out = pretrained / "huggingface" / "critic", tmp_path / "my-critic"
    assert valor(["critic", "publish", str(source), str(out), "--scorecard", str(scored)]) == 0
    card = json.loads((scored / "scorecard.json").read_text())
    text = (out / "README.md").read_text()
    assert f"{card['auc']['value']:.3f}" in text and "critic pre-training" in text and str(pretrained) not in text
    assert (out / "scorecard.html").exists()
    tokenizer = AutoTokenizer.from_pretrained(source)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12+34="}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(chat + "06 04 46", add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        ours = AutoModelForTokenClassification.from_pretrained(source).eval()(input_ids=ids).logits[0, :, 0]
    printed = without_valor(_code_of_card(out), cwd=out)
    assert json.loads(printed.strip().splitlines()[-1]) == pytest.approx(ours.tolist(), abs=1e-6)


def test_another_critics_scorecard_is_refused(tiny, rollouts, pretrained, scored, tmp_path, capsys):
    out = tmp_path / "published"
    arguments = ["critic", "publish", str(pretrained / "global_step_3"), str(out), "--scorecard", str(scored)]
    assert valor(arguments) == 2
    assert "scorecard of other weights" in capsys.readouterr().err and not out.exists()


def test_a_warm_start_begins_with_what_the_critic_knows(overrides, pretrained, tmp_path):
    """The very first values of a run are the published critic's (a fresh head's would be 0)."""
    critic = f"critic.model.path={pretrained / 'huggingface' / 'critic'}"
    assert main_ppo.main(overrides(tmp_path / "run", critic, "trainer.total_training_steps=1")) == 0
    first = read_metrics(tmp_path / "run")[1]
    assert first["critic/values/max"] > 0.05 and first["critic/values/min"] < first["critic/values/max"]


def test_an_ensemble_of_one_published_critic_is_refused(overrides, pretrained, tmp_path, capsys):
    """All members would have its head, and learn the same from the same mini-batches."""
    ensemble = ["critic.ensemble_size=2", "critic.model.value_head_init=normal", "trainer.total_training_steps=2"]
    critic = f"critic.model.path={pretrained / 'huggingface' / 'critic'}"
    assert main_ppo.main(overrides(tmp_path / "run", critic, *ensemble)) == 2
    assert "the critics would all be the same" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main_ppo.main(overrides(tmp_path / "run", critic, *ensemble, "critic.shuffle=true")) == 0
    assert read_metrics(tmp_path / "run")[-1]["critic/ensemble_std"] > 0


def test_a_critic_with_another_tokenizer_is_refused_before_weights_are_read(overrides, tiny, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(tiny["model"])
    other = tmp_path / "other"
    vocab = {token: (i + 1) % len(tokenizer) for token, i in tokenizer.get_vocab().items()}
    _model_with(other, len(tokenizer))
    type(tokenizer)(vocab=vocab, merges=[], pad_token="<|pad|>", eos_token="<|end|>", unk_token=None).save_pretrained(
        other
    )
    (other / "model.safetensors").unlink()
    assert main_ppo.main(overrides(tmp_path / "run", f"critic.model.path={other}")) == 2
    assert "has another tokenizer than the policy" in capsys.readouterr().err

    small = _model_with(tmp_path / "small", 100)
    assert main_ppo.main(overrides(tmp_path / "run", f"critic.model.path={small}")) == 2
    assert "knows 100 tokens" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

    tokenizer.add_tokens(["<image>"])  # the policy lacks it too, as small Gemmas do
    policy, critic = (_model_with(tmp_path / name, len(tokenizer) - 1) for name in ("policy", "critic"))
    for folder in (policy, critic):
        tokenizer.save_pretrained(folder)
    models = (f"actor_rollout_ref.model.path={policy}", f"critic.model.path={critic}")
    PPORun(load(overrides(tmp_path / "run", *models)).config, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["critic", "pretrain", "MODELS", "data.train_files=FILE", "critic.freeze=true"], "critic.freeze"),
        (["critic", "score", "MODELS", "critic.enable=false", "data.val_files=FILE"], "critic.enable"),
        (["critic", "score", "MODELS"], "data.val_files"),
        (["critic", "score", "MODELS", "score.mc=4", "score.rollouts=x"], "score.mc"),
        (["critic", "score", "MODELS", "score.positions=1", "data.val_files=FILE"], "score.positions"),
        (["critic", "search", "MODELS", "data.val_files=FILE", "search.samples=[]"], "search.samples"),
        (
            [
                *("critic", "score", "MODELS", "data.val_files=FILE", "critic.ensemble_size=2"),
                "critic.model.value_head_init=normal",
            ],
            "critic.ensemble_size=2: one critic is asked here",
        ),
        (["critic", "publish", "/nowhere", "/tmp/never-made"], "neither a checkpoint"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments, words, tiny, capsys):
    models = [f"{role}.model.path={tiny['model']}" for role in ("actor_rollout_ref", "critic")]
    arguments = [part.replace("FILE", str(tiny["val"])) for part in arguments]
    assert valor([word for part in arguments for word in (models if part == "MODELS" else [part])]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error and len(error.strip().splitlines()) == 1


def test_a_policy_is_not_published_as_a_critic(tiny, tmp_path, capsys):
    assert valor(["critic", "publish", str(tiny["model"]), str(tmp_path / "out")]) == 2
    assert "no critic but a Qwen2ForCausalLM" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["target", "prompt_template"])
def test_a_critic_whose_values_are_no_scores_is_not_published(tmp_path, capsys, name):
    config = {"architectures": ["Qwen2ForTokenClassification"], f"value_{name}": "residual"}
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "config.json").write_text(json.dumps(config))
    (tmp_path / "critic" / "tokenizer.json").write_text("{}")
    save_file({}, tmp_path / "critic" / "model.safetensors")
    assert valor(["critic", "publish", str(tmp_path / "critic"), str(tmp_path / "out")]) == 2
    assert f"is a critic of critic.{name}=residual" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_half_written_model_is_not_published(tiny, tmp_path, capsys):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny["model"], model)
    weights = model / "model.safetensors"
    index = {"weight_map": {"a": weights.name, "b": "model-00002-of-00002.safetensors"}}

    def is_refused(words):
        assert valor(["publish", str(model), str(out)]) == 2 and not out.exists()
        error = capsys.readouterr().err
        assert words in error and len(error.strip().splitlines()) == 1

    (model / f"{weights.name}.index.json").write_text(json.dumps(index))
    is_refused("model-00002-of-00002.safetensors")
    (model / f"{weights.name}.index.json").unlink()
    weights.write_bytes(weights.read_bytes()[:-8])
    is_refused("are not whole")
    weights.unlink()
    is_refused("are not whole")
    for file in model.glob("*token*"):
        file.unlink()
    is_refused("holds no tokenizer")


def test_the_card_of_a_fine_tuned_model_speaks_of_no_reinforcement_learning(tiny, tmp_path):
    run, out = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(tiny["model"], run / "huggingface" / "actor")
    (run / "config.yaml").write_text("model: {path: org/base}\noptim: {lr: 1.0e-6}\n")
    assert valor(["publish", str(run / "huggingface" / "actor"), str(out)]) == 0
    card = (out / "README.md").read_text()
    assert "tags: [sft]" in card and "reward" not in card and "| trained by | supervised fine-tuning |" in card


def test_a_policy_is_published_with_its_card(tiny, without_valor, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "my-policy"
    shutil.copytree(tiny["model"], run / "huggingface" / "actor")
    (run / "config.yaml").write_text(
        "actor_rollout_ref: {model: {path: org/base}, rollout: {n: 4}, actor: {optim: {lr: 1.0e-6}, policy_loss: "
        "{loss_mode: gspo}}}\nalgorithm: {adv_estimator: rloo}\ndata: {train_batch_size: 8}\n"
    )
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "critic/score/mean": 0.{i}}}\n' for i in (1, 7)))
    assert valor(["publish", str(run / "huggingface" / "actor"), str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out)]
    card = (out / "README.md").read_text()
    assert (
        "base_model: org/base" in card
        and "| reward | 0.700 (from 0.100) |" in card
        and "rloo, policy loss gspo" in card
        and "tags: [reinforcement-learning]" in card
    )
    assert without_valor(_code_of_card(out), cwd=out) is not None  # it ends well


def test_a_policy_that_reads_images_is_published_as_what_it_is(without_valor, tmp_path):
    model, out = make_vision_model(tmp_path / "model"), tmp_path / "out"
    assert valor(["publish", str(model), str(out)]) == 0
    card = (out / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card and "ForCausalLM" not in card
    assert (out / "preprocessor_config.json").is_file() or (out / "processor_config.json").is_file()
    assert without_valor(_code_of_card(out), cwd=out) is not None


IDS = {"prompt_ids": [1, 2], "response_ids": [3], "score": 1.0}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"score": float("nan")}, "line 1: the score must be a number, and finite, got nan"),
        ({"prompt_ids": "ab"}, "line 1: token 'a' is none of the"),
        ({"response_ids": [-1]}, "line 1: token -1 is none of the"),
        ({"prompt_ids": None}, "line 1: not a rollout"),
        ({"input": "in other tokens"}, "line 1: its prompt_ids are not its input"),
    ],
)
def test_a_row_that_is_no_rollout_of_this_policy_is_named(tiny, tmp_path, row, words):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(IDS | row) + "\n")
    with pytest.raises(UserError, match=re.escape(words)):
        read_rollouts([str(file)], AutoTokenizer.from_pretrained(tiny["model"]))


def test_rollouts_without_a_difference_are_refused(tiny, tmp_path, capsys):
    file = tmp_path / "alike.jsonl"
    rows = ({"messages": [{"role": "user", "content": f"{n}"}], "response": "4", "score": 1.0} for n in range(4))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert valor(pretraining(tiny, file, tmp_path / "run")) == 2
    assert "nothing to tell" in capsys.readouterr().err


def _code_of_card(folder: Path) -> str:
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return code


def _model_with(folder: Path, vocab_size: int) -> Path:
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def test_search_reports_accuracy_against_tokens_and_repeats(tiny, pretrained, tmp_path):
    def search(name: str, *more: str) -> list[dict]:
        arguments = [
            *("critic", "search", *SMALL, f"data.val_files={tiny['val']}", "data.val_max_samples=6"),
            *(f"actor_rollout_ref.model.path={tiny['model']}", "actor_rollout_ref.rollout.dtype=float32"),
            f"critic.model.path={pretrained / 'huggingface' / 'critic'}",
            *("search.samples=[1,4]",),
            *(f"search.out={tmp_path / name}", *more),
        ]
        assert valor(arguments) == 0
        return json.loads((tmp_path / name / "search.json").read_text())["results"]

    rows = search("first")
    assert rows == search("again")
    found = {(row["method"], row["n"]): row for row in rows}
    assert len(found) == 2 * 4
    one = {method: found[method, 1] for method in ("best-of-N", "majority vote", "weighted majority")}
    assert len({row["accuracy"] for row in one.values()}) == 1  # of one answer there is nothing to choose
    assert found["best-of-N", 4]["accuracy"] <= found["any right (pass@N)", 4]["accuracy"]
    assert found["majority vote", 4]["read"] == 0 < found["best-of-N", 4]["read"]
    assert all(row["sampled"] > 0 for row in rows)
    page = (tmp_path / "first" / "search.md").read_text()
    assert "| weighted majority | 4 |" in page


def test_search_needs_prompts_that_a_rule_can_judge(tiny, pretrained, capsys):
    arguments = ["critic", "search", *SMALL, f"actor_rollout_ref.model.path={tiny['model']}"]
    assert valor([*arguments, f"critic.model.path={pretrained / 'huggingface' / 'critic'}"]) == 2
    assert "set data.val_files" in capsys.readouterr().err
