"""`breakpoint()` in a rank, answered in a real JupyterLab. The screenshot is in build/screenshots; look at it."""

from __future__ import annotations

import pytest

from tests.support.browser import SCREENSHOTS

pytestmark = pytest.mark.browser

FUNCTION = """import os, time, torch, labkit
import torch.distributed as dist

def train(worker):
    weight = torch.full((3,), float(worker.rank))
    for step in range(2):
        worker.log(loss=1 / (1 + step))
        while step == 1 and not os.path.exists("drawn"):
            time.sleep(0.02)
        if step == 1:
            breakpoint()
        dist.all_reduce(weight)
    return weight.tolist()"""
"""Asked before a busy browser has made the view, it would write to its console that parts of it have gone."""


NOTEBOOKS = {"debugged.ipynb": [FUNCTION, "run = labkit.launch(train, world_size=2)", "run.results"]}


def test_five_commands_are_typed_under_the_cell_that_runs(page):
    page.open("debugged.ipynb")
    page.run_cell(0)
    page.wait_until_run(0)
    page.run_cell(1)
    page.page.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for(state="attached")
    (page.folder / "drawn").touch()
    panel = page.page.locator(".labkit-debugger")
    said, line = panel.locator(".said"), panel.locator(".line")
    panel.wait_for()
    page.page.screenshot(path=SCREENSHOTS / "debugger_first.png")
    panel.locator(".where", has_text="ranks 0 and 1 stand at Cell In[1], line 11").wait_for()
    commands = {
        "p weight": "(rank 0) p weight\ntensor([1., 1., 1.])",
        "rank 1": "(rank 0) rank 1\n> Cell In[1](11)train()",
        "p worker.rank, step": "(rank 1) p worker.rank, step\n(1, 1)",
        "next": "(rank 1) next\n> Cell In[1](12)train()\n-> dist.all_reduce(weight)",
    }
    for number, (command, answer) in enumerate(commands.items()):
        line.click()
        page.page.keyboard.type(command, delay=20)
        page.page.keyboard.press("Enter")
        page.wait_for("answer => document.querySelector('.labkit-debugger .said').textContent.includes(answer)", answer)
        assert line.input_value() == "", number
    assert page.is_running(1)
    panel.locator(".prompt", has_text="(rank 1)").wait_for()
    for width in (800, 1280):
        page.page.set_viewport_size({"width": width, "height": 900})
        page.page.wait_for_timeout(300)
        line.scroll_into_view_if_needed()
        page.page.screenshot(path=SCREENSHOTS / f"debugger_{width}.png")
    assert said.text_content().count("-> breakpoint()") == 2, "asked once; shown again for rank 1"
    line.fill("continue")
    line.press("Enter")
    page.wait_until_run(1)
    page.page.locator("b", has_text="train: finished").wait_for()
    page.run_cell(2)
    page.page.locator(".jp-OutputArea-output", has_text="[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]").wait_for()
    assert page.real_errors() == [], "\n".join(page.real_errors())
