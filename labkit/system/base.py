"""What is asked of the operating system. Here is what every system with POSIX calls does, or an honest answer where it
does nothing."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any, ClassVar


class System:
    """An operating system. A method that is not overridden does what is said here on every system."""

    # Ends with its notebook

    kill_signal: ClassVar[int] = signal.SIGKILL
    """Ends a process at once."""
    aborted_codes: ClassVar[frozenset[int]] = frozenset({-signal.SIGABRT, 128 + signal.SIGABRT})
    """Exit codes of a process that has called `abort`, as C++ does for an exception that nobody catches."""

    stacks_signal: ClassVar[int] = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
    """Makes a rank write its main thread's stack, below Python: a real-time signal, which scripts hardly use, if the
    system has some; else SIGUSR2."""
    # All but those that nobody can handle, those of job control, a process's own faults, and labkit's own.
    signals_for_ranks: ClassVar[frozenset[int]] = frozenset(signal.valid_signals()) - {
        *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
        *(signal.SIGCHLD, signal.SIGPIPE, stacks_signal, signal.SIGXFSZ),
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
    }
    """Those that a user may send to all processes of a job, for the ranks' own handlers."""

    def die_with_parent(self) -> None:
        """Have this process killed when the one has gone that started it, if the system can do so."""

    def begin_session(self, lifeline: int) -> None:
        """Begin a session, in which whatever this process starts is, too. `end_session` ends them all.

        `lifeline` is a pipe whose other end the parent has: as that closes they all end, if the system can do so.
        """
        os.setsid()

    def end_session(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process that has begun a session and to what it has started, also where it has ended."""
        with contextlib.suppress(OSError):  # there is nobody
            os.killpg(pid, number)

    def wait_for(self, pid: int) -> None:
        """Wait until a child that was killed has ended, and leave its exit code to others."""
        # macOS has waitid from Python 3.13 on. Without it the child's end is not waited for: to ask in another way
        # would take its exit code.
        if (waitid := getattr(os, "waitid", None)) is not None:
            waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def ignore_sigchld(self) -> None:
        """Have the end of a child go unnoticed."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def node(self) -> str:
        """Return the machine's name."""
        return socket.gethostname()

    # A rank's stack

    def answer_stacks(self, file: int) -> None:
        """Have this process write its main thread's stack to a file when it gets `stacks_signal`."""
        # The main thread's stack alone, to which the system delivers the signal. To write the others', which go on
        # running meanwhile, crashes a process: one question in some hundreds, where a thread was reading PyTorch's
        # recorder. Chained, to nothing: only then does faulthandler put `errno` back. Else a system call that has just
        # failed raises "OSError: [Errno 0] Error" now and then, also where its failure was to be expected: a file that
        # need not be there.
        number = self.stacks_signal
        signal.signal(number, signal.SIG_IGN)
        faulthandler.register(number, file=file, all_threads=False, chain=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, number})

    def ask_for_stack(self, pid: int) -> bool:
        """Send a process `stacks_signal`; return whether it was still there."""
        try:
            os.kill(pid, self.stacks_signal)
        except ProcessLookupError:
            return False
        return True

    def hold_back_signals(self) -> None:
        """Keep the interrupt and `stacks_signal` from the processes that this thread starts, until they take them."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, self.stacks_signal})

    # The store

    lends_bound_ports: ClassVar[bool] = False
    """Whether another socket can listen on a port to which this process keeps an idle one bound."""

    # A rank's output

    def redirect_output(self, output: Any) -> None:
        """Make the rank's end this process's stdout and stderr, for Python and for native code, and close it."""
        for stream, descriptor in (("stdout", 1), ("stderr", 2)):
            os.dup2(output.fileno(), descriptor)
            # Anew: the old one may believe that it writes to a file.
            setattr(sys, stream, os.fdopen(descriptor, "w", 1, "utf-8", "backslashreplace", closefd=False))
        output.close()

    # Memory now and peak

    def resident_bytes(self) -> int:
        """Resident memory of this process now, in bytes; 0 where the system does not tell cheaply."""
        return 0

    def peak_bytes(self, pid: int) -> int:
        """Peak resident memory of a process in bytes; where the system does not keep it, what is resident now."""
        import psutil

        with contextlib.suppress(psutil.Error):
            memory = psutil.Process(pid).memory_info()
            return int(getattr(memory, "peak_wset", memory.rss))
        return 0

    def forget_peak(self) -> None:
        """Begin to measure the peak of this process's memory anew, if the system can do so."""

    def give_memory_back(self) -> None:
        """Give the system back what was freed, if the C library keeps it for later."""

    # A rank's environment

    start_environment: ClassVar[Mapping[str, str]] = {"OPENBLAS_THREAD_TIMEOUT": "4"}
    """Variables that libraries read when they are loaded, set where the user has not set them.

    NumPy's pool, OpenBLAS, begins to spin as NumPy is imported, for 2^26 cycles: 6 % of the time in which two ranks
    start on two cores. 2^4 is the least that it takes.
    """
    rank_environment: ClassVar[Mapping[str, str]] = {}
    """Variables of a rank, set where the user has not set them."""

    def set_start_environment(self) -> None:
        """Set `start_environment` in this process."""
        for name, value in self.start_environment.items():
            if name != "GOMP_SPINCOUNT" or "OMP_WAIT_POLICY" not in os.environ:
                os.environ.setdefault(name, value)

    # What a process may have

    def cores(self) -> int:
        """Return how many CPU cores this process may use."""
        return os.cpu_count() or 1

    # Files and sockets

    opens_others_descriptors: ClassVar[bool] = False
    """Whether `open_descriptor` does anything."""

    def lock(self, file: int) -> None:
        """Lock an open file until it is closed. Raises BlockingIOError if another process has it."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def open_descriptor(self, pid: int, descriptor: int) -> int:
        """Return a descriptor of what another process has open under that number. Raises OSError if it is gone."""
        raise OSError("this system does not open what another process has open")

    def path_of(self, descriptor: int) -> str:
        """Return a path by which this process can open once more what it has open. Raises OSError."""
        raise OSError("this system has no such paths")

    def new_memory(self) -> int:
        """Return a descriptor of new memory that `open_descriptor` can open from another process. Raises OSError."""
        raise OSError("this system does not open what another process has open")

    def open_sockets(self) -> dict[str, int]:
        """Return this process's sockets by name, with a descriptor of each; {} where the system does not list them."""
        return {}

    def bytes_sent(self) -> int:
        """Bytes that this process has sent over TCP connections that are still open, retransmissions excluded.

        Raises OSError where the system does not count.
        """
        raise OSError("only Linux says how much a socket has sent")
