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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labkit.cluster.directory_engine import SETTLE_S, SUPERVISOR, FolderEngine, check_whole, new_folder
from labkit.cluster.run_directory import RunFolder
from labkit.monitor.stacks import rank_list
from labkit.protocol import events
from labkit.protocol.job import Job

LOOK_AT_JOB_S = (0.5, 5.0)
"""Least and greatest time between two questions to SLURM, each one `squeue` for one job, or two while it waits.

They become rarer while nothing changes. When ranks begin or end, which their files tell, SLURM is asked at once."""

COMMAND_S = 60.0
"""How long one of SLURM's commands may take."""

SEEN_LATE_S = 60.0
"""How long what ranks wrote in a job that ended well may take to be seen over a network's file system."""

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

REASONS = {
    "Resources": "no machines are free",
    "Priority": "other jobs are before it",
    "BeginTime": "SLURM starts it again in a while",
}
"""What SLURM says of jobs that wait, where that is short; its other reasons are shown as they are:
https://slurm.schedmd.com/job_reason_codes.html."""


class _State(NamedTuple):
    """What SLURM says of a job."""

    state: str
    nodes: str
    partition: str
    reason: str
    left: str = ""
    """Of its time limit, as SLURM writes it: "1-02:03:04"; a word if there is none."""


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

    is_here = False

    def __init__(
        self,
        nodes: int = 1,
        ranks_per_node: int = 1,
        folder: str | os.PathLike[str] = "labkit-runs",
        setup: str = "",
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        check_whole("nodes", nodes)
        check_whole("ranks_per_node", ranks_per_node)
        kept = {"ntasks", "ntasks_per_node", "output", "error", "job_name", "wrap", "parsable", "open_mode"} & set(
            options
        )
        if kept:
            raise ValueError(f"Slurm() sets {', '.join(sorted(kept))} itself; give nodes= and ranks_per_node= instead")
        for name, value in options.items():
            if "\n" in str(value):
                raise ValueError(f"an option of sbatch is one line, got {name}={str(value)!r:.60}")
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
            "job-name": " ".join(name.split()),
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
                lines.append(f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={shlex.quote(str(value))}")
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
        self._state = _State("", "", "", "")
        self._looked_s = 0.0
        self._nodes = ""
        """Those that the job had, when it had all of them."""
        self._known = threading.Event()
        self._closed, self._look_now = threading.Event(), threading.Event()

    def submit(self, job: Job | None) -> dict[str, Any]:
        """Write the batch script and give it to `sbatch`. Raises RuntimeError with what SLURM says."""
        assert self._on is not None
        command = [self._on.python, str(SUPERVISOR), str(self.folder.path)]
        output = str(self.folder.path / "slurm.out").replace("%", "%%")  # sbatch's sign for its own names
        script = self._on.script(command, self.about["name"], output)
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
        self.say(events.Notice(-1, f"SLURM job {self.job_id}", queued=True))
        threading.Thread(target=self._watch_job, name="labkit-slurm", daemon=True).start()

    def end(self) -> None:
        """Cancel the job, in the background: SLURM may take its time to answer."""
        threading.Thread(target=self._cancel, name="labkit-scancel", daemon=True).start()

    def end_now(self) -> None:
        """Cancel the job, and wait until SLURM has heard it."""
        self._killed = True
        self._cancel()

    def _cancel(self) -> None:
        try:
            slurm("scancel", self.job_id)
        except SlurmError as error:
            self.say(events.Notice(-1, f"SLURM job {self.job_id} could not be cancelled: {error}"))
            self._closed.wait(LOOK_AT_JOB_S[0])
            self._killed = False  # to be tried again
        self._look_now.set()

    def ranks_have_begun(self) -> None:
        """See where the job is."""
        self.look()

    def ranks_have_ended(self) -> None:
        """See what SLURM makes of it."""
        self.look()

    def look(self) -> None:
        """See what SLURM says of the job, now."""
        self._look_now.set()

    def wait_until_known(self) -> None:
        """Wait until SLURM has said how the job is, but not for ever."""
        self._known.wait(COMMAND_S)

    def interruption(self) -> events.JobEnded:
        """Say why SLURM has taken the nodes away, though it will give some again."""
        troubles = self._troubles("-n", self._nodes).strip(" []") if self._nodes else ""
        what = f"lost a node: {troubles}" if " is down" in troubles else "was put back into the queue"
        return events.JobEnded(
            -1,
            f"SLURM job {self.job_id} {what}",
            f"It was on {self._nodes or 'no node yet'}. SLURM starts it again when it has nodes for it; its ranks are "
            "then new, and without variables.",
        )

    def time_left_s(self) -> float:
        """Return what is left of the job's time limit, in s; infinite where it has none."""
        return _seconds(self._state.left) - (time.monotonic() - self._looked_s)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._look_now.set()

    def _watch_job(self) -> None:
        pause_s = LOOK_AT_JOB_S[0]
        while not self._closed.is_set():
            self._look_now.clear()
            try:
                state = self._look()
            except SlurmError as error:
                waits = self._state.state in {*WAITING, ""}
                self.say(events.Notice(-1, f"SLURM job {self.job_id}: {error}", queued=waits))
            else:
                changed, self._state = state.state != self._state.state, state
                self._looked_s = time.monotonic()
                self._nodes = state.nodes if state.state == "RUNNING" else self._nodes
                if state.state in WAITING:
                    waiting = self._waiting(state)
                    if not self._look_now.is_set():  # else ranks have begun meanwhile
                        self.say(events.Notice(-1, waiting, queued=True))
                elif state.state not in GOING:
                    self.settle(SEEN_LATE_S if state.state == "COMPLETED" else SETTLE_S)
                    self._known.set()
                    return
                elif changed or state.state == "SUSPENDED":
                    suspended = " and suspended" if state.state == "SUSPENDED" else ""
                    self.say(events.Notice(-1, f"SLURM job {self.job_id} on {state.nodes}{suspended}"))
                if changed or state.state == "COMPLETING":
                    pause_s = LOOK_AT_JOB_S[0]
                self._known.set()
            if self._look_now.wait(pause_s):
                self._closed.wait(0.1)  # SLURM learns of a rank's end only after its files have told
                pause_s = LOOK_AT_JOB_S[0]
            pause_s = min(1.2 * pause_s, LOOK_AT_JOB_S[1])

    def _look(self) -> _State:
        try:
            said = slurm("squeue", "-h", "-t", "all", "-o", "%T|%N|%P|%L|%r", "-j", self.job_id)
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise
            said = ""
        if said.strip():
            state, nodes, partition, left, reason = said.strip().splitlines()[-1].split("|", 4)
            return _State(state, nodes, partition, reason, left)
        return self._look_in_accounts()

    def _look_in_accounts(self) -> _State:
        """The same of a job that `squeue` has forgotten, where the cluster keeps accounts."""
        try:
            said = slurm("sacct", "-n", "-X", "-P", "-o", "State,NodeList,Partition", "-j", self.job_id).strip()
            state, nodes, partition = said.splitlines()[-1].split("|")
            return _State(state.partition(" ")[0], nodes, partition, "")
        except (SlurmError, IndexError, ValueError):
            return _State("FORGOTTEN", "", "", "")

    def _waiting(self, job: _State) -> str:
        """Say why the job waits, and how many of the same partition wait before it."""
        text = f"SLURM job {self.job_id} waits"
        try:
            waiting = slurm("squeue", "-h", "-t", "PD", "-p", job.partition, "--sort=-p,i", "-o", "%A").split()
            text += f", place {waiting.index(self.job_id) + 1} of {len(waiting)} in partition {job.partition}"
        except (SlurmError, ValueError):
            pass
        if job.reason not in ("", "None"):
            text += f": {REASONS.get(job.reason, job.reason)}"
        if "DOWN" in job.reason or "NotAvail" in job.reason:
            text += self._troubles("-p", job.partition)
        if job.state not in ("PENDING", "CONFIGURING"):
            text += f" ({job.state})"
        return text

    def _troubles(self, *where: str) -> str:
        """Say which nodes are down or drained, and the reasons that were given."""
        try:
            said = slurm("sinfo", "-h", "-N", "-o", "%N|%T|%E", *where, "-t", "down,drain,fail,no_respond,maint")
        except SlurmError:
            return ""
        nodes = dict.fromkeys(tuple(line.split("|", 2)) for line in said.splitlines())
        listed = ", ".join(f"{name} is {state.rstrip('*')} ({reason})" for name, state, reason in nodes)
        return f" [{listed}]" if listed else ""

    def ending(self, missing: list[int]) -> events.JobEnded | None:
        """Say why the job ended, if that is no rank's doing."""
        state, nodes, *_ = self._state
        if state in ENDINGS and not (self._killed and state == "CANCELLED"):
            what, advice = ENDINGS[state]
            where = self._where(nodes, troubles=state == "NODE_FAIL")
            starved = [rank for rank, exit in self._exits.items() if exit.code == -9 and not exit.ended]
            rank = starved[0] if state == "OUT_OF_MEMORY" and starved else -1
            who = "" if rank < 0 else f"; rank {rank} was killed for it"
            return events.JobEnded(rank, f"SLURM job {self.job_id} {what} ({state}){who}", where + advice)
        if self.explained or self._killed:
            return None
        if not missing:
            return events.JobEnded(
                -1, f"SLURM job {self.job_id} was ended ({state})", f"{self._where(nodes)}No rank had failed before."
            )
        if state in ("FORGOTTEN", "COMPLETED"):
            return events.JobEnded(
                -1,
                f"SLURM job {self.job_id} is over, but not all ranks have said how they ended",
                "The job ended a while ago, and SLURM no longer knows it. What its ranks wrote is kept."
                if state == "FORGOTTEN"
                else f"{self._where(nodes)}Every node must write into {self.folder.path}, and this notebook see it.",
            )
        never = [rank for rank in missing if rank not in self._reader.begun]
        if not never:
            return None
        who = "any rank" if len(never) == self.world_size else rank_list(never)
        return events.JobEnded(
            -1,
            f"SLURM job {self.job_id} ended ({state}) before {who} began",
            f"{self._where(nodes)}Every node must see {self.folder.path} and have {self._python()}. "
            f"What SLURM wrote:\n{self._tail()}",
        )

    def _python(self) -> str:
        return self._on.python if self._on else sys.executable

    def _where(self, nodes: str, troubles: bool = False) -> str:
        if not nodes:
            return ""
        return f"It was on {nodes}{self._troubles('-n', nodes) if troubles else ''}. "

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
        raise SlurmError("; ".join(said.splitlines()) or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout


def _seconds(left: str) -> float:
    """Read a time as SLURM writes it: "1-02:03:04", "59:58". Infinite if it is none."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", left)
    if found is None:
        return float("inf")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


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
    return Path(found[1].replace("%%", "%"))
