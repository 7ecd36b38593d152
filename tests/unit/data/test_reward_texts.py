"""What a reward model reads: its own template or a pair of texts, special tokens once, the beginning cut off."""

import pytest
import torch

from tiny_reward_models import TEMPLATE, character_tokenizer, deberta_tokenizer
from valor.data.batch import Batch, pad_rows
from valor.data.reward_texts import CriticTexts, RewardTexts, longest_text, prompt_text
from valor.errors import UserError

CHAT = [{"role": "user", "content": "Why?"}]
TURNS = [{"role": "system", "content": "Be brief."}, *CHAT]


def shown(texts: RewardTexts, prompt: list, response: str) -> tuple[str, bool]:
    (text,) = texts.encode([prompt], [response])
    return texts.tokenizer.decode(text.ids).replace(" ", ""), text.is_cut


def test_a_chat_template_renders_the_whole_conversation_with_one_bos():
    texts = RewardTexts(character_tokenizer(template=TEMPLATE))
    assert shown(texts, CHAT, "So.") == ("<s>[user]Why?</s>[assistant]So.</s>", False)
    assert texts.separator_id is None


def test_without_a_template_prompt_and_response_are_one_text():
    texts = RewardTexts(character_tokenizer())
    assert shown(texts, CHAT, "So.") == ("<s>Why?\n\nSo.", False)
    assert shown(texts, TURNS, "So.")[0] == "<s>system:Bebrief.\n\nuser:Why?\n\nSo."


def test_an_encoder_gets_a_pair():
    texts = RewardTexts(character_tokenizer(pair=True))
    assert shown(texts, CHAT, "So.") == ("[CLS]Why?[SEP]So.[SEP]", False)
    assert texts.separator_id == 3
    assert shown(RewardTexts(deberta_tokenizer()), CHAT, "So.")[0] == "[CLS]Why?[SEP]So.[SEP]"


@pytest.mark.parametrize(
    ("pair", "template", "limit", "kept"),
    [
        (True, None, 8, "[CLS]y?[SEP]So.[SEP]"),
        (True, None, 6, "[CLS][SEP]So.[SEP]"),  # no prompt is left
        (True, None, 5, "[CLS][SEP]o.[SEP]"),  # then the response loses its beginning
        (False, None, 7, "<s>?\n\nSo."),
        (False, TEMPLATE, 17, "<s></s>[assistant]So.</s>"),
    ],
)
def test_what_is_too_long_loses_the_beginning_of_the_prompt_first(pair, template, limit, kept):
    texts = RewardTexts(character_tokenizer(pair=pair, template=template), limit)
    text, is_cut = shown(texts, CHAT, "So.")
    assert (text, is_cut) == (kept, True)
    assert len(texts.encode([CHAT], ["So."])[0].ids) == limit


def test_texts_at_the_limit_stay_whole():
    texts = RewardTexts(character_tokenizer(pair=True), 10)
    assert shown(texts, CHAT, "So.") == ("[CLS]Why?[SEP]So.[SEP]", False)


def test_a_template_that_refuses_is_a_users_error():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}x"
    with pytest.raises(UserError, match=r"row 3: the chat template refuses these messages: no system prompts"):
        RewardTexts(character_tokenizer(template=template)).encode([TURNS], ["So."], where="row 3")


def test_the_shorter_of_two_limits_counts():
    tokenizer = character_tokenizer()
    assert longest_text(tokenizer, None) is None and longest_text(tokenizer, 512) == 512
    tokenizer.model_max_length = 128
    assert longest_text(tokenizer, 512) == 128


def test_a_single_message_is_its_content():
    assert prompt_text(CHAT) == "Why?"


