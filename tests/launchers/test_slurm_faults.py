"""What goes wrong around a job on a real SLURM: answers that come late, signals, folders that go, other notebooks."""

from __future__ import annotations

import os
import shutil

import pytest

import labkit
from tests.conftest import LONG_S, end_of, wait_until
from tests.launchers.test_slurm import job_of, logged
from tests.support import elsewhere, workloads
from tests.support.tiers import few

pytestmark = pytest.mark.cluster


@pytest.fixture
def launch(slurm, tmp_path):
    """Launch on the cluster, in the background."""

    def launch(fn, *args, nodes=2, ranks_per_node=1, stall_s=None, **options):
        on = labkit.Slurm(nodes, ranks_per_node, **{"folder": tmp_path / "runs", **options})
        return labkit.launch(fn, *args, on=on, wait=False, live=False, stall_s=stall_s)

    return launch


# Signals


@pytest.mark.parametrize("name", few(["SIGUSR1", "SIGHUP", "SIGALRM", "SIGINT"], 4))
def test_any_signal_that_a_user_sends_reaches_the_function(name, launch, slurm):
    run = launch(elsewhere.wait_for_signal, name)
    logged(run)
    slurm.run("scancel", "--signal", name.removeprefix("SIG"), job_of(run))
    run.wait(LONG_S)
    assert run.status == "finished"
    assert len(set(run.results)) == 1


# SLURM's commands: late, or failing


@pytest.fixture
def replace(tmp_path, monkeypatch):
    """Put a shell script in the place of one of SLURM's commands; `$REAL` is the command itself."""
    (tmp_path / "bin").mkdir()

    def replace(name, script):
        real = shutil.which(name, path=os.environ["PATH"].replace(f"{tmp_path / 'bin'}:", ""))
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\nREAL={real}\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    return replace


def test_a_run_ends_though_squeue_fails_for_a_while_and_says_what_it_said(launch, replace):
    run = launch(workloads.spin)
    logged(run)
    replace("squeue", 'echo "squeue: error: slurm_load_jobs error: Unexpected message received" >&2; exit 1')
    wait_until(lambda: "Unexpected message received" in run.notice, LONG_S)
    assert run.status == "running"
    replace("squeue", 'exec "$REAL" "$@"')
    run.stop()
    assert (run.status, run.error) == ("stopped", None)


def test_a_job_is_cancelled_though_scancel_fails_at_first(launch, replace, slurm):
    run = launch(workloads.stuck)
    wait_until(lambda: run.states == ["running"] * 2, LONG_S)
    replace("scancel", 'echo "scancel: error: Kill job error on job id: Socket timed out" >&2; exit 1')
    run.ask_to_stop(0.1)
    wait_until(lambda: "could not be cancelled: " in run.notice or run.over.is_set(), LONG_S)
    replace("scancel", 'exec "$REAL" "$@"')
    assert run.over.wait(LONG_S)
    assert run.status == "stopped"
    wait_until(lambda: not slurm.jobs(), LONG_S)


# Launching from within a job, or a rank


# An allocation that somebody holds


def test_ranks_begin_in_an_allocation_and_leave_it_as_it_was(slurm, tmp_path):
    job = slurm.run("sbatch", "--parsable", "-N2", "-o/dev/null", "--wrap=sleep 1000").strip()
    wait_until(lambda: "RUNNING" in slurm.run("squeue", "-h", "-o", "%T", "-j", job), LONG_S)
    on = labkit.Slurm(2, 1, folder=tmp_path, allocation=job)
    for _ in range(2):
        assert labkit.launch(elsewhere.rank_and_job, on=on, live=False).results == [(0, job), (1, job)]
    error = end_of(labkit.launch(elsewhere.die, __file__, on=on, live=False, wait=False))
    assert (error.rank, "(SIGKILL)" in str(error)) == (1, True)
    assert slurm.jobs() == [job]
    slurm.run("scancel", job)
