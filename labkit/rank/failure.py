"""What a rank says of an exception: its summary, its traceback with the notebook's cells in it, and its frames."""

from __future__ import annotations

import linecache
import sys
import time
import traceback
from collections.abc import Mapping
from types import TracebackType

from labkit.protocol import events
from labkit.protocol.job import Cell, Job
from labkit.protocol.text import printable
from labkit.rank.channels import Channel
from labkit.system import host

OWN_FILES: set[str] = set()
"""Those whose code calls the user's; a traceback begins below them. Each such file adds itself."""

FRAMES = 50
"""Of a traceback, the most recent."""

TRACEBACK_CHARACTERS = 50_000
"""A longer traceback loses its middle."""


def show_lines_of(cells: Mapping[str, Cell]) -> None:
    """Let tracebacks find the lines of the notebook's cells."""
    for file, cell in cells.items():
        linecache.cache[file] = (len(cell.text), None, cell.text.splitlines(keepends=True), file)


def report(error: BaseException, rank: int, job: Job, channel: Channel) -> None:
    """Report a failure to the notebook.

    Before leaving the process group: once this rank is gone the others fail too, and their errors would bury the one
    that matters.
    """
    failed_s = time.time() - job.start_s
    host.ignore_sigchld()  # whose ends would raise another exception in here
    if isinstance(error, SystemExit) and not isinstance(error.code, int):
        print(error.code, file=sys.stderr)  # as Python does at its end
    for hook in channel.hooks:
        hook.failed(behind(error), job, channel)
    channel.send(events.Failure(rank, failed_s, channel.during, *describe(error, job.cells)))


def behind(error: BaseException) -> BaseException:
    """Return the cause: what an exit was made of (`except Exception: sys.exit(1)`, as click and Hydra have it), and the
    first exception in a group, as `asyncio.TaskGroup` raises it.
    """
    while isinstance(error, (SystemExit, BaseExceptionGroup)):
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
            continue
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None:
            break
        error = earlier
    return error


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends by this exception, as Python has it; never 0."""
    code = error.code if isinstance(error, SystemExit) else 1
    return (code & 0xFF or 1) if isinstance(code, int) else 1


def below_own(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback from below the frames of `OWN_FILES`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in OWN_FILES:
        trace = trace.tb_next
    return trace


def describe(error: BaseException, cells: Mapping[str, Cell]) -> tuple[str, str, tuple[tuple[str, int, str], ...]]:
    """Return an exception's summary line, its traceback and its frames, as `events.Failure` takes them.

    The traceback is without the frames of `OWN_FILES` above the user's and knows cells by their titles. Of an exit
    or a group that was made of another exception, summary and frames are the other's: the exit is where it was noticed.
    """
    cause = behind(error)
    described = traceback.TracebackException(type(error), error, below_own(error), compact=True)
    text = printable("".join(described.format()))
    for file, cell in cells.items():
        text = text.replace(f'File "{file}"', cell.title)
    if len(text) > TRACEBACK_CHARACTERS:
        half = TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"
    if cause is not error:
        described = traceback.TracebackException(type(cause), cause, below_own(cause), compact=True)
    lines = printable("".join(described.format_exception_only())).strip().splitlines()
    summary = lines[0][:500] if lines else type(cause).__name__
    if isinstance(error, SystemExit) and cause is not error:
        summary += f" (then sys.exit({printable(repr(error.code))[:80]}))"
    elif isinstance(error, BaseExceptionGroup) and len(error.exceptions) > 1:
        summary += f" (the first of {len(error.exceptions)} in an {type(error).__name__})"
    frames = tuple(
        (printable(frame.filename), frame.lineno or 0, frame.name) for frame in reversed(described.stack[-FRAMES:])
    )
    return summary, text, frames
