"""Measure lesson 07 in a real JupyterLab: its first picture, the whole of it, and a learner's own cell, run many times.

python -m tests.benchmarks.lesson_07
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.browser import test_browser_lesson_07 as lesson
from tests.support.browser import Lab, lab

ASKED_S = {
    "first picture": 2.0,
    "all pictures": 10.0,
    "the whole lesson": 40.0,
    "`comparison.add` of one function": 5.0,
}


@contextlib.contextmanager
def jupyterlab() -> Iterator[Lab]:
    """Start JupyterLab over a folder with the lesson."""
    with tempfile.TemporaryDirectory(prefix="labkit-test-") as folder:
        shutil.copy(lesson.LESSON, folder)
        with lab(Path(folder)) as page:
            yield page


def in_jupyterlab(edits: int) -> Iterator[tuple[str, list[float]]]:
    """Give seconds, and what they are of."""
    with jupyterlab() as page:
        first_s, all_s = lesson.opened(page)
        yield "first picture", [first_s]
        yield "all pictures", [all_s]
        page.cell(lesson.ADDED).scroll_into_view_if_needed()
        added_s = [lesson.added(page, "equal")]
        for _ in range(edits):
            lesson.toggle_the_division(page)
            added_s.append(lesson.added(page, "off by"))
            lesson.toggle_the_division(page)
            added_s.append(lesson.added(page, "equal"))
        yield "`comparison.add` of one function", added_s
    with jupyterlab() as page:
        page.open(lesson.LESSON.name)
        began = time.monotonic()
        page.run_all()
        shown = [n for n, cell in enumerate(lesson.CODE) if not cell.metadata.get("jupyter", {}).get("source_hidden")]
        page.wait_until_run(shown[-1], timeout_s=600)
        page.wait_until_run(len(lesson.CODE) - 1)
        yield "the whole lesson", [time.monotonic() - began]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=20, help="how often the learner's cell is spoilt and mended")
    arguments = parser.parse_args()
    print("| | median, s | worst, s | asked, s |\n|---|---|---|---|")
    for what, took_s in in_jupyterlab(arguments.edits):
        print(f"| {what} | {statistics.median(took_s):.1f} | {max(took_s):.1f} | {ASKED_S[what]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
