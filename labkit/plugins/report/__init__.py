"""What a run says to who does not watch it live: lines of text while it goes on, and a summary of what came of it.

    lines     short progress lines, and what the ranks print, where nobody watches
    summary   what a run comes to: one line, a few lines of text, and HTML, which stays in the notebook

Without it nothing is printed of a run that nobody watches, and of one that is over its name and status remain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.run import Run
    from labkit.plugins.report.lines import Lines


def print_lines(run: Run, in_notebook: bool, wait: bool) -> Lines:
    """Return what prints progress and the ranks' output once it is started, where nobody watches."""
    from labkit.plugins.report.lines import Lines

    return Lines(run, in_notebook, wait)


def summarize(run: Run) -> dict[str, str]:
    """Return what a run comes to by MIME type, as a notebook shows it."""
    from labkit.plugins.report import summary

    return summary.bundle(run)
