"""The live view in a real Notebook 7 in a real Chromium. Screenshots are kept in build/screenshots; look at them."""

from __future__ import annotations

import time

import pytest

from tests.browser.test_browser import LAST_STEP, PANEL, SCREENSHOTS, STAYS, screenshot, write
from tests.conftest import rank_processes
from tests.support.browser import LONG_S, lab

pytestmark = pytest.mark.browser

ITS_OWN = "Cannot read properties of undefined (reading 'schema')"
"""What Notebook 7.6 says now and then while it opens: its menus ask for `plugins[name].schema` of settings to come."""

CELLS = (
    "import time, course, labkit, torch.distributed as dist\n%load_ext labkit",
    """
def train(worker):
    for step in range(100_000):
        worker.log(loss=1 / (1 + step))
        time.sleep(0.2)
        dist.barrier()
""",
    "labkit.launch(train, world_size=2)",
    "%%ranks 2\nprint('here is', rank)\nrank * 10",
    """
def local_indices(samples, rank, world_size, epoch, seed):
    return []
course.check(local_indices)
""",
    "%%ranks --end\nrank",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    pytest.importorskip("notebook", minversion="7.4", reason="needs Notebook 7: pip install notebook")
    folder = tmp_path_factory.mktemp("notebook")
    with lab(folder, app="notebook") as found:
        found.folder = folder
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        yield found
    deadline = time.monotonic() + LONG_S
    while rank_processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert rank_processes() == [], "Notebook, its kernels and their ranks have all ended"


def test_in_notebook_7_curves_grow_stop_is_obeyed_and_cells_run_on_ranks(page):
    write(page.folder, "seven.ipynb", *(source.strip() for source in CELLS))
    page.open("seven.ipynb")
    for index in range(2):
        page.run_cell(index)
        page.wait_until_run(index)
    page.run_cell(2)
    page.page.locator(PANEL).first.wait_for()
    for _ in range(3):
        before = page.page.evaluate(LAST_STEP)
        page.wait_for(f"before => ({LAST_STEP})() > before", before)
    assert page.is_running(2)
    screenshot(page, "notebook_7_running")
    button = page.page.locator("button.stop", has_text="Stop")
    assert button.is_enabled(), "Notebook has opened a subshell, and the button knows"
    button.click()
    page.wait_until_run(2)
    page.page.locator("b", has_text="train: stopped").wait_for()
    page.page.locator(STAYS).first.wait_for()
    assert page.page.locator("button.stop", has_text="Stop").count() == 0
    screenshot(page, "notebook_7_stopped")
    for index in (3, 4, 5):
        page.run_cell(index)
        page.wait_until_run(index)
    assert "[rank 1] here is 1\n" in page.cell(3).inner_text()
    assert "[rank 1] 10" in page.cell(3).inner_text()
    page.cell(4).locator("text=local_indices").first.wait_for()
    page.cell(4).scroll_into_view_if_needed()
    screenshot(page, "notebook_7_ranks")
    page.save(page.folder / "seven.ipynb")
    saved = (page.folder / "seven.ipynb").read_text()
    assert "widget-view+json" not in saved
    assert "application/vnd.plotly.v1+json" in saved
    assert [error for error in page.real_errors() if error != ITS_OWN] == []
