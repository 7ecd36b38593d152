"""The prompts of a run: rows rendered through the chat template, tokenised once, and held to a length limit."""

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple

from valor.config import DataConfig
from valor.data.files import DataRow, parse_row, read_rows
from valor.data.messages import check_text
from valor.data.sampler import SUBSET_STREAM, VALIDATION_STREAM, shuffled, subset
from valor.errors import UserError
from valor.tracking.progress import report_progress
from valor.user_files import load_object

logger = logging.getLogger(__name__)

GIVEN_BY_THE_RUN = ("completions", "prompts", "completion_ids", "solution_str", "messages", "uid", "data_source")
"""What reward functions and environments are given beside a row's columns, and never from them."""

# Encoders whose positions begin behind the number of the padding token.
_BEHIND_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "xmod", "mpnet")
_TEXTS_AT_ONCE = 512  # given to the tokenizer: enough for its threads, few enough for live progress


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt, ready for the rollout. `index` is its row in the given files, counted over all of them."""

    index: int
    prompt_ids: list[int]
    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]

    @property
    def uid(self) -> str:
        """What the samples of this prompt have in common; unique in a data set."""
        return str(self.index)


class PromptDataset(Sequence[PromptRow]):
    """The training or validation prompts that `data` asks for, in file order, tokenised when the object is made.

    Prompts over `data.max_prompt_length` tokens are left out (`filter_overlong_prompts`), cut (`truncation` left,
    right, middle) or raise a UserError that names the first such row (`truncation: error`). `train_max_samples` /
    `val_max_samples` above 0 keep that many rows: a random subset by `data.seed` with `data.shuffle`, else the first
    ones. Validation prompts stay in file order unless `validation_shuffle`. `tools_of`: in a run with agents, the tools
    that the template describes to a row with this extra_info, in place of those that the row brings.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Any,
        split: Literal["train", "val"] = "train",
        tools_of: Callable[[Mapping[str, Any]], Sequence[Any]] | None = None,
    ) -> None:
        paths = data.train_files if split == "train" else data.val_files
        limit = data.train_max_samples if split == "train" else data.val_max_samples
        read = read_rows if data.custom_cls.path is None else partial(rows_of_class, data, tokenizer, limit)
        rows = read(paths or [], data.prompt_key, data.reward_fn_key, data.tools_key)
        numbers = subset(len(rows), limit, data.seed, 0, SUBSET_STREAM, shuffle=data.shuffle)
        if split == "val" and data.validation_shuffle:
            numbers = [numbers[i] for i in shuffled(len(numbers), data.seed, 0, VALIDATION_STREAM)]
        self.split = split
        self.num_overlong = 0
        self._rows: list[tuple[int, array[int], DataRow]] = []
        kwargs = data.apply_chat_template_kwargs

        def text(row: DataRow) -> str:
            tools = list(tools_of(row.extra_info)) if tools_of else []
            options = ({"tools": tools} if tools else {}) if tools_of else row.template
            return render(tokenizer, row.messages, {**kwargs, **options}, row.where)

        _tell_of_columns([rows[n] for n in numbers], split, plays_episodes=tools_of is not None)
        texts = (text(rows[n]) for n in numbers)
        for number, ids in zip(numbers, tokenized(tokenizer, texts, len(numbers)), strict=True):
            if not ids:
                raise UserError(f"{rows[number].where}: the prompt has no tokens after the chat template")
            if len(ids) > data.max_prompt_length:
                self.num_overlong += 1
                if data.filter_overlong_prompts:
                    continue
                if data.truncation == "error":
                    raise UserError(
                        f"{rows[number].where}: the prompt has {len(ids)} tokens, data.max_prompt_length is "
                        f"{data.max_prompt_length}: raise it, or set data.filter_overlong_prompts=true (leave such "
                        "rows out) or data.truncation=left|right|middle (cut them)"
                    )
                ids = truncated(ids, data.max_prompt_length, data.truncation)
            # An array takes a tenth of the memory of a list of int objects.
            self._rows.append((number, array("i", ids), rows[number]))
        if not self._rows:
            raise UserError(
                f"data.{split}_files: all {len(numbers)} prompts are longer than data.max_prompt_length="
                f"{data.max_prompt_length} tokens and were left out; raise the limit"
            )
        if self.num_overlong:
            done = "left out" if data.filter_overlong_prompts else f"cut ({data.truncation})"
            limit_text = f"data.max_prompt_length={data.max_prompt_length}"
            logger.warning("%s: %d of %d over %s tokens %s", split, self.num_overlong, len(numbers), limit_text, done)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> PromptRow:  # type: ignore[override]  # slices are of no use here
        number, ids, row = self._rows[i]
        return PromptRow(number, ids.tolist(), row.messages, row.data_source, row.ground_truth, row.extra_info)

    @property
    def data_sources(self) -> Counter[str]:
        """How many prompts each data source has."""
        return Counter(row.data_source for _, _, row in self._rows)

    @property
    def without_truth(self) -> list[DataRow]:
        """Rows that a rule is to judge, and that have nothing to judge by."""
        return [row for _, _, row in self._rows if row.style == "rule" and row.lacks_truth]


