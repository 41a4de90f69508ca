"""How notebook, guards and ranks of a session on a cluster speak through its folder. No cluster, no torch in ranks."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest

import labkit
from labkit.cluster import slurm, supervisor
from labkit.cluster.directory_engine import FolderEngine
from labkit.cluster.reserved import _info_in
from labkit.cluster.run_directory import FileSender, RunFolder
from labkit.monitor.run import Run
from labkit.protocol import events
from labkit.protocol.job import Job, RankInfo
from labkit.session import cluster
from labkit.session.cluster import ClusterReserve
from tests.conftest import wait_until

A_JOB = Job(cloudpickle.dumps((print, (), {})), 2, None, None, None, 0, 0, 0.0, {}, {})


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "session")
    made.create(None, {"launcher": "test", "session": {"idle_s": None}})
    return made


def add_job(folder, number, text="", only=(0, 1)):
    job = folder.of_job(number)
    job.create(A_JOB, {"name": f"job {number}", "only": list(only), "processes": [0, 0]})
    (job.path / "what").write_text(text)
    return job


def write(path, *record):
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


# The guard. In the place of a rank stands a script that does what each job's file says.

RANK = """
import json, os, sys, time
folder, rank, number = sys.argv[1:4]
if os.path.exists(folder + "/cannot start"):
    os._exit(5)
while os.path.exists(folder + "/slow start"):
    time.sleep(0.01)
def write(path, record):
    with open(path, "a") as file:
        file.write(json.dumps(record) + "\\n")
write(folder + "/ranks/" + rank + "." + number + ".records", ["Ready", int(rank)])
for word in sys.stdin:
    write(folder + "/heard", number + " " + word.strip())
    kind, _, job = word.strip().partition(":")
    if kind == "leave":
        sys.exit(0)
    if kind == "job":
        records = folder + "/jobs/" + job + "/ranks/" + rank + ".0.records"
        what = open(folder + "/jobs/" + job + "/what").read()
        if what == "dies before it begins":
            open(folder + "/jobs/" + job + "/what", "w").write("ends")
            os._exit(9)
        open(records, "a").close()
        if what == "dies":
            os._exit(9)
        if what == "ends":
            write(records, ["Exit", int(rank), 0, False, False, time.time()])
"""


@pytest.fixture
def start_guard(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    (tmp_path / "rank.py").write_text(RANK)
    start = f"""
