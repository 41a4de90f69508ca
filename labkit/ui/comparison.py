"""Runs side by side: one table and curves over each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.monitor.history import SAMPLES

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from labkit.monitor.run import Run
    from labkit.ui.charts import Chart

Measured = Any


def compare(runs: Mapping[str, Run], name: str = "loss") -> Comparison:
    """Put runs side by side: `compare({"one process": run, "DDP": run2})`.

    Gives a `Comparison`, which shows itself in a cell: the mean over ranks of `name` for every run, and a table that a
    click on a heading sorts.

    Raises TypeError for something that is no run, ValueError if there is none or if none has logged `name`.
    """
    from labkit.monitor.run import Run

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
        """Give the table: a row per run, in the order given.

        Columns: `ranks`; `status`; `final <name>`, the mean over ranks of the last value logged; `accuracy`, likewise,
        if any run has logged it; `seconds` from launch to end; `samples_per_s` over all ranks, from the first log call
        to the last (NaN unless `samples` was logged); `peak_mib`, the greatest peak memory of a rank, in MiB, on the
        host or, for ranks with a GPU, allocated on it.

        For runs of `labkit.benchmark.run_strategy` also: `difference`, the greatest of a weight to the first run's, and
        whether the strategy claims to be `exact`; milliseconds of a step and of its parts, the mean over ranks;
        KiB sent per rank and step, counted and by the formula, means over ranks; KiB of parameters, gradients,
        optimizer state and activations on the rank that has most of them.
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
        mean_ms = {f"{part} ms": 1000 * float(np.mean([r.parts_s[part] for r in ranks])) for part in ranks[0].parts_s}
        return {
            "difference": difference(whole_weights(first), whole_weights(ranks)),
            "exact": ranks[0].exact,
            "step ms": sum(mean_ms.values()),
            **mean_ms,
            "sent KiB": float(np.mean([r.bytes_sent for r in ranks])) / 1024,
            "formula KiB": float(np.mean([r.bytes_expected for r in ranks])) / 1024,
            **{f"{what} KiB": size for what, size in _memory_kib(ranks).items()},
        }

    def steps(self) -> Chart:
        """Draw what a step's time is made of, the mean over ranks. For runs of `labkit.benchmark.run_strategy`."""
        from labkit.ui import charts

        rows = {
            title: {part: 1000 * float(np.mean([r.parts_s[part] for r in ranks])) for part in ranks[0].parts_s}
            for title, run in self.runs.items()
            if (ranks := _measured(run))
        }
        return charts.stacked(rows, "milliseconds", "one step: mean over ranks")

    def memory(self) -> Chart:
        """Draw what a rank holds: the greatest over ranks of each part. For runs of `labkit.benchmark.run_strategy`."""
        from labkit.ui import charts

        rows = {title: _memory_kib(ranks) for title, run in self.runs.items() if (ranks := _measured(run))}
        return charts.stacked(rows, "KiB", "memory of the rank that has most")

    def gantt(self, title: str) -> Chart:
        """Draw what every rank of one run did when, in one step under the profiler."""
        from labkit.ui import charts

        rows = {f"rank {rank}": measured.marks for rank, measured in enumerate(_measured(self.runs[title]))}
        return charts.gantt(rows, f"{title}: one step")

    def figure(self) -> Chart:
        """Give the curves over each other."""
        from labkit.ui import charts

        histories = {title: run.recorded for title, run in self.runs.items()}
        return charts.overlaid(histories, self._name, title=f"{self._name}: mean over ranks")

    def _ipython_display_(self) -> None:
        from IPython.display import display

        from labkit.ui.charts import sortable

        display(self.figure())
        display(sortable(self.frame().style.format(precision=4)))


def _measured(run: Run) -> list[Measured]:
    """Return what the ranks have measured, if the run was one of `labkit.benchmark.run_strategy`, which nothing here
    imports: a comparison is of any runs."""
    return run.results if all(hasattr(result, "parts_s") for result in run.results) else []


def _memory_kib(ranks: list[Measured]) -> dict[str, float]:
    """Give the KiB of each kind on the rank that has most of it."""
    return {what: max(r.memory[what] for r in ranks) / 1024 for what in ranks[0].memory}


def whole_weights(ranks: list[Measured]) -> dict[str, Tensor]:
    """Put together the weights that the ranks hold."""
    return {name: tensor for measured in ranks for name, tensor in measured.weights.items()}


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Give the greatest difference of any weight. Raises ValueError if they do not have the same weights."""
    if one.keys() != other.keys():
        raise ValueError(f"these weights are in one network only: {', '.join(sorted(one.keys() ^ other.keys()))}")
    return max((one[name] - other[name]).abs().max().item() for name in one)


def samples_per_s(run: Run) -> float:
    """Samples per second over all ranks, from each rank's first log call to its last; NaN without `samples`."""
    history = run.history
    if SAMPLES not in history:
        return float("nan")
    per_rank = []
    for _, rows in history.dropna(subset=SAMPLES).groupby("rank"):
        span = rows["time_s"].iloc[-1] - rows["time_s"].iloc[0]
        per_rank.append(rows[SAMPLES].iloc[1:].sum() / span if span > 0 else float("nan"))
    return float(np.sum(per_rank))
