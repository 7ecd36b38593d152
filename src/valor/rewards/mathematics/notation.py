# ruff: noqa: RUF001  (mathematical characters are what this is about)
r"""One spelling for the many ways to write mathematics.

What comes out: `\frac`, `\sqrt`, functions and Greek letters as LaTeX commands; operators `+ - * / ^ = < > ≤ ≥ ≠ ∈ ∪`;
`°` for degrees; `⦃ ⦄` for the braces of sets; `⟦a,b;c,d⟧` for matrices; `“words”` for text; no dollars, no spacing.
"""

from __future__ import annotations

import re

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "∗": "*", "÷": "/", "∕": "/", "≠": "≠",
        "≤": "≤", "⩽": "≤", "≦": "≤", "≥": "≥", "⩾": "≥", "≧": "≥", "∞": r"\infty ", "π": r"\pi ", "√": r"\sqrt ",
        "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "º": "°", "±": r"\pm ",
        "∅": r"\emptyset ", "（": "(", "）": ")", "，": ",", "：": ":", "；": ";", "、": ",", "％": "%", "。": ".",
        "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "φ": r"\varphi ", "€": "", "£": "",
        "¥": "", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "′": "'",
    }
)  # fmt: skip
_SAME = {
    "*": "cdot times ast", "/": "div", "≤": "le leq leqslant leqq", "≥": "ge geq geqslant geqq", "≠": "ne neq",
    "(": "langle lgroup", ")": "rangle rgroup", "[": "lbrack", "]": "rbrack", "<": "lt",
    ">": "gt", "∈": "in", "∪": "cup bigcup", "∩": "cap", "∖": "setminus backslash",
    "|": "mid vert lvert rvert",
    "°": "degree", "⦃": "lbrace", "⦄": "rbrace", "…": "ldots dots cdots", "ℝ": "R Reals", ":": "colon",
    " ": "quad qquad",
    r"\frac": "dfrac tfrac cfrac", r"\binom": "dbinom tbinom", r"\emptyset": "varnothing", r"\tan": "tg",
    r"\cot": "ctg",
    r"\arctan": "arctg", r"\varphi": "phi", r"\varepsilon": "epsilon", r"\Leftrightarrow": "iff",
    "": "displaystyle textstyle limits left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr mathstrut nolimits",
}  # fmt: skip
_COMMAND = {name: new for new, names in _SAME.items() for name in names.split()}
_COMMANDS = re.compile(r"\\([A-Za-z]+)\s?")
_FUNCTIONS = r"arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|pi|theta|alpha|beta|infty"
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname|mathop|hbox|rm)\*?\s*\{([^{}]*)\}")
_UNIT_LETTER = re.compile(r"(?<=[\d}])(?:\s|\\[,;: ]|~)*\\(?:text|mathrm|rm)\{\s*([A-Za-z])\s*\}")
_DOLLARS = re.compile(r"^([-+]?)\s*\\?\$\s*(?=-?[\d.])")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array|cases|aligned)\}(?:\{[^{}]*\})?(.*?)\\end\{\1\}", re.DOTALL)
_UNWRAPPED = re.compile(
    r"\\(?:boxed|fbox|mathbf|boldsymbol|bm|vec|overrightarrow|overline|bar|hat|mathit|mathcal|widehat|underline|bold|"
    r"mathsf|emph)\s*\{([^{}]*)\}"
)
_REPEATING = re.compile(r"(\d{0,15})\.(\d{0,15})(?:\\(?:overline|bar|dot)\s*\{?(\d{1,15})\}?|(?<=\.)\((\d{1,15})\))")
_NEARLY = re.compile(
    r"^“?(?:approximately|approx\.?|about|roughly|around|nearly|almost)(?:”| )\s*(?=\S)", re.IGNORECASE
)
_RULES = [
    (re.compile(r"(?<=\d)(?:\\[,!;: ]\s?|\{,\}\s?)+(?=\d{3}(?!\d))"), ""),  # 10\,000  10{,}000  10\ 000
    (re.compile(r",\\!\s*(?=\d{3})"), ","),  # 11,\! 111
    (re.compile(r"\\[!]|\\phantom\{[^{}]*\}|\\label\{[^{}]*\}"), ""),
    (re.compile(r"\\[,;:> ]|~|\\\s"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\^\s*\{?\s*(?:\\circ\b|\\text\s*\{o\})\s*\}?|\\circ\b"), "°"),
    (re.compile(r"\\mathbb\s*\{?\s*R\s*\}?"), "ℝ"),
    (re.compile(r"° ?([CF])\b"), r"“°\1”"),
    (re.compile(r"\\(?:text)?color\{[^{}]*\}"), ""),
    (re.compile(r"\*\*(?=\s*[\d(a-z])"), "^"),
    (re.compile(r"(?<![A-Za-z])([ap])\. ?m\b\.?", re.IGNORECASE), r"\1m"),
    (re.compile(r">=|=>"), "≥"),
    (re.compile(r"<=|=<"), "≤"),
    (re.compile(r"!="), "≠"),
    (re.compile(r"\b(?:infinity|inf|oo)\b"), r"\\infty "),
    (re.compile(rf"(?<![A-Za-z\\])({_FUNCTIONS})(?![a-z])"), r"\\\1 "),
]
_FRACTIONS = [
    (re.compile(r"\s*([{}])\s*"), r"\1"),
    (re.compile(r"\\frac ?(\d) ?(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac ?(\d)(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\{[^{}]*\}) ?(\d)"), r"\1{\2}"),
    (re.compile(r"(?<![\d.,/])(\d+) (\d+)/(\d+)(?![\d.,/])"), r"\1\\frac{\2}{\3}"),  # 1 1/2
]
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# "\\text" and the like in data that went through a Python string without the r
_DAMAGED = re.compile(
    r"\t(?=ext|imes|heta|frac|an\b|au\b|riangle)|\f(?=rac|orall)|\x08(?=oxed|inom|eta\b)|\x07(?=lpha|ngle|pprox)|\x0b(?=ec\b)"
)
_ESCAPES = {"\t": r"\t", "\f": r"\f", "\b": r"\b", "\a": r"\a", "\v": r"\v"}
_PAIRS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))


