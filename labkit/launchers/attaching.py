"""`labkit.attach`: follow again what goes on without its notebook."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from labkit.engines.arguments import naming
from labkit.launcher import show_run
from labkit.launchers.directory_engine import LaunchedEngine
from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.slurm.commands import SlurmError, directory_of, job_of
from labkit.launchers.slurm.job import SlurmJob
from labkit.run import Run

if TYPE_CHECKING:
    from labkit.session.session import Session


KNOWN_S = 5.0
"""How long SLURM may take to say how a job is before what its folder holds is shown without that."""


def attach(job: int | str | os.PathLike[str], wait: bool = False, live: bool | None = None) -> Run | Session:
    """Follow a run on a SLURM cluster again: after a restart of the kernel, or from another notebook.

    Of a session there, return the `labkit.Session`, with its ranks and variables; its `last` is what ran last.

    Args:
        job: the number of the SLURM job, while SLURM knows it, or the folder (`run.folder`, `session.folder`).
        wait: whether to return when the run is over.
        live: as `launch` takes it.

    Returns the `Run`, its history whole. Raises ValueError if there is no such run; WorkerFailed with `wait=True`, if a
    rank failed.
    """
    with naming("slurm"):
        path = directory_of(str(job)) if isinstance(job, int) or (isinstance(job, str) and job.isdigit()) else job
        directory = RunDirectory(path)
        about = directory.about()
        if about.get("launcher") == "session":
            raise ValueError(
                f"{directory.path} is one job of a session; attach to the session, whose `last` is the newest job: "
                f"labkit.attach({str(directory.path.parent.parent)!r})"
            )
        if about.get("launcher") != "slurm":
            raise ValueError(
                f"{directory.path} is a run under {about.get('launcher')}, which ended with its notebook; "
                "only runs on a SLURM cluster go on without one"
            )
        if "job" not in about:
            about["job"] = _unnoted_job(directory)
            directory.note(about)
    if "session" in about:
        from labkit.session.session import Session

        return Session.attached(directory.path, about)
    launched = SlurmJob(about["world_size"], directory, about)
    run = Run(LaunchedEngine(launched), about["world_size"], about["name"], about.get("stall_s"))
    launched.follow(about["job"])
    launched.wait_until_known(KNOWN_S)
    run.follow(directory.job(), stopping=directory.was_asked_to("stop"))
    return show_run(run, live, wait)


def _unnoted_job(directory: RunDirectory) -> str:
    """Return the number of a job whose notebook ended before sbatch answered. Raises ValueError if there is none."""
    try:
        found, why = job_of(directory.path), "squeue does not list it"
    except SlurmError as error:
        found, why = "", str(error)
    if not found:
        raise ValueError(f"{directory.path} is not known to have been given to SLURM: its job was not noted, and {why}")
    return found
