"""What is asked of SLURM, and how its answers are read; without a cluster."""

from __future__ import annotations

import textwrap

import pytest

import labkit
from labkit.launchers.launcher_job import RanksSeen
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.slurm import endings as slurm_endings
from labkit.launchers.slurm import job as slurm_job
from labkit.launchers.slurm.queue import JobState
from labkit.protocol import events
from tests.support import workloads


def test_the_batch_script(tmp_path):
    on = labkit.Slurm(
        2, 4, partition="gpu", gpus_per_node=4, time="01:00:00", cpus_per_task=3, exclusive=True, setup="module load x"
    )
    assert on.world_size == 8
    script = on.script(["/my python", "supervisor.py", "/a folder"], "a 'name'\nexit", "/100%% mine/slurm.out")
    srun = "--kill-on-bad-exit=1 --export=ALL --ntasks-per-node=4"
    assert script == textwrap.dedent("""\
        #!/bin/bash
        #SBATCH --job-name='a \\'name\\' exit'
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=4
        #SBATCH --output='/100%% mine/slurm.out'
        #SBATCH --open-mode=append
        #SBATCH --requeue
        #SBATCH --partition=gpu
        #SBATCH --gpus-per-node=4
        #SBATCH --time=01:00:00
        #SBATCH --cpus-per-task=3
        #SBATCH --exclusive
        module load x
        exec srun {options} --cpus-per-task=3 '/my python' supervisor.py '/a folder'
    """).replace("{options}", srun)
    assert "#SBATCH --no-requeue" in labkit.Slurm(requeue=False).script(["x"], "x", "x")
    assert "--requeue" not in labkit.Slurm(requeue=False).script(["x"], "x", "x").replace("--no-requeue", "")


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
        ({"nodes": 2, "gres": "gpu:a100:2(S:0-1),tmp:8"}, 4),
        ({"gres": ["gres/gpu:3", "tmp"]}, 3),
        ({"gres": "tmp:8"}, 1),
        ({"nodes": 2, "gpus": 8}, 8),
        ({"nodes": 2, "gpus_per_node": 4, "ranks_per_node": 1}, 2),
    ],
)
def test_there_are_as_many_ranks_as_gpus_unless_it_is_said(options, world_size):
    on = labkit.Slurm(**options)
    assert on.world_size == world_size
    assert f"--ntasks-per-node={on.ranks_per_node}" in on.script(["x"], "x", "x")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": 2, "gpus": 3}, "gpus='3' are not as many on each of 2 nodes"),
        ({"gpus_per_socket": 2}, "does not say how many GPUs a node has; give ranks_per_node"),
    ],
)
def test_where_nobody_can_tell_how_many_gpus_a_node_has_it_is_asked_for(options, said):
    with pytest.raises(ValueError, match=said):
        labkit.Slurm(**options)
    assert labkit.Slurm(**options, ranks_per_node=2).ranks_per_node == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"nodes": 0}, "nodes is a whole number of at least 1, got 0"),
        ({"ranks_per_node": 1.5}, "ranks_per_node is a whole number of at least 1, got 1.5"),
        ({"nodes": True}, "nodes is a whole number of at least 1, got True"),
        ({"ntasks": 4}, r"Slurm\(\) sets ntasks itself; give nodes= and ranks_per_node= instead"),
        ({"comment": "a\nb"}, r"an option of sbatch is one line, got comment='a\\nb'"),
    ],
)
def test_arguments_of_no_use(arguments, said):
    with pytest.raises(ValueError, match=said):
        labkit.Slurm(**arguments)


def test_on_takes_a_launcher_which_says_how_many_ranks_there_are():
    with pytest.raises(TypeError, match=r"on is labkit\.Slurm\(…\), .* or labkit\.Here\(\), got"):
        labkit.launch(workloads.fit, on="slurm")
    with pytest.raises(ValueError, match=r"has 4 ranks, but world_size=2; leave world_size away"):
        labkit.launch(workloads.fit, on=labkit.Slurm(2, 2), world_size=2)


@pytest.mark.spawns
@pytest.mark.check
def test_a_machine_without_slurm_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="sbatch is not on this machine: .*Run the notebook there, or use labkit.To"):
        labkit.launch(workloads.fit, on=labkit.Slurm(folder=tmp_path / "runs"), live=False)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".gitignore"]


def ended(state, exits=(), begun=(), killed=False):
    """What is said of a job that ended in this state: (missing ranks' part left out) its record."""
    found = {exit.rank: exit for exit in exits}
    returned = {exit.rank for exit in exits if not exit.code}
    seen = RanksSeen(found, [rank for rank in (0, 1) if rank not in found], set(begun), returned)
    made = slurm_job.SlurmJob(2, RunDirectory("/nowhere"), {})
    made.job_id, made._state, made.was_ended = "5", JobState(state, "", "debug", ""), killed
    made.settle()
    return made.ending(seen)


def test_a_job_out_of_memory_names_the_rank_that_was_killed():
    said = ended("OUT_OF_MEMORY", [events.Exit(0, -15, ended=True), events.Exit(1, -9)])
    assert said.rank == 1
    assert said.headline == (
        "SLURM job 5 ran out of the memory that it had been given (OUT_OF_MEMORY); rank 1 was killed for it"
    )
    assert "mem='32G'" in said.cause


@pytest.mark.parametrize("state", sorted(slurm_endings.ENDINGS))
def test_every_ending_says_what_to_do(state):
    said = ended(state)
    assert f"({state})" in said.headline
    assert said.cause.endswith(".")


@pytest.mark.parametrize(
    ("returned", "said"), [({0, 1}, None), ({0}, "SLURM job 5 was asked to end, and its ranks st")]
)
def test_of_a_job_that_slurm_has_forgotten_what_the_ranks_returned_decides(returned, said):
    """They have been asked to stop by SLURM, at the time limit, say, and have returned what they had."""
    exits = {rank: events.Exit(rank, 0, ended=True) for rank in (0, 1)}
    made = slurm_job.SlurmJob(2, RunDirectory("/nowhere"), {})
    made.job_id, made._state = "5", JobState("FORGOTTEN", "", "", "")
    made.settle()
    found = made.ending(RanksSeen(exits, [], {0, 1}, returned))
    assert (found and found.headline[: len(said)]) == said


def test_what_was_cancelled_by_this_notebook_was_not_cancelled_from_outside():
    assert ended("CANCELLED", killed=True) is None
    assert ended("CANCELLED") is not None
    assert ended("FAILED", [events.Exit(0, -15, ended=True), events.Exit(1, 0)]).headline == (
        "SLURM job 5 was ended (FAILED)"
    ), "a run is not finished because nobody is to blame"
    assert ended("FAILED", [events.Exit(0, 1), events.Exit(1, -15, ended=True)]) is None, "a rank explains it"


def test_attach_to_a_folder_of_another_kind(tmp_path, monkeypatch):
    folder = RunDirectory(tmp_path / "run")
    folder.path.mkdir()
    folder.note({"launcher": "torchrun"})
    with pytest.raises(ValueError, match="is a run under torchrun, which ended with its notebook"):
        labkit.attach(folder.path)
    folder.note({"launcher": "slurm"})
    monkeypatch.setattr("labkit.launchers.attaching.job_of", lambda path: "")
    with pytest.raises(ValueError, match="is not known to have been given to SLURM: .*squeue does not list it"):
        labkit.attach(folder.path)
