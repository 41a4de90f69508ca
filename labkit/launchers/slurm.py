"""Ranks on a SLURM cluster: `labkit.launch(train, on=labkit.Slurm(nodes=2, ranks_per_node=4, partition="gpu"))`.

Uses SLURM's own commands, `sbatch`, `srun`, `squeue` and `scancel` (https://slurm.schedmd.com/man_index.html): what a
user can type to look after the job is what happens here. `srun` starts one agent per node, which starts its ranks.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.engines.arguments import naming
from labkit.failures.grouping import rank_list
from labkit.launchers import start
from labkit.launchers.environments import without_launchers
from labkit.launchers.job_events import JobEnded, Notice
from labkit.launchers.remote import FolderJob, Launcher, ProcessJob, RemoteJob, check_whole
from labkit.launchers.run_folder import RunFolder
from labkit.protocol.pages import help_hint

COMMAND_S = 60.0
"""How long one of SLURM's commands may take."""

LOOK_AT_JOB_S = (0.5, 5.0)
"""Least and greatest time between two questions to SLURM; they become rarer while nothing changes."""

CANCEL_S = 10.0
"""How long SLURM may take to hear that a job is to be cancelled before the run is over without that."""

SCRIPT = "job.sbatch"
"""The batch script in a run's folder: by its path a job is known to be that run's."""

OURS = {
    "ntasks": "nodes= and ranks_per_node=",
    "ntasks-per-node": "ranks_per_node=",
    "job-name": "labkit.launch(…, name=…)",
    "output": "folder=: run.folder has slurm.out",
    "error": "folder=: run.folder has slurm.out",
    "array": "one launch for each member, with wait=False",
    "wrap": "setup= for shell lines that come before the ranks",
    "gpus-per-task": "gpus_per_node=: a rank takes its GPU by local_rank",
    "wait": "labkit.launch(…, wait=…)",
}
"""Options of sbatch that labkit sets, or that make another thing of a job, with what to give instead."""

NOT_FOR_A_RUN = re.compile(r"SBATCH_(ARRAY_INX|ERROR|GPUS_PER_TASK|INPUT|OUTPUT|WAIT)|(SQUEUE|SCANCEL)_\w+")
"""A user's variables that would change what a job is, or what these commands answer. All others count."""

WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
GOING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}

REASONS = {
    "Resources": "no machines are free",
    "Priority": "other jobs are before it",
    "BeginTime": "SLURM starts a requeued job only after some minutes",
    "Dependency": "a job that it depends on is not over",
    "JobHeldUser": "it is held: scontrol release lets it go",
}
"""Of jobs that wait; other reasons are shown as they are: https://slurm.schedmd.com/job_reason_codes.html."""

AGAIN = "Launch it again; a function that keeps checkpoints goes on from the newest."
ENDINGS = {
    "CANCELLED": ("was cancelled from outside", f"Perhaps somebody did, with scancel. {AGAIN}"),
    "TIMEOUT": (
        "reached its time limit",
        "Ask for more with time=…, or let the function keep checkpoints (labkit.Checkpoint) and launch it again.",
    ),
    "NODE_FAIL": ("lost a node", "SLURM starts such a job again unless it is told not to (requeue=False)."),
    "PREEMPTED": ("was preempted by another job", f"It was not put back into the queue. {AGAIN}"),
    "OUT_OF_MEMORY": ("ran out of the memory that it had been given", "Ask for more: mem='32G', say."),
}
"""By SLURM's states: what happened, and what to do next."""

TIED = "import os, sys; from labkit.system import host; host.die_with_parent(); os.execvp(sys.argv[1], sys.argv[1:])"
"""Starts a program that ends with this process."""


