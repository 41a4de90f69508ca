"""A job that a rank cannot read: it reports that, ends, and says what to do."""

from __future__ import annotations

import pickle
import re
import signal
import threading
import time
from multiprocessing.connection import Pipe

import pytest

import labkit
from labkit.debugger import Debugger
from labkit.engines import standby
from labkit.protocol import events
from labkit.protocol.framing import framed
from labkit.protocol.job import RankHook
from labkit.rank import spawned
from labkit.rank.channels import EventQueue, RankPipes
from tests.conftest import LONG_S, wait_until
from tests.support import workloads
from tests.support.agents import Agents
from tests.support.fake_engine import A_JOB

# A rank's inbox


class Ended(BaseException):
    """What stands for the end of a process."""


class Rank:
    """A rank's inbox, in this process, and what the notebook sends it."""

    def __init__(self, monkeypatch):
        reader, self.inbox = Pipe(duplex=False)
        self.queue = EventQueue()
        self.code = []
        monkeypatch.setattr(spawned, "fast_exit", self._leave)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        self.ends = RankPipes(reader, self.queue, None, None)
        self.rank_inbox = spawned.Inbox(self.ends)

    def _leave(self, code):
        self.code.append(code)
        raise Ended

    def send(self, *words):
        for word in words:
            for part in framed(word if isinstance(word, bytes) else pickle.dumps(word), []):
                self.inbox.send_bytes(part)

    def reports(self):
        wait_until(lambda: self.code)
        return self.queue.receive()

    def close(self):
        self.inbox.close()
        wait_until(lambda: self.code)  # or its thread ends this process, which is not a rank
        self.queue.close()


@pytest.fixture
def rank(monkeypatch):
    found = Rank(monkeypatch)
    yield found
    found.close()


COMES = {"info": (1, 1, 2, 2), "start_s": time.time()}


def test_a_rank_that_gets_a_job_has_its_part_in_it(rank):
    rank.send(COMES, A_JOB)
    part = rank.rank_inbox.next_task()
    assert (part.info.rank, part.job._replace(function=A_JOB.function)) == (1, A_JOB)
    assert rank.code == []


@pytest.mark.parametrize(
    "job", [b"cos\nno_such_name\n.", b"garbage", b"", pickle.dumps((1, A_JOB))], ids=["gone", "garbage", "empty", "old"]
)
def test_a_rank_that_cannot_read_its_job_reports_it_and_ends(rank, job, capsys):
    rank.send(COMES, job)
    (failure,) = rank.reports()
    assert isinstance(failure, events.Failure)
    assert (failure.rank, failure.during) == (1, "receiving its job")
    assert failure.traceback.startswith("Restart the kernel if labkit, or what the job names, was changed since")
    assert rank.code == [1]
    assert "Restart the kernel" in capsys.readouterr().err


def test_a_rank_that_gets_no_message_at_all_ends_and_says_so(rank, capsys):
    rank.inbox.send_bytes(pickle.dumps((1, A_JOB)))
    assert rank.reports() == []
    assert rank.code == [1]
    assert "labkit: this rank cannot read what the kernel has sent. Restart the kernel" in capsys.readouterr().err


def test_a_rank_that_is_left_alone_ends(rank):
    rank.inbox.close()
    wait_until(lambda: rank.code == [1])


# With real ranks


class Unreadable(RankHook):
    """What the kernel can pickle and a rank cannot read."""

    def __reduce__(self):
        return _missing, ()


def _missing():
    raise AttributeError("module 'labkit' has no attribute 'what_is_new'")


@pytest.fixture
def unreadable_jobs(monkeypatch):
    """Jobs name what the ranks do not have."""
    begin = Debugger.begin
    monkeypatch.setattr(Debugger, "begin", lambda self, job: begin(self, job).with_hook(Unreadable()))


@pytest.fixture
def standing_by():
    standby.on(2)
    wait_until(lambda: len(standby.pids()) == 2)
    yield
    standby.off()


@pytest.mark.spawns
@pytest.mark.parametrize("where", ["new ranks", "standby", "a session"])
@pytest.mark.usefixtures("unreadable_jobs")
def test_ranks_that_cannot_read_their_job_end_the_run_and_say_to_restart_the_kernel(where, request):
    if where == "standby":
        request.getfixturevalue("standing_by")
    on = request.getfixturevalue("ranks") if where == "a session" else None
    run = labkit.launch(workloads.log_once, world_size=2, on=on, wait=False, live=False)
    assert run.over.wait(LONG_S)
    assert re.match(
        r"rank [01] failed while receiving its job: AttributeError: module 'labkit' has no attribute 'what_is_new'\n",
        str(run.error),
    )
    assert "Restart the kernel" in str(run.error)
    codes = {rank.exit_code for rank in run._state.ranks}
    assert 1 in codes <= {1, -signal.SIGKILL}, "on a slow machine the second is ended for the first"


class UnreadableOnNodes:
    """The same, without a module of the tests, which makes a folder for temporary files."""

    def __reduce__(self):
        return eval, ("1 / 0",)


@pytest.mark.spawns
@pytest.mark.parametrize("reads", ["ranks", "nodes"])
def test_nodes_that_cannot_read_a_job_end_the_run_and_say_why(reads, tmp_path, monkeypatch):
    begin = Debugger.begin

    def unreadable(self, job):
        job = begin(self, job)
        return job.with_hook(UnreadableOnNodes()) if reads == "ranks" else job._replace(cells={"": UnreadableOnNodes()})

    monkeypatch.setattr(Debugger, "begin", unreadable)
    run = labkit.launch(workloads.log_once, on=Agents(2, folder=tmp_path / "runs"), wait=False, live=False)
    assert run.over.wait(LONG_S)
    said = str(run.error)
    assert "ZeroDivisionError: division by zero" in said
    if reads == "ranks":
        assert re.match(r"rank [01] failed while receiving its job: ", said), said
    else:
        assert "an agent has ended before its ranks" in said
        assert re.search(r"^node [01] \(.+\): ", said, re.MULTILINE), said


@pytest.mark.spawns
def test_a_session_goes_on_with_the_next_job_after_one_that_could_not_be_read(ranks):
    assert labkit.launch(workloads.log_once, on=ranks, live=False).status == "finished"
