"""Measure the live view in a real JupyterLab: how soon it is there, how soon Stop frees the cell, what a redraw costs.

python -m tests.benchmarks.live_view
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.browser.test_browser import LAST_STEP, PANEL
from tests.support.browser import Lab, lab, write

CELLS = {
    "prepare": """
import time, labkit

def train(worker, pause_s=0.02):
    for step in range(10**9):
        worker.log(loss=1 / (1 + step))
        time.sleep(pause_s)

def stuck(worker):
    worker.log(loss=1)
    while True:
        time.sleep(0.1)

def much(worker):
    for step in range(10_000):
        worker.log(loss=1 / (1 + step), accuracy=step, norm=step % 7)
    for step in range(10_000, 10**9):
        time.sleep(0.5)
        worker.log(loss=1 / (1 + step), accuracy=step, norm=step % 7)

def short(worker):
    time.sleep(0.03)
    worker.log(loss=1)

ranks, four = labkit.Session(2), labkit.Session(4)
labkit.launch(short, on=ranks, live=False), labkit.launch(short, on=four, live=False);
""",
    "train": "labkit.launch(train, on=ranks)",
    "stuck": "labkit.launch(stuck, world_size=2)",
    "much": "labkit.launch(much, on=four)",
    "short": """
times = []
for _ in range(100):
    began = time.perf_counter()
    labkit.launch(short, on=ranks)
    times.append(time.perf_counter() - began)
""",
    "times": "print(*times)",
}
PREPARE, TRAIN, STUCK, MUCH, SHORT, TIMES = range(len(CELLS))

WATCH_THREAD = """() => {
    window.longest = 0;
    new PerformanceObserver(list => {
        for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
    }).observe({type: 'longtask'});
}"""
"""From then on, `window.longest` is the longest time for which the page's thread was busy, in ms; 0 if below 50."""

LOOK_S = 0.01
"""How often the page is looked at."""


def seconds_until(condition: Callable[[], object]) -> float:
    """Wait until something is true; return the seconds."""
    began = time.monotonic()
    while not condition():
        time.sleep(LOOK_S)
    return time.monotonic() - began


class Page:
    """A notebook whose cells are run one by one."""

    def __init__(self, page: Lab) -> None:
        self.page = page
        page.open("figures.ipynb")
        page.run_cell(PREPARE)
        page.wait_until_run(PREPARE, 300)

    def shown(self, cell: int) -> float:
        """Run a cell; return the seconds until its curves are there, from the moment that its number says it runs."""
        self.page.run_cell(cell)
        return seconds_until(self.page.cell(cell).locator(PANEL).count)

    def stopped(self, cell: int, clicks: int = 1) -> float:
        """Click on Stop; return the seconds until the cell is free, from the last click."""
        button = self.page.cell(cell).locator("button.stop")
        for click in range(clicks):
            if click:
                self.page.cell(cell).locator("button.stop", has_text="now").wait_for()
            button.click()
        return seconds_until(lambda: not self.page.is_running(cell))


def report(what: str, values: list[float], unit: str = "s") -> None:
    """Print a row."""
    print(f"{what:64} median {statistics.median(values):.3g} {unit}, worst {max(values):.3g} {unit}", flush=True)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="labkit-test-") as folder:
        write(Path(folder), "figures.ipynb", *(source.strip() for source in CELLS.values()))
        with lab(Path(folder)) as page:
            notebook = Page(page)
            page.page.evaluate(WATCH_THREAD)
            report("first view of a page, from the cell's start", [notebook.shown(TRAIN)])
            stopped, shown = [notebook.stopped(TRAIN)], []
            for _ in range(5):
                shown.append(notebook.shown(TRAIN))
                page.wait_for(f"() => ({LAST_STEP})() > 20")
                stopped.append(notebook.stopped(TRAIN))
            report("the next views", shown)
            report("Stop, ranks that train", stopped)
            stuck, ended = [], []
            for _ in range(3):
                notebook.shown(STUCK)
                stuck.append(notebook.stopped(STUCK))
                notebook.shown(STUCK)
                ended.append(notebook.stopped(STUCK, clicks=2))
            report("Stop, ranks that are stuck", stuck)
            report("Stop, a second click", ended)
            notebook.shown(MUCH)
            page.wait_for(f"() => ({LAST_STEP})() >= 9_999")
            page.page.evaluate("() => { window.longest = 0; }")
            page.page.wait_for_timeout(10_000)
            report("longest task, 4 ranks x 3 names x 10,000 steps", [page.page.evaluate("() => window.longest")], "ms")
            notebook.stopped(MUCH)
            for cell in (SHORT, TIMES):
                page.run_cell(cell)
                page.wait_until_run(cell, 300)
            times = page.cell(TIMES).locator("pre").last.inner_text().split()
            report("a launch of 30 ms, 100 in a row in one cell", [float(each) for each in times])


if __name__ == "__main__":
    main()
