"""Exercise: writing a checkpoint while training goes on."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="14",
    title="Saving while training goes on",
    statement="""
    Writing takes long, and training must not wait for it: have a thread of `pool` (a
    `ThreadPoolExecutor`) call `write(step, …)`, and return its `Future` at once. What is written is the
    state of *this* step, though training goes on, and changes the tensors of `state` in place; `state`
    is a dict of dicts, lists, numbers and tensors, as `state_dict()` returns.

    At most one save is under way, so first wait for `previous`, the `Future` of the save before this
    one (None: there is none). If that save has failed, its error must be raised here, or nobody would
    ever see it.
    """,
    hints=(
        "What the thread reads must be a copy that was finished before this function returns.",
        "`dict(state)` and `state.copy()` copy the dict, not the tensors in it; `copy.deepcopy` copies both.",
        "`pool.submit(function, *arguments)` returns a `Future`; its `result()` waits, and raises what was raised.",
    ),
    why="Only the copy must be made before the next step; the slow part, writing, overlaps with training. Memory is "
    "needed for one copy (on a GPU it is made in the CPU's memory), which is why one save must end before the next.",
    world_sizes=(),
    imports=("import copy",),
    cases=({"has_previous": False}, {"has_previous": True}),
)

PATIENCE_S = 0.1
"""How long a call may take until it counts as one that waits for its own save. Only wrong answers take it."""


@EXERCISE.reference
def begin_saving(pool, previous, step, state, write):
    """Begin write(step, copy of the state) in a thread of `pool`; return its Future."""
    if previous is not None:
        previous.result()
    return pool.submit(write, step, copy.deepcopy(state))


def _state(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((2,), value)}, "optimizer": {"state": [{"step": torch.tensor(value)}]}}


def _train(state: dict[str, Any]) -> None:
    """Take a step: change what is in the state, in place."""
    state["model"]["weight"] += 1
    state["optimizer"]["state"][0]["step"] += 1


@EXERCISE.trial
def trial(t: Trial, has_previous: bool) -> None:
    """Begin a save, train on, only then let it write; and look what was written when."""
    with ThreadPoolExecutor(1) as pool:
        is_free = threading.Event()
        pool.submit(is_free.wait)  # whatever the answer has a thread do, it is done after the next step
        try:
            _save(t, pool, is_free, has_previous)
        finally:
            is_free.set()


def _save(t: Trial, pool: ThreadPoolExecutor, is_free: threading.Event, has_previous: bool) -> None:
    all_written: list[tuple[Any, Any]] = []

    def write(step: int, state: Any) -> None:
        all_written.append((step, copy.deepcopy(state)))

    previous = _Previous() if has_previous else None
    state = _state(3.0)
    # An answer that waits for its own save would wait for ever; after a while the thread is free, which is then said.
    timer = threading.Timer(PATIENCE_S, is_free.set)
    timer.start()
    future = t.call(pool, previous, 3, state, write)
    timer.cancel()
    t.require(not is_free.is_set(), "returned only when the state was written: training would wait for the disk")
    t.require(isinstance(future, Future), f"returned a {type(future).__name__}, expected the Future")
    if previous is not None:
        t.require(previous.was_asked, "began a save without waiting for the result of the one before")
    _train(state)
    is_free.set()
    future.result()
    t.require(len(all_written) == 1, f"called write {len(all_written)} times, expected once")
    step, written = all_written[0]
    t.require(step == 3, f"wrote step {step!r}, expected 3")
    is_dict = isinstance(written, dict) and set(written) == set(state)
    t.require(is_dict, f"wrote {str(written):.60}, expected the state")
    for what, now, then in (
        ("model", written["model"]["weight"], torch.full((2,), 3.0)),
        ("optimizer", written["optimizer"]["state"][0]["step"], torch.tensor(3.0)),
    ):
        late = {"that is the state of a later step; training went on before it was copied": then + 1}
        t.equal(f"{what} of the state of step 3", now, then, None, late)
    if has_previous:
        _fails(t, pool, state)


class _Previous(Future[Any]):
    """The Future of the save before, which notes whether anything asks for its result."""

    def __init__(self) -> None:
        super().__init__()
        self.was_asked = False
        self.set_result(None)

    def result(self, timeout: float | None = None) -> Any:
        self.was_asked = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> Any:
        self.was_asked = True
        return super().exception(timeout)


def _fails(t: Trial, pool: ThreadPoolExecutor, state: dict[str, Any]) -> None:
    failed: Future[Any] = Future()
    failed.set_exception(OSError("the disk is full"))
    try:
        t.call(pool, failed, 4, state, lambda *_: None)
    except OSError:
        return
    t.fail("the save before had failed (OSError: the disk is full), and no error was raised")
