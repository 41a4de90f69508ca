"""Cells on a session's ranks: in one process group that stays, with output as it comes, and failures told for cells."""

from __future__ import annotations

import inspect
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.debugger import Debugger
from labkit.engines.arguments import check_seconds
from labkit.engines.rendezvous import LocalRendezvous
from labkit.failures.evidence import LOST_PEER
from labkit.failures.facts import RankFacts
from labkit.failures.first_to_fail import diagnose
from labkit.failures.ledger import CONFIRM_S, MISMATCH
from labkit.failures.stacks import Stacks
from labkit.protocol import modules
from labkit.protocol.job import Cell, Job
from labkit.protocol.packed import Packed, new_memory
from labkit.protocol.packing import pack, pack_call
from labkit.protocol.pages import help_hint
from labkit.rank.device import Placement
from labkit.run import Run, RunInterrupted, WorkerFailed
from labkit.session.cells import CellCode, compile_cell, join, run_cell
from labkit.session.ranks import lost_in_words, replaced_in_words, variables_gone
from labkit.session.reserve import CellEngine, Reserve
from labkit.session.turns import Turns
from labkit.system import threads
from labkit.ui import kernel
from labkit.ui.lines import print_output

ERROR_GRACE_S = 2.0
"""How long the other ranks may take to end a cell after it has failed on one; who takes longer counts as stuck."""

LOOK_S = 1.0
"""Time between two looks whether a rank has died that has no part in the cell."""

DEATH_S = 1.0
"""How long the end of a rank is waited for when another has lost its connection: it may have died."""

STOP_GRACE_S = 1.0
"""How long ranks that run a cell may take to end when the notebook is interrupted."""

HINT_AFTER_S = 5.0
"""Time after which it is said where the others stand, once some ranks have ended a cell."""

PRINT_EVERY_S = 0.1
"""Least time between two looks at what the ranks have printed; within it lines are shown rank by rank."""

numbers = itertools.count(1)
"""Of sessions, cells and their process groups: no two have the same."""


