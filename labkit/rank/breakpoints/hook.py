"""What stands in a rank in place of `breakpoint`, `pdb.set_trace`, `pdb.post_mortem`, `dist.breakpoint`, `input` and
`getpass.getpass`. Runs in the rank.

The notebook has found out whether anybody can answer. If so, the rank's thread waits for a line, which the thread that
receives the notebook's words brings; a stop, and the notebook's end, end the wait. If not, `NobodyAnswers` is raised.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import getpass
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from labkit.protocol import source
from labkit.protocol.job import Job, RankHook
from labkit.protocol.pages import help_hint
from labkit.rank import process_group
from labkit.rank.breakpoints.conversation import HOLD, Conversation, place_of
from labkit.rank.channels import Channel

if TYPE_CHECKING:
    from labkit.rank.breakpoints.prompt import RankPdb

HELD = timedelta(days=1)
"""How long collectives wait in a run that somebody debugs."""

# The problem: the other ranks wait in a collective, and gloo gives up after 30 minutes, NCCL after 10. A collective
# keeps the limit with which it was called, so the others' must be long before they call it, and they do that within
# milliseconds of a stop. What does not work: telling them when a rank stops, which comes too late for just that
# collective; a long limit in every run, for one that hangs at night would hang till morning. So a function that was
# sent by value and says `breakpoint` or `set_trace` has the long limit from the start; in others a stop sets it for
# what is called from then on. What still fails: a stop in an imported module leaves the collective in which the others
# wait already, and the function's own `new_group` made before a stop that it does not mention, the usual limit.


class NobodyAnswers(EOFError):  # noqa: N818 - as Stopped and WorkerFailed
    """A rank asks for a line where nobody can type one. An EOFError, as `input` raises at the end of its input."""


def _ignore(word: str) -> None:
    """Do nothing with it."""


class PromptHook(RankHook):
    """What a job carries for its ranks."""

    def __init__(self, why_nobody: str, is_mentioned: bool) -> None:
        self.why_nobody, self.is_mentioned = why_nobody, is_mentioned
        """Why nobody can answer, "" if somebody can; and whether the function says that it may stop."""
        self.listen: Callable[[str], object] = _ignore
        """What is done with a word from the notebook, while the function is called."""

    def around(self, job: Job, channel: Channel) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a rank calls the function."""
        return _Installed(self, job, channel)

    def receive(self, word: str, channel: Channel) -> None:
        """Pass on what somebody types."""
        self.listen(word)


def hold_timeouts() -> None:
    """Let the collectives that are called from now on wait for `HELD`, in every group that there is."""
    for group in list(distributed_c10d._world.pg_map):
        with contextlib.suppress(ValueError, RuntimeError):  # not in that group; or it is being destroyed
            process_group.set_timeout(HELD, group)


def _end_stepping(before: Any) -> None:
    """Put back what traced this thread before, if Python's debugger does now: another's tracer is left alone."""
    bdb = sys.modules.get("bdb")
    if bdb is not None and isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
        sys.settrace(before)


