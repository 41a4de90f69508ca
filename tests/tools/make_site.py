"""The site: `python -m tests.tools.make_site --notebooks build/notebooks --out build/site`, for `make site`.

Sphinx makes it of the guide, of the lessons as `make notebooks` has run them (none is run here), and of docstrings: a
reference of every public name, and a page for each kind of error. What is written here is only which page lists what.
Sources lie as in the repository, so that a page's links lead to the same files. Any warning is an error.
"""

from __future__ import annotations

import argparse
import html
import importlib
import inspect
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import plotly.io
from plotly.offline import get_plotlyjs
from sphinx.cmd.build import build_main

import course
import labkit
from labkit.protocol.pages import FOLDER, explain
from tests.tools.course_table import course as lessons_of_the_course

PLOTLY, PLOTLY_JS = "application/vnd.plotly.v1+json", "plotly.min.js"

ROOT = Path(__file__).parents[2]
CONFIGURATION = Path(__file__).parent / "site"
NOTEBOOKS = ROOT / "notebooks"
GUIDE = (
    "set_up",
    "launch",
    "compare",
    "your_notebook",
    "your_code",
    "recipes",
    "clusters",
    "lessons",
    "mistakes",
    "figures",
    "limits",
)
"""The pages of notebooks/guide, in the order in which one reads them."""

ERRORS = {"gpu": "GPU", "slurm": "SLURM", "labkit_failed": "labkit failed"}
"""Titles of errors' pages that are no plain words."""

RETURNED = {
    "labkit.failures.frames": ("FailedFrame", "Frames"),
    "labkit.failures.stacks": ("RankStack", "Stacks"),
    "labkit.trace.trace": ("Trace",),
}
"""What public names return or take, of modules of labkit that are not public."""


def error_pages() -> list[str]:
    """Return the names of the errors' pages."""
    return sorted(file.stem for file in FOLDER.glob("*.md"))


# The reference


def underlined(title: str, line: str = "=") -> str:
    """Return a heading as reStructuredText has it."""
    return f"{title}\n{line * len(title)}\n\n"


def directive(path: str, thing: object) -> str:
    """Return what has autodoc show a name."""
    if inspect.isclass(thing):
        inherited = "   :inherited-members: Exception, object, tuple, dict, str\n" if path == "labkit.Run" else ""
        return f".. autoclass:: {path}\n   :members:\n{inherited}\n"
    kind = "function" if callable(thing) and hasattr(thing, "__code__") else "data"
    return f".. auto{kind}:: {path}\n\n"


