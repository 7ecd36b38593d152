"""The text of a published critic's README.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_FRONT = """\
---
library_name: transformers
pipeline_tag: token-classification
{base}tags: [critic, value-function, reinforcement-learning, ppo]
---

# {name}

A critic: a value function over the tokens of a conversation. After each token it says which score the policy's answer
is expected to get in the end, if the policy goes on from there. It was trained with
Valor and is an ordinary `AutoModelForTokenClassification`.
"""

_USE = """\
## With transformers alone

```python
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

path = "."  # this directory
tokenizer = AutoTokenizer.from_pretrained(path)
critic = AutoModelForTokenClassification.from_pretrained(path).eval()
chat = [{{"role": "user", "content": "12+34="}}]
answer = "06 04 46"
text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) + answer
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
with torch.no_grad():
    outputs = critic(input_ids=ids).logits[0]
{values}
print(values.tolist())  # one value a token: the expected score once that token is written
```

## With Valor

```bash
valor ppo critic.model.path=THIS_DIRECTORY …                       # go on training it
valor ppo critic.model.path=THIS_DIRECTORY critic.freeze=true …    # use it as it is
valor ppo reward.reward_model.enable=true reward.reward_model.model_path=THIS_DIRECTORY …   # as a reward model
```

The policy needs the same vocabulary; it may be another model, a larger one say.
"""

# By config.json's value_head_output: what the head gives, and the lines of Python that turn it into values.
_HEADS = {
    "value": ("the value itself", "values = outputs[:, 0]"),
    "logit": ("the logit of the value, which is from 0 to 1", "values = outputs[:, 0].sigmoid()"),
    "bins": (
        "a distribution over {num_labels} equal bins from {value_min:g} to {value_max:g}; the value is its mean",
        "half = ({value_max!r} - {value_min!r}) / (2 * {num_labels})\n"
        "centres = torch.linspace({value_min!r} + half, {value_max!r} - half, {num_labels})\n"
        "values = outputs.softmax(-1) @ centres",
    ),
}


def model_card(
    name: str, config: Mapping[str, Any], training: Mapping[str, str], scorecard: Mapping[str, Any] | None
) -> str:
    """Markdown: what it is, how it was trained and scored, how to use it. `config`: the model's config.json."""
    # transformers writes the number of labels as their names, and leaves out its default of two.
    sizes = {"num_labels": len(config.get("id2label", "01"))}
    meaning, values = (text.format(**config, **sizes) for text in _HEADS[config.get("value_head_output", "value")])
    base = training.get("base model", "")
    front = _FRONT.format(name=name, base=f"base_model: {base}\n" if base.count("/") == 1 else "")
    facts = {"architecture": config["architectures"][0], **training, "head": meaning}
    parts = [front, _table(facts.items())]
    if scorecard is not None:
        parts.append(f"## Scorecard\n\n{_judgement(scorecard)}\n\n{_table(_numbers(scorecard))}")
    return "\n".join([*parts, _USE.format(values=values)])


def _judgement(card: Mapping[str, Any]) -> str:
    temperature = card["temperature"]
    return (
        f"On {card['responses']} answers to {card['prompts']} prompts that it was not trained on, drawn at temperature "
        f"{temperature:g}; {card['right']:.1%} of them are right. All numbers are in `scorecard.json`, pictures in "
        "`scorecard.html`."
    )


def _numbers(card: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    area, threshold, ece = card["auc"], card["threshold"], card["calibration"]
    yield "AUC at the last token (chance: 0.5)", f"{_three(area['value'])}{_interval(area)}"
    always = f"calling all answers the same: {card['majority']:.3f}"
    at = f" at V ≥ {threshold:.3g}" if threshold is not None else ""
    yield "accuracy at the best threshold", f"{card['accuracy']:.3f}{at} ({always})"
    yield "explained variance over all tokens", _three(card["explained_variance"])
    yield (
        "expected calibration error",
        f"{ece['last']['ece']:.3f} at the last token, {ece['all']['ece']:.3f} along the way",
    )
    half = next(one for one in card["positions"] if one["at"] == 0.5)
    yield "AUC when half of the answer is written", _three(half["auc"])
    if found := card["monte_carlo"]:
        order, ceiling = found["agreement"], _three(found["noise_ceiling"])
        what = f"correlation with the mean of {found['branches']} branch rollouts ({found['points']} states)"
        yield what, f"{_three(found['correlation'])} (a perfect critic, given their noise: {ceiling})"
        p = "" if order["p"] is None else f", p = {order['p']:.2g}"
        yield (
            "pairs of states of an answer in the right order (chance: 0.5)",
            f"{_three(order['mean'])}{_interval(order)}{p}",
        )


def _interval(estimate: Mapping[str, Any]) -> str:
    return "" if estimate["low"] is None else f" (95 % {_three(estimate['low'])} to {_three(estimate['high'])})"


def _three(value: float | None) -> str:
    return "does not exist" if value is None else f"{value:.3f}"


def _table(rows: Any) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]) + "\n"
