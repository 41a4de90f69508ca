"""Turns what comes from one rank's process into events until it has ended. Whatever happens, there is a last one."""

from __future__ import annotations

import codecs
import contextlib
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection

from labkit.engines.spawn import UNKNOWN, RankProcess
from labkit.protocol import events
from labkit.protocol.job import Job, RankInfo
from labkit.protocol.packed import Memory, new_memory
from labkit.rank.channels import CorruptMessage

LOOK_EVERY_S = 1.0
"""Time between two looks whether the process has ended, should nothing else tell: a process that the rank has forked
keeps open by whose closing the system tells it."""

DIES_S = 2.0
"""How long a process takes at most to be gone once its channels are closed. One that goes on has closed them itself."""

READ_BYTES = 1 << 16
"""As much as a pipe holds."""


class Listener:
    """Listens to one rank, in a thread of its own."""

    def __init__(self, info: RankInfo, process: RankProcess, put: Callable[[events.Event], None]) -> None:
        self._info, self._process, self._put = info, process, put
        self._rank = info.rank
        self._reader, self._output, self._stacks = process.queue.reader, process.output, process.stacks
        self._sentinel = process.process.sentinel
        self._sources = {self._reader, self._output, self._stacks, self._sentinel}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._doing = "its job was being sent"
        self._channel_end: EOFError | None = None
        self._memory: Memory | None = None
        """For what the rank returns: until that is read, by an event that has come, it must stay."""
        self.last: events.Exit | None = None
        """The rank's own last event, if its process stays."""

    def listen(self, job: Job) -> events.Exit:
        """Send the rank its job, bring what comes from it, and return its last event."""
        try:
            if job.is_here:
                self._memory = new_memory()
            try:
                self._process.send_job(self._info, job, self._memory)
            except OSError:
                if not self._process.wait_until(time.monotonic() + DIES_S):  # else its exit code will tell
                    raise
            self._doing = "what it sent was being read in the notebook"
            return self._bring_all()
        except BaseException as error:
            return self._give_up(error, job)

    def _bring_all(self) -> events.Exit:
        has_ended, look_s = False, time.monotonic() + LOOK_EVERY_S
        while True:
            ready = connection.wait(list(self._sources), 0.0 if has_ended else LOOK_EVERY_S)
            has_ended = has_ended or self._sentinel in ready
            if not has_ended and time.monotonic() >= look_s:
                look_s = time.monotonic() + LOOK_EVERY_S
                has_ended = self._process.has_ended
                if self._process.is_stuck:
                    return self._leave_behind()
                if self._channel_end is not None and not has_ended:
                    self._check_dies(self._channel_end)
            if self._output in ready:
                # What a rank leaves behind may write on, or hold its output open; all of the rank's own is in one read.
                self._read_output(is_last=has_ended)
            if self._stacks in ready:
                self._read_stacks()
            if self._reader in ready:
                self._read_events()
                if self.last is not None:
                    return self.last
            if has_ended and not set(ready) - {self._sentinel}:
                return self._end()

    def _read_output(self, is_last: bool) -> None:
        data = read(self._output)
        if text := self._decoder.decode(data, final=not data):
            self._put(events.Output(self._rank, text))
        if not data or is_last:
            self._sources.discard(self._output)

    def _read_stacks(self) -> None:
        if data := read(self._stacks):
            self._put(events.Stack(self._rank, data.decode("utf-8", "replace")))
        else:
            self._sources.discard(self._stacks)

    def _read_events(self) -> None:
        try:
            found = self._process.queue.receive()
        except EOFError as error:
            self._channel_end = error
            self._sources.discard(self._reader)
            return
        # What a rank had printed when it sent an event comes before it: by now that is there, and one read takes all
        # that a pipe holds. To look before the event was read is too early: the rank goes on meanwhile.
        if found and self._output in self._sources and self._output.poll():
            self._read_output(is_last=False)
        for event in found:
            if getattr(event, "rank", None) not in (self._rank, -1):
                raise CorruptMessage(f"{event!r:.200} is no event of rank {self._rank}")
            if isinstance(event, events.Exit):
                self.last = event
                return
            self._put(event)
        self._process.queue.check()

    # The end

    def _end(self) -> events.Exit:
        self._check_dies(self._channel_end or EOFError("its end of it is closed"))
        return events.Exit(self._rank, self._process.wait_for_exit())

    def _check_dies(self, end: EOFError) -> None:
        """Raise what ended the channel of a process that goes on without it."""
        if not self._process.wait_until(time.monotonic() + DIES_S):
            raise ConnectionError(f"its channel has ended, and it goes on ({end})") from end

    def _leave_behind(self) -> events.Exit:
        pid = self._process.pid
        self._put(
            events.Warned(
                self._rank,
                "end",
                f"rank {self._rank} was killed, and its process {pid} is still there: the system holds it. It ends "
                "when that lets it go",
            )
        )
        return events.Exit(self._rank, UNKNOWN)

    def _give_up(self, error: BaseException, job: Job) -> events.Exit:
        """End a rank that cannot be heard any longer, and say why."""
        summary, hint = self._explained(error)
        cause = f"{hint}\n\n{''.join(traceback.format_exception(error))}"
        self._put(events.Failure(self._rank, time.time() - job.start_s, self._doing, summary.splitlines()[0], cause))
        code = UNKNOWN
        with contextlib.suppress(Exception):
            self._process.kill()
            code = self._process.wait_for_exit()
        return events.Exit(self._rank, code)

    def _explained(self, error: BaseException) -> tuple[str, str]:
        what = f"{type(error).__name__}: {error}".rstrip(" :")
        if isinstance(error, CorruptMessage):
            return (
                f"{error}; two processes wrote into its channel at once?",
                f"What came from rank {self._rank} is no event.",
            )
        if isinstance(error, ConnectionError):
            return what, (
                f"Code in rank {self._rank} may have closed file descriptors that are not its own (os.closerange, or a "
                "library that makes a daemon of its process). The rank was ended: nothing comes from it any more."
            )
        return what, f"labkit could not speak with rank {self._rank} any longer, and ended it."


def read(pipe: connection.Connection) -> bytes:
    """Return what has come through a pipe that carries plain text; b"" at its end."""
    with contextlib.suppress(OSError):
        return os.read(pipe.fileno(), READ_BYTES)
    return b""
