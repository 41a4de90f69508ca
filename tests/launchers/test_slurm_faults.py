"""What goes wrong around a job on a real SLURM: answers that come late, signals, folders that go, other notebooks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import labkit
from tests.conftest import LONG_S, end_of, wait_until
from tests.launchers.test_slurm import job_of, logged
from tests.support import elsewhere, workloads
from tests.support.tiers import few

pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def launch(slurm, tmp_path):
    """Launch on the cluster, in the background."""

    def launch(fn, *args, nodes=2, ranks_per_node=1, stall_s=None, **options):
        on = labkit.Slurm(nodes, ranks_per_node, **{"folder": tmp_path / "runs", **options})
        return labkit.launch(fn, *args, on=on, wait=False, live=False, stall_s=stall_s)

    return launch


def in_another_process(script):
    """Run a script, as another notebook would; return what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Signals


def test_a_signal_that_slurm_was_asked_for_is_the_functions_own(launch, slurm):
    # SLURM may send it up to a minute early: the ranks have 40 s to start, and it comes before the limit.
    run = launch(elsewhere.wait_for_signal, "SIGUSR1", time="00:02:00", signal="USR1@20")
    run.wait(2 * LONG_S)
    assert (run.status, run.results) == ("finished", [10, 10])


@pytest.mark.parametrize("name", few(["SIGUSR1", "SIGHUP", "SIGALRM", "SIGINT"], 4))
def test_any_signal_that_a_user_sends_reaches_the_function(name, launch, slurm):
    run = launch(elsewhere.wait_for_signal, name)
    logged(run)
    slurm.run("scancel", "--signal", name.removeprefix("SIG"), job_of(run))
    run.wait(LONG_S)
    assert run.status == "finished"
    assert len(set(run.results)) == 1


def test_a_signal_that_the_function_does_not_handle_ends_the_rank_and_is_named(launch, slurm):
    run = launch(workloads.spin)
    logged(run)
    slurm.run("scancel", "--signal", "USR1", job_of(run))
    error = end_of(run)
    assert error.rank is not None
    assert "(SIGUSR1)" in error.diagnosis.headline


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


def test_what_slurm_refuses_leaves_no_folder(launch, replace, tmp_path):
    replace("sbatch", 'echo "sbatch: error: Batch job submission failed: Invalid qos specification" >&2; exit 1')
    with pytest.raises(RuntimeError, match="SLURM did not take the job: Batch job submission failed: Invalid qos"):
        launch(workloads.fit)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".gitignore"]


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


def test_a_notebook_with_a_launchers_variables_launches_as_any_other(launch, monkeypatch):
    for name, value in {
        "TORCHELASTIC_RUN_ID": "outer",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_PORT": "1",
        "SLURM_JOB_ID": "77777",
        "SLURM_PROCID": "9",
        "SLURM_NTASKS": "1",
        "SBATCH_ARRAY_INX": "0-2",
        "SLURMD_NODENAME": "elsewhere",
        "FOR_RANKS": "yes",
    }.items():
        monkeypatch.setenv(name, value)
    run = launch(elsewhere.where)
    run.wait(LONG_S)
    assert [result[:2] for result in run.results] == [(0, 2), (1, 2)]
    for *_, found in run.results:
        theirs = found["SLURM_JOB_ID"], found["TORCHELASTIC_RUN_ID"], found["FOR_RANKS"]
        assert theirs == (job_of(run), "labkit", "yes")


def test_a_launch_from_a_rank_has_ranks_of_its_own_and_one_within_a_job_says_which_nodes(launch, slurm, tmp_path):
    local = labkit.launch(elsewhere.launch_on_slurm, tmp_path / "inner", world_size=1, live=False)
    ((results, notice),) = local.results
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]
    assert re.fullmatch(r"SLURM job \d+ on node\[1-2\]", notice)
    run = launch(elsewhere.launch_on_slurm, tmp_path / "inner", nodes=1)
    run.wait(LONG_S)
    ((results, notice),) = run.results
    assert [result[:2] for result in results] == [(0, 2), (1, 2)]
    outer = job_of(run)
    assert re.fullmatch(
        rf"SLURM job \d+ on node\[1-2\]: nodes of its own, not those of job {outer}, in which it was launched", notice
    )


def test_with_export_none_ranks_have_what_setup_has_set(launch, monkeypatch):
    monkeypatch.setenv("FOR_RANKS", "yes")
    run = launch(elsewhere.where, export="NONE", setup="export SET_UP=yes")
    run.wait(LONG_S)
    assert {(found["FOR_RANKS"], found["SET_UP"]) for *_, found in run.results} == {(None, "yes")}


# Folders


def test_a_folder_that_goes_in_mid_run_is_named_and_its_ranks_are_ended(launch, slurm):
    run = launch(workloads.spin)
    logged(run)
    while run.folder.exists():  # a node may be writing there
        shutil.rmtree(run.folder, ignore_errors=True)
    error = end_of(run)
    assert f"folder {run.folder} has gone" in str(error)
    assert error.rank is None
    wait_until(lambda: not slurm.jobs(), LONG_S)


@pytest.mark.parametrize("name", few(["it's $HOME & `more`", "runs %j of 100%", "ä→", "#1"], 4))
def test_a_job_is_found_by_its_number_whatever_its_folder_is_called(name, launch, tmp_path):
    run = launch(workloads.fit, folder=tmp_path / name, comment=name, nodelist=["node1", "node2"])
    run.wait(LONG_S)
    assert run.folder.parent == tmp_path / name
    assert (run.folder / "slurm.out").exists()
    again = labkit.attach(int(job_of(run)), wait=True)
    assert (again.folder, again.status) == (run.folder, "finished")


# An allocation that somebody holds


def test_ranks_begin_in_an_allocation_and_leave_it_as_it_was(slurm, tmp_path):
    job = slurm.run("sbatch", "--parsable", "-N2", "-o/dev/null", "--wrap=sleep 1000").strip()
    wait_until(lambda: "RUNNING" in slurm.run("squeue", "-h", "-o", "%T", "-j", job), LONG_S)
    on = labkit.Slurm(2, 1, folder=tmp_path, allocation=job)
    for _ in range(2):
        results = labkit.launch(elsewhere.where, on=on, live=False).results
        assert [(rank, found["SLURM_JOB_ID"]) for rank, _, found in results] == [(0, job), (1, job)]
    error = end_of(labkit.launch(elsewhere.fail, "SIGKILL", __file__, on=on, live=False, wait=False))
    assert (error.rank, "(SIGKILL)" in str(error)) == (1, True)
    assert slurm.jobs() == [job]
    slurm.run("scancel", job)
