"""Training functions side by side: launched one after the other on the same ranks, and one table over their records.

A rank stands for a device: every rank, one process too, computes on `cores // most ranks` threads. What is counted
(operations, bytes) is equal from run to run; what the clock says is told only where it may be believed (`doubts`).
"""

from __future__ import annotations

import contextlib
import html
import inspect
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from labkit.comparison import differences
from labkit.comparison.curves import curves_apart, samples_per_s
from labkit.comparison.picker import Picker
from labkit.engines.arguments import check_first_parameter, check_world_size, naming, parameters_of
from labkit.launcher import launch
from labkit.protocol.packing import name_of
from labkit.protocol.text import printable, titled
from labkit.rank.worker import takes_worker
from labkit.run import Run, RunInterrupted, WorkerFailed
from labkit.session.session import Session
from labkit.steps.record import StepRecord, others_cores
from labkit.steps.watch import Plan
from labkit.system import host
from labkit.trace.trace import of_run, records_of
from labkit.ui import kernel, summary

if TYPE_CHECKING:
    import pandas as pd
    from pandas.io.formats.style import Styler

    from labkit.ui.charts import Chart

BUSY = 0.15
"""From which part of the cores that other programs use on times are doubted."""

HELD = ("parameters", "gradients", "optimizer", "activations", "buckets")
MIB = 2**20

LEFT_OUT = "Memory leaves out what FSDP2 gathers, and what non-reentrant recomputation keeps."

FORMS = {
    "step ms": "{:,.1f}",
    "speed-up": "{:.2f}",
    "computed ms": "{:,.1f}",
    "GFLOP": "{:,.3g}",
    "sent MiB": "{:,.2f}",
    "held MiB": "{:,.1f}",
    "seconds": "{:.1f}",
}


def compare(
    runs: Mapping[str, Run | Callable[..., Any]] | None = None,
    /,
    metric: str = "loss",
    *,
    world_size: int | Mapping[str, int] | None = None,
    on: Session | None = None,
    stall_s: float | None = None,
    live: bool = True,
    **named: Any,
) -> Comparison:
    """Put ways to train side by side: `compare(dp=run1, ddp=run2)`, or `compare(dp=train1, ddp=train2, steps=20)`.

    Functions are training functions in plain PyTorch, as `labkit.launch` takes them. They are launched one after the
    other on reserved ranks, and their steps are watched: from the 8th step on with a clock alone. One that returns its
    weights, `model.state_dict()`, or in a pipeline its own part of them by the whole network's names, is told how
    far they are from the first one's; shards are put together on the ranks, and buffers are told apart from weights.
    What every rank returns travels to the notebook: of a large model return it on rank 0 alone, unless it is sharded.

    One that fails does not cost the others: its row says why. `Comparison.add` runs another function, or an edited one.

    Args:
        runs: by title, runs or functions, where titles are no Python names: `compare({"one process": run})`. A run that
            was launched with `trace=2` is compared like a function.
        metric: what was logged, to draw and to tabulate: "loss", "accuracy" …
        world_size: ranks of each function, or by title; by default one per GPU, or 2 without GPUs.
        on: a `labkit.Session` to launch on; by default one is made, and closed.
        stall_s: end a run when no rank has logged, printed or returned anything for so many seconds.
        live: show the comparison while it grows; else only when it is the last expression of a cell.
        named: runs and functions by title; everything else, classes included, is passed on to each function.

    Returns a `Comparison`, which shows itself in a cell.

    Raises TypeError for something that is neither run nor function, or a function that cannot be called so;
    ValueError if there is nothing to compare or if no run has logged `metric`.
    """
    with naming("bad_argument"):
        given, parameters = _split(runs, named)
        _check_own(given, metric=metric, world_size=world_size, on=on, stall_s=stall_s, live=live)
        if parameters and all(isinstance(each, Run) for each in given.values()):
            raise ValueError(f"compare() got {', '.join(parameters)}, but no function to pass that to")
        _check_logged(given, metric)
    return Comparison(metric, on, stall_s).add(runs, world_size=world_size, live=live, **named)


