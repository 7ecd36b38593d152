"""The command line: what it lists, what it refuses, and that refusals are one line and exit code 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from valor.arguments import PAGES
from valor.cli import COMMANDS, RUNS, main
from valor.config.presets import COMMANDS as TREES

DOCS = Path(__file__).parents[3] / "docs"


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pop"], ["pop", "ppo"]),
        (["data"], ["valor data prepare"]),
        (["lab", "swep"], ["did you mean sweep?"]),
        (["report", "--opne", "x"], ["--opne", "valor report --help"]),
        (["export", "x"], ["Missing argument 'OUT'"]),
        (["export", "/nowhere", "out"], ["/nowhere", "global_step_N"]),
        (["report", "/nowhere"], ["/nowhere"]),
        (["ppo", "no_such_key=1"], ["no_such_key"]),
        (["sft", "no_such_key=1"], ["no_such_key"]),
        (["ppo", "--config-path", "~no-one", "--config-name", "x"], ["no user here", "~/ is your own folder"]),
        (
            ["data", "prepare", "custom", "--local", "~no-one/x.csv", "--answer-column", "a", "--data-source", "x"],
            ["no user here"],
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert all(word in error for word in words), error


@pytest.mark.parametrize("command", [["publish"], ["critic", "publish"]])
def test_a_file_is_no_folder_to_publish_into_and_a_folder_no_model(command, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "config.json").write_text("[]")
    for arguments, told in {
        (str(tmp_path), str(tmp_path / "file")): f"'{tmp_path / 'file'}' is not empty: give a new folder\n",
        (str(tmp_path), str(tmp_path / "out")): f"'{tmp_path}' is neither a checkpoint (global_step_N) nor a model ",
    }.items():
        assert main([*command, *arguments]) == 2
        assert capsys.readouterr().err.startswith(told)


def test_config_keys_prints_type_default_and_meaning(capsys):
    assert main(["config", "keys", "algorithm.gamma"]) == 0
    out = capsys.readouterr().out
    assert "algorithm.gamma" in out and "1.0" in out and "Discount" in out


def test_config_keys_searches_meanings(capsys):
    assert main(["config", "keys", "softmax", "temperature"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all("softmax temperature" in line.lower() for line in lines)
    assert main(["config", "keys", "nothinglikethat"]) == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_each_commands_help_has_an_example_and_a_page_that_exists(name, capsys):
    assert main([*name.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: valor {name}") and f"  valor {name}" in out.partition("Example:")[2]
    page = out.strip().splitlines()[-1].removeprefix("  More: " + PAGES).strip("/")
    assert any((DOCS / f"{page}{end}").is_file() for end in (".md", "/index.md")), page


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("valor crit", "critic"),
        ("valor ppo data.train_f", "data.train_files="),
        ("valor rm train loss.ma", "loss.margin="),
        ("valor critic pretrain pretrain.h", "pretrain.holdout="),
    ],
)
def test_a_shell_completes_commands_and_keys(words, found):
    env = {**os.environ, "_VALOR_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([sys.executable, "-m", "valor"], capture_output=True, text=True, env=env)
    assert f"plain,{found}" in done.stdout.splitlines()


def test_config_keys_knows_every_command(capsys):
    assert TREES.keys() == RUNS.keys()
    for words, heading in (
        (["search.samples"], "critic search"),
        (["loss.margin"], "rm train"),
        (["optim.eps"], "sft"),
    ):
        assert main(["config", "keys", *words]) == 0
        assert f"valor {heading}:\n{words[0]} " in capsys.readouterr().out
        assert main(["config", "keys", "--of", heading, *words]) == 0
        assert capsys.readouterr().out.startswith(words[0])
    assert main(["config", "keys", "serch.samples"]) == 2
    assert "did you mean 'search.samples'" in capsys.readouterr().err


def test_a_mistake_is_told_before_anything_heavy_is_imported():
    """Every command in one process, which has imported neither torch nor transformers nor Ray at the end."""
    pytest.importorskip("uvicorn")
    typo = "trainer.sed=1"
    given = [
        [*name.split(), *(["data.val_files=a"] if "score" in name or "search" in name else []), typo] for name in RUNS
    ]
    given += [
        ["plan", typo],
        ["serve", "model", typo],
        ["serve", "--sed"],
        ["lab", "sweep", "--sed"],
        ["demo", "--sed"],
    ]
    given += [["data", "prepare", "gsm9k"], ["retrieve", "--sed"], ["publish", "--sed"], ["config", "keys", "--sed"]]
    code = "import sys\nfrom valor.cli import main\nfor words in eval(sys.argv[1]): assert main(words) == 2, words\n"
    code += "print({'torch', 'transformers', 'ray'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code, repr(given)], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["set()"], done.stderr
    assert done.stderr.count("unknown key 'trainer.sed': did you mean 'trainer.seed'?\n") == len(RUNS) + 2


def test_help_imports_nothing_heavy():
    code = "import sys; from valor.cli import main; main([]); print({'torch', 'hydra', 'pydantic'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_reader_that_stops_reading_is_no_error():
    command = f"{sys.executable} -m valor config keys | head -n 1"
    out = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert out.stdout.count("\n") == 1 and out.stderr == ""


def test_a_terminal_without_utf_8_shows_what_it_can():
    code = "from valor.errors import exit_code; from valor.tracking.console import say\n"
    code += "exit_code(lambda: (say('reward é 文'), print('文'), 0)[-1])"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (out.stdout, out.stderr) == ("reward \\xe9 \\u6587\n\\u6587\n", "")


def test_a_process_that_ends_is_not_disturbed_by_another_ctrl_c():
    """Nested as in `valor ppo`; the second signal comes while threads and atexit handlers would still be at work."""
    code = """
import os, signal, sys, threading, time
from valor.errors import Interrupted, exit_code
def stop():
    raise Interrupted(signal.SIGINT)
code = exit_code(lambda: exit_code(stop))
os.kill(os.getpid(), signal.SIGINT)
time.sleep(0.1)
sys.exit(code)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    line = "SIGINT: stopped at once; the same command goes on from its last checkpoint\n"
    assert (ended.returncode, ended.stderr) == (130, line)
