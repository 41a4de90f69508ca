"""How long the lessons and the tests take, in seconds and in bare launches.

The machines this runs on differ by a factor of two, and so does one from day to day. So both are also given as
multiples of what a launch takes without labkit, before and after: `mp.spawn` of two ranks, from a notebook's cell to
the first step of DDP (the scoreboard's "second launch"). Four minutes for the lessons and fifteen for the tests were
asked for where that takes 2.3 s. What `make` says goes to build/suite.

    python -m tests.benchmarks.suite
    python -m tests.benchmarks.suite --only test
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from pathlib import Path

from tests.benchmarks.scoreboard import TOOLS, measure

ROOT = Path(__file__).parents[2]
LAUNCH_S = 2.3
ASKED_S = {"check": 120, "notebooks": 240, "test": 900}
"""By the goal of make, where a bare launch takes `LAUNCH_S`."""


def launches_s(trials: int) -> list[float]:
    """Return what bare launches take just now, in s, each in a kernel that has launched before."""
    found = [measure(TOOLS["mp.spawn"], "first")["second"] for _ in range(trials)]
    return [one["value"] for one in found if "value" in one]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["notebooks", "test"], choices=list(ASKED_S))
    parser.add_argument("--launches", type=int, default=4, help="bare launches between")
    arguments = parser.parse_args()
    folder = ROOT / "build" / "suite"
    folder.mkdir(parents=True, exist_ok=True)
    print("| make | s | bare launch, s | in launches | asked | |\n|---|---|---|---|---|---|")
    before = launches_s(arguments.launches)
    for goal in arguments.only:
        with open(folder / f"{goal}.log", "w") as log:
            began = time.monotonic()
            code = subprocess.run(["make", goal], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
            took_s = time.monotonic() - began
        after = launches_s(arguments.launches)
        launch_s = statistics.median(before + after)
        least, most = min(before + after), max(before + after)
        said = "" if code == 0 else f"make ended with {code}: build/suite/{goal}.log"
        print(
            f"| {goal} | {took_s:.0f} | {launch_s:.1f} ({least:.1f}–{most:.1f}) | {took_s / launch_s:.0f} "
            f"| {ASKED_S[goal] / LAUNCH_S:.0f} | {said} |",
            flush=True,
        )
        before = after


if __name__ == "__main__":
    main()
