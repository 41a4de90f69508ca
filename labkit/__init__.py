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
            │  follower → state (pure) → history, output; diagnosis
            ▼
       ui/       live widgets | still picture → charts

These are the core. Each room imports only those below it in this list, and none of the wings:

    launcher     the public call: puts engine, monitor and ui together
    ui           what a person sees; `kernel` is all that asks IPython
    monitor      what is known of a run: `run` (the reader's object), `follower` (the thread behind it), `state`,
                 `history`, `output`; `diagnosis` says why it failed; `companion` is what a wing puts beside a run
    engines      where ranks come from: `local`, by `spawn`
    rank         what a rank's process does: `main` is its entry, `worker` what the reader's function gets
    protocol     what crosses between the two: `job` and `pickling` there, `events` back; `system` is either's,
                 `pages` names the page of an error, and `wings` those that take part in a run, and how

The wings can be deleted one by one. These take part in every run that is theirs:

    arguments    what `launch` cannot do, refused before a process exists
    reruns       a cell that is run again stops what it launched before
    ahead        what the first launch and chart need, got while the reader reads
    standby      ranks that are spawned ahead, so that a launch does not wait for them
    root_cause   which rank failed first, where within milliseconds all of them fail
    stacks       where every rank stands (`run.stacks()`), and what a run that hangs is ended with
    collectives  in which collective ranks missed each other, by what PyTorch's flight recorder has
    variables    what variables were when a rank failed
    name_service no name server is asked when ranks connect by address
    as_script    what code of scripts needs in a rank: a DataLoader, `init_process_group`, an optimizer without compiler
    stopping     a stop is obeyed at a step that all ranks reach, in a grace by the length of their steps
    in_vain      a stop does not wait for ranks that wait for what cannot come
    not_finite   the first NaN or Inf: said in every view, and marked in the chart
    many         more ranks than can be drawn one by one: a band, and who stands apart
    debugging    `breakpoint()` and `input()` in a rank, asked under the cell
    tracing      what every rank did when (`launch(…, trace=5)`): one timeline, who is late, a file for Perfetto
    tracking     a run's curves in TensorBoard, MLflow, Weights & Biases, trackio (`log_to`)
    report       lines of text where nobody watches, and what stays of a run that is over
    png          charts as pictures, where nobody watches

The others:

    session      reserved ranks, for one launched function after another, and for cells (`%%ranks`)
    cluster      ranks that SLURM or torchrun starts; they and the notebook speak through a run directory
    ray_cluster  ranks on Ray, for machines without SLURM or a shared folder: each has a run directory of its own
    checkpoint   save and resume on the ranks, bit for bit
    strategies   the ways to be parallel, one a module; `benchmark` and `profiling` say what a step of each costs,
                 `scaling` predicts other numbers of ranks, and whether they can hold it
    comparing    runs, or functions that it launches, side by side (`compare`), on devices of their own by the clock
    charts       bars, parts laid end to end, time lines, for whatever was measured
    exporting    a cell's function as a folder that needs no notebook
    transformer  one GPT through every way to be parallel: a strategy a module, and the model itself
    integrations what Accelerate, Lightning and Transformers log, as curves
    lessons      data, models and pictures of the course, and where its reader is
    here         one rank in the notebook's own process, for a debugger
    exercises    what learners write, tried on ranks kept for it (`check`), one a module; and `predict`
    pitfalls     the museum of mistakes of lessons 16a to 16f, one exhibit a module
    errors       what messages mean and what to do: a page of each kind, `help("labkit.errors.hang")`
    process_table  every process that labkit holds, with a button to end it

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
    from labkit import benchmark as benchmark
    from labkit import charts as charts
    from labkit import checkpoint as checkpoint
    from labkit import errors as errors
    from labkit import exercises as exercises
    from labkit import integrations as integrations
    from labkit import pitfalls as pitfalls
    from labkit import profiling as profiling
    from labkit import scaling as scaling
    from labkit import standby as standby
    from labkit import strategies as strategies
    from labkit import tracking as tracking
    from labkit import transformer as transformer
    from labkit.checkpoint import Checkpoint as Checkpoint
    from labkit.cluster.attaching import attach as attach
    from labkit.cluster.slurm import Slurm as Slurm
    from labkit.cluster.torchrun import Torchrun as Torchrun
    from labkit.comparing.comparison import Comparison as Comparison
    from labkit.comparing.launching import compare as compare
    from labkit.comparing.sorting import sortable as sortable
    from labkit.exercises.checking import check as check
    from labkit.exercises.predicting import predict as predict
    from labkit.exporting.exporter import export as export
    from labkit.here import Here as Here
    from labkit.launcher import launch as launch
    from labkit.lessons import course as course
    from labkit.lessons import datasets as datasets
    from labkit.lessons import models as models
    from labkit.lessons import pictures as pictures
    from labkit.monitor.run import Run as Run
    from labkit.monitor.run import WorkerFailed as WorkerFailed
    from labkit.process_table import processes as processes
    from labkit.rank.worker import Stopped as Stopped
    from labkit.rank.worker import Worker as Worker
    from labkit.ray_cluster.ray_target import Ray as Ray
    from labkit.session.session import Session as Session
    from labkit.ui.present import show as show


__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "checkpoint",
    "Comparison": "comparing.comparison",
    "Here": "here",
    "Ray": "ray_cluster.ray_target",
    "Run": "monitor.run",
    "Session": "session.session",
    "Slurm": "cluster.slurm",
    "Stopped": "rank.worker",
    "Torchrun": "cluster.torchrun",
    "Worker": "rank.worker",
    "WorkerFailed": "monitor.run",
    "attach": "cluster.attaching",
    "check": "exercises.checking",
    "compare": "comparing.launching",
    "export": "exporting.exporter",
    "launch": "launcher",
    "predict": "exercises.predicting",
    "processes": "process_table",
    "show": "ui.present",
    "sortable": "comparing.sorting",
}
"""The module of each public name …"""

_MODULES = {
    **{name: name for name in ("benchmark", "charts", "checkpoint", "errors", "exercises", "integrations", "pitfalls")},
    **{name: name for name in ("profiling", "scaling", "standby", "strategies", "tracking", "transformer")},
    **{name: f"lessons.{name}" for name in ("course", "datasets", "models", "pictures")},
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
    if importlib.util.find_spec("labkit.ahead"):
        importlib.import_module("labkit.ahead").begin()
