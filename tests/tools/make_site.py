"""The site: `python -m tests.tools.make_site --notebooks build/notebooks --out build/site`, for `make site`.

One page with three beginnings; one for those who come from scripts (`tests/tools/make_coming_from.py`); the executed
lessons, which `make notebooks` has written (none is run here); and a reference made of the docstrings by pdoc, in which
each kind of error has a page. All of it is read offline, from the disk: the reference's search loads its index as a
script, which a browser allows there, and not as data, which it does not (https://github.com/mitmproxy/pdoc/issues/298).
"""

from __future__ import annotations

import argparse
import html
import importlib
import inspect
import json
import pkgutil
import re
import shutil
import unittest.mock
import warnings
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jinja2
import mistune
import pdoc.doc
import pdoc.render
from markupsafe import Markup
from pygments.formatters import HtmlFormatter

import course
import labkit
import labkit.failures.pages
from tests.tools import make_coming_from
from tests.tools.course_pages import Lesson, index
from tests.tools.course_pages import course as lessons_of_the_course
from tests.tools.make_coming_from import anchor

TEMPLATES = Path(__file__).parent / "site_templates"
SHOWN = {
    "comparison.reading": ("columns",),
    "comparison.replay": ("Devices",),
    "comparison.why": ("Why",),
    "launchers.ray.working_dir": ("without_runs",),
    "launchers.slurm.options": ("table",),
    "comparison.measuring": ("Measured",),
    "failures.frames": ("FailedFrame", "Frames"),
    "monitor.searching": ("Found",),
    "failures.stacks": ("RankStack", "Stacks"),
    "ui.process_table": ("HeldProcess", "Processes"),
    "engines.standby": ("memory", "off", "on", "pids"),
    "trace.trace": ("Trace",),
}
"""What readers use of modules of labkit that are not public, or not all of it: what public functions return.
By a module that has it; its page is that of the module that defines it."""

BACK = '<p><a href="../index.html">← labkit: where to begin</a></p>'


class Entry(NamedTuple):
    """A link on the first page."""

    title: str
    href: str
    says: Markup


def error_pages() -> list[str]:
    """Return the names of the errors' pages, in the order in which `labkit.failures.pages` lists them."""
    listed: list[str] = re.findall(
        r"^\* `labkit\.failures\.pages\.(\w+)`", labkit.failures.pages.__doc__ or "", re.MULTILINE
    )
    found = {module.name for module in pkgutil.iter_modules(labkit.failures.pages.__path__)}
    assert set(listed) == found, "labkit/failures/pages/__init__.py lists other pages than there are"
    return listed


class ModulePage(pdoc.doc.Module):
    """A module under the name by which readers know it: `labkit.standby`, wherever it lies."""

    def __init__(self, module: ModuleType, name: str) -> None:
        super().__init__(module)
        self.modulename, self.taken_from = name, (name, "")
        for each in getattr(module, "__all__", ()):
            module.__dict__.setdefault(each, getattr(module, each))  # which comes when it is first asked for


def documented() -> dict[str, pdoc.doc.Module]:
    """Return every module that has a page: the public ones, those of what they return, the errors."""
    modules = {f"labkit.{name}": getattr(labkit, name) for name in sorted(labkit._MODULES)}
    modules["labkit.failures.pages"] = labkit.failures.pages
    modules |= {
        f"labkit.failures.pages.{page}": importlib.import_module(f"labkit.failures.pages.{page}")
        for page in error_pages()
    }
    modules |= {f"course.{name}": getattr(course, name) for name in sorted(course._MODULES)}
    pages = {name: ModulePage(module, name) for name, module in {**modules, "labkit": labkit, "course": course}.items()}
    for package in (labkit, course):
        names = sorted(package._MODULES)
        pages[package.__name__].submodules = [pages[f"{package.__name__}.{name}"] for name in names]
    shown: dict[str, list[str]] = {}
    for path, names in SHOWN.items():
        module = importlib.import_module(f"labkit.{labkit._MODULES.get(path, path)}")
        for name in names:
            shown.setdefault(getattr(module, name).__module__, []).append(name)
    found = {page.obj.__name__: page for page in pages.values()}
    for home, names in shown.items():
        page = found.get(home) or pages.setdefault(home, ModulePage(importlib.import_module(home), home))
        page.members = {name: page.members[name] for name in names}
    run = pages["labkit"].members["Run"]
    vars(run).update(own_members=list(run.members.values()), inherited_members={})  # all of it is a reader's
    # An instance that is imported: pdoc finds no docstring of its own.
    vars(pages["labkit"].members["runs"]).update(docstring=inspect.getdoc(type(labkit.runs)))
    return pages


