"""The pages: blocks marked as runnable run, in order, as a reader would; the site builds, its links lead somewhere."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^ *<!-- runnable -->\n *```(bash|python)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
PAGES = {
    path: BLOCK.findall(path.read_text()) for path in [*sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("README*.md")]
}
PROGRAMS = {
    "valor": f'#!/bin/sh\nexec {sys.executable} -m valor "$@"\n',
    "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
}

pytestmark = pytest.mark.slow


def runnable() -> list:
    """The Chinese pages have the commands of the English ones."""
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.long] * ("zh" in page.parts))
        for page, blocks in PAGES.items()
        if blocks
    ]


@pytest.mark.parametrize("page", runnable())
def test_runnable_blocks_of_a_page_run(page, tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    for language, block in PAGES[page]:
        code = textwrap.dedent(block)
        command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_there_are_runnable_blocks():
    assert sum(map(len, PAGES.values())) >= 6


def test_the_readme_is_read_in_three_minutes():
    assert len((ROOT / "README.md").read_text().split()) <= 750


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site's folder, built without a warning."""
    if lacking := [name for name in ("material", "mermaidx", "latex2mathml") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(lacking)}: pip install 'valor-rl[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_site_has_equations_diagrams_and_lists_without_a_script(site):
    for page in ROOT.glob("docs/**/*.md"):
        place = page.relative_to(ROOT / "docs").with_suffix("")
        html = (site / (place.parent if place.name == "index" else place) / "index.html").read_text()
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        assert "$$" not in html and html.count("<math") == text.count("$$") / 2, page
        assert html.count('<div class="diagram"><svg') == page.read_text().count("```mermaid"), page
        assert "\\" not in "".join(re.findall(r"<math.*?</math>", html, re.DOTALL)), page  # a command that nobody knew
        assert html.count("<ol>") == len(re.findall(r"^1\. ", text, re.MULTILINE)), page  # each counts through
        assert not re.search(r'<(script|link|img)[^>]*(src|href)="https?://[^"]*\.(js|css|png|svg)', html), page


def test_no_link_of_the_site_is_broken(site):
    pages = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', html)) for path, html in pages.items()}
    for path, html in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', html):
            address = urlsplit(unescape(link))
            if address.scheme or address.netloc or address.path.startswith("/"):
                continue
            target = Path(os.path.normpath(path.parent / unquote(address.path))) if address.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.relative_to(site)}: {link}"
            if address.fragment and target in anchors and not address.fragment.startswith("__"):
                assert unquote(address.fragment) in anchors[target], f"{path.relative_to(site)}: {link}"
