"""The course as a whole, from within a lesson: how far its reader is, and the same training without labkit."""

from __future__ import annotations

import difflib
import html
import json
import os
import re
from pathlib import Path

COLORS = {"to do": "#E5E5E5", "begun": "#F0E442", "run to its end": "#009E73", "failed": "#D55E00"}
"""Of how far a lesson has been run."""

BOX = "display:inline-block;width:2.4em;padding:0.3em 0;margin:2px;text-align:center;border-radius:4px;color:black"


class Page:
    """HTML that shows itself in a cell; as text, what it is in a line."""

    def __init__(self, content: str, text: str) -> None:
        self.content, self.text = content, text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.content


class Script(Page):
    """A script of the course, folded away below a line that says what it is. `source` is its text."""

    def __init__(self, path: str, summary: str) -> None:
        self.source = Path(path).read_text("utf-8")
        title = f"<b>The same without labkit:</b> {html.escape(summary)} (<code>{html.escape(path)}</code>)"
        code = f"<pre style='line-height:1.35;overflow-x:auto'>{html.escape(self.source)}</pre>"
        fold = f"<details><summary style='cursor:pointer'>{title}</summary>{code}</details>"
        super().__init__(fold, f"The same without labkit: {summary} ({path})")


def script(path: str, summary: str) -> Script:
    """Return what shows a script of this folder, read from its file, so that what is shown is what was tried.

    Raises FileNotFoundError if it does not lie there: the notebook has been moved away from the course.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"no {path} in {Path.cwd()}: it lies beside the lessons; open this one where it came from"
        )
    return Script(path, summary)


def written(lesson: str | os.PathLike[str]) -> str:
    """Return the script that a cell of a lesson writes; or several cells, a part each, in their order."""
    cells = ("".join(cell["source"]) for cell in json.loads(Path(lesson).read_text("utf-8"))["cells"])
    parts = [source.partition("\n")[2] for source in cells if re.match(r"%%writefile \S+\.py\n", source)]
    return "\n\n\n".join(parts)


def diff(lesson: str, file: str | os.PathLike[str]) -> Page:
    """Return a page that shows what a script has and lacks beside that which an earlier lesson writes.

    Args:
        lesson: the earlier notebook, in this folder.
        file: the script that this lesson has written.
    """
    before = written(lesson)
    lines = list(
        difflib.unified_diff(before.splitlines(), Path(file).read_text("utf-8").splitlines(), lineterm="", n=1)
    )
    colors = {"+": "#009E73", "-": "#D55E00", "@": "#8A8A8A"}
    shown = (f"<span style='color:{colors.get(line[0], 'inherit')}'>{html.escape(line)}</span>" for line in lines[2:])
    content = f"<pre style='line-height:1.35;overflow-x:auto'>{'<br>'.join(shown)}</pre>"
    return Page(content, "\n".join(lines[2:]))


def progress() -> dict[Path, str]:
    """Return how far each lesson in this folder has been run, as it was last saved: one of `COLORS`."""
    return {lesson: how_far(lesson) for lesson in sorted(Path().glob("[0-9][0-9]*_*.ipynb"))}


def how_far(lesson: Path) -> str:
    """Return how far a notebook has been run, as its file says."""
    cells = [c for c in json.loads(lesson.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    if any(output["output_type"] == "error" for c in cells for output in c["outputs"]):
        return "failed"
    run = sum(c["execution_count"] is not None for c in cells)
    return "run to its end" if run == len(cells) else "begun" if run else "to do"


def strip(lessons: dict[Path, str]) -> Page:
    """Return the course as a strip of coloured boxes, one a lesson, each with its exercises: ● solved, ○ to do."""
    from course import exercises

    def number(lesson: Path) -> str:
        return lesson.stem.split("_")[0]

    def marks(lesson: Path) -> str:
        solved, count = exercises.of_lesson(number(lesson))
        return "●" * solved + "○" * (count - solved) or "&nbsp;"

    boxes = "".join(
        f'<a href="{lesson.name}" title="{lesson.stem.partition("_")[2].replace("_", " ")}: {state}" '
        f'style="{BOX};text-decoration:none;background:{COLORS[state]}">'
        f'{number(lesson)}<br><span style="font-size:70%">{marks(lesson)}</span></a>'
        for lesson, state in lessons.items()
    )
    key = "".join(
        f'<span style="{BOX};width:auto;padding:0.1em 0.6em;background:{color}">{state}</span>'
        for state, color in COLORS.items()
    )
    right, made = exercises.predicted()
    predicted = f"{right} of {made} predictions right" if made else ""
    content = f"<div>{boxes}</div><div style='font-size:85%'>{key} {predicted}</div>"
    return Page(content, "\n".join(f"{lesson.stem}: {state}" for lesson, state in lessons.items()))
