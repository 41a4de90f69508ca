"""How the notebook follows the jobs of a session on a cluster, by what is written in its directory."""

from __future__ import annotations

import threading
import time

import cloudpickle
import pytest

import labkit
from labkit.launchers import job_events
from labkit.launchers.launcher_job import LauncherJob
from labkit.launchers.old_slurm import commands as slurm_commands
from labkit.launchers.run_directory.sender import FileSender
from labkit.protocol import events
from labkit.protocol.job import RankInfo
from labkit.run import Run
from labkit.session import cluster_reserve
from labkit.session.cluster_reserve import ClusterReserve
from labkit.session.directory import SessionDirectory
from labkit.session.rank_entry import _info_in
from labkit.session.turns import Turn
from tests.conftest import wait_until
from tests.support.session_files import A_JOB, a_session, add_job, write


@pytest.fixture
def folder(tmp_path):
    return a_session(tmp_path / "session")


class Launched(LauncherJob):
    """A launcher that does nothing by itself."""

    kind = "test"

    def submit(self):
        return {}

    def end_now(self):
        self.was_ended = True
        self.settle(0.0)

    def interruption(self):
        return job_events.JobEnded(-1, "the job lost a node: node2 is down", "It begins again.", "slurm")

    def ending(self, seen):
        return job_events.JobEnded(-1, "the job was cancelled", "Ask who did it.", "slurm")


class Rank:
    """Writes as a rank and its supervisor do."""

    def __init__(self, folder, rank):
        self.folder, self.rank, self.number = folder, rank, -1

    def begin(self):
        self.number += 1
        write(self.folder.file(self.rank, self.number, "records"), "Process", self.rank, 1000, f"node{self.rank + 1}")
        write(self.folder.file(self.rank, self.number, "records"), "Ready", self.rank)

    def send(self, number, *what):
        path = self.folder.of_job(number).file(self.rank, 0, "records")
        sender = FileSender(path)
        for record in what:
            sender.send(record)

    def end(self, number, code=0, ended=False, dies=False):
        if dies:
            write(self.folder.file(self.rank, self.number, "records"), "Exit", self.rank, code, "", ended, 1.0)
        self.send(number, events.Exit(self.rank, code, ended=ended, at_s=time.time()))


@pytest.fixture
def launched(folder):
    return Launched(2, folder, {})


@pytest.fixture
def ranks(folder):
    made = [Rank(folder, rank) for rank in range(2)]
    for rank in made:
        rank.begin()
    return made


@pytest.fixture
def reserve(launched, ranks):
    made = ClusterReserve(launched, [0, 0])
    made.begin()
    yield made
    launched.settle(0.0)
    made.close()


@pytest.fixture
def held():
    return []


@pytest.fixture
def turn(held):
    return Turn(held.append, lambda engine: held.remove(engine) if engine in held else None)


@pytest.fixture
def launch(reserve, turn):
    def launch(world_size=2):
        engine = reserve.engine(world_size, turn, {"name": "mine", "stall_s": None})
        run = Run(engine, world_size, "mine")
        run.start(A_JOB._replace(world_size=world_size, start_s=time.time()))
        return run

    return launch


def over(run):
    assert run.over.wait(10), run.states
    return run.error


def test_a_job_is_there_before_it_is_spoken_of_and_its_end_gives_the_ranks_back(launch, folder, ranks, held):
    run = launch()
    assert len(held) == 1
    assert folder.asked.read_text() == "job:1:0,1\n"
    job = folder.of_job(1).job()
    assert (job.world_size, job.function.head) == (2, A_JOB.function.head)
    assert job.stays is not None, "the process stays"
    for rank in ranks:
        rank.send(1, events.Started(rank.rank), events.Result(rank.rank, cloudpickle.dumps(rank.rank)))
        rank.end(1)
    assert over(run) is None
    assert run.results == [0, 1]
    wait_until(lambda: not held)
    launch(1)
    assert folder.asked.read_text() == "job:1:0,1\njob:2:0\n"
    ranks[0].end(2)


