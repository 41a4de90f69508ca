"""Measure what many ranks cost the notebook's kernel: to take values in, draw again, save, and group where they stand.

The ranks are simulated: this process makes the events that ranks would send, one log call each, and no rank is started.
So neither reading and unpickling what comes from ranks is in it, nor what the browser does. "of one core" is what
taking in costs where each rank logs 10 times a second, and somebody looks once a second.

    python -m tests.benchmarks.many_ranks --ranks 4 16 64 256 1024
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from collections.abc import Callable

import numpy as np

from labkit.failures.stacks import RankStack, Stacks, parse
from labkit.protocol.events import Log, Output, Started
from labkit.protocol.job import Cell
from labkit.run import Run
from labkit.ui import charts, live, summary
from labkit.ui import prewarm as ahead
from tests.support.fake_engine import FakeEngine

CALLS_A_S = 10
REDRAWS = 5
CELL = "/tmp/ipykernel_1/1.py"
SOURCE = "def train(worker):\n    for step in range(100):\n        loss = step\n        dist.all_reduce(tensor)\n"
DUMP = (
    "Current thread 0x00007f (most recent call first):\n"
    '  File "/venv/torch/distributed/distributed_c10d.py", line 2961 in all_reduce\n'
    f'  File "{CELL}", line {{line}} in train\n'
    '  File "/labkit/rank/main.py", line 120 in run\n'
    '  File "<string>", line 1 in <module>\n'
)


def events_of(ranks: int, steps: range, rng: np.random.Generator) -> list[Log]:
    """Return what ranks send that log two values at each step, one call each; rank 1 stands apart."""
    names = ("loss", "accuracy")
    found = []
    for step in steps:
        values = 1 / (1 + step) + 0.05 * rng.normal(size=(ranks, 2))
        values[1 % ranks] += 1
        for rank, row in enumerate(values):
            found.append(Log(rank, names, array("q", [step]), array("d", [step / CALLS_A_S]), array("d", row)))
    return found


def used_s(call: Callable[[], object]) -> float:
    """Return the processor time of this process that a call takes."""
    began = time.process_time()
    call()
    return time.process_time() - began


def measure(ranks: int, steps: int) -> tuple[float, ...]:
    """Return µs a value, share of a core, seconds of a redraw and of a new chart, KB saved, seconds of grouping."""
    run = Run(FakeEngine(ranks), ranks, "simulated")
    for rank in range(ranks):
        run._follower.take(Started(rank))
    rng = np.random.default_rng(0)
    history = run.recorded

    def take(logs: list[Log]) -> None:
        for log in logs:
            with run.lock:
                run._follower.take(log)

    took_s = 0.0
    for start in range(0, steps, CALLS_A_S):  # a second of theirs, then somebody looks
        logs = events_of(ranks, range(start, min(start + CALLS_A_S, steps)), rng)
        took_s += used_s(lambda logs=logs: (take(logs), history.progress(0)))  # type: ignore[misc]
    for rank in range(ranks):
        run._follower.take(Output(rank, f"this is rank {rank}\nepoch 1\n"))
    figures: list[charts.Chart] = []
    new_s = used_s(lambda: figures.append(charts.logged(history)))
    drawn_s = []
    for again in range(REDRAWS):
        take(events_of(ranks, range(steps + again, steps + again + 1), rng))
        drawn_s.append(
            used_s(
                lambda: (
                    live.states_html(run),
                    charts.refresh(figures[0], history),
                    json.dumps(figures[0].to_plotly_json_small()),
                )
            )
        )
    chart = charts.logged(history, run.name).to_plotly_json_small()
    saved = len(json.dumps(chart)) + len(summary.as_html(run))
    cells = {CELL: Cell("Cell In[3]", SOURCE)}
    dumps = [DUMP.format(line=3 if rank == 1 else 4) for rank in range(ranks)]

    def group() -> None:
        stacks = Stacks(RankStack(rank, parse(dump), cells) for rank, dump in enumerate(dumps))
        assert stacks.outliers == ([1] if ranks > 2 else stacks.outliers)
        stacks._repr_html_()

    grouped_s = used_s(group)
    calls = ranks * steps
    return 1e6 * took_s / (2 * calls), took_s / steps * CALLS_A_S, max(drawn_s), new_s, saved / 1e3, grouped_s


def main() -> None:
    """Measure runs of so many ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=500, help="of each rank; two values at each")
    options = parser.parse_args()
    ahead.wait()
    measure(4, 20)  # the first of everything is dearer
    print(f"simulated ranks, {options.steps} steps each, two values a step; processor time of this process\n")
    print("| ranks | a value | of one core | redraw | new chart | saved | stacks grouped |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for ranks in options.ranks:
        value_us, share, drawn_s, new_s, saved_kb, grouped_s = measure(ranks, options.steps)
        print(
            f"| {ranks:,} | {value_us:.1f} µs | {share:.1%} | {1e3 * drawn_s:.0f} ms | {1e3 * new_s:.0f} ms "
            f"| {saved_kb:.0f} KB | {1e3 * grouped_s:.0f} ms |",
            flush=True,
        )


if __name__ == "__main__":
    main()
