"""One self-contained HTML page of a run, from the files in its folder, or of several runs."""

from valor.report.page import build_comparison, build_report

__all__ = ["build_comparison", "build_report"]
