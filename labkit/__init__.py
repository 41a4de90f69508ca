"""labkit: parallel PyTorch, live in your notebook.

    the notebook's kernel                               each rank (a process of its own)
    ─────────────────────                               ────────────────────────────────
    cell: run = labkit.launch(train, world_size=2)
            │ launcher      check arguments, pickle the function by value
            ▼
       engines/  ── mp.spawn | standby | launchers ───► rank/      signals, device, seeds, process group
            │                                             │        train(worker, …) → worker.log(loss=…)
            ▼                                             ▼
       monitor/  ◄─── protocol/events, by queue ◄──────── channels, log_batcher
            │         or by file
            │  follower → state (pure) → history, output
            ├─► failures/   who failed first, where ranks are, what to say
            ▼
       ui/       live widgets | still picture | text lines → charts

A room imports those below it in this list, and never one above:

    comparison   runs, or functions that it launches, side by side (`compare`)
    session      reserved ranks, for one launched function after another, and for cells (`%%ranks`)
    launchers    ranks that SLURM or Ray starts; they and the notebook exchange files in a run directory
    launcher     the public calls, `launch`, which reads from top to bottom, and `run_script`; it names the run's
                 observers
    run          `Run`: what you get back, wait for and stop
    debugger     `breakpoint()` in a rank, asked under the cell
    trace        what every rank did when (`launch(…, trace=5)`): one timeline, who is late, a file for Perfetto;
                 `profiling`: what a training function measures of its own rank by hand
    ui           what a person sees; `kernel` is all that asks IPython
    monitor      what is known of a run: `record`, and the `state` and `history` in it; `follower`, the thread that
                 fills it; `observers` may look on: `asking`, `memory`, the debugger, a trace
    failures     why a run failed or hangs, and how to say so: `ledger`, `first_to_fail`, `missed`, `stacks`; the help
                 pages, `pages/*.md`, say what messages mean and what to do: `labkit.explain("hang")`
    engines      where ranks come from: `local`, by `spawn` or from `standby`; `arguments` are checked before that
    steps        one instrument that watches the steps of a training function on its rank
    rank         what a rank's process does: `main` does jobs, `worker` what your function gets, `hooks` what
                 takes part in every job
    protocol     what crosses between the two: `job` and `packing` there, `events` back; `pages` shows the page of an
                 error
    system       the operating system, which no other room asks: `host` is Linux or macOS

And beside these: `checkpoint` (save and resume on the ranks).

What only the lessons use is the package `course` beside this one; nothing here imports it.

Importing this package is cheap, because every rank does: Plotly and the widgets are imported when the notebook first
needs them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("labkit runs on Linux and macOS. On Windows, use WSL2: install it and start Jupyter there")

from labkit.protocol import VERSION
from labkit.protocol.lazy import lazy_names

if TYPE_CHECKING:  # `as` tells type checkers that a name is public
    from labkit import checkpoint as checkpoint
    from labkit.checkpoint import Checkpoint as Checkpoint
    from labkit.comparison.compare import Comparison as Comparison
    from labkit.comparison.compare import compare as compare
    from labkit.engines import standby as standby
    from labkit.launcher import launch as launch
    from labkit.launcher import run_module as run_module
    from labkit.launcher import run_script as run_script
    from labkit.launchers.attaching import attach as attach
    from labkit.launchers.ray import Ray as Ray
    from labkit.launchers.slurm import Slurm as Slurm
    from labkit.protocol.pages import explain as explain
    from labkit.rank.current import current as current
    from labkit.rank.current import log as log
    from labkit.rank.stop_agreement import Stopped as Stopped
    from labkit.rank.worker import Worker as Worker
    from labkit.run import Run as Run
    from labkit.run import RunInterrupted as RunInterrupted
    from labkit.run import WorkerFailed as WorkerFailed
    from labkit.run import runs as runs
    from labkit.session.session import Session as Session
    from labkit.trace import profiling as profiling
    from labkit.ui import charts as charts
    from labkit.ui.present import show as show


__version__ = VERSION

_HOMES = {
    "Checkpoint": "checkpoint",
    "Comparison": "comparison.compare",
    "Ray": "launchers.ray",
    "Run": "run",
    "RunInterrupted": "run",
    "Session": "session.session",
    "Slurm": "launchers.slurm",
    "Stopped": "rank.stop_agreement",
    "Worker": "rank.worker",
    "WorkerFailed": "run",
    "attach": "launchers.attaching",
    "compare": "comparison.compare",
    "current": "rank.current",
    "explain": "protocol.pages",
    "launch": "launcher",
    "log": "rank.current",
    "run_module": "launcher",
    "run_script": "launcher",
    "runs": "run",
    "show": "ui.present",
}
"""The module of each public name …"""

_MODULES = {
    "checkpoint": "checkpoint",
    "charts": "ui.charts",
    "profiling": "trace.profiling",
    "standby": "engines.standby",
}
"""… and the public modules, whose names are shorter than their paths."""

__all__ = sorted([*_HOMES, *_MODULES])


__getattr__ = lazy_names(__name__, _HOMES, _MODULES)


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext labkit`: give the notebook the cell magic `%%ranks`."""
    from labkit.session import magic

    magic.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext labkit`: end the ranks, and take the magic away."""
    from labkit.session import magic

    magic.unload(shell)


if "ipykernel" in sys.modules:  # a notebook's kernel, not a rank
    from labkit.ui import prewarm

    prewarm.begin_when_idle()
