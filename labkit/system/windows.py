"""Windows. Nobody has run labkit there: see README."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, ClassVar

from labkit.system.base import PRIMITIVES, Primitive, System

LOOK_EVERY_S = 0.02
"""Time between two looks whether a rank has printed something."""

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
        "threads at work": (
            "Windows does not tell what a thread waits for, so a rank that sleeps when Stop is pressed is asked for as "
            "long as one that computes"
        ),
    }
    # The wheels for Windows have LLVM's OpenMP (or Intel's), whose threads spin for 200 ms after each parallel loop.
    start_environment: ClassVar[Mapping[str, str]] = {**System.start_environment, "KMP_BLOCKTIME": "0"}
    # PyTorch's wheel has no store that is made with libuv, which is what a script's `init_process_group` asks for.
    rank_environment: ClassVar[Mapping[str, str]] = {"USE_LIBUV": "0"}

    keeps_ranks_ends: ClassVar[bool] = True
    hidden_gpus: ClassVar[str] = "-1"  # to set a variable to an empty text is to remove it

    # The problem: what a rank prints, natively too, is to come by rank, to the last word of a crash. What does not
    # work: a pipe of multiprocessing's as stdout, for it is a HANDLE, and asynchronous, no descriptor; a thread of the
    # rank that passes on what comes through an ordinary pipe, for it ends with the rank. What is done: a temporary
    # file, which the system removes with its last handle. What still fails: nothing holds up a rank that prints
    # without end, so it fills the disk; and the notebook looks into the file every 20 ms, for nobody tells it.

    def open_output(self) -> tuple[Any, Any]:
        """Return the notebook's end and a rank's end of what carries the rank's output."""
        read_end = OutputFile()
        return read_end, RanksOutput(read_end.path)

    def redirect_output(self, output: Any) -> None:
        """Make the rank's end this process's stdout and stderr, for Python and for native code, and close it."""
        super().redirect_output(output.open())

    def wait(self, sources: Sequence[Any], timeout_s: float) -> list[Any]:
        """Wait until some of these can be read; return those."""
        files = [source for source in sources if isinstance(source, OutputFile)]
        others = [source for source in sources if not isinstance(source, OutputFile)]
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            ready = super().wait(others, max(0.0, min(left_s, LOOK_EVERY_S) if files else left_s))
            ready += [file for file in files if file.waiting_bytes()]
            if ready or left_s <= 0:
                return ready

    def has_come(self, source: Any) -> bool:
        """Whether something can be read at once; a pipe's end, too, where Windows raises BrokenPipeError already."""
        if isinstance(source, OutputFile):
            return source.waiting_bytes() > 0
        try:
            return bool(source.poll())
        except BrokenPipeError:
            return True

    def output_blocks(self, source: Any, size: int) -> Sequence[int]:
        """Return in which blocks of at most that size to read what has come so far: a rank may print without end."""
        if not isinstance(source, OutputFile):
            return (size,)
        whole, rest = divmod(source.waiting_bytes(), size)
        return [*[size] * whole, *[rest] * bool(rest)]

    def read_output(self, source: Any, size: int) -> bytes:
        """Return `size` bytes of output at most, or a message through a pipe; b"" at its end."""
        if isinstance(source, OutputFile):
            return source.read(size)
        with contextlib.suppress(OSError, EOFError):
            return bytes(source.recv_bytes())
        return b""

    def native_path(self, path: str) -> Any:
        """Return a path as PyTorch's C++ opens it: in the code page. Raises OSError for letters that it lacks."""
        try:
            return path if path.isascii() else path.encode("mbcs")
        except UnicodeEncodeError as error:
            raise OSError(
                f"PyTorch's store cannot open {path}: this system's code page has no {path[error.start]!r}. Set TEMP "
                "to a folder whose path is in plain letters, C:\\Temp say, before Jupyter starts"
            ) from error

    def exit_code_in_words(self, code: int) -> str:
        """Return what Windows means by an exit code."""
        return STATUS.get(code & 0xFFFFFFFF, "")


class OutputFile:
    """The notebook's end of what a rank prints."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="labkit-output-", buffering=0)  # noqa: SIM115 - see `close`
        self.path = self._file.name

    def waiting_bytes(self) -> int:
        """Return how much has come that was not read yet, in bytes."""
        return os.fstat(self._file.fileno()).st_size - self._file.tell()

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes at most."""
        return self._file.read(size)

    def close(self) -> None:
        """Close the file. The system removes it once the rank has closed it, too."""
        self._file.close()


class RanksOutput:
    """A rank's end of what it prints: opened there, for a descriptor cannot be sent to another process."""

    def __init__(self, path: str) -> None:
        self._path = path

    def open(self) -> IO[bytes]:
        """Open the file to append to it."""
        # Windows opens a file that it is to delete a second time only with O_TEMPORARY.
        flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_TEMPORARY", 0)
        return open(os.open(self._path, flags), "ab", buffering=0)

    def close(self) -> None:
        """Do nothing: the notebook has not opened it."""
