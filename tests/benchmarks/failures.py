"""Measure how failures are told: for each way to fail of `tests/support/failures.py`, how often the rank that failed is
named, and how long after the failure the error is there.

World sizes and failing ranks take turns. Ranks start cold, so that every trial is alone; with --reserved all trials are
on the ranks of one session, and each finds what those before have left of them. The table grows as rows end.

    python -m tests.benchmarks.failures --trials 100 --rows SIGKILL sys.exit --world-sizes 2,3,4
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
from collections.abc import Iterator
from typing import NamedTuple

import labkit
from labkit.engines import standby
from tests.support.failures import ROWS, trial


class Trial(NamedTuple):
    """One failure, and what was said of it."""

    row: str
    world_size: int
    rank: int
    """Which failed."""
    named: int | None
    """Which was blamed; None if there was no error or an unexpected one."""
    right: bool
    """The right rank, and the expected headline and cause."""
    after_s: float | None
    headline: str


def places(world_sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Give (world size, failing rank) for ever, world sizes in turn and each one's ranks in turn."""
    ranks = {world_size: itertools.cycle(range(world_size)) for world_size in world_sizes}
    for world_size in itertools.cycle(world_sizes):
        yield world_size, next(ranks[world_size])


def try_once(row: str, world_size: int, rank: int, on: labkit.Session | None) -> Trial:
    """Make one rank fail and judge what is said."""
    try:
        error, after_s = trial(row, world_size, rank, on)
    except Exception as unexpected:
        return Trial(row, world_size, rank, None, False, None, f"{type(unexpected).__name__}: {unexpected}")
    # Of two ranks that meet in different collectives neither is wrong.
    named = error.rank == rank or (row == "other collective" and world_size == 2)
    said = re.match(ROWS[row].said.format(rank=rank), error.diagnosis.headline) and ROWS[row].cause in error.cause
    return Trial(row, world_size, rank, error.rank, bool(named and said), after_s, error.diagnosis.headline)


def in_a_row(row: str, trials: list[Trial]) -> str:
    """Give one line of the table."""
    after = [t.after_s for t in trials if t.after_s is not None]
    times = f"{statistics.median(after):.2f} | {max(after):.2f}" if after else "– | –"
    return f"| {row} | {sum(t.right for t in trials)} of {len(trials)} | {times} |"


def main() -> None:
    """Try every row, and print the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="of each row")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), help="all by default")
    parser.add_argument("--world-sizes", default="2,3,4")
    parser.add_argument("--reserved", action="store_true", help="on the ranks of a session")
    options = parser.parse_args()
    world_sizes = [int(size) for size in options.world_sizes.split(",")]
    standby.off()
    print("| way to fail | right rank named | median s | greatest s |\n|---|---|---|---|", flush=True)
    done: list[Trial] = []
    session = labkit.Session(max(world_sizes)) if options.reserved else None
    for row in options.rows:
        these = []
        for world_size, rank in itertools.islice(places(world_sizes), options.trials):
            these.append(try_once(row, world_size, rank, session))
            if not these[-1].right:
                print(f"wrong: {these[-1]}", file=sys.stderr, flush=True)
        print(in_a_row(row, these), flush=True)
        done += these
    print(in_a_row("**all**", done), flush=True)


if __name__ == "__main__":
    main()
