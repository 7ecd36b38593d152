"""Hook of mkdocs: equations become MathML and diagrams SVG while the site is built, so that no script has to be loaded;
links that leave docs/ go to the repository, and have to lead to something there."""

import os
import re
from html import unescape
from itertools import count
from pathlib import Path
from typing import Any

import mermaidx
from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[1]
_EQUATION = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', re.DOTALL)
_LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")
_numbers = count(1)


def on_config(config: Any) -> None:
    fence = {"name": "mermaid", "class": "diagram", "format": _diagram}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page with these links replaced. FileNotFoundError: one leads nowhere."""
    here = (ROOT / "docs" / page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(here / match[1]))
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: {match[1]}")
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config['repo_url']}/{kind}/main/{target.relative_to(ROOT)}{match[2] or ''})"

    return _LINK.sub(replaced, markdown)


def on_page_content(html: str, **_: Any) -> str:
    return _EQUATION.sub(
        lambda match: f'<div class="equation">{convert(unescape(match[1]), display="block")}</div>', html
    )


def _diagram(source: str, language: str, css_class: str, *_: Any, **__: Any) -> str:
    svg = mermaidx.render(source).svg()
    return f'<div class="{css_class}">{svg.replace("my-svg", f"diagram-{next(_numbers)}")}</div>'
