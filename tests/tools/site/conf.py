"""Sphinx's configuration of the site. `tests/tools/make_site.py` lays out the pages, of which this knows nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

sys.path[:0] = [str(Path(__file__).parents[3] / "notebooks")]  # where the course lies

import labkit  # noqa: E402

for short in labkit._MODULES:  # `labkit.standby`, wherever it lies
    sys.modules.setdefault(f"labkit.{short}", getattr(labkit, short))

project = "labkit"
author = "the authors of labkit"
version = release = labkit.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
default_role = "code"  # docstrings have one backtick, as Markdown has

nb_execution_mode = "off"  # the lessons are shown as they ran
myst_heading_anchors = 4  # as GitHub has them
myst_all_links_external = False
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
suppress_warnings = [
    "myst.header",  # lessons put a heading of any level above a cell
    "misc.highlighting_failure",  # `%%ranks $world_size` is IPython's, and no lexer's
]

html_theme = "pydata_sphinx_theme"
html_title = "labkit"
html_static_path = ["_static"]
html_css_files = ["labkit.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # a page on the disk may not read another
html_theme_options: dict[str, Any] = {
    "navbar_end": ["theme-switcher"],
    "navigation_with_keys": False,
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
    "pygments_light_style": "a11y-light",
    "pygments_dark_style": "a11y-dark",
    "logo": {"text": "labkit"},
}
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True

NAME = re.compile(r"(?:labkit|course)(?:\.\w+)+(?:\(\))?")
"""What in a text may be a name of the reference."""


def link_names(app: Sphinx, document: nodes.document) -> None:
    """Make links of names: code in a sentence that is `labkit.launch`, say, in docstrings, pages and lessons."""
    for literal in list(document.findall(nodes.literal)):
        if not NAME.fullmatch(literal.astext()) or isinstance(literal.parent, nodes.reference | pending_xref):
            continue
        target = literal.astext().removesuffix("()")
        link = pending_xref("", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, refwarn=False)
        link["refdoc"] = app.env.current_document.docname
        literal.replace_self(link)
        link += literal


def mark_code(app: Sphinx, what: str, name: str, thing: object, options: Any, lines: list[str]) -> None:
    """Put `::` before a docstring's indented code, which Markdown does without. Drop what `dict` says of itself."""
    if what == "data" and type(thing).__module__ == "builtins" and lines[0] in (type(thing).__doc__ or ""):
        lines.clear()
    marked: list[str] = []
    indent = in_code = 0
    for number, line in enumerate(lines):
        here = len(line) - len(line.lstrip())
        if line.strip():
            before = lines[number - 1].strip() if number else ""
            if in_code and here < in_code:
                in_code = 0
            if number and not before and not in_code and here >= indent + 4:
                in_code = here
                marked += [f"{' ' * indent}::", ""]
            if not in_code:
                bullet = re.match(r"\s*(?:\* |\d+\. )", line)
                indent = len(bullet[0]) if bullet else here
        marked.append(line)
    lines[:] = marked


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect what docstrings need besides Sphinx's own extensions."""
    app.connect("doctree-read", link_names)
    app.connect("autodoc-process-docstring", mark_code, priority=100)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
