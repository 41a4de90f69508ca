"""What a person sees of a session: its ranks, what they do, and how long they stay."""

from __future__ import annotations

import html
import math
import threading
from typing import TYPE_CHECKING, Any

from labkit.session.ranks import duration
from labkit.ui import kernel
from labkit.ui.tables import ranks_html

if TYPE_CHECKING:
    from labkit.session.session import Session

REDRAW_S = 0.5
"""Time between two redraws of a session's live view."""


def show(session: Session) -> None:
    """Show a session in the cell: live where a person watches, else as it is now."""
    if not kernel.has_kernel():
        print(_text(session))
    elif session.over or not kernel.is_interactive():
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
    rows = (
        (
            each.rank,
            each.state,
            [
                html.escape(each.where),
                f"{each.memory_bytes / 1e6:,.0f} MB of its own" if each.memory_bytes else "",
                html.escape(each.note),
            ],
        )
        for each in session.ranks
    )
    return f"<b>{html.escape(_headline(session))}</b>{ranks_html(rows)}"


class _Live(threading.Thread):
    """A table of the ranks and a Close button, drawn anew while the session is there."""

    def __init__(self, session: Session) -> None:
        super().__init__(name="labkit-session-view", daemon=True)
        import ipywidgets as widgets

        from labkit.ui.widgets import close_later

        self._close_later = close_later
        self._session = session
        self._table = widgets.HTML(_html(session), layout=widgets.Layout(flex="1 1 0", min_width="0"))
        self._button = widgets.Button(
            description="Close",
            icon="power-off",
            tooltip="End these ranks; their variables are lost",
            layout=widgets.Layout(width="90px", flex="0 0 auto", margin="2px 12px 2px 0"),
        )
        self._button.on_click(lambda _: threading.Thread(target=session.close, daemon=True).start())
        kernel.answer_while_the_cell_runs(self._button)
        self._box = widgets.HBox([self._button, self._table])
        self._box_handle: Any = kernel.display(self._box, display_id=True)

    def run(self) -> None:
        while not self._session.ended.wait(REDRAW_S):
            if (shown := _html(self._session)) != self._table.value:
                self._table.value = shown
        self._box_handle.update({"text/html": _html(self._session), "text/plain": _text(self._session)}, raw=True)
        self._close_later([self._box])
