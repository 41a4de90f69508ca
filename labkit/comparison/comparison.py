"""Runs side by side: their curves, a step of each, what they hold and send, and a table."""

from __future__ import annotations

import html
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.comparison.reading import (
    HERE,
    ON_DEVICES,
    curves_apart,
    in_order,
    measured,
    one_step,
    samples_per_s,
    scale,
)
from labkit.comparison.sorting import sortable
from labkit.profiling import PARTS
from labkit.protocol.text import printable
from labkit.run import Run
from labkit.ui import kernel

if TYPE_CHECKING:
    import pandas as pd
    from pandas.io.formats.style import Styler

    from labkit.ui.charts import Chart


LOG = logging.getLogger(__name__)


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

        For functions that `labkit.compare` launched also what `labkit.comparison.measuring.Measured.columns` says, and
        for strategies what `labkit.benchmark.Measured.columns` does. A number that cannot be had is NaN; `table` says
        why.
        """
        return self._frame({title: self._row(run)[0] for title, run in self.runs.items()})

    def _frame(self, rows: dict[str, dict[str, Any]]) -> pd.DataFrame:
        import pandas as pd

        table = pd.DataFrame.from_dict(rows, orient="index")
        has_accuracy = any("accuracy" in run.recorded.names for run in self.runs.values())
        return table if has_accuracy else table.drop(columns="accuracy")

    def _row(self, run: Run) -> tuple[dict[str, Any], dict[str, str]]:
        """Return a run's numbers by column, and what is to be read in place of some of them."""
        progress = [run.progress(rank)[0] for rank in range(run.world_size)]
        said: dict[str, str] = {}

        def last(column: str, name: str) -> float:
            values = [p.last[name] for p in progress if name in p.last]
            mean = float(np.mean(values)) if values else math.nan
            said[column] = "NaN" if values and math.isnan(mean) else ""
            return mean

        def off_by(column: str) -> float:
            off, said[column] = self._off_by(run)
            return off

        final, off = f"final {self._name}", f"{self._name} off by"
        device = max(run.peak_device_bytes)
        cells: dict[str, Callable[[], Any]] = {
            "ranks": lambda: run.world_size,
            "status": lambda: run.status,
            final: lambda: last(final, self._name),
            "accuracy": lambda: last("accuracy", "accuracy"),
            off: lambda: off_by(off),
            "seconds": lambda: run.elapsed_s,
            "samples_per_s": lambda: samples_per_s(run),
            "peak_mib": lambda: (device or max(run.peak_bytes)) / 2**20,
        }
        row: dict[str, Any] = {}
        for column, cell in cells.items():
            try:
                row[column] = cell()
            except Exception as error:  # one cell is not to cost the others
                row[column], said[column] = math.nan, not_comparable(error)
        try:
            row |= self._cost(run)
        except Exception as error:
            row |= {"difference": math.nan, "weights": not_comparable(error)}
        return row, said

    def _off_by(self, run: Run) -> tuple[float, str]:
        """Return the greatest difference of a run's mean curve to the first run's, and what is to be said instead."""
        first = next(iter(self.runs.values()))
        if any(self._name not in each.recorded.names for each in (first, run)):
            return math.nan, ""
        return curves_apart(first.recorded, run.recorded, self._name)

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
        kinds = {what for row in by_rank.values() for what, size in row.items() if size}
        drawn = {
            title: {what: size * factor for what, size in row.items() if what in kinds}
            for title, row in by_rank.items()
        }
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
        """Return loss, lanes, memory and bytes; of runs that measured nothing the loss alone.

        In place of one that cannot be drawn there is one that says why.
        """
        drawing: list[Callable[[], Chart]] = [lambda: self.figure(titles)]
        if any(rank.marks for title in self._measured_titles(titles) for rank in measured(self.runs[title])):
            drawing += [lambda: self.lanes(titles, here), lambda: self.memory(titles), lambda: self.bytes(titles)]
        return [_drawn(draw) for draw in drawing]

    # The table that people read

    def table(self, titles: Sequence[str] | None = None) -> Styler:
        """Return the table to read: of runs that were measured what matters, in words; of others everything.

        A cell that cannot be had says why: "not comparable: …", "not finite (…)".
        """
        rows = {title: self._row(run) for title, run in self.runs.items()}
        frame = self._frame({title: row for title, (row, _) in rows.items()})
        cells = frame.astype(object)
        for title, (_, said) in rows.items():
            for column, text in said.items():
                if text and column in cells:
                    cells.loc[title, column] = text
        cells = cells if titles is None else cells.loc[[title for title in cells.index if title in titles]]
        if "difference" not in frame:
            numbers = [str(column) for column in frame if frame[column].dtype.kind == "f"]
            return _readable(cells, dict.fromkeys(numbers, ("{:.4f}", "")))
        first = next(title for title, run in self.runs.items() if measured(run))
        final, off = f"final {self._name}", f"{self._name} off by"
        device = f"ms a step, {ON_DEVICES if self._is_simulated else 'GPU'}"
        shown = {
            "ranks": ("ranks", "{}", ""),
            "status": ("status", "{}", ""),
            "on": ("on", "{}", ""),
            final: (final, "{:.4f}", ""),
            "weights": (f"weights beside {first}", "{}", ""),
            off: (off, "{:.1e}", ""),
            "device step ms": (device, "{:.1f}", ""),
            "step ms": (f"ms a step, {HERE}", "{:.1f}", ""),
            "sent KiB": ("sent MiB", "{:.2f}", "not counted"),
            "formula KiB": ("formula MiB", "{:.2f}", "not counted"),
        }
        if not self._is_simulated:
            shown.pop("step ms")
        cells["on"] = [_where(self.runs[title]) for title in cells.index]
        if not any(cells["on"]):
            shown.pop("on")
        cells = cells.reindex(columns=list(shown))
        cells[["sent KiB", "formula KiB"]] = cells[["sent KiB", "formula KiB"]].astype(float) / 1024
        cells = cells.rename(columns={column: heading for column, (heading, *_) in shown.items()})
        return _readable(cells, {heading: (form, missing) for heading, form, missing in shown.values()})

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
            from labkit.comparison.view import View

            View(
                titles=lambda: self.titles,
                runs=lambda: self.runs,
                is_over=lambda: self.is_over,
                pictures=self.pictures,
                table=self.table,
            ).start()
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


def not_comparable(error: Exception) -> str:
    """Return the text for a cell whose value could not be computed."""
    return printable(f"not comparable: {type(error).__name__}: {error}".splitlines()[0][:200])


def _drawn(draw: Callable[[], Chart]) -> Chart:
    """Return a picture, or one that says why it could not be drawn: it is not to cost the others and the table."""
    try:
        return draw()
    except Exception as error:
        import plotly.graph_objects as go

        from labkit import charts

        LOG.exception("a picture of a comparison could not be drawn")
        figure = go.Figure()
        figure.add_annotation(text=html.escape(not_comparable(error)), showarrow=False)
        return charts.Chart(charts.style(figure, "not drawn"))


def _readable(cells: pd.DataFrame, forms: Mapping[str, tuple[str, str]]) -> Styler:
    """Return a table with numbers as they are to be read, by column a form and what stands for NaN, and texts as is."""

    def reading(form: str, missing: str) -> Callable[[Any], str]:
        def read(value: Any) -> str:
            if isinstance(value, str):
                return value
            return missing if value is None or value != value else form.format(value)

        return read

    style = cells.style.format({column: reading(*form) for column, form in forms.items()}, escape="html")
    return sortable(style.format_index(escape="html"))
