"""The table of lessons in notebook 00, and how long a lesson takes its reader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import nbformat

START = Path(__file__).parents[2] / "notebooks" / "00_start_here.ipynb"

ROW = re.compile(r"^\| \[([^]]+)\]\((\d\d[a-z]?_\w+)\.ipynb\) \|([^|]+)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
"""A lesson in notebook 00's table."""


class Lesson(NamedTuple):
    """A lesson as the table in notebook 00 has it."""

    title: str
    name: str
    """The notebook's, without .ipynb."""
    question: str
    needs: str
    """Numbers of the lessons that it builds on."""
    runs_in: str
    """How long its cells took when that was last written down."""


def course() -> list[Lesson]:
    """Give every lesson, from the table in notebook 00."""
    cells = nbformat.read(START, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    rows = ROW.findall(text)
    return [Lesson(*map(str.strip, row)) for row in rows]


WORDS_A_MINUTE, LINES_A_MINUTE, MINUTES_AN_EXERCISE = 150, 12, 8
"""What notebook 00 says its routes are reckoned with."""


def minutes(lesson: Lesson, until: str = "") -> float:
    """Estimate the minutes that a reader needs for a lesson: for reading, running, and writing answers.

    `until` is a heading at which to stop; the cells' time then counts in proportion to the cells.
    """
    cells = nbformat.read(START.parent / f"{lesson.name}.ipynb", as_version=4).cells
    read = next((i for i, cell in enumerate(cells) if until and until in cell.source), len(cells))
    words = sum(len(cell.source.split()) for cell in cells[:read] if cell.cell_type == "markdown")
    code = [cell for cell in cells[:read] if cell.cell_type == "code"]
    lines = sum(cell.source.count("\n") + 1 for cell in code)
    exercises = sum("exercise" in cell.metadata.get("tags", []) for cell in code)
    runs_min = float(lesson.runs_in.partition(" ")[0] or 0) / 60 * read / len(cells)
    return words / WORDS_A_MINUTE + lines / LINES_A_MINUTE + exercises * MINUTES_AN_EXERCISE + runs_min


def write_times(took_s: dict[str, float]) -> None:
    """Write down in notebook 00 how long lessons took."""
    notebook = nbformat.read(START, as_version=4)

    def timed(row: re.Match[str]) -> str:
        title, name, question, needs, _ = row.groups()
        took = took_s.get(name)
        return row[0] if took is None else f"| [{title}]({name}.ipynb) |{question}|{needs}| {took:.0f} s |"

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = ROW.sub(timed, cell.source)
    nbformat.write(notebook, START)
