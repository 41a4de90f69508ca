"""What minds a rank of a session on a cluster, started as SLURM starts it."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import labkit
from labkit.launchers.run_directory.files import has_exit
from labkit.protocol import events
from labkit.session.cluster_reserve import SUPERVISOR
from labkit.session.processes import read_process
from tests.conftest import wait_until
from tests.support.session_files import a_session, add_job, write

pytestmark = pytest.mark.spawns


@pytest.fixture
def folder(tmp_path):
    return a_session(tmp_path / "session")


# The supervisor. In the place of a rank stands a script that does what each job's file says.

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
    write(folder + "/received", number + " " + word.strip())
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
            write(records, ["Exit", int(rank), 0, "", False, time.time()])
"""


@pytest.fixture
def start_supervisor(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    (tmp_path / "rank.py").write_text(RANK)
    # As SLURM starts it, by its path, but with another rank.
    start = f"""
import pathlib, sys
sys.argv = [{str(SUPERVISOR)!r}, {str(folder.path)!r}]
sys.path.insert(0, {str(Path(labkit.__file__).parents[1])!r})
import labkit.launchers.run_directory.files as files
import labkit.launchers.supervisor as supervisor
files.LOOK_AT_FOLDER_S, files.GONE_S = 0.05, 0.5
supervisor.START = {f"exec(open({str(tmp_path / 'rank.py')!r}).read())"!r}
source = pathlib.Path(sys.argv[0]).read_text().replace("IDLE_EVERY_S = 0.5", "IDLE_EVERY_S = 0.05")
exec(compile(source, sys.argv[0], "exec"), {{"__name__": "__main__", "__file__": sys.argv[0]}})
"""
    started = []

    def start_supervisor():
        started.append(subprocess.Popen([sys.executable, "-c", start]))
        return started[-1]

    yield start_supervisor
    for one in started:
        one.kill()
        one.wait()


def received(folder):
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in (folder.path / "received").read_text().splitlines()]
    return []


def has_ended(folder, number):
    return has_exit(folder.of_job(number).file(0, 0, "records"))


def exit_of(job, rank=0):
    lines = job.file(rank, 0, "records").read_text().split("\n")
    (found,) = [events.Exit(*json.loads(line)[1:]) for line in lines if line.startswith('["Exit"')]
    return found


def test_words_come_in_order_and_to_those_they_are_meant_for(folder, start_supervisor):
    process = start_supervisor()
    for number, only in ((1, "0"), (2, "1"), (3, "0,1")):
        add_job(folder, number, "ends")
        folder.ask(f"job:{number}:{only}")
        folder.ask("stop")
    wait_until(lambda: has_ended(folder, 3))
    folder.ask("leave")
    assert process.wait(10) == 0
    assert received(folder) == [f"0 {word}" for word in ("job:1", "stop", "stop", "job:3", "stop", "leave")]
    first = read_process(folder, 0, 0)
    assert (first.node, first.is_ready, first.exit_code) == ("node7", True, 0)


def test_a_rank_that_dies_is_told_of_and_replaced(folder, start_supervisor):
    start_supervisor()
    job = add_job(folder, 1, "dies")
    folder.ask("job:1:0")
    wait_until(lambda: read_process(folder, 0, 1).is_ready)
    assert (exit_of(job).code, exit_of(job).ended) == (9, False)
    assert read_process(folder, 0, 0).exit_code == 9
    add_job(folder, 2, "ends")
    folder.ask("job:2:0")
    wait_until(lambda: has_ended(folder, 2))
    assert received(folder) == ["0 job:1", "1 job:2"]


def test_a_rank_that_dies_before_it_knows_of_a_job_leaves_it_to_its_successor(folder, start_supervisor):
    start_supervisor()
    job = add_job(folder, 1, "dies before it begins")
    folder.ask("job:1:0")
    wait_until(lambda: has_ended(folder, 1))
    assert exit_of(job).code == 0
    assert received(folder) == ["0 job:1", "1 job:1"]


def test_only_who_is_still_at_a_job_is_ended_with_it(folder, start_supervisor):
    start_supervisor()
    add_job(folder, 1, "ends")
    folder.ask("job:1:0")
    wait_until(lambda: has_ended(folder, 1))
    folder.ask("kill:1:0")
    stuck = add_job(folder, 2, "is stuck")
    folder.ask("job:2:0")
    wait_until(stuck.file(0, 0, "records").exists)
    folder.ask("kill:2:1")
    folder.ask("kill:2:0")
    wait_until(lambda: read_process(folder, 0, 1).is_ready)
    assert (exit_of(stuck).code, exit_of(stuck).ended) == (-9, True)
    assert exit_of(folder.of_job(1)).code == 0


