"""`labkit.attach`: follow a run on a SLURM cluster again, after a restart of the kernel or from another notebook."""

from __future__ import annotations

import os

from labkit.engines.arguments import naming
from labkit.launcher import show_run
from labkit.launchers.remote import RemoteEngine
from labkit.launchers.run_folder import RunFolder
from labkit.launchers.slurm import SlurmJob, folder_of
from labkit.run import Run


def attach(job: int | str | os.PathLike[str], wait: bool = False, live: bool | None = None) -> Run:
    """Follow a run on a SLURM cluster again: after a restart of the kernel, or from another notebook.

    Args:
        job: the number of the SLURM job, while SLURM knows it, or the run's folder (`run.folder`).
        wait: whether to return when the run is over.
        live: as `launch` takes it.

    Returns the `Run`, its history whole. Raises ValueError if there is no such run; WorkerFailed with `wait=True`, if a
    rank failed.
    """
    with naming("slurm"):
        is_number = isinstance(job, int) or str(job).isdigit()
        folder = RunFolder(folder_of(str(job)) if is_number else str(job))
        about = folder.about()
        if about["launcher"] != "slurm":
            raise ValueError(
                f"{folder.path} is a run under {about['launcher']}, which ended with its notebook; only jobs of SLURM "
                "go on without one"
            )
        if "job" not in about:
            raise ValueError(f"{folder.path} was given to SLURM, but its notebook ended before the number was noted")
    launched = SlurmJob(None, folder, about)
    engine = RemoteEngine(launched)
    run = Run(engine, about["world_size"], about["name"], about["stall_s"])
    launched.follow(about["job"])
    engine.attached()
    run.follow(folder.job(), stopping="stop" in folder.words().new())
    return show_run(run, live, wait)
