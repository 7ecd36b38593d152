"""One self-contained HTML page of a run, from the files in its folder."""

from valor.report.page import build_report

__all__ = ["build_report"]
