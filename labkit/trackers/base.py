"""What a tracker is, and which arguments it is shown."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from labkit.protocol.redaction import has_secret_name, redact, shown
from labkit.protocol.text import printable


class Tracker(Protocol):
    """What `log_to` takes: any object with these two methods, called by one thread.

    Three more are called if they are there: `begin(name, parameters)` with the run's name and the function's arguments,
    before the first step; `flush()` when there is nothing more to write just now; `end(status)` with the run's status
    before `close`. With an attribute `by_rank` that is true, it gets a curve of every rank in place of the mean. A
    `log` with a third parameter `time_s` gets when the step was logged, as `time.time()`: it may be written much later.

    Steps that begin again in one run (several fits, or folds) have curves of their own: "loss", then "loss/2".
    """

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write the values that are new at a step. Steps of one curve come in order, those of several may not."""

    def close(self) -> None:
        """Write the rest. Called once, also after `log` has failed."""


class LibraryTracker:
    """A tracker that needs a library, which is imported when a run begins, in the tracker's own thread.

    Raises ModuleNotFoundError if the library is not installed where the notebook runs.
    """

    library: ClassVar[str]
    """What is imported …"""
    package: ClassVar[str]
    """… and what to install for it."""

    def __init__(self, by_rank: bool) -> None:
        if not isinstance(by_rank, bool):
            raise TypeError(f"by_rank is True, a curve of every rank, or False, their mean; got {by_rank!r:.60}")
        self.by_rank = by_rank
        if importlib.util.find_spec(self.library) is None:
            raise ModuleNotFoundError(
                f"{type(self).__name__} needs the package {self.library!r}, which is not installed where the notebook "
                f"runs; no rank was started. Install it (pip install {self.package}), or leave it out of log_to",
                name=self.library,
            )

    def __repr__(self) -> str:
        return type(self).__name__


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a tracker can show: numbers, texts, None, and short lists of them as text.

    What is a secret by its name or by how it looks is left out, as in reports of failures.
    """
    kept = {}
    for name, value in parameters.items():
        if _is_plain(value):
            kept[printable(name)] = printable(shown(name, value)) if isinstance(value, str) else shown(name, value)
        elif isinstance(value, (list, tuple)) and len(value) <= 20 and all(map(_is_plain, value)):
            text = shown(name, value) if has_secret_name(name, value) else redact(str(value))
            kept[printable(name)] = printable(text)
    return kept


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
