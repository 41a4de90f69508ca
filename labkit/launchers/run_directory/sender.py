"""What a rank writes into its run's directory: its records, large values in files of their own, and what it prints.

    ranks/<rank>.<attempt>.records     a record a line, as JSON
    ranks/<rank>.<attempt>.<n>.blob    a large value, there once it is whole; a record names it
    ranks/<rank>.<attempt>.reserve     room for last words on a full disk

A disk that is full, or a file system that fails, ends no training: what cannot be written is kept, tried again, counted
and said.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.launchers.run_directory.files import NO_ROOM, free_reserve
from labkit.launchers.run_directory.private import private
from labkit.launchers.run_directory.records import CUT, encoded, plain
from labkit.protocol import events
from labkit.protocol.pickling import Message

BLOB_BYTES = 1 << 16
"""A larger value has a file of its own."""

RESERVE_BYTES = 1 << 18
"""Kept free for last words: a traceback of 50,000 characters, each of which may take six bytes, and some more."""

RETRY_S = 1.0
"""Time between two trials to write what could not be written."""

WAITING_BYTES = 1 << 24
"""Of log records that wait to be written at most; the oldest are then lost."""

SETTLED_S = 3.0
"""After so long without a failure it is said what became of what could not be written."""

LAST_TRIAL_S = 5.0
"""How long it is tried, when the rank has done its part, to write what still waits."""

RESULT_S = 300.0
"""How long a result waits for room on the disk: what has been computed for days is worth it."""

RECORDS_BYTES = 1 << 30
"""Of a rank's records; from then on, of log calls that come together only the last is kept."""


@dataclass
class _Trouble:
    """A time in which records could not be written."""

    error: OSError
    since_s: float
    until_s: float
    """Of the last that failed so far."""
    late: int = 0
    lost: int = 0
    """Records that were written later, or never."""

    def said(self, rank: int) -> str:
        """Return what became of the records; "" if nothing did."""
        if not (count := self.late + self.lost):
            return ""
        why, for_s = self.error.strerror or self.error, self.until_s - self.since_s
        lost = f"{self.late:,} written later, {self.lost:,} lost" if self.lost else "all were written later"
        return f"rank {rank}: {_count(count, 'record')} could not be written for {for_s:.0f} s: {why}; {lost}"


