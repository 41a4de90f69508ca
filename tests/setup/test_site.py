"""The site of `make site`: every link leads somewhere, every name and error is reached, and its search works offline.

No lesson is run here. Screenshots are kept in build/screenshots; look at them.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from playwright.sync_api import Error, sync_playwright

import course
import labkit
from tests.support.browser import CHROMIUM_ARGUMENTS, LONG_S
from tests.support.programs import CHROMIUM
from tests.tools import course_pages, make_site

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, with the page of one lesson, which is as it was committed: not run."""
    folder = tmp_path_factory.mktemp("site")
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    notebook = nbformat.read(ROOT / "notebooks" / "14_when_it_hangs.ipynb", as_version=4)
    nbformat.write(notebook, notebooks / "14_when_it_hangs.ipynb")
    course_pages.page(notebooks / "14_when_it_hangs.ipynb")
    course_pages.index(notebooks, {"14_when_it_hangs": "ran in 5 s"})
    return make_site.build(notebooks, folder / "site").parent


class Page(HTMLParser):
    """A page's links, and what can be linked in it."""

    def __init__(self, file):
        super().__init__()
        self.links, self.ids, self.loads = [], set(), []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.add(found.get("id"))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("script", "link", "img", "iframe"):
            self.loads += [found[name] for name in ("src", "href") if found.get(name)]


@pytest.fixture(scope="module")
def pages(site):
    """Every page of the site, read, by its file."""
    return {file: Page(file) for file in site.rglob("*.html")}


def of_this_site(link):
    return not urlsplit(link).scheme


def test_every_link_leads_somewhere(site, pages):
    assert len(pages) > 30
    lost = []
    for file, page in pages.items():
        if file.parent.name == "lessons" and file.name != "index.html":
            continue  # which leads to lessons that are not here
        for link in filter(of_this_site, page.links):
            target, fragment = urlsplit(link).path, unquote(urlsplit(link).fragment)
            there = (file.parent / unquote(target)).resolve() if target else file
            if there not in pages or (fragment and fragment not in pages[there].ids):
                lost.append(f"{file.relative_to(site)}: {link}")
    assert lost == []


def test_nothing_is_loaded_from_a_network(pages):
    for file, page in pages.items():
        assert [load for load in page.loads if urlsplit(load).scheme not in ("", "data")] == [], file


def test_the_first_page_begins_for_three_readers_and_reaches_every_name_and_every_error(site):
    text, page = (site / "index.html").read_text(), Page(site / "index.html")
    for beginning in ("I want to learn", "I have a training function", "I have a hang"):
        assert f"<h3>{beginning}</h3>" in text
    for name in set(labkit.__all__) - set(labkit._MODULES):
        assert f"reference/labkit.html#{name}" in page.links
    for name in labkit._MODULES:
        assert f"reference/labkit/{name}.html" in page.links
    for name in course.__all__:
        there = f"course/{name}.html" if name in course._MODULES else f"course.html#{name}"
        assert f"reference/{there}" in page.links
    errors = [link for link in page.links if link.startswith("reference/labkit/failures/pages/")]
    assert {Path(link).stem for link in errors} == set(make_site.error_pages())
    assert "lessons/14_when_it_hangs.html" in page.links
    assert "lessons/06_ddp.html" not in page.links, "it was not run"
    assert "lessons/index.html" in page.links


def test_from_every_page_a_link_leads_back(site, pages):
    for file, page in pages.items():
        where = file.relative_to(site)
        if where.parts[0] == "reference":
            assert f"{'../' * (len(where.parts) - 1)}index.html" in page.links, where
    assert "../index.html" in pages[site / "lessons" / "index.html"].links


def test_the_search_knows_every_name_and_every_error(site):
    index = (site / "reference" / "search.js").read_text()
    for name in set(labkit.__all__) - set(labkit._MODULES):
        assert f'"fullname": "labkit.{name}"' in index
    for page in make_site.error_pages():
        assert f'"fullname": "labkit.failures.pages.{page}"' in index


def test_every_name_of_labkit_in_a_docstring_is_a_link(site):
    lost = []
    for file in (site / "reference").rglob("*.html"):
        names = re.findall(r"<code>((?:labkit|course)(?:\.\w+)+)(?:\(\))?</code>", file.read_text())
        lost += [f"{file.relative_to(site)}: {name}" for name in names]
    assert lost == []


def test_lists_of_arguments_are_shown_as_lists(site):
    text = (site / "reference" / "labkit.html").read_text()
    launch = text.partition('<section id="launch">')[2].partition("</section>")[0]
    for name in ("world_size", "timeout_s", "log_to"):
        assert f"<strong>{name}:</strong>" in launch
    assert re.search(r"<h6[^>]*>Raises:</h6>", launch)
    assert not re.search(r"<p>(Args|Raises|Attributes|Returns):", text)


def test_without_lessons_the_site_says_how_to_run_them(tmp_path):
    assert not make_site.copy_lessons(tmp_path / "nothing", tmp_path / "lessons")
    page = make_site.first_page(tmp_path, have_lessons=False)
    assert "make&nbsp;notebooks" in page.read_text()
    assert (tmp_path / "lessons" / "index.html").read_text().count("not run") > 30


# In a browser, from the disk


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


@pytest.mark.browser
@pytest.mark.spawns
def test_words_typed_into_the_reference_find_names_and_errors_without_a_network(site, chromium):
    page = chromium.new_page()
    page.set_default_timeout(1000 * LONG_S)
    asked, wrong = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto((site / "index.html").as_uri())
    page.locator("input[type=search]").fill("launch")
    page.keyboard.press("Enter")
    found = page.locator(".search-result > a")
    found.first.wait_for()
    assert found.first.inner_text().startswith("def labkit.launch(")
    box = page.locator("nav.pdoc input[type=search]")
    assert box.input_value() == "launch"
    box.click()
    box.press("Control+a")
    page.keyboard.type("timeout_s hang")
    found.first.filter(has_text=re.compile("^labkit.failures.pages.hang$")).wait_for()
    found.first.click()
    page.locator("h2", has_text="What to do").wait_for()
    assert page.url.endswith("/reference/labkit/failures/pages/hang.html")
    assert {urlsplit(url).scheme for url in asked} <= {"file", "data"}
    assert wrong == []
    page.close()


SHOWN = {
    "first": "index.html",
    "reference": "reference/labkit.html",
    "error": "reference/labkit/failures/pages/hang.html",
}


def take_picture(page, file):
    """Keep what the page looks like. Where no core is free, Chromium is "unable to capture" now and then."""
    try:
        page.screenshot(path=file)
    except Error:
        page.screenshot(path=file)


@pytest.mark.browser
@pytest.mark.spawns
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [800, 1280, 400])
def test_pages_fit_and_can_be_read_in_both_themes(width, scheme, site, chromium):
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(1000 * LONG_S)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for name, path in SHOWN.items():
        page.goto((site / path).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        take_picture(page, SCREENSHOTS / f"site_{name}_{width}_{scheme}.png")
        colors = page.evaluate(
            "[getComputedStyle(document.querySelector('main')).color, getComputedStyle(document.body).backgroundColor]"
        )
        text, background = (sum(map(int, re.findall(r"\d+", color)[:3])) / 3 for color in colors)
        assert abs(text - background) > 128, f"{name}: {colors}"
        assert (background < 128) == (scheme == "dark"), name
    page.close()
