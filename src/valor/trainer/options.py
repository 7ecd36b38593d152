"""Options of registered algorithms, as users set them under a key of the configuration."""

from collections.abc import Collection, Iterator

from valor.algorithms.registry import Entry


def option_mistakes(
    entry: Entry, key: str, names: Collection[str], options: Collection[str], provided: Collection[str] = ()
) -> Iterator[str]:
    """A line for each of the `names` set under `key` that is not among the `options` of the algorithm, or that has a
    source of its own (`provided`: other keys and the run)."""
    for name in names:
        if name in provided:
            yield f"{key}.{name} is not set here: it has a key of its own or comes from the run"
        elif name not in options and not entry.takes_any:
            known = ", ".join(sorted(set(options) - set(provided))) or "none"
            yield f"{key}.{name}: {entry.name} has no such option (it has {known})"
