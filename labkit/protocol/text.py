"""Text from the user's code, made fit for pages and files."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection


def printable(text: str) -> str:
    r"""Return text that UTF-8 can carry, with half a surrogate pair written as `\ud800`.

    A string of Python's may contain one: from `os.fsdecode`, `surrogateescape`, or bad JSON. Comms of Jupyter, HTML,
    JSON as Jupyter writes it and `print` refuse it, each with an error that hides what was to be shown.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def cut_off(text: str, characters: int) -> str:
    """Return text of so many characters at most; what is left out is marked by "…"."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def slug(title: object) -> str:
    """Return a title as one types it: `fsdp2_x_tensor_parallel` for "FSDP2 × tensor parallel"."""
    return "_".join(re.findall(r"[^\W_]+", str(title).lower().replace("×", "x")))


def titled(name: str, titles: Collection[str]) -> str:
    """Return the title with this name or slug. Raises ValueError, with all titles and slugs, if there is none."""
    if name in titles:
        return name
    found = [title for title in titles if slug(title) == slug(name)]
    if len(found) != 1:
        known = ", ".join(title if slug(title) == title else f"{title} ({slug(title)})" for title in titles)
        raise ValueError(f"known are {known or 'none'}; got {name!r}")
    return found[0]


def print_text(text: str, flush: bool = True) -> None:
    """Print text, whatever characters stdout can carry."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=flush)
