"""The command line: what it lists, what it refuses, and that refusals are one line and exit code 2."""

import subprocess
import sys

import pytest

from valor.cli import COMMANDS, main


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pop"], ["pop", "ppo"]),
        (["data"], ["valor data prepare"]),
        (["export", "/nowhere", "out"], ["/nowhere", "global_step_N"]),
        (["report", "/nowhere"], ["/nowhere"]),
        (["ppo", "no_such_key=1"], ["no_such_key"]),
        (["sft", "no_such_key=1"], ["no_such_key"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert all(word in error for word in words), error


def test_config_keys_prints_type_default_and_meaning(capsys):
    assert main(["config", "keys", "algorithm.gamma"]) == 0
    out = capsys.readouterr().out
    assert "algorithm.gamma" in out and "1.0" in out and "Discount" in out


def test_a_reader_that_stops_reading_is_no_error():
    command = f"{sys.executable} -m valor config keys | head -n 1"
    out = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert out.stdout.count("\n") == 1 and out.stderr == ""


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
