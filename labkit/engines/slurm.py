"""Ranks as the tasks of a SLURM job: `labkit.launch(train, on=labkit.Slurm(nodes=2, ranks_per_node=4))`.

Uses SLURM's own commands, `sbatch`, `squeue` and `scancel` (https://slurm.schedmd.com/sbatch.html): what a user can
type to look after the job is what happens here. A library between would be one more that must agree with the cluster.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit import records
from labkit.engines.by_folder import GUARD, FolderEngine, new_folder
from labkit.engines.folder import RunFolder
from labkit.worker import Job

LOOK_AT_JOB_EVERY_S = 0.5
"""Time between two questions to SLURM; each is one `squeue` for one job."""

COMMAND_S = 60.0
"""How long one of SLURM's commands may take."""

WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
GOING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}

ENDINGS = {
    "CANCELLED": (
        "was cancelled from outside",
        "Somebody, or the administrator, ended it with scancel. Launch it again; a function that keeps checkpoints "
        "goes on from the newest.",
    ),
    "TIMEOUT": (
        "reached its time limit",
        "Ask for more with time=…, or let the function keep checkpoints (labkit.Checkpoint) and launch it again.",
    ),
    "DEADLINE": ("reached its deadline", "Launch it with a later one."),
    "NODE_FAIL": (
        "lost a node",
        "The node failed or was taken down. SLURM starts such a job again unless it is told not to (requeue=False).",
    ),
    "PREEMPTED": (
        "was preempted by another job",
        "It was not put back into the queue. Launch it again; a function with checkpoints goes on from the newest.",
    ),
    "OUT_OF_MEMORY": (
        "ran out of the memory that it had been given",
        "Ask for more (mem='32G', say), or try a smaller batch.",
    ),
    "BOOT_FAIL": ("could not start: a node failed to boot", "Launch it again, or tell the administrator."),
    "REVOKED": ("was revoked by the cluster", "Launch it again, or ask the administrator."),
}


