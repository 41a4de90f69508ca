"""Measure how hangs are told: for each way to hang of `tests/support/hangs.py`, with those of lessons 14 and 14c, and
each number of ranks, how often the report names the right rank, the right collective, and its number.

Ranks are reserved, so that a hang costs little more than its time-out; with --cold each trial has ranks of its own. The
odd rank and the number of calls before take turns. The table grows as ways end; build/hangs.json keeps every report.
The exit code is 1 when anything is wrong.

    python tests/benchmarks/hangs.py --repetitions 2 --rows sleeps loops
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started by its path, as a program, it finds its table too

import labkit  # noqa: E402
from labkit.engines import standby  # noqa: E402
from tests.support.hangs import ROWS, Judged, is_recorded, judge, report  # noqa: E402

BEFORE = (1, 5, 40, 411)
"""Calls of the same group before, in turn. Of 411 the recorder tells the newest alone."""


def planted(
    row: str, world_size: int, number: int, on: labkit.Session | None, silent_s: float
) -> tuple[Judged, dict[str, object]]:
    """Plant a hang; return what of its report is right, and all that is known of it."""
    odd, before = number % world_size, BEFORE[number % len(BEFORE)]
    if row == "a monitored barrier" and odd == 0:
        odd = 1  # rank 0 is the one that counts
    try:
        error = report(row, world_size, odd, before, on, silent_s)
        judged, said = judge(row, world_size, odd, before, error), error.diagnosis.headline
    except Exception as unexpected:
        judged, said = Judged(False, False, False), f"{type(unexpected).__name__}: {unexpected}"
    about = {"row": row, "world_size": world_size, "odd": odd, "before": before, "said": said, **judged._asdict()}
    return judged, about


def in_words(judged: list[Judged]) -> str:
    """Return "5 of 5", or how often each part was right: "rank 5, collective 4, number 4 of 5"."""
    right = {part: sum(getattr(one, part) for one in judged) for part in Judged._fields}
    if len(set(right.values())) == 1:
        return f"{right['rank']} of {len(judged)}"
    return ", ".join(f"{part} {count}" for part, count in right.items()) + f" of {len(judged)}"


def main() -> int:
    """Plant every hang, print the table as it grows, keep all reports; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=34, help="of each way on each number of ranks")
    parser.add_argument(
        "--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="WAY", help="all by default"
    )
    parser.add_argument("--world-sizes", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--silent-s", type=float, default=1.0, help="after which a run counts as hung")
    parser.add_argument("--cold", action="store_true", help="on ranks that are started anew for each")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hangs.json")
    options = parser.parse_args()
    if not is_recorded():
        parser.error("this PyTorch records no calls of gloo, so no report can name them: it takes 2.15 or newer")
    standby.off()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"| way to hang | {' | '.join(f'{size} ranks' for size in options.world_sizes)} |")
    print("|---" * (1 + len(options.world_sizes)) + "|", flush=True)
    session = None if options.cold else labkit.Session(max(options.world_sizes), backend="gloo")
    done: list[dict[str, object]] = []
    every: list[Judged] = []
    for row in options.rows:
        cells = []
        for world_size in options.world_sizes:
            tried = [planted(row, world_size, n, session, options.silent_s) for n in range(options.repetitions)]
            cells.append(in_words([judged for judged, _ in tried]))
            every += [judged for judged, _ in tried]
            done += [about for _, about in tried]
            for wrong in [about for judged, about in tried if not all(judged)]:
                print(f"wrong: {wrong}", file=sys.stderr, flush=True)
            options.out.write_text(json.dumps(done, indent=1))
        print(f"| {row} | {' | '.join(cells)} |", flush=True)
    if session is not None:
        session.close()
    print(f"\nright in all: {sum(map(all, every))} of {len(every)}")
    return 0 if all(map(all, every)) else 1


if __name__ == "__main__":
    sys.exit(main())
