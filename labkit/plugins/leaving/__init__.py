"""A rank's process that is done is gone at once: it does not take apart first what torch has registered with itself.

Exit handlers are run, as in any program, and `torch.library` has one for each of two hundred groups of operators that
come with torch. They take 25 ms, and a forked rank has to copy 30 MB of dispatch tables for them. The process ends by
`os._exit`, and nobody asks for an operator after that.
"""

from __future__ import annotations

import atexit
import weakref


def rank_begins() -> None:
    """Prepare a rank's process: this exit handler is run before those of the modules that are there already."""
    atexit.register(_leave_operators)


def _leave_operators() -> None:
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        _, function, _, _ = finalizer.peek() or (None,) * 4
        if getattr(function, "__module__", "") == "torch.library":
            finalizer.atexit = False
