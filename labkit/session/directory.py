"""A session's directory: a run's, in which each job has one of its own, with attempt 0.

    run.json, asked, ranks/<rank>.<number>.…    as a run's; the number tells the processes apart that a rank has had
    jobs/<number>/…                             one job, as a run

`asked` speaks of jobs: "job:3:0,1" gives one to ranks, "stop" is meant for the last one given, "kill:3:1" ends who is
still at it, "leave" and "idle" end the session.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.launchers.run_directory.directory import RunDirectory
from labkit.launchers.run_directory.files import has_exit


class SessionDirectory(RunDirectory):
    """The notebook's or a rank's view of it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.jobs: Path = self.path / "jobs"

    def create_for_jobs(self, about: dict[str, Any]) -> None:
        """Make the directory, with room for jobs. Raises OSError with what to do."""
        self._make(about, lambda: self.jobs.mkdir(mode=0o700))

    def of_job(self, number: int) -> RunDirectory:
        """Return the directory of a job."""
        return RunDirectory(self.jobs / str(number))

    def newest_job(self) -> int:
        """Return the number of the newest job; 0 before the first."""
        return max((int(name) for name in os.listdir(self.jobs) if name.isdigit()), default=0)

    def give_job(self, number: int, ranks: Sequence[int]) -> None:
        """Give a job to these ranks. Raises OSError, as `ask` does."""
        self.ask(f"job:{number}:{_listed(ranks)}")

    def kill_job(self, number: int, ranks: Sequence[int]) -> None:
        """Have these ranks ended if they are still at a job, and not begin it later. Raises OSError, as `ask` does."""
        self.ask(f"kill:{number}:{_listed(ranks)}")

    def given_up(self, number: int) -> set[int]:
        """Return the ranks that were to be ended while they were at a job."""
        words = (word.split(":") for word in self.asked.read_text(encoding="utf-8").split())
        found = (rest[1] for kind, *rest in words if kind == "kill" and rest[0] == str(number))
        return {int(rank) for ranks in found for rank in ranks.split(",")}

    def at_work(self, number: int) -> list[int]:
        """Return the ranks that still have to do their part in a job, and that were not given up."""
        directory, given_up = self.of_job(number), self.given_up(number)
        only = directory.about()["only"]
        if not self.was_asked_to(f"job:{number}:{_listed(only)}"):
            return []  # its notebook ended before it could give it to them
        return [rank for rank in only if rank not in given_up and not has_exit(directory.file(rank, 0, "records"))]


def _listed(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))
