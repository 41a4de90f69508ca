"""A packed value on its way between notebook and ranks. To relay it takes no torch; `packing` reads it.

The problem: a gigabyte that a function uses would go by a pipe to each rank. What does not work: a file on the disk
(which is full, or slow for seconds), or in /dev/shm (64 MB in a container; it stays when the notebook is killed). What
is done: memory without a name, which belongs to the notebook; ranks open it by the number that it has there and map it.
What still fails: systems that do not open what another process has open; there values go by the pipe.
"""

from __future__ import annotations

import os
import pickle
import weakref
from typing import Any

from labkit.system import host

SMALL_BYTES = 1 << 16
"""What is not larger travels in the message itself."""


class Memory:
    """Memory that other processes of this user's can open, on this machine. It goes once nobody has it open, or mapped.

    Raises OSError where the system has none.
    """

    def __init__(self, known_as: tuple[int, int] | None = None) -> None:
        self._descriptor = host.new_memory() if known_as is None else host.open_descriptor(*known_as)
        self._known_as = known_as or (os.getpid(), self._descriptor)
        """The process that made it, and its descriptor there."""
        weakref.finalize(self, os.close, self._descriptor)

    def __reduce__(self) -> Any:
        return Memory, (self._known_as,)

    @property
    def path(self) -> str:
        """The name by which this process can open it."""
        return host.path_of(self._descriptor)


def new_memory() -> Memory | None:
    """Return memory that a process of this machine can open; None where the system has none."""
    try:
        memory = Memory()
        return Memory(memory.__reduce__()[1][0]) and memory  # some sandboxes have no such files
    except OSError:
        return None


class Packed:
    """A value on its way: bytes, or memory of this machine. Read it with `unpack`."""

    def __init__(self, data: Any = b"", memory: Memory | None = None, held: Any = None) -> None:
        self.data, self.memory = data, memory
        self._held = held
        """What must live until it has been read: shared memory."""
        self.head = b""
        """Of a call, in the process that packed it: the pickle, which has no tensor's memory in it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Bytes go out of band where the pickler has a place for that, as with `channels.send`.
        return Packed, (pickle.PickleBuffer(self.data) if protocol >= 5 else bytes(self.data), self.memory)

    def clear(self) -> None:
        """Drop what is in it, which has arrived."""
        self.data, self.memory, self._held, self.head = b"", None, None, b""
