"""What every page shares: one HTML file with style, data, drawing library and script inside; it opens offline."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib import resources
from typing import Any

# Whatever a model writes into a page can load nothing and send nothing.
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def render_page(title: str, body: Iterable[str], data: Any, name: str) -> str:
    """The page's text: the HTML of `body`, and `data` (JSON values) for the script assets/`name`.js to draw.

    The script finds the data parsed as `data`, Plotly loaded, and the helpers of assets/charts.js; a stylesheet
    assets/`name`.css is added to the common one if there is one. The same arguments give the same text.
    """
    styles = [one for one in ("report.css", f"{name}.css") if _assets().joinpath(one).is_file()]
    script = f'unpacked.then(() => {{\n"use strict";\n{_asset("charts.js")}{_asset(f"{name}.js")}}});'
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)} · Valor</title>",
            f"<style>{''.join(map(_asset, dict.fromkeys(styles)))}</style>",
            "</head><body>",
            *body,
            f'<script type="application/json" id="run-data">{embed_json(data)}</script>',
            f'<script type="text/plain" id="plotly">{_packed_plotly()}</script>',
            f"<script>{_asset('unpack.js')}{script}</script>",
            "</body></html>\n",
        ]
    )


def embed_json(data: Any) -> str:
    """JSON that is safe inside a script element: no text in it can end the element, open another or a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 and its like are escaped already
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _packed_plotly() -> str:
    """plotly.js, gzip in base64: 1.9 MB instead of 4.8; the page unpacks it in a tenth of a second."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _assets() -> Any:
    return resources.files("valor.report").joinpath("assets")


def _asset(name: str) -> str:
    return _assets().joinpath(name).read_text(encoding="utf-8")
