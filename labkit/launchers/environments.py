"""The variables that launchers set for one process, which ranks of another job must not see."""

from __future__ import annotations

import re
from collections.abc import Mapping

_TORCHRUNS = (
    r"TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
)
"""See https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables."""

# What a job sets. Not how SLURM's commands find the controller and prove who asks, and not the variables by which a
# user or a site chooses an account, a partition … for new jobs: https://slurm.schedmd.com/sbatch.html.
_SLURMS = (
    r"(?!SLURM_(CONF|CONF_SERVER|JWT|ACCOUNT|PARTITION|QOS|RESERVATION|WCKEY)$)(SLURM|SLURMD|SRUN|PMI|PMIX)_\w+"
    r"|SBATCH_(CPU|MEM)_BIND\w*"
)

_BELONG_TO_LAUNCHERS = re.compile(f"{_TORCHRUNS}|{_SLURMS}|LABKIT_(AGENT|INTERFACES)")


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
