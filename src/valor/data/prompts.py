"""The prompts of a run: rows rendered through the chat template, tokenised once, up to a length limit."""

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from valor.config import DataConfig
from valor.data.files import DataRow, parse_row, read_rows
from valor.data.images import ImageFiles, in_parts, with_parts
from valor.data.messages import check_text, with_written_calls
from valor.data.positions import num_positions
from valor.data.sampler import SUBSET_STREAM, subset
from valor.errors import UserError
from valor.tracking.progress import report_progress
from valor.user_files import load_object

logger = logging.getLogger(__name__)

GIVEN_BY_THE_RUN = ("completions", "prompts", "completion_ids", "solution_str", "messages", "uid", "data_source")
"""Arguments of reward functions and environments that come from the run, never from a row's columns."""

_CHUNK = 512  # texts for the tokenizer at once: enough for its threads, few enough for live progress


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt, ready for the rollout. `index` is its row in the given files, counted over all of them."""

    index: int
    prompt_ids: list[int]
    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # what its template gets, such as tools
    images: str | None = None  # their file (`valor.data.images`), "" without images; None in a run on text

    @property
    def uid(self) -> str:
        """The group of this prompt's samples; unique in a data set."""
        return str(self.index)


class PromptDataset(Sequence[PromptRow]):
    """The training or validation prompts that `data` asks for, in file order, tokenised when the object is made.

    Prompts over `data.max_prompt_length` tokens are left out (`filter_overlong_prompts`), cut (`truncation` left,
    right, middle) or raise a UserError that names the first such row (`truncation: error`). `train_max_samples` /
    `val_max_samples` above 0 keep that many rows: a random subset by `data.seed` with `data.shuffle`, else the first
    ones. `tools_of`: in a run with agents, the tools that the template describes to a row with this extra_info, instead
    of the row's own. `images`: reads the rows' images, in a run that has `data.image_key`. Prompts with images, and
    those of a run with agents, are never cut.
    `records`: the rows of a task set, in place of files.
    """

    def __init__(
        self,
        data: DataConfig,
        tokenizer: Any,
        split: Literal["train", "val"] = "train",
        tools_of: Callable[[Mapping[str, Any]], Sequence[Any]] | None = None,
        images: ImageFiles | None = None,
        records: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        paths = data.train_files if split == "train" else data.val_files
        limit = data.train_max_samples if split == "train" else data.val_max_samples
        if records is not None:
            rows = [parse_row(record, f"{data.taskset}, task {i}") for i, record in enumerate(records)]
        elif data.custom_cls.path is None:
            rows = read_rows(paths or [], data)
        else:
            rows = rows_of_class(data, tokenizer, limit, paths or [], images and images.processor)
        numbers = subset(len(rows), limit, data.seed, 0, SUBSET_STREAM, shuffle=data.shuffle)
        self.split = split
        num_overlong = 0
        self._rows: list[tuple[int, array[int], DataRow, str | None]] = []
        self._tools_of, self._run_kwargs = tools_of, data.apply_chat_template_kwargs

        def text(row: DataRow) -> str:
            messages = row.messages if images is None else in_parts(row.messages, len(row.images), row.where)
            return render(tokenizer, messages, self._template_kwargs(row), row.where)

        def read(tokenizer: Any, chunk: Sequence[DataRow]) -> Iterable[tuple[list[int], str | None]]:
            if images is None:
                return ((ids, None) for ids in token_ids(tokenizer, [text(row) for row in chunk]))
            return (images.encode(text(row), row.images, row.where) for row in chunk)

        _warn_of_columns([rows[n] for n in numbers], split, plays_episodes=tools_of is not None)
        encoded = tokenized(tokenizer, (rows[n] for n in numbers), len(numbers), read)
        for number, (ids, file) in zip(numbers, encoded, strict=True):
            if not ids:
                raise UserError(f"{rows[number].where}: the prompt has no tokens after the chat template")
            if len(ids) > data.max_prompt_length:
                num_overlong += 1
                if data.filter_overlong_prompts:
                    continue
                if data.truncation == "error" or file or tools_of is not None:  # an agent begins with the messages
                    raise UserError(
                        f"{rows[number].where}: the prompt has {len(ids)} tokens, data.max_prompt_length is "
                        f"{data.max_prompt_length}: raise it, or set data.filter_overlong_prompts=true (leave such "
                        "rows out) or, without images or agents, data.truncation=left|right|middle (cut them)"
                    )
                ids = truncated(ids, data.max_prompt_length, data.truncation)
            # An array takes a tenth of the memory of a list of int objects.
            self._rows.append((number, array("i", ids), replace(rows[number], images=()), file))
        if not self._rows:
            files = ", ".join(dict.fromkeys(rows[n].where.rpartition(",")[0] for n in numbers))
            raise UserError(
                f"{files}: all {len(numbers)} prompts are longer than data.max_prompt_length="
                f"{data.max_prompt_length} tokens and were left out; raise the limit"
            )
        if num_overlong:
            done = "left out" if data.filter_overlong_prompts else f"cut ({data.truncation})"
            limit_text = f"data.max_prompt_length={data.max_prompt_length}"
            logger.warning("%s: %d of %d over %s tokens %s", split, num_overlong, len(numbers), limit_text, done)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> PromptRow:  # type: ignore[override]  # slices are of no use here
        number, ids, row, file = self._rows[i]
        graded = row.messages, row.data_source, row.ground_truth, row.extra_info
        return PromptRow(number, ids.tolist(), *graded, self._template_kwargs(row), file)

    def number_of(self, uid: str) -> int:
        """The number here of the prompt of a sample."""
        return self._number_of[int(uid.rpartition(":")[2])]

    @cached_property
    def _number_of(self) -> dict[int, int]:
        return {index: number for number, (index, *_) in enumerate(self._rows)}

    def _template_kwargs(self, row: DataRow) -> Mapping[str, Any]:
        if self._tools_of is None:
            return {**self._run_kwargs, **row.template}
        tools = list(self._tools_of(row.extra_info))
        return {**self._run_kwargs, "tools": tools} if tools else self._run_kwargs

    @property
    def has_tools(self) -> bool:
        """Whether the template is given tools for a row."""
        return any("tools" in self._template_kwargs(row) for _, _, row, _ in self._rows)

    @property
    def columns(self) -> set[str]:
        """The names in the `extra_info` of any row."""
        return {name for _, _, row, _ in self._rows for name in row.extra_info}

    @property
    def without_truth(self) -> list[DataRow]:
        """Rows of style `rule` without a ground truth."""
        return [row for _, _, row, _ in self._rows if row.style == "rule" and row.lacks_truth]


def _warn_of_columns(rows: Iterable[DataRow], split: str, *, plays_episodes: bool) -> None:
    """One line about columns that graders, environments and the templates of episodes get from the run instead."""
    names = {name for row in rows for name in row.extra_info if name in GIVEN_BY_THE_RUN}
    names |= {name for row in rows for name in row.template} if plays_episodes else set()
    if names:
        message = "%s: the rows' own %s: not shown, since graders, environments and episodes have these from the run"
        logger.warning(message, split, ", ".join(sorted(names)))


def rows_of_class(
    data: DataConfig, tokenizer: Any, limit: int, paths: Sequence[str], processor: Any = None
) -> list[DataRow]:
    """The items of `data.custom_cls` as rows. The class is called as verl calls it; items are records with the columns
    of prompt files, or with messages in `raw_prompt`. UserError: the class fails, or an item is no row."""
    where = f"{data.custom_cls.path}:{data.custom_cls.name}"
    cls = load_object(where, "data.custom_cls.path")
    try:
        items = cls(data_files=list(paths), tokenizer=tokenizer, processor=processor, config=data, max_samples=limit)
        records = [dict(items[i]) for i in range(len(items))]
    except Exception as error:
        raise UserError(f"{where} fails ({type(error).__name__}: {error})") from error
    rows = []
    for i, record in enumerate(records):
        record.setdefault(data.prompt_key, record.get("raw_prompt"))
        check_text(record, f"{where}, item {i}")
        rows.append(parse_row(record, f"{where}, item {i}", data))
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
    if getattr(tokenizer, "renders_parts", False):  # set by `load_image_files`: some templates know no plain text
        messages = [with_parts(message) for message in messages]
    try:
        with suppress(TypeError):
            return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        written = [with_written_calls(message) for message in messages]  # DeepSeek's template joins them to other text
        return str(tokenizer.apply_chat_template(written, tokenize=False, **options))
    except Exception as error:  # templates raise whatever they like: jinja2 errors, TypeError, KeyError
        raise UserError(f"{where}: the chat template refuses these messages: {error}") from error


def token_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered prompts; the template has put the special tokens in, so none are added."""
    # verbose=False: the tokenizer's own warning about long inputs; the limit here is data.max_prompt_length.
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]


def check_fits(path: str, text_config: Any, ids: Sequence[int], where: str) -> None:
    """UserError: the model at `path` has too few tokens or positions for these token ids, of the row `where`."""
    size, positions = int(text_config.vocab_size), num_positions(text_config)
    if max(ids) >= size:
        raise UserError(
            f"{where}: has token {max(ids)}, and the model '{path}' knows {size} tokens: set model.tokenizer_path to "
            "the model's own tokenizer"
        )
    if positions is not None and len(ids) > positions:
        raise UserError(
            f"{where}: has {len(ids)} tokens, and the model '{path}' has {positions} positions: leave it out, cut it "
            "(data.max_length, data.truncation), or take a model that reads longer texts"
        )


Fits = Callable[[Sequence[int], str], None]  # `check_fits` of some model
Spans = Sequence[tuple[int, int]]  # [start, end) of characters, in order and not empty


def token_owners(tokenizer: Any, rows: Sequence[tuple[str, Spans]]) -> list[tuple[list[int], list[int]]]:
    """Token ids of rendered texts, and for each token the number of the span that it overlaps, or -1.

    A text is tokenised once: its pieces would have other tokens wherever a tokenizer puts a space before a text or
    merges across an edge. UserError: the tokenizer knows no character offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{type(tokenizer).__name__} has no character offsets, by which an answer's tokens are told from the "
            "prompt's: take a fast tokenizer (one with a tokenizer.json)"
        )
    texts, spans = [text for text, _ in rows], [spans for _, spans in rows]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    return list(zip(encoded["input_ids"], map(_owners, encoded["offset_mapping"], spans), strict=True))


