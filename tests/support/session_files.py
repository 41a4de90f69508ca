"""A directory with jobs in it, each with a directory of its own, as Ray's mirror copies them."""

from __future__ import annotations

from labkit.launchers.run_directory.directory import RunDirectory


class SessionDirectory(RunDirectory):
    def __init__(self, path):
        super().__init__(path)
        self.jobs = self.path / "jobs"

    def create_for_jobs(self, about):
        self._make(about, lambda: self.jobs.mkdir(mode=0o700))

    def of_job(self, number):
        return RunDirectory(self.jobs / str(number))

    def give_job(self, number, ranks):
        self.ask(f"job:{number}:{','.join(map(str, ranks))}")
