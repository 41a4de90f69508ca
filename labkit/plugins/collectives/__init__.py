"""In which collective ranks missed each other: in `run.stacks()`, and in what a hang or a failure says.

on each rank                                                  in the notebook
hooks      asked where it stands, failing, or leaving alone ► beside     what every rank has said, put together
recorder   what PyTorch's flight recorder has of its calls    missed     in which call ranks missed each other
                                                              mismatch   what that says of a failure

It rests on `labkit.plugins.stacks`, which asks the ranks, and on `labkit.plugins.root_cause`, whose answer it betters;
without either it says nothing.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.monitor.companion import Asked, Companion
    from labkit.protocol.job import RankHooks


def companion(asked: Asked) -> Companion | None:
    """Return what takes in what ranks say of their collectives."""
    if not all(map(importlib.util.find_spec, ("labkit.plugins.stacks", "labkit.plugins.root_cause"))):
        return None
    from labkit.plugins.collectives.beside import Calls

    return Calls()


def rank_hooks() -> RankHooks:
    """Return what says which collectives a rank has called."""
    from labkit.plugins.collectives.hooks import SaysCalls

    return SaysCalls()
