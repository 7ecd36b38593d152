"""The pages: blocks marked as runnable run, in order, as a reader would; the site builds, its links lead somewhere."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^<!-- runnable -->\n```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = {
    path: BLOCK.findall(path.read_text()) for path in [*sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("README*.md")]
}
VALOR = f'#!/bin/sh\nexec {sys.executable} -m valor "$@"\n'

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "page", [page for page, blocks in PAGES.items() if blocks], ids=lambda p: str(p.relative_to(ROOT))
)
def test_runnable_blocks_of_a_page_run(page, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valor").write_text(VALOR)
    (tmp_path / "bin" / "valor").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    for language, code in PAGES[page]:
        command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_there_are_runnable_blocks():
    assert sum(map(len, PAGES.values())) >= 6


def test_the_readme_is_read_in_three_minutes():
    assert len((ROOT / "README.md").read_text().split()) <= 750


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs pip install 'valor-rl[docs]'")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "run by the tests" in (tmp_path / "site" / "sft" / "index.html").read_text()
