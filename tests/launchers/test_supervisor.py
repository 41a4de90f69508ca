"""What stands between SLURM and a rank, started as they start it; in the rank's place stands a script."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import labkit
from labkit.launchers import launcher_job, supervisor
from labkit.launchers.rank_entry import SIGCONT_SINCE_S
from tests.conftest import LONG_S, wait_until
from tests.support import fake_system

pytestmark = pytest.mark.spawns

RANK = """
import os, sys
directory, rank, attempt = sys.argv[1:4]
open(f"{directory}/began", "w").close()
for word in sys.stdin:
    with open(f"{directory}/received", "a") as file:
        file.write(word)
    if word == "stop\\n" and not os.path.exists(f"{directory}/does not stop"):
        sys.exit(0)
    if word == "fail\\n":
        sys.exit(3)
    if word == "end_early\\n":
        os._exit(0)
    if word == "return\\n":
        with open(f"{directory}/ranks/{rank}.{attempt}.records", "a") as file:
            print('["Result", 0, {"bytes": ""}]', file=file)
        sys.exit(0)
    if word == "print\\n":
        for number in range(100_000):
            print("line", number)
"""


@pytest.fixture
def start(directory, tmp_path, monkeypatch):
    """Start a supervisor, as of rank 0 under SLURM, and wait until its rank has begun."""
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    fake_system.v2(tmp_path)
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "squeue").write_text(f'#!/bin/sh\necho asked >> "{tmp_path}/asked"\ncat "{tmp_path}/state"\n')
    (tmp_path / "squeue").chmod(0o755)
    (tmp_path / "state").write_text("COMPLETING\n")
    script = f"""
