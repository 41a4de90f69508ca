"""What eight ways to start a process put into its environment: of each one process, with the place that it has."""

from __future__ import annotations

import re
from typing import NamedTuple


class Place(NamedTuple):
    """Where a process is."""

    rank: int
    local_rank: int
    world_size: int
    address: str
    """The host on which rank 0 is."""


def first_host(nodelist: str) -> str:
    """Return the first host of a list as SLURM writes it: "gpu07" of "gpu[07-08,11],login1".

    As the first line of `scontrol show hostnames`, where that is not at hand.
    """
    found = re.match(r"([^,\[]+)(?:\[([^\]]*)\]([^,\[]*))?", nodelist)
    if found is None:
        raise ValueError(f"a list of hosts begins with a name, got {nodelist!r:.60}")
    prefix, numbers, suffix = found.groups()
    return prefix if numbers is None else prefix + re.split("[-,]", numbers)[0] + (suffix or "")


PLACES = {
    "torchrun, one node": Place(2, 2, 4, "localhost"),
    "torchrun, two nodes": Place(5, 1, 8, "gpu07"),
    "srun per rank": Place(6, 2, 8, "gpu07"),
    "srun torchrun": Place(6, 2, 8, "gpu07"),
    "mpirun (Open MPI)": Place(5, 1, 8, "gpu07"),
    "Ray Train": Place(3, 1, 4, "10.0.3.17"),
    "Jupyter in a batch script": Place(0, 0, 1, "localhost"),
    "nothing": Place(0, 0, 1, "localhost"),
}
"""What is right, by what has started the process."""

_JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
}


def _step(tasks_per_node: int, task: int) -> dict[str, str]:
    """Return what srun gives a task of a step on two nodes; srun itself runs on login1."""
    tasks = str(2 * tasks_per_node)
    return {
        **_JOB,
        "SLURM_NTASKS": tasks,
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_STEP_NUM_TASKS": tasks,
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task % tasks_per_node),
        "SLURM_NODEID": str(task // tasks_per_node),
        "SLURMD_NODENAME": ("gpu07", "gpu08")[task // tasks_per_node],
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
        "SLURM_SRUN_COMM_HOST": "10.0.0.1",
    }


def _torchrun(place: Place, each: int, run: str) -> dict[str, str]:
    """Return what an agent of torchrun gives a rank."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(each),
        "GROUP_RANK": str(place.rank // each),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": "40009",
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


ENVIRONMENTS: dict[str, dict[str, str]] = {
    "torchrun, one node": _torchrun(PLACES["torchrun, one node"], 4, "3644235c"),
    "torchrun, two nodes": _torchrun(PLACES["torchrun, two nodes"], 4, "4711"),
    "srun per rank": _step(4, 6),
    "srun torchrun": _step(1, 1) | _torchrun(PLACES["srun torchrun"], 4, "4711"),
    "mpirun (Open MPI)": _step(1, 1)
    | {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "24711",
    },
    "Ray Train": {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "10.0.3.17",
        "MASTER_PORT": "52341",
    },
    "Jupyter in a batch script": {
        **_JOB,
        "SLURM_NTASKS": "8",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURMD_NODENAME": "gpu07",
    },
    "nothing": {},
}
"""Those that have to do with a process's place; recorded with SLURM 22.05, PyTorch 2.15 and Open MPI 5.0 (mpirun in an
salloc, with `-x MASTER_ADDR -x MASTER_PORT`), the names of hosts changed. Of Ray Train, what the source of 2.x sets."""
