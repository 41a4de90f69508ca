"""Ranks as the tasks of a SLURM job: `labkit.launch(train, on=labkit.Slurm(nodes=2, ranks_per_node=4))`.

Uses SLURM's own commands, `sbatch`, `squeue` and `scancel` (https://slurm.schedmd.com/sbatch.html): what a user can
type to look after the job is what happens here. A library between would be one more that must agree with the cluster.
`job` follows the job, and `endings` says why it ended.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from labkit.engines.arguments import naming
from labkit.launchers.directory_engine import Launcher, check_whole, runs_folder
from labkit.launchers.old_slurm import options as sbatch
from labkit.launchers.old_slurm.job import SlurmJob
from labkit.launchers.run_directory.directory import RunDirectory


class Slurm(Launcher):
    """Where to launch: a job of `nodes` × `ranks_per_node` ranks on a SLURM cluster.

    Args:
        nodes: machines.
        ranks_per_node: ranks on each; a rank's GPU is number `local_rank` of those that SLURM gives it. By default as
            many as the GPUs that are asked for on a node (`gpus_per_node=4`), or 1 where none are.
        folder: where the runs' folders are made. This notebook and every node must be able to write there. A relative
            one is looked for once, here.
        setup: shell lines to run on the first node before the ranks start, `module load …` for example.
        python: the interpreter on the nodes; by default this notebook's. It needs the same packages.
        options: any other option of `sbatch`, with _ for -: `partition="gpu"`, `time="02:00:00"`, `gpus_per_node=4`,
            `mem="32G"`, `account=…`; True for an option without a value, False for none of it (`requeue=False`), a list
            where sbatch takes several (`nodelist=["node1", "node2"]`). Those that would change what a job is, an array
            of them for example, are refused: `print(labkit.launchers.old_slurm.options.table())`.

    A job whose node fails, or that is preempted, is put back into the queue by SLURM and begins again: a function that
    keeps checkpoints goes on from the newest one. Before SLURM takes the machines away `worker.log` raises
    `labkit.Stopped`, at a common step; whoever catches it has SLURM's grace, KillWait (30 s by default) at least, for a
    last checkpoint.
    """

    def __init__(
        self,
        nodes: int = 1,
        ranks_per_node: int | None = None,
        folder: str | os.PathLike[str] = "labkit-runs",
        setup: str = "",
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        with naming("bad_argument"):
            check_whole("nodes", nodes)
            self.options = {"requeue": True, **sbatch.read(options)}
            if ranks_per_node is None:
                ranks_per_node = sbatch.gpus_per_node(self.options, nodes) or 1
            check_whole("ranks_per_node", ranks_per_node)
            if found := re.search(r"^#SBATCH.*", setup, re.MULTILINE):
                raise ValueError(
                    f"setup is shell lines, got {found[0]!r:.60}; give options of sbatch as arguments, with _ for -"
                )
            self.folder = runs_folder(folder)
            if "\\" in str(self.folder) or any(ord(each) < 32 for each in str(self.folder)):
                raise ValueError(
                    f"SLURM cannot write into a folder with a backslash or a control character in its name; got "
                    f"{str(self.folder)!r}"
                )
        self.nodes, self.ranks_per_node, self.world_size = nodes, ranks_per_node, nodes * ranks_per_node
        self.setup, self.python = setup, python

    def job_in(self, directory: RunDirectory, about: dict[str, Any]) -> SlurmJob:
        """Return a job; it is not submitted yet."""
        return SlurmJob(self.world_size, directory, about, self.python, self.script)

    def script(self, command: Sequence[str], name: str, output: str, before: str = "") -> str:
        """Return the batch script that runs a command as every rank, as text.

        `before` is a line of shell that comes first of all.
        """
        head = {
            "job-name": " ".join(name.split()),
            "nodes": str(self.nodes),
            "ntasks-per-node": str(self.ranks_per_node),
            "output": output,
            "open-mode": "append",
        }
        options: dict[str, str | bool] = {**head, **self.options}
        if not options["requeue"]:
            options["no-requeue"] = True
        # One that fails ends all: without --kill-on-bad-exit the others wait in a collective until the time limit. And
        # ranks have what the script has, whatever of the notebook's environment that was given (`export=…`).
        srun = ["srun", "--kill-on-bad-exit=1", "--export=ALL", f"--ntasks-per-node={self.ranks_per_node}"]
        if cpus := self.options.get("cpus-per-task"):
            srun.append(f"--cpus-per-task={cpus}")
        lines = ["#!/bin/bash", *sbatch.lines(options), *filter(None, [before, self.setup.strip()])]
        return "\n".join([*lines, "exec " + shlex.join([*srun, *command])]) + "\n"

    def __repr__(self) -> str:
        return f"Slurm(nodes={self.nodes}, ranks_per_node={self.ranks_per_node}, …)"
