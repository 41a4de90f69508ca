"""The page of an error: a module of `labkit.errors` whose docstring says what the message means and what to do.

A message names its page by what shows it wherever labkit is installed, with no network: Python's own `help`.
"""

from __future__ import annotations


def more(page: str) -> str:
    """Return the line of a message that names its page."""
    return f'What to do: help("labkit.errors.{page}")'
