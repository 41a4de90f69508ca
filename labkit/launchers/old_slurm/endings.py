"""Why a SLURM job ended, and what to do next, from its state and from what its ranks have told."""

from __future__ import annotations

from pathlib import Path

from labkit.failures.grouping import rank_list
from labkit.launchers import job_events
from labkit.launchers.launcher_job import RanksSeen
from labkit.launchers.old_slurm.queue import JobState, troubles

ENDINGS = {
    "CANCELLED": (
        "was cancelled from outside",
        "This notebook did not ask for it: perhaps somebody else did, with scancel. Launch it again; a function that "
        "keeps checkpoints goes on from the newest.",
    ),
    "TIMEOUT": (
        "reached its time limit",
        "Ask for more with time=…, or let the function keep checkpoints (labkit.Checkpoint) and launch it again.",
    ),
    "DEADLINE": ("reached its deadline", "Launch it with a later one."),
    "NODE_FAIL": (
        "lost a node",
        "SLURM starts such a job again unless it is told not to (requeue=False).",
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


def ending(
    job_id: str, state: JobState, seen: RanksSeen, directory: Path, python: str, was_ended: bool
) -> job_events.JobEnded | None:
    """Return why a job ended, if that is no rank's doing, nor this notebook's: `was_ended`."""
    if state.state in ENDINGS and not (was_ended and state.state == "CANCELLED"):
        return _by_state(job_id, state, seen)
    if seen.explains or was_ended or (state.state == "FORGOTTEN" and seen.is_whole):
        return None
    if not seen.missing:
        return _without_a_failure(job_id, state, seen)
    if state.state in ("FORGOTTEN", "COMPLETED"):
        known = f"SLURM job {job_id}: {state.reason}. " if state.state == "FORGOTTEN" else ""
        return job_events.JobEnded(
            -1,
            f"SLURM job {job_id} is over ({state.state}), but not all ranks have reported how they ended",
            f"{known}{_where(state)}{directory} has the ends of {_of(seen)} ranks. What they wrote is kept. "
            "Perhaps a node cannot write there, or what it wrote is not seen here.",
            page="slurm",
        )
    never = [rank for rank in seen.missing if rank not in seen.begun]
    if not never:
        return None
    who = rank_list(never) if seen.begun else "any rank"
    wrote = _tail(directory)
    hint = f"Perhaps a node has no {python}, or does not see {directory}"
    if "cannot be seen on" in wrote:
        hint = f"Every node must see {directory}"
    return job_events.JobEnded(
        -1,
        f"SLURM job {job_id} ended ({state.state}) before {who} began",
        f"{_where(state)}{_of(seen)} ranks have reported an end. What the job wrote:\n{wrote}\n{hint}.",
        page="slurm",
    )


def _by_state(job_id: str, state: JobState, seen: RanksSeen) -> job_events.JobEnded:
    what, advice = ENDINGS[state.state]
    where = _where(state, with_troubles=state.state == "NODE_FAIL")
    starved = [rank for rank, exit in seen.exits.items() if exit.code == -9 and not exit.ended]
    rank = starved[0] if state.state == "OUT_OF_MEMORY" and starved else -1
    who = "" if rank < 0 else f"; rank {rank} was killed for it"
    return job_events.JobEnded(rank, f"SLURM job {job_id} {what} ({state.state}){who}", where + advice, "slurm")


def _without_a_failure(job_id: str, state: JobState, seen: RanksSeen) -> job_events.JobEnded:
    if seen.exits and all(exit.code == 0 for exit in seen.exits.values()):
        return job_events.JobEnded(
            -1,
            f"SLURM job {job_id} was asked to end, and its ranks stopped ({state.state})",
            f"{_where(state)}All {len(seen.exits)} ranks stopped at SLURM's signal, and SLURM has not started them "
            "again. Launch it again; a function with checkpoints goes on from the newest.",
            page="slurm",
        )
    return job_events.JobEnded(
        -1, f"SLURM job {job_id} was ended ({state.state})", f"{_where(state)}No rank had failed before.", "slurm"
    )


def unconfirmed(job_id: str, state: JobState, error: str, was_told: bool, patience_s: float) -> job_events.JobEnded:
    """Say that SLURM has not confirmed a job's end for `patience_s`: it `was_told`, or all ranks have ended."""
    what = "has not ended it" if was_told else "has not answered"
    last = f"SLURM does not answer: {error}" if error else f"It is {state.state or 'not known yet'}. {_where(state)}"
    return job_events.JobEnded(
        -1,
        f"SLURM job {job_id} is no longer waited for: SLURM {what} for {patience_s:.0f} s",
        f"{last.strip()}\nRanks may still run: scancel {job_id} ends them, and labkit.attach({job_id}) follows them.",
        page="slurm",
    )


def interruption(job_id: str, nodes: str) -> job_events.JobEnded:
    """Say why SLURM has taken the nodes away, though it will give some again."""
    lost = troubles("-n", nodes).strip(" []") if nodes else ""
    what = f"lost a node: {lost}" if " is down" in lost else "was put back into the queue"
    return job_events.JobEnded(
        -1,
        f"SLURM job {job_id} {what}",
        f"It was on {nodes or 'no node yet'}. SLURM starts it again when it has nodes for it; its ranks are "
        "then new, and without variables.",
        page="slurm",
    )


def _where(state: JobState, with_troubles: bool = False) -> str:
    if not state.nodes:
        return ""
    return f"It was on {state.nodes}{troubles('-n', state.nodes) if with_troubles else ''}. "


def _of(seen: RanksSeen) -> str:
    return f"{len(seen.exits)} of {len(seen.exits) + len(seen.missing)}"


def _tail(directory: Path) -> str:
    try:
        return (directory / "slurm.out").read_text(errors="replace", encoding="utf-8")[-2000:].strip() or "nothing"
    except OSError:
        return f"(nothing is seen: {directory}/slurm.out is not there. Perhaps that node does not share the folder)"
