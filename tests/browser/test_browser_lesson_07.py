"""Lesson 07 as a learner has it, in a real JupyterLab: the pictures come, a cell is spoilt, seen, mended, and again.

Screenshots are kept in build/screenshots.
"""

from __future__ import annotations

import shutil
import time

import nbformat
import pytest

from tests.support.browser import LONG_S, SCREENSHOTS, lab_and_its_end
from tests.tools.run_notebooks import FOLDER

pytestmark = pytest.mark.browser

LESSON = FOLDER / "07_compare.ipynb"
CODE = [cell for cell in nbformat.read(LESSON, as_version=4).cells if cell.cell_type == "code"]
COMPARED, MINE, ADDED = (
    next(index for index, cell in enumerate(CODE) if cell.source.startswith(beginning))
    for beginning in ("comparison = labkit.compare(", "def mine(worker", "comparison.add(mine=mine")
)
"""The cells that matter, by their number among the cells of code."""

ROW = """(cell, title) => {
    const lanes = [...cell.querySelectorAll('.js-plotly-plot')].filter(plot => plot.offsetParent)
        .flatMap(plot => plot._fullLayout?.yaxis?._categories ?? []);
    const rows = [...cell.querySelectorAll('tr')].filter(row => row.offsetParent);
    const row = rows.find(row => row.querySelector('th.row_heading')?.textContent.trim() === title);
    return lanes.includes(`${title} · rank 1`) && row ? row.textContent : '';
}"""
"""A run's row in the table, once a step of it has been drawn, too."""


def opened(page):
    """Open the lesson and run its cells up to the comparison."""
    page.open(LESSON.name)
    for index in range(COMPARED + 1):
        page.run_cell(index)
    page.wait_until_run(COMPARED)


def toggle_the_division(page):
    """Comment the line out that divides the gradients, or in again, as a learner does."""
    line = page.cell(MINE).locator(".cm-line", has_text="/= worker.world_size")
    line.scroll_into_view_if_needed()
    line.click()
    page.page.keyboard.press("Control+/")


def added(page, says):
    """Run the learner's cell and the one below it, and wait until all pictures have it, and what it says."""
    page.run_cell(MINE)
    page.wait_until_run(MINE)
    deadline = time.monotonic() + LONG_S
    page.run_cell(ADDED)
    while says not in (row := page.cell(ADDED).evaluate(ROW, "mine")):
        assert time.monotonic() < deadline, f"it says {row!r}, not {says!r}"
        time.sleep(0.05)
    page.wait_until_run(ADDED)


@pytest.mark.parametrize("times", [pytest.param(2, marks=pytest.mark.wide), pytest.param(20, marks=pytest.mark.long)])
def test_a_learner_spoils_a_cell_sees_it_and_mends_it_again_and_again(times, tmp_path):
    shutil.copy(LESSON, tmp_path)
    with lab_and_its_end(tmp_path) as page:
        opened(page)
        page.cell(ADDED).scroll_into_view_if_needed()
        added(page, "equal")
        for number in range(times):
            toggle_the_division(page)
            added(page, "off by")
            if not number:
                page.page.screenshot(path=SCREENSHOTS / "lesson_07_spoilt.png")
            toggle_the_division(page)
            added(page, "equal")
        assert page.cell(ADDED).locator("th.row_heading:visible", has_text="mine").count() == 1, "replaced each time"
        page.page.screenshot(path=SCREENSHOTS / "lesson_07_mended.png")
        assert page.real_errors() == []
