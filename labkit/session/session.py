"""A session: reserved ranks, on which functions are launched and cells run, one after another."""

from __future__ import annotations

import itertools
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import torch

from labkit.engines import holders
from labkit.engines.base import Engine
from labkit.monitor.diagnosis import LOST_PEER, MISMATCH, RankFacts, diagnose
from labkit.monitor.run import Run, WorkerFailed, run_of
from labkit.monitor.stacks import Stacks, rank_list
from labkit.protocol.job import Cell, Job
from labkit.protocol.pickling import pack_call, pack_variables
from labkit.protocol.system import cores
from labkit.session.cells import CellCode, compile_cell, run_cell
from labkit.session.cluster import ClusterReserve
from labkit.session.local import LocalReserve, Replaced, ReservedRank, replaced_in_words
from labkit.ui import kernel
from labkit.ui.lines import print_output

if TYPE_CHECKING:
    from labkit.cluster.run_directory import RunFolder
    from labkit.cluster.slurm import Slurm
    from labkit.cluster.torchrun import Torchrun

ERROR_GRACE_S = 2.0
"""How long the other ranks may take to end a cell after it has failed on one; who takes longer counts as stuck."""

DEATH_S = 1.0
"""How long the end of a rank is waited for when another has lost its connection: it may have died."""

STOP_GRACE_S = 1.0
"""How long ranks that run a cell may take to end when the notebook is interrupted."""

HINT_AFTER_S = 5.0
"""Time after which it is said where the others stand, once some ranks have ended a cell."""

PRINT_EVERY_S = 0.1
"""Least time between two looks at what the ranks have printed; within it lines are shown rank by rank."""

END_SAID_S = 20.0
"""How long it may take to say why a session is over that is attached to."""

IDLE_S = 1800.0
"""How long ranks are kept with nothing to do, unless a session is told otherwise."""

CELL_FILE = re.compile(r"<ranks \d+>")
"""By which tracebacks know a cell that ran on the ranks."""

_numbers = itertools.count(1)
_open: weakref.WeakSet[Session] = weakref.WeakSet()


class _Holder(NamedTuple):
    """Who has the ranks now."""

    name: str
    engine: Engine
    since_s: float


