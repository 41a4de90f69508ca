"""What labkit's errors mean, and what to do: the help pages, `labkit/failures/pages/*.md`, one for each kind.

A message ends with the line that shows its page, wherever labkit is installed and with no network.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "failures" / "pages"


def help_hint(page: str) -> str:
    """Return the line of a message that names its page."""
    return f'What to do: labkit.explain("{page}")'


class Page(str):
    """A text that a notebook shows as Markdown, and a terminal as it is."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_markdown_(self) -> str:
        return str(self)


def explain(page: str = "") -> Page:
    """Return the help page of a message: what it means, with an example, and what to do. Without a name, the list.

    >>> labkit.explain("hang")
    """
    pages = {file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.md"))}
    if page in pages:
        return Page(pages[page])
    if page:
        raise ValueError(f"there is no page {page!r}; there are {', '.join(pages)}")
    return Page("".join(f'* `labkit.explain("{name}")`: {text.splitlines()[0]}\n' for name, text in pages.items()))
