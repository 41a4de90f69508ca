"""A session: reserved ranks, on which functions are launched and cells run, one after another."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.engines.arguments import (
    check_backend,
    check_device,
    check_seconds,
    check_world_size,
    naming,
    ranks_on,
)
from labkit.engines.base import Engine, Target
from labkit.launchers.remote import Launcher
from labkit.monitor.active_runs import run_of
from labkit.protocol.pages import help_hint
from labkit.protocol.pickling import Message, loads
from labkit.rank.device import place, usable_gpus
from labkit.run import Run
from labkit.session.cell_runs import STOP_GRACE_S, CellRuns, numbers
from labkit.session.cluster_reserve import ClusterReserve
from labkit.session.local_reserve import LocalReserve
from labkit.session.ranks import ReservedRank, SessionFacts
from labkit.session.turns import Turns
from labkit.ui import kernel

if TYPE_CHECKING:
    from labkit.launchers.ray.target import Ray
    from labkit.launchers.slurm import Slurm
    from labkit.launchers.torchrun import Torchrun

END_TOLD_S = 20.0
"""How long it may take to learn why a session is over that is attached to."""

IDLE_ON_A_CLUSTER_S = 1800.0
"""How long ranks are kept with nothing to do, unless a session is told otherwise."""

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
    launch waits for the new process only, and says so.

    The ranks end with `close()`, at the end of a `with` block, with the notebook, when the cell that made them is run
    again, and when nothing has run on them for `idle_s`: half an hour on a cluster, which others wait for.

    On a cluster, `labkit.Session(on=labkit.Slurm(nodes=2, ranks_per_node=4))`, the ranks are one job that stays; it
    outlives the notebook, and `labkit.attach(job)` gives the session back, with its variables. Under
    `labkit.Torchrun(…)` and on `labkit.Ray(…)` they end with the notebook.

    Args:
        world_size: number of ranks; by default one per GPU, or 2 without GPUs.
        seed: with which cells begin, as `labkit.launch` has it; a launch brings its own.
        backend: of the cells' process group, as `labkit.launch` has it.
        idle_s: how long the ranks are kept with nothing to do, in s. By default as long as the notebook on this
            machine, and half an hour on a cluster; `math.inf` there: until they are closed.
        is_of_a_cell: whether the ranks end when the cell that made them is run again.
        on: where, if not on this machine: `labkit.Slurm(…)`, `labkit.Ray(…)` or `labkit.Torchrun(…)`, which say how
            many ranks there are.
        device: where cells compute, and what is launched without a `device` of its own, as `labkit.launch` has it. With
            fewer GPUs than ranks that is the CPU, also for a launch on a few of them: results can then be compared.
        pg_timeout_s: of the cells' process group, as `labkit.launch` has it.
    """

    def __init__(
        self,
        world_size: int | None = None,
        seed: int | None = 0,
        backend: str | None = None,
        idle_s: float | None = None,
        is_of_a_cell: bool = True,
        on: Slurm | Torchrun | Ray | None = None,
        device: str | None = None,
        pg_timeout_s: float | None = None,
    ) -> None:
        with naming("bad_argument"):
            if isinstance(on, Session):
                raise TypeError(
                    "on is labkit.Slurm(…), labkit.Ray(…) or labkit.Torchrun(…), "
                    f"got {on!r}, whose ranks are reserved already"
                )
            if isinstance(on, Launcher):
                raise TypeError(
                    "reserved ranks are of this machine; to launch again and again in nodes that you hold give "
                    'on=labkit.Slurm(…, allocation="4711") to labkit.launch'
                )
            gpus = usable_gpus() if on is None else None
            world_size = check_world_size(world_size, gpus or 0) if on is None else ranks_on(on, world_size).world_size
            backend = check_backend(backend, world_size, gpus)
            check_device(device, backend, gpus)
            check_seconds("pg_timeout_s", pg_timeout_s)
            if idle_s is not None and not idle_s > 0:
                raise ValueError(f"idle_s is a number of seconds greater than 0, or None; got {idle_s!r}")
            if idle_s is None and on is not None:
                idle_s = IDLE_ON_A_CLUSTER_S
            if idle_s == math.inf:
                idle_s = None
        made_in = kernel.this_execution() if is_of_a_cell else None
        _close_what_this_cell_made_before(made_in)
        kept: dict[str, Any] = {"seed": seed, "backend": backend, "idle_s": idle_s, "device": device}
        kept["pg_timeout_s"] = pg_timeout_s
        reserve = LocalReserve(world_size) if on is None else ClusterReserve.start(on, kept)
        try:
            self._begin(reserve, gpus, made_in, **kept)
        except BaseException:  # interrupted: nobody would end the ranks
            reserve.close()
            raise

    @classmethod
    def attached(cls, path: Path, about: dict[str, Any]) -> Session:
        """Return the session in this directory, for `labkit.attach`. `last` is then what ran last, or still runs."""
        session = cls.__new__(cls)
        session._begin(ClusterReserve.attach(path, about), None, None, **about["session"])
        session._pick_up()
        if session._reserve.launched.is_over:
            session.ended.wait(END_TOLD_S)
        return session

    def _begin(
        self,
        reserve: LocalReserve | ClusterReserve,
        gpus: int | None,
        made_in: kernel.Execution | None,
        seed: int | None,
        backend: str | None,
        idle_s: float | None,
        device: str | None = None,
        pg_timeout_s: float | None = None,
    ) -> None:
        self.world_size = reserve.world_size
        """Number of ranks."""
        placement = place(self.world_size, gpus, device, backend)
        self.backend = placement.backend
        """Of the cells' process group; None on a cluster where nobody chose one."""
        self.device = device
        """Where ranks compute, as asked: "cpu", "cuda" or None."""
        self.reserved = self.world_size
        """How many ranks share out the GPUs."""
        self.idle_s = idle_s
        """How long the ranks are kept with nothing to do, in s."""
        self.is_here = reserve.is_here
        self.ended = threading.Event()
        """Set once the ranks are gone, or going."""
        self._made_in, self._number, self._why = made_in, next(numbers), ""
        self._reserve: Any = reserve
        self._finalizer = weakref.finalize(self, reserve.let_go)
        this = weakref.ref(self)  # neither timer nor thread must keep a session that nobody else has

        def close_if_idle() -> None:
            if session := this():
                session._close_if_idle()

        def close(why: str) -> None:
            if session := this():
                session._close(why)

        self._closing = threading.Lock()
        self._turns = Turns(None if reserve.handles_idleness else idle_s, close_if_idle)
        self._cells = CellRuns(reserve, self._turns, placement, seed, device, pg_timeout_s)
        _open.add(self)
        reserve.when_over(close)

    def _pick_up(self) -> None:
        """Follow what the ranks were given last, if anything, and go on with the cells' group where that is sound."""
        directory = self._reserve.directory
        if not (number := directory.newest_job()):
            return
        job, is_at_it = directory.of_job(number).job(), bool(directory.at_work(number))
        name = directory.of_job(number).about()["name"]
        engine = self._reserve.pick_up(number, self._turns.of(name))
        run = Run(engine, job.world_size, name, engine.about.get("stall_s"))
        engine.follow()
        run.follow(job, stopping=engine.directory.was_asked_to("stop"))
        self._cells.pick_up(job, run, is_at_it)

    # Launching functions

    def engine(self, name: str, stall_s: float | None) -> Engine:
        """Return what carries one launched function on all the ranks, for `labkit.launch`."""
        return self._engine_for(self.world_size, name, stall_s)

    def first(self, world_size: int) -> FirstRanks:
        """Return the first ranks, to launch on them only. Raises ValueError if there are not as many."""
        if world_size > self.world_size:
            raise ValueError(
                f"world_size={world_size}, but this session has {self.world_size} ranks; reserve more with "
                f"labkit.Session({world_size})"
            )
        return FirstRanks(self, world_size)

    def _engine_for(self, world_size: int, name: str, stall_s: float | None) -> Engine:
        self._check_open()
        about = {"name": name, "stall_s": stall_s}

        turn = self._turns.of(name, when_taken=self._cells.leave_group)
        engine: Engine = self._reserve.engine(world_size, turn, about)
        return engine

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
    def _value(rank: int, pickled: Message | bytes | None) -> Any:
        if pickled is None:  # `exit()`
            return None
        try:
            return loads(pickled)
        except Exception as error:
            error.add_note(f"raised as rank {rank}'s value was loaded in the notebook")
            raise

    @property
    def last(self) -> Run | None:
        """What carried the last cell: its output and what it logged."""
        return self._cells.last

    # Looking at the ranks, and ending them

    def _facts(self) -> SessionFacts:
        return SessionFacts(
            self.world_size, self.over, self.why_over, self.busy_with, self.idle_left_s, self.notices, self.ranks
        )

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
    def idle_left_s(self) -> float:
        """Seconds until the ranks end if nothing is run on them; infinite while something is, or if they are kept."""
        since_s = max(self._turns.idle_since_s, self._reserve.ready_s)
        if self.idle_s is None or self._turns.holder is not None or since_s == float("inf"):
            return float("inf")
        return max(0.0, since_s + self.idle_s - time.monotonic())

    @property
    def pids(self) -> list[int]:
        """Process id of each rank; none once they are gone."""
        pids: list[int] = self._reserve.pids
        return pids

    @property
    def folder(self) -> Path | None:
        """Where a session on a cluster keeps its files: `labkit.attach(ranks.folder)` finds it again."""
        directory = self._reserve.directory
        return directory.path if directory else None

    @property
    def why_over(self) -> str:
        """Why the ranks are gone, in words; "" while they are there."""
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

    @property
    def notices(self) -> list[str]:
        """What a cluster says of the ranks: their job, and the time left to it."""
        notices: list[str] = self._reserve.notices()
        return notices

    def wait(self, timeout_s: float | None = None) -> Session:
        """Block until no run holds the ranks. Raises TimeoutError if one still does after `timeout_s` seconds."""
        if not self._turns.wait(timeout_s):
            raise TimeoutError(
                f"run {self.busy_with!r} still holds these ranks after {timeout_s} s\n{help_hint('session')}"
            )
        return self

    def close(self) -> None:
        """Stop what runs on the ranks, end them, and wait until they are gone. Closing twice does nothing."""
        self._close("they were closed")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"gone: {self._why}" if self.over else f"busy with {self.busy_with!r}" if self._turns.holder else "idle"
        return f"<Session: {self.world_size} ranks, {state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Session stays in the notebook that made it; a launched function gets a worker instead")

    def _ipython_display_(self) -> None:
        from labkit.session import view

        view.show(self._facts, self.ended, self.close)

    def _close_if_idle(self) -> None:
        if self.idle_left_s <= 0 and not self.over:
            self._close(f"nothing had run on them for {self.idle_s:g} s (idle_s)")

    def _close(self, why: str) -> None:
        with self._closing:
            if self.over:
                return
            self._why, holder = why, self._turns.holder
            self.ended.set()
        self._turns.end()
        if holder is not None and isinstance(run := run_of(holder.engine), Run):
            run.stop(STOP_GRACE_S)
        _open.discard(self)
        self._finalizer.detach()
        self._reserve.close()
        self._cells.leave_group()

    def _check_open(self) -> None:
        if self.over:
            raise RuntimeError(
                f"these ranks are gone, and their variables with them: {self._why}. Make new ones with labkit.Session\n"
                + help_hint("session")
            )


class FirstRanks(Target):
    """The first ranks of a session, as `labkit.launch` takes them."""

    def __init__(self, session: Session, world_size: int) -> None:
        self._session, self.world_size, self.is_here = session, world_size, session.is_here
        self.device, self.reserved = session.device, session.world_size

    def engine(self, name: str, stall_s: float | None) -> Engine:
        """Return what carries one launched function on these ranks."""
        return self._session._engine_for(self.world_size, name, stall_s)

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