def members(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Yield what a public module offers: functions and classes of its own, or what its `__all__` names.

    Not what the course has of labkit, which is shown there.
    """
    listed = getattr(module, "__all__", None)
    for name in listed or vars(module):
        thing = getattr(module, name)
        if module.__name__.startswith("course") and getattr(thing, "__module__", "").startswith("labkit."):
            continue
        if listed or (
            not name.startswith("_")
            and getattr(thing, "__module__", None) == module.__name__
            and (inspect.isfunction(thing) or inspect.isclass(thing))
        ):
            yield name, thing


def table(paths: Iterable[str]) -> str:
    """Return a table of names with what their docstrings say first."""
    return ".. autosummary::\n   :nosignatures:\n\n" + "".join(f"   {path}\n" for path in paths) + "\n"


def toctree(pages: Iterable[str]) -> str:
    """Return the list of the pages below one."""
    return ".. toctree::\n   :hidden:\n\n" + "".join(f"   {page}\n" for page in pages) + "\n"


def module_page(path: str, module: ModuleType) -> str:
    """Return the page of a public module."""
    shown = [(f"{path}.{name}", thing) for name, thing in members(module) if not inspect.ismodule(thing)]
    text = underlined(path) + f".. automodule:: {path}\n   :no-members:\n\n.. currentmodule:: None\n\n"
    # Some have a page of their own, under a shorter name.
    elsewhere = {
        f"{path}.{name}": f"labkit.{name}"
        for name, thing in members(module)
        if inspect.isclass(thing) and getattr(labkit, name, None) is thing
    }
    text += table(elsewhere.get(path, path) for path, _ in shown)
    return text + "".join(directive(*each) for each in shown if each[0] not in elsewhere)


def write_reference(out: Path) -> None:
    """Write the sources of the reference: a page for each name of labkit, and for each module."""
    out.mkdir(parents=True)
    names = [name for name in labkit.__all__ if name not in labkit._MODULES]
    index = underlined("Reference") + table(f"labkit.{name}" for name in names)
    for name in names:
        path, thing = f"labkit.{name}", getattr(labkit, name)
        (out / f"{path}.rst").write_text(underlined(path) + directive(path, thing), encoding="utf-8")
    index += underlined("Modules", "-")
    modules = {f"labkit.{name}": getattr(labkit, name) for name in sorted(labkit._MODULES)}
    pages = [f"labkit.{name}" for name in names]
    for path, module in modules.items():
        pages.append(f"module.{path}")
        (out / f"{pages[-1]}.rst").write_text(module_page(path, module), encoding="utf-8")
    index += table(modules) + underlined("What these return", "-")
    returned: dict[str, object] = {}
    text = underlined("What these return")
    for path, names in RETURNED.items():
        text += f".. py:module:: {path}\n\n.. currentmodule:: None\n\n"
        of_module = {f"{path}.{name}": getattr(importlib.import_module(path), name) for name in names}
        text += "".join(directive(*each) for each in of_module.items())
        returned |= of_module
    (out / "returned.rst").write_text(text, encoding="utf-8")
    index += table(returned)
    of_the_course = {f"course.{name}": getattr(course, name) for name in course.__all__}
    text = (
        underlined("course")
        + ".. automodule:: course\n   :no-members:\n\n.. currentmodule:: None\n\n"
        + table(of_the_course)
    )
    below = []
    for path, thing in of_the_course.items():
        if inspect.ismodule(thing):
            below.append(f"module.{path}")
            (out / f"{below[-1]}.rst").write_text(module_page(path, thing), encoding="utf-8")
        else:
            text += directive(path, thing)
    (out / "course.rst").write_text(text + toctree(below), encoding="utf-8")
    index += underlined("The course", "-") + "What lessons import from the folder beside them: :doc:`course`.\n\n"
    (out / "index.rst").write_text(index + toctree([*pages, "returned", "course"]), encoding="utf-8")


def write_errors(out: Path) -> None:
    """Write the sources of the errors' pages, and the page that lists them."""
    out.mkdir(parents=True)

    def linked(text: str) -> str:
        return re.sub(r'`labkit\.explain\("(\w+)"\)`', r"[\g<0>](\1.md)", text)

    for name in error_pages():
        title = ERRORS.get(name, name.replace("_", " ").capitalize())
        (out / f"{name}.md").write_text(f"# {title}\n\n{linked(explain(name))}", encoding="utf-8")
    pages = "\n".join(error_pages())
    head = "What labkit's errors mean, and what to do: a page for each kind, which every message of that kind names."
    page = f"# Errors\n\n{head}\n\n{linked(explain())}\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
    (out / "index.md").write_text(page, encoding="utf-8")


# The guide and the lessons


def write_lessons(notebooks: Path, out: Path) -> None:
    """Copy the lessons, as they ran where they were run, and write the page that lists them."""
    rows = ["# Lessons", "", "Each asks a question, answers it by real training, and checks its own claim."]
    lessons = lessons_of_the_course()
    if not all((notebooks / f"{lesson.name}.ipynb").exists() for lesson in lessons):
        rows += ["Some were not run here, and have no charts: `make notebooks` runs them."]
    rows += ["", "| lesson | question | | needs | runs in |", "|---|---|---|---|---|"]
    for lesson in lessons:
        name = f"notebooks/{lesson.name}.ipynb"
        picture = f"![a chart of lesson {lesson.title}](notebooks/images/lessons/{lesson.name}.png)"
        rows.append(f"| [{lesson.title}]({name}) | {lesson.question} | {picture} | {lesson.needs} | {lesson.runs_in} |")
        ran = notebooks / f"{lesson.name}.ipynb"
        copy_lesson(ran if ran.exists() else NOTEBOOKS / ran.name, out / name)
    rows += ["", "```{toctree}", ":hidden:", "", *(f"notebooks/{lesson.name}" for lesson in lessons), "```"]
    (out / "lessons.md").write_text("\n".join(rows) + "\n", encoding="utf-8")


def copy_lesson(source: Path, target: Path) -> None:
    """Copy a lesson. Its charts are live, with the words that labkit has given them."""
    notebook = json.loads(source.read_text("utf-8"))
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if figure := output.get("data", {}).pop(PLOTLY, None):
                words = output["metadata"].get("image/png", {}).get("alt", "")
                options = {"config": figure.pop("config", None), "include_plotlyjs": f"../_static/{PLOTLY_JS}"}
                drawn = plotly.io.to_html(figure, full_html=False, **options)
                output["data"]["text/html"] = f'<div role="figure" aria-label="{html.escape(words)}">{drawn}</div>'
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(notebook), encoding="utf-8")


