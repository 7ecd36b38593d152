"""Learned reward models: a sequence classifier, or a published critic, as one score a text.

Shapes: b rows, L tokens of a text, T tokens of a response.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from valor.config.engine import BackboneConfig, CriticModelConfig
from valor.config.reward import RewardModelConfig
from valor.data.positions import num_positions
from valor.errors import UserError
from valor.models.hf import input_device
from valor.models.load import load_model_config, load_sequence_classifier, load_value_model
from valor.models.rows import ROW_FIELDS, RowReader, in_families, shared_beginnings
from valor.models.value import HEAD_NAMES, ValueHead, ValueModel


class RewardModel(RowReader):
    """Wraps `hf`, any *ForSequenceClassification model, causal or encoder.

    Its own forward pass decides where a text is read (causal models: the last token that is not the padding token).
    `label`: of a classifier of several labels the one whose log-odds are the score. `separator_id`: the token behind
    which the second text of a pair begins, for encoders that tell the two apart. packed, shared: for causal models.
    """

    def __init__(
        self,
        hf: Any,
        *,
        label: int | None = None,
        separator_id: int | None = None,
        packed: bool = False,
        shared: bool = False,
    ) -> None:
        # Of the two names of heads `score` is that of causal models.
        super().__init__(hf, packed=packed and isinstance(getattr(hf, "score", None), nn.Linear), shared=shared)
        self.label = label
        self._separator_id = separator_id if (getattr(hf.config, "type_vocab_size", 0) or 0) > 1 else None
        self._options = {"use_cache": False} if "use_cache" in inspect.signature(hf.forward).parameters else {}
        padding = getattr(hf.config.get_text_config(), "pad_token_id", None)
        self._names_padding = padding is not None and padding >= 0
        for head in self.float32_modules():
            head.float()

    def float32_modules(self) -> list[nn.Module]:
        """The head, which a mixed-precision engine must leave in float32."""
        return [head for name in HEAD_NAMES if isinstance(head := getattr(self.hf, name, None), nn.Module)]

    def forward(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Float32 `scores` [b] of the texts in `prompts` [b, L], right-padded, of `prompt_lengths` [b] >= 1."""
        return {"scores": self.score(rows["prompts"], rows["prompt_lengths"])}

    def score(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Float32 scores [b] of texts [b, L]; what lies beyond a text's length does not matter."""
        ids = ids[:, : int(lengths.max())]
        real = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        ids = ids.masked_fill(~real, self._padding(ids, lengths))
        logits = self._packed_logits(ids) if self.packed else self._padded_logits(ids, real)
        if self.label is None:
            return logits.squeeze(-1)
        others = [i for i in range(logits.shape[-1]) if i != self.label]
        return logits[:, self.label] - logits[:, others].logsumexp(-1)

    def _packed_logits(self, ids: Tensor) -> Tensor:
        """[b, labels], read at the last token that is not padding, as transformers does."""
        column = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        lengths = (column * (ids != self.hf.config.get_text_config().pad_token_id)).amax(1).clamp(min=1)
        ones = torch.ones(len(ids), 1, dtype=torch.long, device=ids.device)
        # an answer of one token, which nothing reads: a row's last position then predicts something
        rows: dict[str, Tensor] = dict(zip(ROW_FIELDS, (ids, lengths, ones, ones[:, 0]), strict=True))
        compact = self.compact(rows)
        states = compact.gather(compact.read_by(self.hf.base_model).last_hidden_state)
        return self.hf.score(states.float()).float()

    def _padded_logits(self, ids: Tensor, real: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": real.long()}
        if self._separator_id is not None:
            separators = ids == self._separator_id
            inputs["token_type_ids"] = ((separators.cumsum(1) - separators.long()).clamp(max=1) * real).long()
        device = input_device(self.hf)
        inputs = {name: value.to(device) for name, value in inputs.items()}
        return self.hf(**inputs, **self._options).logits.float()

    def _padding(self, ids: Tensor, lengths: Tensor) -> int:
        """The model's padding token. For a model that names none, one that no text ends with, so that all are read at
        their last token."""
        config = self.hf.config.get_text_config()
        if not self._names_padding:
            ends = set(ids.gather(1, lengths[:, None] - 1).flatten().tolist())
            config.pad_token_id = next(i for i in range(len(ends) + 1) if i not in ends)
        return config.pad_token_id


class PreferenceModel(RewardModel):
    """A reward model that reads two texts a row, the preferred one in `prompts` and the other one in `responses`."""

    def forward(self, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Float32 scores `chosen` [b] and `rejected` [b]."""
        ids, lengths = _texts(rows)
        chosen, rejected = self.score(ids, lengths).view(-1, 2).unbind(1)  # side by side: both begin with the prompt
        return {"chosen": chosen.clone(), "rejected": rejected.clone()}  # FSDP's hooks do not follow views

    def in_families(self, rows: Mapping[str, Tensor]) -> tuple[list[int], list[int]]:
        """Of pairs: the text before a preferred one is the other one of the pair before."""
        order, _ = in_families(rows["prompts"], rows["prompt_lengths"])
        shared = shared_beginnings(*_texts({name: rows[name][order] for name in ROW_FIELDS}))
        return order, shared.view(-1, 2).sum(1).tolist()


def _texts(rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The texts of pairs, [2 b, L], the preferred one before the other, and their lengths [2 b]."""
    texts = (rows["prompts"], rows["responses"])
    width = max(text.shape[1] for text in texts)
    ids = torch.stack([nn.functional.pad(text, (0, width - text.shape[1])) for text in texts], 1).flatten(0, 1)
    return ids, torch.stack([rows["prompt_lengths"], rows["response_lengths"]], 1).flatten()


@dataclass(frozen=True)
class RewardModelKind:
    """What a reward model's config.json says. `max_length`: the most positions it was made for, if it says so.

    `reads_tokens`: it has an output at each token. `head`: that of a process reward model; None: a critic's own.
    """

    reads_tokens: bool
    max_length: int | None
    head: ValueHead | None = None


def reward_model_kind(model: RewardModelConfig) -> RewardModelKind:
    """Look at `model.model_path` without its weights. UserError: no model, no reward head, no choice among labels."""
    config, path = load_model_config(backbone(model)), model.model_path
    architecture = (config.architectures or ["?"])[0]
    by_token = architecture.endswith("ForTokenClassification")
    remote = getattr(config, "auto_map", None) or {}
    by_text = architecture.endswith("ForSequenceClassification") or "AutoModelForSequenceClassification" in remote
    if not (by_token or by_text):
        raise UserError(
            f"'{path}' is a {architecture}, which has no reward head: give a sequence classifier (valor rm train makes "
            "one) or a published critic"
        )
    if model.gives != "outcome" and not by_token:
        raise UserError(
            f"'{path}' is a {architecture}, which reads whole texts: reward.reward_model.gives={model.gives} needs a "
            "token classifier, such as a published critic"
        )
    for name in ("prompt_template", *["target"] * (model.gives != "progress")):  # differences need no group's mean
        if (learnt := getattr(config, f"value_{name}", None)) is not None:
            raise UserError(
                f"'{path}' is a critic of critic.{name}={learnt}, whose values are no scores of prompt and answer: "
                "take a critic trained without"
            )
    process = model.gives == "steps" and ValueHead.of(config) is None
    labels = 1 if by_token and not process else config.num_labels
    if model.label is None and labels != 1:
        by_default = ' (2 is transformers\' default: where its head gives one number, write "num_labels": 1 there)'
        raise UserError(
            f"by its config.json '{path}' classifies into {labels} labels{by_default if labels == 2 else ''}, and a "
            f"reward is one number: set reward.reward_model.label to the number of the label (0 to {labels - 1}) whose "
            "log-odds are the score"
        )
    if model.label is not None and (labels == 1 or not 0 <= model.label < labels):
        raise UserError(f"reward.reward_model.label={model.label}: '{path}' has {labels} label{'s' * (labels > 1)}")
    head = ValueHead("label", labels, label=model.label) if process and model.label is not None else None
    return RewardModelKind(by_token, num_positions(config.get_text_config()), head)


def load_reward_model(
    model: RewardModelConfig, *, separator_id: int | None = None, dtype: torch.dtype = torch.float32
) -> RewardModel | ValueModel:
    """The reward model at `model.model_path`, dropout off; a token classifier has values in place of a score. UserError
    as in reward_model_kind, or damaged files."""
    base, kind = backbone(model), reward_model_kind(model)
    if kind.reads_tokens:
        return load_value_model(CriticModelConfig(**base.model_dump()), head=kind.head, dtype=dtype)
    hf = load_sequence_classifier(base, dtype=dtype)
    return RewardModel(hf, label=model.label, separator_id=separator_id, packed=True, shared=True)


def backbone(model: RewardModelConfig) -> BackboneConfig:
    """The model as other roles name theirs."""
    assert model.model_path is not None, "a configuration that enables a reward model names one"
    return BackboneConfig(
        path=model.model_path, trust_remote_code=model.trust_remote_code, enable_gradient_checkpointing=False
    )
