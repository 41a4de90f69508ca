"""Exercise: all ranks stop after the same step when one of them gets a signal."""

from __future__ import annotations

import functools
import signal
from typing import Any

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="14",
    title="Told to stop",
    statement="""
    Before a cluster ends a job it sends a signal, SIGTERM or SIGUSR1, at any moment, and perhaps to one
    rank only. Install a handler for both, and return a function without arguments, which all ranks call
    after each step. It returns True, on all ranks after the same step, if a signal has come to any of
    them; else False. Then all ranks save, and leave the loop together.

    A handler interrupts the program anywhere, also within a step: it only remembers. The returned
    function makes one `dist.all_reduce`, of a tensor on `device`.
    """,
    hints=(
        "`signal.signal(number, handler)` calls `handler(number, frame)` when the signal comes.",
        "A list made in the outer function, to which the handler appends, is seen by the inner one.",
        "Every rank calls `all_reduce` after every step, whether or not it has been told. A sum of flags is more than "
        "0 if any of them is set.",
    ),
    why="The handler remembers, and the all-reduce after the step makes one rank's signal a decision of all ranks: "
    "they can stop together only after a step on which they agree.",
    allowed=("all_reduce",),
    imports=("import signal", "", "import torch", "import torch.distributed as dist"),
    cases=(
        {"signals": ((2, 1, "SIGTERM"),)},
        {"signals": ((0, 0, "SIGUSR1"),)},
        {"signals": ((1, 2, "SIGUSR1"), (1, 0, "SIGTERM"), (1, 0, "SIGUSR1"), (3, 1, "SIGTERM"))},
        {"signals": ()},
    ),
)

STEPS = 4


@EXERCISE.reference
def listen_for_stop(device):
    """Return a function that all ranks call after each step: whether any of them has been told to stop."""
    told = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: told.append(number))

    def has_to_stop():
        flag = torch.tensor(len(told), device=device)
        dist.all_reduce(flag)
        return flag.item() > 0

    return has_to_stop


@EXERCISE.trial
def trial(t: Trial, signals: tuple[tuple[int, int, str], ...]) -> None:
    """Go through some steps, and get signals in some of them; `signals` has step, rank and name of each."""
    missed: list[str] = []
    before = {
        name: signal.signal(getattr(signal, name), lambda number, _: missed.append(signal.Signals(number).name))
        for name in ("SIGTERM", "SIGUSR1")
    }
    try:
        _steps(t, [(step, rank % t.world_size, name) for step, rank, name in signals], missed)
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def _steps(t: Trial, signals: list[tuple[int, int, str]], missed: list[str]) -> None:
    stop = t.call(torch.device("cpu"))
    t.require(callable(stop), f"returned a {type(stop).__name__}, expected a function")
    for step in range(STEPS):
        for name in (name for at, rank, name in signals if (at, rank) == (step, t.rank)):
            calls = t.traffic.calls
            t.watch(functools.partial(signal.raise_signal, getattr(signal, name)))
            t.require(t.traffic.calls == calls, "communicates in the handler, where the other ranks do not")
        told = sorted({rank for at, rank, _ in signals if at <= step})
        found = t.watch(stop)
        # Not before: the other ranks would wait in their all_reduce, and that would be what is told.
        t.require(not missed, f"{' and '.join(missed)} came in step {step}, and nothing handled it")
        t.require(isinstance(found, bool), f"returned a {type(found).__name__}, expected True or False")
        because = f"rank {' and '.join(map(str, told))} had been told" if told else "no rank had been told"
        t.require(found == bool(told), f"after step {step} it is {found}, expected {bool(told)}: {because}")
        calls = t.traffic.count("all_reduce")
        t.require(calls <= step + 1, f"called all_reduce {calls} times in {step + 1} steps, expected one a step")
        if told:
            return


@EXERCISE.best
def best(world_size: int, signals: Any) -> Cost:
    """Return one all-reduce of a number after each step that is done."""
    steps = min((step + 1 for step, *_ in signals), default=STEPS)
    return Cost.all_reduce(8, world_size, calls=steps)