def continued(tokenizer: Any, prompts: Sequence[str], responses: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Token ids of rendered prompts and of their responses, split from those of prompt + response."""
    texts = [(prompt + response, len(prompt)) for prompt, response in zip(prompts, responses, strict=True)]
    rows = token_owners(tokenizer, [(text, [(start, len(text))] if start < len(text) else []) for text, start in texts])
    return [(ids[: owners.count(-1)], ids[owners.count(-1) :]) for ids, owners in rows]


def _owners(offsets: Spans, spans: Spans) -> list[int]:
    owners, number = [-1] * len(offsets), 0
    for i, (start, end) in enumerate(offsets):
        start = min(start, end - 1)  # byte-level tokenizers give a lone space the empty range behind it
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        if number < len(spans) and end > spans[number][0]:
            owners[i] = number
    return owners


def tokenized(
    tokenizer: Any, rows: Iterable[Any], total: int, read: Callable[[Any, Sequence[Any]], Iterable[Any]]
) -> Iterator[Any]:
    """Each of `total` texts read by the tokenizer (`read`), in chunks, with progress."""
    rows, done = iter(rows), 0
    while chunk := list(islice(rows, _CHUNK)):
        yield from read(tokenizer, chunk)
        done += len(chunk)
        report_progress(done, total)


def truncated(row: list[int], limit: int, side: str) -> list[int]:
    """`limit` entries of a longer row. `side`: where others are cut; "middle" keeps both ends."""
    head = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return row[:head] + row[len(row) - (limit - head) :]
