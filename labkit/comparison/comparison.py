"""Runs side by side: their curves, a step of each, what they hold and send, and a table."""

from __future__ import annotations

import html
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.comparison.measured import Measured
from labkit.comparison.reading import (
    HERE,
    ON_DEVICES,
    ON_GPUS,
    columns,
    curves_apart,
    in_order,
    measured,
    on_devices,
    one_step,
    samples_per_s,
    scale,
    speed_up,
    uncounted,
)
from labkit.comparison.replay import LAPTOP
from labkit.comparison.saving import Circumstances, save
from labkit.monitor.history import SAMPLES
from labkit.protocol.text import printable, titled
from labkit.run import Run
from labkit.trace.profiling import PARTS
from labkit.ui import kernel

if TYPE_CHECKING:
    import pandas as pd
    from pandas.io.formats.style import Styler

    from labkit.comparison.timed import Timed
    from labkit.ui.charts import Chart


LOG = logging.getLogger(__name__)

MUCH = 0.3
"""From which share of a step's time in operators on it is said what has no formula."""

HEADINGS = {"samples_per_s": "samples per s", "peak_mib": "peak MiB"}
"""What the table that people read calls columns."""

PERCENTILES = (", 10th percentile", ", 90th percentile")
"""How columns of this machine's clock end that say how much steps differ."""