class CellRuns:
    """Runs cells, and keeps their process group from one to the next. `reserve` has the ranks."""

    def __init__(
        self,
        reserve: Reserve,
        turns: Turns,
        placement: Placement,
        seed: int | None,
        device: str | None,
        pg_timeout_s: float | None,
    ) -> None:
        self._reserve, self._turns = reserve, turns
        self._placement, self._seed, self._device = placement, seed, device
        self._pg_timeout_s = pg_timeout_s
        self._world_size = reserve.world_size
        self._group: int | None = None
        self._rendezvous: LocalRendezvous | None = None
        self._cells: dict[str, Cell] = {}
        """Those that have run on the ranks, and those of the notebook whose code was sent to them."""

    def leave_group(self) -> None:
        """Take notice that the ranks leave the cells' process group: the next cell makes it anew."""
        self._group = None
        self._meet_at(None)

    def _meet_at(self, rendezvous: LocalRendezvous | None) -> None:
        left, self._rendezvous = self._rendezvous, rendezvous
        if left is not None:
            left.close()

    def run(
        self,
        code: str,
        title: str,
        only: Sequence[int] | None,
        stall_s: float | None,
        send: Mapping[str, Any] | None,
        wants_value: bool = False,
    ) -> dict[int, Any]:
        """Run code on some ranks and return what `run_cell` returned there, once all have run it without an error."""
        asked = list(range(self._world_size)) if only is None else sorted(set(only))
        if not asked or not set(asked) <= set(range(self._world_size)):
            raise ValueError(f"there are ranks 0 to {self._world_size - 1}; cannot run on {list(only or [])}")
        check_seconds("stall_s", stall_s)
        compile_cell(code, title)
        sent = _pack_variables(send) if send else None
        file = f"<ranks {next(numbers)}>"
        self._cells |= {file: Cell(title, code), **kernel.cells(sent.head if sent else b"")}
        self._put_group_in_place(title)
        cell, before = CellCode(file, code, wants_value, sent), self._reserve.pids
        run = self._start(asked, pack_call(run_cell, (cell,), {}), title, stall_s)
        try:
            run.is_watched = kernel.is_interactive()
            stuck = self._follow(run, asked, before)
            run.wait_until_over()  # where some were stuck, they have only been told to end
        except KeyboardInterrupt:
            run.stop_interrupted(STOP_GRACE_S)
            lost = [rank for rank in asked if run.states[rank] == "ended"]
            print(f"stopped: {lost_in_words(lost)}" if lost else "stopped", flush=True)
            raise RunInterrupted(run) from None
        except BaseException:
            run.stop(0)  # nobody watches it any longer
            raise
        finally:
            print_output(run)
        if run.error is not None or stuck is not None:
            raise self._failed(run, asked, stuck, before)
        return dict(enumerate(run.results))

    def _put_group_in_place(self, title: str) -> None:
        """Replace ranks that have died, and have all ranks be in the cells' process group."""
        self._reserve.replace()
        if self._turns.holder is None and (new := self._reserve.take_replaced()):
            self._group = None
            print(f"{replaced_in_words(new)}: {variables_gone([each.rank for each in new])}", flush=True)
        if self._group is None:
            self._group = next(numbers)
            self._meet_at(LocalRendezvous())
            everywhere = range(self._world_size)
            try:
                self._start(everywhere, pack_call(join, (), {}), title, None, self._pg_timeout_s).wait()
            except BaseException:
                self.leave_group()
                raise

    def _start(
        self,
        only: Sequence[int],
        function: Packed,
        title: str,
        stall_s: float | None,
        pg_timeout_s: float | None = None,
    ) -> Run:
        engine = CellEngine(self._reserve, only, self._turns.of(title), self._rendezvous)
        job = Job(
            function=function,
            world_size=self._world_size,
            backend=self._placement.backend,
            cuda_devices=self._placement.gpus,
            threads=threads(self._world_size),
            seed=self._seed,
            port=0,
            start_s=time.time(),
            environment={},
            cells=dict(self._cells),
            group=self._group,
            argv=kernel.command_line("ranks"),
            path=tuple(modules.search_path()),
            is_here=True,
            device=self._device,
            unused_gpus=self._placement.unused,
            pg_timeout_s=pg_timeout_s,
        )
        run = Run(engine, self._world_size, title, stall_s, [Debugger(wait=True)])
        run.start(job)
        return run

    def _follow(self, run: Run, asked: list[int], before: list[int]) -> Stacks | None:
        """Show output until the cell is over.

        Returns:
            Where the ranks stood that were stuck after one had failed, or had died without a part in the cell: not
            every transport tells those who wait for it. None if none was.
        """
        failed_s = hint_s = float("inf")
        aside, look_s = set(range(self._world_size)) - set(asked), time.monotonic() + LOOK_S
        next_print = time.monotonic() + PRINT_EVERY_S
        at_it, told = len(asked), ""
        while not run.over.wait(0.02):
            run.attend()
            now = time.monotonic()
            if now > next_print:
                next_print = now + PRINT_EVERY_S
                print_output(run)
            states = [run.states[rank] for rank in asked]
            if (still := sum(state in ("starting", "running") for state in states)) < at_it:
                at_it, hint_s = still, now + HINT_AFTER_S
            if "failed" in states:
                failed_s = min(failed_s, now)
            is_dead_awaited = False
            if now > look_s and failed_s == float("inf"):
                dead = self._lost(before, aside)
                # Asked twice: a message may be under way.
                twice = (run.all_may_wait_for(dead[0]) and not run.over.wait(CONFIRM_S) for _ in range(2))
                is_dead_awaited = bool(dead) and all(twice)
                look_s = time.monotonic() + LOOK_S
            if now > failed_s + ERROR_GRACE_S or is_dead_awaited:
                stuck = run.stacks()
                run.kill()
                return stuck
            if (notice := run.hang_notice) and notice != told:
                told, hint_s = notice, float("inf")
                print(notice, flush=True)
            if now > hint_s and at_it:
                hint_s = float("inf")
                print(f"still at it: {run.stacks().in_words}", flush=True)
        return None

    def _failed(self, run: Run, asked: list[int], stuck: Stacks | None, before: list[int]) -> Exception:
        """Return which rank failed first in a cell, and what it cost the others. `before` are the processes of then."""
        failures = {rank: failure for rank, failure in enumerate(run.failures) if failure}
        is_lost = run.error is None or any(LOST_PEER.search(failure.summary) for failure in failures.values())
        aside = set(range(self._world_size)) - set(asked)
        if is_lost and aside and (dead := self._lost(before, aside, DEATH_S)):
            diagnosis = diagnose([RankFacts(rank, exit_code=self._reserve.exit_code(rank)) for rank in dead])
        else:
            assert run.error is not None, "a cell without an error is ended only if a rank has died"
            diagnosis = run.error.diagnosis
        if is_lost or any(MISMATCH.search(failure.summary) for failure in failures.values()):
            self._group = None  # connections are broken: it is made anew for the next cell
        others = []
        for rank in sorted({*asked} - {diagnosis.rank}):
            if rank in failures:
                alike = diagnosis.rank in failures and failures[rank].summary == failures[diagnosis.rank].summary
                others.append(f"rank {rank} failed {'alike' if alike else f'too: {failures[rank].summary:.200}'}")
            elif run.returned[rank]:
                others.append(f"rank {rank} ran the cell to its end")
            elif stuck:
                others.append(f"rank {rank} {stuck[rank].in_words}")
            else:
                others += [line for line in diagnosis.others if line.startswith(f"rank {rank} ")]
        if lost := self._lost(before, set(range(self._world_size))):
            others.append(f"so {lost_in_words(lost)}")
        if diagnosis.rank in failures:
            diagnosis = diagnosis._replace(headline=diagnosis.headline + _left_behind(failures[diagnosis.rank].summary))
        return WorkerFailed(diagnosis._replace(others=others), run)

    def _lost(self, before: list[int], ranks: set[int], patience_s: float = 0.0) -> list[int]:
        """Return which of these ranks have lost their process of before; they may take a moment to end."""
        deadline = time.monotonic() + patience_s
        while True:
            if lost := [rank for rank in sorted(ranks) if not self._reserve.has(rank, before[rank])]:
                return lost
            if time.monotonic() >= deadline:
                return []
            time.sleep(0.01)


def _left_behind(summary: str) -> str:
    """Return how a name that a cell misses on the ranks comes there, if the notebook has it; else ""."""
    missed = re.match(r"NameError: name '(\w+)' is not defined", summary)
    if missed is None or missed[1] not in (variables := kernel.variables()):
        return ""
    if inspect.ismodule(variables[missed[1]]):
        return f". The notebook has imported {missed[1]}; the ranks import it in a cell"
    return f". The notebook has it: %%ranks --send {missed[1]}"


def _pack_variables(values: Mapping[str, Any]) -> Packed:
    """Pack a notebook's variables for the ranks. Raises ValueError that names the one that cannot be sent."""
    try:
        return pack(dict(values), new_memory(), shares=True)
    except Exception:
        for name, value in values.items():
            try:
                pack(value)
            except Exception as error:
                raise ValueError(
                    f"{name!r}, a {type(value).__name__}, cannot be sent to the ranks: {error}\n"
                    f"{help_hint('cannot_be_sent')}"
                ) from error
        raise
