"""labkit: parallel PyTorch, live in your notebook.

    the notebook's kernel                                 each rank (a process of its own)
    ─────────────────────                                 ────────────────────────────────
    cell:  run = labkit.launch(train, world_size=2)
            │ check the arguments, pack the function by value (`packing`)
            ▼
       launcher ► engines.local ── mp.spawn ────────────► worker: process group, seed, threads, output
            │     engines.slurm, engines.torchrun           │
            ▼                                               ▼
          run  ◄──── records, by queue or by file ◄─────── train(worker, …) → worker.log(loss=…)
            ├──► history   (columns, thinned curves, DataFrame; output: what ranks print)
            ├──► diagnosis   (which rank failed first, and why; stacks: where each rank stands)
            ├──► stopping  (on Stop: how long to wait for a step's end; `waiting`: what a rank waits for, as it tells)
            └──► ui        (`live`: widgets while it runs; `summary`: what stays; `lines`: text where nobody watches)
                     └──► charts   (history in, Plotly figure out; `png`: figure in, picture out)

`notebook` knows the cells, and whether a person looks; `idle` knows whether the notebook has work of its own.
`engines.standby` keeps ranks spawned ahead, each for one run, so that a launch begins at once. `session` reserves ranks
that do job after job: launched functions, and cells (`%load_ext labkit`, `%%ranks 4`). In such a rank `isolation` puts
back what a run has changed, and `process_group` joins and leaves. `processes_view` shows every process that labkit
holds (`engines.holders`), each with a button that ends it.
On a cluster ranks and notebook speak through files in the run's directory (`cluster.run_directory`):
`cluster.supervisor` starts each rank there, and `cluster.rank_entry` is what it runs; in a session,
`session.supervisor` and `session.rank_entry`.
`datasets` and `models` hold what the lessons train; `strategies` are ways to be parallel, with one interface, and
`benchmark` and `profiling` find out what a step of each costs; `compare` puts runs side by side; `scaling` predicts
other numbers of ranks, and `explore` shows a figure with sliders. `checkpoint` saves and resumes a training on its
ranks. `export` (`exporter`; `source` follows what a function uses; `script` starts it) writes one to a folder that
needs no notebook.
Importing this package is cheap, because every rank does: Plotly and the widgets are imported when the notebook first
needs them.
"""

from __future__ import annotations

import importlib
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit import benchmark, checkpoint, profiling, scaling, strategies
    from labkit.checkpoint import Checkpoint
    from labkit.cluster.attaching import attach
    from labkit.cluster.slurm import Slurm
    from labkit.cluster.torchrun import Torchrun
    from labkit.engines import standby
    from labkit.exporting.exporter import export
    from labkit.launcher import launch
    from labkit.lessons import datasets, models
    from labkit.monitor.run import Run, WorkerFailed
    from labkit.rank.worker import Stopped, Worker
    from labkit.session.session import Session
    from labkit.ui import charts
    from labkit.ui.comparison import Comparison, compare
    from labkit.ui.present import show
    from labkit.ui.processes import processes
    from labkit.ui.tables import sortable

__all__ = [
    "Checkpoint",
    "Comparison",
    "Run",
    "Session",
    "Slurm",
    "Stopped",
    "Torchrun",
    "Worker",
    "WorkerFailed",
    "attach",
    "benchmark",
    "charts",
    "checkpoint",
    "compare",
    "datasets",
    "export",
    "launch",
    "models",
    "processes",
    "profiling",
    "scaling",
    "show",
    "sortable",
    "standby",
    "strategies",
]
__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "checkpoint",
    "Comparison": "ui.comparison",
    "Run": "monitor.run",
    "Session": "session.session",
    "Slurm": "cluster.slurm",
    "Stopped": "rank.worker",
    "Torchrun": "cluster.torchrun",
    "Worker": "rank.worker",
    "WorkerFailed": "monitor.run",
    "attach": "cluster.attaching",
    "compare": "ui.comparison",
    "export": "exporting.exporter",
    "launch": "launcher",
    "processes": "ui.processes",
    "show": "ui.present",
    "sortable": "ui.tables",
}
"""The module of each public name …"""

_MODULES = {
    "benchmark": "benchmark",
    "charts": "ui.charts",
    "checkpoint": "checkpoint",
    "datasets": "lessons.datasets",
    "models": "lessons.models",
    "profiling": "profiling",
    "scaling": "scaling",
    "standby": "engines.standby",
    "strategies": "strategies",
}
"""… and the public modules, whose names are shorter than their paths."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = importlib.import_module(f"labkit.{_MODULES[name]}")
    elif name in _HOMES:
        value = getattr(importlib.import_module(f"labkit.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext labkit`: give the notebook the cell magic `%%ranks`."""
    importlib.import_module("labkit.session.magic").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext labkit`: end the ranks, and take the magic away."""
    importlib.import_module("labkit.session.magic").unload(shell)


def _get_ahead(is_interactive: bool) -> None:
    """Do what the first launch and the first chart need while the notebook is idle and the reader reads.

    The ranks come first: a chart has a second's time once its run has begun.
    """
    idle = importlib.import_module("labkit.engines.idle")
    standby = importlib.import_module("labkit.engines.standby")
    importlib.import_module("labkit.ui.kernel").after_each_cell(standby.renew)
    if is_interactive:
        standby.ahead_of_the_first_launch()
    idle.wait()
    importlib.import_module("labkit.ui.ahead").wait()
    if not is_interactive:  # where a person watches, the browser draws the pictures
        importlib.import_module("matplotlib.backends.backend_agg")
        importlib.import_module("PIL.Image")


if "ipykernel" in sys.modules:  # a notebook's kernel, not a rank
    # In full, before any thread may draw: Plotly looks for pandas.Series in a pandas that is half imported, and fails.
    importlib.import_module("pandas")
    # Asked now, while the cell that imports labkit runs: whether it may ask for input tells who runs it.
    _interactive = importlib.import_module("labkit.ui.kernel").is_interactive()
    threading.Thread(target=_get_ahead, args=(_interactive,), name="labkit-ahead", daemon=True).start()
