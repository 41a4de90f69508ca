"""How a rank speaks with the notebook during one job: events go there, words ("stop") come back.

`PipeChannel` is that of a rank which the notebook's process started. The cluster wing has others, through files.
"""

from __future__ import annotations

import os
import pickle
import select
import struct
import threading
import time
import traceback
from collections.abc import Iterable
from multiprocessing import get_context
from multiprocessing.context import assert_spawning
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from labkit.protocol import events, storages
from labkit.protocol.job import RankHook
from labkit.system import host

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


HEADER = struct.Struct("!8sQ")
"""Before each message: a mark by which garbage is known at once, and how many bytes follow."""

MARK = b"\x93labkit\n"

READ_BYTES = 1 << 20
"""Read at once at most; a pipe holds less, usually 64 KiB."""

REST_S = 0.05
"""How long the rest of a message is waited for before a reader looks elsewhere."""

HAS_POLL = hasattr(select, "poll")
"""Windows has not; a pipe there brings messages whole."""


class Garbled(Exception):  # noqa: N818 - says what came
    """What has come through a pipe is no event."""


WITH_TENSORS = b"\x93tensors"
"""How a message begins that is followed by the memory of tensors: their number, their sizes, and its pickle."""

SIZE = struct.Struct("!Q")

BLOCK_BYTES = 1 << 20
"""Of a tensor's memory, sent at once through the inbox."""


def pack(word: Any) -> tuple[bytes, list[memoryview]]:
    """Return a message, and the memory of tensors that follows it: sent from where it is, no copy is made of it."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(word, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
    if not buffers:
        return pickled, []
    blocks = [buffer.raw() for buffer in buffers]
    sizes = (len(blocks), *(block.nbytes for block in blocks))
    return WITH_TENSORS + b"".join(map(SIZE.pack, sizes)) + pickled, blocks


class Parcel:
    """A message whose tensors are still to come. They are read into the memory that will be theirs."""

    def __init__(self, body: bytes | memoryview) -> None:
        self._pickled, self._storages = memoryview(body), []
        self._to_come: list[memoryview] = []
        if bytes(self._pickled[: len(WITH_TENSORS)]) == WITH_TENSORS:
            at = len(WITH_TENSORS) + SIZE.size
            (count,) = SIZE.unpack_from(self._pickled, len(WITH_TENSORS))
            sizes = [size for (size,) in SIZE.iter_unpack(self._pickled[at : at + count * SIZE.size])]
            self._pickled = self._pickled[at + count * SIZE.size :]
            self._storages = [storages.empty(size) for size in sizes]
            self._to_come = [storages.memory(storage) for storage in self._storages]

    @property
    def is_whole(self) -> bool:
        """Whether all has come."""
        return not self._to_come

    @property
    def room(self) -> memoryview:
        """Where the next bytes belong."""
        return self._to_come[0]

    def filled(self, count: int) -> None:
        """Take notice that so many have been written there."""
        self._to_come[0] = self._to_come[0][count:]
        if not self._to_come[0]:
            del self._to_come[0]

    def take(self, data: memoryview) -> memoryview:
        """Take bytes that have come, and return those that are not of this message."""
        while data and not self.is_whole:
            part = data[: self.room.nbytes]
            self.room[: part.nbytes] = part
            self.filled(part.nbytes)
            data = data[part.nbytes :]
        return data

    def open(self) -> Any:
        """Return what was sent. Raises whatever unpickling raises."""
        return pickle.loads(self._pickled, buffers=self._storages)


def send(connection: Connection, word: Any) -> None:
    """Send something to one who calls `receive`. Raises OSError if nobody is there."""
    body, blocks = pack(word)
    connection.send_bytes(body)
    for block in blocks:
        for at in range(0, block.nbytes, BLOCK_BYTES):
            connection.send_bytes(block[at : at + BLOCK_BYTES])


def receive(connection: Connection) -> Parcel:
    """Return what comes next, to be opened. Raises EOFError or OSError when the other end is gone."""
    parcel = Parcel(connection.recv_bytes())
    while not parcel.is_whole:
        parcel.filled(connection.recv_bytes_into(parcel.room))
    return parcel


class Messages:
    """Puts events together from the bytes of a pipe, wherever they are cut."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._parcel: Parcel | None = None

    @property
    def is_partial(self) -> bool:
        """Whether a message has begun that has not come whole."""
        return bool(self._bytes) or self._parcel is not None

    def add(self, data: bytes) -> list[Any]:
        """Take bytes; return the events that are whole now. Raises Garbled for what is none, and takes no more then."""
        found: list[Any] = []
        rest = memoryview(data)
        while True:
            if self._parcel is None:
                self._bytes += rest
                rest = memoryview(b"")
                self._parcel = self._next()
                if self._parcel is None:
                    return found
                if not self._parcel.is_whole:  # what follows belongs into its tensors
                    rest = memoryview(bytes(self._bytes))
                    self._bytes.clear()
            rest = self._parcel.take(rest)
            if not self._parcel.is_whole:
                return found
            found.append(_event(self._parcel))
            self._parcel = None

    def _next(self) -> Parcel | None:
        """Return the next message, as far as it has come, and take its bytes away."""
        if not MARK.startswith(self._bytes[: len(MARK)]):
            raise Garbled(f"{bytes(self._bytes[:40])!r} is not the beginning of a message")
        if len(self._bytes) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._bytes)[1]
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[HEADER.size : end])
        del self._bytes[:end]
        return Parcel(body)


