"""The notebook that this process is the kernel of, if it is one: its cells, who watches, how to show something there.

The core's one place that asks IPython and ipykernel.
"""

from __future__ import annotations

import functools
import importlib.util
import linecache
import logging
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

    from labkit.protocol.job import Cell


WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
NOTHING = {"text/plain": ""}
"""Shown where there is nothing to show yet, or any more."""

NO_WIDGETS = "(shown live where the front end has widgets; what stays comes when it is over)"
"""The text of widgets, for front ends without them."""


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


def end_ranks_at_shutdown() -> None:
    """Have runs and ranks end as the kernel is asked to shut down: ipykernel waits for what it has started."""
    if has_kernel():
        shell().observe(_end_ranks, "exit_now")  # which keeps each function once


def _end_ranks(_: object) -> None:
    from labkit.monitor.active_runs import end_runs_and_ranks

    end_runs_and_ranks()


def is_interactive() -> bool:
    """Return whether a person watches, rather than papermill or nbconvert, and there are widgets to show him.

    A front end with a person at it lets a cell ask for input; the two others do not.
    """
    if not (has_kernel() and getattr(shell().kernel, "_allow_stdin", False)):
        return False
    return all(map(importlib.util.find_spec, ("ipywidgets", "anywidget")))


def is_jupyters_page() -> bool:
    """Return whether the cell was sent by JupyterLab or Notebook, which also say which cells have been deleted."""
    parent = getattr(shell(), "parent_header", None) or {}
    return "deletedCells" in parent.get("metadata", {})


def this_execution() -> Execution | None:
    """Return the cell that is being executed: by its id, or by its text where the front end sends none."""
    here = shell()
    if here is None:
        return None
    metadata = (getattr(here, "parent_header", None) or {}).get("metadata", {})
    # JupyterLab's, Notebook's and VS Code's name for it (vscode-jupyter's cellExecution.ts at 00593cb90954, read on
    # 2026-11-22, sends the address of the cell's document), and Colab's (colabtools' _history.py at 3c07d776a9d3 of
    # 2026-04-07).
    cell = metadata.get("cellId") or metadata.get("colab", {}).get("cell_id")
    text = here.history_manager.input_hist_raw[-1] if here.history_manager else ""
    return Execution(cell or text, here.execution_count)


def command_line(name: str) -> tuple[str, ...]:
    """Return `sys.argv` as a launched function is to find it: a script's own; a notebook's is the kernel's.

    What a cell has put there for `parse_args`, or `%run`, is the user's own, too. `name` stands for the script's.
    """
    application: Any = getattr(shell(), "parent", None)
    while getattr(application, "parent", None) is not None:  # of a kernel's shell first comes the kernel
        application = application.parent
    is_kernels = getattr(application, "argv", None) == sys.argv[1:]
    return (name,) if is_kernels else tuple(sys.argv)


def variables() -> dict[str, Any]:
    """Return what the notebook's cells have defined, by its names."""
    here = shell()
    return {} if here is None else {name: here.user_ns[name] for name in set(here.user_ns) - set(here.user_ns_hidden)}


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


def cells(pickled: bytes | None = None) -> dict[str, Cell]:
    """Return every cell run so far, or those with code in a pickle, by the file name that tracebacks use for it."""
    from labkit.protocol.job import Cell  # not above: it imports torch, and `import labkit` in a notebook asks here

    numbers = cell_numbers()
    files = numbers.keys() if pickled is None else files_named_in(pickled, list(numbers))
    return {file: Cell(cell_title(numbers[file]), "".join(linecache.getlines(file))) for file in files}


def files_named_in(pickled: bytes, files: list[str]) -> list[str]:
    """Return those of some files, in order, whose code is in a pickle: code travels with the name of its file.

    In one search, because the pickle may have a gigabyte of data.
    """
    found = set(re.findall("|".join(map(re.escape, files)).encode(), pickled)) if files else set()
    return [file for file in files if file.encode() in found]


