"""What SLURM says of a job in its queue: the state, the reason why it waits, the nodes that are down."""

from __future__ import annotations

from typing import NamedTuple

from labkit.launchers.old_slurm.commands import HINT_S, SlurmError, slurm

WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
GOING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}

REASONS = {
    "Resources": "no machines are free",
    "Priority": "other jobs are before it",
    "BeginTime": "SLURM does not start it before a time that was set, for a job that is started again some minutes",
    "Dependency": "a job that it depends on is not over",
    "DependencyNeverSatisfied": "a job that it depends on has ended otherwise than was asked, so it never begins",
    "JobHeldUser": "it is held: scontrol release lets it go",
    "JobHeldAdmin": "it is held by an administrator",
}
"""What SLURM says of jobs that wait, where that is short; its other reasons are shown as they are:
https://slurm.schedmd.com/job_reason_codes.html."""


class JobState(NamedTuple):
    """What SLURM says of a job."""

    state: str
    nodes: str
    partition: str
    reason: str
    left: str = ""
    """Of its time limit, as SLURM writes it: "1-02:03:04"; a word if there is none."""


def state_of(job_id: str) -> JobState:
    """Return how a job is, one that is over included. Raises SlurmError if SLURM does not answer."""
    try:
        answer = slurm("squeue", "-h", "-t", "all", "-o", "%T|%N|%P|%L|%r", "-j", job_id)
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        answer = ""
    if answer.strip():
        try:
            state, nodes, partition, left, reason = answer.strip().splitlines()[-1].split("|", 4)
        except ValueError:
            raise SlurmError(f"squeue answered what cannot be read: {answer.strip()[-200:]!r}") from None
        return JobState(state, nodes, partition, reason, left)
    return _state_in_accounts(job_id)


def _state_in_accounts(job_id: str) -> JobState:
    """Return the same of a job that `squeue` has forgotten, where the cluster keeps accounts."""
    try:
        answer = slurm("sacct", "-n", "-X", "-P", "-o", "State,NodeList,Partition", "-j", job_id).strip()
        state, nodes, partition = answer.splitlines()[-1].split("|")
        return JobState(state.partition(" ")[0], nodes, partition, "")
    except SlurmError as error:
        why = f"sacct says nothing of it ({error})"
    except (IndexError, ValueError):
        why = "nor does sacct"
    return JobState("FORGOTTEN", "", "", f"squeue no longer lists it, {why}")


def why_it_waits(job_id: str, job: JobState) -> str:
    """Return why a job waits, and how many of the same partition wait before it, in a line."""
    text = f"SLURM job {job_id} waits"
    try:
        command = ("squeue", "-h", "-t", "PD", "-p", job.partition, "--sort=-p,i", "-o", "%A")
        waiting = slurm(*command, timeout_s=HINT_S).split()
        text += f", place {waiting.index(job_id) + 1} of {len(waiting)} in partition {job.partition}"
    except (SlurmError, ValueError):
        pass
    if job.reason not in ("", "None"):
        text += f": {REASONS.get(job.reason, job.reason)}"
    if "DOWN" in job.reason or "NotAvail" in job.reason:
        text += troubles("-p", job.partition)
    if job.state not in ("PENDING", "CONFIGURING"):
        text += f" ({job.state})"
    return text


def troubles(*where: str) -> str:
    """Return which nodes are down or drained, with the reasons that were given; "" if none is, or nobody answers."""
    try:
        states = ("-t", "down,drain,fail,no_respond,maint")
        answer = slurm("sinfo", "-h", "-N", "-o", "%N|%T|%E", *where, *states, timeout_s=HINT_S)
    except SlurmError:
        return ""
    nodes = dict.fromkeys(tuple(line.split("|", 2)) for line in answer.splitlines())
    listed = ", ".join(f"{name} is {state.rstrip('*')} ({reason})" for name, state, reason in nodes)
    return f" [{listed}]" if listed else ""
