"""The variables by which a process knows which rank it is: a table for each launcher, and all of them in one list.

A launcher that sets `LABKIT_RANK` and its like, as labkit's own on Ray does, needs no table here.

Needs nothing but the standard library, as supervisors do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import ClassVar


class RankVariables:
    """What one launcher sets in the environment of each rank. Read where they are needed, from this process's."""

    mark: ClassVar[str]
    """Set in every process that the launcher starts."""
    rank: ClassVar[str]
    local_rank: ClassVar[str]
    world_size: ClassVar[str]
    local_world_size: ClassVar[str]
    """Their names."""
    belongs_to_it: ClassVar[str]
    """Matches the names of all that it sets: what it starts must not pass them on to another launcher's ranks."""

    def number(self, what: str) -> int:
        """Return "rank", "local_rank", "world_size" or "local_world_size" of this process."""
        return int(os.environ[getattr(self, what)])

    def attempt(self) -> int:
        """Return how often the launcher has started the ranks before."""
        return 0

    def job(self) -> tuple[str, ...]:
        """Return what tells this job of the launcher, and this attempt, from others in the same folder."""
        return ()


class LabkitVariables(RankVariables):
    """Ray's actors set these (`ray.rank_holder`)."""

    mark = "LABKIT_RANK"
    rank, local_rank = "LABKIT_RANK", "LABKIT_LOCAL_RANK"
    world_size, local_world_size = "LABKIT_WORLD_SIZE", "LABKIT_LOCAL_WORLD_SIZE"
    belongs_to_it = r"LABKIT_(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|ATTEMPT|NODE_ADDRESS|RANK_FOLDER|INTERFACES)"

    def attempt(self) -> int:
        """Return what the notebook has counted."""
        return int(os.environ["LABKIT_ATTEMPT"])


class SlurmVariables(RankVariables):
    """See https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES."""

    mark = "SLURM_PROCID"
    rank, local_rank = "SLURM_PROCID", "SLURM_LOCALID"
    world_size, local_world_size = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"
    # What a job sets. Not how SLURM's commands find the controller and prove who asks, and not the variables by which a
    # user or a site chooses an account, a partition … for new jobs: https://slurm.schedmd.com/sbatch.html.
    belongs_to_it = (
        r"(?!SLURM_(CONF|CONF_SERVER|JWT|ACCOUNT|PARTITION|QOS|RESERVATION|WCKEY)$)(SLURM|SLURMD|SRUN|PMI|PMIX)_\w+"
        r"|SBATCH_(CPU|MEM)_BIND\w*"
    )

    def number(self, what: str) -> int:
        """Return what `srun` says, or else what `sbatch` says of the whole job."""
        if what == "world_size":
            return int(os.environ.get(self.world_size) or os.environ["SLURM_NTASKS"])
        if what == "local_world_size":
            counts = os.environ.get(self.local_world_size) or os.environ.get("SLURM_TASKS_PER_NODE", "1")
            return counts_by_node(counts)[int(os.environ.get("SLURM_NODEID", 0))]
        return super().number(what)

    def attempt(self) -> int:
        """Return how often SLURM has put the job back into its queue."""
        return int(os.environ.get("SLURM_RESTART_COUNT", 0))

    def job(self) -> tuple[str, ...]:
        """Return the numbers of the job and its step."""
        return os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_STEP_ID", "")


def counts_by_node(text: str) -> list[int]:
    """Read how SLURM writes a number per node: "2(x3),1" is 2, 2, 2, 1."""
    counts = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts


LAUNCHERS: tuple[RankVariables, ...] = (LabkitVariables(), SlurmVariables())
"""In this order: Ray may run in a job of SLURM's, whose variables its ranks then have, too."""

_TORCHRUNS = (
    r"TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
)
"""See https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables."""

_BELONG_TO_LAUNCHERS = re.compile("|".join([_TORCHRUNS, *(launcher.belongs_to_it for launcher in LAUNCHERS)]))


def launcher_here() -> RankVariables:
    """Return the launcher that has started this process. Raises KeyError if none has."""
    for launcher in LAUNCHERS:
        if launcher.mark in os.environ:
            return launcher
    raise KeyError(f"no launcher has started this process: none of {', '.join(each.mark for each in LAUNCHERS)} is set")


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what launchers have put there for this process: for ranks of another job.

    A notebook, or a rank that launches, may itself run in a job, whose variables would tell those ranks where they are.
    """
    set_by_labkit = environment.get("LABKIT_INTERFACES", "").split()
    return {
        name: value
        for name, value in environment.items()
        if not _BELONG_TO_LAUNCHERS.fullmatch(name) and name not in set_by_labkit
    }