def normalize(text: str) -> str:
    """The text in the one spelling of this module."""
    text = _without_delimiters(_DAMAGED.sub(lambda m: _ESCAPES[m[0]], text).strip())
    text = _DOLLARS.sub(r"\1“$”", text.replace(r"\%", "%").replace("\n", " "))
    text = re.sub(r"\\?\$(?!”)", "", text)
    text = _MATRIX.sub(_matrix, text).replace("&", " ").replace(r"\\", "\\")
    text = _REPEATING.sub(_as_fraction, text)
    text = text.translate(_CHARACTERS).replace(r"\{", "⦃").replace(r"\}", "⦄").replace(r"\|", "|")
    for _ in range(3):  # text inside text
        text = _UNWRAPPED.sub(r"{\1}", _TEXT.sub(_quoted, _UNIT_LETTER.sub(r"“\1”", text)))
    text = _NEARLY.sub("", text)
    for pattern, new in _RULES:
        text = pattern.sub(new, text)
    text = _COMMANDS.sub(lambda m: _COMMAND.get(m[1], f"\\{m[1]} "), text)
    text = re.sub(r"(\\[A-Za-z]+) (?![A-Za-z])", r"\1", re.sub(r"\s+", " ", text))
    for pattern, new in _FRACTIONS:
        text = pattern.sub(new, text)
    while text.startswith("{") and text.endswith("}") and not re.search(r"[{},]", text[1:-1]):
        text = text[1:-1]  # left by \\mathbf and the like
    return text.rstrip(" .,;:\\").lstrip(" ,;:")


def without_thousands_commas(text: str) -> str:
    """`1,080` as `1080`. The same characters may be a list of two numbers."""
    return _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)


def _as_fraction(match: re.Match[str]) -> str:
    """Of repeating decimals: 0.1666… as 15/90."""
    once, again = match[1] + match[2], match[3] or match[4]
    return f"\\frac{{{int(once + again) - int(once or '0')}}}{{{10 ** len(match[2]) * (10 ** len(again) - 1)}}}"


def _matrix(match: re.Match[str]) -> str:
    rows = [",".join(cell.strip() for cell in row.split("&")) for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2])]
    return f"⟦{';'.join(row for row in rows if row.strip())}⟧"


def _quoted(match: re.Match[str]) -> str:
    words = match[1].strip()
    if words.lower() in ("and", "or"):
        return f" {words.lower()} "
    if (len(words) == 1 and words.isalpha()) or re.match(r"[-+]?[\d.]|[-+\d.,%\s()]*$", words):
        return words  # a variable or a number, with its unit perhaps
    return f"\\{words} " if re.fullmatch(_FUNCTIONS, words) else f"“{words}”"


def _without_delimiters(text: str) -> str:
    for left, right in _PAIRS:
        inside = text[len(left) : -len(right)]
        if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right) and left not in inside:
            return _without_delimiters(inside.strip())
    return text
