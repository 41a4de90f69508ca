"""The notebook as the driver has it: lines of JSON go there, and one word comes back."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from typing import Any


class Notebook:
    """What the notebook says, and how it is told something."""

    def __init__(self, descriptor: int) -> None:
        self._words = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self.wants_end = threading.Event()
        """Set once the ranks are to be ended, or nobody needs them any more."""

    def say(self, kind: str, **what: Any) -> None:
        """Tell the notebook something."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._words.write(json.dumps({"kind": kind, **what}) + "\n")

    def notice(self, text: str, queued: bool = False) -> None:
        """Tell the notebook where the ranks are, or what they wait for."""
        self.say("notice", text=text, queued=queued)

    def warn_once(self, topic: str, text: str) -> None:
        """Tell the notebook of something that went wrong without ending the run; the same topic only once."""
        if topic not in self._warned:
            self._warned.add(topic)
            self.say("warned", topic=topic, text=text)

    def listen(self) -> None:
        """Take words from now on, in a thread of its own."""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for _ in sys.stdin.buffer:  # "end" or "leave"; without a notebook, neither
            break
        self.wants_end.set()
