"""Whose turn it is: one run at a time has a session's ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from labkit.engines.base import Engine
from labkit.protocol.pages import help_hint


class Turn(NamedTuple):
    """How one engine comes to have the ranks, and to have them no longer."""

    take: Callable[[Engine], None]
    """Raises RuntimeError if another run has them."""
    give_back: Callable[[Engine], None]
    """Does nothing if the engine does not have them."""


class Holder(NamedTuple):
    """Who has the ranks now."""

    name: str
    engine: Engine
    since_s: float


class Turns:
    """One run at a time. Every turn is given back, also by a run that could not begin."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.holder: Holder | None = None
        """Who has the ranks, if anybody."""

    def of(self, name: str, when_taken: Callable[[], None] | None = None) -> Turn:
        """Return the turn of a run; `when_taken` is called when it has begun."""

        def take(engine: Engine) -> None:
            self._take(name, engine)
            if when_taken is not None:
                when_taken()

        return Turn(take, self._give_back)

    def _take(self, name: str, engine: Engine) -> None:
        with self._lock:
            if (holder := self.holder) is not None:
                raise RuntimeError(
                    f"run {holder.name!r} holds these ranks, for {time.monotonic() - holder.since_s:.0f} s now. Wait "
                    "for it (run.wait()), stop it (run.stop()), or reserve other ranks with labkit.Session(…)\n"
                    + help_hint("session")
                )
            self.holder = Holder(name, engine, time.monotonic())

    def _give_back(self, engine: Engine) -> None:
        with self._lock:
            if self.holder is not None and self.holder.engine is engine:
                self.holder = None
