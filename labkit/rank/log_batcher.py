"""Log calls of one rank, collected and sent together, so that a call costs an append."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable
from numbers import Real
from typing import Any

from labkit.protocol.events import Log


class LogBatcher:
    """Collects log calls and sends them as `Log` records.

    A message costs the notebook, which has no core of its own, more than the rank: how many there are decides what
    logging costs. A call after a pause of `interval_s` is sent at once; those that follow sooner wait for it, and are
    sent together. What is left of a burst is sent by a background thread. What still fails: of a rank that is killed,
    the calls of its last `interval_s` may be lost.
    """

    interval_s = 0.1

    def __init__(self, rank: int, send: Callable[[Log], None], start_s: float) -> None:
        self._rank, self._send, self._start_s = rank, send, start_s
        self._names: tuple[str, ...] = ()
        self._steps, self._times, self._values = array("q"), array("d"), array("d")
        self._records: list[Log] = []
        """Earlier calls, with other names, that have not been sent either."""
        self._last_flush_s = 0.0
        self._lock = threading.RLock()
        self._closed = threading.Event()
        threading.Thread(target=self._flush_the_rest, name="labkit-log", daemon=True).start()

    def add(self, step: int, names: tuple[str, ...], values: list[float]) -> None:
        """Take one log call; blocks only if the notebook is far behind.

        Raises OverflowError for a step beyond 64 bits.
        """
        now = time.time()
        with self._lock:
            if names != self._names:
                self._begin_record(names)
            self._steps.append(step)
            self._times.append(now - self._start_s)
            self._values.extend(values)
            if self._is_due(now):
                self.flush()

    def flush(self) -> None:
        """Send what was collected."""
        with self._lock:
            self._begin_record(self._names)
            while self._records:
                self._last_flush_s = time.time()
                self._send(self._records.pop(0))

    def close(self) -> None:
        """Send the rest and end the background thread."""
        self._closed.set()
        self.flush()

    def _begin_record(self, names: tuple[str, ...]) -> None:
        if self._steps:
            self._records.append(Log(self._rank, self._names, self._steps, self._times, self._values))
            self._steps, self._times, self._values = array("q"), array("d"), array("d")
        self._names = names

    def _is_due(self, now_s: float) -> bool:
        return not 0 <= now_s - self._last_flush_s < self.interval_s  # the clock may have been set back

    def _flush_the_rest(self) -> None:
        pause_s = self.interval_s
        while not self._closed.wait(pause_s):
            with self._lock:
                now_s = time.time()
                if not self._is_due(now_s):  # the caller has sent meanwhile
                    pause_s = self._last_flush_s + self.interval_s - now_s
                    continue
                pause_s = self.interval_s
                self.flush()


def number(name: str, value: Any, rank: int) -> float:
    """Return a logged value as a float. Raises TypeError, naming rank and value, if it is not one number."""
    shape = getattr(value, "shape", ())
    if not isinstance(value, (str, bytes)) and math.prod(shape) == 1:
        try:
            single = value.item() if hasattr(value, "item") else value
            if isinstance(single, Real):
                return float(single)
        except (ValueError, RuntimeError, OverflowError):
            if getattr(value, "is_cuda", False):
                raise  # the device's own error: it has nothing to do with what was logged
            # A meta tensor, a huge int: refused below, with the rank and the name.
    what = f"a {type(value).__name__} of shape {tuple(shape)}" if shape else f"a {type(value).__name__} ({value!r:.60})"
    raise TypeError(
        f"rank {rank}: worker.log({name}=…) takes one number, got {what}. "
        "Log a float, an int or a tensor of one element, for example loss.item()"
    )
