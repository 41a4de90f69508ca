"""The public call: take runs as they are, launch functions one after the other, and put all side by side."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from labkit.comparison.accelerator import GFLOPS
from labkit.comparison.comparison import Comparison
from labkit.comparison.measuring import measure
from labkit.engines.arguments import check_first_parameter, check_world_size, naming
from labkit.launcher import launch
from labkit.protocol.pickling import name_of
from labkit.protocol.text import printable
from labkit.run import Run, WorkerFailed
from labkit.session.session import Session
from labkit.ui import kernel, summary


def compare(
    runs: Mapping[str, Run | Callable[..., Any]] | None = None,
    name: str = "loss",
    /,
    *,
    world_size: int | Mapping[str, int] | None = None,
    on: Any = None,
    timeout_s: float | None = None,
    device_gflops: float = GFLOPS,
    **named: Any,
) -> Comparison:
    """Put ways to train side by side: `compare(dp=run1, ddp=run2)`, or `compare(dp=train1, ddp=train2, steps=20)`.

    Functions are training functions in plain PyTorch, as `labkit.launch` takes them. They are launched one after the
    other on reserved ranks, measured from their 4th to their 13th step, and drawn while they run. One that returns its
    weights, `model.state_dict()`, or in a pipeline its own part of them by the whole network's names, is told how far
    they are from the first one's; shards of FSDP2 are put together, and buffers are told apart from weights.

    Step times on shared cores say how ranks fight for them, so these steps are taken twice: as they are, and on
    *simulated devices*, a device for each rank, by the clock (`labkit.comparison.accelerator`). With a GPU for each
    rank times are real; where there are fewer GPUs than any of the functions has ranks, all compute on the CPU.

    Args:
        runs: by title, runs or functions, where titles are no Python names: `compare({"one process": run})`.
        name: what was logged, to draw and to tabulate.
        world_size: ranks of each function, or by title; by default one per GPU, or 2 without GPUs.
        on: a `labkit.Session` to launch on; by default one is made, and closed.
        timeout_s: end a run when no rank has logged, printed or returned anything for so many seconds.
        device_gflops: speed of a simulated device.
        named: runs and functions by title; everything else, classes included, is passed on to each function.

    Returns a `Comparison`, which shows itself in a cell: with a picker where a person watches, else as four pictures
    and a table.

    Raises TypeError for something that is neither run nor function, or a function that cannot be called so;
    ValueError if there is nothing to compare or if no run has logged `name`; WorkerFailed, once all have run, if one
    has failed.
    """
    with naming("bad_argument"):
        if runs is not None and not isinstance(runs, Mapping):
            raise TypeError(
                "compare() takes runs or functions by title: a mapping of title to run, such as {'DDP': run}, "
                f"or names, ddp=run; got {type(runs).__name__}"
            )
        given = dict(runs or {})
        for title, each in given.items():
            if not isinstance(each, Run) and not _is_function(each):
                raise TypeError(f"compare() takes runs and functions, got a {type(each).__name__} for {title!r}")
        given |= {title: each for title, each in named.items() if isinstance(each, Run) or _is_function(each)}
        parameters = {key: value for key, value in named.items() if key not in given}
        given = {printable(title) if isinstance(title, str) else title: each for title, each in given.items()}
        functions = {title: each for title, each in given.items() if not isinstance(each, Run)}
        if not given:
            raise ValueError("compare() needs at least one run or function, got none")
        if parameters and not functions:
            raise ValueError(f"compare() got {', '.join(parameters)}, but no function to pass that to")
        for title, function in functions.items():
            _check_call(title, function, parameters)
        done = {title: each for title, each in given.items() if isinstance(each, Run)}
        if not functions:
            _check_logged(done, name)
        ranks = _ranks_of(functions, world_size)
    comparison = Comparison(done, name, to_come=functions)
    comparison.gflops = device_gflops
    if not functions:
        return comparison
    session = on if on is not None else Session(max(ranks.values()))

    def launching(title: str) -> Callable[[], Run]:
        call = (measure, functions[title], parameters, device_gflops)
        options: dict[str, Any] = {"on": session, "world_size": ranks[title], "name": title, "timeout_s": timeout_s}
        return lambda: launch(*call, **options, live=False, wait=False)

    try:
        grow(comparison, {title: launching(title) for title in functions})
    finally:
        if on is None:
            session.close()
    return comparison


def grow(comparison: Comparison, launches: Mapping[str, Callable[[], Run]]) -> None:
    """Launch one after the other, and show the comparison while it grows. An interrupt stops the run, and the rest.

    Raises WorkerFailed at the end if a run has failed: the first of them.
    """
    is_interactive = kernel.is_interactive()
    if is_interactive:
        comparison._ipython_display_()
    failed: list[WorkerFailed] = []
    for title, start in launches.items():
        run = start()
        comparison.runs = {**comparison.runs, title: run}  # another dict: the view may be going through this one
        try:
            run.wait()
        except WorkerFailed as error:
            failed.append(error)
        if not is_interactive:
            print(summary.line(run), flush=True)
            if kernel.has_kernel() and len(comparison.runs) == 1:
                comparison.show_curves()
        if run.status == "stopped":
            comparison.titles = list(comparison.runs)
            break
    if kernel.has_kernel() and not is_interactive:
        comparison._ipython_display_()
    elif not kernel.has_kernel():
        print(comparison.table().data.to_string())  # type: ignore[attr-defined]
    if failed:
        raise failed[0]


def _is_function(thing: Any) -> bool:
    return callable(thing) and not inspect.isclass(thing)


def _check_call(title: str, function: Callable[..., Any], parameters: dict[str, Any]) -> None:
    check_first_parameter(name_of(function), inspect.signature(function))
    try:
        inspect.signature(function).bind(object(), **parameters)
    except TypeError as error:
        given = ", ".join(["worker", *(f"{key}=…" for key in parameters)])
        raise TypeError(
            f"{title}: {name_of(function)}{inspect.signature(function)} cannot be called as "
            f"{name_of(function)}({given}): {error}. Every function gets the worker, and all that compare() is given "
            "beside runs and functions"
        ) from None


def _check_logged(runs: Mapping[str, Run], name: str) -> None:
    if not any(name in run.recorded.names for run in runs.values()):
        logged = sorted({logged for run in runs.values() for logged in run.recorded.names})
        raise ValueError(f"no run has logged {name!r}; logged were: {', '.join(logged) or 'nothing'}")


def _ranks_of(functions: Mapping[str, Any], world_size: Any) -> dict[str, int]:
    """Return the number of ranks of each function."""
    from labkit.rank.device import usable_gpus

    by_title = dict(world_size) if isinstance(world_size, Mapping) else {}
    if unknown := by_title.keys() - functions.keys():
        raise ValueError(
            f"world_size has ranks for {', '.join(sorted(unknown))}; functions are: {', '.join(functions) or 'none'}"
        )
    default = None if isinstance(world_size, Mapping) else world_size
    gpus = usable_gpus()
    return {title: check_world_size(by_title.get(title, default), gpus) for title in functions}
