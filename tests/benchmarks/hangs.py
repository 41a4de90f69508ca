"""Measure how hangs are told: for each way to hang of `tests/hangs.py`, how often the report names the right rank, the
right collective and its number.

World sizes, odd ranks and the number of calls before take turns. Ranks start cold; with --reserved all trials are on
the ranks of one session. The table grows as ways end; build/hangs.json keeps every report.

    python tests/benchmarks/hangs.py --trials 100 --rows sleeps loops --world-sizes 2,3,4 --reserved
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started by its path, as a program, it finds its table too

import labkit  # noqa: E402
from labkit.engines import standby  # noqa: E402
from tests.benchmarks.failures import places  # noqa: E402
from tests.hangs import ROWS, is_right, report  # noqa: E402


def main() -> None:
    """Plant every hang, print the table as it grows, keep all reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="of each way")
    parser.add_argument(
        "--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="WAY", help="all by default"
    )
    parser.add_argument("--world-sizes", default="2,3,4")
    parser.add_argument("--silent-s", type=float, default=1.0, help="after which a run counts as hung")
    parser.add_argument("--reserved", action="store_true", help="on the ranks of a session")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hangs.json")
    options = parser.parse_args()
    world_sizes = [int(size) for size in options.world_sizes.split(",")]
    standby.off()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print("| way to hang | rank, collective and number right |\n|---|---|", flush=True)
    session = labkit.Session(max(world_sizes)) if options.reserved else None
    done: list[dict[str, object]] = []
    for row in options.rows:
        right = 0
        befores = itertools.cycle([1, 5, 40, 411])
        for world_size, odd in itertools.islice(places(world_sizes), options.trials):
            if row == "a monitored barrier" and odd == 0:
                odd = 1  # rank 0 is the one that counts
            before = next(befores)
            try:
                error = report(row, world_size, odd, before, session, options.silent_s)
                is_good, said = is_right(row, world_size, odd, before, error), error.diagnosis.headline
            except Exception as unexpected:
                is_good, said = False, f"{type(unexpected).__name__}: {unexpected}"
            right += is_good
            done.append(
                {"row": row, "world_size": world_size, "odd": odd, "before": before, "right": is_good, "said": said}
            )
            if not is_good:
                print(f"wrong: {done[-1]}", file=sys.stderr, flush=True)
            options.out.write_text(json.dumps(done, indent=1))
        print(f"| {row} | {right} of {options.trials} |", flush=True)
    print(f"| **all** | {sum(bool(one['right']) for one in done)} of {len(done)} |", flush=True)


if __name__ == "__main__":
    main()
