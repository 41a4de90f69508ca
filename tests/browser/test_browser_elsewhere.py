"""A run's view where JupyterLab's environment lacks what the kernel's has: pictures, lines, and what to install.

Screenshots are kept in build/screenshots; look at them.
"""

from __future__ import annotations

import pytest

from tests.browser.test_browser_stays import opened, says, screenshot
from tests.support.browser import lab_and_its_end
from tests.support.tiers import few

pytestmark = pytest.mark.browser


@pytest.fixture(params=few(["anywidget and plotly", "plotly", "all widgets"], 3))
def another(request, tmp_path_factory):
    """JupyterLab in an environment that lacks what the kernel's has."""
    lacks = {
        "anywidget and plotly": ["anywidget", "jupyterlab-plotly"],
        "plotly": ["jupyterlab-plotly"],
        "all widgets": ["@jupyter-widgets/jupyterlab-manager", "anywidget", "jupyterlab-plotly"],
    }
    folder = tmp_path_factory.mktemp("lab")
    with lab_and_its_end(folder, without=lacks[request.param]) as jupyterlab:
        jupyterlab.folder, jupyterlab.lacks = folder, request.param
        yield jupyterlab


def test_a_page_of_another_environment_shows_pictures_and_says_what_it_lacks(another):
    page = another
    opened(page, "another", "labkit.launch(train, then='goes on')", "labkit.charts.bars(['a'], [1.0], 's', 'bars')")
    page.run_cell(1)
    view = page.cell(1)
    says_missing = {
        "anywidget and plotly": "pip install anywidget plotly",
        "plotly": "pip install plotly",
        "all widgets": "pip install ipywidgets anywidget plotly",
    }[page.lacks]
    view.locator(f"text={says_missing}").first.wait_for()
    if page.lacks == "plotly":
        view.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for(state="attached")
    elif page.lacks == "anywidget and plotly":
        view.locator("img").first.wait_for()
    else:
        view.locator("text=/train: running · 2 ranks · step/").first.wait_for()
    assert view.locator("text=javascript error").count() == 0
    screenshot(page, f"another_running_{page.lacks.replace(' ', '_')}")
    if page.lacks == "all widgets":
        page.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.interrupt()")
    else:
        view.locator("button", has_text="Stop").click()
    page.wait_until_run(1)
    says(page, 1, "train: stopped")
    if page.lacks != "plotly":
        view.locator("img").first.wait_for()
    page.run_cell(2)
    page.cell(2).locator("img").first.wait_for()
    assert "<Chart" not in page.cell(1).inner_text() + page.cell(2).inner_text()
    screenshot(page, f"another_{page.lacks.replace(' ', '_')}")
