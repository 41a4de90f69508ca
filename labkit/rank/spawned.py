"""What a process does that the notebook has spawned: it gets its jobs by a pipe, and ends if the notebook is gone."""

from __future__ import annotations

import faulthandler
import sys
import threading
import traceback
from queue import SimpleQueue as JobQueue
from typing import Any

import labkit.rank.debugging  # noqa: F401 - the job will bring its hook: imported before it comes
from labkit.protocol import events
from labkit.rank import descendants, first_step, script_compat
from labkit.rank.channels import PipeChannel, RankPipes, receive
from labkit.rank.main import RankTask, do_jobs, fast_exit
from labkit.rank.signals import handle_signals
from labkit.system import host


def main(_: int, ends: RankPipes) -> None:
    """Do a job, report, and end the process; on reserved ranks do job after job. What `mp.spawn` calls.

    The rank comes with the job.
    """

    code = 1
    try:
        descendants.adopt()
        handle_signals(ends.stacks.fileno())
        host.redirect_output(ends.output)  # first: what goes wrong from here on is to be seen
        script_compat.begin_spawned()
        faulthandler.enable()  # native crashes print where they were, into the rank's output
        inbox = Inbox(ends)
        if inbox.is_empty:
            first_step.warm_up()
        ends.queue.put(events.Ready())
        code = do_jobs(inbox.next_task)
    except BaseException:
        traceback.print_exc()
    finally:
        fast_exit(code)


class Inbox:
    """Where a process that the notebook started finds its jobs. The process ends if the notebook is gone."""

    def __init__(self, ends: RankPipes) -> None:
        self._ends = ends
        self._tasks: JobQueue[RankTask | None] = JobQueue()
        self._channel: PipeChannel | None = None
        threading.Thread(target=self._listen, name="labkit-inbox", daemon=True).start()

    def next_task(self) -> RankTask | None:
        """Block until the notebook sends work; return this process's part in it, or None if there will be no more."""
        return self._tasks.get()

    @property
    def is_empty(self) -> bool:
        """Whether no work has come."""
        return self._tasks.empty()

    def _listen(self) -> None:
        try:
            while True:
                try:
                    word = receive(self._ends.inbox)
                except (EOFError, OSError) as error:
                    print(f"labkit: the notebook is gone ({type(error).__name__}: {error})", file=sys.stderr)
                    break
                self._take(word)
        except BaseException:
            traceback.print_exc()
            print("labkit: this rank cannot read what the kernel has sent. Restart the kernel", file=sys.stderr)
        finally:
            fast_exit(1)

    def _take(self, word: Any) -> None:
        if word == "leave":
            self._tasks.put(None)
        elif isinstance(word, tuple):
            job, info, memory = word
            # What is said from now on is of this job, and not of the last.
            self._channel = PipeChannel(self._ends.queue, info.rank)
            self._channel.memory, self._channel.hooks = memory, job.own_hooks()
            self._tasks.put(RankTask(job, info, self._channel))
        elif self._channel is not None:
            self._channel.receive(word)