class Comparison:
    """Several runs side by side. Made by `labkit.compare`; shows itself, with boxes to tick where somebody watches.

    The first run is the one that the others are compared with. Pictures and tables take the `titles` of some runs, or
    their slugs (`one_process` for "one process"); by default all.
    """

    def __init__(self, metric: str = "loss", on: Session | None = None, stall_s: float | None = None) -> None:
        self.runs: dict[str, Run] = {}
        """By title; while functions are being launched, those that have begun."""
        self.titles: list[str] = []
        """Of all runs, those to come included."""
        self._metric, self._on, self._stall_s = metric, on, stall_s
        self._parameters: dict[str, Any] = {}
        self._ranks: dict[str, int] = {}
        self._records: dict[str, tuple[Run, list[StepRecord]]] = {}
        self._apart: dict[str, tuple[Run, Run, dict[str, Any]]] = {}
        self._shown_in: kernel.Execution | None = None

    def add(
        self,
        functions: Mapping[str, Run | Callable[..., Any]] | None = None,
        /,
        *,
        world_size: int | Mapping[str, int] | None = None,
        live: bool = True,
        **named: Any,
    ) -> Comparison:
        """Launch further functions, and show them beside the runs that are there: `comparison.add(mine=mine)`.

        An earlier run with the same title is replaced, so that a cell can be edited and run again.

        Args:
            functions: by title, where titles are no Python names; runs, too.
            world_size: ranks of each, or by title; by default as many as an earlier one with its title had, or else as
                any of the functions had most.
            live: show the comparison while they run; else only when it is the last expression of a cell.
            named: functions by title; everything else is passed to them in place of what the others were given.

        Returns the comparison itself. Raises as `labkit.compare` does.
        """
        with naming("bad_argument"):
            given, parameters = _split(functions, named)
            parameters = {**self._parameters, **parameters}
            launched = {title: each for title, each in given.items() if not isinstance(each, Run)}
            for title, function in launched.items():
                _check_call(title, function, parameters)
            if world_size is None and self._ranks:
                world_size = {title: self._ranks.get(title, max(self._ranks.values())) for title in launched}
            ranks = _ranks_of(launched, world_size)
        self._parameters, self._ranks = parameters, {**self._ranks, **ranks}
        self.titles = list(dict.fromkeys([*self.titles, *given]))
        self._put({title: each for title, each in given.items() if isinstance(each, Run)}, launched)
        if launched:
            self._launch(launched, live)
        return self

    def _put(self, runs: Mapping[str, Run], gone: Any = ()) -> None:
        # Another dict: the picker may be going through this one.
        found = {**{title: run for title, run in self.runs.items() if title not in gone}, **runs}
        self.runs = {title: found[title] for title in self.titles if title in found}

    def _launch(self, functions: Mapping[str, Callable[..., Any]], live: bool) -> None:
        """Launch one after the other. An interrupt stops the run, and the rest, and is raised at the end.

        While a function runs its curves alone are drawn, once a second: more would be another program beside the steps
        that are timed.
        """
        picker = Picker(self) if live and kernel.is_interactive() else None
        self._shown_in = kernel.this_execution() if picker is not None else self._shown_in
        plan = Plan(threads=max(1, host.cores() // max(self._ranks.values())), gathers=True)
        interrupted: RunInterrupted | None = None
        needed = Session(max(self._ranks[title] for title in functions)) if self._on is None else self._on
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: setattr(self, "titles", list(self.runs)))  # nothing is to come any more
            if self._on is None:
                stack.enter_context(needed)
            for title, function in functions.items():
                options: dict[str, Any] = {"on": needed, "world_size": self._ranks[title], "stall_s": self._stall_s}
                options |= {"kwargs": self._parameters, "trace": plan, "name": title, "live": False, "wait": False}
                run = launch(function, **options)
                self._put({title: run})
                try:
                    with contextlib.nullcontext() if picker is None else picker.showing(run):
                        run.wait()
                except RunInterrupted as error:
                    interrupted = error
                except WorkerFailed:
                    pass  # its row says why
                if picker is not None:
                    picker.draw()
                elif live:
                    print(summary.line(run), flush=True)
                if run.status == "stopped":
                    break
        if live and picker is None and kernel.has_kernel():
            self._ipython_display_()
        elif live and picker is None:
            print(self.table().data.to_string())  # type: ignore[attr-defined]
        if interrupted is not None:
            raise interrupted

    def records(self, title: str) -> list[StepRecord]:
        """Return what the ranks of a run have recorded: nothing of one that was launched without `trace=`."""
        run = self.runs[titled(title, self.titles)]
        known = self._records.get(title)
        if known is None or known[0] is not run:
            known = run, records_of(run)
            if run.over.is_set():
                self._records[title] = known
        return known[1]

    # Numbers

    def frame(self, titles: Sequence[str] | None = None) -> pd.DataFrame:
        """Return all numbers, a row per run; NaN where there is none.

        Columns of every run: `ranks`; `status`; `error`; `final <metric>`, the mean over ranks of the last value
        logged; `accuracy`, likewise, if any run has logged it; `<metric> off by`, the greatest difference of the mean
        curve to the first run's; `seconds` from launch to end; `samples_per_s` over all ranks, if any run has logged
        `samples`; `peak_mib`, the greatest peak memory of a rank.

        Of those that were watched: `step ms`, the median of the timed steps, `step ms low` and `step ms high`, their
        10th and 90th percentile; `speed-up` over the first run, unless there are `doubts`; `computed ms`, the
        processor's time of a rank per step; `GFLOP` of a rank and step; `sent MiB` per rank and step, as textbooks have
        each call; `parameters MiB` and the like, the most of each kind on the rank that has most; `difference`, the
        greatest of any weight to the first run's, as a part of that weight's size; `weights`, the same as text.
        """
        import pandas as pd

        return pd.DataFrame.from_dict({title: self._row(title) for title in self._chosen(titles)}, orient="index")

    def _row(self, title: str) -> dict[str, Any]:
        run, first = self.runs[title], next(iter(self.runs.values()))
        progress = [run.progress(rank)[0] for rank in range(run.world_size)]
        final = [p.last[self._metric] for p in progress if self._metric in p.last]
        logged = {name for each in self.runs.values() for name in each.recorded.names}
        accuracy = [p.last["accuracy"] for p in progress if "accuracy" in p.last]
        timed_s = [second for record in self.records(title) for second in record.timed_s]
        return {
            "ranks": run.world_size,
            "status": run.status,
            "error": "" if run.error is None else printable(str(run.error).splitlines()[0]),
            f"final {self._metric}": float(np.mean(final)) if final else math.nan,
            **({"accuracy": float(np.mean(accuracy)) if accuracy else math.nan} if "accuracy" in logged else {}),
            f"{self._metric} off by": curves_apart(first.recorded, run.recorded, self._metric)[0],
            "seconds": run.elapsed_s,
            **({"samples_per_s": samples_per_s(run, timed_s)} if "samples" in logged else {}),
            "peak_mib": (max(run.peak_device_bytes) or max(run.peak_bytes)) / MIB,
            **(self._measured_row(title) if self._measured() else {}),
        }

    def _measured_row(self, title: str) -> dict[str, Any]:
        records, first = self.records(title), next(iter(self.runs))
        timed_s = [second for record in records for second in record.timed_s]
        low, middle, high = 1000 * np.quantile(timed_s, [0.1, 0.5, 0.9]) if timed_s else [math.nan] * 3
        first_s = [second for record in self.records(first) for second in record.timed_s]
        is_told = first_s and timed_s and not self.doubts([first, title])
        if len(records) < self.runs[title].world_size:  # a rank has told nothing
            records = []
        kinds = dict.fromkeys([*HELD, *(kind for record in records for kind in record.held)])
        held = {kind: differences.greatest(record.held.get(kind, math.nan) for record in records) for kind in kinds}
        return {
            "step ms": float(middle),
            "step ms low": float(low),
            "step ms high": float(high),
            "speed-up": 1000 * statistics.median(first_s) / float(middle) if is_told else math.nan,
            "computed ms": 1000 * differences.greatest(record.computed_s for record in records),
            "GFLOP": differences.greatest(record.flops for record in records) / 1e9,
            "sent MiB": _sent_mib(records),
            **{f"{kind} MiB": size / MIB for kind, size in held.items()},
            **self._differences(title),
        }

    def _differences(self, title: str) -> dict[str, Any]:
        """Return how far the weights are from the first run's: once, as a comparison is drawn again and again."""
        run, first = self.runs[title], next(iter(self.runs.values()))
        known = self._apart.get(title)
        if known is None or known[:2] != (run, first):
            recorded = [*self.records(title), *self.records(next(iter(self.runs)))]
            buffers = frozenset().union(*(record.buffers for record in recorded))
            known = run, first, differences.columns(_weights(first), _weights(run), buffers)
            if run.over.is_set() and first.over.is_set():
                self._apart[title] = known
        return known[2]

    def doubts(self, titles: Sequence[str] | None = None) -> list[str]:
        """Say why times do not say what devices of the ranks' own would take. [] where they do, and on GPUs."""
        said, cores, threads = [], host.cores(), dict[int, str]()
        for title in self._measured(titles):
            records = self.records(title)
            if records[0].device == "cuda" or not any(record.timed_s for record in records):
                continue
            others = others_cores(records)
            if len(records) > cores:
                said.append(f"{title}: {len(records)} ranks share {cores} cores.")
            if math.isnan(others):
                said.append(f"{title}: steps were timed for too short a while to say whether other programs ran.")
            elif others > BUSY * cores:
                said.append(f"{title}: other programs used {others:.1f} of {cores} cores meanwhile.")
            threads.setdefault(records[0].threads, title)
        if len({self.records(title)[0].device for title in self._measured(titles)}) > 1:
            said.append("Some computed on GPUs, some on the CPU.")
        if len(threads) > 1:
            of = ", ".join(f"{title} on {count}" for count, title in threads.items())
            said.append(f"Ranks computed on other numbers of threads: {of}.")
        return said

    # Pictures

    def figure(self, titles: Sequence[str] | None = None) -> Chart:
        """Return the curves over each other."""
        from labkit.ui import charts

        # A run keeps its colour whichever others are drawn.
        chart = charts.overlaid(
            {title: run.recorded for title, run in self.runs.items()},
            self._metric,
            title=f"{self._metric}: mean over ranks",
        )
        chosen = self._chosen(titles)
        chart.data = [trace for trace in chart.data if trace.name in chosen]
        return chart

    def lanes(self, titles: Sequence[str] | None = None) -> Chart:
        """Draw what every rank did when, in one step: its own work, and its collectives."""
        from labkit.ui import charts

        rows: dict[str, list[tuple[str, float, float]]] = {}
        for title in self._measured(titles):
            lanes = of_run(self.runs[title]).lanes(steps=1)
            begun_s = min((a for marks in lanes.values() for _, a, _ in marks), default=0.0)
            for row, marks in lanes.items():
                if marks:  # one process has no collectives, and then needs no lane for them
                    rows[f"{title} · {row}"] = [(what, a - begun_s, b - begun_s) for what, a, b in marks]
        return charts.gantt(rows, "one step, rank by rank, under the profiler")

    def memory(self, titles: Sequence[str] | None = None) -> Chart:
        """Draw what each rank holds, the most of each kind in a step."""
        from labkit.ui import charts

        rows = {
            f"{title} · {record.rank}": {kind: record.held[kind] / MIB for kind in HELD if record.held.get(kind)}
            for title in self._measured(titles)
            for record in self.records(title)
        }
        return charts.stacked(rows, "MiB", "memory of every rank")

    def bytes(self, titles: Sequence[str] | None = None) -> Chart:
        """Draw what a rank sends in a step, the mean over ranks, as textbooks have each call."""
        from labkit.ui import charts

        sent = {title: _sent_mib(self.records(title)) for title in self._measured(titles)}
        return charts.bars(list(sent), list(sent.values()), "MiB per rank and step", "sent in a step")

    def pictures(self, titles: Sequence[str] | None = None) -> list[Chart]:
        """Return loss, lanes, memory and bytes; of runs that were not watched the loss alone."""
        drawn = [self.figure(titles)]
        return (
            [*drawn, self.lanes(titles), self.memory(titles), self.bytes(titles)] if self._measured(titles) else drawn
        )

    # The table that people read

    def table(self, titles: Sequence[str] | None = None) -> Styler:
        """Return the table to read: nine columns at most, and below it what must be known to read it.

        A cell is empty where nothing was logged or measured; a NaN that was logged is there as NaN.
        """
        frame, final = self.frame(titles), f"final {self._metric}"
        weights = f"weights, compared with {next(iter(self.runs), '')}"
        failed = frame["error"] != ""
        self._write(frame)
        if "GFLOP" in frame:
            frame["held MiB"] = frame[[f"{kind} MiB" for kind in HELD]].sum(axis=1, skipna=False)
            frame[weights] = frame["weights"].where(~failed, frame["status"] + ": " + frame["error"])
            frame = frame[["ranks", *(form for form in FORMS if form != "seconds"), final, weights]]
        else:
            frame["status"] = frame["status"].where(~failed, frame["status"] + ": " + frame["error"])
            frame = frame.drop(columns="error")
        numbers = [str(column) for column in frame if frame[column].dtype.kind == "f"]
        forms: Any = {**dict.fromkeys(numbers, "{:.4g}"), **{k: form for k, form in FORMS.items() if k in frame}}
        style = frame.style.format(forms, na_rep="", escape="html").format_index(escape="html")
        left: Any = [{"selector": "caption", "props": "caption-side:bottom; text-align:left"}]
        notes = "<br>".join(map(html.escape, self.notes(titles)))
        return style.set_caption(notes).set_table_styles(left, overwrite=False)

    def _write(self, frame: pd.DataFrame) -> None:
        """Write what was logged as text: NaN as such, and why there is no difference of curves."""
        logged = {f"final {self._metric}": self._metric, "accuracy": "accuracy"}
        for column in [column for column in logged if column in frame]:
            has = [logged[column] in self.runs[title].recorded.names for title in frame.index]
            values = [("NaN" if math.isnan(value) else f"{value:.4g}") for value in frame[column]]
            frame[column] = [value if is_there else "" for value, is_there in zip(values, has, strict=True)]
        first = next(iter(self.runs.values())) if self.runs else None
        apart = [curves_apart(first.recorded, self.runs[t].recorded, self._metric) for t in frame.index if first]
        frame[f"{self._metric} off by"] = [said or ("" if math.isnan(off) else f"{off:.2g}") for off, said in apart]

    def notes(self, titles: Sequence[str] | None = None) -> list[str]:
        """Say what must be known to read the table: `doubts`, what could not be seen, what memory leaves out."""
        measured = self._measured(titles)
        unknown = [f"{title}: {r.unknown}." for title in measured for r in self.records(title)[:1] if r.unknown]
        doubts = self.doubts(titles)
        why = [f"No speed-up: {doubts[0]}", *doubts[1:]] if doubts else []
        return [*why, *unknown, *([LEFT_OUT] if measured else [])]

    def save(self, path: str | os.PathLike[str], title: str = "") -> Path:
        """Write one page with the table and the pictures, which needs no network. All numbers: `frame().to_csv()`.

        Returns the path. Raises ValueError for another ending than .html.
        """
        import plotly.io

        path, title = Path(path), html.escape(title or ", ".join(self.runs))
        if path.suffix != ".html":
            raise ValueError(f"a comparison is saved as a page, page.html; got {path.name!r}")
        options: dict[str, Any] = {"full_html": False, "config": {"displaylogo": False}}
        drawn = [plotly.io.to_html(c, include_plotlyjs=not i, **options) for i, c in enumerate(self.pictures())]
        head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>'
        path.write_text("\n".join([head, self.table().to_html(), *drawn, "</html>"]), encoding="utf-8")
        return path

    def _chosen(self, titles: Sequence[str] | None) -> list[str]:
        chosen = self.runs if titles is None else {titled(title, self.titles) for title in titles}
        return [title for title in self.runs if title in chosen]

    def _measured(self, titles: Sequence[str] | None = None) -> list[str]:
        return [title for title in self._chosen(titles) if self.records(title)]

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.titles)})"

    def _ipython_display_(self) -> None:
        now = kernel.this_execution()
        if now is not None and self._shown_in == now:  # shown while it grew
            return
        self._shown_in = now
        if kernel.is_interactive():
            Picker(self).draw()
            return
        for each in [*self.pictures(), self.table()]:
            kernel.display(each)


