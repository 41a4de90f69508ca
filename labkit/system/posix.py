"""What Linux and macOS have in common: signals and descriptors."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from typing import ClassVar

from labkit.system.base import System


class Posix(System):
    """A system with POSIX calls."""

    kill_signal: ClassVar[int] = signal.SIGKILL
    # All but those that nobody can handle, those of job control, a process's own faults, and labkit's own.
    signals_for_ranks: ClassVar[frozenset[int]] = frozenset(signal.valid_signals()) - {
        *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
        *(signal.SIGCHLD, signal.SIGPIPE, System.stacks_signal, signal.SIGXFSZ),
        *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
    }
    aborted_codes: ClassVar[frozenset[int]] = frozenset({-signal.SIGABRT, 128 + signal.SIGABRT})

    def session(self, pid: int) -> int:
        """Return the session that a process belongs to. Raises OSError if it has ended."""
        return os.getsid(pid)

    def reap(self) -> None:
        """Take the exit codes of this process's children that have ended."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def wait_for(self, pid: int) -> None:
        """Wait until a child that was killed has ended, and leave its exit code to others."""
        # macOS has waitid from Python 3.13 on. Without it the child's end is not waited for: to ask in another way
        # would take its exit code.
        if (waitid := getattr(os, "waitid", None)) is not None:
            waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def ignore_sigchld(self) -> None:
        """Have the end of a child go unnoticed."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

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
