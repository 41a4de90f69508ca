"""The course as static pages: a page of each executed notebook, and one that leads through them. Readable offline."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import NamedTuple

import nbformat

START = Path(__file__).parents[2] / "notebooks" / "00_start_here.ipynb"

PAGE_STYLE = """
.course { margin: 1em auto; padding: 0 1em; font-family: system-ui, sans-serif; }
@media (max-width: 700px) {
  body.jp-Notebook { padding: 0 4px; }
  .jp-InputPrompt, .jp-OutputPrompt { display: none; }
  .jp-OutputArea-output, .jp-RenderedMarkdown, .jp-InputArea-editor { overflow-x: auto; }
  .jp-RenderedImage img { max-width: 100%; height: auto; }
}
"""

INDEX = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Parallel PyTorch, live in your notebook</title>
<style>
body { margin: 0 auto; max-width: 1100px; padding: 1em; font-family: system-ui, sans-serif; line-height: 1.45; }
body { color: #222; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 310px), 1fr)); gap: 14px; }
section { border: 1px solid #DDD; border-radius: 8px; padding: 12px 14px; display: flex; flex-direction: column; }
h1 { margin: 0.3em 0; line-height: 1.2; } h2 { font-size: 1.05em; margin: 0; } section p { margin: 0.4em 0; }
img { width: 100%; height: auto; } small { color: #666; margin-top: auto; } a { color: #0072B2; }
</style></head>
<body><h1>Parallel PyTorch, live in your notebook</h1>
<p>Each lesson asks a question, answers it by running real parallel training, and checks its own claim at the end. These
pages are what the notebooks showed when they were last run; to change something and run it again, open them in
JupyterLab (<code>make lab</code>).</p>
<main>
CARDS
</main></body></html>
"""


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


ALIKE = 60
"""Characters of a picture's data, at its beginning and at its end, by which it is known."""


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


def page(executed: Path) -> Path:
    """Write an HTML page of an executed notebook, readable without a network, and give it."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(embed_images=True, require_js_url="", jquery_url="", mathjax_url="")
    body, _ = exporter.from_filename(str(executed))
    body = _with_words(body, executed)
    body = re.sub(r'(href="\d\d[a-z]?_\w+)\.ipynb"', r'\1.html"', body)  # lessons link to lessons
    body = body.replace("</head>", f"<style>{PAGE_STYLE}</style></head>", 1)
    body = re.sub(r"(<body[^>]*>)", r'\1<p class="course"><a href="index.html">← the course</a></p>', body, count=1)
    target = executed.with_suffix(".html")
    target.write_text(body, encoding="utf-8")
    return target


def _with_words(body: str, executed: Path) -> str:
    """Give a page whose pictures have their alternative texts, which nbconvert's template leaves out."""
    words = {}
    for cell in nbformat.read(executed, as_version=4).cells:
        for output in cell.get("outputs", []):
            if alt := output.get("metadata", {}).get("image/png", {}).get("alt"):
                data = output.data.get("image/png", "").replace("\n", "")
                words[data[:ALIKE] + data[-ALIKE:]] = html.escape(alt)

    def named(picture: re.Match[str]) -> str:
        data = re.search(r'base64,([^"]*)"', picture[0])
        key = "" if data is None else "".join(data[1].split())
        said = words.get(key[:ALIKE] + key[-ALIKE:])
        return re.sub(r' alt="[^"]*"', lambda _: f' alt="{said}"', picture[0]) if said else picture[0]

    return re.sub(r'<img\b[^>]*src="data:image/png;base64,[^>]*>', named, body)


def index(out: Path, runs: dict[str, str]) -> Path:
    """Write the page that leads through the course, a card per lesson, and give it.

    `runs` says of each notebook that was run how that went. A lesson whose page lies in the folder is linked.
    """
    target = out / "index.html"
    cards = "\n".join(_card(lesson, out, runs.get(lesson.name, "not run")) for lesson in course())
    target.write_text(INDEX.replace("CARDS", cards), encoding="utf-8")
    return target


def _card(lesson: Lesson, out: Path, went: str) -> str:
    title, link = html.escape(lesson.title), f'<a href="{lesson.name}.html">'
    picture = ""
    if (out / f"{lesson.name}.html").exists():
        title = f"{link}{title}</a>"
        chart = _last_chart(out / f"{lesson.name}.ipynb")
        picture = f'{link}<img alt="a chart of this lesson" src="{chart}"></a>' if chart else ""
    question = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(lesson.question))
    needs = f"needs {html.escape(lesson.needs)} · " if lesson.needs else ""
    return f"<section><h2>{title}</h2><p>{question}</p>{picture}<small>{needs}{html.escape(went)}</small></section>"


def _last_chart(executed: Path) -> str:
    """Give the picture that an executed lesson's last chart carries, as a data URL; "" if there is none."""
    outputs = [o for cell in nbformat.read(executed, as_version=4).cells for o in cell.get("outputs", [])]
    pictures = [o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    return f"data:image/png;base64,{pictures[-1]}".replace("\n", "") if pictures else ""
