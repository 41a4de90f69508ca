"""Every process that labkit holds, in one table: `labkit.processes()`; in a notebook each row has a button."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Iterable

from labkit.ui import kernel
from labkit.ui.process_table import holders
from labkit.ui.process_table.holders import HeldProcess

LOOK_EVERY_S = 0.5
"""Time between two looks whether processes of a table that is shown have ended."""

HEADINGS = ("process", "pid", "memory of its own", "since", "state")


def processes() -> Processes:
    """Return every process that labkit holds on this machine: ranks of runs, ranks of sessions, standby ranks.

    A list of `HeldProcess`, each with `end()`, that shows itself as a table. In a notebook each row has a button ▪: it
    ends a standby rank alone, and a run or a session as a whole.

    >>> for process in labkit.processes():
    ...     process.end()
    """
    return Processes(holders.processes())


class Processes(list[HeldProcess]):
    """Some processes, as they were when they were listed."""

    def __init__(self, found: Iterable[HeldProcess] = ()) -> None:
        super().__init__(found)
        self.listed_s = time.time()
        self.memory_bytes = [process.memory_bytes for process in self]
        """What each has for itself alone, in bytes: what its end would free."""

    def rows(self) -> list[tuple[str, ...]]:
        """Return what the table says of each, by `HEADINGS`."""
        return [_row(process, size) for process, size in zip(self, self.memory_bytes, strict=True)]

    def __repr__(self) -> str:
        if not self:
            return "labkit holds no process"
        rows = [HEADINGS, *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in [*lines, self.total()])

    def _repr_html_(self) -> str:
        if not self:
            return "labkit holds no process"
        return _table(self.rows(), self.total())

    def _ipython_display_(self) -> None:
        if self and kernel.is_interactive():
            _Live(self).start()
        else:
            kernel.display({"text/html": self._repr_html_(), "text/plain": repr(self)}, raw=True)

    def total(self) -> str:
        """Return how many there are, and what they have for themselves together, in a line."""
        listed = time.strftime("%H:%M:%S", time.localtime(self.listed_s))
        return f"{len(self)} in all, {_megabytes(sum(self.memory_bytes))}, at {listed}"


def _row(process: HeldProcess, memory_bytes: int) -> tuple[str, ...]:
    if process.kind == "standby":
        what = "stands by"
    else:
        what = " ".join(filter(None, (process.kind, process.name and repr(process.name)))) + (
            "" if process.rank is None else f", rank {process.rank}"
        )
    since = time.strftime("%H:%M:%S", time.localtime(process.since_s))
    return what, str(process.pid), _megabytes(memory_bytes), since, process.state


def _table(rows: list[tuple[str, ...]], total: str) -> str:
    head = "".join(f'<th style="text-align:left">{heading}</th>' for heading in HEADINGS)
    lines = [
        "".join(f'<td style="text-align:left">{html.escape(text, quote=False)}</td>' for text in texts)
        for texts in rows
    ]
    return f"<table><tr>{head}</tr><tr>{'</tr><tr>'.join(lines)}</tr></table>{total}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


class _Live(threading.Thread):
    """The table with buttons. Once all its processes have ended, or it is shown anew, a still table replaces it."""

    shown: _Live | None = None

    def __init__(self, found: Processes) -> None:
        super().__init__(name="labkit-processes", daemon=True)
        from ipywidgets import HTML, Button, HBox, Layout, VBox

        from labkit.ui import widgets

        widgets.close_unshown()
        self._found = found
        self._texts = found.rows()
        self._over = threading.Event()
        self._buttons, self._rows, self._lines = [], [], []
        for process, texts in zip(found, self._texts, strict=True):
            button = Button(description="▪", tooltip=_what_ends(process), layout=Layout(width="34px"))
            button.on_click(lambda _, process=process: self._clicked(process))
            kernel.answer_while_the_cell_runs(button)
            row = HTML(_line(texts))
            self._buttons.append(button)
            self._rows.append(row)
            self._lines.append(HBox([button, row]))
        self._total = HTML(html.escape(found.total()))
        self._box = VBox([*self._lines, self._total])
        if _Live.shown is not None:
            _Live.shown.finish()
        _Live.shown = self
        self._box_handle = kernel.display(self._box, display_id=True)

    def run(self) -> None:
        from labkit.ui import widgets  # not above: it imports ipywidgets

        while not self._over.wait(LOOK_EVERY_S):
            live = {process.pid: process.state for process in holders.processes()}
            for index, process in enumerate(self._found):
                state = live.get(process.pid, "ended")
                if state == "ended" or self._texts[index][-1] != "ending":
                    self._set_state(index, state)
            if all(texts[-1] == "ended" for texts in self._texts):
                break
        self._box_handle.update(
            {"text/html": _table(self._texts, self._found.total()), "text/plain": repr(self._found)}, raw=True
        )
        self._box.children = [self._total]  # where the page takes no change of the output: see `LiveView`
        self._total.value = _table(self._texts, self._found.total())
        widgets.close_later(self._lines)
        if _Live.shown is self:
            _Live.shown = None

    def finish(self) -> None:
        """Have a still table replace it."""
        self._over.set()

    def _clicked(self, process: HeldProcess) -> None:
        process.end()
        for index, other in enumerate(self._found):  # what ends with it, ends
            if other.pid == process.pid or (process.kind != "standby" and other[:2] == process[:2]):
                self._set_state(index, "ending")

    def _set_state(self, index: int, state: str) -> None:
        if state != self._texts[index][-1]:
            self._texts[index] = (*self._texts[index][:-1], state)
            self._rows[index].value = _line(self._texts[index])
            self._buttons[index].disabled = state in ("ending", "ended")


def _line(texts: tuple[str, ...]) -> str:
    cells = zip(texts, (240, 70, 90, 80, 90), strict=True)
    style = "display:inline-block;white-space:nowrap;overflow:hidden;width"
    return "".join(f'<span style="{style}:{width}px">{html.escape(text, quote=False)}</span>' for text, width in cells)


def _what_ends(process: HeldProcess) -> str:
    if process.kind == "standby":
        return "End this process: the next launch starts one in its place"
    return f"End the {process.kind} with all its ranks"
