"""One rank in the notebook's own process and thread, so that a debugger, `%debug` and a profiler just work.

The rest is as everywhere: the function travels by value, finds a process group (of one) and the settings of a rank,
logs to a live view, and its run has history, output, results and an error. What it changes of the process's settings is
put back (`rank.staying`). Imported modules are the notebook's own, and on a GPU so are its memory and its context.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

import torch
import torch.distributed as dist

from labkit.engines.base import Engine, Target
from labkit.engines.local import loopback_environment
from labkit.protocol import events
from labkit.protocol.job import Job, RankInfo
from labkit.protocol.text import printable
from labkit.rank import device, failure, main, process_group, staying
from labkit.rank.channels import Channel
from labkit.rank.hooks import hooks_of
from labkit.rank.log_batcher import LogBatcher
from labkit.rank.script_compat import children
from labkit.system import host

failure.OWN_FILES.add(__file__)


class Here(Target):
    """Where to launch: in this process, as the one rank of the run. `labkit.launch(train, on=labkit.Here())`.

    The cell is busy until the function returns, also with `wait=False`. An interrupt asks it to stop, as the Stop
    button does (`worker.log` then raises `labkit.Stopped`); a second one, or the end of the grace, interrupts it. When
    it fails, `%debug` begins in the reader's own line.
    """

    is_here = True
    world_size = 1

    def engine(self, name: str, stall_s: float | None) -> InProcessEngine:
        """Return what carries one run. Raises RuntimeError where the function cannot run."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("labkit.Here() needs the main thread, which can be interrupted; launch from a cell")
        if dist.is_initialized():
            raise RuntimeError(
                "this process is in a process group already, and a rank joins one of its own; call "
                "torch.distributed.destroy_process_group() first"
            )
        return InProcessEngine()

    def __repr__(self) -> str:
        return "labkit.Here()"


class InProcessEngine(Engine):
    """Carries a run of one rank in this process; `work` does it, in the thread that calls."""

    runs_in_this_process = True
    stacks_s = 1.0
    shows_output = True
    """What is printed is seen at once: nobody else is to print it again."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.trace: TracebackType | None = None
        """Of the reader's error, for `%debug`."""
        self._events: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self._channel = _Channel(self._events)
        self._job: Job | None = None
        self._is_at_work = self._has_begun = self._was_killed = False
        self._killing = threading.Lock()
        self._on_interrupt: Callable[[], object]

    def start(self, job: Job) -> None:
        """Take the job; `work` does it."""
        environment = {**loopback_environment(), **job.environment}
        self._job = job._replace(environment=environment, path=(), settings=None)  # which are there

    def work(self, interrupted: Callable[[], object]) -> None:
        """Do the job in this thread, and tell the run what came of it. Raises nothing.

        An interrupt calls `interrupted`, which may raise KeyboardInterrupt.
        """
        assert self._job is not None
        self._on_interrupt = interrupted
        before, code, streams = staying.State(), 1, (sys.stdout, sys.stderr)
        threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
        children.send_by_value()
        device.forget_peak()
        try:
            self._is_at_work = self._has_begun = True
            signal.signal(signal.SIGINT, self._interrupted)
            sys.stdout, sys.stderr = (_Tee(stream, self._channel) for stream in streams)
            code = self._run(self._job)
        except KeyboardInterrupt:
            self._channel.send(events.Stopped(0))
            code = 0
        finally:
            self._is_at_work = False
            with self._killing:  # no interrupt of ours comes after this
                pass
            sys.stdout, sys.stderr = streams
            children.send_by_name()
            signal.signal(signal.SIGINT, handler)
            torch.set_num_threads(threads)
            before.put_back()
            self._channel.send(events.Memory(0, host.peak_bytes(os.getpid()), device.peak_bytes()))
            self._channel.send(events.Exit(0, code, ended=self._was_killed))

    def _run(self, job: Job) -> int:
        """As `rank.main.run_job`, but leave this process, which is not a rank's, as it is, and the error's frames."""
        channel, info = self._channel, RankInfo(0, 0, 1, 1)
        channel.hooks = hooks_of(job)
        log = LogBatcher(0, channel.send, job.start_s)
        try:
            settled, channel.store = main.join(main.RankTask(job, info, channel, lambda *_: dist.HashStore()))
            main.call_and_send_result(job, info, channel, log, settled, is_here=True)
            return 0
        except KeyboardInterrupt:
            log.close()
            raise
        except BaseException as error:
            log.close(error)
            failure.report(error, 0, job, channel)
            self.trace = failure.below_own(failure.behind(error))
            return failure.exit_code(error)
        finally:
            process_group.leave()

    def _interrupted(self, *_: Any) -> None:
        if not self._is_at_work:
            return
        if self._was_killed:
            raise KeyboardInterrupt
        self._on_interrupt()

    def poll(self, timeout_s: float) -> list[events.Event]:
        """Return the records that have come, waiting at most `timeout_s` for the first."""
        try:
            found = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def ask_to_stop(self) -> None:
        """Have the next `worker.log` raise `Stopped`."""
        self._channel.stop_asked_s = self._channel.stop_asked_s or time.monotonic()

    def ask_for_stacks(self) -> list[int]:
        """Look where the thread stands that does the job."""
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            self._channel.send(events.Stack(0, file.read()))
        self._channel.receive("details")
        return [0]

    def kill(self) -> None:
        """Interrupt the function. One in native code that keeps Python's lock goes on until it returns."""
        if not self._has_begun:
            self._channel.send(events.Exit(0, 1, ended=True))
        with self._killing:
            if self._is_at_work and not self._was_killed:
                self._was_killed = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def killed(self, rank: int) -> bool:
        """Whether `kill` ended the function."""
        return self._was_killed

    def close(self) -> None:
        """Do nothing: there is nothing to let go of."""


class _Channel(Channel):
    """Brings what the rank reports to the run in the same process."""

    def __init__(self, into: queue.SimpleQueue[events.Event]) -> None:
        super().__init__()
        self.rank = 0
        self._into = into

    def _send(self, event: events.Event) -> None:
        """Put one event where `poll` finds it."""
        self._into.put(event)


class _Tee:
    """A stream that also tells the run what the function's own thread prints; a view's lines are not the function's."""

    def __init__(self, stream: TextIO, channel: Channel) -> None:
        self._stream, self._channel, self._thread = stream, channel, threading.get_ident()

    def write(self, text: str) -> int:
        """Write, and tell the run; as in other ranks, what UTF-8 does not take is escaped."""
        text = printable(text)
        if threading.get_ident() == self._thread and not self._channel.is_copy:
            self._channel.send(events.Output(0, text))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