def _tell_of_columns(rows: Sequence[DataRow], split: str, *, plays_episodes: bool) -> None:
    """A line about columns in whose place graders and environments, or templates, are given what the run has."""
    names = sorted({name for row in rows for name in row.extra_info if name in GIVEN_BY_THE_RUN})
    if names:
        said = "%s: extra_info has %s: reward functions and environments are given what the run has under that name"
        logger.warning(said, split, ", ".join(names))
    unseen = sorted({name for row in rows for name in row.template}) if plays_episodes else []
    if unseen:
        said = "%s: rows have %s of their own, which episodes do not show: their templates get what the run has"
        logger.warning(said, split, ", ".join(unseen))


def rows_of_class(
    data: DataConfig,
    tokenizer: Any,
    limit: int,
    paths: Sequence[str],
    prompt_key: str,
    source_key: str,
    tools_key: str | None,
) -> list[DataRow]:
    """The items of `data.custom_cls`, called as verl calls it, as rows: records with the columns of prompt files.

    Messages may also be in `raw_prompt`, where verl's own class has them. UserError: the class or an item is no good.
    """
    where = f"{data.custom_cls.path}:{data.custom_cls.name}"
    cls = load_object(where, "data.custom_cls.path")
    try:
        items = cls(data_files=list(paths), tokenizer=tokenizer, processor=None, config=data, max_samples=limit)
        records = [dict(items[i]) for i in range(len(items))]
    except Exception as error:
        raise UserError(f"{where} fails ({type(error).__name__}: {error})") from error
    rows = []
    for i, record in enumerate(records):
        record.setdefault(prompt_key, record.get("raw_prompt"))
        check_text(record, f"{where}, item {i}")
        rows.append(parse_row(record, f"{where}, item {i}", prompt_key, source_key, tools_key))
    return rows


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
    where: str = "prompt",
) -> str:
    """The text that the model is to continue. `template_kwargs` may override `add_generation_prompt` (default true).

    Raises UserError when the tokenizer has no chat template, or the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the tokenizer has no chat template: use an instruct model, or give a template with "
            "actor_rollout_ref.model.custom_chat_template"
        )
    options = {"add_generation_prompt": True, **(template_kwargs or {})}
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:  # templates raise whatever they like: jinja2 errors, TypeError, KeyError
        raise UserError(f"{where}: the chat template refuses these messages: {error}") from error


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered prompts; the template has put the special tokens in, so none are added."""
    # verbose=False: the tokenizer's own warning about long inputs; the limit here is data.max_prompt_length.
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


