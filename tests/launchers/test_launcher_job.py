"""What jobs of launchers promise when something goes wrong: a full disk, an interrupt, nobody who answers."""

from __future__ import annotations

import base64
import errno
import re
import signal
import threading
import time

import cloudpickle
import pytest

import labkit
from labkit.launchers import directory_engine, job_events, launcher_job
from labkit.launchers.directory_engine import LaunchedEngine
from labkit.launchers.old_slurm import job as slurm_job
from labkit.launchers.old_slurm import queue as slurm_queue
from labkit.launchers.old_slurm.commands import SlurmError
from labkit.launchers.old_slurm.job import SlurmJob
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.run import Run
from tests.conftest import LONG_S, wait_until
from tests.support import workloads
from tests.support.fake_engine import A_JOB


@pytest.fixture
def full_disk(monkeypatch):
    def ask(self, word):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunDirectory, "ask", ask)


# A full disk


def test_ranks_that_cannot_be_asked_to_stop_on_a_full_disk_are_still_minded(directory, full_disk):
    engine = LaunchedEngine(SlurmJob(2, directory, {}))
    engine.ask_to_stop()
    assert engine.ask_for_stacks() == []
    texts = [event.text for event in engine.poll(0)]
    assert [text.partition(": [Err")[0] for text in texts] == [
        f"the ranks could not be asked ({word})" for word in ("stop", "stacks")
    ]


# An interrupt


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """A SLURM of shell scripts: `sbatch` takes the job at once and answers after a second, `scancel` takes its time."""
    (tmp_path / "bin").mkdir()
    scripts = {
        "sbatch": f'touch "{tmp_path}/submitted"; sleep 1; echo 7',
        "squeue": 'echo "PENDING||debug|UNLIMITED|Priority"',
        "scancel": f'sleep 0.5; echo "$@" >> "{tmp_path}/cancelled"',
    }
    for name, script in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    # A shell has what it starts in the background ignore interrupts, and these tests may be started so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield tmp_path
    signal.signal(signal.SIGINT, before)
    # What was asked last is answered before the next test, which may start no process.
    wait_until(lambda: not any(thread.name == "labkit-slurm" for thread in threading.enumerate()))


def interrupt_once(there):
    """Interrupt this thread, as the notebook's stop button does, once a file is there."""

    def interrupt():
        wait_until(there.exists)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()


@pytest.mark.spawns
def test_a_job_whose_number_was_not_known_yet_when_the_cell_was_interrupted_is_cancelled(fake_slurm):
    on = labkit.Slurm(folder=fake_slurm / "runs")
    interrupt_once(fake_slurm / "submitted")
    with pytest.raises(KeyboardInterrupt):
        labkit.launch(workloads.fit, on=on, wait=False, live=False)
    assert (fake_slurm / "cancelled").read_text() == "7\n"


@pytest.mark.spawns
def test_a_job_that_nobody_follows_yet_when_the_cell_is_interrupted_is_cancelled(fake_slurm, monkeypatch):
    def interrupted(self, job):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "follow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        labkit.launch(workloads.fit, on=labkit.Slurm(folder=fake_slurm / "runs"), wait=False, live=False)
    assert (fake_slurm / "cancelled").read_text() == "7\n"


class Launched(launcher_job.LauncherJob):
    """A launcher that does nothing by itself."""

    kind = "test"

    def submit(self):
        return {}

    def end_now(self):
        self.was_ended = True


