"""The scripts that are run before a release run: a new user's afternoon, a laptop's figures, on tiny models."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.long]


def runs(script: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(1800)
def test_the_afternoon_of_a_new_user(tmp_path):
    assert "FAIL" not in runs("new_user.py", cwd=tmp_path)


def test_the_laptop_table(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- laptop -->\nnothing\n<!-- /laptop -->\n")
    runs("laptop.py", "--tiny", "--tokens", "8", "--steps", "2", "--write", str(page), cwd=tmp_path)
    assert page.read_text().count("| GRPO |") == page.read_text().count("| PPO |") == 2