class _Installed:
    """The hooks, in place for one job."""

    def __init__(self, hooks: PromptHook, job: Job, channel: Channel) -> None:
        self._hooks, self._channel, self._cells = hooks, channel, job.cells
        self._conversation = Conversation(channel)
        self._pid = os.getpid()
        self._pdb: RankPdb | None = None
        self._skipped: dict[tuple[str, int], int] = {}
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        tracer = sys.gettrace()
        self._undo.append(lambda: _end_stepping(tracer))
        self._put(sys, "breakpointhook", self._breakpoint)
        self._put(builtins, "input", self._input)
        self._put(getpass, "getpass", self._getpass)
        self._put(dist, "breakpoint", self._dist_breakpoint)
        if self._hooks.is_mentioned or "pdb" in sys.modules:
            import pdb  # costs milliseconds; where it is imported unmentioned, its `input` is the one above

            self._put(pdb, "set_trace", self._set_trace)
            self._put(pdb, "post_mortem", self._post_mortem)
            self._put(pdb, "pm", self._pm)
        if not self._hooks.why_nobody:
            self._put(self._hooks, "listen", self._hear)
            if self._hooks.is_mentioned:
                hold_timeouts()

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self._undo):
            undo()
        if self._pdb is not None:
            self._pdb.clear_all_breaks()  # pdb keeps them for the whole process

    def _put(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _hear(self, word: str) -> None:
        if word == HOLD:
            hold_timeouts()
        else:
            self._conversation.receive(word)

    # What the reader's code calls

    def _breakpoint(self, *_: Any, header: str = "", **__: Any) -> None:
        if os.environ.get("PYTHONBREAKPOINT") != "0":
            self._stop(sys._getframe(1), "breakpoint()", header)

    def _set_trace(self, *_: Any, header: str = "", **__: Any) -> None:
        self._stop(sys._getframe(1), "pdb.set_trace()", header)

    def _post_mortem(self, t: Any = None) -> None:
        raised = getattr(t, "__traceback__", t) or sys.exc_info()[2]
        if raised is None:
            raise ValueError("pdb.post_mortem() needs a traceback, or an exception that is being handled")
        self._pdb_for(sys._getframe(1), "pdb.post_mortem()").post_mortem(raised)

    def _pm(self) -> None:
        raised = getattr(sys, "last_exc", None) or getattr(sys, "last_traceback", None)
        if raised is None:
            raise ValueError("pdb.pm() looks at the last exception that was not caught; a rank has none")
        self._post_mortem(raised)

    def _dist_breakpoint(self, rank: int = 0, skip: int = 0, timeout_s: Any = None) -> None:
        """As PyTorch's: one rank stops, and the others wait for it right there."""
        frame = sys._getframe(1)
        at = frame.f_code.co_filename, frame.f_lineno
        self._skipped[at] = self._skipped.get(at, 0) + 1
        if self._skipped[at] <= skip:
            return
        if self._channel.rank == rank:
            self._stop(frame, "dist.breakpoint()", then=dist.barrier)
        else:
            dist.barrier()

    def _input(self, prompt: object = "", /) -> str:
        instead = "Pass the value to launch as an argument of the function"
        return self._value(sys._getframe(1), "input", str(prompt), instead)

    def _getpass(self, prompt: str = "Password: ", *_: Any, **__: Any) -> str:
        return self._value(sys._getframe(1), "getpass", prompt, "Read it from the environment: os.environ[…]")

    def _value(self, frame: FrameType, kind: str, prompt: str, instead: str) -> str:
        self._check_somebody_answers(frame, f"{kind}()", instead)
        answer = self._conversation.ask(kind, prompt, "", place_of(frame))
        self._conversation.let_go("")
        return answer

    def _stop(self, frame: FrameType, what: str, header: str = "", then: Callable[[], object] | None = None) -> None:
        self._pdb_for(frame, what).stop(frame, header, then)

    def _pdb_for(self, frame: FrameType, what: str) -> RankPdb:
        """Return the debugger. Raises NobodyAnswers if nobody can answer what it asks."""
        self._check_somebody_answers(
            frame, what, "One rank alone can be debugged anywhere that takes input: on=labkit.Here()"
        )
        if self._pdb is None:
            from labkit.rank.breakpoints.prompt import RankPdb

            titles = {file: cell.title for file, cell in self._cells.items()}
            self._pdb = RankPdb(self._conversation, titles)
        return self._pdb

    def _check_somebody_answers(self, frame: FrameType, what: str, instead: str) -> None:
        why = self._hooks.why_nobody
        if os.getpid() != self._pid:
            why = "this is a process that the rank has started, a DataLoader's worker, say (try num_workers=0)"
        if why:
            file, line, _ = place_of(frame)
            where = source.place_of(file, line, self._cells)
            said = source.line_of(file, line, self._cells)
            code = f" ({said})" if said not in ("", what) else ""
            raise NobodyAnswers(
                f"rank {self._channel.rank} is at {what} in {where}{code}, and nobody can answer: "
                f"{why}. {instead}, or launch it from JupyterLab on this machine\n{help_hint('nobody_answers')}"
            )
        hold_timeouts()  # of groups made since, too, for what this rank calls itself
