"""What a reader sees of a few runs, as JSON: run as a program on Linux and under an emulation, and compared.

python -m tests.system.scenarios NAME …
"""

from __future__ import annotations

import json
import os
import re
import sys
import time

import torch
import torch.distributed as dist

import labkit

SCENARIOS = {}


def scenario(function):
    """Put a scenario into the table, by its name."""
    SCENARIOS[function.__name__] = function
    return function


def failing(*arguments, **options):
    """Return the message of a launch that fails."""
    try:
        labkit.launch(*arguments, world_size=2, live=False, **options)
    except labkit.WorkerFailed as error:
        return str(error)
    return "did not fail"


def trains(worker):
    total = torch.ones(3)
    dist.all_reduce(total)
    worker.log(loss=1.0)
    print("printed by Python: é 😀", flush=True)
    os.write(1, b"printed by native code\n")
    return total.sum().item()


def raises(worker):
    dist.barrier()
    if worker.rank == 1:
        raise ValueError("bad batch")
    dist.barrier()


def returns_early(worker):
    worker.log(loss=1.0)
    if worker.rank == 0:
        dist.barrier()


def sleeps(worker):
    worker.log(loss=1.0)
    if worker.rank == 1:
        time.sleep(1000)
    dist.barrier()


def trains_on(worker):
    while True:
        time.sleep(0.01)
        worker.log(loss=1.0)


def keeps(worker):
    globals().setdefault("kept", []).append(worker.rank)
    return len(globals()["kept"])


@scenario
def launch():
    run = labkit.launch(trains, world_size=2, live=False)
    return run.status, run.results, [sorted(output.splitlines()) for output in run.output], len(run.history)


@scenario
def failure():
    return failing(raises)


@scenario
def early_return():
    return failing(returns_early)


@scenario
def hang_report():
    return failing(sleeps, stall_s=3)


@scenario
def stop():
    run = labkit.launch(trains_on, world_size=2, live=False, wait=False)
    while len(run.history) < 4:
        time.sleep(0.02)
    run.stop()
    return run.status, [str(result) for result in run.results]


@scenario
def stacks():
    run = labkit.launch(sleeps, world_size=2, live=False, wait=False)
    while len(run.history) < 2:
        time.sleep(0.02)
    time.sleep(0.5)
    found = run.stacks().in_words
    run.stop()
    return found


@scenario
def session():
    with labkit.Session(2) as ranks:
        runs = [labkit.launch(trains, on=ranks, live=False) for _ in range(2)]
        return [(run.status, run.results) for run in runs], len(ranks.pids) if hasattr(ranks, "pids") else ""


@scenario
def standby():
    labkit.standby.on(2)
    while len(labkit.standby.pids()) < 2:
        time.sleep(0.05)
    waiting = set(labkit.standby.pids())
    run = labkit.launch(trains, world_size=2, live=False)
    used = set(run.pids) == waiting
    has_memory = all(bytes_ > 0 for bytes_ in labkit.standby.unique_bytes())
    labkit.standby.off()
    return run.status, run.results, used, has_memory


def the_same_everywhere(text: str) -> str:
    """Return a text without what differs from run to run: numbers of processes, times, what the transport said."""
    text = re.sub(r"\\n  rank \d+ lost its connection as a consequence[^\n]*?(?=\\n)", "", text)
    text = re.sub(r"\bpid \d+|\bprocess \d+", "process N", text)
    return re.sub(r"\d+(\.\d+)? (ms|s)\b", "N s", text)


def main():
    """Run the scenarios that are named, and print what came of each."""
    labkit.standby.off()
    names = sys.argv[1:] or list(SCENARIOS)
    found = {name: json.loads(the_same_everywhere(json.dumps(SCENARIOS[name](), default=str))) for name in names}
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
