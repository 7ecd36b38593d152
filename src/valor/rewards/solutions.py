"""Solutions whose parts have names ("x=1, y=2 or x=3, y=4", "(x,y)=(1,2)") as points: "(1,2),(3,4)"."""

import re

from valor.rewards.quantities import CONJUNCTION

_HEAD = re.compile(r"\(([^()=<>]*,[^()=<>]*)\) ?(?:=|\\in(?![a-z])) ?")  # (p, q) =
_PART = re.compile(r"((?P<letter>\\?[A-Za-z]+'?)(?:_ ?\{?\w+\}?)?) ?= ?([^=<>]+)")
_SEPARATOR = re.compile(rf"({CONJUNCTION.pattern}|,)|([()\[\]{{}}])")
_POINTS = re.compile(r"(?:\\?\{)? ?\(.*,.*\) ?(?:\\?\})?")


def as_points(truth: str, answer: str) -> tuple[str, str]:
    """Both as points, where both are; unchanged where one is none, or where their parts have other names."""
    (names, points), (others, other_points) = _points(truth), _points(answer)
    both = _POINTS.fullmatch(points) and _POINTS.fullmatch(other_points)
    return (points, other_points) if both and (not names or not others or names == others) else (truth, answer)


def _points(text: str) -> tuple[list[str], str]:
    """The names of the parts, none where they have none, and the points; parts that are listed, by their names."""
    heads = [head.replace(" ", "") for head in _HEAD.findall(text)]
    if heads:
        points = CONJUNCTION.sub(",", _HEAD.sub("", text)).strip(" \\{}")
        return (heads[0].split(","), points) if len(set(heads)) == 1 and "=" not in points else ([], text)
    listed, joins = _listed(text)
    parts = [_PART.fullmatch(part.strip()) for part in listed]
    read = [part for part in parts if part]
    names = [part[1] for part in read]
    letters = [part["letter"] for part in read]
    if len(set(names)) == len(names) > len(set(letters)) > 1:
        names = letters  # x_1=1, y_1=2, x_2=3, y_2=4
    size = len(set(names))
    if len(read) < len(parts) or len(set(letters)) < 2 or len(names) % size:  # roots x_1, x_2 come in any order
        return [], text
    points = []
    for start in range(0, len(names), size):
        values = {name: part[3].strip() for name, part in list(zip(names, read, strict=True))[start : start + size]}
        if len(values) < size or any(re.search("or|或", join) for join in joins[start : start + size - 1]):
            return [], text
        points.append(f"({','.join(values[name] for name in sorted(values))})")
    return sorted(set(names)), ",".join(points)


def _listed(text: str) -> tuple[list[str], list[str]]:
    """The items of a list outside brackets, and what stands between them."""
    items, joins, depth, start = [], [], 0, 0
    for match in _SEPARATOR.finditer(text):
        if match[2]:
            depth += 1 if match[2] in "([{" else -1
        elif depth == 0:
            items.append(text[start : match.start()])
            joins.append(match[1])
            start = match.end()
    return [*items, text[start:]], joins
