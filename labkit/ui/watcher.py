"""What shows a run in a thread of its own, and when its last chart is drawn: where it keeps no launch waiting.

The problem: a chart takes as long as a short run does, and a loop may launch hundreds. What does not work: that each
launch waits for its chart, or that charts are drawn beside the next runs, as one thread at a time runs Python. What is
done: they are drawn one at a time, once no launch has begun for a moment; where nobody watches, at the end of the cell
at the latest, because nobody takes what comes after it. What still fails: a kernel that is ended within that moment
leaves the summary without the chart.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import abstractmethod

from labkit.monitor.record import RunRecord
from labkit.ui import formatting, kernel

LOG = logging.getLogger(__name__)

PAUSE_S = 0.2
"""Time since the last launch began after which last charts are drawn."""

AT_END_S = 10.0
"""Time for which the end of a cell waits for each of them at most, where nobody watches."""

_begun: weakref.WeakSet[Watcher] = weakref.WeakSet()
_last_launch_s = 0.0
_drawing = threading.Lock()


def launch_begins() -> None:
    """Say that a run has been launched: last charts of others wait."""
    global _last_launch_s
    _last_launch_s = time.monotonic()


class Watcher(threading.Thread):
    """Shows one run while it goes on, says how it ended, and draws what stays."""

    def __init__(self, run: RunRecord) -> None:
        super().__init__(name="labkit-view", daemon=True)
        self._run = run
        self._said = threading.Event()

    def begin(self) -> None:
        """Begin to show the run."""
        if (shell := kernel.shell()) is not None:
            shell.events.register("post_run_cell", _after_cell)  # once, however often this is called
        _begun.add(self)
        self.start()

    def run(self) -> None:
        """Show the run until it is over and that has been said; then draw what stays, in turn."""
        try:
            self._show()
        except Exception:
            LOG.exception("run %r could not be shown. It is not affected", self._run.name)
            self._run.over.wait()
            self._show_plainly(formatting.plain(self._run))
        finally:
            self._said.set()
        with _drawing:
            while (left_s := _last_launch_s + PAUSE_S - time.monotonic()) > 0:
                time.sleep(left_s)
            try:
                self._show_last()
            except Exception:
                LOG.exception("run %r: its chart could not be drawn. It is not affected", self._run.name)

    @abstractmethod
    def _show(self) -> None:
        """Show the run until it is over, and how it ended."""

    @abstractmethod
    def _show_plainly(self, text: str) -> None:
        """Show in a few words how the run ended, where all else has failed."""

    @abstractmethod
    def _show_last(self) -> None:
        """Draw what stays beside that."""

    def finish(self) -> None:
        """Wait until it has been said how the run ended: what the cell does next comes below it."""
        self._said.wait(AT_END_S)


def _after_cell(_: object) -> None:
    for watcher in [] if kernel.is_interactive() else list(_begun):
        if watcher._run.over.is_set():
            watcher.join(AT_END_S)