def test_a_job_that_comes_while_a_rank_is_being_ended_is_its_successors(folder, start_supervisor):
    start_supervisor()
    stuck, after = add_job(folder, 1, "is stuck"), add_job(folder, 2, "ends")
    folder.ask("job:1:0")
    wait_until(stuck.file(0, 0, "records").exists)
    folder.ask("kill:1:0\njob:2:0")  # so that both are there when it looks
    wait_until(lambda: has_ended(folder, 2))
    assert (exit_of(stuck).code, exit_of(stuck).ended) == (-9, True)
    assert exit_of(after).code == 0
    assert received(folder) == ["0 job:1", "1 job:2"]


def test_a_rank_that_cannot_start_is_not_started_again(folder, start_supervisor):
    (folder.path / "cannot start").touch()
    assert start_supervisor().wait(10) == 5
    assert len(list(folder.ranks.glob("*.records"))) == 1
    assert read_process(folder, 0, 0).exit_code == 5


def test_a_later_supervisor_takes_up_what_nobody_has_begun_and_ends_what_another_had(folder, start_supervisor):
    """As after a node was lost, when the launcher starts all again."""
    for number, text in ((1, "ends"), (2, "is stuck"), (3, "ends"), (4, "ends")):
        add_job(folder, number, text)
        folder.ask(f"job:{number}:0")
    write(folder.ranks / "0.0.records", "Process", 0, 5, "node3")
    write(folder.of_job(1).file(0, 0, "records"), "Exit", 0, 0, "", False, 1.0)
    folder.of_job(2).file(0, 0, "records").touch()
    folder.ask("kill:3:0")  # said after it was given, and before a supervisor could read it
    start_supervisor()
    wait_until(lambda: has_ended(folder, 4))
    assert received(folder) == ["1 job:4"]
    assert exit_of(folder.of_job(1)).at_s == 1.0
    for number in (2, 3):
        assert (exit_of(folder.of_job(number)).code, exit_of(folder.of_job(number)).unseen) == (-9, True)
    lost = read_process(folder, 0, 0)
    assert (lost.exit_code, lost.was_ended) == (-9, True)


def test_the_first_rank_ends_an_idle_session_and_who_works_is_not_idle(folder, start_supervisor):
    folder.note({"session": {"idle_s": 0.5}})
    (folder.path / "slow start").touch()
    process = start_supervisor()
    time.sleep(0.8)
    assert process.poll() is None, "who starts is not idle"
    (folder.path / "slow start").unlink()
    job = add_job(folder, 1, "is stuck")
    folder.ask("job:1:0")
    wait_until(job.file(0, 0, "records").exists)
    time.sleep(0.8)
    assert process.poll() is None
    write(job.file(0, 0, "records"), "Exit", 0, 0, "", False, 1.0)
    assert process.wait(10) == 0
    assert folder.asked.read_text().split() == ["job:1:0", "idle"]


def test_a_job_is_asked_to_stop_when_slurm_takes_the_machines_and_then_the_rank_goes(folder, start_supervisor):
    process = start_supervisor()
    job = add_job(folder, 1, "is stuck")
    folder.ask("job:1:0")
    wait_until(job.file(0, 0, "records").exists)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "0 stop" in received(folder))
    time.sleep(0.3)
    assert process.poll() is None, "it has the time that SLURM grants"
    write(job.file(0, 0, "records"), "Exit", 0, 0, "", False, 1.0)
    process.send_signal(signal.SIGTERM)  # awake at once
    assert process.wait(10) == 0, "else SLURM would count the job as failed"
    assert received(folder) == ["0 job:1", "0 stop"]


def test_a_rank_goes_when_the_sessions_folder_is_deleted(folder, start_supervisor):
    process = start_supervisor()
    wait_until(lambda: read_process(folder, 0, 0).is_ready)
    shutil.rmtree(folder.path)
    assert process.wait(60) == 128 + signal.SIGKILL


def test_a_rank_with_nothing_to_do_goes_at_once_when_slurm_takes_the_machines(folder, start_supervisor):
    process = start_supervisor()
    wait_until(lambda: read_process(folder, 0, 0).is_ready)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert received(folder) == []