def write_reference(out: Path) -> None:
    """Write the reference, with its search, into a folder."""
    dark = HtmlFormatter(style="github-dark").get_style_defs(".pdoc-code")
    pdoc.render.configure(
        docformat="google",
        include_undocumented=False,
        template_directory=TEMPLATES,
        footer_text=f"labkit {labkit.__version__}",
    )
    pdoc.render.env.globals["dark_code"] = dark
    modules = documented()
    with warnings.catch_warnings():
        # Of a NamedTuple's __init__, which Python makes in no module of ours.
        warnings.filterwarnings("ignore", "Error parsing type annotation", UserWarning)
        for module in modules.values():
            file = out / f"{module.fullname.replace('.', '/')}.html"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(pdoc.render.html_module(module, modules), encoding="utf-8")
        (out / "search.js").write_text(search_index(modules), encoding="utf-8")


def search_index(modules: dict[str, pdoc.doc.Module]) -> str:
    """Return the reference's search as a script, for which "timeout_s" is one word.

    pdoc makes two of it, and "s" is in too many others. So the browser prepares the index, in a moment, also where node
    is at hand, which would have prepared it with pdoc's words.
    """
    with unittest.mock.patch("pdoc.render.precompile_index", lambda documents, _: json.dumps(documents)):
        script = pdoc.render.search_index(modules)
    between_words = r"""/[\s\-.;&_'"=,()]+|<[^>]*>/"""
    assert script.count(between_words) == 1, "pdoc has another search by now"
    return script.replace(between_words, between_words.replace("_", ":"))


def copy_lessons(notebooks: Path, out: Path) -> bool:
    """Copy the executed lessons and their pages; return whether there are any."""
    out.mkdir(parents=True, exist_ok=True)
    for file in (*notebooks.glob("*.html"), *notebooks.glob("*.ipynb")):
        shutil.copy(file, out)
    if not (out / "index.html").exists():
        index(out, {})
    first = out / "index.html"
    first.write_text(first.read_text(encoding="utf-8").replace("<body>", f"<body>{BACK}", 1), encoding="utf-8")
    return any(out.glob("[0-9]*.html"))


def first_page(out: Path, have_lessons: bool) -> Path:
    """Write the page with the three beginnings, and return it."""
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    templates.filters["code"] = code
    lessons = lessons_of_the_course()

    def lesson_link(lesson: Lesson) -> Markup:
        title = html.escape(lesson.title)
        has_page = (out / "lessons" / f"{lesson.name}.html").exists()
        return Markup(f'<a href="lessons/{lesson.name}.html">{title}</a>' if has_page else title)

    def name(path: str, title: str = "") -> Markup:
        return Markup(f'<a href="reference/labkit.html#{path}"><code>{html.escape(title or path)}</code></a>')

    page = out / "index.html"
    text = templates.get_template("index.html.jinja2").render(
        lessons=lessons,
        by_number={lesson.name.partition("_")[0]: lesson for lesson in lessons},
        have_lessons=have_lessons,
        lesson_link=lesson_link,
        name=name,
        names=[entry(f"labkit.{each}") for each in labkit.__all__],
        course=[entry(f"course.{each}") for each in course.__all__],
        errors={each: entry(f"labkit.failures.pages.{each}") for each in error_pages()},
    )
    page.write_text(text, encoding="utf-8")
    return page


def coming_from_page(out: Path) -> None:
    """Write the page for those who come from scripts."""
    body = str(mistune.html(make_coming_from.page()))
    body = re.sub(r"<h3>(.*?)</h3>", lambda found: f'<h3 id="{anchor(html.unescape(found[1]))}">{found[1]}</h3>', body)
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True)
    text = templates.get_template("coming_from.html.jinja2").render(body=Markup(body))
    (out / "coming_from.html").write_text(text, encoding="utf-8")


def entry(path: str) -> Entry:
    """Return the link to a public name, or to the page of an error."""
    parent, _, name = path.rpartition(".")
    thing = getattr(importlib.import_module(parent), name, None)
    thing = importlib.import_module(path) if thing is None else thing
    at = f"{path.replace('.', '/')}.html" if inspect.ismodule(thing) else f"{parent}.html#{name}"
    return Entry(path if parent in ("labkit", "course") else name, f"reference/{at}", code(first_sentence(thing)))


def first_sentence(thing: object) -> str:
    """Return what a docstring says first."""
    said = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.?]) (?=[A-Z])", said, maxsplit=1)[0]


def code(text: str) -> Markup:
    """Return text with what is between backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text)))


def build(notebooks: Path, out: Path) -> Path:
    """Build the site into a folder, which is made anew, and return its first page."""
    shutil.rmtree(out, ignore_errors=True)
    write_reference(out / "reference")
    coming_from_page(out)
    return first_page(out, copy_lessons(notebooks, out / "lessons"))


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notebooks", type=Path, default=Path("build/notebooks"), help="what `make notebooks` wrote")
    parser.add_argument("--out", type=Path, default=Path("build/site"), help="made anew")
    arguments = parser.parse_args()
    print(f"the site: {build(arguments.notebooks, arguments.out)}")


if __name__ == "__main__":
    main()
