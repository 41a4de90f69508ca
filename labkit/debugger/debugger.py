"""Beside a run: which ranks stand at which prompt, and to whom a line goes that is typed. Starts no process.

Ranks at the same line are asked once. What only looks (`p loss`, `up`) goes to the rank in the prompt; what lets it go
on (`continue`, `next`) goes to all that stand with it, because in the next collective they need each other.
"""

from __future__ import annotations

import html
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from labkit.debugger.answering import PANEL, WAITER, answerer, read_line
from labkit.failures.grouping import rank_list
from labkit.monitor.observers import RunObserver
from labkit.protocol import events, source
from labkit.protocol.job import Cell, Job
from labkit.rank.breakpoints.conversation import HOLD, LINE, Asks, LetGo, Quits, is_move
from labkit.rank.breakpoints.hook import PromptHook
from labkit.ui import kernel

TOGETHER_S = 1.0
"""How long a line typed waits for ranks that were let go together to stand again; one may be blocked by then."""

GATHER_S = 0.3
"""How long a new question waits for other ranks that ask the same, where it cannot be changed once it is asked."""

AROUND = 3
"""Lines of source shown before and after the one where a rank stands."""

MENTIONS = (b"breakpoint", b"set_trace", b"post_mortem")
"""Names by which a function that was sent by value shows that it may stop."""

KEPT = 40_000
"""Characters of what was said that are kept."""