def rollouts(tokenizer, responses: list[str], finished: list[bool]) -> Batch:
    """What a run has after generation."""
    prompt = tokenizer("[user]Why?</s>[assistant]")["input_ids"]
    texts = zip(tokenizer(responses, add_special_tokens=False)["input_ids"], finished, strict=True)
    ids = [row + [tokenizer.eos_token_id] * done for row, done in texts]
    columns = {}
    for name, rows in (("prompt", [prompt] * len(ids)), ("response", ids)):
        columns[f"{name}s"], columns[f"{name}_lengths"] = pad_rows(rows, torch.long)
    reasons = ["stop" if done else "length" for done in finished]
    objects = {"messages": [CHAT] * len(ids), "response_text": responses, "finish_reason": reasons}
    objects["template_kwargs"] = [{}] * len(ids)
    return Batch(columns, objects)


def decoded(tokenizer, rows: Batch, name: str) -> list[str]:
    lengths = rows[f"{name}_lengths"].tolist()
    return [tokenizer.decode(row[:n]).replace(" ", "") for row, n in zip(rows[f"{name}s"], lengths, strict=True)]


def test_a_critic_with_the_policys_tokenizer_reads_the_policys_own_tokens():
    tokenizer = character_tokenizer(template=TEMPLATE)
    batch = rollouts(tokenizer, ["So.", "Because it"], [True, False])
    texts = CriticTexts(character_tokenizer(template=TEMPLATE), tokenizer)
    rows, cut = texts.rows(batch)
    assert texts.agrees and cut == [False, False]
    for name in ("prompts", "prompt_lengths", "responses", "response_lengths"):
        assert torch.equal(rows[name], batch[name])


def test_a_critic_with_another_tokenizer_gets_the_text_again():
    policy = character_tokenizer(template=TEMPLATE)
    own = character_tokenizer(template=TEMPLATE.replace("user", "human"))
    own.add_tokens(["Because"])
    own.chat_template = TEMPLATE.replace("[{{ m.role }}]", "<{{ m.role }}>")
    rows, _ = CriticTexts(own, policy).rows(rollouts(policy, ["So.", "Because it", ""], [True, False, False]))
    assert decoded(own, rows, "prompt") == ["<s><user>Why?</s>[assistant]"] * 3
    assert decoded(own, rows, "response") == ["So.</s>", "Becauseit", "</s>"]  # a value needs a token to be read at
    assert rows["response_lengths"].tolist() == [4, 4, 1]


def test_a_critics_prompt_is_cut_on_the_left():
    tokenizer = character_tokenizer(template=TEMPLATE)
    batch = rollouts(tokenizer, ["So.", "So so."], [True, True])
    whole = int(batch["prompt_lengths"][0]) + 4
    rows, cut = CriticTexts(tokenizer, tokenizer, max_length=whole).rows(batch)
    assert cut == [False, True]
    assert (rows["prompt_lengths"] + rows["response_lengths"]).tolist() == [whole, whole]
    assert decoded(tokenizer, batch, "prompt")[1].endswith(decoded(tokenizer, rows, "prompt")[1])


ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
SHOWS_TOOLS = "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}" + TEMPLATE


def test_a_rows_tools_are_shown_as_in_training():
    """`rm` gives the template a row's `tools`: what scores in a run reads the same text."""
    policy, own = character_tokenizer(template=TEMPLATE), character_tokenizer(template=SHOWS_TOOLS)
    batch = rollouts(policy, ["So.", "So."], [True, True])
    batch.objects["template_kwargs"] = [{"tools": [ADD]}, {}]
    texts = RewardTexts(own)
    rows, _ = texts.rows(batch)
    trained_on = texts.encode([CHAT, CHAT], ["So.", "So."], row_options=[{"tools": [ADD]}, {}])
    assert [row[:n] for row, n in zip(rows["prompts"].tolist(), rows["prompt_lengths"].tolist(), strict=True)] == [
        text.ids for text in trained_on
    ]
    rows, _ = CriticTexts(own, policy).rows(batch)
    first, second = decoded(own, rows, "prompt")
    assert "(add)" in first and first.replace("(add)", "") == second
