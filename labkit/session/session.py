"""A session: reserved ranks, on which functions are launched and cells run, one after another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from labkit.engines.arguments import (
    check_backend,
    check_device,
    check_seconds,
    check_world_size,
    naming,
)
from labkit.engines.base import Engine, Target
from labkit.engines.spawn import check_not_forked
from labkit.monitor.active_runs import run_of
from labkit.protocol.packed import Packed
from labkit.protocol.packing import unpack
from labkit.protocol.pages import help_hint
from labkit.rank.device import place
from labkit.run import Run
from labkit.session import view
from labkit.session.cell_runs import STOP_GRACE_S, CellRuns, numbers
from labkit.session.ranks import ReservedRank
from labkit.session.reserve import Reserve, ReservedEngine
from labkit.session.turns import Turns
from labkit.ui import kernel

_open: weakref.WeakSet[Session] = weakref.WeakSet()


class Session(Target):
    """Reserved ranks: processes that stay, so that what is launched on them begins in tens of milliseconds.

    >>> ranks = labkit.Session(4)
    >>> run = labkit.launch(train, on=ranks, steps=500)    # a Run like any other
    >>> ranks.run("x = torch.arange(4.) + rank; dist.all_reduce(x)")   # or a cell that begins with %%ranks
    >>> x_by_rank = ranks.values("x")

    Each launched function has a process group, seeds, threads and settings of its own, as on fresh ranks. It does see
    what was left in modules, in `__main__` by cells, and in CUDA's memory pool. Cells keep their variables from one to
    the next, and a process group of their own, which a launch in between ends: tensors and modules stay, groups and DDP
    modules are then to be made anew.

    A rank that raises keeps its process. One that dies, or that has to be ended with its run, is replaced; the next
    launch waits for the new process only, and says so. `restart()` gives all ranks new processes.

    The ranks are processes of this machine. They end with `close()`, at the end of a `with` block, with the notebook,
    and when the cell that made them is run again.

    Args:
        world_size: number of ranks; by default one per GPU, or 2 without GPUs.
        seed: with which cells begin, as `labkit.launch` has it; a launch brings its own.
        backend: of the cells' process group, as `labkit.launch` has it.
        is_of_a_cell: whether the ranks end when the cell that made them is run again.
        device: where cells compute, and what is launched without a `device` of its own, as `labkit.launch` has it. With
            fewer GPUs than ranks that is the CPU, also for a launch on a few of them: results can then be compared.
        pg_timeout_s: of the cells' process group, as `labkit.launch` has it.
    """

    is_here = True

    def __init__(
        self,
        world_size: int | None = None,
        seed: int | None = 0,
        backend: str | None = None,
        is_of_a_cell: bool = True,
        device: str | None = None,
        pg_timeout_s: float | None = None,
    ) -> None:
        with naming("bad_argument"):
            gpus = torch.cuda.device_count()
            world_size = check_world_size(world_size, gpus)
            check_backend(backend, world_size, gpus)
            check_device(device, backend, gpus)
            check_seconds("pg_timeout_s", pg_timeout_s)
        self.world_size = world_size
        """Number of ranks."""
        placement = place(world_size, gpus, device, backend and backend.lower())
        self.backend = placement.backend
        """Of the cells' process group."""
        self.device = device
        """Where ranks compute, as asked: "cpu", "cuda" or None."""
        self.reserved = world_size
        """How many ranks share the GPUs."""
        self.ended = threading.Event()
        """Set once the ranks are gone, or going."""
        self._made_in = kernel.this_execution() if is_of_a_cell else None
        self._number, self._why, self._closing = next(numbers), "", threading.Lock()
        check_not_forked()
        _close_what_this_cell_made_before(self._made_in)
        kernel.end_ranks_at_shutdown()
        self._reserve = reserve = Reserve(world_size)
        try:
            self._turns = Turns()
            self._cells = CellRuns(reserve, self._turns, placement, seed, device, pg_timeout_s)
            self._finalizer = weakref.finalize(self, reserve.close)
            _open.add(self)
        except BaseException:  # interrupted: nobody would end the ranks
            reserve.close()
            raise

    # Launching functions

    def engine(self, name: str, stall_s: float | None) -> Engine:
        """Return the engine for one launched function on all the ranks."""
        return self._engine_for(self.world_size, name)

    def first(self, world_size: int) -> FirstRanks:
        """Return the first ranks, to launch on them only. Raises ValueError if there are not as many."""
        if world_size > self.world_size:
            raise ValueError(
                f"world_size={world_size}, but this session has {self.world_size} ranks; reserve more with "
                f"labkit.Session({world_size})"
            )
        return FirstRanks(self, world_size)

    def _engine_for(self, world_size: int, name: str) -> Engine:
        self._check_open()
        return ReservedEngine(self._reserve, world_size, self._turns.of(name, when_taken=self._cells.leave_group))

    # Running cells

    def run(
        self,
        code: str,
        only: Sequence[int] | None = None,
        stall_s: float | None = None,
        send: Mapping[str, Any] | None = None,
        title: str = "code sent to the ranks",
    ) -> None:
        """Run code on every rank, or `only` on some, and print what they print, each line with its rank.

        The code finds `worker` (the `labkit.Worker`), `rank`, `world_size`, `torch` and `dist`. What the last
        expression gives is printed when all have ended. `send` sets variables there first; `title` is what tracebacks
        call the code.

        Raises SyntaxError before anything is sent; RuntimeError if a run holds the ranks; WorkerFailed if a rank fails.
        The others may then end the code too, within two seconds; those that are stuck are replaced, and their
        variables are gone. So are they when no rank has logged, printed or ended the code for `stall_s` seconds.
        """
        self._check_open()
        shown = self._cells.run(code, title, only, stall_s, send)
        for rank, text in sorted(shown.items()):
            if text:
                print("\n".join(f"[rank {rank}] {line}" for line in text.splitlines()))

    def values(self, expression: str, stall_s: float | None = None) -> list[Any]:
        """Evaluate an expression on every rank and return the values, by rank. Fails as `run` does."""
        title = f"%ranks {expression}"
        compile(expression.strip(), title, "eval", dont_inherit=True)
        self._check_open()
        pickled = self._cells.run(expression.strip(), title, None, stall_s, None, wants_value=True)
        return [self._value(rank, pickled[rank]) for rank in range(self.world_size)]

    @staticmethod
    def _value(rank: int, pickled: Packed | None) -> Any:
        if pickled is None:  # `exit()`
            return None
        try:
            return unpack(pickled, "cpu")
        except Exception as error:
            error.add_note(f"raised as rank {rank}'s value was loaded in the notebook")
            raise

    # Looking at the ranks, and ending them

    @property
    def over(self) -> bool:
        """Whether the ranks are gone, or going."""
        return self.ended.is_set()

    @property
    def busy_with(self) -> str:
        """The name of the run that holds the ranks, or ""."""
        holder = self._turns.holder
        return holder.name if holder else ""

    @property
    def pids(self) -> list[int]:
        """Process id of each rank; none once they are gone."""
        return self._reserve.pids

    @property
    def why_over(self) -> str:
        """Why the ranks are gone, as text; "" while they are there."""
        return self._why

    @property
    def ranks(self) -> list[ReservedRank]:
        """What each rank does, and where; none once they are gone."""
        holder, ranks = self._turns.holder, self._reserve.ranks()
        if holder is None or (run := run_of(holder.engine)) is None:
            return ranks
        return [each._replace(state=state) for each, state in zip(ranks, run.states, strict=False)] + ranks[
            run.world_size :
        ]

    def restart(self) -> None:
        """Give every rank a new process: what was left in modules is as imported anew, and variables are gone.

        Raises RuntimeError if a run holds the ranks, or if they are gone.
        """
        self._check_open()
        turn, nothing = self._turns.of("session.restart()", when_taken=self._cells.leave_group), Engine()
        turn.take(nothing)
        try:
            self._reserve.restart()
        finally:
            turn.give_back(nothing)

    def close(self) -> None:
        """Stop what runs on the ranks, end them, and wait until they are gone. Closing twice does nothing."""
        self._close("they were closed")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session: {view.headline(self)}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Session stays in the notebook that made it; a launched function gets a worker instead")

    def _ipython_display_(self) -> None:
        view.show(self)

    def _close(self, why: str) -> None:
        with self._closing:
            if self.over:
                return
            self._why, holder = why, self._turns.holder
            self.ended.set()
        _open.discard(self)
        try:
            if holder is not None and isinstance(run := run_of(holder.engine), Run):
                run.stop(STOP_GRACE_S)
        finally:  # an interrupt, too, leaves no process
            self._finalizer()
            self._cells.leave_group()

    def _check_open(self) -> None:
        check_not_forked()
        if self.over:
            raise RuntimeError(
                f"these ranks are gone, and their variables with them: {self._why}. Make new ones with labkit.Session\n"
                + help_hint("session")
            )


class FirstRanks(Target):
    """The first ranks of a session, as `labkit.launch` takes them."""

    is_here = True

    def __init__(self, session: Session, world_size: int) -> None:
        self._session, self.world_size = session, world_size
        self.device, self.reserved = session.device, session.world_size

    def engine(self, name: str, stall_s: float | None) -> Engine:
        """Return the engine for one launched function on these ranks."""
        return self._session._engine_for(self.world_size, name)

    def __repr__(self) -> str:
        return f"the first {self.world_size} of {self._session!r}"


def newest() -> Session | None:
    """Return the session that was made last and is still there."""
    return max((session for session in _open if not session.over), key=lambda session: session._number, default=None)


def _close_what_this_cell_made_before(now: kernel.Execution | None) -> None:
    if now is None:
        return
    for session in list(_open):
        made = session._made_in
        if made is not None and made.cell == now.cell and made.number != now.number:
            session._close("the cell that made them was run again")
