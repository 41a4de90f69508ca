"""Runs side by side: one table and curves over each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from labkit.monitor.history import SAMPLES
from labkit.monitor.run import Run
from labkit.ui import kernel
from labkit.ui.tables import sortable

if TYPE_CHECKING:
    import pandas as pd

    from labkit.ui.charts import Chart


@runtime_checkable
class Measurement(Protocol):
    """A rank's result that says more of its run than the run itself knows: `labkit.benchmark.run_strategy`'s, say."""

    marks: Sequence[tuple[str, float, float]]
    """(what, start_s, end_s) of one step on this rank."""

    @staticmethod
    def columns(ranks: Sequence[Any], first: Sequence[Any]) -> dict[str, Any]:
        """Return further columns of a run's row, from all its ranks' results and those of the first run measured.

        Named "<part> ms" for the parts of a step, "<kind> KiB" for what a rank holds.
        """


def compare(runs: Mapping[str, Run], name: str = "loss") -> Comparison:
    """Put runs side by side: `compare({"one process": run, "DDP": run2})`.

    Returns a `Comparison`, which shows itself in a cell: the mean over ranks of `name` for every run, and a table that
    a click on a heading sorts.

    Raises TypeError for something that is no run, ValueError if there is none or if none has logged `name`.
    """
    if not isinstance(runs, Mapping):
        raise TypeError(f"compare() takes a mapping of title to run, such as {{'DDP': run}}; got {type(runs).__name__}")
    if not runs:
        raise ValueError("compare() needs at least one run, got none")
    for title, run in runs.items():
        if not isinstance(run, Run):
            raise TypeError(f"compare() takes runs, got a {type(run).__name__} for {title!r}")
    if not any(name in run.recorded.names for run in runs.values()):
        logged = sorted({logged for run in runs.values() for logged in run.recorded.names})
        raise ValueError(f"no run has logged {name!r}; logged were: {', '.join(logged) or 'nothing'}")
    return Comparison(runs, name)


class Comparison:
    """Several runs side by side."""

    def __init__(self, runs: Mapping[str, Run], name: str) -> None:
        self.runs = dict(runs)
        self._name = name

    def frame(self) -> pd.DataFrame:
        """Return the table: a row per run, in the order given.

        Columns: `ranks`; `status`; `final <name>`, the mean over ranks of the last value logged; `accuracy`, likewise,
        if any run has logged it; `seconds` from launch to end; `samples_per_s` over all ranks, from the first log call
        to the last (NaN unless `samples` was logged); `peak_mib`, the greatest peak memory of a rank, in MiB, on the
        host or, for ranks with a GPU, allocated on it.

        For runs of `labkit.benchmark.run_strategy` also what `labkit.benchmark.Measured.columns` says.
        """
        import pandas as pd

        rows = {title: self._row(run) | self._cost(run) for title, run in self.runs.items()}
        table = pd.DataFrame.from_dict(rows, orient="index")
        return table.drop(columns="accuracy") if table["accuracy"].isna().all() else table

    def _row(self, run: Run) -> dict[str, Any]:
        progress = [run.progress(rank)[0] for rank in range(run.world_size)]

        def last(name: str) -> float:
            values = [p.last[name] for p in progress if name in p.last]
            return float(np.mean(values)) if values else float("nan")

        device = max(run.peak_device_bytes)
        return {
            "ranks": run.world_size,
            "status": run.status,
            f"final {self._name}": last(self._name),
            "accuracy": last("accuracy"),
            "seconds": run.elapsed_s,
            "samples_per_s": samples_per_s(run),
            "peak_mib": (device or max(run.peak_bytes)) / 2**20,
        }

    def _cost(self, run: Run) -> dict[str, Any]:
        ranks = _measured(run)
        if not ranks:
            return {}
        first = next(filter(None, map(_measured, self.runs.values())))
        return type(ranks[0]).columns(ranks, first)

    def _parts(self, unit: str, without: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return, for each run, what the columns in this unit say, by what they are of."""
        table = self.frame()
        parts = [c.removesuffix(f" {unit}") for c in map(str, table) if c.endswith(f" {unit}")]
        rows = {str(title): {p: float(row[f"{p} {unit}"]) for p in parts} for title, row in table.iterrows()}
        return {
            title: {part: value for part, value in row.items() if part not in without}
            for title, row in rows.items()
            if not all(map(np.isnan, row.values()))
        }

    def steps(self) -> Chart:
        """Draw what a step's time is made of, the mean over ranks. For runs of `labkit.benchmark.run_strategy`."""
        from labkit.ui import charts

        return charts.stacked(self._parts("ms", without=["step"]), "milliseconds", "one step: mean over ranks")

    def memory(self) -> Chart:
        """Draw what a rank holds: the greatest over ranks of each part. For runs of `labkit.benchmark.run_strategy`."""
        from labkit.ui import charts

        return charts.stacked(
            self._parts("KiB", without=["sent", "formula"]), "KiB", "memory of the rank that has most"
        )

    def gantt(self, title: str) -> Chart:
        """Draw what every rank of one run did when, in one step under the profiler."""
        from labkit.ui import charts

        rows = {f"rank {rank}": result.marks for rank, result in enumerate(_measured(self.runs[title]))}
        return charts.gantt(rows, f"{title}: one step")

    def figure(self) -> Chart:
        """Return the curves over each other."""
        from labkit.ui import charts

        histories = {title: run.recorded for title, run in self.runs.items()}
        return charts.overlaid(histories, self._name, title=f"{self._name}: mean over ranks")

    def _ipython_display_(self) -> None:
        kernel.display(self.figure())
        kernel.display(sortable(self.frame().style.format(precision=4)))


def _measured(run: Run) -> list[Any]:
    """Return the ranks' results if they are measurements; else none."""
    return run.results if all(isinstance(result, Measurement) for result in run.results) else []


def samples_per_s(run: Run) -> float:
    """Return samples per second over all ranks, from each rank's first log call to its last; NaN without `samples`."""
    history = run.history
    if SAMPLES not in history:
        return float("nan")
    per_rank = []
    for _, rows in history.dropna(subset=SAMPLES).groupby("rank"):
        span = rows["time_s"].iloc[-1] - rows["time_s"].iloc[0]
        per_rank.append(rows[SAMPLES].iloc[1:].sum() / span if span > 0 else float("nan"))
    return float(np.sum(per_rank))
