"""A rank of a session on a cluster: as a run's, doing one job after another, each through a directory of its own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import NoReturn

from labkit.launchers.rank_entry import (
    FileChannel,
    begin,
    correct_clock,
    leave_rendezvous,
    listen,
    rank_info_here,
    rendezvous,
)
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.sender import FileSender
from labkit.protocol import events
from labkit.protocol.job import Job, RankInfo
from labkit.rank.first_step import get_warm
from labkit.rank.main import RankTask, do_and_exit, read_job
from labkit.session.directory import SessionDirectory

JOB_SEEN_S = 60.0
"""How long a job may take to be seen over a network's file system once its number has come."""


class JobChannel(FileChannel):
    """The channel of one job, in whose directory there is one attempt."""

    def end(self, event: events.Exit) -> None:
        """Append the last event. What a thread sends that outlives its job is dropped: it is no other job's."""
        self.check_process("Exit was to be sent")
        self.sender.send(event, is_last=True)


class JobInbox:
    """Where a rank of a session finds its jobs: its supervisor sends their numbers, the rest is in the directory."""

    def __init__(self, session: SessionDirectory, info: RankInfo, stacks: int) -> None:
        self._session, self._info, self._stacks = session, info, stacks
        self._given: SimpleQueue[JobChannel | None] = SimpleQueue()
        """The channels of the jobs that have come."""
        self._channel: JobChannel | None = None
        self._is_in_cells_group = False
        """Whether the ranks are in a process group that stays from cell to cell."""
        listen(self._receive)

    @property
    def is_empty(self) -> bool:
        """Whether no work has come."""
        return self._given.empty()

    def next_task(self) -> RankTask | None:
        """Block until there is work; return this rank's part in it, or None if there will be no more."""
        if not self._is_in_cells_group:
            leave_rendezvous()  # all have done with the last job
        channel = self._given.get()
        if channel is None:
            return None
        directory = channel.directory
        self._write_into(directory)
        job = read_job(directory.job, channel)
        self._is_in_cells_group = job.group is not None
        info = _info_in(job, self._info)
        correct_clock(channel.sender, info, directory)
        # The store is published in the job's own directory, so that nobody finds what an earlier job has left.
        return RankTask(job, info, channel, lambda job, info: rendezvous(info, directory, 0, anew=True))

    def _receive(self, word: str) -> None:
        kind, _, number = word.partition(":")
        if kind == "job":
            directory = _once_seen(self._session.of_job(int(number)))
            self._channel = JobChannel(directory, self._info.rank, 0)  # what comes from now on is of this job
            self._given.put(self._channel)
        elif kind == "leave":
            self._given.put(None)
        elif self._channel is not None:
            self._channel.receive(word)

    def _write_into(self, directory: RunDirectory) -> None:
        """Have what is printed, also by native code, and where this rank stands go to the job's files."""
        sys.stdout.flush()
        sys.stderr.flush()
        for kind, descriptors in (("out", (1, 2)), ("stacks", (self._stacks,))):
            new = directory.open(self._info.rank, 0, kind)
            for descriptor in descriptors:
                os.dup2(new, descriptor, inheritable=descriptor < 3)
            os.close(new)


def main() -> NoReturn:
    """Be one rank of a session: `rank_entry DIRECTORY RANK NUMBER`, with the launcher's variables in the environment.

    The number tells the processes that this rank has had apart.
    """
    directory, rank, number = SessionDirectory(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

    def prepare() -> Callable[[], RankTask | None]:
        begin(stacks := directory.open(rank, number, "stacks"))
        inbox = JobInbox(directory, rank_info_here(), stacks)
        if inbox.is_empty:
            get_warm()
        FileSender(directory.file(rank, number, "records"), keeps_reserve=False).send(events.Ready(rank), is_last=True)
        return inbox.next_task

    do_and_exit(prepare)


def _once_seen(directory: RunDirectory) -> RunDirectory:
    deadline = time.monotonic() + JOB_SEEN_S
    while not directory.job_file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return directory


def _info_in(job: Job, whole: RankInfo) -> RankInfo:
    """Return where a rank is among the first ranks that have a part in a job; on each node ranks follow each other."""
    first_here = whole.rank - whole.local_rank
    here = min(whole.local_world_size, job.world_size - first_here)
    return whole._replace(world_size=job.world_size, local_world_size=here)
