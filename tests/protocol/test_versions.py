"""A job that a rank cannot read, after `git pull` under a living kernel above all: it reports, ends, and what to do is
said."""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
import time
import types
from multiprocessing.connection import Pipe

import pytest

import labkit
from labkit.debugger.debugger import Debugger
from labkit.engines import standby
from labkit.protocol import events, versions
from labkit.protocol.framing import framed
from labkit.protocol.job import RankHook
from labkit.protocol.versions import Version
from labkit.rank import main, spawned
from labkit.rank.channels import EventQueue, RankPipes
from tests.conftest import LONG_S, wait_until
from tests.support import workloads
from tests.support.fake_engine import A_JOB, KeptChannel

EARLIER = Version("0.0.9", 1.6e9)


def test_a_change_of_any_file_is_another_version(tmp_path, monkeypatch):
    (tmp_path / "rank").mkdir()
    for name in ("__init__.py", "rank/main.py"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1.7e9, 1.7e9))
    monkeypatch.setattr(versions, "PACKAGE", tmp_path)
    before = versions.on_disk()
    assert before == Version(labkit.__version__, 1.7e9)
    assert versions.restart(before, versions.on_disk()) == ""
    os.utime(tmp_path / "rank" / "main.py", (1.8e9, 1.8e9))
    said = versions.restart(before, versions.on_disk())
    assert said.startswith(
        f"labkit has changed since the kernel imported it (labkit {labkit.__version__}, files of 2023-"
    )
    assert said.endswith("): restart the kernel")


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


COMES = {"rank": 1, "labkit": tuple(versions.on_disk()), "start_s": time.time()}


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


def test_a_rank_of_another_labkit_than_the_kernels_names_both(rank):
    rank.send(COMES | {"labkit": tuple(EARLIER)}, b"cos\nno_such_name\n.")
    (failure,) = rank.reports()
    assert failure.summary.startswith(
        f"labkit has changed since the kernel imported it ({EARLIER}; now {versions.on_disk()})"
    )
    assert "restart the kernel: AttributeError" in failure.summary


def test_a_rank_to_which_an_unknown_labkit_speaks_ends_and_says_so(rank, capsys):
    rank.inbox.send_bytes(pickle.dumps((1, A_JOB)))
    assert rank.reports() == []
    assert rank.code == [1]
    assert "labkit: this rank cannot read what the kernel has sent. Restart the kernel" in capsys.readouterr().err


def test_a_rank_that_is_left_alone_ends(rank):
    rank.inbox.close()
    wait_until(lambda: rank.code == [1])


def test_a_rank_on_a_cluster_reports_a_job_that_it_cannot_read(tmp_path):
    (tmp_path / "job.pkl").write_bytes(b"cos\nno_such_name\n.")
    channel = KeptChannel()
    with pytest.raises(AttributeError):
        main.read_job(lambda: pickle.loads((tmp_path / "job.pkl").read_bytes()), channel)
    (failure,) = channel.sent
    assert (failure.rank, failure.during) == (1, "receiving its job")
    assert failure.summary.startswith("AttributeError: ")
    assert failure.traceback.startswith("Restart the kernel if")


# With real ranks


class Unreadable(RankHook):
    """What the kernel can pickle and a rank cannot read."""

    def __reduce__(self):
        return _missing, ()


def _missing():
    raise AttributeError("module 'labkit' has no attribute 'what_is_new'")


@pytest.fixture
def unreadable_jobs(monkeypatch):
    """The kernel has been there since an earlier version, and its jobs name what is no more."""
    monkeypatch.setattr(versions, "loaded", lambda: EARLIER)
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
        r"rank [01] failed while receiving its job: labkit has changed since the kernel imported it \(labkit 0.0.9, "
        r".*; now labkit .*\): restart the kernel: AttributeError: module 'labkit' has no attribute 'what_is_new'\n",
        str(run.error),
    )
    assert [rank.exit_code for rank in run._state.ranks] == [1, 1]


@pytest.mark.spawns
def test_a_session_goes_on_with_the_next_job_after_one_that_could_not_be_read(ranks):
    assert labkit.launch(workloads.log_once, on=ranks, live=False).status == "finished"


@pytest.mark.spawns
def test_a_rank_that_does_not_find_what_the_kernel_names_says_to_restart_it(monkeypatch):
    """The room has moved: the process cannot import the function that it is to begin with."""
    monkeypatch.setattr(versions, "loaded", lambda: EARLIER)
    monkeypatch.setitem(sys.modules, "labkit.rank.earlier", types.SimpleNamespace(main=spawned.main))
    monkeypatch.setattr(spawned.main, "__module__", "labkit.rank.earlier")
    with pytest.raises(labkit.WorkerFailed, match="rank 0 failed while starting: labkit has changed since the kernel"):
        labkit.launch(workloads.log_once, world_size=1, live=False)
