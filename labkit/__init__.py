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
            ├──► verdict   (which rank failed first, and why; stacks: where each rank stands)
            ├──► stopping  (on Stop: how long to wait for a step's end; `waiting`: what a rank waits for, as it tells)
            └──► view      (widgets while it runs, a still picture afterwards, text lines without a front end)
                     └──► charts   (history in, Plotly figure out; no process, no widget)

`notebook` knows the cells, and whether a person looks; `idle` knows whether the notebook has work of its own.
`engines.standby` keeps ranks spawned ahead, each for one run, so that a launch begins at once. `session` reserves ranks
that do job after job: launched functions, and cells (`%load_ext labkit`, `%%ranks 4`). In such a rank `isolation` puts
back what a run has changed, and `process_group` joins and leaves. `processes_view` shows every process that labkit
holds (`engines.holders`), each with a button that ends it.
On a cluster ranks and notebook speak through files in the run's folder (`engines.folder`): `engines.guard` starts each
rank there, and `engines.remote` is what it runs; `engines.reserved`, in a session.
`exercises` is a wing of its own: what learners write, tried on ranks kept for it (`check`), and `predict`.
`datasets` and `models` hold what the lessons train; `strategies` are ways to be parallel, with one interface, and
`measure` finds out what a step of each costs; `compare` puts runs side by side; `scaling` predicts other numbers of
ranks, and `explore` shows a figure with sliders. `checkpoint` saves and resumes a training on its ranks. `export`
(`exporter`; `source` follows what a function uses; `script` starts it) writes one to a folder that needs no notebook.
Importing this package is cheap, because every rank does: Plotly and the widgets are imported when the notebook first
needs them.
"""

from __future__ import annotations

import importlib
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit import charts, checkpoint, datasets, exercises, measure, models, scaling, strategies
    from labkit.checkpoint import Checkpoint
    from labkit.comparison import Comparison, compare
    from labkit.engines import standby
    from labkit.engines.slurm import Slurm
    from labkit.engines.torchrun import Torchrun
    from labkit.exercises.checking import check
    from labkit.exercises.predicting import predict
    from labkit.exporter import export
    from labkit.launcher import attach, launch
    from labkit.processes_view import processes
    from labkit.run import Run, WorkerFailed
    from labkit.session import Session
    from labkit.view import show
    from labkit.worker import Stopped, Worker

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
    "charts",
    "check",
    "checkpoint",
    "compare",
    "datasets",
    "exercises",
    "export",
    "launch",
    "measure",
    "models",
    "predict",
    "processes",
    "scaling",
    "show",
    "standby",
    "strategies",
]
__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "checkpoint",
    "Comparison": "comparison",
    "Run": "run",
    "Session": "session",
    "Slurm": "engines.slurm",
    "Stopped": "worker",
    "Torchrun": "engines.torchrun",
    "Worker": "worker",
    "WorkerFailed": "run",
    "attach": "launcher",
    "check": "exercises.checking",
    "compare": "comparison",
    "export": "exporter",
    "launch": "launcher",
    "predict": "exercises.predicting",
    "processes": "processes_view",
    "show": "view",
    "standby": "engines",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name == "standby":
        importlib.import_module("labkit.engines.standby")
    module = importlib.import_module(f"labkit.{_HOMES.get(name, name)}")
    value = getattr(module, name) if name in _HOMES else module
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


def _get_ahead(first_launch: bool) -> None:
    """Do what the first launch, the first chart and its picture need while the notebook is idle and the reader reads.

    The ranks come first: a chart has a second's time once its run has begun.
    """
    idle = importlib.import_module("labkit.idle")
    if first_launch:
        importlib.import_module("labkit.engines.standby").ahead_of_the_first_launch()
    idle.wait()
    for module in ("plotly.graph_objects", "ipywidgets", "matplotlib.backends.backend_agg", "PIL"):
        importlib.import_module(module)
    sys.modules["plotly.graph_objects"].FigureWidget  # noqa: B018 - imported when it is first asked for


if "ipykernel" in sys.modules:  # a notebook's kernel, not a rank
    # In full, before any thread may draw: Plotly looks for pandas.Series in a pandas that is half imported, and fails.
    importlib.import_module("pandas")
    # Asked now, while the cell that imports labkit runs: whether it may ask for input tells who runs it.
    _reader = importlib.import_module("labkit.notebook").has_a_reader()
    threading.Thread(target=_get_ahead, args=(_reader,), name="labkit-ahead", daemon=True).start()
