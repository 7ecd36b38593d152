"""What every page shares: one HTML file with style, data, drawing library and script inside; it opens offline."""

import base64
import gzip
import logging
from functools import cache
from importlib import resources
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

logger = logging.getLogger(__name__)

_ASSETS = resources.files("valor.report") / "assets"


def render_page(name: str, data: Any, **parts: Any) -> str:
    """The page's text: assets/`name`.html with `parts`, and `data` (JSON values) for assets/`name`.js.

    The script finds the data parsed as `data`, Plotly loaded, and the helpers of assets/charts.js. The same arguments
    give the same text.
    """
    drawing = f'unpacked.then(() => {{\n"use strict";\n{asset("charts.js")}{asset(f"{name}.js")}}});'
    texts = {
        "style": asset("report.css"),
        "data": htmlsafe_json_dumps(data, allow_nan=False, separators=(",", ":")),
        "plotly": _packed_plotly(),
        "script": asset("unpack.js") + drawing,
    }
    trusted = {part: Markup(text) for part, text in texts.items()}  # all other text is escaped
    return _TEMPLATES.get_template(f"{name}.html").render(**parts, **trusted)


def short(value: float | None, sign: str = "") -> str:
    """About three digits: `0.934`, `1.08`, `95.0`, `1,320`, `0.0012`; with `sign="+"` always a sign; else `none`."""
    if value is None:
        return "none"
    if value != 0 and abs(value) < 0.01:
        return f"{value:{sign}.2g}"
    decimals = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:{sign},.{decimals}f}"


def model_name(path: str) -> str:
    """The last part of a model's path that says which one it is: `sft` of `runs/sft/huggingface/actor`."""
    parts = [part for part in PurePath(path).parts if part not in ("huggingface", "actor", "critic")]
    return parts[-1] if parts else path


@cache
def _packed_plotly() -> str:
    """plotly.js, gzip in base64: 1.9 MB instead of 4.8; the page unpacks it in a tenth of a second. "": no plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        logger.warning("pages have tables and no pictures without plotly: pip install plotly")
        return ""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


_TEMPLATES = Environment(loader=FunctionLoader(asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