def test_what_the_launcher_ended_waits_for_its_reason(launch, launched, reserve, ranks):
    run = launch()
    for rank in ranks:
        rank.send(1, events.Started(rank.rank))
        rank.end(1, -15, ended=True, dies=True)
    time.sleep(0.3)
    assert not run.over.is_set()
    launched.emit(job_events.Notice(-1, "job 5 waits", queued=True))
    error = over(run)
    assert error.rank is None
    assert str(error).startswith("the job lost a node: node2 is down\n\nIt begins again.")
    assert run.states == ["ended", "ended"]
    assert [each.state for each in reserve.ranks()] == ["queued", "queued"]
    for rank in ranks:
        rank.begin()
    launched.emit(job_events.Notice(-1, "job 5 on node[1-2]"))
    wait_until(lambda: [each.state for each in reserve.ranks()] == ["idle", "idle"])
    assert [(each.rank, each.how) for each in reserve.take_replaced()] == [
        (rank, "the job lost a node: node2 is down") for rank in range(2)
    ]
    assert reserve.take_replaced() == []


def test_a_job_that_stopped_because_slurm_took_the_machines_has_not_finished(launch, launched, ranks, folder):
    run = launch()
    for rank in ranks:
        rank.send(1, events.Started(rank.rank))
        write(folder.of_job(1).file(rank.rank, 0, "records"), "Interrupted", rank.rank)
        rank.send(1, events.Result(rank.rank, cloudpickle.dumps("a part")))
        rank.end(1)
    time.sleep(0.3)
    assert not run.over.is_set()
    launched.emit(job_events.Notice(-1, "job 5 waits", queued=True))
    assert str(over(run)).startswith("the job lost a node: node2 is down")
    assert run.results == ["a part", "a part"]


def test_a_launch_that_is_interrupted_when_the_ranks_have_it_is_taken_back(launch, folder, held, monkeypatch):
    def interrupted(engine):
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster_reserve.JobEngine, "_emit_who_is_absent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch()
    assert folder.asked.read_text().split() == ["job:1:0,1", "kill:1:0,1"]
    assert not held


def test_on_a_full_disk_it_is_said_who_could_not_be_ended_and_it_is_tried_again(launch, folder, ranks, monkeypatch):
    run, write_down = launch(), SessionDirectory.kill_job

    def full(directory, number, still):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SessionDirectory, "kill_job", full)
    run.kill()
    wait_until(lambda: run.notice.startswith("ranks 0 and 1 could not be told to end: [Errno 28] No space left"))
    monkeypatch.setattr(SessionDirectory, "kill_job", write_down)
    run.kill()
    assert folder.asked.read_text().split()[-1] == "kill:1:0,1"
    for rank in ranks:
        rank.end(1, -9, ended=True)
    over(run)


def test_a_session_that_waits_for_machines_again_can_be_closed(reserve, launched, ranks):
    for rank in ranks:
        write(rank.folder.file(rank.rank, 0, "records"), "Exit", rank.rank, -15, "", True, 1.0)
    reserve.close()
    assert launched.was_ended, "nobody is there to receive that it is to leave"


def test_ranks_that_leave_when_told_need_not_be_ended(reserve, launched, ranks, folder):
    def leave():
        wait_until(lambda: "leave" in folder.asked.read_text())
        for rank in ranks:
            write(rank.folder.file(rank.rank, 0, "records"), "Exit", rank.rank, 0, "", False, 1.0)

    leaving = threading.Thread(target=leave)
    leaving.start()
    reserve.close()
    leaving.join()
    assert not launched.was_ended


def test_a_run_that_was_ended_while_no_notebook_was_there_says_so_at_once(launch, reserve, ranks, turn):
    run = launch()
    for rank in ranks:
        rank.send(1, events.Started(rank.rank))
        rank.end(1, -15, ended=True)
    again = Run(reserve.pick_up(1, turn), 2, "again")
    again.engine.follow()
    again.follow(A_JOB)
    assert str(over(again)).startswith("ranks 0 and 1 ended from outside\n\nNobody here saw why.")
    run.engine.ending = job_events.JobEnded(-1, "the job lost a node", "It is broken.", "slurm")
    over(run)
    later = Run(reserve.pick_up(1, turn), 2, "later")
    later.engine.follow()
    later.follow(A_JOB)
    assert str(over(later)).startswith("the job lost a node\n\nIt is broken."), "who saw it has written it down"


