"""What a rank says of an exception: its summary, its traceback with the notebook's cells in it, and its frames."""

from __future__ import annotations

import linecache
import time
import traceback
from collections.abc import Mapping
from types import TracebackType

from labkit.protocol import events
from labkit.protocol.job import Cell, Job
from labkit.protocol.text import printable
from labkit.rank.channels import Channel
from labkit.rank.signals import leave_children_alone

OWN_FILES: set[str] = set()
"""Those whose code calls the reader's; a traceback begins below them. Each such file adds itself."""

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
    leave_children_alone()  # whose ends would raise another exception in here
    for hooks in job.hooks:
        hooks.failed(error, job, channel)
    channel.send(events.Failure(rank, failed_s, channel.during, *describe(error, job.cells)))


def below_own(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback from below the frames of `OWN_FILES`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in OWN_FILES:
        trace = trace.tb_next
    return trace


def describe(error: BaseException, cells: Mapping[str, Cell]) -> tuple[str, str, tuple[tuple[str, int, str], ...]]:
    """Return an exception's summary line, its traceback and its frames, as `events.Failure` takes them.

    The traceback is without the frames of `OWN_FILES` above the reader's and knows cells by their titles.
    """
    described = traceback.TracebackException(type(error), error, below_own(error), compact=True)
    text = printable("".join(described.format()))
    for file, cell in cells.items():
        text = text.replace(f'File "{file}"', cell.title)
    if len(text) > TRACEBACK_CHARACTERS:
        half = TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"
    summary = printable("".join(described.format_exception_only())).strip().splitlines()
    frames = tuple(
        (printable(frame.filename), frame.lineno or 0, frame.name) for frame in reversed(described.stack[-FRAMES:])
    )
    return (summary[0][:500] if summary else type(error).__name__), text, frames
