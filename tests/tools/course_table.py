"""The guide's table of lessons, and how long a lesson takes its reader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import nbformat

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PAGE = NOTEBOOKS / "guide" / "lessons.md"

ROW = re.compile(r"^\| \[([^]]+)\]\(\.\./(\d\d_\w+)\.ipynb\) \|([^|]+)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
"""A lesson in the table."""


class Lesson(NamedTuple):
    """A lesson as the table has it."""

    title: str
    name: str
    """The notebook's, without .ipynb."""
    question: str
    needs: str
    """Numbers of the lessons that it builds on."""
    runs_in: str
    """How long its cells took when that was last written down."""


def course() -> list[Lesson]:
    """Give every lesson, from the table."""
    return [Lesson(*map(str.strip, row)) for row in ROW.findall(PAGE.read_text("utf-8"))]


WORDS_A_MINUTE, LINES_A_MINUTE, MINUTES_AN_EXERCISE = 150, 12, 8
"""What the page says its hours are reckoned with."""


def minutes(lesson: Lesson) -> float:
    """Estimate the minutes that a reader needs for a lesson: for reading, running, and writing answers."""
    cells = nbformat.read(NOTEBOOKS / f"{lesson.name}.ipynb", as_version=4).cells
    words = sum(len(cell.source.split()) for cell in cells if cell.cell_type == "markdown")
    code = [cell for cell in cells if cell.cell_type == "code"]
    lines = sum(cell.source.count("\n") + 1 for cell in code)
    exercises = sum("exercise" in cell.metadata.get("tags", []) for cell in code)
    runs_min = float(lesson.runs_in.partition(" ")[0] or 0) / 60
    return words / WORDS_A_MINUTE + lines / LINES_A_MINUTE + exercises * MINUTES_AN_EXERCISE + runs_min


def write_times(took_s: dict[str, float]) -> None:
    """Write down in the table how long lessons took."""

    def timed(row: re.Match[str]) -> str:
        title, name, question, needs, _ = row.groups()
        took = took_s.get(name)
        return row[0] if took is None else f"| [{title}](../{name}.ipynb) |{question}|{needs}| {took:.0f} s |"

    PAGE.write_text(ROW.sub(timed, PAGE.read_text("utf-8")), encoding="utf-8")
