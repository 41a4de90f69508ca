"""Starts one node: its ranks first, then the agent that looks after them.

The agent imports no torch: on a small node the ranks need the cores.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from pathlib import Path

from labkit.engines.spawn import RankProcess, spawn
from labkit.launchers.run_folder import RunFolder
from labkit.system import host

OF_THIS_TASK = re.compile(r"SLURM_(STEP_)?(PROCID|LOCALID|NTASKS|NPROCS|NUM_TASKS|TASKS_PER_NODE|NTASKS_PER_NODE)")
"""What SLURM tells an agent of itself. A rank that saw it would take the node's number for its own."""

ROOT = Path(__file__).parents[2]
"""Where this package is, which need not be installed on the nodes."""


def command(python: str, folder: Path, *number: str) -> list[str]:
    """Return what starts a node: the one that SLURM says it is, or that of a number."""
    code = f"import sys; sys.path.append({str(ROOT)!r}); from labkit.launchers import start; start.main()"
    return [python, "-c", code, str(folder), *number]


def begin(ranks: int) -> list[RankProcess]:
    """Spawn the ranks of this node, which wait for their job."""
    for name in [name for name in os.environ if OF_THIS_TASK.fullmatch(name)]:
        del os.environ[name]
    os.environ["LABKIT_AGENT"] = "1"
    host.set_start_environment()
    return spawn(ranks, ahead_of_torch=True)


def main() -> None:
    """Run one node of a folder."""
    host.die_with_parent()
    for each in host.signals_for_ranks:  # a user may send them to all processes of a job, for the ranks' own handlers
        signal.signal(each, lambda *_: None)
    came: list[int] = []  # SIGTERM ends ranks that are still starting; it is SLURM's doing, and no failure of theirs
    signal.signal(signal.SIGTERM, lambda signal_number, _: came.append(signal_number))
    code, folder = 1, RunFolder(sys.argv[1])
    number = int(sys.argv[2] if len(sys.argv) > 2 else os.environ["SLURM_NODEID"])
    try:
        about = folder.about()
    except ValueError as error:
        sys.exit(f"node {number} ({host.node()}): {error}. Every node must see it")
    if (attempt := int(os.environ.get("SLURM_RESTART_COUNT", 0))) and folder.is_done():
        sys.exit(0)  # all ranks had returned when SLURM put the job back into its queue
    if os.path.isdir(about["cwd"]):  # the notebook's own folder, where that is here too
        os.chdir(about["cwd"])
    processes = begin(about["ranks_per_node"])

    from labkit.launchers import agent

    try:
        code = agent.run_in_folder(folder, about, number, attempt, processes, came)
    except Exception as error:
        if not isinstance(error, OSError):
            traceback.print_exc(file=sys.stdout)
        print(f"node {number} ({host.node()}): {type(error).__name__}: {error}", flush=True)
    finally:
        for process in processes:
            process.close()
        sys.stdout.flush()
        os._exit(code)  # multiprocessing would wait for its resource tracker
