"""A rank of a session on a cluster: `remote`'s, doing one job after another, each through a folder of its own."""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple, NoReturn

from labkit.cluster.rank_entry import listen, rank_info_here, rendezvous
from labkit.cluster.run_directory import FileSender, RunFolder
from labkit.protocol import events
from labkit.protocol.job import Job, RankInfo
from labkit.rank.channels import Channel
from labkit.rank.main import Part, do_and_exit, get_warm
from labkit.rank.signals import handle_signals

JOB_SEEN_S = 60.0
"""How long a job may take to be seen over a network's file system once it has been spoken of."""


class JobChannel(Channel):
    """The line of one job: what the rank reports goes to its file."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self._sender = FileSender(folder.file(rank, 0, "records"))

    def send(self, event: events.Event) -> None:
        """Append one event. What a thread sends that outlives its job is dropped: it is no other job's."""
        self._sender.send(event)

    def end(self, event: events.Exit) -> None:
        """Append the last one."""
        self._sender.send(event, is_last=True)


class Given(NamedTuple):
    """A job that this rank has been given."""

    folder: RunFolder
    channel: JobChannel


class JobInbox:
    """Where a rank of a session finds its jobs: `guard` says their numbers, and they lie in the session's folder."""

    def __init__(self, session: RunFolder, info: RankInfo, stacks: int) -> None:
        self._session, self._info, self._stacks = session, info, stacks
        self._given: SimpleQueue[Given | None] = SimpleQueue()
        self._channel: JobChannel | None = None
        listen(self._hear)

    @property
    def is_empty(self) -> bool:
        """Whether no work has come."""
        return self._given.empty()

    def next_part(self) -> Part | None:
        """Block until there is work; return this rank's part in it, or None if there will be no more."""
        given = self._given.get()
        if given is None:
            return None
        job = given.folder.job()
        self._write_into(given.folder)
        info = _info_in(job, self._info)
        # Where they meet is published in the job's own folder, so that nobody finds what an earlier job has left.
        return Part(job, info, given.channel, lambda job, info: rendezvous(info, given.folder, 0, anew=True))

    def _hear(self, word: str) -> None:
        kind, _, number = word.partition(":")
        if kind == "job":
            folder = _once_seen(self._session.of_job(int(number)))
            self._channel = JobChannel(folder, self._info.rank)  # what is said from now on is of this job
            self._given.put(Given(folder, self._channel))
        elif kind == "leave":
            self._given.put(None)
        elif self._channel is not None:
            self._channel.receive(word)

    def _write_into(self, folder: RunFolder) -> None:
        """Have what is printed, also by native code, and where this rank stands go to the job's files."""
        sys.stdout.flush()
        sys.stderr.flush()
        for kind, descriptors in (("out", (1, 2)), ("stacks", (self._stacks,))):
            new = _open(folder, self._info.rank, 0, kind)
            for descriptor in descriptors:
                os.dup2(new, descriptor, inheritable=descriptor < 3)
            os.close(new)


def main() -> NoReturn:
    """Be one rank of a session: `reserved FOLDER RANK NUMBER`, with the launcher's variables in the environment.

    The number tells the processes that this rank has had apart.
    """
    folder, rank, number = RunFolder(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

    def prepare() -> Callable[[], Part | None]:
        stacks = _open(folder, rank, number, "stacks")
        handle_signals(stacks)
        faulthandler.enable()
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
        inbox = JobInbox(folder, rank_info_here(), stacks)
        if inbox.is_empty:
            get_warm()
        FileSender(folder.file(rank, number, "records")).send(events.Ready(rank), is_last=True)
        return inbox.next_part

    do_and_exit(prepare)


def _open(folder: RunFolder, rank: int, attempt: int, kind: str) -> int:
    return os.open(folder.file(rank, attempt, kind), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _once_seen(folder: RunFolder) -> RunFolder:
    deadline = time.monotonic() + JOB_SEEN_S
    while not folder.job_file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return folder


def _info_in(job: Job, whole: RankInfo) -> RankInfo:
    """Say where a rank is among the first ranks that have a part in a job; on each node ranks follow each other."""
    first_here = whole.rank - whole.local_rank
    here = min(whole.local_world_size, job.world_size - first_here)
    return whole._replace(world_size=job.world_size, local_world_size=here)