import sys
sys.path.insert(0, {str(Path(supervisor.__file__).parent)!r})
import guard, pathlib
supervisor.START = {f"exec(open({str(tmp_path / 'rank.py')!r}).read())"!r}
supervisor.IDLE_EVERY_S = 0.05
sys.exit(supervisor.main(pathlib.Path({str(folder.path)!r})))
"""
    started = []

    def start_guard():
        started.append(subprocess.Popen([sys.executable, "-c", start]))
        return started[-1]

    yield start_guard
    for one in started:
        one.kill()
        one.wait()


def heard(folder):
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in (folder.path / "heard").read_text().splitlines()]
    return []


def has_ended(folder, number):
    return supervisor.has_exit(folder.of_job(number).file(0, 0, "records"))


def exit_of(job, rank=0):
    lines = job.file(rank, 0, "records").read_text().split("\n")
    (found,) = [events.Exit(*json.loads(line)[1:]) for line in lines if line.startswith('["Exit"')]
    return found


@pytest.mark.spawns
def test_words_come_in_order_and_to_those_they_are_meant_for(folder, start_guard):
    process = start_guard()
    for number, only in ((1, "0"), (2, "1"), (3, "0,1")):
        add_job(folder, number, "ends")
        folder.ask(f"job:{number}:{only}")
        folder.ask("stop")
    wait_until(lambda: has_ended(folder, 3))
    folder.ask("leave")
    assert process.wait(10) == 0
    assert heard(folder) == [f"0 {word}" for word in ("job:1", "stop", "stop", "job:3", "stop", "leave")]
    first = cluster._read_process(folder, 0, 0)
    assert (first.node, first.is_ready, first.exit_code) == ("node7", True, 0)


@pytest.mark.spawns
def test_a_rank_that_dies_is_told_of_and_replaced(folder, start_guard):
    start_guard()
    job = add_job(folder, 1, "dies")
    folder.ask("job:1:0")
    wait_until(lambda: cluster._read_process(folder, 0, 1).is_ready)
    assert (exit_of(job).code, exit_of(job).ended) == (9, False)
    assert cluster._read_process(folder, 0, 0).exit_code == 9
    add_job(folder, 2, "ends")
    folder.ask("job:2:0")
    wait_until(lambda: has_ended(folder, 2))
    assert heard(folder) == ["0 job:1", "1 job:2"]


@pytest.mark.spawns
def test_a_rank_that_dies_before_it_knows_of_a_job_leaves_it_to_its_successor(folder, start_guard):
    start_guard()
    job = add_job(folder, 1, "dies before it begins")
    folder.ask("job:1:0")
    wait_until(lambda: has_ended(folder, 1))
    assert exit_of(job).code == 0
    assert heard(folder) == ["0 job:1", "1 job:1"]


@pytest.mark.spawns
def test_only_who_is_still_at_a_job_is_ended_with_it(folder, start_guard):
    start_guard()
    add_job(folder, 1, "ends")
    folder.ask("job:1:0")
    wait_until(lambda: has_ended(folder, 1))
    folder.ask("kill:1:0")
    stuck = add_job(folder, 2, "is stuck")
    folder.ask("job:2:0")
    wait_until(stuck.file(0, 0, "records").exists)
    folder.ask("kill:2:1")
    folder.ask("kill:2:0")
    wait_until(lambda: cluster._read_process(folder, 0, 1).is_ready)
    assert (exit_of(stuck).code, exit_of(stuck).ended) == (-9, True)
    assert exit_of(folder.of_job(1)).code == 0


@pytest.mark.spawns
def test_a_rank_that_cannot_start_is_not_started_again(folder, start_guard):
    (folder.path / "cannot start").touch()
    assert start_guard().wait(10) == 5
    assert len(list(folder.ranks.glob("*.records"))) == 1
    assert cluster._read_process(folder, 0, 0).exit_code == 5


@pytest.mark.spawns
def test_a_guard_that_comes_later_takes_up_what_nobody_has_begun_and_ends_what_another_had(folder, start_guard):
    """As after a node was lost, when the launcher starts all again."""
    for number, text in ((1, "ends"), (2, "is stuck"), (3, "ends"), (4, "ends")):
        add_job(folder, number, text)
        folder.ask(f"job:{number}:0")
    write(folder.ranks / "0.0.records", "Process", 0, 5, "node3")
    write(folder.of_job(1).file(0, 0, "records"), "Exit", 0, 0, False, False, 1.0)
    folder.of_job(2).file(0, 0, "records").touch()
    folder.ask("kill:3:0")  # said after it was given, and before a guard could hear it
    start_guard()
    wait_until(lambda: has_ended(folder, 4))
    assert heard(folder) == ["1 job:4"]
    assert exit_of(folder.of_job(1)).at_s == 1.0
    for number in (2, 3):
        assert (exit_of(folder.of_job(number)).code, exit_of(folder.of_job(number)).unseen) == (-9, True)
    lost = cluster._read_process(folder, 0, 0)
    assert (lost.exit_code, lost.was_ended) == (-9, True)


@pytest.mark.spawns
def test_the_first_rank_ends_an_idle_session_and_who_works_is_not_idle(folder, start_guard):
    folder.note({"session": {"idle_s": 0.5}})
    (folder.path / "slow start").touch()
    process = start_guard()
    time.sleep(0.8)
    assert process.poll() is None, "who starts is not idle"
    (folder.path / "slow start").unlink()
    job = add_job(folder, 1, "is stuck")
    folder.ask("job:1:0")
    wait_until(job.file(0, 0, "records").exists)
    time.sleep(0.8)
    assert process.poll() is None
    write(job.file(0, 0, "records"), "Exit", 0, 0, False, False, 1.0)
    assert process.wait(10) == 0
    assert folder.asked.read_text().split() == ["job:1:0", "idle"]


# The notebook


class Carrier(FolderEngine):
    """A launcher that does nothing by itself."""

    kind = "test"

    def submit(self, job):
        return {}

    is_ended = False

    def end(self):
        self.is_ended = True
        self.settle(0.0)

    def interruption(self):
        return events.JobEnded(-1, "the job lost a node: node2 is down", "It begins again.")

    def ending(self, missing):
        return events.JobEnded(-1, "the job was cancelled", "Ask who did it.")


class Rank:
    """Writes as a rank and its guard do."""

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
            write(self.folder.file(self.rank, self.number, "records"), "Exit", self.rank, code, False, ended, 1.0)
        self.send(number, events.Exit(self.rank, code, ended=ended, at_s=time.time()))


@pytest.fixture
def carrier(folder):
    return Carrier(2, folder, {})


@pytest.fixture
def ranks(folder):
    made = [Rank(folder, rank) for rank in range(2)]
    for rank in made:
        rank.begin()
    return made


@pytest.fixture
def reserve(carrier, ranks):
    made = ClusterReserve(carrier, [0, 0])
    made._begin()
    yield made
    carrier.settle(0.0)
    made.close()


@pytest.fixture
def held():
    return []


@pytest.fixture
def launch(reserve, held):
    def launch(world_size=2):
        engine = reserve.engine(world_size, held.append, held.remove, {"name": "mine", "timeout_s": None})
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
    assert (job.reserved, job.world_size, job.function) == (True, 2, A_JOB.function)
    for rank in ranks:
        rank.send(1, events.Started(rank.rank), events.Result(rank.rank, cloudpickle.dumps(rank.rank)))
        rank.end(1)
    assert over(run) is None
    assert run.results == [0, 1]
    wait_until(lambda: not held)
    launch(1)
    assert folder.asked.read_text() == "job:1:0,1\njob:2:0\n"
    ranks[0].end(2)


def test_what_the_launcher_ended_waits_for_its_reason(launch, carrier, reserve, ranks):
    run = launch()
    for rank in ranks:
        rank.send(1, events.Started(rank.rank))
        rank.end(1, -15, ended=True, dies=True)
    time.sleep(0.3)
    assert not run.over.is_set()
    carrier.say(events.Notice(-1, "job 5 waits", queued=True))
    error = over(run)
    assert error.rank is None
    assert str(error).startswith("the job lost a node: node2 is down\n\nIt begins again.")
    assert run.states == ["ended", "ended"]
    assert [each.state for each in reserve.ranks()] == ["queued", "queued"]
    for rank in ranks:
        rank.begin()
    carrier.say(events.Notice(-1, "job 5 on node[1-2]"))
    wait_until(lambda: [each.state for each in reserve.ranks()] == ["idle", "idle"])
    assert [(each.rank, each.how) for each in reserve.take_replaced()] == [
        (rank, "the job lost a node: node2 is down") for rank in range(2)
    ]
    assert reserve.take_replaced() == []


def test_a_session_that_waits_for_machines_again_can_be_closed(reserve, carrier, ranks):
    for rank in ranks:
        write(rank.folder.file(rank.rank, 0, "records"), "Exit", rank.rank, -15, False, True, 1.0)
    reserve.close()
    assert carrier.is_ended, "nobody is there to hear that it is to leave"


def test_ranks_that_leave_when_told_need_not_be_ended(reserve, carrier, ranks, folder):
    def leave():
        wait_until(lambda: "leave" in folder.asked.read_text())
        for rank in ranks:
            write(rank.folder.file(rank.rank, 0, "records"), "Exit", rank.rank, 0, False, False, 1.0)

    leaving = threading.Thread(target=leave)
    leaving.start()
    reserve.close()
    leaving.join()
    assert not carrier.is_ended


def test_a_run_that_was_ended_while_no_notebook_was_there_says_so_at_once(launch, reserve, ranks, held):
    run = launch()
    for rank in ranks:
        rank.send(1, events.Started(rank.rank))
        rank.end(1, -15, ended=True)
    again = Run(reserve.pick_up(1, held.append, held.remove), 2, "again")
    again.engine.follow()
    again.follow(A_JOB)
    assert str(over(again)).startswith("ranks 0 and 1 ended from outside\n\nNobody here saw why.")
    run.engine.end_with(events.JobEnded(-1, "the job lost a node", "It is broken."))
    over(run)
    later = Run(reserve.pick_up(1, held.append, held.remove), 2, "later")
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
    monkeypatch.setattr(cluster, "KILL_S", 0.3)
    run = launch()
    ranks[0].end(1)
    run.kill()
    error = over(run)
    assert str(error).startswith("node2, where rank 1 ran, does not answer")
    assert [(each.rank, each.how) for each in reserve.take_replaced()] == [(1, "node2 did not answer")]


def test_what_is_launched_while_there_are_no_machines_waits_and_can_be_stopped(launch, carrier, reserve, folder):
    carrier.say(events.Notice(-1, "job 5 waits", queued=True))
    wait_until(lambda: reserve.waits)
    run = launch()
    assert (run.status, run.notice) == ("queued", "job 5 waits")
    run.stop()
    assert (run.status, run.states) == ("stopped", ["ended", "ended"])
    assert "kill:1:0,1" in folder.asked.read_text().split()


def test_the_end_of_the_launchers_job_ends_the_run_and_is_told_the_session(launch, carrier, reserve, folder):
    told = []
    reserve.when_over(told.append)
    run = launch()
    carrier.settle(0.0)
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


def test_a_jobs_file_of_somebody_else_is_not_read(folder, monkeypatch):
    job = add_job(folder, 1)
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ValueError, match="belongs to another user; what lies there would be run as code"):
        job.job()


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
    assert slurm._seconds(left) == seconds


def test_attach_to_one_job_of_a_session_says_where_the_session_is(launch, folder, ranks):
    run = launch()
    with pytest.raises(ValueError, match=rf"is one job of a session; attach to the session.*{folder.path.name}'\)"):
        labkit.attach(run.folder)
    for rank in ranks:
        rank.end(1)


def test_attach_to_a_session_under_torchrun(folder):
    folder.note({"launcher": "torchrun", "session": {}})
    with pytest.raises(ValueError, match="is a run under torchrun, which ended with its notebook"):
        labkit.attach(folder.path)
