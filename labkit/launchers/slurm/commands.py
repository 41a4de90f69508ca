"""SLURM's own commands, run by this process: https://slurm.schedmd.com/man_index.html."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

COMMAND_S = 60.0
"""How long one of SLURM's commands may take."""


class SlurmError(RuntimeError):
    """One of SLURM's commands failed, or is not there."""


def slurm(*command: str) -> str:
    """Run one of SLURM's commands and give what it prints. Raises SlurmError with what it says."""
    environment = {
        name: value
        for name, value in os.environ.items()
        # A notebook that runs in a job must not hand that job's own settings on.
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_"))
    }
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not on this machine: SLURM's commands are found where a cluster's login or compute nodes "
            "are. Run the notebook there, or use labkit.Torchrun"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {COMMAND_S:g} s") from None
    if done.returncode:
        said = re.sub(rf"^{command[0]}: (error: )?", "", done.stderr.strip(), flags=re.MULTILINE)
        raise SlurmError("; ".join(said.splitlines()) or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout


def seconds(left: str) -> float:
    """Read a time as SLURM writes it: "1-02:03:04", "59:58". Infinite if it is none."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", left)
    if found is None:
        return float("inf")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def advice(said: str) -> str:
    """Return what to do next about what `sbatch` refused."""
    if "partition" in said.lower():
        try:
            names = " ".join(slurm("sinfo", "-h", "-o", "%R").split())
        except SlurmError:
            return ""
        return f". The partitions are: {names}"
    return ""


def directory_of(job: str) -> Path:
    """Return the directory of the run that is this SLURM job. Raises ValueError if SLURM does not know it any more."""
    try:
        said = slurm("scontrol", "show", "job", job)
    except SlurmError as error:
        raise ValueError(
            f"SLURM does not say where job {job} keeps its files ({error}). Give the run's folder instead: "
            "`run.folder` named it; by default it is in labkit-runs"
        ) from None
    found = re.search(r"^\s*StdOut=(.*)/slurm\.out$", said, re.MULTILINE)
    if found is None:
        raise ValueError(f"SLURM job {job} was not launched by labkit: its output does not go to a run's folder")
    return Path(found[1].replace("%%", "%"))
