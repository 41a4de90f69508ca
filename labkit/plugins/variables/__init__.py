"""What the reader's variables were when a rank failed: in the error, in the run's summary, in `error.frames`.

And which of them keeps a function from being sent to the ranks.

on each rank                                              in the notebook
hooks        the frames of an exception ── attached ────► frames    the reader's own, in words and as HTML
describing   a value in a few words                        unpicklable which of them cannot be pickled
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked, Companion
    from labkit.protocol.job import RankHooks


def companion(asked: Asked) -> Companion:
    """Return what takes in what ranks say of their variables."""
    from labkit.plugins.variables.frames import Variables

    return Variables()


def rank_hooks() -> RankHooks:
    """Return what describes variables when a rank fails."""
    from labkit.plugins.variables.hooks import Describes

    return Describes()


def unsendable(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return which value of a call cannot be pickled, why, and what to do; None if that is not known."""
    from labkit.plugins.variables.unpicklable import find

    for where, value, why in find(fn, args, kwargs):
        what = f"{where} is a {type(value).__name__}, which cannot be pickled ({why})"
        return f"{what}. Make it inside the function instead, or pass what it is made from"
    return None
