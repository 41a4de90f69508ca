"""Ranks as the tasks of a SLURM job: `labkit.launch(train, on=labkit.Slurm(nodes=2, ranks_per_node=4))`.

Uses SLURM's own commands, `sbatch`, `squeue` and `scancel` (https://slurm.schedmd.com/sbatch.html): what a user can
type to look after the job is what happens here. A library between would be one more that must agree with the cluster.
`job` follows the job, and `endings` says why it ended.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from labkit.engines.arguments import naming
from labkit.engines.base import Target
from labkit.launchers.directory_engine import LaunchedEngine, check_whole, new_directory
from labkit.launchers.slurm.job import SlurmJob
from labkit.system import require_posix


class Slurm(Target):
    """Where to launch: a job of `nodes` × `ranks_per_node` ranks on a SLURM cluster.

    Args:
        nodes: machines.
        ranks_per_node: ranks on each; a rank's GPU is number `local_rank` of those that SLURM gives it.
        folder: where the runs' folders are made. This notebook and every node must be able to write there.
        setup: shell lines to run on the first node before the ranks start, `module load …` for example.
        python: the interpreter on the nodes; by default this notebook's. It needs the same packages.
        options: any other option of `sbatch`, with _ for -: `partition="gpu"`, `time="02:00:00"`, `gpus_per_node=4`,
            `mem="32G"`, `account=…`; True for an option without a value, False for none of it (`requeue=False`).

    A job whose node fails, or that is preempted, is put back into the queue by SLURM and begins again: a function that
    keeps checkpoints goes on from the newest one. Before SLURM takes the machines away `worker.log` raises
    `labkit.Stopped`, at a common step; whoever catches it has SLURM's grace, KillWait (30 s by default) at least, for a
    last checkpoint.
    """

    def __init__(
        self,
        nodes: int = 1,
        ranks_per_node: int = 1,
        folder: str | os.PathLike[str] = "labkit-runs",
        setup: str = "",
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        with naming("bad_argument"):
            check_whole("nodes", nodes)
            check_whole("ranks_per_node", ranks_per_node)
            kept = {"ntasks", "ntasks_per_node", "output", "error", "job_name", "wrap", "parsable", "open_mode"} & set(
                options
            )
            if kept:
                raise ValueError(
                    f"Slurm() sets {', '.join(sorted(kept))} itself; give nodes= and ranks_per_node= instead"
                )
            for name, value in options.items():
                if "\n" in str(value):
                    raise ValueError(f"an option of sbatch is one line, got {name}={str(value)!r:.60}")
        self.nodes, self.ranks_per_node, self.world_size = nodes, ranks_per_node, nodes * ranks_per_node
        self.folder, self.setup, self.python = folder, setup, python
        self.options = {"requeue": True, **options}

    def engine(self, name: str, timeout_s: float | None) -> LaunchedEngine:
        """Return what carries one run."""
        return LaunchedEngine(self.job(name, timeout_s))

    def job(self, name: str, timeout_s: float | None) -> SlurmJob:
        """Return a job for one run or session; it is not submitted yet. Raises OSError on Windows."""
        require_posix("labkit.Slurm")
        about = {"name": name, "timeout_s": timeout_s}
        return SlurmJob(self.world_size, new_directory(self.folder, name), about, self.python, self.script)

    def script(self, command: Sequence[str], name: str, output: str) -> str:
        """Return the batch script that runs a command as every rank, as text."""
        head = {
            "job-name": " ".join(name.split()),
            "nodes": self.nodes,
            "ntasks-per-node": self.ranks_per_node,
            "output": output,
            "open-mode": "append",
        }
        options = {**head, **{key.replace("_", "-"): value for key, value in self.options.items()}}
        if options.get("requeue") is False:
            options["no-requeue"] = True
        lines = ["#!/bin/bash"]
        for key, value in options.items():
            if value is not False and value is not None:
                lines.append(f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={shlex.quote(str(value))}")
        cpus = self.options.get("cpus_per_task")
        # One that fails ends all: without --kill-on-bad-exit the others wait in a collective until the time limit.
        srun = ["srun", "--kill-on-bad-exit=1", f"--ntasks-per-node={self.ranks_per_node}"]
        srun += [f"--cpus-per-task={cpus}"] if cpus else []
        lines += [*filter(None, [self.setup.strip()]), "exec " + shlex.join([*srun, *command])]
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        return f"Slurm(nodes={self.nodes}, ranks_per_node={self.ranks_per_node}, …)"
