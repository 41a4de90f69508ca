"""Runs on a real SLURM of two nodes, started for these tests on this machine (`tests.support.cluster`)."""

from __future__ import annotations

import os
import shutil
import sys
import time

import pytest
import torch

import labkit
from tests.conftest import LONG_S, end_of, printed_by_a_notebook_that_is_killed, wait_for_step, wait_until
from tests.support import elsewhere, workloads
from tests.support.tiers import few

pytestmark = pytest.mark.cluster


@pytest.fixture
def launch(slurm, tmp_path):
    """Launch on the cluster, in the background."""

    def launch(fn, *args, nodes=2, ranks_per_node=1, stall_s=None, name=None, **options):
        on = labkit.Slurm(nodes, ranks_per_node, folder=tmp_path / "my runs, 100%", **options)
        return labkit.launch(fn, *args, on=on, wait=False, live=False, stall_s=stall_s, name=name)

    return launch


def job_of(run):
    return run.engine.launched.job_id


def logged(run):
    wait_until(lambda: run.over.is_set() or not set(range(run.world_size)) - set(run.history["rank"]), LONG_S)
    assert not run.over.is_set(), str(run.error)


# A run


def test_a_run_on_two_nodes_is_seen_live_and_equals_a_local_one_bit_for_bit(launch, slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    monkeypatch.setenv("SLURM_JOB_ID", "77777")  # as in a notebook that itself runs in a job
    go = tmp_path / "go"
    run = launch(elsewhere.fit_and_show, go, ranks_per_node=2, name="my first; run")
    assert run.status == "queued"
    assert run.states == ["queued"] * 4
    wait_for_step(run, 9)
    assert run.status == "running"
    assert run.states == ["running"] * 4
    assert run.notice == f"SLURM job {job_of(run)} on node[1-2]"
    assert run.history.groupby("rank")["step"].apply(list).tolist() == [list(range(10))] * 4
    assert len(run.figure().data) == 5, "a curve per rank and their mean"
    go.touch()
    run.wait(LONG_S)
    assert (run.status, run.states) == ("finished", ["finished"] * 4)

    local = labkit.launch(elsewhere.fit_and_show, world_size=4, live=False)
    for rank, (weights, place, gpus) in enumerate(run.results):
        for mine, other in zip(weights, local.results[rank][0], strict=True):
            assert torch.equal(mine, other)
        assert (place["rank"], place["local_rank"], place["world_size"]) == (rank, rank % 2, 4)
        assert (place["backend"], place["sum"]) == ("gloo", 4)
        assert place["heavy"] == []
        assert gpus == "5,3", "what the notebook or the cluster says of GPUs is left alone"
    assert run.history["loss"].tolist() == local.history["loss"].tolist()
    assert all(f"hello from {rank}\n" in output for rank, output in enumerate(run.output))
    assert all(peak > 2**20 for peak in run.peak_bytes)

    said = slurm.run("scontrol", "show", "job", job_of(run))
    assert "JobName=my first; run" in said
    for again in (labkit.attach(int(job_of(run)), wait=True), labkit.attach(run.folder, wait=True)):
        assert (again.status, again.states, again.name) == ("finished", ["finished"] * 4, "my first; run")
        assert again.history.equals(run.history)
        assert again.output == run.output
        assert torch.equal(again.results[3][0][0], run.results[3][0][0])
        assert again.elapsed_s == pytest.approx(run.elapsed_s)
    wait_until(lambda: not slurm.jobs(), LONG_S)


def test_stop_stacks_and_a_second_notebook_while_a_node_is_drained(launch, slurm):
    run = launch(workloads.spin)
    logged(run)
    slurm.update(NodeName="node2", State="DRAIN", Reason="maintenance")
    again = labkit.attach(job_of(run))
    logged(again)
    stacks = run.stacks()
    assert "workloads.py" in str(stacks)
    assert "spin" in str(stacks)
    assert run.status == "running", "a node that is drained lets its jobs go on"
    again.stop(LONG_S)
    end_of(run)
    assert again.status == "stopped"
    assert again.results[0] == again.results[1] > 0, "ranks that catch Stopped return what they have"
    assert run.results == again.results
    assert (run.status, run.warnings) == ("stopped", ["stopped by another notebook"])
    later = labkit.attach(run.folder, wait=True)
    assert (later.status, later.results) == ("stopped", run.results)


# Failures


def test_a_node_that_is_lost_is_named(launch, slurm):
    run = launch(elsewhere.keep_logging, requeue=False)
    logged(run)
    slurm.update(NodeName="node2", State="DOWN", Reason="fan is broken")
    error = end_of(run)
    assert error.rank is None
    assert str(error).startswith(f"SLURM job {job_of(run)} lost a node (NODE_FAIL)")
    assert "node2 is down (fan is broken)" in str(error)


def test_ranks_keep_a_last_checkpoint_before_slurm_takes_their_machines_away(launch, slurm, tmp_path):
    run = launch(elsewhere.save_when_stopped, tmp_path)
    wait_for_step(run, 5)
    slurm.run("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o/dev/null", "--wrap=sleep 0.1")
    wait_until(lambda: run.attempt == 1, LONG_S)
    first, second = ((tmp_path / f"{rank}.0").read_text() for rank in (0, 1))
    assert first == second, "at a common step"
    wait_until(lambda: run.history["attempt"].max() == 1, LONG_S)
    run.stop()
    assert (run.status, run.states) == ("stopped", ["stopped"] * 2)


# Signals


@pytest.mark.parametrize("name", few(["SIGUSR1", "SIGHUP", "SIGALRM", "SIGINT"], 4))
def test_any_signal_that_a_user_sends_reaches_the_function(name, launch, slurm):
    run = launch(elsewhere.wait_for_signal, name)
    logged(run)
    slurm.run("scancel", "--signal", name.removeprefix("SIG"), job_of(run))
    run.wait(LONG_S)
    assert run.status == "finished"
    assert len(set(run.results)) == 1


# The notebook


def test_a_run_goes_on_without_its_notebook_and_is_found_again(slurm, tmp_path):
    (job,) = printed_by_a_notebook_that_is_killed(f"""
        on = labkit.Slurm(2, 1, folder={str(tmp_path / "runs")!r})
        run = labkit.launch(elsewhere.fit_and_show, {str(tmp_path / "go")!r}, on=on, wait=False, live=False)
        print(run.engine.launched.job_id, flush=True)
    """)
    run = labkit.attach(job)
    wait_for_step(run, 9)
    (tmp_path / "go").touch()
    run.wait(LONG_S)
    assert run.status == "finished"
    assert run.name == "fit_and_show"
    assert run.history.groupby("rank")["step"].apply(list).tolist() == [list(range(20))] * 2


# The queue


def test_a_job_that_waits_says_why_and_can_be_stopped(launch, slurm):
    slurm.update(NodeName="node2", State="DRAIN", Reason="bad disk")
    first = launch(workloads.fit, stall_s=0.1)
    second = launch(workloads.fit, stall_s=0.1)
    wait_until(lambda: all(" waits: " in run.notice for run in (first, second)), LONG_S)
    time.sleep(0.5)
    assert first.status == second.status == "queued", "time in the queue is no hang"
    second.stop()
    assert (second.status, second.error) == ("stopped", None)
    assert slurm.jobs() == [job_of(first)]
    first.stop()
    wait_until(lambda: not slurm.jobs())


def test_a_job_that_never_began_says_what_slurm_wrote(launch, slurm):
    run = launch(workloads.fit, setup="echo the module is not there; exit 3")
    error = end_of(run)
    assert error.rank is None
    assert str(error).startswith(f"SLURM job {job_of(run)} ended (FAILED) before any rank did")
    assert "the module is not there" in str(error)


def test_a_folder_that_one_node_does_not_see(launch, slurm, tmp_path):
    python = tmp_path / "python"
    elsewhere_there = '[ "$SLURMD_NODENAME" = node2 ] && set -- "$1" "$2" /not/shared'
    python.write_text(f'#!/bin/sh\n{elsewhere_there}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    error = end_of(run := launch(workloads.fit, python=str(python)))
    assert error.rank is None
    assert str(error).startswith(f"SLURM job {job_of(run)} ended (FAILED) before ")
    assert "/not/shared is not the folder of a run" in str(error)
    assert "Every node must see it" in str(error)


def test_what_slurm_refuses_is_said_with_what_there_is_instead(launch, slurm, tmp_path):
    with pytest.raises(RuntimeError, match="SLURM did not take the job: .*invalid partition"):
        launch(workloads.fit, partition="gpu")
    with pytest.raises(RuntimeError, match="SLURM did not take the job: .*(unrecognized|invalid) option.*partitoin"):
        launch(workloads.fit, partitoin="debug")
    run = launch(workloads.fit, nodes=3)
    wait_until(lambda: "waits: Partition" in run.notice, LONG_S)
    run.stop()
    shutil.rmtree(run.folder)
    assert [each.name for each in (tmp_path / "my runs, 100%").iterdir()] == [".gitignore"], "no folder without a run"


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
    run = launch(workloads.go_astray, "sleeps")
    wait_until(lambda: run.states == ["running"] * 2, LONG_S)
    replace("scancel", 'echo "scancel: error: Kill job error on job id: Socket timed out" >&2; exit 1')
    run.ask_to_stop(0.1)
    wait_until(lambda: "could not be cancelled: " in run.notice or run.over.is_set(), LONG_S)
    replace("scancel", 'exec "$REAL" "$@"')
    assert run.over.wait(LONG_S)
    assert run.status == "stopped"
    wait_until(lambda: not slurm.jobs(), LONG_S)


# An allocation that somebody holds


def test_ranks_begin_in_an_allocation_and_leave_it_as_it_was(slurm, tmp_path):
    job = slurm.run("sbatch", "--parsable", "-N2", "-o/dev/null", "--wrap=sleep 1000").strip()
    wait_until(lambda: "RUNNING" in slurm.run("squeue", "-h", "-o", "%T", "-j", job), LONG_S)
    on = labkit.Slurm(2, 1, folder=tmp_path, allocation=job)
    assert labkit.launch(elsewhere.rank_and_job, on=on, live=False).results == [(0, job), (1, job)]
    error = end_of(labkit.launch(elsewhere.die, __file__, on=on, live=False, wait=False))
    assert (error.rank, "(SIGKILL)" in str(error)) == (1, True)
    assert slurm.jobs() == [job]
    slurm.run("scancel", job)


# attach


def test_attach_says_what_it_cannot_find(slurm, tmp_path):
    with pytest.raises(ValueError, match=r"SLURM does not know job 4242 .*give `run.folder` instead"):
        labkit.attach(4242)
    job = slurm.run("sbatch", "--parsable", "-o", "/dev/null", "--wrap=true").strip()
    with pytest.raises(ValueError, match=f"SLURM job {job} was not launched by labkit"):
        labkit.attach(job)
    wait_until(lambda: not slurm.jobs())
    with pytest.raises(ValueError, match="is not the folder of a run"):
        labkit.attach(tmp_path)