class Comparison:
    """Several runs side by side. Made by `labkit.compare`; shows itself, with a picker where somebody watches.

    The first run is the one that the others are compared with. Pictures and tables take the `titles` of some runs, or
    their slugs (`one_process` for "one process"); by default all.
    """

    def __init__(self, runs: Mapping[str, Run], metric: str = "loss", to_come: Iterable[str] = ()) -> None:
        self.runs = dict(runs)
        """By title; while functions are being launched, those that have begun."""
        self.titles = [*self.runs, *to_come]
        """Of all runs, those to come included."""
        self.devices = LAPTOP
        """The ideal devices for which steps are computed. Set others, and everything is drawn for those."""
        self.launching: Any = None
        """How functions are launched, where some were (`Launching`, in launching.py): `add` launches others so."""
        self._metric = metric
        self._shown_in: kernel.Execution | None = None
        self._first_picture: Any = None
        """The handle of the curves shown early, where nobody watches."""
        self.circumstances = Circumstances.now()
        """What it is measured on, and when."""

    @property
    def is_over(self) -> bool:
        """Whether no run is going on, or to come."""
        return len(self.runs) == len(self.titles) and all(run.over.is_set() for run in self.runs.values())

    def add(
        self,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        /,
        *,
        world_size: int | Mapping[str, int] | None = None,
        live: bool = True,
        **named: Any,
    ) -> Comparison:
        """Launch further functions, and show them beside the runs that are there: `comparison.add(mine=mine)`.

        An earlier run with the same title is replaced, so that a cell can be edited and run again.

        Args:
            functions: by title, where titles are no Python names.
            world_size: ranks of each, or by title; by default as many as an earlier one with its title had, or else as
                any of the functions had most.
            live: show the comparison while they run; else only when it is the last expression of a cell.
            named: functions by title; everything else is passed to them in place of what the others were given.

        Returns the comparison itself. Raises as `labkit.compare` does.
        """
        given = {**(functions or {}), **{title: each for title, each in named.items() if is_function(each)}}
        if not given:
            raise ValueError("add() needs at least one function, by title: comparison.add(mine=mine)")
        parameters = {key: each for key, each in named.items() if key not in given}
        self._launching().changed(given, world_size, parameters).launch(self, given, live)
        return self

    def _launching(self) -> Any:
        if self.launching is None:
            raise ValueError("this comparison was not made by labkit.compare, and cannot launch functions")
        return self.launching

    # Numbers

    def frame(self, titles: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the table: a row per run, in the order given.

        Columns: `ranks`; `status`; `final <metric>`, the mean over ranks of the last value logged; `accuracy`,
        likewise, if any run has logged it; `<metric> off by`, the greatest difference of the mean curve to the first
        run's; `seconds` from launch to end, what measuring takes included; `samples_per_s` over all ranks, in steps
        that nothing slowed, if any run has logged `samples`; `peak_mib`, the greatest peak memory of a rank, in MiB, on
        the host or, for ranks with a GPU, allocated on it; `error`, if a run has failed.

        For functions that `labkit.compare` launched, and for strategies, also what `labkit.comparison.reading.columns`
        and `labkit.comparison.measured.Measured.columns` say. A number that cannot be had is NaN; `table` says why.
        """
        frame = self._frame({title: self._row(run)[0] for title, run in self.runs.items()})
        return frame if titles is None else frame.loc[self._begun(titles)]

    def _frame(self, rows: dict[str, dict[str, Any]]) -> pd.DataFrame:
        import pandas as pd

        table = pd.DataFrame.from_dict(rows, orient="index")
        logged = {name for run in self.runs.values() for name in run.recorded.names}
        of_some = {"accuracy": "accuracy", "samples_per_s": SAMPLES}
        table = table.drop(columns=[column for column, name in of_some.items() if name not in logged])
        if any(run.error is not None for run in self.runs.values()):
            table["error"] = [_why(run) for run in self.runs.values()]
        return table

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

        final, off = f"final {self._metric}", f"{self._metric} off by"
        device = max(run.peak_device_bytes)
        cells: dict[str, Callable[[], Any]] = {
            "ranks": lambda: run.world_size,
            "status": lambda: run.status,
            final: lambda: last(final, self._metric),
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
        if any(self._metric not in each.recorded.names for each in (first, run)):
            return math.nan, ""
        return curves_apart(first.recorded, run.recorded, self._metric)

    def _cost(self, run: Run) -> dict[str, Any]:
        ranks = measured(run)
        if not ranks:
            return {}
        first = next(filter(None, map(measured, self.runs.values())))
        beside = speed_up(run, next(each for each in self.runs.values() if measured(each)), self.devices)
        return {**Measured.columns(ranks, first), **columns(run, self.devices), **beside}

    def on_devices(self, title: str) -> list[list[Timed]]:
        """Return a run's steps on devices of the ranks' own, ideal or real: by rank, then by the rank's devices."""
        return on_devices(self.runs[titled(title, self.runs)], self.devices)

    def notes(self, titles: Sequence[str] | None = None) -> list[str]:
        """Say which runs are one process after all, and what ideal devices leave out."""
        said = [
            f"{title}: nn.DataParallel has no second GPU here, and calls the network as it is in one process."
            for title in self._measured_titles(titles)
            if measured(self.runs[title])[0].is_one_replica
        ]
        first = next(iter(self._measured_titles()), "")
        if not first or not self.is_simulated:
            return said
        left_out = []
        for title in self._measured_titles(titles):
            shares = uncounted(self.runs[title])
            if (together := shares.pop("all", 0.0)) > MUCH:
                left_out.append(f"{title} {together:.0%} ({next(iter(shares))} {next(iter(shares.values())):.0%})")
        if left_out:
            said.append(
                "Operators without a formula take no time on ideal devices. Their share of the time in operators "
                f"here, and the greatest: {', '.join(left_out)}."
            )
        return said

    # Pictures

    def figure(self, titles: Sequence[str] | None = None) -> Chart:
        """Return the curves over each other."""
        from labkit.ui import charts

        # A run keeps its colour whichever others are drawn.
        histories = {title: run.recorded for title, run in self.runs.items()}
        chart = charts.overlaid(histories, self._metric, title=f"{self._metric}: mean over ranks")
        if titles is not None:
            chosen = self._begun(titles)
            chart.data = [trace for trace in chart.data if trace.name in chosen]
        return chart

    def lanes(self, titles: Sequence[str] | None = None, here: bool = False) -> Chart:
        """Draw what every rank did when, in one step: on devices of the ranks' own, or `here`, on this machine's clock.

        White is loading and whatever else is neither computing nor waiting for a message.
        """
        from labkit.ui import charts

        rows: dict[str, Sequence[tuple[str, float, float]]] = {}
        for title in self._measured_titles(titles):
            run = self.runs[title]
            lanes = [[rank.timed] for rank in measured(run)] if here else on_devices(run, self.devices)
            for rank, of_rank in enumerate(one_step(lanes)):
                for device, marks in enumerate(of_rank):
                    rows[_lane(title, rank, device, len(of_rank))] = marks
        found = {what for marks in rows.values() for what, *_ in marks}
        clock = HERE if here else ON_DEVICES if self.is_simulated else ON_GPUS
        chart = charts.gantt(
            in_order(rows, [part for part in PARTS if part in found]), f"one step, rank by rank: {clock}"
        )
        speed = f" ({self.devices})" if clock == ON_DEVICES else ""
        chart.update_xaxes(title_text=f"ms, {clock}{speed}")  # short: JupyterLab's cells may be narrow
        return chart

    def memory(self, titles: Sequence[str] | None = None) -> Chart:
        """Draw what a rank holds: of functions each rank and device, of strategies the greatest over ranks."""
        from labkit.ui import charts

        held: dict[str, dict[str, float]] = {}
        for title in self._measured_titles(titles):
            ranks = measured(self.runs[title])
            if not self._are_functions:
                held[title] = {what: max(rank.most_held[what] for rank in ranks) / 1024 for what in ranks[0].most_held}
                continue
            for rank, result in enumerate(ranks):
                for device, kinds in enumerate(result.most_held_by_device):
                    held[_lane(title, rank, device, len(result.most_held_by_device))] = {
                        what: size / 1024 for what, size in kinds.items()
                    }
        factor, unit = scale(value for row in held.values() for value in row.values())
        kinds_held = {what for row in held.values() for what, size in row.items() if size}
        drawn = {
            lane: {what: size * factor for what, size in row.items() if what in kinds_held}
            for lane, row in held.items()
        }
        return charts.stacked(drawn, unit, f"memory of {'every rank' if self._are_functions else 'the rank with most'}")

    def bytes(self, titles: Sequence[str] | None = None) -> Chart:
        """Draw what a rank sends in a step; means over ranks.

        By what PyTorch dispatched, as textbooks have each call; by what the system has counted; of strategies by their
        formula.
        """
        import plotly.graph_objects as go

        from labkit.ui import charts

        bars = (
            ("sent KiB", "calls dispatched", "#0072B2"),
            ("wire KiB", "counted by the system", "#56B4E9"),
            ("formula KiB", "formula", "#E69F00"),
        )
        table = self.frame()
        table = table.loc[self._measured_titles(titles)].reindex(columns=[column for column, *_ in bars])
        table = table.dropna(axis="columns", how="all")
        factor, unit = scale(table.to_numpy().ravel())
        figure = go.Figure()
        for column, name, color in bars:
            if column not in table:
                continue
            values = [float(value) * factor for value in table[column]]
            text = ["not counted" if math.isnan(value) else _short(value) for value in values]
            lengths = [0.0 if math.isnan(value) else value for value in values]
            figure.add_bar(
                y=list(table.index), x=lengths, text=text, name=name, orientation="h", marker={"color": color}
            )
        figure.update_layout(barmode="group")
        figure.update_xaxes(title_text=f"{unit} per rank and step")
        figure.update_yaxes(autorange="reversed")
        return charts.Chart(charts.style(figure, "sent in a step", 130 + 40 * len(table)))

    def pictures(self, titles: Sequence[str] | None = None, here: bool = False) -> list[Chart]:
        """Return loss, lanes, memory and bytes; of runs that measured nothing the loss alone.

        In place of one that cannot be drawn there is one that says why.
        """
        drawing: list[Callable[[], Chart]] = [lambda: self.figure(titles)]
        if any(rank.timed.steps for title in self._measured_titles(titles) for rank in measured(self.runs[title])):
            drawing += [lambda: self.lanes(titles, here), lambda: self.memory(titles), lambda: self.bytes(titles)]
        return [_drawn(draw) for draw in drawing]

    # The table that people read

    def table(self, titles: Sequence[str] | None = None) -> Styler:
        """Return the table to read: of runs that were measured what matters, in words; of others everything.

        A cell that cannot be had says why: "not comparable: …", "not finite (…)".
        """
        cells, forms = self._cells(titles)
        readers: dict[Any, Any] = {column: _reader(*form) for column, form in forms.items()}
        style = cells.style.format(readers, escape="html")
        style = style.format_index(escape="html").set_caption("<br>".join(map(html.escape, self.notes(titles))))
        left = "caption-side:bottom; text-align:left"
        style = style.set_table_styles([{"selector": "caption", "props": left}], overwrite=False)
        return style.relabel_index([HEADINGS.get(each, each) for each in map(str, cells)], axis=1)

    def texts(self, titles: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the same table, its cells as texts."""
        cells, forms = self._cells(titles)
        read = cells.apply(lambda column: column.map(_reader(*forms.get(str(column.name), ("{}", "")))))
        return read.rename(columns=HEADINGS)

    def save(self, path: str | os.PathLike[str], title: str = "", notes: str = "") -> Path:
        """Write a page to show, which needs no network. All numbers are `frame().to_csv()`.

        With machine, versions, date, load and settings, and a warning where other programs used the cores meanwhile.

        Args:
            path: of the file, which ends in .html.
            title: above everything; by default the names of the runs.
            notes: your own words below the numbers.

        Returns the path. Raises ValueError for another ending, and where no run has
        begun.
        """
        return save(self, path, title, notes)

    def _cells(self, titles: Sequence[str] | None) -> tuple[pd.DataFrame, dict[str, tuple[str, str]]]:
        """Return the table's cells, and by heading how a number is written and what stands for NaN."""
        rows = {title: self._row(run) for title, run in self.runs.items()}
        for title, (_, said) in rows.items():
            why = _why(self.runs[title])
            said["status"] = f"{self.runs[title].status}: {why}" if why else ""
        frame = self._frame({title: row for title, (row, _) in rows.items()})
        cells = frame.astype(object)
        for title, (_, said) in rows.items():
            for column, text in said.items():
                if text and column in cells:
                    cells.loc[title, column] = text
        cells = cells if titles is None else cells.loc[self._begun(titles)]
        if "difference" not in frame:
            numbers = [str(column) for column in frame if frame[column].dtype.kind == "f"]
            forms = {
                "seconds": "{:.1f}",
                "samples_per_s": "{:,.0f}",
                "peak_mib": "{:,.0f}",
                f"{self._metric} off by": "{:.1e}",
            }
            return cells, {column: (forms.get(column, "{:.4f}"), "") for column in numbers}
        first = next(title for title, run in self.runs.items() if measured(run))
        final, off = f"final {self._metric}", f"{self._metric} off by"
        device = f"ms a step, {ON_DEVICES if self.is_simulated else ON_GPUS}"
        shown = {
            "ranks": ("ranks", "{}", ""),
            "status": ("status", "{}", ""),
            "on": ("on", "{}", ""),
            final: (final, "{:.4f}", ""),
            "weights": (f"weights, compared with {first}", "{}", ""),
            off: (off, "{:.1e}", ""),
            "device step ms": (device, "{:.1f}", ""),
            "speed-up": (f"speed-up over {first}", "{:.2f}", ""),
            "efficiency": ("efficiency", "{:.0%}", ""),
            "step ms": (f"ms a step, {HERE}", "{}", ""),
            "sent KiB": ("sent MiB", "{:.2f}", "not counted"),
            "formula KiB": ("formula MiB", "{:.2f}", "not counted"),
        }
        if not self.is_simulated:
            shown.pop("step ms")
        if "formula KiB" not in frame:
            shown.pop("formula KiB")
        cells["step ms"] = [_with_range(frame.loc[title]) for title in cells.index]
        cells["on"] = [_where(self.runs[title]) for title in cells.index]
        if not any(cells["on"]):
            shown.pop("on")
        cells = cells.reindex(columns=list(shown))
        for column in ("sent KiB", "formula KiB"):
            if column in cells:
                cells[column] = cells[column].astype(float) / 1024
        cells = cells.rename(columns={column: heading for column, (heading, *_) in shown.items()})
        return cells, {heading: (form, missing) for heading, form, missing in shown.values()}

    def _measured_titles(self, titles: Sequence[str] | None = None) -> list[str]:
        return [title for title in self._begun(titles) if measured(self.runs[title])]

    def _begun(self, titles: Sequence[str] | None) -> list[str]:
        """Return which of these runs have begun, in the comparison's order. Raises ValueError for other titles."""
        if titles is None:
            return list(self.runs)
        chosen = [titled(title, self.titles) for title in titles]
        return [title for title in self.runs if title in chosen]

    @property
    def _are_functions(self) -> bool:
        """Whether what was measured has memory by device."""
        return any(rank.most_held_by_device for run in self.runs.values() for rank in measured(run))

    @property
    def is_simulated(self) -> bool:
        """Whether steps are computed for ideal devices; else they were timed on GPUs."""
        return not any(rank.is_on_gpu for run in self.runs.values() for rank in measured(run))

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.titles)}>"

    def _ipython_display_(self) -> None:
        now = kernel.this_execution()
        if now is not None and self._shown_in == now:  # shown while it grew
            return
        self._shown_in = now
        if kernel.is_interactive():
            from labkit.comparison.view import View

            View(self).start()
            return
        first, *others = self.pictures()
        shown_early, self._first_picture = self._first_picture, None  # of this cell; a later one shows its own
        if shown_early is None:
            kernel.display(first)
        else:
            first.update_shown(shown_early)
        for picture in others:
            kernel.display(picture)
        kernel.display(self.table())

    def show_curves(self) -> None:
        """Show the curves of what has run so far, in the cell in which all will be shown later."""
        self._first_picture = self._first_picture or kernel.reserve()
        self.figure().update_shown(self._first_picture)


