"""Preference pairs: a prompt, a better and a worse response, as texts, and how well a reward model tells them apart."""

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from valor.config import RMConfig, RMDataConfig
from valor.data.balance import grouped
from valor.data.batch import Batch
from valor.data.files import read_records
from valor.data.messages import parse_messages, row_options
from valor.data.prompts import Fits
from valor.data.reward_texts import RewardTexts, text_rows
from valor.data.sampler import SUBSET_STREAM, shuffled, subset
from valor.errors import UserError
from valor.tracking.progress import report_progress

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 256  # given to the tokenizer
_HOLDOUT_STREAM = 4  # third word of a random key


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
        self._pairs: list[Preference] = []
        self._ids: list[tuple[array[int], array[int]]] = []
        num_cut = 0
        for start in range(0, len(pairs), _ROWS_AT_ONCE):
            part = pairs[start : start + _ROWS_AT_ONCE]
            prompts, where = [pair.prompt for pair in part], f"{part[0].where} and following"
            options = [pair.template for pair in part]
            chosen = texts.encode(prompts, [pair.chosen for pair in part], where, options)
            rejected = texts.encode(prompts, [pair.rejected for pair in part], where, options)
            for pair, better, worse in zip(part, chosen, rejected, strict=True):
                num_cut += better.is_cut + worse.is_cut
                if better.ids != worse.ids:
                    fits(better.ids, pair.where)
                    fits(worse.ids, pair.where)
                    self._pairs.append(pair)
                    self._ids.append((array("i", better.ids), array("i", worse.ids)))
            report_progress(start + len(part), len(pairs))
        if num_cut:
            said = "%d of %d texts are longer than %d tokens and lost their beginning"
            logger.warning(said, num_cut, 2 * len(pairs), texts.max_length)
        num_same = len(pairs) - len(self._pairs)
        if num_same == len(pairs):
            raise UserError(f"{pairs[0].where}: its two texts are the same tokens, as those of all other pairs are")
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
    margin = config.loss.margin
    made = PreferenceDataset(train, texts, margin, fits)
    return made, PreferenceDataset(val, texts, margin, fits) if val else None


def read_preferences(paths: Sequence[str], data: RMDataConfig) -> list[Preference]:
    """All pairs of some files, in order."""
    if not paths:
        raise UserError("no data file given: set data.train_files to a parquet or jsonl file of preference pairs")
    required = (data.chosen_key, data.rejected_key)
    return [pair_of(record, where, data) for path in paths for where, record in read_records(path, required)]


def preference_metrics(
    chosen: Sequence[float],
    rejected: Sequence[float],
    sources: Sequence[str],
    chosen_lengths: Sequence[int],
    rejected_lengths: Sequence[int],
) -> dict[str, float]:
    """What the scores [B] of the better and the worse response of each pair say; lengths in characters.

    A pair counts 1 where the better one scores higher, 1/2 where both score the same. `length/…` compares with taking
    the longer response: `longer_is_better` is that rule's accuracy; accuracy where the better one is the shorter and
    where it is the longer; the correlation of score with length over all responses, and of the difference in score with
    the difference in length within pairs. What cannot be measured (no such pair, no variance) is left out.
    """
    better, worse = np.asarray(chosen, dtype=np.float64), np.asarray(rejected, dtype=np.float64)
    right = (better > worse) + 0.5 * (better == worse)
    first, second = np.asarray(chosen_lengths), np.asarray(rejected_lengths)
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
    return {name: float(found.mean()) for name, found in means.items() if len(found)} | {
        name: float(np.corrcoef(a, b)[0, 1])
        for name, (a, b) in correlations.items()
        if len(a) > 1 and a.std() > 0 and b.std() > 0
    }


def pair_of(record: Mapping[str, Any], where: str, data: RMDataConfig) -> Preference:
    """One checked record. UserError: what is wrong with it."""
    prompt = record.get(data.prompt_key)
    if prompt is not None:
        prompt = parse_messages(prompt, where, data.prompt_key, text_role="user")
    chosen_chat, chosen = _response(record[data.chosen_key], where, data.chosen_key)
    rejected_chat, rejected = _response(record[data.rejected_key], where, data.rejected_key)
    question, other_question = chosen_chat or prompt, rejected_chat or prompt
    if question is None or other_question is None:
        raise UserError(
            f"{where}: there is no prompt: give a column '{data.prompt_key}' (or set data.prompt_key), or whole chats "
            f"in '{data.chosen_key}' and '{data.rejected_key}'"
        )
    if question != other_question:
        raise UserError(f"{where}: '{data.chosen_key}' and '{data.rejected_key}' answer different prompts")
    margin = None
    if data.margin_key is not None:
        margin = record.get(data.margin_key)
        if isinstance(margin, bool) or not isinstance(margin, int | float):
            raise UserError(f"{where}: '{data.margin_key}' must be a number, got {type(margin).__name__}")
    source = record.get(data.source_key)
    template = data.apply_chat_template_kwargs | row_options(record, where, data.tools_key)
    named = "unnamed" if source is None else str(source)
    return Preference(where, question, chosen, rejected, named, margin, template)


def _response(value: Any, where: str, key: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What comes before the response, if anything, and the response."""
    chat = parse_messages(value, where, key, text_role="assistant")
    if chat[-1]["role"] != "assistant":
        raise UserError(f"{where}: '{key}' must end with an assistant message")
    return chat[:-1], chat[-1]


def _hold_out(pairs: list[Preference], share: float, seed: int) -> tuple[list[Preference], list[Preference]]:
    """Prompts are drawn source by source, so that each source is measured; a prompt's pairs stay together."""
    source_of: dict[str, str] = {}
    for pair in pairs:
        source_of.setdefault(str(pair.prompt), pair.source)
    held: set[str] = set()
    for found in grouped(source_of, source_of.values()):
        order = shuffled(len(found), seed, 0, _HOLDOUT_STREAM).tolist()
        held |= {found[i] for i in order[: round(share * len(found))]}
    kept = [pair for pair in pairs if str(pair.prompt) not in held]
    if not kept or not held:
        raise UserError(
            f"data.val_share={share:g} of {len(source_of)} prompts leaves no pair for "
            f"{'training' if not kept else 'validation'}: set data.val_files, or data.val_share to another value"
        )
    return kept, [pair for pair in pairs if str(pair.prompt) in held]
