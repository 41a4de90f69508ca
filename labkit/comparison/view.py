"""What a person sees of a comparison: boxes to tick, four pictures, a table; drawn anew whenever that changes."""

from __future__ import annotations

import html
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from labkit.comparison.reading import HERE, ON_DEVICES, measured, time_to_come
from labkit.comparison.replay import NAMED, Devices
from labkit.ui import kernel, page, prewarm, summary
from labkit.ui.outputs import ChangingOutputs

LOG = logging.getLogger(__name__)

REDRAW_S = 1.0
"""Least time between two drawings of the growing curves."""

BY_NAME = {devices.name: devices for devices in NAMED}


class Speeds:
    """Sliders for the speed of ideal devices and of their links, and real ones to choose."""

    OWN = "your own"

    def __init__(self, devices: Devices) -> None:
        chosen = devices.name if devices in NAMED else self.OWN
        wide = widgets.Layout(width="min(460px, calc(100% - 4px))")
        look = {"description_width": "120px"}
        self._named = widgets.Dropdown(
            options=[*BY_NAME, self.OWN], value=chosen, description="devices like", style=look
        )
        self._gflops = widgets.FloatLogSlider(
            value=devices.gflops, min=0, max=6, step=0.02, description="GFLOP/s of each", style=look, layout=wide
        )
        self._link = widgets.FloatLogSlider(
            value=devices.link_gbytes_s, min=-2, max=3, step=0.02, description="GB/s of a link", style=look, layout=wide
        )
        for slider in (self._gflops, self._link):
            slider.continuous_update, slider.readout_format = False, ".3g"
        self._latency_us = devices.latency_us
        self.note = widgets.HTML()
        """What is said below: where a real one's figures come from."""
        self.is_settling = False
        """Whether one of the widgets is just setting others."""
        self.widgets = (self._named, self._gflops, self._link)
        self._named.observe(lambda change: self._take(change["new"]), names="value")
        for slider in (self._gflops, self._link):
            slider.observe(lambda _: self._leave_named(), names="value")
        self.box = widgets.VBox([self._named, self._gflops, self._link, self.note])

    @property
    def devices(self) -> Devices:
        """What is chosen."""
        named = BY_NAME.get(self._named.value)
        return named or Devices(self._gflops.value, self._link.value, self._latency_us)

    def _take(self, name: str) -> None:
        named = BY_NAME.get(name)
        if named is not None and not self.is_settling:
            self.is_settling = True
            self._gflops.value, self._link.value = named.gflops, named.link_gbytes_s
            self._latency_us = named.latency_us
            self.is_settling = False

    def _leave_named(self) -> None:
        if not self.is_settling and self._named.value != self.OWN:
            self.is_settling = True
            self._named.value = self.OWN
            self.is_settling = False


class View(threading.Thread):
    """Shows a comparison: while its runs go on from this thread, afterwards when a person ticks something."""

    def __init__(self, comparison: Any) -> None:
        """Show widgets in the cell for a `labkit.Comparison`."""
        super().__init__(name="labkit-comparison", daemon=True)
        self._comparison = comparison
        self._drawing, self._has_failed = threading.Lock(), False
        layout = widgets.Layout(width="auto", margin="0 18px 0 0")
        self._boxes = {
            title: widgets.Checkbox(value=True, description=title, indent=False, layout=layout)
            for title in comparison.titles
        }
        self._clock = widgets.ToggleButtons(options=[ON_DEVICES, HERE])
        self._clock.style.button_width = "auto"
        self._speeds = Speeds(comparison.devices)
        self._said, self._row = widgets.HTML(), widgets.Box(layout=widgets.Layout(flex_flow="row wrap"))
        self._row.children = list(self._boxes.values())
        self._clocks = widgets.VBox([self._clock, self._speeds.box], layout=widgets.Layout(display="none"))
        for widget in (*self._boxes.values(), self._clock, *self._speeds.widgets):
            kernel.answer_while_the_cell_runs(widget)
            widget.observe(lambda _: self._change(), names="value")
        page.ask()
        self._outputs = ChangingOutputs(charts=4, has_table=True)
        kernel.display(widgets.VBox([self._row, self._clocks, self._said, self._outputs.box]))
        self._outputs.begin()
        self._now = ""

    def _change(self) -> None:
        if self._speeds.is_settling:
            return
        self._comparison.devices = self._speeds.devices
        self.draw()

    def run(self) -> None:
        """Draw until nothing is going on any more."""
        self._say()  # drawing may first have to be imported
        prewarm.wait()
        while not self._comparison.is_over:
            began_s = time.monotonic()
            self._attempt()
            time.sleep(max(REDRAW_S, 2 * (time.monotonic() - began_s)))
        self._attempt()

    def _attempt(self) -> None:
        """Write and draw; what fails is logged once, and tried again."""
        try:
            self._say()
            self.draw()
        except Exception:
            if not self._has_failed:
                LOG.exception("%r could not be drawn. Its runs are not affected", self._comparison)
            self._has_failed = True

    def _say(self) -> None:
        """Write what is going on, and what has failed."""
        lines = []
        for title in self._comparison.titles:
            run = self._comparison.runs.get(title)
            if run is not None and run.error is not None:
                lines.append(summary.as_html(run))
            elif run is not None and not run.over.is_set():
                lines.append(html.escape(summary.line(run)))
        to_come = [title for title in self._comparison.titles if title not in self._comparison.runs]
        if to_come:
            over = [run for run in self._comparison.runs.values() if run.over.is_set()]
            lines.append(f"to come: {html.escape(time_to_come(over, to_come) or ', '.join(to_come))}")
        text = "".join(f'<div style="line-height:1.5">{line}</div>' for line in lines)
        if text != self._now:
            self._said.value = self._now = text

    def draw(self) -> None:
        """Draw for what is ticked now."""
        with self._drawing:
            # The other clock is of use only where steps were recorded for ideal devices.
            runs = self._comparison.runs
            results = [rank for run in runs.values() for rank in measured(run)]
            has_two = any(rank.program.pieces and not rank.is_on_gpu for rank in results)
            self._clocks.layout.display = None if has_two else "none"
            self._speeds.box.layout.display = None if self._clock.value == ON_DEVICES else "none"
            self._speeds.note.value = html.escape(self._comparison.devices.source) if has_two else ""
            titles = [title for title, box in self._boxes.items() if box.value and title in runs]
            logged = any(runs[title].recorded.names for title in titles)
            pictures: Sequence[Any] = self._comparison.pictures(titles, self._clock.value == HERE) if logged else []
            self._outputs.show(pictures, self._comparison.table(titles) if titles else None)
