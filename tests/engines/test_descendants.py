"""The programs that a rank starts end with it, however the run ends, unless they have a session of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import labkit
from tests.conftest import LONG_S, lives, wait_until
from tests.support.tiers import few

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.skipif(sys.platform != "linux", reason="whose programs they are is known as Linux tells it"),
]

PROGRAMS = ("of its own", "of a shell", "deaf", "detached", "writing")


def start_programs(worker, then):
    """One as `subprocess` starts it, one whose parent ends at once, one that does not obey, one that is to go on.

    And one that writes to the rank's output for ever, as Lightning #6106 had it: the launcher may not wait for its end.
    """
    sleep = ["sleep", "1000"]
    started = [
        subprocess.Popen(sleep).pid,
        int(subprocess.run("sleep 1000 >/dev/null & echo $!", shell=True, stdout=subprocess.PIPE, check=True).stdout),
        subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"]).pid,
        subprocess.Popen(sleep, start_new_session=True).pid,
        subprocess.Popen(["sh", "-c", "while :; do echo; sleep 0.01; done"], start_new_session=True).pid,
    ]
    worker.log(**{f"pid_{number}": pid for number, pid in enumerate(started)})
    if then == "raises":
        raise ValueError("bad batch")
    while then == "is stopped":
        worker.log(loss=0.0)
        time.sleep(0.01)
    while then == "is killed":
        time.sleep(1)
    if then == "is out of memory":
        time.sleep(0.5)  # what it has logged is sent
        os.kill(os.getpid(), signal.SIGKILL)


def programs_of(run):
    """The programs of a run's ranks, by what they are."""
    wait_until(lambda: all(run.recorded.progress(rank).last_step is not None for rank in range(run.world_size)))
    last = [run.recorded.progress(rank).last for rank in range(run.world_size)]
    return {what: [int(pids[f"pid_{number}"]) for pids in last] for number, what in enumerate(PROGRAMS)}


def end(pids):
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


@pytest.mark.parametrize("then", few(["returns", "raises", "is stopped", "is out of memory", "is killed"], 4))
def test_programs_end_with_a_run_that(then):
    run = labkit.launch(start_programs, then, world_size=2, wait=False, live=False)
    programs = programs_of(run)
    try:
        if then in ("is stopped", "is killed"):
            run.stop(0 if then == "is killed" else None)
        assert run.over.wait(LONG_S)
        wait_until(lambda: not any(lives(pid) for what in PROGRAMS[:3] for pid in programs[what]))
        assert all(lives(pid) for pid in programs["detached"]), "it was told to go on without the rank"
    finally:
        end(programs["detached"] + programs["writing"])
        run.stop(0)


def test_programs_stay_while_a_reserved_ranks_process_does():
    """A library keeps one for the next job: a pool that compiles, a tracker's service."""
    with labkit.Session(1) as ranks:
        programs = programs_of(labkit.launch(start_programs, "returns", on=ranks, live=False))
        try:
            assert labkit.launch(lambda worker: worker.rank, on=ranks, live=False).results == [0]
            assert all(lives(pid) for pids in programs.values() for pid in pids)
            ranks.close()
            wait_until(lambda: not any(lives(pid) for what in PROGRAMS[:3] for pid in programs[what]))
        finally:
            end(programs["detached"] + programs["writing"])
