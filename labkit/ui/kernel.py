"""The notebook that this process is the kernel of, if it is: its cells, who looks, and how to show something there.

The one place that asks IPython and ipykernel.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from labkit.protocol.job import Cell


class Execution(NamedTuple):
    """One execution of one cell."""

    cell: str
    number: int


def shell() -> Any:
    """Give IPython's shell, if there is one."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    return get_ipython()


def has_kernel() -> bool:
    """Whether this is a notebook's kernel, which can show more than text."""
    return "ipykernel" in sys.modules and getattr(shell(), "kernel", None) is not None


def has_a_reader() -> bool:
    """Whether a person sees what is shown, rather than papermill or nbconvert.

    A front end with a person in it lets a cell ask for input.
    """
    return has_kernel() and bool(getattr(shell().kernel, "_allow_stdin", False))


def after_each_cell(call: Callable[[], object]) -> None:
    """Have something called whenever a cell has run."""
    here = shell()
    if here is not None:
        here.events.register("post_run_cell", lambda _: call())


def this_execution() -> Execution | None:
    """Give the cell that is being executed: by its id, or by its text where the front end sends none."""
    here = shell()
    if here is None:
        return None
    parent = getattr(here, "parent_header", None) or {}
    text = here.history_manager.input_hist_raw[-1] if here.history_manager else ""
    return Execution(parent.get("metadata", {}).get("cellId") or text, here.execution_count)


def cell_numbers() -> dict[str, int]:
    """Give the number of every cell run so far, by the file name that tracebacks use for it."""
    here = shell()
    return dict(getattr(here.compile, "_filename_map", {})) if here is not None else {}


def cells() -> dict[str, Cell]:
    """Give every cell run so far, by the file name that tracebacks use for it."""
    from labkit.protocol.job import Cell  # not above: it imports torch, and `import labkit` in a notebook asks here

    return {
        file: Cell(cell_title(number), "".join(linecache.getlines(file))) for file, number in cell_numbers().items()
    }


def cell_title(number: int) -> str:
    """Name a cell as tracebacks do."""
    return f"Cell In[{number}]"


def display(thing: Any, **options: Any) -> Any:
    """Show something under the cell."""
    from IPython.display import display as show

    return show(thing, **options)


def place() -> Any:
    """Reserve a place under the cell for what will be shown later: it has `update`."""
    return display({"text/plain": ""}, raw=True, display_id=True)