class FileSender:
    """Writes a rank's records to its file. After the first that could not be written a thread tries again.

    Guarantees: records come in the order in which they were sent, but for those that had to wait for room; nothing
    raises but `send` of a `Result` for which there was no room within `RESULT_S`.
    """

    result_s = RESULT_S
    clock_off_s = 0.0
    """How far this machine's clock is ahead of the notebook's, by which times are corrected."""

    def __init__(self, path: Path, keeps_reserve: bool = True) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._lock = threading.RLock()
        self._is_closed = self._is_cut = False
        self._rank = -1
        self._blobs = 0
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._trouble: _Trouble | None = None
        self._has_thinned = False
        self._written_bytes = os.fstat(self._descriptor).st_size
        self._reserve_bytes = RESERVE_BYTES if keeps_reserve else 0
        self._keep_reserve()

    def send(self, event: Any, is_last: bool = False) -> None:
        """Append one record; after the last what threads still send is dropped."""
        if self._is_closed:
            return
        self._rank = event.rank
        event = self._thin(event) if isinstance(event, events.Log) else event
        fields = self._fields(in_time(event, self.clock_off_s) if self.clock_off_s else event)
        if is_last:
            self._drain()
        if fields is not None:
            self._append(encoded(type(event).__name__, *fields), isinstance(event, events.Log))
        if is_last:
            self.close()
            free_reserve(self.path)

    def flush(self) -> None:
        """Write what waits, if that can be done soon; what then still waits is lost, which is said."""
        self._drain()
        with self._lock:
            self._end_trouble()

    def close(self) -> None:
        """Flush, and write no more. Closing twice does nothing. The reserve stays, for the supervisor's last word."""
        self.flush()
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)

    def warn(self, topic: str, text: str, rank: int | None = None) -> None:
        """Have something said with the run; what is said of the same topic again takes its place."""
        with self._lock:
            try:
                if not self._is_closed:
                    self._write_surely(encoded("Warned", self._rank if rank is None else rank, topic, text))
            except OSError:
                if text:
                    print(text, file=sys.stderr, flush=True)  # which is another file

    # Records

    def _append(self, line: bytes, may_wait: bool) -> None:
        with self._lock:
            if self._is_closed:
                return
            if not (self._waiting and may_wait):
                try:
                    self._write_what_waits()
                    self._write(line)
                    return
                except OSError as error:
                    self._note(error)
            if not may_wait:
                with contextlib.suppress(OSError):
                    self._write_surely(line)
                    return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            while self._waiting_bytes > WAITING_BYTES and len(self._waiting) > 1:
                self._lose()

    def _write_what_waits(self) -> None:
        """Raises OSError if not all can be written."""
        while self._waiting:
            self._write(self._waiting[0])
            self._waiting_bytes -= len(self._waiting.popleft())
            if self._trouble:
                self._trouble.late += 1

    def _lose(self) -> None:
        self._waiting_bytes -= len(self._waiting.popleft())
        if self._trouble:
            self._trouble.lost += 1

    def _write(self, line: bytes) -> None:
        """Append a line in one call, so that a reader sees whole lines but the last. Raises OSError."""
        left = memoryview(CUT + line if self._is_cut else line)
        while left:
            written = os.write(self._descriptor, left)
            self._written_bytes += written
            self._is_cut = left[written - 1] != 0x0A
            left = left[written:]

    def _write_surely(self, line: bytes) -> None:
        """Append a line before those that wait, on a full disk in the room that was kept for it. Raises OSError."""
        try:
            self._write(line)
        except OSError as error:
            if error.errno not in NO_ROOM or not free_reserve(self.path):
                raise
            self._write(line)
            self._reserve_bytes //= 2  # of what is left of it
            self._keep_reserve()

    # What could not be written

    def _note(self, error: OSError) -> None:
        """Note that nothing can be written just now: say so, and try again in the background."""
        now = time.monotonic()
        if self._trouble:
            self._trouble.until_s = now
            return
        self._trouble = _Trouble(error, now, now)
        why = error.strerror or str(error)
        self.warn("writing", f"rank {self._rank}: its records cannot be written just now: {why}. The training goes on")
        threading.Thread(target=self._try_again, name="labkit-write", daemon=True).start()

    def _try_again(self) -> None:
        while True:
            time.sleep(RETRY_S)
            with self._lock:
                if self._is_closed or self._trouble is None:
                    return
                self._try()
                if not self._waiting and time.monotonic() > self._trouble.until_s + SETTLED_S:
                    self._end_trouble()
                    return

    def _try(self) -> bool:
        """Try to write what waits; return whether nothing waits any more."""
        try:
            self._write_what_waits()
        except OSError as error:
            self._note(error)
        return not self._waiting

    def _end_trouble(self) -> None:
        if self._trouble:
            self.warn("writing", self._trouble.said(self._rank))
            self._trouble = None
            self._keep_reserve()

    def _drain(self) -> None:
        deadline = time.monotonic() + LAST_TRIAL_S
        while True:
            with self._lock:
                if self._is_closed or self._try():
                    return
                if time.monotonic() > deadline:
                    while self._waiting:
                        self._lose()
            time.sleep(RETRY_S / 10)

    def _keep_reserve(self) -> None:
        """Have some room kept, in bytes that no file system can make less of."""
        if not self._reserve_bytes:
            return
        reserve = self.path.with_suffix(".reserve")
        try:
            if not reserve.exists():
                with open(reserve, "xb", buffering=0, opener=private) as file:
                    file.write(os.urandom(self._reserve_bytes))
        except OSError:
            free_reserve(self.path)  # less than was asked for is better used by others

    def _thin(self, log: events.Log) -> events.Log:
        """Leave out of a batch all but the last call, once a rank has logged too much."""
        if self._written_bytes < RECORDS_BYTES or len(log.steps) < 2:
            return log
        if not self._has_thinned:
            self._has_thinned = True
            self.warn(
                "thinned",
                f"rank {self._rank} has logged {RECORDS_BYTES / 2**30:g} GiB: of calls that come together only the "
                "last is kept from now on. Log every tenth step, say",
            )
        return log._replace(steps=log.steps[-1:], times_s=log.times_s[-1:], values=log.values[-len(log.names) :])

    # Large values

    def _fields(self, event: Any) -> list[Any] | None:
        """Return a record's fields as JSON has them; None if a large one could not be written, which is then said."""
        fields = []
        for value in event:
            parts = value.parts() if isinstance(value, Message) else [value]
            is_bytes = isinstance(value, Message | bytes | bytearray | memoryview)
            if is_bytes and _bytes(parts) > BLOB_BYTES:
                is_result = isinstance(event, events.Result)
                try:
                    fields.append(self._in_a_file(parts, self.result_s if is_result else 0.0))
                except OSError as error:
                    if is_result:
                        raise
                    what = getattr(event, "kind", type(event).__name__)
                    self.warn(what, f"rank {self._rank}: its {what}, {_size(parts)}, is lost: {error.strerror}")
                    return None
            else:
                fields.append(plain(value.to_bytes() if isinstance(value, Message) else value))
        return fields

    def _in_a_file(self, parts: list[Any], wait_s: float) -> dict[str, Any]:
        """Write a large value to a file of its own; return what stands for it. Raises OSError if it cannot be."""
        deadline = time.monotonic() + wait_s
        said = False
        while True:
            try:
                name = self._write_file(parts)
            except OSError as error:
                why = f"{error.strerror or error}"
                if error.errno not in NO_ROOM or time.monotonic() > deadline:
                    raise OSError(error.errno, f"{why}: {_size(parts)} for {self.path.parent}") from error
                if not said:
                    what = f"the result of rank {self._rank}, {_size(parts)}, cannot be written: {why}"
                    self.warn("result", f"{what}. It is tried again for {wait_s:.0f} s; make room")
                said = True
                time.sleep(min(RETRY_S, wait_s / 10))
            else:
                if said:
                    self.warn("result", "")
                return {"file": [name, _bytes(parts)]}

    def _write_file(self, parts: list[Any]) -> str:
        with self._lock:
            self._blobs += 1
            name = f"{self.path.stem}.{self._blobs}.blob"
        aside = self.path.with_name(f".{name}.{os.getpid()}")
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                for part in parts:
                    left = memoryview(part)
                    while left:
                        left = left[os.write(descriptor, left[: 1 << 30]) :]
            finally:
                os.close(descriptor)
            os.replace(aside, self.path.with_name(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
        return name


def in_time(event: Any, off_s: float) -> Any:
    """Return an event with its times by a clock that is behind this machine's."""
    match event:
        case events.Log():
            return event._replace(times_s=array("d", [time_s - off_s for time_s in event.times_s]))
        case events.Failure():
            return event._replace(time_s=event.time_s - off_s)
        case events.Exit():
            return event._replace(at_s=event.at_s - off_s)
    return event


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _bytes(parts: list[Any]) -> int:
    return sum(memoryview(part).nbytes for part in parts)


def _size(parts: list[Any]) -> str:
    return f"{_bytes(parts) / 1e6:,.1f} MB"


class Output(io.RawIOBase):
    """A rank's stdout or stderr: what cannot be written, on a full disk, is counted, and ends no training."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream, self._descriptor = stream, stream.fileno()  # both: without a stream it would be closed
        self._lost_bytes = 0
        self._error = ""

    def fileno(self) -> int:
        """Return the descriptor, at which native code prints, too."""
        return self._descriptor

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write what can be written; say what could not be once something can."""
        try:
            if self._lost_bytes:
                said = f"\n... {self._lost_bytes:,} bytes of output could not be written: {self._error} ...\n"
                os.write(self._descriptor, said.encode())
                self._lost_bytes = 0
            return os.write(self._descriptor, data)
        except OSError as error:
            self._lost_bytes += len(data)
            self._error = error.strerror or str(error)
            return len(data)


def printing_never_fails(stream: Any) -> io.TextIOWrapper:
    """Return a stream in the place of this one, line by line, that does not fail on a full disk."""
    stream.flush()
    raw = io.BufferedWriter(Output(stream))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)  # as it is read, whatever the locale