def _event(parcel: Parcel) -> Any:
    try:
        return parcel.open()
    except MemoryError:
        raise
    except BaseException as error:
        raise Garbled(f"{type(error).__name__}: {error}") from error


class EventQueue:
    """A queue from one process to one other, with nothing that a kill could leave behind.

    `multiprocessing.SimpleQueue` guards both of its ends with semaphores, for several processes at each. They have
    names in the system, which stay when this process, its ranks and multiprocessing's resource tracker are killed at
    once. Here threads of one process share an end, so a lock of the process's own does. And its `get` waits for all of
    a message that has begun: for ever, if its writer was killed and a process that it has forked keeps the pipe open.
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
        if not HAS_POLL:
            with self._lock:
                return send(self._writer, event)
        body, blocks = pack(event)
        header = HEADER.pack(MARK, len(body))
        parts = [header + body] if len(body) < READ_BYTES else [header, body]
        with self._lock:
            self._unsent += [*(memoryview(part) for part in parts), *blocks]
            self._held.append(event)
            while self._unsent:
                written = os.write(self._writer.fileno(), self._unsent[0])
                self._unsent[0] = self._unsent[0][written:]
                if not self._unsent[0]:
                    del self._unsent[0]
            self._held.clear()
        return None

    def receive(self) -> list[Any]:
        """Return the events that have come. Waits a moment for the rest of one, so that it comes without a detour.

        Raises EOFError when no more can come, and Garbled for what is no event.
        """
        if not HAS_POLL:
            return [_event(receive(self.reader))] if host.has_come(self.reader) else []
        look = select.poll()
        look.register(self.reader.fileno(), select.POLLIN)
        found: list[Any] = []
        while not found and look.poll(REST_S * 1000 if self._messages.is_partial else 0):
            data = os.read(self.reader.fileno(), READ_BYTES)
            if not data:
                raise EOFError("its writer is gone" + " in the middle of a message" * self._messages.is_partial)
            found = self._messages.add(data)
        return found

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
    output: Connection
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

    It is that of one process. What a rank has forked, a DataLoader's worker, say, has a copy of it, but not of the
    threads that may have held its locks, and what both write would mix. So nothing is sent from there.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.stop_asked_s: float | None = None
        """When this rank heard that it should stop, as `time.monotonic()`."""
        self.rank = -1
        self.during = "starting"
        """What the rank is doing, for its report if it fails."""
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
        self._send(event)

    def _send(self, event: events.Event) -> None:
        raise NotImplementedError

    def attach(self, kind: str, value: Any) -> None:
        """Send what else there is to say of this rank, as `events.Attached`: plain values."""
        self.send(events.Attached(self.rank, kind, pickle.dumps(value)))

    def receive(self, word: str) -> None:
        """Receive what the notebook sends: "stop", or a word for the hooks; "details" are asked for.

        Raises nothing: what cannot be answered is printed, and the thread that calls this hears the next word.
        """
        if word == "stop":  # perhaps again, for hooks that answer
            self.stop_asked_s = self.stop_asked_s or time.monotonic()
        for hook in self.hooks:
            try:
                hook.receive(word, self)
            except BaseException:
                traceback.print_exc()
        if word == "details":
            try:
                self.send(events.Answered(self.rank))
            except Exception:
                traceback.print_exc()

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

    def _send(self, event: events.Event) -> None:
        """Put one event on the queue. What a thread sends that outlives its job is dropped: it is no other job's."""
        with self._lock:
            if not self._is_over:
                self._queue.put(event)

    def end(self, event: events.Exit) -> None:
        """Put the last one."""
        self.check_process("Exit was to be sent")
        with self._lock:
            self._is_over = True
            self._queue.put(event)