def cell_title(number: int) -> str:
    """Return what tracebacks call a cell."""
    return f"Cell In[{number}]"


def display(thing: Any, **options: Any) -> Any:
    """Show something under the cell."""
    from IPython.display import display as show

    if options and hasattr(thing, "model_id"):
        # A widget of ipywidgets 7 would show itself, without the display id by which it is to be replaced.
        view = {"version_major": 2, "version_minor": 0, "model_id": thing.model_id}
        thing, options = {"text/plain": NO_WIDGETS, WIDGET_VIEW: view}, {**options, "raw": True}
    return show(thing, **options)


def reserve() -> DisplayHandle:
    """Reserve an output under the cell for what is shown there later, with `update`."""
    return display(NOTHING, raw=True, display_id=True)


def has_subshells() -> bool:
    """Return whether this kernel can answer a widget while a cell runs, as ipykernel does from 7 on."""
    return bool(getattr(getattr(shell(), "kernel", None), "_supports_kernel_subshells", False))


def has_been_given_a_subshell() -> bool:
    """Return whether a front end has opened a subshell, as JupyterLab 4.4 and Notebook 7.4 do for the first widget."""
    thread = getattr(getattr(shell(), "kernel", None), "shell_channel_thread", None)
    return thread is not None and bool(thread.manager.list_subshell())


def answer_while_the_cell_runs(widget: Any) -> None:
    """Let a widget's messages be handled by a kernel subshell, so that a button works while its own cell runs.

    JupyterLab sends widgets' messages to a subshell (JEP 91, https://jupyter.org/enhancement-proposals), but
    ipykernel 7.4 routes them back to the shell that last updated the widget, the one that is busy with the cell. Where
    a front end knows no subshells, `default` is None and the message waits for the main shell, as it always did. In a
    kernel without them (ipykernel 6) this says nothing to anybody.
    """
    answer_pages_that_join()
    widget.comm._reply_subshell_for = lambda data, default: default


@functools.cache
def answer_pages_that_join() -> None:
    """Answer a page that was reloaded while a cell runs.

    The problem: it asks in the main shell, the busy one, because it opens its subshell later: which widgets there are,
    then for the state of each; it shows no widget before it has all. So what `answer_while_the_cell_runs` does for a
    click does not help, and to do it for labkit's own widgets is not enough. What is done: the first question is
    answered in the thread that receives it, those for states by the subshell that an earlier page has opened. What
    still fails: without an earlier page, with another ipykernel than 7, it waits for the cell to end.
    """
    here: Any = getattr(shell(), "kernel", None)
    thread = getattr(here, "shell_channel_thread", None)
    if thread is None:
        return
    receive, stream, session = here.shell_channel_thread_main, here.shell_stream, here.session

    async def answer(message: list[Any]) -> bool:
        idents, parts = session.feed_identities(message, copy=False)
        peeked = session.deserialize(parts, content=False, copy=False)
        name = peeked["header"]["msg_type"]
        if peeked["header"].get("subshell_id"):
            return False
        if name in ("comm_info_request", "kernel_info_request"):
            parent = session.deserialize(parts, content=True, copy=False)
            here._publish_status("busy", "shell", parent=parent)
            await getattr(here, name)(stream, idents, parent)
            here._publish_status("idle", "shell", parent=parent)
            return True
        if name != "comm_msg" or session.unpack(peeked["content"])["data"].get("method") != "request_state":
            return False
        for subshell in thread.manager.list_subshell()[:1]:
            thread.manager.get_shell_channel_to_subshell_socket(subshell).send_multipart(message, copy=False)
            return True
        return False

    async def receive_or_answer(message: list[Any]) -> None:
        is_answered = False
        try:
            is_answered = await answer(message)
        except Exception:  # private names of ipykernel's: then it waits
            logging.getLogger(__name__).debug("a page that joins cannot be answered at once", exc_info=True)
        if not is_answered:
            await receive(message)

    thread.io_loop.add_callback(lambda: stream.on_recv(receive_or_answer, copy=False))