def is_function(thing: Any) -> bool:
    """Whether something is launched, and not passed on: a function, and not a class."""
    return callable(thing) and not isinstance(thing, type)


def _sent_mib(records: Sequence[StepRecord]) -> float:
    return float(np.mean([record.sent() for record in records])) / MIB if records else math.nan


def _weights(run: Run) -> list[dict[str, Any]]:
    """Return the tensors by name among what each rank of a run has returned."""
    kept = [result if isinstance(result, Mapping) else {} for result in run.results]
    return [{str(name): t for name, t in each.items() if isinstance(t, torch.Tensor)} for each in kept]


# What is given


def _split(runs: Any, named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return runs and functions by title, and what is passed on to the functions."""
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
    if not given:
        raise ValueError("compare() needs at least one run or function, got none")
    parameters = {key: value for key, value in named.items() if key not in given}
    return {printable(str(title)): each for title, each in given.items()}, parameters


def _check_own(given: Mapping[str, Any], **own: Any) -> None:
    """Refuse arguments of compare() that a function has, too."""
    signature = inspect.signature(compare)
    kept = {name for name, value in own.items() if value != signature.parameters[name].default}
    for title, function in given.items():
        for name in kept.intersection(() if isinstance(function, Run) else parameters_of(function)):
            raise ValueError(
                f"{title} has a parameter called {name!r}, but compare() keeps {name}=… for itself and does not "
                "pass it on. Rename it in the function"
            )


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


def _check_logged(given: Mapping[str, Any], metric: str) -> None:
    if any(not isinstance(each, Run) or metric in each.recorded.names for each in given.values()):
        return
    logged = sorted({name for run in given.values() for name in run.recorded.names})
    raise ValueError(f"no run has logged {metric!r}; logged were: {', '.join(logged) or 'nothing'}")


def _ranks_of(functions: Mapping[str, Any], world_size: Any) -> dict[str, int]:
    """Return the number of ranks of each function."""
    by_title = dict(world_size) if isinstance(world_size, Mapping) else {}
    if unknown := by_title.keys() - functions.keys():
        raise ValueError(
            f"world_size has ranks for {', '.join(sorted(unknown))}; functions are: {', '.join(functions) or 'none'}"
        )
    default = None if isinstance(world_size, Mapping) else world_size
    return {title: check_world_size(by_title.get(title, default), torch.cuda.device_count()) for title in functions}
