"""How a rank speaks with the notebook during one job: events go there, words ("stop") come back."""

from __future__ import annotations

import os
import pickle
import select
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.context import assert_spawning
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.protocol import events
from labkit.protocol.framing import MARK, framed, unframed
from labkit.protocol.job import RankHook

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch.distributed as dist

    from labkit.protocol.packed import Memory


READ_BYTES = 1 << 20
"""Read at once at most; a pipe holds less, usually 64 KiB."""

REST_S = 0.05
"""How long the rest of a message is waited for before a reader looks elsewhere."""


class CorruptMessage(Exception):  # noqa: N818 - says what came
    """What has come through a pipe is no event."""


def pack(word: Any) -> list[bytes | memoryview]:
    """Return the buffers of a message, in their order. Large bytes in it are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(word, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
    return framed(pickled, [buffer.raw() for buffer in buffers])


def send(connection: Connection, word: Any) -> None:
    """Send something to one who calls `receive`. Raises OSError if nobody is there."""
    for part in pack(word):
        connection.send_bytes(part)


def receive(connection: Connection) -> Any:
    """Return the next message.

    Raises EOFError or OSError if the other end is gone, CorruptMessage if it cannot be read.
    """
    messages = Messages()
    while not (found := messages.add(connection.recv_bytes())):
        pass
    messages.check()
    return found[0]


class Messages:
    """Puts messages together from the bytes of a pipe, wherever they are cut."""

    def __init__(self) -> None:
        self._corrupt: CorruptMessage | None = None
        self._begin()

    def _begin(self) -> None:
        self._parts = unframed()
        self._room = next(self._parts)
        self.is_partial = False
        """Whether a message has begun that has not come whole."""

    def add(self, data: bytes) -> list[Any]:
        """Take bytes; return what is whole now. Raises CorruptMessage for what is no message, and takes no more then.

        If whole messages came before it, these are returned, and `check` raises.
        """
        self.check()
        found: list[Any] = []
        try:
            for message in self._whole(memoryview(data)):
                found.append(message)  # one by one: what came before an error counts
        except (MemoryError, KeyboardInterrupt):
            raise
        except CorruptMessage as error:
            self._corrupt = error
        except BaseException as error:
            self._corrupt = CorruptMessage(f"{type(error).__name__}: {error}")
            self._corrupt.__cause__ = error
        if not found:
            self.check()
        return found

    def check(self) -> None:
        """Raise CorruptMessage if what has come, but for what was returned, is no message."""
        if self._corrupt is not None:
            raise self._corrupt

    def _whole(self, data: memoryview) -> Iterator[Any]:
        while data:
            if not (self.is_partial or MARK.startswith(begin := bytes(data[: len(MARK)]))):
                raise CorruptMessage(f"{begin!r} is not the beginning of a message")
            self.is_partial = True
            part = data[: len(self._room)]
            self._room[: len(part)] = part
            self._room, data = self._room[len(part) :], data[len(part) :]
            if not self._room:
                try:
                    self._room = next(self._parts)
                    continue
                except StopIteration as whole:
                    pickled, memory = whole.value
                # Not above: if this fails, the message would be printed with it, every byte of its tensors.
                yield pickle.loads(pickled, buffers=memory)
                self._begin()


class EventQueue:
    """A queue from one process to one other, with nothing that a kill could leave behind.

    `multiprocessing.SimpleQueue` guards both of its ends with semaphores, for several processes at each. They have
    names in the system, which stay when this process, its ranks and multiprocessing's resource tracker are killed at
    once. Here threads of one process share an end, so a lock of the process's own does. And its `get` waits for all of
    a message that has begun: indefinitely, if its writer was killed and a process that it has forked keeps the pipe
    open.
    """

    def __init__(self) -> None:
        reader, writer = get_context("spawn").Pipe(duplex=False)
        self._begin(reader, writer)

    def _begin(self, reader: Connection | None, writer: Connection) -> None:
        self.reader: Any = reader
        """The notebook's end, to wait for."""
        self._writer = writer
        self._lock = threading.Lock()
        self._unsent: list[memoryview] = []
        self._held: list[Any] = []
        """Of what is unsent: the memory is theirs."""
        self._messages = Messages()

    def __getstate__(self) -> Any:
        assert_spawning(self)
        return self._writer

    def __setstate__(self, state: Any) -> None:
        self._begin(None, state)

    def put(self, event: Any) -> None:
        """Send one event. A signal's handler that raises in here does not cut a message in two: the next has the rest.

        Raises OSError when nobody reads any longer.
        """
        parts = pack(event)
        with self._lock:
            self._unsent += map(memoryview, parts)
            self._held.append(event)
            while self._unsent:
                written = os.write(self._writer.fileno(), self._unsent[0])
                self._unsent[0] = self._unsent[0][written:]
                if not self._unsent[0]:
                    del self._unsent[0]
            self._held.clear()

    def receive(self) -> list[Any]:
        """Return the events that have come. Waits a moment for the rest of one, so that it comes without a detour.

        Raises EOFError when no more can come, and CorruptMessage for what is no event; where that came with events,
        `check` does.
        """
        look = select.poll()
        look.register(self.reader.fileno(), select.POLLIN)
        found: list[Any] = []
        while not found and look.poll(REST_S * 1000 if self._messages.is_partial else 0):
            data = os.read(self.reader.fileno(), READ_BYTES)
            if not data:
                raise EOFError("its writer is gone" + " in the middle of a message" * self._messages.is_partial)
            found = self._messages.add(data)
        return found

    def check(self) -> None:
        """Raise CorruptMessage if what came after the events that were received is no event."""
        self._messages.check()

    def close_writer(self) -> None:
        """Let go of the writing end in this process: once the other's is gone, reading raises EOFError."""
        self._writer.close()

    def close(self) -> None:
        """Let go of both ends."""
        for end in (self.reader, self._writer):
            if end is not None:
                end.close()


