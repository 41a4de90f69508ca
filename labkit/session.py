"""A session: ranks that stay, and run one piece of code after another. `%%ranks` gives it a notebook's cells."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle

from labkit import notebook
from labkit.launcher import launch
from labkit.packing import pack_variables
from labkit.records import Answer
from labkit.run import Run, WorkerFailed
from labkit.serving import Ask, compile_cell, serve
from labkit.stacks import Frame, Stacks, Standing
from labkit.verdict import LOST_PEER, MISMATCH, RankFacts, Verdict, judge
from labkit.view import print_output
from labkit.worker import Cell

ERROR_GRACE_S = 2.0
"""How long the other ranks may take to end a cell after it has failed on one; who takes longer counts as stuck."""

DEATH_S = 1.0
"""How long the end of the ranks is waited for when one has lost its connection: another may have died."""

STOP_GRACE_S = 1.0
"""How long ranks that run a cell may take to end when the notebook is interrupted."""

HINT_AFTER_S = 5.0
"""Time after which it is said where the others stand, once some ranks have ended a cell."""

PRINT_EVERY_S = 0.1
"""Least time between two looks at what the ranks have printed; within it lines are shown rank by rank."""

GONE = "the ranks and their variables are gone"

_numbers = itertools.count(1)


class Session:
    """Ranks that stay: each runs the code that it is given, and keeps its variables for the next.

    They are started, watched and ended like those of `labkit.launch`: a rank that dies ends the session with the usual
    `labkit.WorkerFailed`, an interrupt stops it, and nothing outlives the notebook. The code finds `worker` (the
    `labkit.Worker`), `rank`, `world_size`, `torch` and `dist`.

    >>> with labkit.Session(4) as session:
    ...     session.run("x = torch.arange(4.) + rank; dist.all_reduce(x)")
    ...     x_by_rank = session.values("x")
    """

    def __init__(self, world_size: int = 2, seed: int | None = 0, backend: str | None = None) -> None:
        self.ranks: Run = launch(
            serve, world_size=world_size, seed=seed, backend=backend, wait=False, live=False, name="ranks"
        )
        """What carries the ranks: their output, stacks, memory and what they log."""
        self.world_size = world_size
        self._sent_cells: dict[str, Cell] = {}
        self._closed = False

    def run(
        self,
        code: str,
        only: Sequence[int] | None = None,
        timeout_s: float | None = None,
        send: Mapping[str, Any] | None = None,
        title: str = "code sent to the ranks",
    ) -> None:
        """Run code on every rank, or `only` on some, and print what they print, each line with its rank.

        What the last expression gives is printed likewise, when all have ended. `send` sets variables there first;
        `title` is what tracebacks call the code.

        Raises SyntaxError before anything is sent; WorkerFailed if a rank fails. If the others have ended the code
        too, within two seconds, the session goes on; if they are stuck, it ends. With `timeout_s` it also ends when
        no rank has logged or ended the code for so many seconds.
        """
        answers = self._ask(code, title, only, timeout_s, send)
        for rank, answer in sorted(answers.items()):
            if answer.shown:
                print("\n".join(f"[rank {rank}] {line}" for line in answer.shown.splitlines()))

    def values(self, expression: str, timeout_s: float | None = None) -> list[Any]:
        """Evaluate an expression on every rank and give the values, by rank. Fails as `run` does."""
        title = f"%ranks {expression}"
        compile(expression.strip(), title, "eval", dont_inherit=True)
        answers = self._ask(expression.strip(), title, None, timeout_s, None, wants_value=True)
        return [cloudpickle.loads(answers[rank].blob) for rank in range(self.world_size)]

    @property
    def over(self) -> bool:
        """Whether the ranks are gone, or going."""
        return self._closed or self.ranks.over.is_set()

    def close(self) -> None:
        """End the ranks, and wait until they are gone. Closing twice does nothing."""
        self._closed = True
        self.ranks.stop(STOP_GRACE_S)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _ask(
        self,
        code: str,
        title: str,
        only: Sequence[int] | None,
        timeout_s: float | None,
        send: Mapping[str, Any] | None,
        wants_value: bool = False,
    ) -> dict[int, Answer]:
        """Have code run on some ranks and give their answers, once all have run it without an error."""
        asked = list(range(self.world_size)) if only is None else sorted(set(only))
        if not asked or not set(asked) <= set(range(self.world_size)):
            raise ValueError(f"there are ranks 0 to {self.world_size - 1}; cannot run on {list(only or [])}")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s is a number of seconds greater than 0, got {timeout_s!r}")
        compile_cell(code, title)
        sent = pack_variables(send) if send else b""
        if self.over:
            raise self._ended()
        file = f"<ranks {next(_numbers)}>"
        new = {name: cell for name, cell in notebook.cells().items() if self._sent_cells.get(name) != cell}
        new[file] = Cell(title, code)
        self._sent_cells.update(new)
        answers: dict[int, Answer] = {}
        try:
            while "starting" in self.ranks.states and not self.over:
                time.sleep(0.01)
            if not self.over:
                self.ranks.tell(asked, Ask(file, code, wants_value, sent, new), new, timeout_s)
            self._listen(len(asked), answers)
        except KeyboardInterrupt:
            self.close()
            print(f"stopped: {GONE}", flush=True)
            raise
        finally:
            print_output(self.ranks)
        failed = [answer for answer in answers.values() if answer.failure]
        if failed:
            raise self._failed(asked, answers)
        return answers

    def _listen(self, expected: int, answers: dict[int, Answer]) -> None:
        """Collect answers and show output, until all have come, or one was an error and its grace is over."""
        deadline = hint_s = float("inf")
        next_print = time.monotonic() + PRINT_EVERY_S
        while len(answers) < expected and time.monotonic() < deadline:
            over = self.over  # before looking, so that no answer is overlooked
            try:
                answer = self.ranks.answers.get(timeout=0.05)
                answers[answer.rank] = answer
                hint_s = time.monotonic() + HINT_AFTER_S
                if answer.failure:
                    deadline = min(deadline, time.monotonic() + ERROR_GRACE_S)
            except queue.Empty:
                if over:
                    raise self._ended() from None
            if time.monotonic() > next_print:
                next_print = time.monotonic() + PRINT_EVERY_S
                print_output(self.ranks)
            if time.monotonic() > hint_s and len(answers) < expected:
                hint_s = float("inf")
                print(f"still at it: {self.ranks.stacks().in_words}", flush=True)

    def _failed(self, asked: list[int], answers: dict[int, Answer]) -> Exception:
        """Say which rank failed first in a cell. Ends the session if others are stuck, or their connections broken."""
        failures = {rank: answer.failure for rank, answer in answers.items() if answer.failure}
        lost = any(LOST_PEER.search(failure.summary) for failure in failures.values())
        # Who is to blame for it may have had no part in the cell: a rank that dies ends the session.
        if lost and self.ranks.over.wait(DEATH_S):
            return self._ended()
        where = Stacks() if len(answers) == len(asked) else self.ranks.stacks()
        facts = []
        for rank, failure in failures.items():
            standing = Standing(rank, [Frame(*frame) for frame in failure.frames], self.ranks._cells)
            facts.append(RankFacts(rank, failure=failure, standing=standing))
        verdict = judge(facts)
        others = []
        for rank in sorted({*asked} - {verdict.rank}):
            if rank in failures:
                alike = verdict.rank is not None and failures[rank].summary == failures[verdict.rank].summary
                others.append(f"rank {rank} failed {'alike' if alike else f'too: {failures[rank].summary:.200}'}")
            else:
                others.append(f"rank {rank} {'ran the cell to its end' if rank in answers else where[rank].in_words}")
        if where or lost or any(MISMATCH.search(failure.summary) for failure in failures.values()):
            self.close()
            others.append(f"so {GONE}")
        return WorkerFailed(verdict._replace(others=others), self.ranks)

    def _ended(self) -> Exception:
        error = self.ranks.error
        if error is None:
            return RuntimeError(f"this session has ended: {GONE}")
        verdict: Verdict = error.verdict
        return WorkerFailed(verdict._replace(others=[*verdict.others, f"so {GONE}"]), self.ranks)
