"""Every command of README and docs that is not run names commands, options, keys and files that exist."""

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from valor.cli import RUNS, Commands
from valor.config import PPOConfig, load
from valor.config.command_line import read_arguments
from valor.config.presets import COMMANDS as TREES
from valor.config.tree import exists
from valor.config.verl import find_spelling
from valor.errors import UserError

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("README*.md")]
BLOCK = re.compile(r"^( *<!-- runnable -->\n)? *```bash\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
OTHERS = {
    "srun",
    "ssh",
    "lm_eval",
    "inspect",
    "lighteval",
    "vllm",
    "trtllm-serve",
    "python3",
    "source",
    "echo",
    "export",
}
OTHERS |= {"for", "do", "done", "wait", "pip", "cd"}
OURS = ("examples/", "docs/", "benchmarks/", ".ci/", "tests/")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OF_READER = "--config-path . "  # a configuration that the reader writes
ELLIPSES = ("...", "…")


def commands(text: str) -> list[list[str]]:
    """The words of each command in a block: continued lines joined, comments and variables' values gone."""
    found = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        line = re.sub(r"^\s*#.*$|(^|\s)#(\s.*)?$|\b\w+=\([^()]*\)", "", line)
        line = re.sub(r"\$'\\n'", "N", re.sub(r"\$\([^()]*\)|\$\{[^}]*\}|\$\w+", "1", line))
        reader = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        reader.whitespace_split, reader.commenters = True, ""
        words: list[str] = []
        for word in [*reader, ";"]:
            if set(word) <= set("&|;"):
                found.append(words)
                words = []
            else:
                words.append(word)
        found.append(words)
    return [words for words in found if words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_says_to_type_exists(page):
    for runnable, block in BLOCK.findall(page.read_text()):
        for words in [] if runnable else commands(block):
            check(words)


def check(words: list[str]) -> None:
    """AssertionError: something that the command names does not exist."""
    for word in words:
        path = re.sub(r"^\S*?=", "", word).partition(":")[0]
        assert not path.startswith(OURS) or (ROOT / path).exists(), f"{word}: there is no such file ({words})"
        for extra in re.findall(r"valor-rl\[([\w,]+)\]", word):
            assert set(extra.split(",")) <= set(EXTRAS), word
    while words and re.fullmatch(r"\w+=.*", words[0]):  # variables of the environment, or a command that goes on
        words = words[1:]
    if not words or words[0] in OTHERS:
        return
    if re.match(r"\w+\.[\w.]+=", words[0]):  # a command whose beginning is left out
        words = ["...", *words]
    name, *arguments = words
    if name in ELLIPSES:
        check_keys(arguments, PPOConfig)
    elif name.endswith("valor"):
        check_valor(arguments)
    elif name == "make":
        assert {*arguments} <= TARGETS, words
    elif name == "python" and arguments[0] == "-m":
        module = arguments[1].removeprefix("valor.trainer.main_")
        assert (module != arguments[1] and module in TREES) or arguments[1].startswith(("sglang.", "verl.")), words
        if module in TREES:
            check_valor([module, *arguments[2:]])
    elif name == "python":
        source = "".join(path.read_text() for path in [*ROOT.glob(arguments[0]), *ROOT.glob("src/valor/data/*.py")])
        for option in (word for word in arguments if word.startswith("--")):
            assert f'"{option}"' in source or f'"--{option[2:].replace("-", "_")}"' in source, (option, words)
    else:
        raise AssertionError(f"{name}: is that a command? ({words})")


def check_valor(words: list[str]) -> None:
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in RUNS), "")
    if not name:
        check_click(words)
        return
    arguments = words[len(name.split()) :]
    models = [word for word in arguments if name == "eval" and "=" not in word and not word.startswith("-")]
    arguments = [word for word in arguments if word not in models]
    if {*arguments} & {*ELLIPSES} or OF_READER in " ".join(arguments):
        check_keys([word for word in arguments if word not in ELLIPSES], TREES[name])
        return
    filled = [f"actor_rollout_ref.model.path={model}" for model in models[:1]]
    try:
        load(
            [*filled, *(re.sub(r"^(--config-path)[= ](docs|examples)", rf"\1={ROOT}/\2", word) for word in arguments)],
            TREES[name],
        )
    except UserError as error:
        needed = [line for line in str(error).splitlines() if "is not set" not in line]
        assert not needed, (words, needed)


def check_keys(words: list[str], tree: type) -> None:
    for word in read_arguments(words).overrides:
        key, _, value = word.lstrip("+~").partition("=")
        spelling = find_spelling(tree, key, value)
        assert exists(tree, key) or (spelling and not spelling[0].refused) or word[:1] == "+", word


def check_click(words: list[str]) -> None:
    """A command of click's: it parses these words, and its settings are keys."""
    command: click.Command = Commands()
    context = click.Context(command, info_name="valor")
    while isinstance(command, Commands):
        _, command, words = command.resolve_command(context, words)
    try:
        context = command.make_context(command.name, [word for word in words if word not in ELLIPSES])
    except click.exceptions.Exit:  # --help
        return
    check_keys([*context.params.get("settings", ()), *context.params.get("overrides", ())], PPOConfig)


@pytest.mark.parametrize(
    "line",
    [
        "valor pppo data.train_files=a",
        "valor ppo data.train_file=a actor_rollout_ref.model.path=m",
        "valor ppo ... algorithm.no_such_key=1",
        "valor serve MODEL --porrt 1",
        "valor demo --task dance",
        "python examples/data_preprocess/gsm9k.py",
        "python examples/data_preprocess/gsm8k.py --local_safe_dir d",
        "make demos",
        "pip install 'valor-rl[everything]'",
        "valr ppo",
    ],
)
def test_a_name_that_does_not_exist_is_found(line):
    with pytest.raises((AssertionError, UserError, click.UsageError)):
        for words in commands(line):
            check(words)