class RankPipes(NamedTuple):
    """One rank's ends of its channels to the notebook."""

    inbox: Connection
    """Receives what `RankProcess.send_job` sends, then perhaps "stop"; on reserved ranks over and over, and at last
    "leave". Its closing means that the notebook is gone."""
    queue: EventQueue
    """Carries events to the notebook."""
    output: Any
    """The write end that becomes the rank's stdout and stderr."""
    stacks: Connection
    """The write end for the main thread's stack, when the rank is asked where it stands."""

    def close(self) -> None:
        """Let go of all of them in this process."""
        for end in self:
            end.close()


class EachItsOwn:
    """Is, in each process that `mp.spawn` starts, what that process alone is to have: the first, the second, ….

    `mp.spawn` gives all the same arguments. With all ranks' ends in them, each rank would begin with four open files
    for every rank: of the 256 that macOS allows, 60 ranks would have none left. So this is pickled, once for each
    process and in their order, as the ends of that process.
    """

    def __init__(self, ends: Iterable[RankPipes]) -> None:
        self._left = iter(ends)

    def __reduce__(self) -> tuple[type[RankPipes], tuple[Any, ...]]:
        assert_spawning(self)
        return RankPipes, tuple(next(self._left))


class Channel:
    """A rank's channel to the notebook during one job: takes records there and knows what the notebook has said.

    What a thread sends that outlives its job is dropped: it is no other job's.

    It is that of one process. What a rank has forked, a DataLoader's worker, say, has a copy of it, but not of the
    threads that may have held its locks, and what both write would mix. So nothing is sent from there.
    """

    def __init__(self, queue: EventQueue, rank: int) -> None:
        self.rank = rank
        self._queue = queue
        self._is_over, self._lock = False, threading.Lock()
        self._pid = os.getpid()
        self.stop_asked_s: float | None = None
        """When this rank heard that it should stop, as `time.monotonic()`."""
        self.during = "starting"
        """What the rank is doing, for its report if it fails."""
        self.memory: Memory | None = None
        """Of the notebook's, on this machine: for what this rank returns, if it is large."""
        self.store: dist.Store | None = None
        self.hooks: tuple[RankHook, ...] = ()
        """The job's, once the rank is at it."""

    @property
    def is_copy(self) -> bool:
        """Whether this is a copy of the channel, in a process that the rank has forked."""
        return os.getpid() != self._pid

    def check_process(self, what: str) -> None:
        """Raise RuntimeError, with what was done, in a process that is not the rank's own."""
        if self.is_copy:
            raise RuntimeError(
                f"{what} in process {os.getpid()}, which rank {self.rank} has started (a DataLoader's worker?). Only "
                "the rank itself can speak with the notebook: return the value to it, and log it there"
            )

    def send(self, event: events.Event) -> None:
        """Send one event to the notebook. Raises RuntimeError in a process that is not the rank's own."""
        self.check_process(f"{type(event).__name__} was to be sent")
        with self._lock:
            if not self._is_over:
                self._queue.put(event)

    def attach(self, kind: str, value: Any) -> None:
        """Send what else there is to say of this rank, as `events.Attached`: plain values."""
        self.send(events.Attached(self.rank, kind, pickle.dumps(value)))

    def receive(self, word: str) -> None:
        """Receive what the notebook sends: "stop", or a word for the hooks; "details" are asked for.

        Raises nothing: what cannot be answered is printed, and the thread that calls this hears the next word.
        """
        if word == "stop":  # perhaps again, for hooks that answer
            self.stop_asked_s = self.stop_asked_s or time.monotonic()
        try:
            for hook in self.hooks:
                hook.receive(word, self)
            if word == "details":
                self.send(events.Answered(self.rank))
        except BaseException:
            traceback.print_exc()

    def end(self, event: events.Exit) -> None:
        """Tell the notebook that this rank has done its part, where the process stays; nothing is sent after it."""
        self.check_process("Exit was to be sent")
        with self._lock:
            self._is_over = True
            self._queue.put(event)
