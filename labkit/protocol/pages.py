"""What a message says besides its own words: the page of an error, and the reader's line of a warning.

A page is a module of `labkit.failures.pages` whose docstring says what the message means and what to do. A message
ends with the line that shows it wherever labkit is installed, with no network: Python's own `help`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback

from labkit.protocol.modules import HERE


def help_hint(page: str) -> str:
    """Return the line of a message that names its page."""
    return f'What to do: help("labkit.failures.pages.{page}")'


def reader_stacklevel() -> int:
    """Return the `stacklevel` with which a warning of the caller points at the reader's line, not at one of labkit."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
    # Decorators of contextlib are between our own functions.
    ours = itertools.takewhile(lambda file: file.startswith(HERE) or file == contextlib.__file__, files)
    return 1 + sum(1 for _ in ours)