@pytest.mark.parametrize("begins", [True, False])
def test_an_interrupt_while_the_thread_begins_that_starts_a_job_leaves_none(tmp_path, monkeypatch, begins):
    class Interrupted(threading.Thread):
        def start(self):
            monkeypatch.undo()
            if begins:
                super().start()
            raise KeyboardInterrupt

    job = Launched(2, RunDirectory(tmp_path / "run"), {})
    monkeypatch.setattr(threading, "Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        job.start(lambda about: job.directory.path.mkdir())
    assert job.was_ended == job.is_started
    assert job.is_started <= begins


# Nobody who answers


@pytest.fixture
def unreachable(monkeypatch):
    def slurm(*command):
        raise SlurmError("Unable to contact slurm controller")

    for module in (slurm_job, slurm_queue):
        monkeypatch.setattr(module, "slurm", slurm)


@pytest.fixture
def run(directory):
    job = SlurmJob(2, directory, {})
    job.follow("7")
    found = Run(LaunchedEngine(job), 2, "test")
    found.follow(A_JOB)
    return found


def test_stopping_a_run_ends_though_slurm_cannot_be_reached_and_says_what_may_still_run(unreachable, run, monkeypatch):
    monkeypatch.setattr(launcher_job, "END_S", 0.5)
    run.ask_to_stop()
    assert run.over.wait(LONG_S)
    assert run.status == "stopped"
    assert run.notice.startswith("SLURM job 7 is no longer waited for: SLURM has not ended it for")
    assert "SLURM does not answer: Unable to contact slurm controller" in run.notice
    assert "scancel 7 ends them" in run.notice


def test_ranks_that_failed_end_the_run_though_slurm_cannot_be_reached(unreachable, run, directory, monkeypatch):
    monkeypatch.setattr(directory_engine, "SILENT_S", 0.3)
    for rank, code in ((0, -15), (1, 3)):
        directory.file(rank, 0, "records").write_text(f'["Exit", {rank}, {code}, "", {str(not rank).lower()}, 1.0]\n')
    assert run.over.wait(LONG_S)
    assert str(run.error).startswith("SLURM job 7 is no longer waited for: SLURM has not answered for")
    assert re.search(r"rank 1 .*\(exit code 3\)", str(run.error))


@pytest.fixture
def answering(monkeypatch):
    monkeypatch.setattr(slurm_queue, "slurm", lambda *command: "RUNNING|node[1-2]|debug|10:00|None\n")
    monkeypatch.setattr(slurm_job, "slurm", lambda *command: "")


def test_a_slurm_that_answers_is_waited_for(answering, run, monkeypatch):
    monkeypatch.setattr(directory_engine, "SILENT_S", 0.0)
    wait_until(lambda: run.notice == "SLURM job 7 on node[1-2]")
    time.sleep(0.3)
    assert not run.over.is_set()
    run.engine.launched.settle(0.0)
    assert run.over.wait(LONG_S)


# Ranks that have stopped because SLURM asked them to


def stop(directory):
    """Write what ranks write that have stopped at SLURM's request."""
    for rank in (0, 1):
        lines = f'["Stopped", {rank}]\n["Exit", {rank}, 0, "", true, {time.time()}]\n'
        directory.file(rank, 0, "records").write_text(lines)


@pytest.fixture
def launched(directory):
    job = Launched(2, directory, {})
    job.ending = lambda seen: job_events.JobEnded(-1, "the job was asked to end", "Launch it again.", "slurm")
    run = Run(LaunchedEngine(job), 2, "test")
    run.follow(A_JOB)
    return run


def test_ranks_that_stopped_when_slurm_asked_begin_again_with_the_next_attempt(launched, directory):
    stop(directory)
    wait_until(lambda: launched.states == ["stopped", "stopped"])
    time.sleep(0.3)
    assert not launched.over.is_set(), "the job may be put back into the queue"
    for rank in (0, 1):
        result = base64.b64encode(cloudpickle.dumps("whole")).decode()
        lines = f'["Result", {rank}, {{"bytes": "{result}"}}]\n["Exit", {rank}, 0, "", false, 1.0]\n'
        directory.file(rank, 1, "records").write_text(lines)
    assert launched.over.wait(LONG_S)
    assert (launched.attempt, launched.error, launched.results) == (1, None, ["whole"] * 2)


def test_ranks_that_stopped_and_do_not_begin_again_have_not_finished(launched, directory):
    stop(directory)
    wait_until(lambda: launched.states == ["stopped", "stopped"])
    launched.engine.launched.settle(0.0)
    assert launched.over.wait(LONG_S)
    assert (launched.status, str(launched.error)[:24]) == ("failed", "the job was asked to end")
