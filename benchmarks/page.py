"""Pages of results whose tables a script writes: each between two comments with its name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def write_block(page: Path, name: str, text: str) -> None:
    """Put `text` between the page's comments of this name."""
    above, _, rest = page.read_text().partition(f"<!-- {name} -->\n")
    below = rest.partition(f"<!-- /{name} -->")[2]
    page.write_text(f"{above}<!-- {name} -->\n{text}\n<!-- /{name} -->{below}")


def print_or_write(doc: str | None, name: str, tables: Callable[[], str]) -> None:
    """The command line of a script that has no settings: prints its tables; --out PAGE also puts them there."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a page whose tables are replaced by these")
    args = parser.parse_args()
    found = tables()
    print(found)
    if args.out:
        write_block(args.out, name, found)