class ModelLimits(NamedTuple):
    """How many tokens a model knows, and how many positions it has (None: any number)."""

    path: str
    tokens: int
    positions: int | None

    @staticmethod
    def of(path: str, text_config: Any) -> "ModelLimits":
        positions = getattr(text_config, "max_position_embeddings", None)
        if positions is not None and text_config.model_type in _BEHIND_PADDING:
            positions -= (text_config.pad_token_id or 0) + 1
        return ModelLimits(path, int(text_config.vocab_size), positions)

    def check(self, ids: Sequence[int], where: str) -> None:
        """UserError: the model has no such token, or too few positions."""
        if max(ids) >= self.tokens:
            raise UserError(
                f"{where}: has token {max(ids)}, and the model '{self.path}' knows {self.tokens} tokens: set "
                "model.tokenizer_path to the model's own tokenizer"
            )
        if self.positions is not None and len(ids) > self.positions:
            raise UserError(
                f"{where}: has {len(ids)} tokens, and the model '{self.path}' has {self.positions} positions: leave "
                "it out, cut it (data.max_length, data.truncation), or take a model that reads longer texts"
            )


class Marked(NamedTuple):
    """A rendered text with spans [start, end) of its characters, in order and not empty; `where` names it."""

    text: str
    spans: Sequence[tuple[int, int]]
    where: str = "text"


def token_owners(tokenizer: Any, rows: Sequence[Marked]) -> list[tuple[list[int], list[int]]]:
    """Token ids of whole texts, and for each token the number of the span that it has a part in; -1: of none.

    A text is tokenised once: pieces of it have other tokens than the whole wherever a tokenizer puts a space before a
    text or merges across an edge. UserError: a tokenizer without character offsets does so at the edge of a span.
    """
    texts = [row.text for row in rows]
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(texts, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        pairs = zip(found["input_ids"], found["offset_mapping"], rows, strict=True)
        return [(ids, _owners(offsets, row.spans)) for ids, offsets, row in pairs]
    owned = []
    for row, ids in zip(rows, token_ids(tokenizer, texts), strict=True):
        before = token_ids(tokenizer, [row.text[:edge] for span in row.spans for edge in span])
        if any(ids[: len(part)] != part for part in before):
            raise UserError(
                f"{row.where}: this tokenizer merges text across the beginning or the end of a turn, and has no "
                "character offsets to tell whose the token is: take a fast tokenizer (a tokenizer.json)"
            )
        edges, owners = [len(part) for part in before], [-1] * len(ids)
        for number, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
            owners[start:end] = [number] * (end - start)
        owned.append((ids, owners))
    return owned


def continued(tokenizer: Any, prompts: Sequence[str], responses: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Token ids of rendered prompts and of the responses behind them, as the whole texts have them."""
    rows = [
        Marked(prompt + response, [(len(prompt), len(prompt) + len(response))] if response else [])
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    firsts = [(ids, owners.index(0) if 0 in owners else len(ids)) for ids, owners in token_owners(tokenizer, rows)]
    return [(ids[:first], ids[first:]) for ids, first in firsts]


def _owners(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    owners, number = [-1] * len(offsets), 0
    for i, (start, end) in enumerate(offsets):
        start = min(start, end - 1)  # byte-level tokenizers give a lone space the empty range behind it
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        if number < len(spans) and end > spans[number][0]:
            owners[i] = number
    return owners


def tokenized(
    tokenizer: Any, rows: Iterable[Any], total: int, read: Callable[[Any, Sequence[Any]], Iterable[Any]] = token_ids
) -> Iterator[Any]:
    """What `read` makes of each of `total` rendered texts, with live progress."""
    rows, done = iter(rows), 0
    while chunk := list(islice(rows, _TEXTS_AT_ONCE)):
        yield from read(tokenizer, chunk)
        done += len(chunk)
        report_progress(done, total)


def truncated(row: list[int], limit: int, side: str) -> list[int]:
    """`limit` entries of a longer row. `side` says where others are taken away; "middle" keeps both ends."""
    head = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return row[:head] + row[len(row) - (limit - head) :]
