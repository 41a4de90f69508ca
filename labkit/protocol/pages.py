"""What a message says besides its own words: the page of an error.

A page is a module of `labkit.failures.pages` whose docstring says what the message means and what to do. A message
ends with the line that shows it wherever labkit is installed, with no network: Python's own `help`.
"""

from __future__ import annotations


def help_hint(page: str) -> str:
    """Return the line of a message that names its page."""
    return f'What to do: help("labkit.failures.pages.{page}")'
