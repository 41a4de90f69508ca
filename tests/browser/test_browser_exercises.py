"""An exercise solved as a learner does, in a real JupyterLab. Screenshots are in build/screenshots; look at them."""

from __future__ import annotations

import json

import nbformat
import pytest

from course import exercises
from course.exercises.progress import FILE
from tests.support.browser import SCREENSHOTS

pytestmark = pytest.mark.browser

NAME = "average_gradients"
START = "00_start_here.ipynb"
STATEMENT, ANSWER, CHECK, QUESTION, REVEAL = range(1, 6)
"""Places of the notebook's cells."""


NOTEBOOKS = {
    "exercise.ipynb": [
        "import course\nanswers = None",
        f'course.exercises.statement("{NAME}")',
        exercises.starter(NAME).rstrip("\n"),
        f"course.check({NAME}, answers)",
        'guess = course.predict("Which rank is first?", "rank 0", "rank 1", "no one knows")\nguess',
        'guess.reveal("no one knows")',
    ]
}


def screenshots(page, name, cell):
    """Take one at each width, with this cell in sight."""
    for width in (800, 1280):
        page.page.set_viewport_size({"width": width, "height": 900})
        page.page.wait_for_timeout(300)
        page.cell(cell).scroll_into_view_if_needed()
        page.page.screenshot(path=SCREENSHOTS / f"{name}_{width}.png")


def answer(page, source):
    """Replace what stands in the answer's cell, and run it and the check."""
    page.cell(ANSWER).locator(".cm-content").click()
    page.page.keyboard.press("Control+a")
    page.page.keyboard.insert_text(source)
    for cell in (ANSWER, CHECK):
        page.run_cell(cell)
        page.wait_until_run(cell)


def test_a_learner_is_wrong_reads_why_opens_a_hint_is_right_and_the_strip_knows(page):
    page.open("exercise.ipynb")
    for cell in range(CHECK + 1):
        page.run_cell(cell)
        page.wait_until_run(cell)
    page.cell(STATEMENT).locator("h4", has_text="Average the gradients").wait_for()
    shown = page.cell(CHECK)
    shown.locator("text=/not answered yet: write your answer in the place of/").wait_for()

    head = exercises.starter(NAME).replace("    ...\n", "")
    loop = "    for parameter in model.parameters():\n        if parameter.grad is not None:\n"
    wrong = f"{head}{loop}            dist.all_reduce(parameter.grad)"
    answer(page, wrong)
    shown.locator("text=/2 ranks, rank 0, with .*summed, not averaged/").wait_for()
    print(shown.locator(".jp-OutputArea-output").first.inner_html())
    assert shown.locator("summary", has_text="what the ranks printed").count() == 0
    hint = shown.locator("text=/replaces .* by the sum over the ranks/")
    assert not hint.is_visible()
    shown.locator("summary", has_text="Hint 1").click()
    hint.wait_for()
    assert not shown.locator("summary", has_text="Hint 3").is_visible()
    screenshots(page, "exercise_wrong", CHECK)
    assert not json.loads((page.folder / FILE).read_text())["exercises"][NAME]["solved"]

    answer(page, f"{wrong}\n            parameter.grad /= dist.get_world_size()")
    shown.locator("b", has_text=f"{NAME}: right").wait_for()
    shown.locator("svg[role=img]").wait_for()
    screenshots(page, "exercise_right", CHECK)
    assert json.loads((page.folder / FILE).read_text())["exercises"][NAME]["solved"]
    assert page.real_errors() == []


def test_a_prediction_is_made_by_a_click_and_answered_by_the_run(page):
    page.page.set_viewport_size({"width": 1280, "height": 900})
    page.run_cell(QUESTION)
    page.cell(QUESTION).locator("button", has_text="rank 1").click()
    page.page.wait_for_timeout(300)
    page.run_cell(REVEAL)
    page.cell(REVEAL).locator("text=You said rank 1; it was no one knows: surprised?").wait_for()
    page.cell(QUESTION).locator(".jp-OutputArea span", has_text="rank 1").wait_for()  # in the place of the buttons
    assert page.cell(QUESTION).locator("button", has_text="rank 1").count() == 0
    screenshots(page, "prediction", REVEAL)
    assert page.real_errors() == []


@pytest.mark.wide
def test_the_strip_of_the_first_notebook_shows_what_was_solved(page):
    page.open(START)
    page.run_cell(1)
    page.wait_until_run(1)
    number = next(
        place
        for place, cell in enumerate(c for c in nbformat.read(page.folder / START, 4).cells if c.cell_type == "code")
        if "course.strip(" in cell.source
    )
    page.run_cell(number)
    page.wait_until_run(number)
    strip = page.cell(number).locator("a", has_text="03")
    strip.wait_for()
    assert strip.inner_text().split() == ["03", "●○○"]
    screenshots(page, "exercise_strip", number)
    assert page.real_errors() == []
