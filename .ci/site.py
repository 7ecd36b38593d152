"""Hook of mkdocs: links that leave docs/ go to the repository, and have to lead to something there; blocks of code say
whether they are whole (tests/integration/test_docs.py runs them) or excerpts."""

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"(<!-- runnable -->\n\s*)?```(bash|python)\n")
_LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")


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

    def titled(match: re.Match[str]) -> str:
        return f'``` {{ .{match[2]} title="{"run by the tests" if match[1] else "excerpt"}" }}\n'

    return _LINK.sub(replaced, _FENCE.sub(titled, markdown))