class Debugger(RunObserver):
    """Beside one run. Its methods are called from the thread that follows the run, the panel's, and a waiter's."""

    title = "debugger"

    def __init__(self, live: bool | None, wait: bool) -> None:
        """Take how the run is shown, as `labkit.launch` is told."""
        self._live, self._wait = live, wait
        self._way = ""
        """Who can answer; "" if nobody can."""
        self._cells: Mapping[str, Cell] = {}
        self._began_s = time.monotonic()
        self._changed = threading.Condition()
        self._asking: dict[int, Asks] = {}
        self._moving: set[int] = set()
        """Ranks that were given a line, and have neither asked again nor been let go."""
        self._together: set[int] = set()
        """Those that were given the last one."""
        self._unshown: dict[int, str] = {}
        self._last = ""
        self._current: int | None = None
        self._is_talked_to = False
        """Whether anything was typed for the current rank since it has stopped."""
        self._has_held = False
        self.said = ""
        """What the debuggers have written, and what was typed."""
        self._unprinted = ""

    # What the run asks

    def begin(self, job: Job) -> Job:
        """Find out who can answer the run's ranks, and return the job with what they need to ask."""
        if self.run.engine.runs_in_this_process:  # where Python's own debugger is at hand
            return job
        self._cells = job.cells
        self._way, why_nobody = answerer(self.run.engine, self._live, self._wait)
        return job.with_hook(PromptHook(why_nobody, any(name in job.function.head for name in MENTIONS)))

    @property
    def _is_in_use(self) -> bool:
        return bool(self._asking or self._moving)

    def _pause_timeout(self) -> None:
        """Have `stall_s` not run while somebody debugs."""
        if self._is_in_use:
            self.run.paused_by.add(self)
        else:
            self.run.paused_by.discard(self)

    def take(self, event: Any) -> None:
        """Note what an event of the run says."""
        match event:
            case Asks() | LetGo():
                with self._changed:
                    self._take(event)
                    self._changed.notify_all()
                if isinstance(event, Asks) and not self._has_held:
                    self._has_held = True
                    for rank in range(self.run.world_size):
                        self.run.engine.say(rank, HOLD)
                self._show()
            case Quits():
                # Once whoever sent the line is done with it: a rank's inbox takes no stop while something else is sent.
                with self._changed:
                    self._say("the run is being stopped\n")
                self.run.ask_to_stop()
            case events.Exit() | events.Failure() | events.Result() | events.Stopped():
                with self._changed:
                    self._forget(event.rank)
                    self._changed.notify_all()
                self._show()

    def attend(self) -> None:
        """Ask whoever waits for the run, as long as ranks ask; in the thread that waits."""
        if self._way == PANEL and self._asking and self._is_panel_deaf():
            with self._changed:
                self._way, self.run.panel = WAITER, None
        while self._way == WAITER and self._asking and not self.run.over.is_set():
            if not self._is_talked_to:
                time.sleep(GATHER_S)
            if not (prompt := self.prompt):
                break
            self._print()
            line = read_line(prompt, self.run.over, self._is_secret)
            if line is not None:
                self.submit(line)
            with self._changed:
                self._changed.wait_for(lambda: bool(self.prompt) or not self._is_in_use, TOGETHER_S)
        self._print()

    def _is_panel_deaf(self) -> bool:
        """Whether what is typed in the panel waits for the cell that is now waiting for the run.

        The kernel may have subshells, and the front end use none, as VS Code.
        """
        if not kernel.has_kernel() or threading.current_thread() is not threading.main_thread():
            return False
        from labkit.ui.live import SUBSHELL_S  # not above: it imports the widgets

        return not kernel.has_been_given_a_subshell() and time.monotonic() > self._began_s + SUBSHELL_S

    def _print(self) -> None:
        if self._way == WAITER and self._unprinted:
            with self._changed:
                text, self._unprinted = self._unprinted, ""
            print(text, end="", flush=True)

    # Asking and answering

    @property
    def prompt(self) -> str:
        """What stands before the line to be typed; "" while the current rank does not ask."""
        ask = self._ask
        return f"(rank {ask.rank}) {ask.prompt}" if ask and not self.run.stopping else ""

    @property
    def _ask(self) -> Asks | None:
        """What the current rank asks."""
        return None if self._current is None else self._asking.get(self._current)

    @property
    def _is_secret(self) -> bool:
        """Whether what is typed is not to be seen."""
        return self._ask is not None and self._ask.is_secret

    @property
    def where(self) -> list[str]:
        """Which ranks stand where, one line per place."""
        places: dict[tuple[str, str], list[int]] = {}
        for ask in sorted(self._asking.values()):
            at = "stands at" if ask.is_debugger else "asks for input at"
            places.setdefault((at, self._place(ask)), []).append(ask.rank)
        plural = {"asks for input at": "ask for input at", "stands at": "stand at"}
        return [
            f"{rank_list(ranks)} {at if len(ranks) == 1 else plural[at]} {place}"
            for (at, place), ranks in places.items()
        ]

    def submit(self, line: str) -> None:
        """Take a line that was typed. Waits for ranks that were let go together, a second at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._together & self._moving, TOGETHER_S)
            ask = self._ask
            self._say(f"{self.prompt}{'·' * 8 if self._is_secret else line}\n", echo=True)
            self._is_talked_to, wants_list = True, False
            if switch := self._switch(ask, line):
                self._switch_to(int(switch))
            elif line.strip() == "ranks" and (ask is None or ask.is_debugger):
                wants_list = True
            elif ask is None:
                still = "no rank asks" if not self._is_in_use else "it runs, or waits for another rank"
                self._say(f"not taken: {still}. `ranks` says where each one stands\n")
            else:
                self._send(ask, line)
        if wants_list:
            text = self._where_all_stand()  # asks the ranks, and waits for their answers
            with self._changed:
                self._say(text)
        self._show()

    def _switch(self, ask: Asks | None, line: str) -> str:
        found = re.fullmatch(r"rank\s+(\d+)", line.strip())
        if found and ask is not None and not ask.is_debugger:
            other = self._asking.get(int(found[1]), ask)
            return "" if _same_question(ask, other) else found[1]  # "" where it is the input itself
        return found[1] if found else ""

    def _switch_to(self, rank: int) -> None:
        if rank in self._asking:
            self._current = rank
            self._say(self._unshown.pop(rank, "") or f"{self._place(self._asking[rank])}\n")
        elif rank < self.run.world_size:
            self._say(f"rank {rank} does not ask: it runs, or waits for another. `ranks` says where it stands\n")
        else:
            self._say(f"there are ranks 0 to {self.run.world_size - 1}\n")

    def _send(self, ask: Asks, line: str) -> None:
        """Send a line to the rank in the prompt; what lets it go on, and an input, to all that ask the same."""
        if not ask.is_debugger:
            to = [other for other in self._asking.values() if _same_question(ask, other)]
        else:
            line = self._last = line if line.strip() else self._last  # as pdb: an empty line repeats
            to = [other for other in self._asking.values() if _same_question(ask, other)] if is_move(line) else [ask]
        self._together = {other.rank for other in to}
        for other in to:
            del self._asking[other.rank]
            self._moving.add(other.rank)
            self.run.engine.say(other.rank, LINE + line)
        self._pause_timeout()

    def _where_all_stand(self) -> str:
        stacks = self.run.stacks()
        lines = list(self.where)
        lines += [f"rank {each.rank} {each.in_words}" for each in stacks if each.rank not in self._asking]
        return "".join(f"{line}\n" for line in lines)

    # What ranks say

    def _take(self, event: Asks | LetGo) -> None:
        self._moving.discard(event.rank)
        if isinstance(event, Asks):
            self._asking[event.rank] = event
        if event.rank == self._current:
            self._say(event.text)
        else:
            self._unshown[event.rank] = event.text
        self._pause_timeout()
        self._choose()

    def _forget(self, rank: int) -> None:
        self._moving.discard(rank)
        if self._asking.pop(rank, None) and not self.run.stopping:
            self._say(f"rank {rank} has ended\n")
        self._pause_timeout()
        self._choose()

    def _choose(self) -> None:
        """Keep the current rank if anything was typed for it, until it is let go; else take the first that asks."""
        before = self._ask
        if before is None and self._current not in self._moving:
            self._is_talked_to = False
        if self._is_talked_to or not self._asking or self.run.stopping:
            return
        self._current = min(self._asking)
        text = self._unshown.pop(self._current, "")
        if before is None or not _same_question(before, self._asking[self._current]):
            self._say(text)
        elif before.rank != self._current:
            self._unshown[before.rank] = before.text  # what was shown stands for both; whoever switches sees its own

    def _say(self, text: str, echo: bool = False) -> None:
        self.said = (self.said + text)[-KEPT:]
        if not echo:  # who types sees it
            self._unprinted = (self._unprinted + text)[-KEPT:]

    # Showing

    def _show(self) -> None:
        """Bring the panel up to date; make it when the first rank asks."""
        if self._way != PANEL:
            return
        with self._changed:
            if self.run.panel is None and self._asking:
                from labkit.debugger.panel import Panel  # not above: it imports the widgets

                self.run.panel = Panel(self.submit)
            if self.run.panel is not None:
                self.run.panel.bring_up_to_date(self.where_html, self.said, self.prompt, self._is_secret)

    @property
    def where_html(self) -> str:
        """Where ranks stand, with the source around the current one's line, as HTML."""
        ask = self._ask
        if ask is None:
            return "<b>no rank asks; they run on</b>"
        title = "".join(f"<div><b>{html.escape(line)}</b></div>" for line in self.where)
        first = max(1, ask.line - AROUND)
        shown = [(n, self._source(ask.file, n)) for n in range(first, ask.line + AROUND + 1)]
        lines = [
            f'<span style="{"font-weight:bold" if n == ask.line else "opacity:0.6"}">'
            f"{'→' if n == ask.line else ' '} {n:4}  {html.escape(text)}</span>"
            for n, text in shown
            if text is not None
        ]
        return title + f'<pre style="margin:4px 0;line-height:1.3">{chr(10).join(lines)}</pre>'

    def _place(self, ask: Asks) -> str:
        name = self._cells[ask.file].title if ask.file in self._cells else ask.file
        return f"{name}, line {ask.line}"

    def _source(self, file: str, line: int) -> str | None:
        lines = source.text_of(file, self._cells).splitlines()
        return lines[line - 1] if line <= len(lines) else None


def _same_question(one: Asks, other: Asks) -> bool:
    return (one.kind, one.file, one.line) == (other.kind, other.file, other.line)
