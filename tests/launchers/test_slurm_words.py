"""What is asked of SLURM, and how its answers are read; without a cluster."""

from __future__ import annotations

import os
import shlex
import sys

import pytest

import labkit
from labkit.launchers import run_folder, slurm, start
from tests.support import workloads


def test_the_command_and_the_batch_script(tmp_path, monkeypatch):
    monkeypatch.delenv("SBATCH_NO_REQUEUE", raising=False)
    folder = tmp_path / "100% mine"
    on = labkit.Slurm(
        2, 4, partition="gpu", gpus_per_node=4, time="01:00:00", cpus_per_task=3, exclusive=True, setup="module load x"
    )
    assert on.world_size == 8
    command = on.sbatch("a 'name'\nexit", folder)
    assert command == [
        *("sbatch", "--parsable", "--job-name=a 'name' exit", "--nodes=2", "--ntasks-per-node=1"),
        *(f"--output={tmp_path}/100%% mine/slurm.out", "--open-mode=append", "--requeue", "--partition=gpu"),
        *("--gpus-per-node=4", "--time=01:00:00", "--cpus-per-task=12", "--exclusive", f"{folder}/job.sbatch"),
    ]
    srun = "srun --kill-on-bad-exit=1 --export=ALL --nodes=2 --ntasks-per-node=1 --cpus-per-task=12"
    assert on.script(folder).splitlines() == [
        "#!/bin/bash",
        "module load x",
        f"exec {srun} {shlex.join(start.command(sys.executable, folder))}",
    ]
    assert "--no-requeue" in labkit.Slurm(requeue=False).sbatch("x", folder)
    assert "--requeue" not in labkit.Slurm(requeue=False).sbatch("x", folder)
    assert "--nodelist=a,b" in labkit.Slurm(nodelist=["a", "b"]).sbatch("x", folder)


def test_what_a_user_has_set_for_all_jobs_counts_and_what_a_job_has_set_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("SBATCH_NO_REQUEUE", "1")
    assert "--requeue" not in labkit.Slurm().sbatch("x", tmp_path)
    for name in ("SBATCH_ACCOUNT", "SBATCH_ARRAY_INX", "SLURM_JOB_ID", "SLURM_NTASKS", "RANK", "SLURM_ACCOUNT"):
        monkeypatch.setenv(name, "7")
    left = slurm._environment()
    assert {"SBATCH_ACCOUNT", "SLURM_ACCOUNT"} < left.keys()
    assert not {"SBATCH_ARRAY_INX", "SLURM_JOB_ID", "SLURM_NTASKS", "RANK"} & left.keys()


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        ({}, 1),
        ({"nodes": 2}, 2),
        ({"nodes": 2, "gpus_per_node": 4}, 8),
        ({"nodes": 2, "gpus_per_node": "a100:4"}, 8),
        ({"gpus_per_node": "a100:2,v100:1"}, 3),
        ({"gpus_per_node": "a100"}, 1),
        ({"gpus_per_node": 0}, 1),
        ({"nodes": 2, "gres": "gpu:a100:2(S:0-1),tmp:8", "ranks_per_node": 2}, 4),
        ({"gres": "tmp:8"}, 1),
        ({"nodes": 2, "gpus_per_node": 4, "ranks_per_node": 1}, 2),
    ],
)
def test_there_are_as_many_ranks_as_gpus_unless_it_is_said(options, world_size):
    assert labkit.Slurm(**options).world_size == world_size


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"nodes": 0}, ValueError, "nodes is a whole number of at least 1, got 0"),
        ({"ranks_per_node": 1.5}, ValueError, "ranks_per_node is a whole number of at least 1, got 1.5"),
        ({"nodes": True}, ValueError, "nodes is a whole number of at least 1, got True"),
        ({"ntasks": 4}, ValueError, r"Slurm\(\) does not take ntasks; give nodes= and ranks_per_node="),
        ({"array": "0-2"}, ValueError, r"Slurm\(\) does not take array; give one launch for each member"),
        ({"nodes": 2, "gpus": 8}, ValueError, "give ranks_per_node=… too, or gpus_per_node=… instead"),
        ({"gres": {"gpu": 2}}, TypeError, "gres is a text or a number, as sbatch takes it"),
        ({"allocation": "7", "time": 5}, ValueError, "an allocation is there already, time cannot change it"),
        ({"allocation": "here"}, ValueError, "this notebook runs in no SLURM job"),
    ],
)
def test_arguments_of_no_use(arguments, error, said, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(error, match=said):
        labkit.Slurm(**arguments)


def test_on_takes_a_launcher_which_says_how_many_ranks_there_are():
    with pytest.raises(TypeError, match=r"on is labkit\.Slurm\(…\), .*, got"):
        labkit.launch(workloads.fit, on="slurm")
    with pytest.raises(ValueError, match=r"has 4 ranks, but world_size=2"):
        labkit.launch(workloads.fit, on=labkit.Slurm(2, 2), world_size=2)


@pytest.mark.spawns
@pytest.mark.check
def test_a_machine_without_slurm_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="sbatch is not on this machine: .*Run the notebook there"):
        labkit.launch(workloads.fit, on=labkit.Slurm(folder=tmp_path / "runs"), live=False)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".gitignore"]


@pytest.mark.parametrize("state", sorted(slurm.ENDINGS))
def test_every_ending_says_what_to_do(state):
    said = ended(state, [0, 1])
    assert f"({state})" in said.headline
    assert said.cause.endswith(".")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ([0, 1], "SLURM job 5 ended (FAILED) before any rank did"),
        ([1], "SLURM job 5 ended (FAILED) before rank 1 did"),
        ([], "SLURM job 5 was asked to end, and its ranks stopped (FAILED)"),
    ],
)
def test_a_job_that_ended_for_no_reason_of_slurms_says_which_ranks_had(missing, said):
    assert ended("FAILED", missing).headline == said


def ended(state, missing):
    about = {"name": "x", "stall_s": None, "nodes": 2, "ranks_per_node": 1}
    job = slurm.SlurmJob(None, run_folder.RunFolder("/nowhere"), about)
    job.job_id, job._state = "5", state
    return job.why_over(missing)


def test_attach_to_a_folder_of_another_kind(tmp_path):
    folder = run_folder.RunFolder(tmp_path / "run")
    os.mkdir(folder.path, 0o700)
    folder.note({"launcher": "srun"})
    with pytest.raises(ValueError, match="is a run under srun, which ended with its notebook"):
        labkit.attach(folder.path)
    folder.note({"launcher": "slurm"})
    with pytest.raises(ValueError, match="its notebook ended before the number was noted"):
        labkit.attach(folder.path)
