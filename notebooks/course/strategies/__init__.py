"""Strategies: ways to train in parallel, one short file each, with the same small interface (`labkit.Strategy`).

`ALL` has them by title, in the order in which the lessons meet them: of every file of this folder that has a `LESSON`,
each class that says its own `title`. Each is a name of this package, too. None launches or draws: a rank makes one and
calls `step`; see `labkit.benchmark.run_strategy`.
"""

from __future__ import annotations

from typing import Any

from course.registry import strategies
from labkit import Strategy

OneProcess = Strategy

ALL = strategies(__name__, __path__, OneProcess)
"""Every strategy by its title, or its slug."""

_BY_NAME = {strategy.__name__: strategy for strategy in ALL.values()}

__all__ = ["ALL", "OneProcess", *_BY_NAME]


def __getattr__(name: str) -> Any:
    if name not in _BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return _BY_NAME[name]
