"""Values: alignment with the tokens they predict, heads new and kept."""

import pytest
import torch
from tiny_models import VOCAB, build_hf, sequences
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from valor.config.engine import CriticModelConfig
from valor.errors import UserError
from valor.models.export import export_hf
from valor.models.load import load_value_model
from valor.models.value import ValueHead, ValueModel

BINS = ValueHead("bins", 11, -1.0, 3.0)


@pytest.fixture
def causal_dir(tmp_path):
    build_hf("qwen2_tied").save_pretrained(tmp_path / "lm")
    return str(tmp_path / "lm")


def section(path: str, **keys) -> CriticModelConfig:
    return CriticModelConfig(path=path, **{"enable_gradient_checkpointing": False, **keys})


@pytest.mark.parametrize("name", ["qwen2_tied", "gemma2_softcap", "gpt_neox", "gpt2_dropout"])
def test_values_sit_at_the_state_before_each_token(name, rows, tmp_path):
    build_hf(name).save_pretrained(tmp_path)
    model = load_value_model(section(str(tmp_path), value_head_init="normal"))
    with torch.no_grad():
        values = model(rows)["values"]
        for i, p, r, ids in sequences(rows):
            expected = model.hf(input_ids=ids).logits[0, p - 1 : p - 1 + r, 0]
            torch.testing.assert_close(values[i, :r], expected, rtol=0, atol=1e-5)
            assert not values[i, r:].any()
    assert values.abs().max() > 0


@pytest.mark.parametrize("packed", [True, False])
def test_a_token_that_only_the_policys_padding_has_is_read_as_the_last(packed, rows, causal_dir):
    keys = {"value_head_init": "normal", "use_remove_padding": packed}
    model = load_value_model(section(causal_dir, **keys))
    beyond, last = ({**rows, "responses": rows["responses"].clone()} for _ in range(2))
    beyond["responses"][:, 0], last["responses"][:, 0] = VOCAB + 2, VOCAB - 1
    with torch.no_grad():
        assert torch.equal(model(beyond)["values"], model(last)["values"])


def test_a_new_head_is_zero_by_default(causal_dir, rows):
    model = load_value_model(section(causal_dir))
    assert not model.head.weight.any() and not model.head.bias.any()
    assert not model(rows)["values"].any()


def test_a_normal_head_depends_on_its_seed_alone(causal_dir):
    keys = {"value_head_init": "normal"}
    torch.manual_seed(5)
    first = load_value_model(section(causal_dir, **keys), seed=1).head.weight
    torch.manual_seed(6)
    again = load_value_model(section(causal_dir, **keys), seed=1).head.weight
    other = load_value_model(section(causal_dir, **keys), seed=2).head.weight
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 0.005 < first.std().item() < 0.05  # initializer_range is 0.02


def test_a_published_critic_keeps_its_head(causal_dir, tmp_path):
    critic = AutoModelForTokenClassification.from_pretrained(causal_dir, num_labels=1)
    torch.nn.init.constant_(critic.score.weight, 0.25)
    torch.nn.init.constant_(critic.score.bias, -0.5)
    critic.save_pretrained(tmp_path / "critic")
    model = load_value_model(section(str(tmp_path / "critic"), value_head_init="zero"))
    assert (model.head.weight == 0.25).all() and (model.head.bias == -0.5).all()


def test_a_reward_model_lends_its_head_without_bias(causal_dir, tmp_path):
    reward = AutoModelForSequenceClassification.from_pretrained(causal_dir, num_labels=1)
    torch.nn.init.constant_(reward.score.weight, 0.125)
    reward.save_pretrained(tmp_path / "rm")
    model = load_value_model(section(str(tmp_path / "rm")))
    assert (model.head.weight == 0.125).all() and not model.head.bias.any()


@pytest.mark.parametrize("head", [None, ValueHead("logit"), ValueHead("bins", 3)])
def test_a_classifier_of_several_labels_is_refused(head, causal_dir, tmp_path):
    AutoModelForTokenClassification.from_pretrained(causal_dir, num_labels=3).save_pretrained(tmp_path / "ner")
    with pytest.raises(UserError, match="3 labels"):
        load_value_model(section(str(tmp_path / "ner")), head=head)


