"""What a person sees of a session: its ranks, what they do, and how long they stay."""

from __future__ import annotations

import html
import math
import threading
from typing import TYPE_CHECKING, Any

from labkit.session.ranks import duration
from labkit.ui import kernel
from labkit.ui.view import CLOSE_AFTER_S, STATE_COLORS, answer_while_the_cell_runs, close

if TYPE_CHECKING:
    from labkit.session.session import Session

REDRAW_S = 0.5
"""Time between two redraws of a session's live view."""


def show(session: Session) -> None:
    """Show a session in the cell: live where a person watches, else as it is now."""
    if not kernel.has_kernel():
        print(_text(session))
    elif session.over or not kernel.has_a_reader():
        kernel.display({"text/html": _html(session), "text/plain": _text(session)}, raw=True)
    else:
        _Live(session).start()


def _headline(session: Session) -> str:
    """Return what the ranks do and how long they stay."""
    ranks = f"{session.world_size} reserved rank{'s' if session.world_size > 1 else ''}"
    if session.over:
        return f"{ranks} · gone: {session.why_over}"
    parts = [ranks, f"busy with {session.busy_with}" if session.busy_with else "idle"]
    if math.isfinite(left_s := session.idle_left_s):
        parts.append(f"end in {duration(left_s)} if nothing runs on them")
    return " · ".join([*parts, *session.notices])


def _text(session: Session) -> str:
    rows = [f"  rank {each.rank}  {each.state}  {each.where}" for each in session.ranks]
    return "\n".join([_headline(session), *rows])


def _html(session: Session) -> str:
    rows = []
    for each in session.ranks:
        dot = f'<span style="color:{STATE_COLORS[each.state]};font-size:1.3em">●</span>'
        cells = [
            f"{dot} <b>rank {each.rank}</b> {each.state}",
            html.escape(each.where),
            f"{each.memory_bytes / 1e6:,.0f} MB of its own" if each.memory_bytes else "",
            html.escape(each.note),
        ]
        style = "padding:0 14px 0 0;text-align:left;white-space:nowrap"
        rows.append("<tr>" + "".join(f'<td style="{style}">{cell}</td>' for cell in cells) + "</tr>")
    table = f'<table style="border:0;line-height:1.4;margin:0">{"".join(rows)}</table>'
    return f"<b>{html.escape(_headline(session))}</b>{table}"


class _Live(threading.Thread):
    """A table of the ranks and a Close button, drawn anew while the session is there."""

    def __init__(self, session: Session) -> None:
        super().__init__(name="labkit-session-view", daemon=True)
        import ipywidgets as widgets

        self._session = session
        self._table = widgets.HTML(_html(session))
        self._button = widgets.Button(
            description="Close",
            icon="power-off",
            tooltip="End these ranks; their variables are lost",
            layout=widgets.Layout(width="90px", flex="0 0 auto", margin="2px 12px 2px 0"),
        )
        self._button.on_click(lambda _: threading.Thread(target=session.close, daemon=True).start())
        answer_while_the_cell_runs(self._button)
        self._box = widgets.HBox([self._button, self._table])
        self._display: Any = kernel.display(self._box, display_id=True)

    def run(self) -> None:
        while not self._session.ended.wait(REDRAW_S):
            if (shown := _html(self._session)) != self._table.value:
                self._table.value = shown
        self._display.update({"text/html": _html(self._session), "text/plain": _text(self._session)}, raw=True)
        closing = threading.Timer(CLOSE_AFTER_S, self._close)  # not while a browser may still be making views of them
        closing.daemon = True
        closing.start()

    def _close(self) -> None:
        for widget in (self._box, self._button, self._table):
            close(widget)
