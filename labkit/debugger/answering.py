"""Who can answer a rank that asks for a line: the panel in the live view, who waits for the run, or nobody and why."""

from __future__ import annotations

import _thread
import contextlib
import getpass
import select
import sys
import threading
from collections.abc import Iterator

from labkit.engines.base import Engine
from labkit.system import host
from labkit.ui import kernel

PANEL, WAITER = "panel", "waiter"

LOOK_EVERY_S = 0.1
"""Time between two looks whether the run is over, while somebody is asked for a line."""


def answerer(engine: Engine, live: bool | None, wait: bool) -> tuple[str, str]:
    """Return who can answer, `PANEL` or `WAITER`, and ""; or "" and why nobody can.

    `live` and `wait` are those of `labkit.launch`. The panel answers while its cell runs where the kernel has subshells
    (ipykernel 7) and, as turns out later, the front end has opened one; elsewhere who waits for the run, in the main
    thread, asks by `input`.
    """
    waits = wait and threading.current_thread() is threading.main_thread()
    if not engine.sends_words:
        return "", "its ranks are on a cluster, or torchrun's, and are reached through files"
    if kernel.is_interactive():
        if live in (None, True) and (kernel.has_subshells() or not wait):
            return PANEL, ""
        return (WAITER, "") if waits else ("", "the run has no live view, and no cell waits for it")
    if kernel.has_kernel():
        return "", "the notebook runs headless"
    if sys.stdin is None or not sys.stdin.isatty():
        return "", "there is neither a notebook nor a terminal"
    return (WAITER, "") if waits else ("", "nobody waits for the run at the terminal (wait=False)")


def read_line(prompt: str, over: threading.Event, is_secret: bool = False) -> str | None:
    """Ask at the terminal, or under the cell; return the line, or None once the run is over.

    What is secret is not shown. Raises KeyboardInterrupt if that is the answer.
    """
    return (_from_front_end if kernel.has_kernel() else _from_terminal)(prompt, over, is_secret)


def _from_terminal(prompt: str, over: threading.Event, is_secret: bool) -> str | None:
    print(prompt, end="", flush=True)
    with _not_shown() if is_secret else contextlib.nullcontext():
        while not over.is_set():
            if select.select([sys.stdin], [], [], LOOK_EVERY_S)[0]:
                line = sys.stdin.readline()
                if not line:
                    raise KeyboardInterrupt  # the end of input, Ctrl-D: nobody will answer any more
                return line.rstrip("\n")
    print()
    return None


@contextlib.contextmanager
def _not_shown() -> Iterator[None]:
    """Have the terminal not show what is typed, as `getpass` has it, which cannot be asked to give up."""
    try:
        with host.hidden_input():
            yield
    finally:
        print()


def _from_front_end(prompt: str, over: threading.Event, is_secret: bool) -> str | None:
    lock, answered = threading.Lock(), threading.Event()

    def end_the_question() -> None:
        while not answered.is_set():
            if over.wait(LOOK_EVERY_S):
                with lock:
                    if not answered.is_set():
                        _thread.interrupt_main()
                return

    threading.Thread(target=end_the_question, name="labkit-question", daemon=True).start()
    try:
        return getpass.getpass(prompt) if is_secret else input(prompt)  # both are the kernel's own while a cell runs
    except KeyboardInterrupt:
        if over.is_set():
            return None
        raise
    finally:
        with lock:
            answered.set()
