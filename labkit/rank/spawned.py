"""What a process does that the notebook has spawned: it gets its jobs by a pipe, and ends if the notebook is gone."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from queue import SimpleQueue as JobQueue

import torch

import labkit.rank.debugging  # noqa: F401 - the job will bring its hook: imported before it comes
from labkit.protocol import events
from labkit.rank.channels import Channel, RankPipes, receive
from labkit.rank.main import RankTask, do_jobs, fast_exit
from labkit.rank.script_compat import bars, children
from labkit.rank.signals import handle_signals
from labkit.system import host


def main(_: int, ends: RankPipes) -> None:
    """Do a job, report, and end the process; on reserved ranks do job after job. What `mp.spawn` calls.

    The rank comes with the job.
    """

    code = 1
    try:
        handle_signals(ends.stacks.fileno())
        host.redirect_output(ends.output)  # first: what goes wrong from here on is to be seen
        children.prepare()
        bars.as_text()
        faulthandler.enable()  # native crashes print where they were, into the rank's output
        tasks: JobQueue[RankTask | None] = JobQueue()
        threading.Thread(target=_listen, args=(ends, tasks), name="labkit-inbox", daemon=True).start()
        if tasks.empty():
            warm_up()
        ends.queue.put(events.Ready())
        code = do_jobs(tasks.get)
    except BaseException:
        traceback.print_exc()
    finally:
        fast_exit(code)


def warm_up() -> None:
    """Import what an optimizer needs, half of the compiler, and take the first faults of a first step."""
    weight = torch.nn.Parameter(torch.zeros(8, 8))  # not a layer: that would draw random numbers
    optimizer = torch.optim.SGD([weight], lr=0.0)
    torch.nn.functional.linear(torch.zeros(4, 8), weight).sum().backward()
    optimizer.step()


def _listen(ends: RankPipes, tasks: JobQueue[RankTask | None]) -> None:
    """Receive jobs, and words for the newest. Ends the process if the notebook is gone."""
    channel: Channel | None = None
    try:
        while True:
            try:
                word = receive(ends.inbox)
            except (EOFError, OSError) as error:
                print(f"labkit: the notebook is gone ({type(error).__name__}: {error})", file=sys.stderr)
                host.end_session(os.getpid())
                break
            if word == "leave":
                tasks.put(None)
            elif isinstance(word, tuple):
                job, info, memory = word
                # What is said from now on is of this job, and not of the last.
                channel = Channel(ends.queue, info.rank)
                channel.memory, channel.hooks = memory, job.own_hooks()
                tasks.put(RankTask(job, info, channel))
            elif channel is not None:
                channel.receive(word)
    except BaseException:
        traceback.print_exc()
        print("labkit: this rank cannot read what the kernel has sent. Restart the kernel", file=sys.stderr)
    finally:
        fast_exit(1)
