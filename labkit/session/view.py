"""What a person sees of a session: its ranks, and what they do."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable
from typing import Any

from labkit.session.ranks import SessionFacts
from labkit.ui import kernel
from labkit.ui.tables import ranks_html

REDRAW_S = 0.5
"""Time between two redraws of a session's live view."""


def show(facts: Callable[[], SessionFacts], ended: threading.Event, close: Callable[[], object]) -> None:
    """Show a session in the cell: live where a person watches, else as it is now.

    Args:
        facts: returns what is known of the session now.
        ended: is set once the ranks are gone.
        close: ends them.
    """
    now = facts()
    if not kernel.has_kernel():
        print(_text(now))
    elif now.is_over or not kernel.is_interactive():
        kernel.display({"text/html": _html(now), "text/plain": _text(now)}, raw=True)
    else:
        _Live(facts, ended, close).start()


def _headline(session: SessionFacts) -> str:
    """Return what the ranks do."""
    ranks = f"{session.world_size} reserved rank{'s' if session.world_size > 1 else ''}"
    if session.is_over:
        return f"{ranks} · gone: {session.why_over}"
    return f"{ranks} · {f'busy with {session.busy_with}' if session.busy_with else 'idle'}"


def _text(session: SessionFacts) -> str:
    rows = [f"  rank {each.rank}  {each.state}  {each.where}" for each in session.ranks]
    return "\n".join([_headline(session), *rows])


def _html(session: SessionFacts) -> str:
    rows = ((each.rank, each.state, [html.escape(each.where), html.escape(each.note)]) for each in session.ranks)
    return f"<b>{html.escape(_headline(session))}</b>{ranks_html(rows)}"


class _Live(threading.Thread):
    """A table of the ranks and a Close button, drawn anew while the session is there."""

    def __init__(self, facts: Callable[[], SessionFacts], ended: threading.Event, close: Callable[[], object]) -> None:
        super().__init__(name="labkit-session-view", daemon=True)
        import ipywidgets as widgets

        self._facts, self._session_ended = facts, ended
        self._table = widgets.HTML(_html(facts()), layout=widgets.Layout(flex="1 1 0", min_width="0"))
        self._button = widgets.Button(
            description="Close",
            icon="power-off",
            tooltip="End these ranks; their variables are lost",
            layout=widgets.Layout(width="90px", flex="0 0 auto", margin="2px 12px 2px 0"),
        )
        self._button.on_click(lambda _: threading.Thread(target=close, daemon=True).start())
        kernel.answer_while_the_cell_runs(self._button)
        self._box = widgets.HBox([self._button, self._table])
        self._box_handle: Any = kernel.display(self._box, display_id=True)

    def run(self) -> None:
        while not self._session_ended.wait(REDRAW_S):
            if (shown := _html(self._facts())) != self._table.value:
                self._table.value = shown
        facts = self._facts()
        self._table.value = _html(facts)  # where the page takes no change of the output: see `LiveView`
        self._box.children = [self._table]
        self._box_handle.update({"text/html": _html(facts), "text/plain": _text(facts)}, raw=True)
