"""Beside a run: asks the thread that waits for it for the lines of a rank's debugger (`labkit.rank.debugging`)."""

from __future__ import annotations

import sys
import threading
from typing import Any

from labkit.monitor.observers import RunObserver
from labkit.protocol import events
from labkit.protocol.job import Job
from labkit.rank.debugging import LINE, Prompt
from labkit.ui import kernel

NEXT_S = 0.5
"""How long a rank that was given a line may take to ask for the next one before another rank has its turn."""


class Debugger(RunObserver):
    """Asks for one rank after another, by `input`. The others wait: at their own prompts, or in a collective."""

    title = "debugger"

    def __init__(self, wait: bool) -> None:
        """Take whether somebody waits for the run."""
        self._waits = wait and threading.current_thread() is threading.main_thread()
        self._changed = threading.Condition()
        self._asking: dict[int, str] = {}
        self._current: int | None = None

    def begin(self, job: Job) -> Job:
        """Return the job with what its ranks need to ask, or to say why nobody can answer."""
        return job.with_hook(Prompt(self.why_nobody_answers()))

    def why_nobody_answers(self) -> str:
        """Return why nobody can answer what a rank asks; "" if somebody can."""
        if not self.run.engine.sends_words:
            return "its ranks are on a cluster, and are reached through files"
        if kernel.has_kernel() and not kernel.is_interactive():
            return "the notebook runs headless"
        if not kernel.has_kernel() and not (sys.stdin and sys.stdin.isatty()):
            return "there is neither a notebook nor a terminal"
        return "" if self._waits else "no cell waits for the run (wait=False, or launched from a thread)"

    def take(self, event: Any) -> None:
        """Note that a rank asks, or has ended. While one asks, `stall_s` does not run."""
        with self._changed:
            match event:
                case events.Asks():
                    self._asking[event.rank] = event.text
                case events.Exit() | events.Failure() | events.Result() | events.Stopped():
                    self._asking.pop(event.rank, None)
                    if event.rank == self._current:
                        self._current = None
                case _:
                    return
            (self.run.paused_by.add if self._asking else self.run.paused_by.discard)(self)
            self._changed.notify_all()

    def attend(self) -> None:
        """Ask for one line, if a rank asks; in the thread that waits for the run. `quit` stops the run."""
        with self._changed:
            if self._current is not None:
                self._changed.wait_for(lambda: self._current is None or self._current in self._asking, NEXT_S)
            if not self._asking or self.run.stopping:
                return
            rank = self._current if self._current in self._asking else min(self._asking)
            text = self._asking[rank]
        said, _, prompt = text.rpartition("\n")
        if said:
            print(said, flush=True)
        try:
            line = input(prompt)  # the kernel's own, while a cell runs
        except EOFError:  # Ctrl-D
            line = "quit"
        if line.strip() in ("q", "quit", "exit"):
            self.run.ask_to_stop()
            return
        with self._changed:
            if self._asking.pop(rank, None) is None:  # it has ended meanwhile
                return
            self._current = rank
            if not self._asking:
                self.run.paused_by.discard(self)
        self.run.engine.say(rank, LINE + line)
