"""A launcher of the tests' own: each node is an agent, started as a process of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from labkit.launchers import start
from labkit.launchers.job_events import JobEnded
from labkit.launchers.remote import Launcher, ProcessJob
from labkit.launchers.run_folder import RunFolder


class Agents(Launcher):
    """Where to launch: `nodes` agents on this machine."""

    def __init__(self, nodes=2, ranks_per_node=1, folder="labkit-runs", python=sys.executable):
        self.nodes, self.ranks_per_node, self.folder, self.python = nodes, ranks_per_node, Path(folder), python
        self.world_size = nodes * ranks_per_node

    def job(self, name, stall_s):
        about = {"name": name, "stall_s": stall_s, "address": "127.0.0.1"}
        return AgentsJob(self, RunFolder.new(self.folder, name), about)


class AgentsJob(ProcessJob):
    kind = "agents"

    def __init__(self, on, folder, about):
        super().__init__(on.nodes, on.ranks_per_node, folder, about)
        self._python = on.python

    def commands(self):
        return [start.command(self._python, self.folder.path, str(number)) for number in range(self.nodes)]

    def why_over(self, missing):
        codes = ", ".join(str(process.returncode) for process in self.processes)
        return JobEnded(-1, f"an agent has ended before its ranks ({codes})", self.folder.tail("output"), "slurm")