class Slurm:
    """Where to launch: a job of `nodes` × `ranks_per_node` ranks on a SLURM cluster.

    Args:
        nodes: machines.
        ranks_per_node: ranks on each; a rank's GPU is number `local_rank` of those that SLURM gives it.
        folder: where the runs' folders are made. This notebook and every node must be able to write there.
        setup: shell lines to run on the first node before the ranks start, `module load …` for example.
        python: the interpreter on the nodes; by default this notebook's. It needs the same packages.
        options: any other option of `sbatch`, with _ for -: `partition="gpu"`, `time="02:00:00"`, `gpus_per_node=4`,
            `mem="32G"`, `account=…`; True for an option without a value, False for none of it (`requeue=False`).

    A job whose node fails, or that is preempted, is put back into the queue by SLURM and begins again: a function that
    keeps checkpoints goes on from the newest one.
    """

    def __init__(
        self,
        nodes: int = 1,
        ranks_per_node: int = 1,
        folder: str | os.PathLike[str] = "labkit-runs",
        setup: str = "",
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        for name, count in (("nodes", nodes), ("ranks_per_node", ranks_per_node)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} is a whole number of at least 1, got {count!r}")
        kept = {"ntasks", "ntasks_per_node", "output", "error", "job_name", "wrap", "parsable", "open_mode"} & set(
            options
        )
        if kept:
            raise ValueError(f"Slurm() sets {', '.join(sorted(kept))} itself; give nodes= and ranks_per_node= instead")
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.folder, self.setup, self.python = folder, setup, python
        self.options = {"requeue": True, **options}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    def engine(self, name: str, timeout_s: float | None) -> SlurmEngine:
        """Give what carries one run."""
        about = {"name": name, "timeout_s": timeout_s}
        return SlurmEngine(self.world_size, new_folder(self.folder, name), about, self)

    def script(self, command: Sequence[str], name: str, output: str) -> str:
        """Give the batch script that runs a command as every rank, as text."""
        head = {
            "job-name": name,
            "nodes": self.nodes,
            "ntasks-per-node": self.ranks_per_node,
            "output": output,
            "open-mode": "append",
        }
        options = {**head, **{key.replace("_", "-"): value for key, value in self.options.items()}}
        if options.get("requeue") is False:
            options["no-requeue"] = True
        lines = ["#!/bin/bash"]
        for key, value in options.items():
            if value is not False and value is not None:
                lines.append(f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={value}")
        cpus = self.options.get("cpus_per_task")
        # One that fails ends all: without --kill-on-bad-exit the others wait in a collective until the time limit.
        srun = ["srun", "--kill-on-bad-exit=1", f"--ntasks-per-node={self.ranks_per_node}"]
        srun += [f"--cpus-per-task={cpus}"] if cpus else []
        lines += [*filter(None, [self.setup.strip()]), "exec " + shlex.join([*srun, *command])]
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        return f"Slurm(nodes={self.nodes}, ranks_per_node={self.ranks_per_node}, …)"


class SlurmEngine(FolderEngine):
    """Carries one run as a SLURM job, and follows the job by `squeue`."""

    kind = "slurm"
    outlives_notebook = True

    def __init__(self, world_size: int, folder: RunFolder, about: dict[str, Any], on: Slurm | None = None) -> None:
        super().__init__(world_size, folder, about)
        self._on = on
        self.job_id = ""
        self._last_state = ""
        self._watch = threading.Event()

    def submit(self, job: Job) -> dict[str, Any]:
        """Write the batch script and give it to `sbatch`. Raises RuntimeError with what SLURM says."""
        assert self._on is not None
        command = [self._on.python, str(GUARD), str(self.folder.path)]
        script = self._on.script(command, self.about["name"], str(self.folder.path / "slurm.out"))
        self.folder.write("job.sbatch", script.encode())
        try:
            said = slurm("sbatch", "--parsable", str(self.folder.path / "job.sbatch"))
        except SlurmError as error:
            shutil.rmtree(self.folder.path)
            raise RuntimeError(f"SLURM did not take the job: {error}{_advice(str(error))}") from None
        self.job_id = said.strip().partition(";")[0]
        self.follow()
        return {"job": self.job_id}

    def follow(self, job_id: str = "") -> None:
        """Begin to watch the job."""
        self.job_id = job_id or self.job_id
        self.say(records.Notice(-1, f"SLURM job {self.job_id}", queued=True))
        threading.Thread(target=self._watch_job, name="labkit-slurm", daemon=True).start()

    def end(self) -> None:
        """Cancel the job, in the background: SLURM may take its time to answer."""
        threading.Thread(target=self._cancel, name="labkit-scancel", daemon=True).start()

    def _cancel(self) -> None:
        try:
            slurm("scancel", self.job_id)
        except SlurmError as error:
            self.say(records.Notice(-1, f"SLURM job {self.job_id} could not be cancelled: {error}"))
            self._killed = False

    def close(self) -> None:
        """Stop watching."""
        self._watch.set()

    def _watch_job(self) -> None:
        while not self._watch.is_set():
            try:
                state, reason, nodes = self._look()
            except SlurmError as error:
                self.say(records.Notice(-1, f"SLURM job {self.job_id}: {error}"))
            else:
                if state in WAITING:
                    self._say_waiting(state, reason)
                elif state in GOING:
                    if state != self._last_state:
                        self.say(records.Notice(-1, f"SLURM job {self.job_id} on {nodes}"))
                else:
                    self.settle(self._ending_of(state, reason, nodes))
                    return
                self._last_state = state
            self._watch.wait(LOOK_AT_JOB_EVERY_S)

    def _look(self) -> tuple[str, str, str]:
        """Give the job's state, the reason for it and its nodes."""
        try:
            said = slurm("squeue", "-h", "-t", "all", "-o", "%T|%r|%N", "-j", self.job_id)
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise
            said = ""
        if said.strip():
            state, reason, nodes = said.strip().splitlines()[-1].split("|")
            return state, reason, nodes
        return self._look_in_accounts()

    def _look_in_accounts(self) -> tuple[str, str, str]:
        """The same of a job that `squeue` has forgotten, where the cluster keeps accounts."""
        try:
            said = slurm("sacct", "-n", "-X", "-P", "-o", "State,Reason,NodeList", "-j", self.job_id).strip()
            state, reason, nodes = said.splitlines()[-1].split("|")
            return state.partition(" ")[0], reason, nodes
        except (SlurmError, IndexError, ValueError):
            return "FORGOTTEN", "", ""

    def _say_waiting(self, state: str, reason: str) -> None:
        text = f"SLURM job {self.job_id} waits"
        place = self._place_in_queue()
        if place:
            text += f", {place}"
        if reason not in ("", "None"):
            text += f": {reason}"
        if state not in ("PENDING", "CONFIGURING"):
            text += f" ({state})"
        self.say(records.Notice(-1, text, queued=True))

    def _place_in_queue(self) -> str:
        """Say how many jobs of the same partition wait before this one, by priority."""
        try:
            partition = slurm("squeue", "-h", "-o", "%P", "-j", self.job_id).strip()
            waiting = slurm("squeue", "-h", "-t", "PD", "-p", partition, "--sort=-p,i", "-o", "%A").split()
            return f"place {waiting.index(self.job_id) + 1} of {len(waiting)} in partition {partition}"
        except (SlurmError, ValueError):
            return ""

    def _ending_of(self, state: str, reason: str, nodes: str) -> records.JobEnded | None:
        """Say why the job ended, if that is no rank's doing."""
        if state == "COMPLETED":
            return None
        if state in ENDINGS:
            what, advice = ENDINGS[state]
            return records.JobEnded(-1, f"SLURM job {self.job_id} {what} ({state})", f"{self._where(nodes)}{advice}")
        if state == "FORGOTTEN":
            return records.JobEnded(
                -1,
                f"SLURM no longer knows job {self.job_id}",
                "It ended a while ago, and this cluster keeps no accounts (sacct). What its ranks wrote is kept.",
            )
        if self._reader.begun:
            return None  # a rank has failed and says so itself
        return records.JobEnded(
            -1,
            f"SLURM job {self.job_id} ended ({state}) before any rank began",
            f"{self._where(nodes)}Every node must see {self.folder.path} and have {self._python()}. "
            f"What SLURM wrote: {self._tail()}",
        )

    def _python(self) -> str:
        return self._on.python if self._on else sys.executable

    def _where(self, nodes: str) -> str:
        return f"It was on {nodes}. " if nodes else ""

    def _tail(self) -> str:
        try:
            return (self.folder.path / "slurm.out").read_text(errors="replace")[-2000:].strip() or "nothing"
        except OSError:
            return f"nothing: {self.folder.path}/slurm.out is not there, so the folder may not be shared"


class SlurmError(RuntimeError):
    """One of SLURM's commands failed, or is not there."""


def slurm(*command: str) -> str:
    """Run one of SLURM's commands and give what it prints. Raises SlurmError with what it says."""
    environment = {
        name: value
        for name, value in os.environ.items()
        # A notebook that runs in a job must not hand that job's own settings on.
        if name == "SLURM_CONF" or not name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_"))
    }
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]} is not on this machine: SLURM's commands are found where a cluster's login or compute nodes "
            "are. Run the notebook there, or use labkit.Torchrun"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {COMMAND_S:g} s") from None
    if done.returncode:
        said = re.sub(rf"^{command[0]}: (error: )?", "", done.stderr.strip(), flags=re.MULTILINE)
        raise SlurmError(said or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout


def _advice(said: str) -> str:
    """Say what to do next about what `sbatch` refused."""
    if "partition" in said.lower():
        try:
            names = " ".join(slurm("sinfo", "-h", "-o", "%R").split())
        except SlurmError:
            return ""
        return f". The partitions are: {names}"
    return ""


def folder_of(job: str) -> Path:
    """Give the folder of the run that is this SLURM job. Raises ValueError if SLURM does not know it any more."""
    try:
        said = slurm("scontrol", "show", "job", job)
    except SlurmError as error:
        raise ValueError(
            f"SLURM does not say where job {job} keeps its files ({error}). Give the run's folder instead: "
            "`run.folder` named it; by default it is in labkit-runs"
        ) from None
    found = re.search(r"^\s*StdOut=(.*)/slurm\.out$", said, re.MULTILINE)
    if found is None:
        raise ValueError(f"SLURM job {job} was not launched by labkit: its output does not go to a run's folder")
    return Path(found[1])
