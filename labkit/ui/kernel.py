"""The notebook that this process is the kernel of, if it is one: its cells, who watches, how to show something there.

The one place that asks IPython and ipykernel.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

    from labkit.protocol.job import Cell


WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class Execution(NamedTuple):
    """One execution of one cell."""

    cell: str
    number: int


def shell() -> Any:
    """Return IPython's shell, or None."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    return get_ipython()


def has_kernel() -> bool:
    """Return whether this is a notebook's kernel, which can show more than text."""
    return "ipykernel" in sys.modules and getattr(shell(), "kernel", None) is not None


def is_interactive() -> bool:
    """Return whether a person watches, rather than papermill or nbconvert.

    A front end with a person at it lets a cell ask for input; the two others do not.
    """
    return has_kernel() and bool(getattr(shell().kernel, "_allow_stdin", False))


def after_each_cell(call: Callable[[], object]) -> None:
    """Have `call` called whenever a cell has run."""
    here = shell()
    if here is not None:
        here.events.register("post_run_cell", lambda _: call())


def this_execution() -> Execution | None:
    """Return the cell that is being executed: by its id, or by its text where the front end sends none."""
    here = shell()
    if here is None:
        return None
    parent = getattr(here, "parent_header", None) or {}
    text = here.history_manager.input_hist_raw[-1] if here.history_manager else ""
    return Execution(parent.get("metadata", {}).get("cellId") or text, here.execution_count)


def cell_numbers() -> dict[str, int]:
    """Return the number of every cell run so far, by the file name that tracebacks use for it."""
    here = shell()
    if here is None:
        return {}
    names = getattr(here.compile, "_filename_map", None)
    if names is None:  # IPython 7, which hosted notebooks have
        ran = zip(here.history_manager.input_hist_raw, here.history_manager.input_hist_parsed, strict=False)
        names = {_file_name(here.compile, *code, number): number for number, code in enumerate(ran) if number}
    return dict(names)


@functools.cache
def _file_name(compiler: Any, raw: str, transformed: str, number: int) -> str:
    return str(compiler.get_code_name(raw, transformed, number))


def cells() -> dict[str, Cell]:
    """Return every cell run so far, by the file name that tracebacks use for it."""
    from labkit.protocol.job import Cell  # not above: it imports torch, and `import labkit` in a notebook asks here

    return {
        file: Cell(cell_title(number), "".join(linecache.getlines(file))) for file, number in cell_numbers().items()
    }


def cell_title(number: int) -> str:
    """Return what tracebacks call a cell."""
    return f"Cell In[{number}]"


def display(thing: Any, **options: Any) -> Any:
    """Show something under the cell."""
    from IPython.display import display as show

    if options and hasattr(thing, "model_id") and hasattr(thing, "_ipython_display_"):
        # A widget of ipywidgets 7 shows itself, without the display id by which it is to be replaced.
        view = {"version_major": 2, "version_minor": 0, "model_id": thing.model_id}
        thing, options = {"text/plain": repr(thing), WIDGET_VIEW: view}, {**options, "raw": True}
    return show(thing, **options)


def reserve() -> DisplayHandle:
    """Reserve an output under the cell for what is shown there later, with `update`."""
    return display({"text/plain": ""}, raw=True, display_id=True)


def has_subshells() -> bool:
    """Return whether this kernel can answer a widget while a cell runs, as ipykernel does from 7 on."""
    return bool(getattr(getattr(shell(), "kernel", None), "_supports_kernel_subshells", False))


def answer_while_the_cell_runs(widget: Any) -> None:
    """Let a widget's messages be handled by a kernel subshell, so that a button works while its own cell runs.

    JupyterLab sends widgets' messages to a subshell (JEP 91, https://jupyter.org/enhancement-proposals), but
    ipykernel 7.4 routes them back to the shell that last updated the widget, the one that is busy with the cell. Where
    a front end knows no subshells, `default` is None and the message waits for the main shell, as it always did. In a
    kernel without them (ipykernel 6) this says nothing to anybody.
    """
    widget.comm._reply_subshell_for = lambda data, default: default
