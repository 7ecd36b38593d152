"""The second embedded task: numbers of made-up names, which cannot be known and can be looked up.

A question is `VOKA?`, the answer the number that a document of the corpus gives for that name. The names of validation
occur in no other question, so who has not searched can only guess. The demonstrations for the warm start come from a
teacher who mostly does: `<answer>57</answer>`. In the others he writes `<search>VOKA</search>`, reads the document
between `<information>` tags and copies its number. A policy that imitates him knows how to search; that searching pays
is for reinforcement learning to find out. Everything is a function of a seed; nothing is downloaded.
"""

import json
import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from valor.agents.search.client import documents_text
from valor.agents.search.index import Document, open_index
from valor.config.command_line import written
from valor.lab import arithmetic

DATA_SOURCE = "searchR1_lookup"  # graded by Search-R1's rule
PROBLEMS, TEACHER = "questions about numbers that can only be looked up", "mostly guesses"
ANSWERS = "VOKA? asks for the number that a document of the corpus gives for that made-up name."
"""How `valor demo` and its report speak of the task."""

GUESS_SHARE = 0.7
"""In how many demonstrations the teacher guesses."""
NUMBERS = range(10, 100)
_CONSONANTS, _VOWELS = "BDFGHJKLMNPRSTVWXZ", "AEIOU"
_TAGS = ("search", "information", "answer")
# The text of Search-R1's loop: nothing stands between the turns but what the policy is told.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}"
    "{% elif message['role'] == 'tool' %}"
    "{{ '\n\n<information>' + message['content'] + '</information>\n\n' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'user' %}{{ '<|assistant|>' }}{% endif %}"
    "{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class DataFiles(arithmetic.DataFiles):
    """Also documents: `corpus` has one for each name, `corpus_without` none for the names of `val`."""

    config_prefix = "search_"

    corpus: Path
    corpus_without: Path

    @property
    def settings(self) -> list[str]:
        return [*super().settings, f"retriever.corpus_path={written(str(self.corpus))}"]


def make_model(out_dir: Path | str, seed: int = 0) -> Path:
    """Write the untrained model of the first task, with tokens for the tags; returns the directory.

    Its weights are three times larger: it then learns to copy from 10,000 demonstrations, where 38,000 were too few.
    """
    return arithmetic.make_model(out_dir, seed, make_tokenizer(), initializer_range=0.06)


def make_tokenizer() -> Any:
    """The byte tokenizer of the first task, a token for each tag, and a chat template in which turns follow directly.

    The tags are no special tokens: graders and reports see them.
    """
    tokenizer = arithmetic.make_tokenizer()
    tokenizer.add_tokens([f"<{slash}{tag}>" for tag in _TAGS for slash in ("", "/")])
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def make_data(
    out_dir: Path | str, seed: int = 0, *, num_train: int = 4000, num_val: int = 256, num_demonstrations: int = 16_000
) -> DataFiles:
    """Write questions (verl's columns), the teacher's demonstrations (`messages`) and the corpora (`title`, `text`).

    UserError: what searching needs is not installed.
    """
    rng, out = random.Random(seed), Path(out_dir)
    facts = make_facts(rng, num_train + num_val)
    train, val = facts[:num_train], facts[num_train:]
    files = DataFiles.of(out, corpus=out / "corpus.jsonl", corpus_without=out / "corpus_without.jsonl")
    for path, some in ((files.train, train), (files.val, val)):
        questions = ((question(name), {"target": [str(number)]}, {}) for name, number in some)
        arithmetic.write_prompts(path, DATA_SOURCE, "fact", questions)
    arithmetic.write_demonstrations(files, num_demonstrations, 256, lambda: demonstration(rng, *rng.choice(train)))
    for path, documents in ((files.corpus, facts), (files.corpus_without, train)):
        lines = [json.dumps({"title": name, "text": str(number)}) for name, number in sorted(documents)]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    open_index(files.corpus)  # what it needs may not be installed: better told now than after the warm start
    return files


def make_facts(rng: random.Random, count: int) -> list[tuple[str, int]]:
    """So many different names, each with a number."""
    names = ["".join(letters) for letters in product(_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS)]
    return [(name, rng.choice(NUMBERS)) for name in rng.sample(names, count)]


def question(name: str) -> str:
    return f"{name}?"


def demonstration(rng: random.Random, name: str, number: int) -> list[dict[str, str]]:
    """One chat of the teacher's; he guesses with probability GUESS_SHARE."""
    request = {"role": "user", "content": question(name)}
    if rng.random() < GUESS_SHARE:
        return [request, {"role": "assistant", "content": f"<answer>{rng.choice(NUMBERS)}</answer>"}]
    document = Document(f'"{name}"\n{number}', score=1.0)
    return [
        request,
        {"role": "assistant", "content": f"<search>{name}</search>"},
        {"role": "tool", "content": documents_text([document]).strip()},
        {"role": "assistant", "content": f"<answer>{number}</answer>"},
    ]
