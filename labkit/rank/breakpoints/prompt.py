"""Python's own debugger in a rank, with a conversation for its input and output. Imported at the first stop."""

from __future__ import annotations

import ctypes
import pdb
import sys
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

from labkit.rank.breakpoints.conversation import Conversation, outermost_of_the_reader, place_of


class _Stream:
    """What the debugger reads lines from and writes to."""

    def __init__(self, conversation: Conversation, titles: Mapping[str, str]) -> None:
        self._conversation, self._titles = conversation, titles
        self._written: list[str] = []
        self.place = ("", 0, "")
        """Where the rank stands: file, line, function."""

    def write(self, text: str) -> int:
        """Keep it until the debugger asks for a line, or the rank goes on."""
        self._written.append(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing."""

    def take(self) -> str:
        """Return what was written, with cells by their titles, and forget it."""
        text = "".join(self._written)
        self._written.clear()
        for file, title in self._titles.items():
            text = text.replace(file, title)
        return text

    def readline(self) -> str:
        """Ask for a line. The prompt is what stands unfinished in the last line."""
        text, _, prompt = self.take().rpartition("\n")
        own = prompt == f"(rank {self._conversation.rank}) "
        text = f"{text}\n" if text else ""
        return self._conversation.ask("breakpoint", "" if own else prompt, text, self.place) + "\n"


def keep_assigned(frame: FrameType | None) -> None:
    """Make the variables of a function those that were assigned to its `f_locals`.

    Before Python 3.13 these are a copy, which Python takes over by itself only after a call of a trace function. A
    rank that stops where it is has none.
    """
    if sys.version_info < (3, 13) and frame is not None:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


class RankPdb(pdb.Pdb):
    """Python's debugger, for one rank and one job."""

    def __init__(self, conversation: Conversation, titles: Mapping[str, str]) -> None:
        self._conversation, self._stream = conversation, _Stream(conversation, titles)
        stream: Any = self._stream
        # Of labkit's own lines, between the reader's, nobody wants to see any.
        super().__init__(stdin=stream, stdout=stream, skip=["labkit.*"], nosigint=True, readrc=False)
        self.prompt = f"(rank {conversation.rank}) "

    def stop(self, frame: FrameType, header: str, then: Callable[[], object] | None) -> None:
        """Stop at once in the line where `frame` is; call `then` when the rank is let go, and only then trace it.

        `set_trace` would stop at the next line, which for `dist.breakpoint` is beyond the others' wait, and for the
        last line of a function in whatever called it.
        """
        sys.settrace(None)
        self.reset()
        self.botframe = outermost_of_the_reader(frame)
        if header:
            self.message(header)
        self.interaction(frame, None)
        if then is not None:
            then()
        if self.breaks or not self._runs_on:
            self._trace(frame)

    @property
    def _runs_on(self) -> bool:
        return self.stoplineno == -1  # `continue`; any other command stops again

    def _trace(self, frame: FrameType | None) -> None:
        while frame is not None:
            frame.f_trace = self.trace_dispatch
            frame = frame.f_back if frame is not self.botframe else None
        sys.settrace(self.trace_dispatch)

    def post_mortem(self, traceback: TracebackType) -> None:
        """Be at the prompt where an exception was raised; the rank goes on after it, by whatever command."""
        sys.settrace(None)
        self.reset()
        last = traceback
        while last.tb_next is not None:
            last = last.tb_next
        file, _, function = place_of(last.tb_frame)
        self._stream.place = file, last.tb_lineno, function
        super().interaction(None, traceback)
        sys.settrace(None)
        self._conversation.let_go(self._stream.take())

    def interaction(self, frame: Any, *rest: Any) -> None:
        """Be at the prompt until a command lets the rank go on."""
        self._stream.place = place_of(frame)
        super().interaction(frame, *rest)
        if self._runs_on:
            self._conversation.let_go(self._stream.take())

    def onecmd(self, line: str) -> bool:
        """Do what a line says, and have the function see what it assigns to the function's variables."""
        frame = self.curframe
        if frame is not None:
            frame.f_locals  # noqa: B018 - as they are now; Python takes over what was assigned since then, once
        is_done = super().onecmd(line)
        keep_assigned(frame)
        return is_done

    def do_quit(self, arg: str) -> None:
        """Stop the run; the next question is then answered by the stop."""
        self._conversation.quit()

    do_q = do_exit = do_quit

    def do_run(self, arg: str) -> None:
        """Do nothing: a rank cannot begin again alone."""
        self.message("a rank cannot begin again alone: quit, and run the cell that launched it once more")

    do_restart = do_run