def test_a_reward_model_has_no_bins_to_lend(causal_dir, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(causal_dir, num_labels=1).save_pretrained(tmp_path / "rm")
    with pytest.raises(UserError, match="1 labels; this critic needs outputs for 11 bins from -1 to 3"):
        load_value_model(section(str(tmp_path / "rm")), head=BINS)


def test_bins_are_read_as_the_mean_of_their_centres(causal_dir, rows):
    model = load_value_model(section(causal_dir, value_head_init="normal"), head=BINS)
    with torch.no_grad():
        model.head.weight.mul_(50)
        outputs, values = model(rows, raw=True)["head_outputs"], model(rows)["values"]
        centres = torch.tensor([-1 + 4 / 11 * (k + 0.5) for k in range(11)])
        for i, p, r, ids in sequences(rows):
            logits = model.hf(input_ids=ids).logits[0, p - 1 : p - 1 + r]
            torch.testing.assert_close(outputs[i, :r], logits, rtol=0, atol=1e-5)
            torch.testing.assert_close(values[i, :r], logits.softmax(-1) @ centres, rtol=0, atol=1e-5)
            assert not outputs[i, r:].any() and not values[i, r:].any()
    assert outputs.shape == (4, 7, 11) and values[values != 0].std() > 0.1


def test_a_new_head_of_bins_says_the_middle(causal_dir, rows):
    values = load_value_model(section(causal_dir), head=BINS)(rows)["values"]
    torch.testing.assert_close(values[values != 0], torch.ones(16))  # every response token of the rows


@pytest.mark.parametrize("head", [ValueHead(), ValueHead("logit"), BINS], ids=str)
def test_an_exported_critic_says_how_it_is_read(head, causal_dir, rows, tmp_path):
    model = load_value_model(section(causal_dir, value_head_init="normal"), head=head)
    export_hf(model, tmp_path / "critic")
    again = load_value_model(section(str(tmp_path / "critic")))
    assert again.reading == head
    assert torch.equal(again(rows)["values"], model(rows)["values"])

    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")  # nothing of Valor from here on
    config = plain.config
    for i, p, r, ids in sequences(rows):
        z = plain(input_ids=ids).logits[0, p - 1 : p - 1 + r]
        if config.value_head_output == "bins":
            width = (config.value_max - config.value_min) / config.num_labels
            expected = z.softmax(-1) @ (config.value_min + width * (torch.arange(config.num_labels) + 0.5))
        else:
            expected = z[:, 0].sigmoid() if config.value_head_output == "logit" else z[:, 0]
        torch.testing.assert_close(again(rows)["values"][i, :r], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ValueHead(), "gives 11 bins from -1 to 3, and this run trains one that gives a value"),
        (ValueHead("bins", 12, -1.0, 3.0), "12 bins from -1 to 3"),
        (ValueHead("bins", 11, -1.0, 1.0), "11 bins from -1 to 1"),
    ],
)
def test_an_exported_critic_is_not_read_in_another_way(other, words, causal_dir, tmp_path):
    export_hf(load_value_model(section(causal_dir), head=BINS), tmp_path / "critic")
    with pytest.raises(UserError, match=words):
        load_value_model(section(str(tmp_path / "critic")), head=other)


def test_the_head_computes_in_float32_on_a_bfloat16_backbone(causal_dir, rows):
    model = load_value_model(section(causal_dir, value_head_init="normal"), dtype=torch.bfloat16)
    assert model.head.weight.dtype is torch.float32
    assert next(model.hf.base_model.parameters()).dtype is torch.bfloat16
    assert model(rows)["values"].dtype is torch.float32


def test_a_module_without_a_head_of_one_output_is_refused():
    with pytest.raises(ValueError, match="head"):
        ValueModel(build_hf("qwen2_tied"))