class Session:
    """Reserved ranks: processes that stay, so that what is launched on them begins in tens of milliseconds.

    >>> ranks = labkit.Session(4)
    >>> run = labkit.launch(train, on=ranks, steps=500)    # a Run like any other
    >>> ranks.run("x = torch.arange(4.) + rank; dist.all_reduce(x)")   # or a cell that begins with %%ranks
    >>> x_by_rank = ranks.values("x")

    Each launched function has a process group, seeds, threads and settings of its own, as on fresh ranks
    (`labkit.rank.isolation`). It does see what was left in modules, in `__main__` by cells, and in CUDA's memory pool.
    Cells keep their variables from one to the next, and a process group of their own, which a launch in between ends:
    tensors and modules stay, groups and DDP modules are then to be made anew.

    A rank that raises keeps its process. One that dies, or that has to be ended with its run, is replaced; the next
    launch waits for the new process only, and says so.

    The ranks end with `close()`, at the end of a `with` block, with the notebook, when the cell that made them is run
    again, and when nothing has run on them for `idle_s`.

    On a cluster, `labkit.Session(on=labkit.Slurm(nodes=2, ranks_per_node=4))`, the ranks are one job that stays; it
    outlives the notebook, and `labkit.attach(job)` gives the session back, with its variables. Under
    `labkit.Torchrun(…)` they end with the notebook.

    Args:
        world_size: number of ranks; by default one per GPU, or 2 without GPUs.
        seed: with which cells begin, as `labkit.launch` has it; a launch brings its own.
        backend: of the cells' process group, as `labkit.launch` has it.
        idle_s: how long the ranks are kept with nothing to do, in s; None: as long as the notebook.
        is_of_a_cell: whether the ranks end when the cell that made them is run again.
        on: where, if not on this machine: `labkit.Slurm(…)` or `labkit.Torchrun(…)`, which say how many ranks there
            are.
    """

    def __init__(
        self,
        world_size: int | None = None,
        seed: int | None = 0,
        backend: str | None = None,
        idle_s: float | None = IDLE_S,
        is_of_a_cell: bool = True,
        on: Slurm | Torchrun | None = None,
    ) -> None:
        from labkit.launcher import check_backend, check_world_size, ranks_on

        if isinstance(on, Session):
            raise TypeError(
                f"on is labkit.Slurm(…) or labkit.Torchrun(…), got {on!r}, whose ranks are reserved already"
            )
        gpus = torch.cuda.device_count() if on is None else None  # does not initialise CUDA in the notebook
        world_size = check_world_size(world_size, gpus or 0) if on is None else ranks_on(on, world_size).world_size
        backend = check_backend(backend, world_size, gpus)
        if idle_s is not None and not idle_s > 0:
            raise ValueError(f"idle_s is a number of seconds greater than 0, or None; got {idle_s!r}")
        made_in = kernel.this_execution() if is_of_a_cell else None
        _close_what_this_cell_made_before(made_in)
        kept: dict[str, Any] = {"seed": seed, "backend": backend, "idle_s": idle_s}
        reserve = LocalReserve(world_size) if on is None else ClusterReserve.start(on, kept)
        self._begin(reserve, gpus, made_in, **kept)

    @classmethod
    def attached(cls, folder: RunFolder, about: dict[str, Any]) -> Session:
        """Return the session in this folder, for `labkit.attach`. `last` is then what ran on it last, or still runs."""
        session = cls.__new__(cls)
        session._begin(ClusterReserve.attach(folder, about), None, None, **about["session"])
        session._pick_up()
        if session._reserve.is_over:
            session.ended.wait(END_SAID_S)
        return session

    def _begin(
        self,
        reserve: LocalReserve | ClusterReserve,
        gpus: int | None,
        made_in: kernel.Execution | None,
        seed: int | None,
        backend: str | None,
        idle_s: float | None,
    ) -> None:
        self.world_size = reserve.world_size
        """Number of ranks."""
        self._gpus, self._seed, self._backend = gpus, seed, backend
        self.idle_s = idle_s
        """How long the ranks are kept with nothing to do, in s."""
        self.last: Run | None = None
        """What carried the last cell: its output and what it logged."""
        self._made_in = made_in
        self._reserve: Any = reserve
        self.is_here = reserve.is_here
        self._finalizer = weakref.finalize(self, reserve.let_go)
        self._lock = threading.RLock()
        self._holder: _Holder | None = None
        self._free = threading.Event()
        self._free.set()
        self._idle_since_s = time.monotonic()
        self._timer: threading.Timer | None = None
        self.ended = threading.Event()
        """Set once the ranks are gone, or going."""
        self._why = ""
        self._group: int | None = None
        self._group_store: Any = None
        self._cells: dict[str, Cell] = {}
        self._number = next(_numbers)
        _open.add(self)
        holders.add(self)
        this = weakref.ref(self)
        reserve.when_over(lambda why: session._close(why) if (session := this()) else None)
        self._wait_for_idleness()

    def _pick_up(self) -> None:
        """Follow what the ranks were given last, if anything, and go on with the cells' group where that is sound."""
        if not (number := self._reserve.folder.newest_job()):
            return
        job, is_at_it = self._reserve.folder.of_job(number).job(), bool(self._reserve.at_work(number))
        self._cells = {file: cell for file, cell in job.cells.items() if CELL_FILE.fullmatch(file)}
        numbers = [int(file.split()[1].rstrip(">")) for file in self._cells]
        while next(_numbers) < max([*numbers, job.group or 0]):
            pass
        name = self._reserve.folder.of_job(number).about()["name"]
        engine = self._reserve.pick_up(number, lambda engine: self._hold(name, engine), self._release)
        self.last = Run(engine, job.world_size, name, engine.about["timeout_s"])
        engine.follow()
        self.last.follow(job, stopping=engine.folder.was_asked_to("stop"))
        if not is_at_it:
            self.last.over.wait()
            self._group = job.group if self.last.error is None else None

    # Launching functions

    def engine(self, name: str, timeout_s: float | None) -> Engine:
        """Return what carries one launched function on all the ranks, for `labkit.launch`."""
        return self._engine_for(self.world_size, name, timeout_s)

    def first(self, world_size: int) -> FirstRanks:
        """Return the first ranks, to launch on them only. Raises ValueError if there are not as many."""
        if world_size > self.world_size:
            raise ValueError(
                f"world_size={world_size}, but this session has {self.world_size} ranks; reserve more with "
                f"labkit.Session({world_size})"
            )
        return FirstRanks(self, world_size)

    def _engine_for(self, world_size: int, name: str, timeout_s: float | None) -> Engine:
        self._check_open()
        about = {"name": name, "timeout_s": timeout_s}

        def hold(engine: Engine) -> None:
            self._hold(name, engine)
            self._group = self._group_store = None  # the cells' process group, which the ranks leave

        engine: Engine = self._reserve.engine(world_size, hold, self._release, about)
        return engine

    # Running cells

    def run(
        self,
        code: str,
        only: Sequence[int] | None = None,
        timeout_s: float | None = None,
        send: Mapping[str, Any] | None = None,
        title: str = "code sent to the ranks",
    ) -> None:
        """Run code on every rank, or `only` on some, and print what they print, each line with its rank.

        The code finds `worker` (the `labkit.Worker`), `rank`, `world_size`, `torch` and `dist`. What the last
        expression gives is printed when all have ended. `send` sets variables there first; `title` is what tracebacks
        call the code.

        Raises SyntaxError before anything is sent; RuntimeError if a run holds the ranks; WorkerFailed if a rank fails.
        The others may then end the code too, within two seconds; those that are stuck are replaced, and their
        variables are gone. So are they when no rank has logged or ended the code for `timeout_s` seconds.
        """
        shown = self._run_cell(code, title, only, timeout_s, send)
        for rank, text in sorted(shown.items()):
            if text:
                print("\n".join(f"[rank {rank}] {line}" for line in text.splitlines()))

    def values(self, expression: str, timeout_s: float | None = None) -> list[Any]:
        """Evaluate an expression on every rank and return the values, by rank. Fails as `run` does."""
        title = f"%ranks {expression}"
        compile(expression.strip(), title, "eval", dont_inherit=True)
        pickled = self._run_cell(expression.strip(), title, None, timeout_s, None, wants_value=True)
        return [cloudpickle.loads(pickled[rank]) for rank in range(self.world_size)]

    # Looking at the ranks, and ending them

    @property
    def over(self) -> bool:
        """Whether the ranks are gone, or going."""
        return self.ended.is_set()

    @property
    def busy_with(self) -> str:
        """The name of the run that holds the ranks, or ""."""
        holder = self._holder
        return holder.name if holder else ""

    @property
    def idle_left_s(self) -> float:
        """Seconds until the ranks end if nothing is run on them; infinite while something is, or if they are kept."""
        since_s = max(self._idle_since_s, self._reserve.ready_s)
        if self.idle_s is None or self._holder is not None or since_s == float("inf"):
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
        folder = self._reserve.folder
        return folder.path if folder else None

    @property
    def why_over(self) -> str:
        """Why the ranks are gone, in words; "" while they are there."""
        return self._why

    @property
    def ranks(self) -> list[ReservedRank]:
        """What each rank does, and where; none once they are gone."""
        holder, ranks = self._holder, self._reserve.ranks()
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
        if not self._free.wait(timeout_s):
            raise TimeoutError(f"run {self.busy_with!r} still holds these ranks after {timeout_s} s")
        return self

    def close(self) -> None:
        """Stop what runs on the ranks, end them, and wait until they are gone. Closing twice does nothing."""
        self._close("they were closed")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"gone: {self._why}" if self.over else f"busy with {self.busy_with!r}" if self._holder else "idle"
        return f"<Session: {self.world_size} ranks, {state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Session stays in the notebook that made it; a launched function gets a worker instead")

    def _ipython_display_(self) -> None:
        from labkit.session import view

        view.show(self)

    # As a holder of processes, for `labkit.processes`

    def processes(self) -> list[holders.HeldProcess]:
        """Return the ranks' processes, as far as they are on this machine."""
        name = self.busy_with
        ranks = zip(self.ranks, self.pids if self.is_here else [], strict=False)
        return [one for rank, pid in ranks for one in holders.held("session", name, rank.rank, pid, rank.state, self)]

    def end(self, pid: int) -> None:
        """Begin to close the session."""
        threading.Thread(target=self.close, name="labkit-close", daemon=True).start()

    # Holding the ranks

    def _hold(self, name: str, engine: Engine) -> None:
        """Take the ranks for one job. Raises RuntimeError if another has them."""
        with self._lock:
            if self._holder is not None:
                holder = self._holder
                raise RuntimeError(
                    f"run {holder.name!r} holds these ranks, for {time.monotonic() - holder.since_s:.0f} s now. Wait "
                    "for it (session.wait()), stop it (run.stop()), or reserve other ranks with labkit.Session(…)"
                )
            self._holder = _Holder(name, engine, time.monotonic())
            self._free.clear()
            if self._timer is not None:
                self._timer.cancel()

    def _release(self, engine: Engine) -> None:
        """Take the ranks back from a job that is over, or could not begin."""
        with self._lock:
            if self._holder is None or self._holder.engine is not engine:
                return
            self._holder = None
            self._idle_since_s = time.monotonic()
            self._wait_for_idleness()
            self._free.set()

    def _wait_for_idleness(self) -> None:
        if self.idle_s is None or self.over or self._reserve.minds_idleness:
            return
        this = weakref.ref(self)  # the timer must not keep a session that nobody else has

        def look() -> None:
            if session := this():
                session._close_if_idle()

        self._timer = threading.Timer(self.idle_s, look)
        self._timer.daemon = True
        self._timer.start()

    def _close_if_idle(self) -> None:
        if self.idle_left_s <= 0 and not self.over:
            self._close(f"nothing had run on them for {self.idle_s:g} s (idle_s)")

    def _close(self, why: str) -> None:
        with self._lock:
            if self.over:
                return
            self._why, holder = why, self._holder
            self.ended.set()
            if self._timer is not None:
                self._timer.cancel()
        if holder is not None and (run := run_of(holder.engine)):
            run.stop(STOP_GRACE_S)
        _open.discard(self)
        self._finalizer.detach()
        self._reserve.close()
        self._group_store = None

    def _check_open(self) -> None:
        if self.over:
            raise RuntimeError(
                f"these ranks are gone, and their variables with them: {self._why}. Make new ones with labkit.Session"
            )

    # Cells

    def _run_cell(
        self,
        code: str,
        title: str,
        only: Sequence[int] | None,
        timeout_s: float | None,
        send: Mapping[str, Any] | None,
        wants_value: bool = False,
    ) -> dict[int, Any]:
        """Run code on some ranks and return what `run_cell` returned there, once all have run it without an error."""
        asked = list(range(self.world_size)) if only is None else sorted(set(only))
        if not asked or not set(asked) <= set(range(self.world_size)):
            raise ValueError(f"there are ranks 0 to {self.world_size - 1}; cannot run on {list(only or [])}")
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s is a number of seconds greater than 0, got {timeout_s!r}")
        compile_cell(code, title)
        sent = pack_variables(send) if send else b""
        self._check_open()
        file = f"<ranks {next(_numbers)}>"
        self._cells[file] = Cell(title, code)
        with self._group_in_place(title, timeout_s) as engine:
            cell, before = CellCode(file, code, wants_value, sent), self._reserve.incarnations
            run = self.last = self._start(engine(asked), pack_call(run_cell, (cell,), {}), title, timeout_s)
            try:
                stuck = self._listen(run, asked)
            except KeyboardInterrupt:
                run.stop(STOP_GRACE_S)
                lost = [rank for rank in asked if run.states[rank] == "ended"]
                print(f"stopped: {_lost_in_words(lost)}" if lost else "stopped", flush=True)
                raise
            finally:
                run.over.wait()
                print_output(run)
        if run.error is not None:
            raise self._failed(run, asked, stuck, before)
        return dict(enumerate(run.results))

    @contextmanager
    def _group_in_place(self, name: str, timeout_s: float | None) -> Iterator[Any]:
        """Give what makes an engine for a cell, once all ranks are in the cells' process group."""

        def engine(only: Sequence[int]) -> Engine:
            about = {"name": name, "timeout_s": timeout_s}
            made: Any = self._reserve.cell_engine(only, lambda engine: self._hold(name, engine), self._release, about)
            made.group_store = self._group_store
            found: Engine = made
            return found

        if new := self._new_ranks():
            self._group = None
            print(f"{replaced_in_words(new)}: {_variables_gone([each.rank for each in new])}", flush=True)
        if self._group is None or self._reserve.were_used_elsewhere:
            self._group, self._group_store = next(_numbers), self._reserve.new_group_store()
            try:
                self._start(engine(range(self.world_size)), pack_call(_join, (), {}), name, None).wait()
            except BaseException:
                self._group = self._group_store = None
                raise
        yield engine

    def _new_ranks(self) -> list[Replaced]:
        """Replace ranks that have died, and return those that are new to cells."""
        self._reserve.replace()
        return self._reserve.take_replaced() if self._holder is None else []

    def _start(self, engine: Engine, function: bytes, title: str, timeout_s: float | None) -> Run:
        job = Job(
            function=function,
            world_size=self.world_size,
            backend=self._backend,
            cuda_devices=self._gpus,
            threads=max(1, cores() // self.world_size) if self.is_here else None,
            seed=self._seed,
            port=0,
            start_s=time.time(),
            environment={},
            cells={**kernel.cells(), **self._cells},
            group=self._group,
        )
        run = Run(engine, self.world_size, title, timeout_s, when_returned="has run the cell to its end")
        run.start(job)
        return run

    def _listen(self, run: Run, asked: list[int]) -> Stacks | None:
        """Show output until the cell is over. Return where the ranks stood that were stuck after one had failed."""
        failed_s = hint_s = float("inf")
        next_print = time.monotonic() + PRINT_EVERY_S
        at_it = len(asked)
        while not run.over.wait(0.02):
            now = time.monotonic()
            if now > next_print:
                next_print = now + PRINT_EVERY_S
                print_output(run)
            states = [run.states[rank] for rank in asked]
            if (still := sum(state in ("starting", "running") for state in states)) < at_it:
                at_it, hint_s = still, now + HINT_AFTER_S
            if "failed" in states:
                failed_s = min(failed_s, now)
            if now > failed_s + ERROR_GRACE_S:
                stuck = run.stacks()
                run.kill()
                return stuck
            if now > hint_s and at_it:
                hint_s = float("inf")
                print(f"still at it: {run.stacks().in_words}", flush=True)
        return None

    def _failed(self, run: Run, asked: list[int], stuck: Stacks | None, before: list[int]) -> Exception:
        """Say which rank failed first in a cell, and what it cost the others. `before` are the processes of then."""
        assert run.error is not None
        diagnosis = run.error.diagnosis
        failures = {rank: failure for rank, failure in enumerate(run.failures) if failure}
        is_lost = any(LOST_PEER.search(failure.summary) for failure in failures.values())
        aside = set(range(self.world_size)) - set(asked)
        if is_lost and aside and (dead := self._lost(before, aside, DEATH_S)):
            diagnosis = diagnose([RankFacts(rank, exit_code=self._reserve.exit_code(rank)) for rank in dead])
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
        if lost := self._lost(before, set(range(self.world_size))):
            others.append(f"so {_lost_in_words(lost)}")
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


class FirstRanks:
    """The first ranks of a session, as `labkit.launch` takes them."""

    def __init__(self, session: Session, world_size: int) -> None:
        self._session, self.world_size, self.is_here = session, world_size, session.is_here

    def engine(self, name: str, timeout_s: float | None) -> Engine:
        """Return what carries one launched function on these ranks."""
        return self._session._engine_for(self.world_size, name, timeout_s)

    def __repr__(self) -> str:
        return f"the first {self.world_size} of {self._session!r}"


def newest() -> Session | None:
    """Return the session that was made last and is still there."""
    return max((session for session in _open if not session.over), key=lambda session: session._number, default=None)


def _join(worker: Any) -> None:
    """Do nothing, in the cells' process group."""


def _close_what_this_cell_made_before(now: kernel.Execution | None) -> None:
    if now is None:
        return
    for session in list(_open):
        made = session._made_in
        if made is not None and made.cell == now.cell and made.number != now.number:
            session._close("the cell that made them was run again")


def _variables_gone(ranks: list[int]) -> str:
    return "its variables are gone" if len(ranks) == 1 else "their variables are gone"


def _lost_in_words(ranks: list[int]) -> str:
    is_one = len(ranks) == 1
    return f"{rank_list(ranks)} {'is' if is_one else 'are'} replaced: {_variables_gone(ranks)}"
