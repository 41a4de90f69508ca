"""labkit: parallel PyTorch, live in your notebook.

    the notebook's kernel                               each rank (a process of its own)
    ─────────────────────                               ────────────────────────────────
    cell: run = labkit.launch(train, world_size=2)
            │ launcher      pickle the function by value
            ▼
       engines/  ── mp.spawn ─────────────────────────► rank/      signals, device, seeds, process group
            │                                             │        train(worker, …) → worker.log(loss=…)
            ▼                                             ▼
       monitor/  ◄─── protocol/events, by queue ◄──────── channels, log_batcher
            │         or by file
            │  follower → state (pure) → history, output
            ├─► failures/   who failed first, where ranks stand
            ▼
       ui/       live widgets | still picture → charts

These are the core. Each room imports only those below it in this list, and none of the wings:

    launcher     the public call: puts engine, monitor and ui together
    ui           what a person sees; `kernel` is all that asks IPython
    monitor      what is known of a run: `run` (the reader's object), `follower` (the thread behind it), `state`,
                 `history`, `output`, `results`; `companion` is what a plugin puts beside one
    failures     why a run failed or hangs, and in which words: `ledger`, `first_to_fail`, `missed`, `stacks`;
                 `pages` say what messages mean and what to do, one for each kind: `help("labkit.failures.pages.hang")`
    engines      where ranks come from: `local`, by `spawn` or from `standby`; `arguments` are checked before that
    rank         what a rank's process does: `main` is its entry, `worker` what the reader's function gets
    protocol     what crosses between the two: `job` and `pickling` there, `events` back; `system` is either's,
                 `pages` names the page of an error, and `plugins` asks those that take part in a run

The wings can be deleted one by one. Those in `plugins`, which lists them, take part in every run that is theirs: who
failed first, why a run hangs, `breakpoint()`, traces, trackers and more. The others:

    session      reserved ranks, for one launched function after another, and for cells (`%%ranks`)
    launchers    ranks that SLURM, torchrun or Ray starts; they and the notebook exchange files in a run directory
    checkpoint   save and resume on the ranks, bit for bit
    comparison   runs, or functions that it launches, side by side (`compare`), on devices of their own by the clock;
                 its `benchmark` says what a step of a `Strategy` costs, `scaling` predicts how long one takes on other
                 numbers of ranks
    profiling    what a rank does in a step, and what that costs; for comparisons and traces
    charts       bars, parts laid end to end, time lines, for whatever was measured
    exporting    a cell's function as a folder that needs no notebook
    trackers     a run's curves in TensorBoard, MLflow, Weights & Biases, trackio (`log_to`), and what Accelerate,
                 Lightning and Transformers log, as curves
    trace        what every rank did when (`launch(…, trace=5)`): one timeline, who is late, a file for Perfetto
    debugger     `breakpoint()` and `input()` in a rank, asked under the cell
    here         one rank in the notebook's own process, for a debugger
    on_ranks     what a rank has of your notebook: a table, `help("labkit.on_ranks")`
    process_table  every process that labkit holds, with a button to end it

What only the lessons use is the package `course` beside them; nothing here imports it.

Importing this package is cheap, because every rank does: Plotly and the widgets are imported when the notebook first
needs them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as` tells type checkers that a name is public
    from labkit import charts as charts
    from labkit import checkpoint as checkpoint
    from labkit import profiling as profiling
    from labkit import trackers as trackers
    from labkit.checkpoint import Checkpoint as Checkpoint
    from labkit.comparison import benchmark as benchmark
    from labkit.comparison import scaling as scaling
    from labkit.comparison.comparison import Comparison as Comparison
    from labkit.comparison.launching import compare as compare
    from labkit.comparison.strategy import Strategy as Strategy
    from labkit.engines import standby as standby
    from labkit.exporting.exporter import export as export
    from labkit.here import Here as Here
    from labkit.launcher import launch as launch
    from labkit.launchers.attaching import attach as attach
    from labkit.launchers.ray.target import Ray as Ray
    from labkit.launchers.slurm.target import Slurm as Slurm
    from labkit.launchers.torchrun import Torchrun as Torchrun
    from labkit.monitor.results import UnloadedResult as UnloadedResult
    from labkit.monitor.run import Run as Run
    from labkit.monitor.run import WorkerFailed as WorkerFailed
    from labkit.process_table import processes as processes
    from labkit.rank.worker import Stopped as Stopped
    from labkit.rank.worker import Worker as Worker
    from labkit.session.session import Session as Session
    from labkit.ui.present import show as show


__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "checkpoint",
    "Comparison": "comparison.comparison",
    "Here": "here",
    "Ray": "launchers.ray.target",
    "Run": "monitor.run",
    "Session": "session.session",
    "Slurm": "launchers.slurm.target",
    "Stopped": "rank.worker",
    "Strategy": "comparison.strategy",
    "Torchrun": "launchers.torchrun",
    "UnloadedResult": "monitor.results",
    "Worker": "rank.worker",
    "WorkerFailed": "monitor.run",
    "attach": "launchers.attaching",
    "compare": "comparison.launching",
    "export": "exporting.exporter",
    "launch": "launcher",
    "processes": "process_table",
    "show": "ui.present",
}
"""The module of each public name …"""

_MODULES = {
    **{name: name for name in ("charts", "checkpoint", "profiling", "trackers")},
    "benchmark": "comparison.benchmark",
    "scaling": "comparison.scaling",
    "standby": "engines.standby",
}
"""… and the public modules, whose names are shorter than their paths."""

__all__ = sorted([*_HOMES, *_MODULES])


def importing(package: str, homes: Mapping[str, str], modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports its public names when somebody first asks for them.

    `homes` says in which of its modules each name is; `modules` where those modules are that are public themselves.
    """

    def find(name: str) -> Any:
        if name not in homes and name not in modules:
            names = ", ".join(sorted([*homes, *modules]))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {names}")
        module = importlib.import_module(f"{package}.{modules.get(name) or homes[name]}")
        value = module if name in modules else getattr(module, name)
        vars(sys.modules[package])[name] = value
        return value

    return find


__getattr__ = importing(__name__, _HOMES, _MODULES)


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext labkit`: give the notebook the cell magic `%%ranks`."""
    importlib.import_module("labkit.session.magic").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext labkit`: end the ranks, and take the magic away."""
    importlib.import_module("labkit.session.magic").unload(shell)


if "ipykernel" in sys.modules:  # a notebook's kernel, not a rank
    # In full, before any thread may draw: Plotly looks for pandas.Series in a pandas that is half imported, and fails.
    importlib.import_module("pandas")
    if importlib.util.find_spec("labkit.plugins.ahead"):
        importlib.import_module("labkit.plugins.ahead").begin()
