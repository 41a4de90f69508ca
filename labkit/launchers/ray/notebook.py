"""The notebook as the driver has it: events go there, and one word comes back."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from typing import Any

from labkit.launchers import job_events
from labkit.protocol import events


class Notebook:
    """What the notebook says, and how it is told something."""

    def __init__(self, descriptor: int) -> None:
        self._words = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self.wants_end = threading.Event()
        """Set once the ranks are to be ended, or nobody needs them any more."""

    def say(self, what: Any) -> None:
        """Send the notebook an event, or the `Answer` that comes before all."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._words.write(f"{pickle.dumps(what).hex()}\n")  # a line, as `RayJob` expects

    def notice(self, text: str, queued: bool = False) -> None:
        """Tell the notebook where the ranks are, or what they wait for."""
        self.say(job_events.Notice(-1, text, queued))

    def warn(self, topic: str, text: str) -> None:
        """Tell the notebook of something that goes wrong without ending the run; "" if it no longer does."""
        self.say(events.Warned(-1, topic, text))

    def warn_once(self, topic: str, text: str) -> None:
        """Tell the notebook the same, but of a topic only once."""
        if topic not in self._warned:
            self._warned.add(topic)
            self.warn(topic, text)

    def listen(self) -> None:
        """Take words from now on, in a thread of its own."""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for _ in sys.stdin.buffer:  # "end" or "leave"; without a notebook, neither
            break
        self.wants_end.set()
