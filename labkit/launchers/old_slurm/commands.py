"""SLURM's own commands, run by this process: https://slurm.schedmd.com/man_index.html."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from labkit.launchers.environments import without_launchers

COMMAND_S = 60.0
"""How long one of SLURM's commands may take …"""

HINT_S = 10.0
"""… and one whose answer is only for people."""

SCRIPT = "job.sbatch"
"""The batch script in a run's folder: by its path a job is known to be that run's."""


_NOT_FOR_A_RUN = re.compile(
    "SBATCH_(ARRAY_INX|CLUSTERS|CLUSTER_CONSTRAINT|DEBUG|DISTRIBUTION|ERROR|GPU_BIND|GPUS_PER_TASK|INPUT|NO_KILL|SIGNAL"
    r"|WAIT)|(SQUEUE|SCANCEL)_\w+"
)
"""Variables that would change what a job is, as options that `Slurm` refuses, or what these commands answer."""


class SlurmError(RuntimeError):
    """One of SLURM's commands failed, or is not there."""


def slurm(*command: str, timeout_s: float | None = None) -> str:
    """Run one of SLURM's commands and give what it prints. Raises SlurmError with what it says.

    It has none of this process's variables that a launcher has set: `sbatch` hands all on to the job. It has those by
    which a user chooses an account or a partition for all jobs.
    """
    timeout_s = timeout_s or COMMAND_S
    variables = without_launchers(os.environ)
    try:
        done = subprocess.run(
            command,
            env={name: value for name, value in variables.items() if not _NOT_FOR_A_RUN.fullmatch(name)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not on this machine: SLURM's commands are found where a cluster's login or compute nodes "
            "are. Run the notebook there"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise SlurmError(f"{command[0]} cannot be run: {error.strerror or error}") from None
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
            names = " ".join(slurm("sinfo", "-h", "-o", "%R", timeout_s=HINT_S).split())
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
    # Not by where its output goes, of which SLURM shows what %j and the like stand for.
    found = re.search(rf"^\s*Command=(.*)/{re.escape(SCRIPT)}$", said, re.MULTILINE)
    if found is None or not (Path(found[1]) / "run.json").exists():
        script = re.search(r"^\s*Command=(.*)$", said, re.MULTILINE)
        raise ValueError(
            f"SLURM job {job} was not launched by labkit, or its folder has gone: its batch script is "
            f"{script[1] if script else 'not named'}"
        )
    return Path(found[1])


def job_of(directory: Path) -> str:
    """Return the number of the SLURM job that is the run in a directory; "" if there is none. Raises SlurmError."""
    script = f"/{directory.name}/{SCRIPT}"  # of a name that no other run has
    listed = slurm("squeue", "-h", "-t", "all", "-u", str(os.getuid()), "-o", "%A %o")
    mine = [line.split(" ", 1)[0] for line in listed.splitlines() if line.rstrip().endswith(script)]
    return mine[-1] if mine else ""
