"""Measure lesson 10 in a real JupyterLab: its first picture, the whole of it, and a learner's own cell, run many times.

    python -m tests.benchmarks.lesson_10
    python -m tests.benchmarks.lesson_10 --rankings 20

With `--rankings` the whole lesson runs headless so many times beside two processes that only compute, with all that it
asserts: of DDP, one process, model parallel and a pipeline, which takes a shorter step.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.browser import test_browser_lesson_10 as lesson
from tests.support.browser import lab
from tests.tools.run_notebooks import execute

ASKED_S = {"first picture": 10.0, "the whole lesson": 40.0, "`comparison.add` of one function": 5.0}


def in_jupyterlab(edits: int) -> dict[str, list[float]]:
    """Return seconds, by what they are of."""
    with tempfile.TemporaryDirectory(prefix="labkit-test-") as name:
        folder = Path(name)
        shutil.copy(lesson.LESSON, folder)
        with lab(folder) as page:
            first_s, _ = lesson.opened(page)
            found = {"first picture": [first_s]}
            page.cell(lesson.ADDED).scroll_into_view_if_needed()
            lesson.added(page, "equal")
            found["`comparison.add` of one function"] = added_s = []
            for _ in range(edits):
                lesson.toggle_the_division(page)
                added_s.append(lesson.added(page, "off by"))
                lesson.toggle_the_division(page)
                added_s.append(lesson.added(page, "equal"))
        shutil.copy(lesson.LESSON, folder)
        with lab(folder) as page:
            page.open(lesson.LESSON.name)
            began = time.monotonic()
            page.run_all()
            page.wait_until_run(len(lesson.CODE) - 1, timeout_s=600)
            found["the whole lesson"] = [time.monotonic() - began]
    return found


def rankings(times: int) -> int:
    """Return how often the lesson was green beside two busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    green = 0
    try:
        for number in range(times):
            began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="labkit-test-") as folder:
                try:
                    execute(lesson.LESSON, Path(folder))
                    green, said = green + 1, "green"
                except Exception as error:  # what the lesson asserts, too
                    said = str(error).strip().splitlines()[-1]
            print(f"{number + 1}: {said}, {time.monotonic() - began:.0f} s", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return green


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=20, help="how often the learner's cell is spoilt and mended")
    parser.add_argument("--rankings", type=int, default=0, help="run the lesson so many times beside busy processes")
    arguments = parser.parse_args()
    if arguments.rankings:
        print(f"green: {rankings(arguments.rankings)} of {arguments.rankings}")
        return
    print("| | median, s | worst, s | asked, s |\n|---|---|---|---|")
    for what, took_s in in_jupyterlab(arguments.edits).items():
        print(f"| {what} | {statistics.median(took_s):.1f} | {max(took_s):.1f} | {ASKED_S[what]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