import pathlib, sys
sys.path.insert(0, {str(Path(labkit.__file__).parents[1])!r})
import functools
from labkit.launchers import supervisor
from labkit.launchers.run_directory import files
from labkit.system.out_of_memory import OutOfMemoryKills
supervisor.OutOfMemoryKills = functools.partial(OutOfMemoryKills, pathlib.Path({str(tmp_path)!r}))
files.OUTPUT_BYTES, files.HEAD_BYTES, files.LOOK_AT_FOLDER_S, files.GONE_S = 100_000, 100, 0.05, 0.5
supervisor.START = {f"exec(open({str(tmp_path / 'rank.py')!r}).read())"!r}
supervisor.STATE_EVERY_S = 0.05
sys.exit(supervisor.main(pathlib.Path({str(directory.path)!r})))
"""
    started = []

    def start():
        started.append(subprocess.Popen([sys.executable, "-c", script]))
        wait_until((directory.path / "began").exists)
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


def exit_of(directory):
    lines = directory.file(0, 0, "records").read_text().splitlines()
    (found,) = [json.loads(line) for line in lines if line.startswith('["Exit"')]
    return {"code": found[2], "ended": found[4]} | ({"out_of_memory": found[3]} if found[3] else {})


def received(directory):
    path = directory.path / "received"
    return path.read_text().split() if path.exists() else []


def test_a_rank_is_asked_to_stop_when_slurm_takes_the_machines_and_not_ended(directory, start):
    process = start()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_S) == 0
    assert received(directory) == ["stop"]
    assert exit_of(directory) == {"code": 0, "ended": True}


def test_a_rank_that_does_not_stop_has_the_time_that_slurm_grants(directory, start):
    (directory.path / "does not stop").touch()
    process = start()
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: received(directory) == ["stop"])
    process.send_signal(signal.SIGTERM)  # as at the end of a GraceTime
    time.sleep(0.5)
    assert process.poll() is None
    assert received(directory) == ["stop"], "asked once"
    directory.ask("end")
    assert process.wait(LONG_S) == 128 + signal.SIGKILL
    assert exit_of(directory) == {"code": -9, "ended": True}


def test_a_job_that_slurm_has_not_taken_yet_is_kept_for_it(directory, start, tmp_path):
    """One that ended by itself would count as done, and not be started again."""
    (tmp_path / "state").write_text("RUNNING\n")
    process = start()
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: (tmp_path / "asked").exists() and (tmp_path / "asked").read_text().count("asked") > 2)
    assert process.poll() is None
    assert exit_of(directory) == {"code": 0, "ended": True}
    (tmp_path / "state").write_text("COMPLETING\n")
    assert process.wait(LONG_S) == 0


def test_a_rank_is_asked_where_it_is_and_ended_when_another_has_failed(directory, start):
    (directory.path / "does not stop").touch()
    process = start()
    (directory.path / "failed.0").touch()
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_S) == 128 + signal.SIGKILL
    assert exit_of(directory) == {"code": -9, "ended": True}
    assert received(directory) == ["stop", "details"], "asked once"


def test_a_rank_that_fails_leaves_word_for_the_others(directory, start):
    process = start()
    directory.ask("fail")
    assert process.wait(LONG_S) == 3
    assert (directory.path / "failed.0").exists()
    assert exit_of(directory) == {"code": 3, "ended": False}


def test_a_rank_that_ends_with_0_before_its_function_has_returned_ends_the_job(directory, start):
    """With 0, srun or the agent would take it for done, and let the others wait for it."""
    process = start()
    directory.ask("end_early")
    assert process.wait(LONG_S) == supervisor.ENDED_EARLY
    assert (directory.path / "failed.0").exists()
    assert exit_of(directory) == {"code": 0, "ended": False}


def test_a_rank_that_has_returned_ends_well(directory, start):
    process = start()
    directory.ask("return")
    assert process.wait(LONG_S) == 0
    assert not (directory.path / "failed.0").exists()


@pytest.mark.parametrize(
    ("kills", "said"), [({"cgroup": 1, "host": 1}, {"out_of_memory": "killed"}), ({"host": 1}, {})]
)
def test_a_rank_that_is_killed_ran_out_of_memory_if_its_cgroup_says_so(directory, start, tmp_path, kills, said):
    process = start()
    fake_system.count(tmp_path, **kills)
    (rank,) = psutil.Process(process.pid).children()
    rank.kill()
    assert process.wait(LONG_S) == 128 + signal.SIGKILL
    assert exit_of(directory) == {"code": -9, "ended": False, **said}


def test_a_rank_is_ended_when_the_runs_folder_is_deleted(directory, start):
    """Also where no notebook is there to see it."""
    process = start()
    shutil.rmtree(directory.path)
    assert process.wait(LONG_S) == 128 + signal.SIGKILL


def test_what_a_rank_prints_without_end_does_not_fill_the_disk(directory, start):
    start()
    out = directory.file(0, 0, "out")
    for _ in range(3):
        directory.ask("print")
        wait_until(lambda: "bytes of output were dropped here" in out.read_text())
        wait_until(lambda: out.stat().st_size < 100_000)
    assert directory.file(0, 0, "out.head").read_text().splitlines()[:3] == ["line 0", "line 1", "line 2"]


def test_a_supervisor_that_cannot_write_says_where_and_why(directory):
    directory.ranks.rmdir()
    directory.ranks.touch()
    done = subprocess.run(
        [sys.executable, str(launcher_job.SUPERVISOR), str(directory.path)],
        env={**os.environ, "SLURM_PROCID": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.match(r"rank 1: .*run cannot be written on \S+: \[Errno 20\] Not a directory", done.stdout), done.stderr
    assert done.returncode == supervisor.NOT_WRITTEN


WITH_A_WORKER = """
import multiprocessing, os, time
from labkit.launchers.rank_entry import outlive_the_launchers_signal
def work():
    print(os.getpid(), flush=True)
    time.sleep(1e5)
outlive_the_launchers_signal()
worker = multiprocessing.get_context("fork").Process(target=work)
worker.start()
input()
worker.terminate()
worker.join()
print(worker.exitcode, flush=True)
"""


def test_slurms_signal_which_comes_to_every_process_ends_neither_a_rank_nor_its_workers(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    command = [sys.executable, "-c", WITH_A_WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        worker = psutil.Process(int(rank.stdout.readline()))
        for number in (signal.SIGCONT, signal.SIGTERM):
            for process in (rank, worker):
                process.send_signal(number)
        time.sleep(1)
        assert rank.poll() is None
        assert worker.is_running()
        assert worker.status() != psutil.STATUS_ZOMBIE
        time.sleep(SIGCONT_SINCE_S)
        rank.stdin.write("\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == f"{-signal.SIGTERM}\n", "terminate() works"


def test_a_supervisor_needs_the_standard_library_only():
    """So that it is there at once, and does not fail with the rank."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(launcher_job.SUPERVISOR), "/nowhere"],
        env={**os.environ, "SLURM_PROCID": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("rank 1: /nowhere cannot be seen on "), done.stderr
    assert done.returncode == supervisor.NOT_SEEN
