"""The site of `make site`: built without a warning, every link leads somewhere, every name and error is reached.

It is built once, by two processes, and no lesson is run.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

import course
import labkit
from tests.tools import make_site
from tests.tools.course_table import course as lessons_of_the_course

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.spawns, pytest.mark.filterwarnings("ignore:'myst_parser")]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site, with one lesson that has been run: a chart of it has words. Any warning would be an error."""
    folder = tmp_path_factory.mktemp("site")
    notebook = nbformat.read(ROOT / "notebooks" / "12_when_it_hangs.ipynb", as_version=4)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    figure = {"data": [{"type": "bar", "y": [1, 2]}], "layout": {}, "config": {"displaylogo": False}}
    chart = {"application/vnd.plotly.v1+json": figure, "text/plain": "<Chart>"}
    words = {"image/png": {"alt": "two ranks wait for the third"}}
    cell.outputs = [nbformat.v4.new_output("display_data", chart, metadata=words)]
    (folder / "notebooks").mkdir()
    nbformat.write(notebook, folder / "notebooks" / "12_when_it_hangs.ipynb")
    return make_site.build(folder / "notebooks", folder / "site").parent


class Page(HTMLParser):
    """A page's links, what can be linked in it, and what it loads."""

    def __init__(self, file):
        super().__init__()
        self.links, self.ids, self.loads = [], set(), []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.add(found.get("id"))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe") or (tag == "link" and found.get("rel") == "stylesheet"):
            self.loads += [found[name] for name in ("src", "href") if found.get(name)]


@pytest.fixture(scope="session")
def pages(site):
    """Every page of the site, read, by its file."""
    return {file: Page(file) for file in site.rglob("*.html") if "_static" not in file.parts}


def of_this_site(link):
    return not urlsplit(link).scheme


def test_every_link_leads_somewhere(site, pages):
    assert len(pages) > 100
    lost = []
    for file, page in pages.items():
        for link in filter(of_this_site, (*page.links, *page.loads)):
            target, fragment = urlsplit(link).path, unquote(urlsplit(link).fragment)
            there = (file.parent / unquote(target)).resolve() if target else file
            if not there.is_file() or (fragment and there in pages and fragment not in pages[there].ids):
                lost.append(f"{file.relative_to(site)}: {link}")
    assert lost == [], "\n".join(lost)


def test_nothing_is_loaded_from_a_network(pages):
    for file, page in pages.items():
        assert [load for load in page.loads if urlsplit(load).scheme not in ("", "data")] == [], file


def test_the_reference_has_every_public_name(site, pages):
    index = pages[site / "reference" / "index.html"]
    for name in labkit.__all__:
        is_module = name in labkit._MODULES
        page = f"module.labkit.{name}.html" if is_module else f"labkit.{name}.html"
        target = f"module-labkit.{name}" if is_module else f"labkit.{name}"
        assert target in pages[site / "reference" / page].ids, name
        assert f"{page}#{target}" in index.links, name
    of_the_course = pages[site / "reference" / "course.html"]
    for name in course.__all__:
        target = f"module.course.{name}.html#module-course.{name}" if name in course._MODULES else f"#course.{name}"
        assert target in of_the_course.links, name


def test_every_kind_of_error_has_a_page_and_what_messages_name_leads_to_it(site, pages):
    linked = set(pages[site / "errors" / "index.html"].links)
    for name in make_site.error_pages():
        assert f"{name}.html" in linked
        assert (site / "errors" / f"{name}.html").is_file()


def test_the_lessons_are_listed_with_question_and_picture_and_shown_as_they_ran(site, pages):
    text = (site / "lessons.html").read_text()
    for lesson in lessons_of_the_course():
        assert f"notebooks/{lesson.name}.html" in pages[site / "lessons.html"].links
        assert f'alt="a chart of lesson {lesson.title}"' in text
    assert "Some were not run here" in text
    ran = (site / "notebooks" / "12_when_it_hangs.html").read_text()
    assert 'aria-label="two ranks wait for the third"' in ran
    assert '"y":[1,2]' in ran


def test_every_name_of_labkit_in_a_docstring_is_a_link(site):
    lost = []
    for folder in ("reference", "errors"):
        for file in (site / folder).rglob("*.html"):
            plain = re.sub(r"<a [^>]*>.*?</a>", "", file.read_text(), flags=re.DOTALL)
            names = re.findall(
                r"<code[^>]*><span class=\"pre\">((?:labkit|course)(?:\.\w+)+)(?:\(\))?</span></code>", plain
            )
            lost += [f"{file.relative_to(site)}: {name}" for name in names]
    assert lost == [], "\n".join(lost)


def test_lists_of_arguments_and_code_are_shown_as_such(site):
    text = (site / "reference" / "labkit.launch.html").read_text()
    for name in ("world_size", "stall_s", "trace"):
        assert f"<strong>{name}</strong>" in text
    assert "Raises" in text
    assert not re.search(r"<p>(Args|Raises|Attributes|Returns):", text)
