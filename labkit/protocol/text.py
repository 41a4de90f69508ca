"""Text from the reader's code, made fit for pages, files and trackers."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return text that UTF-8 can carry, with half a surrogate pair written as `\ud800`.

    A string of Python's may contain one: from `os.fsdecode`, `surrogateescape`, or bad JSON. Comms of Jupyter, HTML,
    JSON as Jupyter writes it, trackers and `print` all refuse it, each with an error that hides what was to be shown.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text
