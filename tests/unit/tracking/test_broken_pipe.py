"""A reader of the output who has seen enough ends a command as SIGPIPE would, whichever way a line was written."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("write", ["print('x', flush=True)", "say('x')"])
def test_the_exit_code_is_that_of_the_signal(write):
    code = f"""
import sys, time
from valor.errors import exit_code
from valor.tracking.console import say
sys.stdin.read()
def command():
    {write}
    return 0
sys.exit(exit_code(command))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == 141 and process.stderr.read() == b""
