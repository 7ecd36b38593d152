"""Preference pairs: a prompt, a better and a worse response, as texts, and how well a reward model tells them apart."""

import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from valor.config import RMConfig, RMDataConfig
from valor.data.balance import grouped
from valor.data.batch import Batch, text_rows
from valor.data.files import read_records
from valor.data.images import refuse_unread
from valor.data.messages import kind_of, parse_messages, row_options, transcript_turns
from valor.data.prompts import Fits, tokenized
from valor.data.reward_texts import Encoded, RewardTexts
from valor.data.sampler import SUBSET_STREAM, shuffled, subset
from valor.errors import UserError

logger = logging.getLogger(__name__)

_HOLDOUT_STREAM = 4  # third word of a random key
_MARGIN = RMDataConfig.model_fields["margin_key"].default  # the column that not every file has


@dataclass(frozen=True)
class Preference:
    """One checked pair: the messages before the responses, and these as messages of the assistant.

    `margin` None: the file says nothing about it. `template`: what the row gives the chat template.
    """

    where: str
    prompt: list[dict[str, Any]]
    chosen: dict[str, Any]
    rejected: dict[str, Any]
    source: str
    margin: float | None
    template: dict[str, Any] = field(default_factory=dict)


class PreferenceDataset(Sequence[Preference]):
    """Pairs in the given order, tokenised when the object is made, without those whose texts are the same tokens once
    they are rendered and cut. `fits` looks at every text's tokens."""

    def __init__(
        self, pairs: Sequence[Preference], texts: RewardTexts, margin: float, fits: Fits = lambda ids, where: None
    ) -> None:
        def encode(_: Any, rows: Sequence[tuple[Preference, dict[str, Any]]]) -> list[Encoded]:
            where = f"{rows[0][0].where} and following"
            prompts, options = [pair.prompt for pair, _ in rows], [pair.template for pair, _ in rows]
            return texts.encode(prompts, [answer for _, answer in rows], where, options)

        rows = [(pair, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
        encoded, num_cut = tokenized(texts.tokenizer, rows, len(rows), encode), 0
        self._pairs: list[Preference] = []
        self._ids: list[tuple[array[int], array[int]]] = []
        for pair, better, worse in zip(pairs, encoded, encoded, strict=True):  # two texts a pair
            num_cut += better.is_cut + worse.is_cut
            if better.ids != worse.ids:
                fits(better.ids, pair.where)
                fits(worse.ids, pair.where)
                self._pairs.append(pair)
                self._ids.append((array("i", better.ids), array("i", worse.ids)))
        if num_cut:
            message = "%d of %d texts are longer than %d tokens and lost their beginning"
            logger.warning(message, num_cut, len(rows), texts.max_length)
        num_same = len(pairs) - len(self._pairs)
        if num_same == len(pairs):
            raise UserError(
                f"{pairs[0].where}: its two texts are the same tokens, as are those of all {len(pairs)} pairs of its "
                "split: give others (those held out for validation follow from data.val_share and trainer.seed)"
            )
        if num_same:
            logger.warning("%d of %d pairs are left out: their two texts are the same tokens", num_same, len(pairs))
        self._margins = [margin if pair.margin is None else pair.margin for pair in self._pairs]

    @property
    def lengths(self) -> list[int]:
        """Tokens of both texts of each pair."""
        return [len(better) + len(worse) for better, worse in self._ids]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, i: int) -> Preference:  # type: ignore[override]  # slices are of no use here
        return self._pairs[i]

    def batch(self, indices: Sequence[int]) -> Batch:
        """The better texts as `prompts`, the worse ones as `responses`, and `margin` [B]."""
        rows = text_rows([self._ids[i][0] for i in indices], [self._ids[i][1] for i in indices])
        rows["margin"] = torch.tensor([self._margins[i] for i in indices], dtype=torch.float32)
        rows.meta["num_pairs"] = float(len(indices))
        return rows


def load_preferences(
    config: RMConfig, texts: RewardTexts, fits: Fits = lambda ids, where: None
) -> tuple[PreferenceDataset, PreferenceDataset | None]:
    """Training and validation pairs. Where no file is given for the latter, `data.val_share` of the prompts of each
    source are held out, with all their pairs. UserError names the first bad row."""
    data, seed = config.data, config.trainer.seed
    train = read_preferences(data.train_files, data)
    val: list[Preference] = []
    if data.val_files is not None:
        val = read_preferences(data.val_files, data)
    elif data.val_share > 0:
        train, val = _hold_out(train, data.val_share, seed)
    train, val = (
        [pairs[i] for i in subset(len(pairs), limit, seed, 0, SUBSET_STREAM, shuffle=data.shuffle)]
        for pairs, limit in ((train, data.train_max_samples), (val, data.val_max_samples))
    )
    make = partial(PreferenceDataset, texts=texts, margin=config.loss.margin, fits=fits)
    return make(train), make(val) if val else None


def read_preferences(paths: Sequence[str], data: RMDataConfig) -> list[Preference]:
    """All pairs of some files, in order."""
    if not paths:
        raise UserError("no data file given: set data.train_files to a parquet or jsonl file of preference pairs")
    required = (data.chosen_key, data.rejected_key)
    pairs = [pair_of(record, where, data) for path in paths for where, record in read_records(path, required)]
    if count := sum(pair.margin is not None for pair in pairs):
        message = "%d of %d pairs are to be won by the margin in their column '%s' (data.margin_key)"
        logger.warning(message, count, len(pairs), data.margin_key)
    return pairs


def preference_metrics(
    chosen: Sequence[float], rejected: Sequence[float], pairs: Sequence[Preference]
) -> dict[str, float]:
    """What the scores [B] of the better and the worse response of each pair say; lengths in characters.

    A pair counts 1 where the better one scores higher, 1/2 where both score the same. `length/…` compares with taking
    the longer response: `longer_is_better` is that rule's accuracy; accuracy where the better one is the shorter and
    where it is the longer; the correlation of score with length over all responses, and of the difference in score with
    the difference in length within pairs. What cannot be measured (no such pair, no variance) is left out.
    """
    better, worse = np.asarray(chosen, dtype=np.float64), np.asarray(rejected, dtype=np.float64)
    right = (better > worse) + 0.5 * (better == worse)
    first = np.asarray([len(pair.chosen["content"]) for pair in pairs])
    second = np.asarray([len(pair.rejected["content"]) for pair in pairs])
    sources = [pair.source for pair in pairs]
    names = np.asarray(sources)
    means = {
        "accuracy": right,
        "margin": better - worse,
        **{f"accuracy/{name}": right[names == name] for name in sorted(set(sources))},
        "length/longer_is_better": (first > second) + 0.5 * (first == second),
        "length/accuracy_chosen_shorter": right[first < second],
        "length/accuracy_chosen_longer": right[first > second],
    }
    correlations = {
        "length/score_correlation": (np.r_[better, worse], np.r_[first, second]),
        "length/difference_correlation": (better - worse, first - second),
    }
    return {name: float(values.mean()) for name, values in means.items() if len(values)} | {
        name: float(np.corrcoef(a, b)[0, 1])
        for name, (a, b) in correlations.items()
        if len(a) > 1 and a.std() > 0 and b.std() > 0
    }


def pair_of(record: Mapping[str, Any], where: str, data: RMDataConfig) -> Preference:
    """One checked record. UserError: what is wrong with it."""
    prompt, system = record.get(data.prompt_key), record.get("system")
    if prompt is not None:
        prompt = parse_messages(prompt, where, data.prompt_key, text_role="user", system=system)
    answers, questions = [], []
    for key in (data.chosen_key, data.rejected_key):
        text = record[key]
        turns = transcript_turns(text) if isinstance(text, str) else []
        is_whole = prompt is None or turns[:-1] == prompt[-len(turns[:-1]) :]
        *before, answer = parse_messages(turns if turns and is_whole else text, where, key, text_role="assistant")
        if prompt is None and before:
            before = parse_messages(before, where, key, system=system)
        if answer["role"] != "assistant":
            raise UserError(f"{where}: '{key}' must end with an assistant message")
        answers.append(answer)
        questions.append(_question(before, prompt, f"{where}: '{key}' and '{data.prompt_key}'"))
    if None in questions:
        raise UserError(
            f"{where}: there is no prompt: give a column '{data.prompt_key}' (or set data.prompt_key), or whole chats "
            f"(or transcripts that begin with 'Human:') in '{data.chosen_key}' and '{data.rejected_key}'"
        )
    if questions[0] != questions[1]:
        raise UserError(f"{where}: '{data.chosen_key}' and '{data.rejected_key}' answer different prompts")
    refuse_unread([name for name in record if record[name]], questions[0], where)
    margin = record.get(data.margin_key) if data.margin_key is not None else None
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool) and 0 <= margin < math.inf
    if not is_number and (margin is not None or data.margin_key not in (None, _MARGIN)):
        unread = "" if margin is None else " (data.margin_key=null leaves it unread)"
        raise UserError(f"{where}: '{data.margin_key}' must be a number of at least 0, got {kind_of(margin)}{unread}")
    source, (chosen, rejected) = record.get("source"), answers
    named = "unnamed" if source is None else str(source)
    template = data.apply_chat_template_kwargs | row_options(record, where)
    return Preference(where, questions[0], chosen, rejected, named, margin, template)


