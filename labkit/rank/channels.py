"""How a rank speaks with the notebook during one job: events go there, words ("stop") come back.

`PipeChannel` is that of a rank which the notebook's process started. The cluster wing has others, through files.
"""

from __future__ import annotations

import threading
import time
import traceback
from multiprocessing import get_context
from multiprocessing.context import assert_spawning
from multiprocessing.queues import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from labkit.protocol import events
from labkit.protocol.job import RankHooks

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class EventQueue(SimpleQueue[Any]):
    """A queue from one process to one other, with nothing that a kill could leave behind.

    `multiprocessing.SimpleQueue` guards both of its ends with semaphores, for several processes at each. They have
    names in the system, which stay when this process, its ranks and multiprocessing's resource tracker are killed at
    once. Here threads of one process share an end, so a lock of the process's own does.
    """

    def __init__(self) -> None:
        self._reader, self._writer = get_context("spawn").Pipe(duplex=False)
        self._lock_the_ends()

    def __getstate__(self) -> Any:
        assert_spawning(self)
        return self._reader, self._writer

    def __setstate__(self, state: Any) -> None:
        self._reader, self._writer = state
        self._lock_the_ends()

    def _lock_the_ends(self) -> None:
        self._rlock, self._wlock, self._poll = threading.Lock(), threading.Lock(), self._reader.poll

    def close_writer(self) -> None:
        """Let go of the writing end in this process: once the other's is gone, reading raises EOFError."""
        self._writer.close()


class RankPipes(NamedTuple):
    """One rank's ends of its channels to the notebook."""

    inbox: Connection
    """Receives (rank, `Job`), then perhaps "stop"; on reserved ranks over and over, and at last "leave". Its closing
    means that the notebook is gone."""
    queue: EventQueue
    """Carries events to the notebook."""
    output: Connection
    """The write end that becomes the rank's stdout and stderr."""
    stacks: Connection
    """The write end for the main thread's stack, when the rank is asked where it stands."""

    def close(self) -> None:
        """Let go of all of them in this process."""
        for end in self:
            end.close()


class Channel:
    """A rank's channel to the notebook during one job: takes records there and knows what the notebook has said."""

    def __init__(self) -> None:
        self.stop_asked_s: float | None = None
        """When this rank heard that it should stop, as `time.monotonic()`."""
        self.rank = -1
        self.during = "starting"
        """What the rank is doing, for its report if it fails."""
        self.store: dist.Store | None = None
        self.hooks: tuple[RankHooks, ...] = ()
        """The job's, once the rank is at it."""

    def send(self, event: events.Event) -> None:
        """Send one event to the notebook."""
        raise NotImplementedError

    def receive(self, word: str) -> None:
        """Receive what the notebook sends: "stop", or what the job's hooks hear; "details" are asked for.

        Raises nothing: what cannot be answered is printed, and the thread that calls this hears the next word.
        """
        if word == "stop":  # perhaps again, for hooks that answer
            self.stop_asked_s = self.stop_asked_s or time.monotonic()
        for hooks in self.hooks:
            try:
                hooks.hear(word, self)
            except Exception:
                traceback.print_exc()
        if word == "details":
            self.send(events.Answered(self.rank))

    def end(self, event: events.Exit) -> None:
        """Tell the notebook that this rank has done its part, where the process stays; nothing is sent after it."""
        raise NotImplementedError


class PipeChannel(Channel):
    """The channel of a rank that the notebook's process started."""

    def __init__(self, queue: EventQueue, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self._queue = queue
        self._is_over, self._lock = False, threading.Lock()

    def send(self, event: events.Event) -> None:
        """Put one event on the queue. What a thread sends that outlives its job is dropped: it is no other job's."""
        with self._lock:
            if not self._is_over:
                self._queue.put(event)

    def end(self, event: events.Exit) -> None:
        """Put the last one."""
        with self._lock:
            self._is_over = True
            self._queue.put(event)