class Slurm(Launcher):
    """Where to launch: a job of `nodes` × `ranks_per_node` ranks on a SLURM cluster.

    Args:
        nodes: machines.
        ranks_per_node: ranks on each; a rank's GPU is number `local_rank` of those that SLURM gives the node. By
            default as many as the GPUs that are asked for on a node (`gpus_per_node=4`), or 1 where none are.
        folder: where the runs' folders are made. This notebook and every node must be able to write there.
        allocation: the number of a job that you hold already (`salloc`), or "here" for the one in which the notebook
            runs: the ranks begin there at once, and end with the notebook.
        setup: shell lines to run on the first node before the ranks start, `module load …` for example.
        python: the interpreter on the nodes; by default this notebook's. It needs the same packages.
        options: any other option of `sbatch`, with _ for -: `partition="gpu"`, `time="02:00:00"`, `gpus_per_node=4`,
            `mem="32G"`, `account=…`; True for an option without a value, False for none of it (`requeue=False`), a list
            where sbatch takes several (`nodelist=["node1", "node2"]`). `cpus_per_task` is for each rank. What you or
            your site have set for all jobs, as SBATCH_ACCOUNT, counts where nothing is given here.

    A job whose node fails, or that is preempted, is put back into the queue by SLURM and begins again: a function that
    keeps checkpoints goes on from the newest one. Before SLURM takes the machines away `worker.log` raises
    `labkit.Stopped`, at a common step; a function that catches it has SLURM's grace, KillWait (30 s by default) at
    least, for a last checkpoint.
    """

    def __init__(
        self,
        nodes: int = 1,
        ranks_per_node: int | None = None,
        folder: str | os.PathLike[str] = "labkit-runs",
        allocation: str | int | None = None,
        setup: str = "",
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        with naming("bad_argument"):
            self.nodes = check_whole("nodes", nodes)
            self.options = _checked(options)
            if ranks_per_node is None:
                ranks_per_node = _gpus_per_node(self.options) or 1
            self.ranks_per_node = check_whole("ranks_per_node", ranks_per_node)
            if allocation == "here" and not (allocation := os.environ.get("SLURM_JOB_ID")):
                raise ValueError('allocation="here": this notebook runs in no SLURM job; give the number of one')
            if allocation and (self.options or setup):
                given = ", ".join([*self.options, *(["setup"] if setup else [])])
                raise ValueError(f"an allocation is there already, {given} cannot change it; omit it")
        self.world_size = self.nodes * self.ranks_per_node
        self.folder = Path(folder).expanduser().absolute()
        self.allocation, self.setup, self.python = str(allocation or ""), setup, python

    def job(self, name: str, stall_s: float | None) -> RemoteJob:
        """Return a job for one run."""
        folder, about = RunFolder.new(self.folder, name), {"name": name, "stall_s": stall_s}
        return AllocationJob(self, folder, about) if self.allocation else SlurmJob(self, folder, about)

    def sbatch(self, name: str, folder: Path) -> list[str]:
        """Return the command that submits a run whose folder is there. Options come before a user's variables."""
        output = str(folder / "slurm.out").replace("%", "%%")  # sbatch's sign for its own names
        options: dict[str, Any] = {"job-name": " ".join(name.split()), "nodes": self.nodes, "ntasks-per-node": 1}
        options |= {"output": output, "open-mode": "append"}
        if "SBATCH_NO_REQUEUE" not in os.environ:
            options["requeue"] = True
        options |= {**self.options, **self._cpus()}
        if options.get("requeue") is False:
            options["no-requeue"] = True
        given = {f"--{key}": value for key, value in options.items() if value is not False}
        words = [key if value is True else f"{key}={value}" for key, value in given.items()]
        return ["sbatch", "--parsable", *words, str(folder / SCRIPT)]

    def script(self, folder: Path) -> str:
        """Return the batch script."""
        return "\n".join(["#!/bin/bash", self.setup.strip(), "exec " + shlex.join(self.step(folder))]) + "\n"

    def step(self, folder: Path) -> list[str]:
        """Return the command that starts an agent on each node.

        One that fails ends all: without --kill-on-bad-exit the others wait until the time limit. And ranks have what
        the script has, whatever of the notebook's environment that was given (`export=…`).
        """
        srun = ["srun", "--kill-on-bad-exit=1", "--export=ALL", f"--nodes={self.nodes}", "--ntasks-per-node=1"]
        if self.allocation:
            srun += ["--overlap", f"--jobid={self.allocation}"]
        srun += [f"--{name}={count}" for name, count in self._cpus().items()]
        return [*srun, *start.command(self.python, folder)]

    def _cpus(self) -> dict[str, int]:
        """Return what the agent of a node takes: one CPU, or `cpus_per_task`, for each of its ranks."""
        return {"cpus-per-task": int(self.options.get("cpus-per-task", 1)) * self.ranks_per_node}


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as sbatch names them. Raises TypeError or ValueError for what cannot be one."""
    found: dict[str, Any] = {}
    for key, value in options.items():
        if (name := key.replace("_", "-")) in OURS:
            raise ValueError(f"Slurm() does not take {key}; give {OURS[name]}")
        if isinstance(value, (list, tuple)):
            value = ",".join(map(str, value))
        if not isinstance(value, (str, int, float, os.PathLike, type(None))):
            raise TypeError(f"{key} is a text or a number, as sbatch takes it, or True or False; got {value!r:.60}")
        if value is not None:
            found[name] = value
    return found


def _gpus_per_node(options: Mapping[str, Any]) -> int:
    """Return how many GPUs a node is to have; 0: none. Raises ValueError where another option asks for them."""
    if "gpus" in options or "gpu" in str(options.get("gres")):
        raise ValueError("GPUs are asked for by gres= or gpus=: give ranks_per_node=… too, or gpus_per_node=… instead")
    counts = [part.rpartition(":")[2] for part in str(options.get("gpus-per-node", 0)).split(",")]
    return sum(int(count) if count.isdigit() else 1 for count in counts)  # "a100": a type alone is one


class AllocationJob(ProcessJob):
    """Ranks in an allocation that somebody holds."""

    kind = "srun"

    def __init__(self, on: Slurm, folder: RunFolder, about: dict[str, Any]) -> None:
        super().__init__(on.nodes, on.ranks_per_node, folder, about)
        self._on = on

    def commands(self) -> list[list[str]]:
        """Return what is to be started."""
        return [[sys.executable, "-c", TIED, *self._on.step(self.folder.path)]]

    def environment(self) -> dict[str, str]:
        """Return the variables of what is started."""
        return _environment()

    def why_over(self, missing: list[int]) -> JobEnded:
        """Return how srun ended, with what it wrote."""
        headline = f"srun in the allocation {self._on.allocation} has ended before its ranks"
        return JobEnded(-1, headline, self.folder.tail("output"), "slurm")


class SlurmJob(FolderJob):
    """One job, followed in a thread of its own."""

    kind = "slurm"
    outlives_notebook = True

    def __init__(self, on: Slurm | None, folder: RunFolder, about: dict[str, Any]) -> None:
        nodes, ranks = (on.nodes, on.ranks_per_node) if on else (about["nodes"], about["ranks_per_node"])
        super().__init__(nodes, ranks, folder, about)
        self._on, self.job_id, self._state, self._where = on, "", "", ""
        self._closed, self._is_urgent = threading.Event(), False
        self._cancelling: threading.Thread | None = None

    def submit(self) -> dict[str, Any]:
        """Write the batch script and give it to `sbatch`. Raises RuntimeError with what SLURM says."""
        assert self._on is not None
        name, path = self.about["name"], self.folder.path
        self.folder.write(SCRIPT, self._on.script(path).encode())
        try:
            answer = slurm(*self._on.sbatch(name, path))
            numbers = re.findall(r"^(\d+)(?:;\S*)?$", answer, re.MULTILINE)  # a site may have sbatch print more
            if not numbers:
                raise SlurmError(f"sbatch answered {answer[-200:]!r}")
        except SlurmError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise RuntimeError(f"SLURM did not take the job: {error}\n{help_hint('slurm')}") from None
        self.follow(numbers[-1])
        return {"job": self.job_id}

    def follow(self, job_id: str) -> None:
        """Begin to watch the job."""
        self.job_id = job_id
        self._news.put(Notice(-1, f"SLURM job {job_id}", queued=True))
        threading.Thread(target=self._watch, name="labkit-slurm", daemon=True).start()

    def look(self) -> None:
        """Ask SLURM often from now on."""
        self._is_urgent = True

    def end(self) -> None:
        """Cancel the job, in the background: SLURM may take its time to answer. The ranks are told as well."""
        self._cancelling = threading.Thread(target=self._cancel, name="labkit-scancel", daemon=True)
        self._cancelling.start()

    def _cancel(self) -> None:
        while self.over_s == float("inf"):
            try:
                slurm("scancel", self.job_id)
                break
            except SlurmError as error:
                self._news.put(Notice(-1, f"SLURM job {self.job_id} could not be cancelled: {error}"))
                self.tell("end")
                if self._closed.wait(LOOK_AT_JOB_S[0]):
                    break
        self.tell("end")  # by itself SLURM grants the ranks its grace, which is for a last checkpoint
        self._is_urgent = True

    def why_over(self, missing: list[int]) -> JobEnded:
        """Return why the job ended."""
        what, advice = ENDINGS.get(self._state, ("", ""))
        where = f"It was on {self._where}{_troubles(self._where)}. " if self._where else ""
        if what:
            return JobEnded(-1, f"SLURM job {self.job_id} {what} ({self._state})", where + advice, "slurm")
        if not missing:
            headline = f"SLURM job {self.job_id} was asked to end, and its ranks stopped ({self._state})"
            return JobEnded(-1, headline, where + AGAIN, "slurm")
        who = rank_list(missing) if len(missing) < self.world_size else "any rank"
        cause = (
            f"{where}What it wrote:\n{self.folder.tail('slurm.out')}\nPerhaps a node has not this Python, or cannot "
            f"write into {self.folder.path}."
        )
        return JobEnded(-1, f"SLURM job {self.job_id} ended ({self._state}) before {who} did", cause, "slurm")

    def close(self) -> None:
        """Stop watching, but not before SLURM has heard that the job is to be cancelled."""
        if self._cancelling is not None:
            self._cancelling.join(CANCEL_S)
        self._closed.set()

    def _watch(self) -> None:
        pause_s, look_s = LOOK_AT_JOB_S[0], 0.0
        while not self._closed.wait(LOOK_AT_JOB_S[0]):
            if not self._is_urgent and time.monotonic() < look_s:
                continue
            try:
                state, nodes, reason = state_of(self.job_id)
            except SlurmError as error:
                self._news.put(Notice(-1, f"SLURM job {self.job_id}: {error}", queued=None))
                continue
            pause_s = LOOK_AT_JOB_S[0] if state != self._state else min(1.2 * pause_s, LOOK_AT_JOB_S[1])
            look_s = time.monotonic() + pause_s
            if state in WAITING:
                self._news.put(Notice(-1, f"SLURM job {self.job_id} waits: {REASONS.get(reason, reason)}", queued=True))
            elif state not in GOING:
                self._state, self.over_s = state, time.monotonic()
                return
            elif state != self._state:
                self._where = nodes if state == "RUNNING" else self._where  # while a job ends it loses its nodes
                self._news.put(Notice(-1, f"SLURM job {self.job_id} on {self._where or nodes}"))
            self._state = state


class SlurmError(RuntimeError):
    """One of SLURM's commands failed, or is not there."""


def _environment() -> dict[str, str]:
    """Return the variables for SLURM's commands, which hand them on to the job: none of those that a job has set."""
    return {name: value for name, value in without_launchers(os.environ).items() if not NOT_FOR_A_RUN.fullmatch(name)}


def slurm(*command: str) -> str:
    """Run one of SLURM's commands and return what it prints. Raises SlurmError with what it says."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
            env=_environment(),
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {COMMAND_S:g} s") from None
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not on this machine: SLURM's commands are found where a cluster's login or compute nodes "
            "are. Run the notebook there"
        ) from None
    if done.returncode:
        said = re.sub(rf"^{command[0]}: (error: )?", "", done.stderr.strip(), flags=re.MULTILINE)
        raise SlurmError("; ".join(said.splitlines()) or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout


def state_of(job_id: str) -> tuple[str, str, str]:
    """Return a job's state, nodes and reason. Raises SlurmError if SLURM does not answer."""
    try:
        answer = slurm("squeue", "-h", "-t", "all", "-o", "%T|%N|%r", "-j", job_id).strip()
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        answer = ""
    try:
        if not answer:  # squeue forgets a job after some minutes
            answer = slurm("sacct", "-n", "-X", "-P", "-o", "State,NodeList,Reason", "-j", job_id).strip()
    except SlurmError:  # a cluster without accounts
        pass
    state, nodes, reason = (answer or "FORGOTTEN||").splitlines()[-1].split("|", 2)
    return state.partition(" ")[0], nodes, reason


def _troubles(nodes: str) -> str:
    """Return which nodes are down, with the reasons that were given; "" if none is, or nobody answers."""
    try:
        states = "down,fail,no_respond"
        lines = slurm("sinfo", "-h", "-N", "-n", nodes, "-t", states, "-o", "%N is %T (%E)").splitlines()
    except SlurmError:
        return ""
    return f" [{', '.join(dict.fromkeys(lines)).replace('*', '')}]" if lines else ""


def folder_of(job_id: str) -> Path:
    """Return the folder of the run that is this SLURM job. Raises ValueError if SLURM does not know it any more."""
    try:
        said = slurm("scontrol", "show", "job", job_id)
    except SlurmError as error:
        raise ValueError(f"SLURM does not know job {job_id} ({error}); give `run.folder` instead") from None
    found = re.search(rf"^\s*Command=(.*)/{re.escape(SCRIPT)}$", said, re.MULTILINE)
    if found is None:
        raise ValueError(f"SLURM job {job_id} was not launched by labkit")
    return Path(found[1])
