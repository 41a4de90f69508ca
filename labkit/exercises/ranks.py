"""The ranks on which answers are tried: reserved once, kept by this wing. The one file of it that launches."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import labkit
from labkit import Run, Session, WorkerFailed
from labkit.exercises import trial
from labkit.protocol.pickling import pack_call
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
            _session = Session(RANKS, is_of_a_cell=False)
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


def try_on_ranks(name: str, function: Any, world_size: int, patience_s: float, timeout_s: float) -> Run:
    """Try an answer on so many ranks, and return the run, over; `run.error` says if it failed."""
    packed = pack_call(function, (), {})
    _wait_until_ready(session())
    run = labkit.launch(
        trial.examine,
        name,
        packed,
        patience_s,
        world_size=world_size,
        on=session(),
        timeout_s=timeout_s,
        live=False,
        wait=False,
        name=f"check {name}",
        backend="gloo",
    )
    with contextlib.suppress(WorkerFailed):  # the run says so
        run.wait()
    return run


def _wait_until_ready(session: Session) -> None:
    """Let new processes import torch before the time of the answer runs; one that had ended is replaced by then."""
    if any(rank.state != "idle" for rank in session.ranks):
        labkit.launch(trial.be_there, world_size=RANKS, on=session, timeout_s=READY_S, live=False, name="get ready")
