"""Reward models score as transformers' own forward does, whatever the batch; what is none is refused in one line."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from tiny_reward_models import make_backbone, make_bert, make_classifier, make_deberta
from valor.config import CriticModelConfig, RewardModelConfig
from valor.data.batch import text_rows
from valor.data.reward_texts import RewardTexts
from valor.engines.microbatch import RowOrder, plan_micro_batches
from valor.errors import UserError
from valor.models.export import export_hf
from valor.models.load import load_sequence_classifier, load_value_model
from valor.models.reward import PreferenceModel, RewardModel, load_reward_model, reward_model_kind

PROMPTS = ["What is 1+1?", "Say something nice about snakes, please.", "Hi"]
RESPONSES = ["2", "They are quiet neighbours.", "Hello there, how are you today?"]
MAKERS = {"llama": make_classifier, "bert": make_bert, "deberta": make_deberta}


def config_of(path: Path, **more) -> RewardModelConfig:
    return RewardModelConfig(enable=True, model_path=str(path), **more)


def chats() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": prompt}] for prompt in PROMPTS]


def own_scores(path: Path, pair: bool) -> list[float]:
    """One text at a time, as a model card would show it."""
    tokenizer, hf = AutoTokenizer.from_pretrained(path), AutoModelForSequenceClassification.from_pretrained(path)
    scores = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        if pair:
            inputs = tokenizer(prompt, response, return_tensors="pt")
        else:
            chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            scores.append(hf(**inputs).logits[0, 0].item())
    return scores


@pytest.mark.parametrize("family", MAKERS)
def test_a_batch_scores_as_transformers_scores_each_text(family, tmp_path):
    path = MAKERS[family](tmp_path / family)
    texts = RewardTexts(AutoTokenizer.from_pretrained(path))
    model = load_reward_model(config_of(path), separator_id=texts.separator_id)
    rows = text_rows([text.ids for text in texts.encode(chats(), RESPONSES)])
    scores = model(rows.tensors)["scores"]
    assert scores.tolist() == pytest.approx(own_scores(path, pair=family != "llama"), abs=1e-5)
    assert len({round(s, 4) for s in scores.tolist()}) == 3


def test_a_model_without_a_padding_token_is_read_at_the_last_token_of_each_text(tmp_path):
    path = make_classifier(tmp_path / "m", pad_token_id=None)
    model = load_reward_model(config_of(path))
    rows = [[2, 10, 11], [2, 10, 11, 12, 0], [5, 1], [7]]  # texts that end with the usual candidates for padding
    hf = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        alone = [hf(input_ids=torch.tensor([row])).logits[0, 0].item() for row in rows]
    assert model(text_rows(rows).tensors)["scores"].tolist() == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("pad", [None, 0, 12])
def test_packed_texts_that_share_a_beginning_score_as_padded_ones(tmp_path, pad):
    path = make_classifier(tmp_path / "m", num_labels=3)
    question = [2, *range(20, 32)]
    rows = text_rows([[*question, 10, 11], [*question, 10, 12, 0], [*question, 12], question, [7]])
    found = []
    for layout in ({}, {"packed": True, "shared": True}):
        model = RewardModel(AutoModelForSequenceClassification.from_pretrained(path), label=1, **layout)
        model.hf.config.pad_token_id = pad
        model._names_padding = pad is not None
        assert model.shared is model.packed is bool(layout)
        scores = model(rows.tensors)["scores"]
        (scores * torch.arange(1.0, 6.0)).sum().backward()
        found.append([scores, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 5
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_of_several_labels_the_score_is_the_log_odds_of_one(tmp_path):
    path = make_classifier(tmp_path / "m", num_labels=3)
    rows = text_rows([[2, 40, 41, 42]])
    hf = AutoModelForSequenceClassification.from_pretrained(path)
    p = hf(input_ids=rows["prompts"]).logits.softmax(-1)[0]
    score = load_reward_model(config_of(path, label=1))(rows.tensors)["scores"].item()
    assert score == pytest.approx((p[1] / (1 - p[1])).log().item(), abs=1e-5)


def test_two_texts_a_row_score_as_they_do_alone(tmp_path):
    path = make_bert(tmp_path / "m")
    texts = RewardTexts(AutoTokenizer.from_pretrained(path))
    first = [text.ids for text in texts.encode(chats(), RESPONSES)]
    second = [text.ids for text in texts.encode(chats(), RESPONSES[::-1])]
    one = load_reward_model(config_of(path), separator_id=texts.separator_id)
    two = PreferenceModel(one.hf, separator_id=texts.separator_id)
    out = two(text_rows(first, second).tensors)
    assert torch.allclose(out["chosen"], one(text_rows(first).tensors)["scores"], atol=1e-6)
    assert torch.allclose(out["rejected"], one(text_rows(second).tensors)["scores"], atol=1e-6)


def test_a_budget_counts_the_tokens_of_pairs_as_they_are_read(tmp_path, monkeypatch):
    hf = AutoModelForSequenceClassification.from_pretrained(make_classifier(tmp_path / "m"))
    hf.config.pad_token_id = 0
    model = PreferenceModel(hf, packed=True, shared=True)
    questions = [[2, *range(20, 30)], [2, *range(30, 40)]]
    best = [[*question, *range(40, 70)] for question in questions]  # one that many others lose to
    pairs = text_rows([best[i % 2] for i in range(8)], [[*questions[i % 2], *range(50 + i, 75 + i)] for i in range(8)])
    lengths = (pairs["prompt_lengths"] + pairs["response_lengths"]).tolist()
    order = RowOrder(*model.in_families(pairs.tensors))
    read = []
    real = model.compact
    monkeypatch.setattr(model, "compact", lambda rows: read.append(real(rows)) or read[-1])
    plan = plan_micro_batches(lengths, order, max_tokens=160, packed=True)
    for group in plan:
        model(pairs.take(group).tensors)
    sizes = [rows.input_ids.shape[1] for rows in read]
    assert len(sizes) < 8 and max(sizes) <= 160
    shared = dict(zip(order.rows, order.shared, strict=True))
    counted = [sum(lengths[i] for i in group) - sum(shared[i] for i in group[1:]) for group in plan]
    assert [count - size for count, size in zip(counted, sizes, strict=True)] == [11] * len(plan)  # of the first pair


@pytest.mark.parametrize("init", ["value", "logit"])
def test_a_critic_gives_the_value_before_the_last_token(tmp_path, init):
    backbone = make_backbone(tmp_path / "lm")
    critic = load_value_model(CriticModelConfig(path=str(backbone), value_head_init="normal"))
    if init == "logit":
        critic.hf.config.value_head_output = "logit"
    export_hf(critic, tmp_path / "critic")
    model = load_reward_model(config_of(tmp_path / "critic"))
    rows = text_rows([[2, 9, 8], [2, 7]], [[20, 21, 22, 3], [30]])
    found = model(rows.tensors)["values"].gather(1, rows["response_lengths"][:, None] - 1).squeeze(1)
    hf = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    with torch.no_grad():
        whole = [hf(input_ids=torch.tensor([ids])).logits[0, :, 0] for ids in ([2, 9, 8, 20, 21, 22, 3], [2, 7, 30])]
    expected = torch.stack([values[-2] for values in whole])  # where the last token was chosen
    assert torch.allclose(found, expected.sigmoid() if init == "logit" else expected, atol=1e-5)


@pytest.mark.parametrize("name", ["target", "prompt_template"])
def test_a_critic_that_does_not_say_the_score_is_no_reward_model(tmp_path, name):
    critic = load_value_model(CriticModelConfig(path=str(make_backbone(tmp_path / "lm"))))
    setattr(critic.hf.config, f"value_{name}", "residual")
    export_hf(critic, tmp_path / "critic")
    with pytest.raises(UserError, match=f"a critic of critic.{name}=residual"):
        reward_model_kind(config_of(tmp_path / "critic"))
    progress = {"gives": "progress", "weight": 1.0}
    if name == "target":  # a step's progress is a difference, in which the group's mean falls away
        assert reward_model_kind(config_of(tmp_path / "critic", **progress)).reads_tokens
    else:
        with pytest.raises(UserError, match=r"a critic of critic\.prompt_template"):
            reward_model_kind(config_of(tmp_path / "critic", **progress))


def test_a_new_head_is_drawn_from_the_seed(tmp_path):
    backbone = CriticModelConfig(path=str(make_backbone(tmp_path / "lm")))
    first, again, other = (load_sequence_classifier(backbone, new_head_seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    assert type(first).__name__ == "LlamaForSequenceClassification" and first.score.weight.shape[0] == 1


def edit_config(path: Path, **changes) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (make_backbone, {}, "is a LlamaForCausalLM, which has no reward head"),
        (
            lambda p: make_classifier(p, num_labels=2),
            {},
            'classifies into 2 labels .*"num_labels": 1 there.*reward_model.label',
        ),
        (lambda p: make_classifier(p, num_labels=2), {"label": 2}, "label=2: .* has 2 labels"),
        (make_classifier, {"label": 0}, "label=0: .* has 1 label"),
        (lambda p: p, {}, "there is no model directory"),
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path, make, more, message):
    with pytest.raises(UserError, match=message) as caught:
        reward_model_kind(config_of(make(tmp_path / "m"), **more))
    assert len(str(caught.value).splitlines()) == 1


def test_a_head_that_is_only_promised_is_refused(tmp_path):
    path = edit_config(make_backbone(tmp_path / "m"), architectures=["LlamaForSequenceClassification"], num_labels=1)
    with pytest.raises(UserError, match=r"lacks weights that its config\.json promises: score\.weight"):
        load_reward_model(config_of(path))


def test_limits_come_from_the_config(tmp_path):
    assert reward_model_kind(config_of(make_deberta(tmp_path / "m"))).max_length == 128


def test_the_head_stays_in_float32(tmp_path):
    model = load_reward_model(config_of(make_classifier(tmp_path / "m")), dtype=torch.bfloat16)
    assert isinstance(model, RewardModel)
    assert {p.dtype for m in model.float32_modules() for p in m.parameters()} == {torch.float32}
    assert model.hf.model.embed_tokens.weight.dtype is torch.bfloat16
