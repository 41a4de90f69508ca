"""Windows. Nobody has run labkit there: see README."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from labkit.system.base import PRIMITIVES, Primitive, System

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

READ_BYTES = 1 << 16

OUTPUT_S = 2.0
"""How long what a rank has written last may take to reach the notebook."""

STATUS = {
    0xC0000005: "access violation",
    0xC000001D: "illegal instruction",
    0xC0000094: "integer division by zero",
    0xC00000FD: "stack overflow",
    0xC0000135: "a DLL was not found",
    0xC0000142: "a DLL could not begin",
    0xC0000374: "heap corruption",
    0xC000013A: "Ctrl-C",
    0xC0000409: "stack buffer overrun, or abort",
}


class Windows(System):
    """Windows: no signals but the interrupt, pipes that are no descriptors, folders that cannot be opened."""

    name: ClassVar[str] = "Windows"
    lacks_posix: ClassVar[str] = "it needs POSIX calls, which Windows lacks: use WSL2, where labkit is on Linux"
    missing: ClassVar[Mapping[Primitive, str]] = {
        **dict.fromkeys(PRIMITIVES, ""),
        "a rank's stack": (
            "Windows has no signal to ask with: a thread of the rank answers, so not while native code keeps Python's "
            "lock"
        ),
        "a rank's output": (
            "on Windows a thread of the rank passes on what it prints: what native code writes as it ends the process, "
            "a crash's stack say, is lost"
        ),
        "threads at work": (
            "Windows does not tell what a thread waits for, so a rank that sleeps when Stop is pressed is asked for as "
            "long as one that computes"
        ),
    }
    # The wheels for Windows have LLVM's OpenMP (or Intel's), whose threads spin for 200 ms after each parallel loop.
    start_environment: ClassVar[Mapping[str, str]] = {**System.start_environment, "KMP_BLOCKTIME": "0"}
    # PyTorch's wheel has no store that is made with libuv, which is what a script's `init_process_group` asks for.
    rank_environment: ClassVar[Mapping[str, str]] = {"USE_LIBUV": "0"}

    _forwarder: threading.Thread | None = None

    # The problem: what a rank prints, natively too, is to come by rank. What does not work: the pipe's end as stdout,
    # for a pipe of multiprocessing's is a HANDLE with messages, no descriptor. What is done: stdout and stderr are an
    # ordinary pipe of this process's, and a thread sends on what comes through it. What still fails: what is written
    # while native code keeps Python's lock comes when that lets go, and is lost if the process is killed meanwhile;
    # and what a reserved rank prints last in one job may come with the output of the next.

    def redirect_output(self, output: Connection) -> None:
        """Make `output` this process's stdout and stderr, for Python and for native code."""
        reader, writer = os.pipe()
        for stream, descriptor in (("stdout", 1), ("stderr", 2)):
            os.dup2(writer, descriptor)
            setattr(sys, stream, os.fdopen(descriptor, "w", 1, "utf-8", "backslashreplace", closefd=False))
        os.close(writer)
        self._forwarder = threading.Thread(target=_forward, args=(reader, output), name="labkit-output", daemon=True)
        self._forwarder.start()

    def finish_output(self) -> None:
        """Have all that this process has written reach the notebook: it ends now."""
        if self._forwarder is not None:
            for descriptor in (1, 2):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            self._forwarder.join(OUTPUT_S)

    def has_come(self, connection: Connection) -> bool:
        """Whether a pipe can be read at once, its end included, where Windows raises BrokenPipeError already."""
        try:
            return connection.poll()
        except BrokenPipeError:
            return True

    def read_output(self, connection: Connection, size: int) -> bytes:
        """Return bytes that have come through a pipe; b"" at its end."""
        with contextlib.suppress(OSError, EOFError):
            return connection.recv_bytes()
        return b""

    def exit_code_in_words(self, code: int) -> str:
        """Return what Windows means by an exit code."""
        return STATUS.get(code & 0xFFFFFFFF, "")


def _forward(reader: int, output: Connection) -> None:
    with contextlib.suppress(OSError), open(reader, "rb", buffering=0) as pipe:
        while data := pipe.read(READ_BYTES):
            output.send_bytes(data)
    output.close()