def _question(before: list[dict[str, Any]], prompt: list[dict[str, Any]] | None, where: str) -> Any:
    """What a response answers: the messages before it, with those of the prompt's column that they leave out, such as
    a system message, or that they go on from. UserError: these are other ones."""
    if not before or prompt is None:
        return before or prompt
    most = min(len(prompt), len(before))
    if shared := next((n for n in range(most, 0, -1) if prompt[-n:] == before[:n]), 0):
        return [*prompt, *before[shared:]]
    if all(message in before for message in prompt):
        return before
    if before[0]["role"] == "assistant":
        return [*prompt, *before]
    if len(prompt) > 1 or prompt[0]["role"] != "user":
        raise UserError(f"{where} have different messages before the response: drop one of the two")
    return before


def _hold_out(pairs: list[Preference], share: float, seed: int) -> tuple[list[Preference], list[Preference]]:
    """Prompts are drawn source by source, so that each source is measured; a prompt's pairs stay together."""
    source_of: dict[str, str] = {}
    for pair in pairs:
        source_of.setdefault(str(pair.prompt), pair.source)
    chosen: set[str] = set()
    for prompts in grouped(source_of, source_of.values()):
        order = shuffled(len(prompts), seed, 0, _HOLDOUT_STREAM).tolist()
        chosen |= {prompts[i] for i in order[: round(share * len(prompts))]}
    train, val = ([pair for pair in pairs if (str(pair.prompt) in chosen) is is_val] for is_val in (False, True))
    if not train or not val:
        raise UserError(
            f"data.val_share={share:g} of {len(source_of)} prompts leaves no pair for "
            f"{'validation' if train else 'training'}: set data.val_files, or data.val_share to another value"
        )
    return train, val