def write_guide(out: Path) -> None:
    """Copy the guide, and every file of the repository that a page of it links to."""
    assert {page.stem for page in (NOTEBOOKS / "guide").glob("*.md")} == set(GUIDE), "a page of the guide is not listed"
    pages = [f"notebooks/guide/{name}" for name in GUIDE]
    pages += ["notebooks/COMING_FROM", "notebooks/TEACHING", ".github/SECURITY"]
    for name in pages:
        source = ROOT / f"{name}.md"
        copy(source, out)
        for link in re.findall(r"\]\(([^)#:\s]+)", source.read_text("utf-8")):
            linked = (source.parent / link).resolve()
            if linked.is_file() and linked.suffix not in (".md", ".ipynb"):
                copy(linked, out)
    shutil.copytree(NOTEBOOKS / "images", out / "notebooks" / "images", dirs_exist_ok=True)
    listed = "\n".join(pages)
    page = f"# Guide\n\n```{{toctree}}\n:maxdepth: 2\n\n{listed}\n```\n"
    (out / "guide.md").write_text(page, encoding="utf-8")


def copy(source: Path, out: Path) -> None:
    """Copy a file of the repository to where it lies there."""
    target = out / source.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def write_sources(notebooks: Path, out: Path) -> None:
    """Lay out the sources of all pages in a folder, which is made anew."""
    shutil.rmtree(out, ignore_errors=True)
    write_reference(out / "reference")
    write_errors(out / "errors")
    write_guide(out)
    write_lessons(notebooks, out)
    text = (CONFIGURATION / "index.md").read_text("utf-8").format(lessons=len(lessons_of_the_course()))
    (out / "index.md").write_text(text, encoding="utf-8")


def build(notebooks: Path, out: Path) -> Path:
    """Build the site into a folder, and return its first page.

    Raises RuntimeError where Sphinx has warned of anything.
    """
    sources = out.parent / f"{out.name}-sources"
    write_sources(notebooks, sources)
    shutil.rmtree(out, ignore_errors=True)
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--fresh-env", "--jobs", str(os.cpu_count() or 1)]
    options += ["--conf-dir", str(CONFIGURATION), "--doctree-dir", str(out.parent / f"{out.name}-doctrees")]
    if build_main([*options, str(sources), str(out)]):
        raise RuntimeError("Sphinx has warned; see above")
    (out / "_static" / PLOTLY_JS).write_text(get_plotlyjs(), encoding="utf-8")
    return out / "index.html"


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notebooks", type=Path, default=Path("build/notebooks"), help="what `make notebooks` wrote")
    parser.add_argument("--out", type=Path, default=Path("build/site"), help="made anew")
    arguments = parser.parse_args()
    print(f"the site: {build(arguments.notebooks, arguments.out)}")


if __name__ == "__main__":
    main()
