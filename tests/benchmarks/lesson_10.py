"""Measure lesson 10 in a real JupyterLab: its first picture, the whole of it, and a learner's own cell, run many times.

    python -m tests.benchmarks.lesson_10
    python -m tests.benchmarks.lesson_10 --rankings 20

With `--rankings` its two comparisons are made so many times beside two processes that only compute: does DDP take a
shorter step than one process each time, model parallel none, and a pipeline a shorter one than model parallel?
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.browser import test_browser_lesson_10 as lesson
from tests.support.browser import Lab, lab
from tests.tools.run_notebooks import FOLDER

RANKED = """
green = 0
for _ in range({times}):
    exec({compared!r})
    exec({appendix!r})
    step_ms, of_strategies = (each.frame()["device step ms"] for each in (comparison, appendix))
    green += (
        step_ms["DDP"] < step_ms["one process"] <= step_ms["model parallel"]
        and of_strategies["GPipe"] < of_strategies["model parallel"]
    )
print(f"DDP < one process <= model parallel, and a pipeline < model parallel: {{green}} of {times}")
"""

ASKED_S = {"first picture": 10.0, "the whole lesson": 40.0, "`comparison.add` of one function": 5.0}


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
        yield "first picture", [lesson.opened(page)[0]]
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
        page.wait_until_run(len(lesson.CODE) - 1, timeout_s=600)
        yield "the whole lesson", [time.monotonic() - began]


def rankings(times: int) -> str:
    """Compare again and again beside two busy processes, in one kernel; return what that said."""
    cells = [cell.source for cell in lesson.CODE]
    appendix = next(index for index, source in enumerate(cells) if "labkit.benchmark.every_strategy(" in source)
    before = [source for source in (*cells[: lesson.COMPARED], cells[appendix - 1]) if "course.predict(" not in source]
    again = [
        cells[lesson.COMPARED].replace("on=ranks,", "on=ranks, live=False,").removesuffix("\ncomparison"),
        cells[appendix].partition("\nlabkit.show(")[0],
    ]
    loop = RANKED.format(times=times, compared=again[0], appendix=again[1])
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (*before, loop)])
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(FOLDER)}}).execute()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    said = (output for output in notebook.cells[-1].outputs if output.output_type == "stream")
    return "".join(output.text for output in said if output.name == "stdout")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=20, help="how often the learner's cell is spoilt and mended")
    parser.add_argument("--rankings", type=int, default=0, help="compare so many times beside busy processes")
    arguments = parser.parse_args()
    if arguments.rankings:
        print(rankings(arguments.rankings))
        return
    print("| | median, s | worst, s | asked, s |\n|---|---|---|---|")
    for what, took_s in in_jupyterlab(arguments.edits):
        print(f"| {what} | {statistics.median(took_s):.1f} | {max(took_s):.1f} | {ASKED_S[what]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
