"""Ranks that are forks of the test's own process: a local engine's, with its channels and its listeners, in 50 ms.

They are as the spawned ones are but for what they begin with, the process group, which they do not join, and exit
handlers, which are this process's.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading

import torch._dynamo  # noqa: F401 (as an optimizer does: else each rank would import 900 modules by itself)

from labkit.engines import spawn
from labkit.engines.local import LocalEngine
from labkit.rank import process_group, spawned
from labkit.system import host


class ForkedRanks(LocalEngine):
    """A local engine with such ranks. With `dies`, rank 1 ends before it has its job."""

    stacks_s = 2.0  # a stack that a fault keeps from coming is waited for

    def __init__(self, world_size, dies=False):
        super().__init__(world_size)
        self._dies = dies
        self.started = []

    def _take(self):
        self.started = start(self.world_size, self._dies)
        return self.started

    def _give_back(self, ranks):
        with contextlib.ExitStack() as last:
            for process in ranks:
                process.send("leave")
                last.callback(process.close)


def start(count, dies=False):
    """Return processes that wait for a job. Called from a main thread, whose stack ends in a module."""
    context = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as if_it_fails:
        ends, mine = spawn.open_pipes(count, if_it_fails)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, host.stacks_signal})
        processes = [context.Process(target=_be_a_rank, args=(index, ends, mine, dies)) for index in range(count)]
        for process in processes:
            process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for end in ends:
            for copy in (end.inbox, end.output, end.stacks):
                copy.close()
            end.queue.close_writer()
        if_it_fails.pop_all()
    return [spawn.RankProcess(process, *channel) for process, channel in zip(processes, mine, strict=True)]


def _be_a_rank(index, ends, notebooks, dies):
    atexit._clear()
    threading.excepthook = threading.__excepthook__  # not pytest's
    if dies and index == 1:
        os._exit(3)
    for inbox, queue, output, stacks in notebooks:
        for end in (inbox, queue.reader, output, stacks):
            end.close()
    process_group.join = lambda *_: None
    for other in ends:
        if other is not ends[index]:
            other.close()
    spawned.main(index, ends[index])