def test_a_rank_that_died_is_new_once(launch, reserve, ranks):
    before = reserve.incarnations
    run = launch()
    ranks[0].send(1, events.Result(0, cloudpickle.dumps(None)))
    ranks[0].end(1)
    ranks[1].end(1, -9, dies=True)
    assert over(run).rank == 1
    assert [reserve.has(rank, before[rank]) for rank in range(2)] == [True, False]
    assert reserve.exit_code(1) == -9
    assert [(each.rank, each.how) for each in reserve.take_replaced()] == [(1, "SIGKILL")]
    now = reserve.incarnations
    ranks[1].begin()
    assert reserve.incarnations == now
    assert reserve.take_replaced() == []
    assert reserve.ranks()[1].note.endswith(", after SIGKILL")


def test_a_node_that_does_not_answer_is_named(launch, reserve, ranks, monkeypatch):
    monkeypatch.setattr(cluster_reserve, "KILL_S", 0.3)
    run = launch()
    ranks[0].end(1)
    run.kill()
    error = over(run)
    assert str(error).startswith("node2, where rank 1 ran, does not answer")
    assert [(each.rank, each.how) for each in reserve.take_replaced()] == [(1, "node2 did not answer")]


def test_what_is_launched_while_there_are_no_machines_waits_and_can_be_stopped(launch, launched, reserve, folder):
    launched.emit(job_events.Notice(-1, "job 5 waits", queued=True))
    wait_until(lambda: reserve.waits)
    run = launch()
    assert (run.status, run.notice) == ("queued", "job 5 waits")
    run.stop()
    assert (run.status, run.states) == ("stopped", ["ended", "ended"])
    assert "kill:1:0,1" in folder.asked.read_text().split()


def test_the_end_of_the_launchers_job_ends_the_run_and_is_told_the_session(launch, launched, reserve, folder):
    told = []
    reserve.when_over(told.append)
    run = launch()
    launched.settle(0.0)
    assert str(over(run)).startswith("the job was cancelled\n\nAsk who did it.")
    wait_until(lambda: told)
    assert told == ["the job was cancelled. Ask who did it."]


def test_another_notebooks_run_holds_the_ranks_too(launch, reserve, folder, held, ranks):
    add_job(folder, 1)
    launch_is_not_refused = "its notebook ended before it had given it to the ranks"
    run = launch()
    assert held, launch_is_not_refused
    for rank in ranks:
        rank.end(2)
    over(run)
    wait_until(lambda: not held)
    add_job(folder, 3)
    folder.ask("job:3:0,1")
    with pytest.raises(RuntimeError, match=r"run 'job 3' of another notebook holds these ranks: ranks 0 and 1 still"):
        launch()
    assert not held
    ranks[0].end(3)
    folder.ask("kill:3:1")
    assert reserve.were_used_elsewhere
    launch()
    assert not reserve.were_used_elsewhere
    for rank in ranks:
        rank.end(4)


@pytest.mark.parametrize(
    ("rank", "local_rank", "world_size", "here"), [(0, 0, 6, 4), (5, 1, 6, 2), (3, 3, 4, 4), (1, 1, 3, 3)]
)
def test_the_first_ranks_know_how_many_of_them_share_their_machine(rank, local_rank, world_size, here):
    place = _info_in(A_JOB._replace(world_size=world_size), RankInfo(rank, local_rank, 8, 4))
    assert place == RankInfo(rank, local_rank, world_size, here)


@pytest.mark.parametrize(
    ("left", "seconds"),
    [("1-02:03:04", 93784), ("02:03:04", 7384), ("59:58", 3598), ("UNLIMITED", float("inf")), ("", float("inf"))],
)
def test_the_time_left_is_read_as_slurm_writes_it(left, seconds):
    assert slurm_commands.seconds(left) == seconds


def test_attach_to_one_job_of_a_session_says_where_the_session_is(launch, folder, ranks):
    run = launch()
    with pytest.raises(ValueError, match=rf"is one job of a session; attach to the session.*{folder.path.name}'\)"):
        labkit.attach(run.folder)
    for rank in ranks:
        rank.end(1)
