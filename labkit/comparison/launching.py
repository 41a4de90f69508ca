"""The public call: take runs as they are, launch functions one after the other, and put all side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from labkit.comparison.comparison import Comparison, is_function
from labkit.comparison.measuring import measure
from labkit.comparison.reading import time_to_come
from labkit.comparison.replay import LAPTOP, Devices
from labkit.engines.arguments import check_first_parameter, check_world_size, naming, parameters_of
from labkit.launcher import launch
from labkit.protocol.pickling import name_of
from labkit.protocol.text import printable
from labkit.rank.worker import takes_worker
from labkit.run import Run, RunInterrupted, WorkerFailed
from labkit.session.session import Session
from labkit.ui import kernel, summary


def compare(
    runs: Mapping[str, Run | Callable[..., Any]] | None = None,
    /,
    metric: str = "loss",
    *,
    world_size: int | Mapping[str, int] | None = None,
    on: Any = None,
    stall_s: float | None = None,
    devices: Devices = LAPTOP,
    live: bool = True,
    **named: Any,
) -> Comparison:
    """Put ways to train side by side: `compare(dp=run1, ddp=run2)`, or `compare(dp=train1, ddp=train2, steps=20)`.

    Functions are training functions in plain PyTorch, as `labkit.launch` takes them. They are launched one after the
    other on reserved ranks, measured from their 4th to their 13th step, and drawn while they run. One that returns its
    weights, `model.state_dict()`, or in a pipeline its own part of them by the whole network's names, is told how far
    they are from the first one's; shards of FSDP2 are put together, and buffers are told apart from weights.

    Step times on shared cores say how ranks fight for them, so one step is also recorded, and computed for *ideal
    devices*, one for each rank, whose speed you can change (`labkit.comparison.replay`). With a GPU for each rank times
    are real; where there are fewer GPUs than any of the functions has ranks, all compute on the CPU.

    One that fails does not cost the others: its row says why. `Comparison.add` runs another function, or an edited one.

    Args:
        runs: by title, runs or functions, where titles are no Python names: `compare({"one process": run})`.
        metric: what was logged, to draw and to tabulate: "loss", "accuracy" …
        world_size: ranks of each function, or by title; by default one per GPU, or 2 without GPUs.
        on: a `labkit.Session` to launch on; by default one is made, and closed.
        stall_s: end a run when no rank has logged, printed or returned anything for so many seconds.
        live: show the comparison while it grows; else only when it is the last expression of a cell.
        devices: how fast ideal devices and their links are; `NAMED` in `labkit.comparison.replay` has real ones.
        named: runs and functions by title; everything else, classes included, is passed on to each function.

    Returns a `Comparison`, which shows itself in a cell: with a picker where a person watches, else as four pictures
    and a table.

    Raises TypeError for something that is neither run nor function, or a function that cannot be called so;
    ValueError if there is nothing to compare or if no run has logged `metric`.
    """
    with naming("bad_argument"):
        if runs is not None and not isinstance(runs, Mapping):
            raise TypeError(
                "compare() takes runs or functions by title: a mapping of title to run, such as {'DDP': run}, "
                f"or names, ddp=run; got {type(runs).__name__}"
            )
        given = dict(runs or {})
        for title, each in given.items():
            if not isinstance(each, Run) and not is_function(each):
                raise TypeError(f"compare() takes runs and functions, got a {type(each).__name__} for {title!r}")
        given |= {title: each for title, each in named.items() if isinstance(each, Run) or is_function(each)}
        parameters = {key: value for key, value in named.items() if key not in given}
        given = {printable(title) if isinstance(title, str) else title: each for title, each in given.items()}
        functions = {title: each for title, each in given.items() if not isinstance(each, Run)}
        if not given:
            raise ValueError("compare() needs at least one run or function, got none")
        theirs = {key: title for title, function in functions.items() for key in parameters_of(function)}
        _check_own(
            theirs,
            metric=metric != "loss",
            world_size=world_size is not None,
            on=on is not None,
            stall_s=stall_s is not None,
            devices=devices is not LAPTOP,
            live=live is not True,
        )
        if parameters and not functions:
            raise ValueError(f"compare() got {', '.join(parameters)}, but no function to pass that to")
        done = {title: each for title, each in given.items() if isinstance(each, Run)}
        if not functions:
            _check_logged(done, metric)
    comparison = Comparison(done, metric)
    comparison.devices = devices
    comparison.launching = Launching(parameters, world_size, on, stall_s)
    if functions:
        comparison.launching.launch(comparison, functions, live)
    return comparison


@dataclasses.dataclass
class Launching:
    """How the functions of a comparison are launched."""

    parameters: dict[str, Any]
    """What each function is called with, beside the worker."""
    world_size: int | Mapping[str, int] | None
    on: Any
    stall_s: float | None
    ranks: dict[str, int] = dataclasses.field(default_factory=dict)
    """How many each function had, by title."""

    def launch(self, comparison: Comparison, functions: Mapping[str, Callable[..., Any]], live: bool = True) -> None:
        """Launch functions, and put their runs in place of earlier ones with their titles."""
        with naming("bad_argument"):
            for title, function in functions.items():
                _check_call(title, function, self.parameters)
            ranks = _ranks_of(functions, self.world_size)
        comparison.runs = {title: run for title, run in comparison.runs.items() if title not in functions}
        comparison.titles = list(dict.fromkeys([*comparison.titles, *functions]))
        self.ranks |= ranks

        def launching(title: str, session: Any) -> Callable[[], Run]:
            options: dict[str, Any] = {"on": session, "stall_s": self.stall_s, "live": False, "wait": False}
            return lambda: launch(
                measure, functions[title], self.parameters, **options, world_size=ranks[title], name=title
            )

        with reserved(self.on, ranks.values()) as session:
            grow(comparison, {title: launching(title, session) for title in functions}, live)

    def changed(
        self,
        functions: Mapping[str, Any],
        world_size: int | Mapping[str, int] | None,
        parameters: Mapping[str, Any],
    ) -> Launching:
        """Return how further functions are launched: with as many ranks as an earlier one with that title, or most."""
        if world_size is None and self.ranks:
            world_size = {title: self.ranks.get(title, max(self.ranks.values())) for title in functions}
        return dataclasses.replace(self, parameters={**self.parameters, **parameters}, world_size=world_size)


def reserved(on: Any, ranks: Iterable[int]) -> contextlib.AbstractContextManager[Any]:
    """Return the session to launch on: the one that is there, or, by default, one for the while, with enough ranks."""
    return Session(max(ranks)) if on is None else contextlib.nullcontext(on)


def grow(comparison: Comparison, launches: Mapping[str, Callable[[], Run]], live: bool = True) -> None:
    """Launch one after the other, and show the comparison while it grows if it is live.

    An interrupt stops the run, and the rest, and is raised at the end. A run that fails is kept: its row says why.
    """
    is_interactive = kernel.is_interactive() and live
    if is_interactive:
        comparison._ipython_display_()
    order = list(comparison.titles)
    interrupted: RunInterrupted | None = None
    for title, start in launches.items():
        run = start()
        runs = {**comparison.runs, title: run}  # another dict: the view may be going through this one
        comparison.runs = {each: runs[each] for each in order if each in runs}
        try:
            run.wait()
        except RunInterrupted as error:
            interrupted = error
        except WorkerFailed:
            pass  # its row says why
        if live and not is_interactive:
            missing = [each for each in comparison.titles if each not in comparison.runs]
            to_come = time_to_come(list(comparison.runs.values()), missing)
            print(summary.line(run), *filter(None, [to_come]), sep="; ", flush=True)
            if kernel.has_kernel() and len(comparison.runs) == 1:
                comparison.show_curves()
        if run.status == "stopped":
            comparison.titles = list(comparison.runs)
            break
    if live:
        _show_all(comparison, is_interactive)
    if interrupted is not None:
        raise interrupted


def _show_all(comparison: Comparison, is_interactive: bool) -> None:
    if kernel.has_kernel() and not is_interactive:
        comparison._ipython_display_()
    elif not kernel.has_kernel():
        print(comparison.table().data.to_string())  # type: ignore[attr-defined]


def _check_call(title: str, function: Callable[..., Any], parameters: dict[str, Any]) -> None:
    check_first_parameter(name_of(function), inspect.signature(function))
    try:
        inspect.signature(function).bind(*([None] if takes_worker(function, (), parameters) else []), **parameters)
    except TypeError as error:
        given = ", ".join(["worker", *(f"{key}=…" for key in parameters)])
        raise TypeError(
            f"{title}: {name_of(function)}{inspect.signature(function)} cannot be called as "
            f"{name_of(function)}({given}): {error}. Every function gets the worker, and all that compare() is given "
            "beside runs and functions"
        ) from None


def _check_own(theirs: Mapping[str, str], **is_given: bool) -> None:
    """Refuse arguments of compare() that a function has, too; `theirs` are titles by parameter."""
    for name, given in is_given.items():
        if given and name in theirs:
            raise ValueError(
                f"{theirs[name]} has a parameter called {name!r}, but compare() keeps {name}=… for itself and does not "
                "pass it on. Rename it in the function"
            )


def _check_logged(runs: Mapping[str, Run], metric: str) -> None:
    if not any(metric in run.recorded.names for run in runs.values()):
        logged = sorted({logged for run in runs.values() for logged in run.recorded.names})
        raise ValueError(f"no run has logged {metric!r}; logged were: {', '.join(logged) or 'nothing'}")


def _ranks_of(functions: Mapping[str, Any], world_size: Any) -> dict[str, int]:
    """Return the number of ranks of each function."""
    by_title = dict(world_size) if isinstance(world_size, Mapping) else {}
    if unknown := by_title.keys() - functions.keys():
        raise ValueError(
            f"world_size has ranks for {', '.join(sorted(unknown))}; functions are: {', '.join(functions) or 'none'}"
        )
    default = None if isinstance(world_size, Mapping) else world_size
    import torch

    gpus = torch.cuda.device_count()
    return {title: check_world_size(by_title.get(title, default), gpus) for title in functions}
