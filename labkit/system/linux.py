"""Linux: what /proc tells, and what its C library is asked for."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
from collections.abc import Mapping
from typing import ClassVar

from labkit.system.base import System

PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


class Linux(System):
    """Linux, with glibc or musl."""

    lends_bound_ports: ClassVar[bool] = True
    opens_others_descriptors: ClassVar[bool] = True
    # libgomp, torch's pool of threads, reads this when it is loaded. By default its threads spin for milliseconds
    # between two parallel loops: on cores that have other work (another rank, another user's program) one spins while
    # the thread that it waits for cannot run, and a small network's step takes tens of times as long. So many turns
    # suffice on free cores.
    start_environment: ClassVar[Mapping[str, str]] = {**System.start_environment, "GOMP_SPINCOUNT": "10000"}

    # Ends with its notebook

    def die_with_parent(self) -> None:
        """Have the system kill this process when the *thread* has gone that started it."""
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    # The problem: a rank and what it has started must not outlive a notebook that is killed. What does not work: a
    # thread that reads (native code may hold Python's lock); PR_SET_PDEATHSIG, which reaches one process, when the
    # *thread* ends that has started it. What is done: the pipe from its parent that multiprocessing leaves open in each
    # process closes with the parent, and Linux then sends a signal of our choice to the whole session. It would do so
    # as well for whatever is written there: all that the parent has to say must have been read. And it does not if the
    # other signal has ended the rank before, so that is called off. What still fails: a program in a session or process
    # group of its own.

    def begin_session(self, lifeline: int) -> None:
        """Begin a session, in which whatever this process starts is, too."""
        super().begin_session(lifeline)
        with contextlib.suppress(OSError):  # a sandbox may lack it; then a rank ends as it reads of its pipe's end
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
            fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        _libc.prctl(PR_SET_PDEATHSIG, 0)
        if select.select([lifeline], [], [], 0)[0]:  # it has closed already
            self.end_session(os.getpid())

    # Memory now and peak

    def resident_bytes(self) -> int:
        """Resident memory of this process now, in bytes."""
        with contextlib.suppress(OSError):
            return int(_read("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def peak_bytes(self, pid: int) -> int:
        """Peak resident memory of a process in bytes; 0 if it has ended."""
        # Not getrusage: its peak is inherited from the process that forked this one, the notebook's kernel.
        with contextlib.suppress(OSError):
            for row in _read(f"/proc/{pid}/status").splitlines():
                if row.startswith("VmHWM:"):
                    return int(row.split()[1]) * 1024
        return 0

    def forget_peak(self) -> None:
        """Begin to measure the peak of this process's memory anew."""
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
            peak.write("5")

    def give_memory_back(self) -> None:
        """Give the system back what was freed; by itself glibc keeps it for later. musl has no such call."""
        with contextlib.suppress(AttributeError):
            _libc.malloc_trim(0)

    # What a process may have; files and sockets

    def cores(self) -> int:
        """Return how many CPU cores this process may use."""
        return len(os.sched_getaffinity(0))

    def open_descriptor(self, pid: int, descriptor: int) -> int:
        """Return a descriptor of what another process has open under that number."""
        return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)

    def path_of(self, descriptor: int) -> str:
        """Return a path by which this process can open once more what it has open."""
        return f"/proc/self/fd/{descriptor}"

    def new_memory(self) -> int:
        """Return a descriptor of new memory that `open_descriptor` can open from another process."""
        return os.memfd_create("labkit")

    def open_sockets(self) -> dict[str, int]:
        """Return this process's sockets by name, with a descriptor of each."""
        found = {}
        with contextlib.suppress(OSError):
            for descriptor in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    name = os.readlink(f"/proc/self/fd/{descriptor}")
                    if name.startswith("socket:"):
                        found[name] = int(descriptor)
        return found

    def bytes_sent(self) -> int:
        """Bytes sent over TCP connections that are still open, retransmissions excluded (TCP_INFO)."""
        total = 0
        for descriptor in self.open_sockets().values():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
                    total += sent - again
        return total


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
