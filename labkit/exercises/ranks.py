"""The ranks on which answers are tried: reserved once, kept by this wing. The one file of it that launches."""

from __future__ import annotations

import threading
from typing import Any

import labkit
from labkit import Session, WorkerFailed
from labkit.exercises import trial
from labkit.packing import pack_call
from labkit.session import session as sessions

RANKS = 4
"""The largest world size that is tried."""

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


def use(ranks: Session | None) -> None:
    """Try answers on these ranks from now on; None: on own ones."""
    global _session
    _session = ranks


def try_on_ranks(name: str, function: Any, world_size: int, patience_s: float, timeout_s: float) -> labkit.Run:
    """Try an answer on so many ranks, and return the run, over; `run.error` says if it failed."""
    packed = pack_call(function, (), {})
    try:
        return labkit.launch(
            trial.examine,
            name,
            packed,
            patience_s,
            world_size=world_size,
            on=session(),
            timeout_s=timeout_s,
            live=False,
            name=f"check {name}",
            backend="gloo",
        )
    except WorkerFailed as failure:
        return failure.run
