"""The ranks on which answers are tried: reserved once, kept by this wing. The one file of it that launches."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import labkit
from course.exercises import trial
from course.exercises.traffic import waited_for_core_s
from labkit import Run, Session, WorkerFailed
from labkit.protocol.packing import pack_call
from labkit.session import session as sessions

RANKS = 4
"""The largest world size that is tried."""

READY_S = 120.0
"""How long new processes may take to be ready."""

_session: Session | None = None
_lock = threading.Lock()


def session() -> Session:
    """Return the ranks, starting them if there are none."""
    global _session
    with _lock:
        if _session is None or _session.over:
            _session = Session(RANKS, is_of_a_cell=False, device="cpu")
            sessions._open.discard(_session)  # no cell with %%ranks is to run on them by itself
        return _session


def start_soon() -> None:
    """Start the ranks while the learner reads."""
    if _session is None or _session.over:
        threading.Thread(target=session, name="labkit-exercise-ranks", daemon=True).start()


def close() -> None:
    """End the ranks; the next check starts new ones."""
    global _session
    with _lock:
        ended, _session = _session, None
    if ended is not None:
        ended.close()


def use(ranks: Session | None) -> None:
    """Try answers on these ranks from now on; None: on own ones."""
    global _session
    _session = ranks


def try_on_ranks(name: str, function: Any, world_size: int, patience_s: float, stall_s: float) -> tuple[Run, float]:
    """Try an answer on so many ranks, and return the run, over; `run.error` says if it failed.

    And for how many seconds a rank was ready to run meanwhile and got no core, of the rank that waited longest.
    """
    packed = pack_call(function, (), {})
    _wait_until_ready(session())
    before = {pid: waited_for_core_s(pid) for pid in session().pids}
    run = labkit.launch(
        trial.examine,
        name,
        packed,
        patience_s,
        world_size=world_size,
        on=session(),
        stall_s=stall_s,
        live=False,
        wait=False,
        name=f"check {name}",
        device="cpu",
    )
    with contextlib.suppress(WorkerFailed):  # the run says so
        run.wait()
    return run, max((waited_for_core_s(pid) - waited_s for pid, waited_s in before.items()), default=0.0)


def _wait_until_ready(session: Session) -> None:
    """Let new processes import torch before the time of the answer runs; one that had ended is replaced by then."""
    if any(rank.state != "idle" for rank in session.ranks):
        labkit.launch(trial.be_there, world_size=RANKS, on=session, stall_s=READY_S, live=False, name="get ready")
