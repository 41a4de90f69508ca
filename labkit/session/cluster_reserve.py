"""The ranks of a session under SLURM, torchrun or Ray.

One job of the launcher stays; its supervisors (`session.supervisor`) keep the ranks' processes, and replace those that
end. Words and jobs travel through the session's directory, so that the session outlives the notebook wherever the
launcher's job does, and `labkit.attach` finds it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.launchers.launcher_job import LauncherJob
from labkit.launchers.slurm.job import SlurmJob
from labkit.session.cluster_ranks import ClusterRanks
from labkit.session.directory import SessionDirectory
from labkit.session.job_engine import CellEngine, JobEngine
from labkit.session.turns import Turn

SUPERVISOR = Path(__file__).with_name("supervisor.py")


class ClusterReserve(ClusterRanks):
    """Reserves ranks on a cluster, and makes the engines for the jobs on them."""

    @classmethod
    def start(cls, on: Any, session: dict[str, Any]) -> ClusterReserve:
        """Submit the job of a session; `session` is kept in its directory, for `labkit.attach`."""
        launched: LauncherJob = on.job("session", None)
        launched.supervisor = SUPERVISOR
        launched.about |= {"session": session}
        launched.start(SessionDirectory(launched.directory.path).create_for_jobs)
        try:
            reserve = cls(launched, [0] * launched.world_size)
            reserve.has_files = on.has_files
            reserve.begin()
        except BaseException:  # interrupted: nobody would know of the job
            launched.end_now()
            launched.close()
            raise
        return reserve

    @classmethod
    def attach(cls, path: Path, about: dict[str, Any]) -> ClusterReserve:
        """Return the ranks of a session that goes on."""
        directory = SessionDirectory(path)
        launched = SlurmJob(about["world_size"], directory, about)
        newest = directory.newest_job()
        known = directory.of_job(newest).about()["processes"] if newest else [0] * launched.world_size
        launched.follow(about["job"])
        reserve = cls(launched, known)
        reserve.waits = True  # that it waits is no loss of machines
        launched.wait_until_known()
        reserve.begin()
        return reserve

    def engine(self, world_size: int, turn: Turn, about: dict[str, Any]) -> JobEngine:
        """Return what carries one launched function on the first `world_size` ranks."""
        return JobEngine(self, range(world_size), world_size, turn, about)

    def cell_engine(self, only: Sequence[int], turn: Turn, about: dict[str, Any]) -> JobEngine:
        """Return what carries one cell."""
        return CellEngine(self, only, self.world_size, turn, about)

    def pick_up(self, number: int, turn: Turn) -> JobEngine:
        """Return what carries a job that was begun before, perhaps by another notebook."""
        about = self.directory.of_job(number).about()
        return JobEngine(self, about["only"], about["world_size"], turn, about, number)
