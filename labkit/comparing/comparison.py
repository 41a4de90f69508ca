"""Runs side by side: their curves, a step of each, what they hold and send, and a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.comparing.reading import (
    HERE,
    ON_DEVICES,
    in_order,
    measured,
    one_step,
    rounding,
    samples_per_s,
    scale,
    verdict,
)
from labkit.comparing.sorting import sortable
from labkit.monitor.run import Run
from labkit.profiling import PARTS
from labkit.ui import kernel

if TYPE_CHECKING:
    import pandas as pd
    from pandas.io.formats.style import Styler

    from labkit.ui.charts import Chart


class Comparison:
    """Several runs side by side. Made by `labkit.compare`; shows itself, with a picker where somebody watches.

    The first run is the one that the others are held against. Pictures take the `titles` of the runs to draw, all by
    default.
    """

    def __init__(self, runs: Mapping[str, Run], name: str = "loss", to_come: Iterable[str] = ()) -> None:
        self.runs = dict(runs)
        """By title; while functions are being launched, those that have begun."""
        self.titles = [*self.runs, *to_come]
        """Of all runs, those to come included."""
        self.gflops = math.nan
        """Of a virtual device, where functions were launched."""
        self._name = name
        self._shown_in: kernel.Execution | None = None
        self._first_picture: Any = None
        """The handle of the curves shown early, where nobody watches."""

    @property
    def is_over(self) -> bool:
        """Whether no run is going on, or to come."""
        return len(self.runs) == len(self.titles) and all(run.over.is_set() for run in self.runs.values())

    # Numbers

    def frame(self) -> pd.DataFrame:
        """Return the table: a row per run, in the order given.

        Columns: `ranks`; `status`; `final <name>`, the mean over ranks of the last value logged; `accuracy`, likewise,
        if any run has logged it; `<name> off by`, the greatest difference of the mean curve to the first run's;
        `seconds` from launch to end; `samples_per_s` over all ranks, from the first log call to the last (NaN unless
        `samples` was logged); `peak_mib`, the greatest peak memory of a rank, in MiB, on the host or, for ranks with a
        GPU, allocated on it.

        For functions that `labkit.compare` launched also what `labkit.comparing.measuring.Measured.columns` says, and
        for strategies what `labkit.benchmark.Measured.columns` does.
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
            f"{self._name} off by": self._off_by(run),
            "seconds": run.elapsed_s,
            "samples_per_s": samples_per_s(run),
            "peak_mib": (device or max(run.peak_bytes)) / 2**20,
        }

    def _off_by(self, run: Run) -> float:
        """Return the greatest difference of a run's mean curve to the first run's, at the steps of both; else NaN."""
        first = next(iter(self.runs.values()))
        if any(self._name not in each.recorded.names for each in (first, run)):
            return math.nan
        one, other = (dict(zip(*each.recorded.mean_curve(self._name), strict=True)) for each in (first, run))
        return float(max((abs(one[step] - other[step]) for step in one.keys() & other.keys()), default=math.nan))

    def _cost(self, run: Run) -> dict[str, Any]:
        ranks = measured(run)
        if not ranks:
            return {}
        first = next(filter(None, map(measured, self.runs.values())))
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

    # Pictures

    def figure(self, titles: Sequence[str] | None = None) -> Chart:
        """Return the curves over each other."""
        from labkit import charts

        # A run keeps its colour whichever others are drawn.
        histories = {title: run.recorded for title, run in self.runs.items()}
        chart = charts.overlaid(histories, self._name, title=f"{self._name}: mean over ranks")
        if titles is not None:
            chart.data = [trace for trace in chart.data if trace.name in titles]
        return chart

    def lanes(self, titles: Sequence[str] | None = None, here: bool = False) -> Chart:
        """Draw what every rank did when, in one step: on a device of its own, or `here`, on this machine's clock.

        White is loading and whatever else is neither computing nor waiting for a message.
        """
        from labkit import charts

        rows: dict[str, Sequence[tuple[str, float, float]]] = {}
        for title in self._measured_titles(titles):
            for rank, marks in enumerate(one_step(measured(self.runs[title]), here)):
                rows[f"{title} · {rank}"] = marks
        found = {what for marks in rows.values() for what, *_ in marks}
        clock = HERE if here or not self._is_simulated else ON_DEVICES
        chart = charts.gantt(
            in_order(rows, [part for part in PARTS if part in found]), f"one step, rank by rank: {clock}"
        )
        speed = f" ({self.gflops:g} GFLOP/s)" if clock == ON_DEVICES else ""
        chart.update_xaxes(title_text=f"ms, {clock}{speed}")  # short: JupyterLab's cells may be narrow
        return chart

    def memory(self, titles: Sequence[str] | None = None) -> Chart:
        """Draw what a rank holds: of functions each rank, of strategies the greatest over ranks of each part."""
        from labkit import charts

        rows = self._parts("KiB", without=["sent", "formula"])
        by_rank = {
            f"{title} · {rank}": {what: size / 1024 for what, size in result.memory.items()}
            for title in self._measured_titles(titles)
            for rank, result in enumerate(measured(self.runs[title]))
        }
        if not self._are_functions:
            by_rank = {title: row for title, row in rows.items() if titles is None or title in titles}
        factor, unit = scale(value for row in by_rank.values() for value in row.values())
        drawn = {title: {what: size * factor for what, size in row.items()} for title, row in by_rank.items()}
        return charts.stacked(drawn, unit, f"memory of {'every rank' if self._are_functions else 'the rank with most'}")

    def bytes(self, titles: Sequence[str] | None = None) -> Chart:
        """Draw what a rank sends in a step, counted beside the formula's; means over ranks."""
        import plotly.graph_objects as go

        from labkit import charts

        table = self.frame().reindex(columns=["sent KiB", "formula KiB"])
        table = table.loc[self._measured_titles(titles)]
        factor, unit = scale(table.to_numpy().ravel())
        figure = go.Figure()
        for column, name, color in (("sent KiB", "counted", "#0072B2"), ("formula KiB", "formula", "#E69F00")):
            values = [float(value) * factor for value in table[column]]
            text = ["not counted" if math.isnan(value) else f"{value:.3g}" for value in values]
            lengths = [0.0 if math.isnan(value) else value for value in values]
            figure.add_bar(
                y=list(table.index), x=lengths, text=text, name=name, orientation="h", marker={"color": color}
            )
        figure.update_layout(barmode="group")
        figure.update_xaxes(title_text=f"{unit} per rank and step")
        figure.update_yaxes(autorange="reversed")
        return charts.Chart(charts.style(figure, "sent in a step: counted, and by the formula", 130 + 40 * len(table)))

    def steps(self) -> Chart:
        """Draw what a step's time is made of, the mean over ranks."""
        from labkit import charts

        parts = self._parts("ms", without=["step", "device step", "device busy"])
        return charts.stacked(parts, "milliseconds", "one step: mean over ranks")

    def gantt(self, title: str) -> Chart:
        """Draw what every rank of one run did when, in one step under the profiler."""
        from labkit import charts

        rows = {f"rank {rank}": result.marks for rank, result in enumerate(measured(self.runs[title]))}
        return charts.gantt(rows, f"{title}: one step")

    def pictures(self, titles: Sequence[str] | None = None, here: bool = False) -> list[Chart]:
        """Return loss, lanes, memory and bytes; of runs that measured nothing the loss alone."""
        drawing: list[Callable[[], Chart]] = [lambda: self.figure(titles)]
        if any(rank.marks for title in self._measured_titles(titles) for rank in measured(self.runs[title])):
            drawing += [lambda: self.lanes(titles, here), lambda: self.memory(titles), lambda: self.bytes(titles)]
        return [draw() for draw in drawing]

    # The table that people read

    def table(self, titles: Sequence[str] | None = None) -> Styler:
        """Return the table to read: of runs that were measured what matters, in words; of others everything."""
        frame = self.frame()
        frame = frame if titles is None else frame.loc[[title for title in frame.index if title in titles]]
        if "difference" not in frame:
            return sortable(frame.style.format(precision=4))
        first = next(title for title, run in self.runs.items() if measured(run))
        limit = rounding(measured(self.runs[first]))
        device = f"ms a step, {ON_DEVICES}" if self._is_simulated else "ms a step, GPU"
        shown = {
            "ranks": frame["ranks"],
            "status": frame["status"],
            "on": [_where(self.runs[title]) for title in frame.index],
            f"final {self._name}": frame[f"final {self._name}"],
            f"weights beside {first}": frame["difference"].map(lambda off: verdict(off, limit)),
            f"{self._name} off by": frame[f"{self._name} off by"],
            device: frame["device step ms"],
            f"ms a step, {HERE}": frame["step ms"],
            "sent MiB": frame["sent KiB"] / 1024,
            "formula MiB": frame["formula KiB"] / 1024,
        }
        if not self._is_simulated:
            shown.pop(f"ms a step, {HERE}")
        if not any(map(_where, self.runs.values())):
            shown.pop("on")
        import pandas as pd

        style = pd.DataFrame(shown).style.format(precision=4, na_rep="")
        style.format("{:.1f}", subset=[column for column in shown if column.startswith("ms a step")], na_rep="")
        style.format("{:.1e}", subset=[f"{self._name} off by"], na_rep="")
        return sortable(style.format("{:.2f}", subset=["sent MiB", "formula MiB"], na_rep="not counted"))

    def _measured_titles(self, titles: Sequence[str] | None = None) -> list[str]:
        return [t for t, run in self.runs.items() if measured(run) and (titles is None or t in titles)]

    @property
    def _are_functions(self) -> bool:
        """Whether what was measured has memory by rank, and two clocks."""
        return any(hasattr(rank, "on_devices") for run in self.runs.values() for rank in measured(run))

    @property
    def _is_simulated(self) -> bool:
        timed = [rank for run in self.runs.values() for rank in measured(run) if hasattr(rank, "simulated")]
        if any(rank.simulated.steps for rank in timed):
            return True
        return not any(map(max, (run.peak_device_bytes for run in self.runs.values())))

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.titles)}>"

    def _ipython_display_(self) -> None:
        now = kernel.this_execution()
        if now is not None and self._shown_in == now:  # shown while it grew
            return
        self._shown_in = now
        if kernel.is_interactive():
            from labkit.comparing.view import View

            View(self).start()
            return
        first, *others = self.pictures()
        if self._first_picture is None:
            kernel.display(first)
        else:
            self._first_picture.update(first.bundle(), raw=True)
        for picture in others:
            kernel.display(picture)
        kernel.display(self.table())

    def show_curves(self) -> None:
        """Show the curves of what has run so far, in the cell in which all will be shown later."""
        self._first_picture = self._first_picture or kernel.reserve()
        self._first_picture.update(self.figure().bundle(), raw=True)


def _where(run: Run) -> str:
    """Return where a run's ranks compute, if not simply on the CPU."""
    is_on_gpus = any(device not in ("", "cpu") for device in run.devices)
    return run.placement or ("a GPU for each rank" if is_on_gpus else "")