def is_function(thing: Any) -> bool:
    """Whether something is launched, and not passed on: a function, and not a class."""
    return callable(thing) and not inspect.isclass(thing)


def _lane(title: str, rank: int, device: int, devices: int) -> str:
    return f"{title} · {rank}" if devices == 1 else f"{title} · device {device}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _with_range(row: Any) -> str:
    """Return the milliseconds of a step, the 10th and the 90th percentile, and of how many steps."""
    middle, low, high = (row.get(f"step ms{which}", math.nan) for which in ("", *PERCENTILES))
    return "" if math.isnan(middle) else f"{middle:,.1f} ({low:,.1f} – {high:,.1f}; {row['steps']:.0f} steps)"


def _why(run: Run) -> str:
    """Return why a run has failed, in one line, or ""."""
    return printable(str(run.error).splitlines()[0][:300]) if run.error is not None else ""


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

        from labkit.ui import charts

        LOG.exception("a picture of a comparison could not be drawn")
        figure = go.Figure()
        figure.add_annotation(text=html.escape(not_comparable(error)), showarrow=False)
        return charts.Chart(charts.style(figure, "not drawn"))


def _reader(form: str, missing: str) -> Callable[[Any], str]:
    """Return a function that formats a cell: numbers for reading, NaN by its stand-in, text unchanged."""

    def read(value: Any) -> str:
        if isinstance(value, str):
            return value
        return missing if value is None or value != value else form.format(value)

    return read
