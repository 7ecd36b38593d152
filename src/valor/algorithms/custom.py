"""Estimators and losses of the user's own: a Python file that registers them (`algorithm.custom_path`)."""

from __future__ import annotations

from valor.user_files import load_file


def load_custom(path: str | None) -> None:
    """Run the file, once a process, in every process that looks names up. UserError: no such file, or it fails."""
    if path is not None:
        load_file(path, "algorithm.custom_path")
