"""What a person sees of a session: its ranks, and what they do."""

from __future__ import annotations

import html
import threading
from typing import Any

from labkit.ui import kernel
from labkit.ui.tables import ranks_html

Session = Any
"""A `labkit.Session`, which shows itself through this module."""

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


def headline(session: Session) -> str:
    """Return what the ranks do."""
    ranks = f"{session.world_size} reserved rank{'s' if session.world_size > 1 else ''}"
    if session.over:
        return f"{ranks} · gone: {session.why_over}"
    return f"{ranks} · {f'busy with {session.busy_with}' if session.busy_with else 'idle'}"


def _text(session: Session) -> str:
    rows = [f"  rank {each.rank}  {each.state}  {each.where}" for each in session.ranks]
    return "\n".join([headline(session), *rows])


def _html(session: Session) -> str:
    rows = ((each.rank, each.state, [each.where]) for each in session.ranks)
    return f"<b>{html.escape(headline(session))}</b>{ranks_html(rows)}"


class _Live(threading.Thread):
    """A table of the ranks and a Close button, drawn anew while the session is there."""

    def __init__(self, session: Session) -> None:
        super().__init__(name="labkit-session-view", daemon=True)
        import ipywidgets as widgets

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
        self._table.value = _html(self._session)  # where the page takes no change of the output: see `LiveView`
        self._box.children = [self._table]
        self._box_handle.update({"text/html": _html(self._session), "text/plain": _text(self._session)}, raw=True)
