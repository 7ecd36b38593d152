"""What a data set is: where its splits are, and how one of its records becomes a question with a ground truth."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from valor.data.files import Messages

Record = Mapping[str, Any]

QUESTION = "{question}"  # where a template takes the question
EXPRESSION = QUESTION + " Think inside <think> </think> and give the expression inside <answer> </answer>."


class Hub(NamedTuple):
    """One split on the Hugging Face hub. `data_source` where it differs from the recipe's."""

    path: str
    config: str | None = None
    split: str = "train"
    data_source: str | None = None


class Example(NamedTuple):
    """A question (text, or messages that are taken as they are), its ground truth, and more for `extra_info`.

    `data_source` where the record names its own.
    """

    question: str | Messages
    ground_truth: Any
    extra: Mapping[str, Any] = {}
    data_source: str | None = None


class Pair(NamedTuple):
    """Two answers to one prompt (text or messages), the better one first."""

    prompt: str | Messages
    chosen: str
    rejected: str
    source: str


@dataclass(frozen=True)
class Recipe:
    """How a data set is prepared.

    `convert` makes an Example or a Pair of one record, or None to leave it out; a ValueError says what is wrong with
    the record. `data_source` chooses the grader. `template` is the user's message around the question. `hub`: the
    places of each split. `generate(seed, **options)` makes records without end or as long as there are any, instead
    of reading them from `hub`. `one_each`: the published data repeats its prompts, one of each is kept. `tool`: every
    row has verl's `extra_info.tools_kwargs` for the tool of this name.
    """

    name: str
    title: str
    convert: Callable[[Record], Example | Pair | None]
    data_source: str
    ability: str
    template: str = QUESTION
    hub: Mapping[str, Sequence[Hub]] = field(default_factory=dict)
    generate: Callable[..., Iterator[Record]] | None = None
    one_each: bool = False
    pairs: bool = False
    tool: str | None = None


def value(record: Record, *names: str) -> Any:
    """The first of these columns that is there. A dot goes into a dictionary. Raises ValueError when none is."""
    for name in names:
        found: Any = record
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is not None:
            return found
    listed = " or ".join(f"'{name}'" for name in names)
    raise ValueError(f"has no {listed} (it has {', '.join(map(str, record))})")


def text(record: Record, *names: str) -> str:
    """`value` as text without white space around it. Raises ValueError when it is something else."""
    found = value(record, *names)
    if not isinstance(found, str):
        raise ValueError(f"'{names[0]}' must be text, got {found!r:.60}")
    return found.strip()


def number(found: Any) -> str:
    """A number as text, 27.0 as 27. Text stays."""
    return str(int(found)) if isinstance(found, float) and found.is_integer() else str(found).strip()
