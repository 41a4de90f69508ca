"""The public call: check the arguments, start the ranks, return a `Run`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from labkit.engines.base import Target
from labkit.engines.local import LocalEngine
from labkit.monitor.companion import Asked, companions
from labkit.monitor.going import going
from labkit.monitor.run import Run
from labkit.protocol.job import Job
from labkit.protocol.pages import more, naming
from labkit.protocol.pickling import name_of, pack_call
from labkit.protocol.system import has_tpu, threads
from labkit.ui import kernel, present


class _DefaultSeed(int):
    """Tells the seed that nobody gave from a 0 that somebody gave."""


DEFAULT_SEED = _DefaultSeed(0)


def launch(
    fn: Callable[..., Any],
    /,
    *args: Any,
    world_size: int | None = None,
    backend: str | None = None,
    wait: bool = True,
    timeout_s: float | None = None,
    seed: int | None = DEFAULT_SEED,
    name: str | None = None,
    live: bool | None = None,
    on: Target | None = None,
    watch: str | None = None,
    log_to: Any = None,
    trace: int | None = None,
    **kwargs: Any,
) -> Run:
    """Call `fn(worker, *args, **kwargs)` on every rank, each a process of its own, and return the `Run`.

    The function may be typed in a notebook cell and may use anything else that the notebook defines: it travels by
    value. Each rank has joined a process group when the function begins; `worker` says which rank it is. On this
    machine it computes with its share of the cores, or of OMP_NUM_THREADS where that is less.

    Args:
        fn: what every rank calls; its first parameter is the `labkit.Worker`.
        args: passed on to `fn`.
        world_size: number of ranks; by default one per GPU, or 2 without GPUs.
        backend: of the process group; by default "nccl" where every rank has a GPU of its own, else "gloo".
        wait: whether to return when the run is over. With False the run goes on in the background, and its live view
            too.
        timeout_s: end the run when no rank has logged or returned anything for so many seconds.
        seed: rank r seeds Python's, NumPy's and PyTorch's generators with `seed + r`; None leaves them alone.
        name: what the run is called in charts and tables; by default the function's name.
        live: whether to show the live view; by default where a person is watching a notebook.
        on: where, if not on new processes of this machine: `labkit.Slurm(…)`, `labkit.Ray(…)`, `labkit.Torchrun(…)`,
            which also say how many ranks there are, or ranks that are reserved, a `labkit.Session`. Of those a smaller
            `world_size` takes the first. `labkit.Here()`: one rank in the notebook's own process, for a debugger.
        watch: "nan" ends the run as soon as a rank logs a NaN or an Inf, as that rank's failure, with its variables.
        log_to: trackers that get the curves and the arguments, too: "tensorboard", "mlflow", "wandb", "trackio",
            `labkit.tracking.TensorBoard(…)` and the like, anything with `log(step, values)` and `close()`, or a list
            of these. The notebook's side writes, never a rank.
        trace: how many steps, after the first three, to record what every rank does when: `run.trace`.
        kwargs: passed on to `fn`.

    Raises:
        TypeError, ValueError: an argument is of no use, or cannot be sent; no process has been started then.
        ModuleNotFoundError: a tracker's library is not installed; likewise.
        RuntimeError: SLURM did not take the job, no Ray cluster answers, or another run holds the reserved ranks.
        WorkerFailed: with `wait=True`, a rank failed.

    An interrupt of the cell stops the run; `launch` then returns it, with the status "stopped". Running a cell again
    stops what its last execution launched in the background.

    Processes are started by `torch.multiprocessing.spawn`
    (https://docs.pytorch.org/docs/stable/multiprocessing.html#spawning-subprocesses).
    """
    own: dict[str, Any] = {"world_size": world_size, "backend": backend, "name": name, "on": on}
    own |= {"seed": None if seed is DEFAULT_SEED else (seed,), "watch": watch, "log_to": log_to, "trace": trace}
    with naming("bad_argument"):
        _check_call(fn, args, kwargs, own)
        is_here = on is None or getattr(on, "is_here", False)
        gpus = torch.cuda.device_count() if is_here else None  # does not initialise CUDA in the notebook
        on = None if on is None else ranks_on(on, world_size)
        world_size = check_world_size(world_size, gpus or 0) if on is None else on.world_size
        backend = check_backend(backend, world_size, gpus)
        _check_options(timeout_s, seed, name, live, watch)
    job = Job(
        function=pack_call(fn, args, kwargs),
        world_size=world_size,
        backend=backend,
        cuda_devices=gpus,
        threads=threads(world_size) if is_here else None,
        seed=None if seed is None else int(seed),
        port=0,  # the engine's to fill in
        start_s=time.time(),
        environment={},
        cells=kernel.cells(),
        watch=watch or "",
    )
    beside = companions(Asked(fn, args, kwargs, world_size, live, wait, log_to, trace))
    cell = kernel.this_execution()
    if cell is not None:
        _stop_what_it_launched_before(cell)
    name = name or name_of(fn)
    engine = LocalEngine(world_size) if on is None else on.engine(name, timeout_s)
    run = Run(engine, world_size, name, timeout_s, beside=beside)
    run.launched_by = cell
    try:
        run.start(job)
    except KeyboardInterrupt:
        if not run.is_followed:  # nothing has been started, or what was has been ended
            raise
        run.ask_to_stop()
    return show_run(run, live, wait)


def show_run(run: Run, live: bool | None, wait: bool) -> Run:
    """Show a run that has just begun, and wait for it if that is wanted."""
    watcher = None
    with contextlib.ExitStack() as showing:
        for companion in run.companions:
            showing.enter_context(companion.showing())
        try:
            watcher = present.watch(run, live, wait)
            if hasattr(run.engine, "work"):  # in this very process, and thread
                run.engine.work()
            if wait:
                run.wait()
        except KeyboardInterrupt:  # before run.wait() could take it, or a second one while it did
            try:
                run.stop()
            except KeyboardInterrupt:
                run.stop(0)
        finally:
            if watcher is not None and (wait or run.over.is_set()):
                watcher.finish()
    return run


def _stop_what_it_launched_before(now: kernel.Execution) -> None:
    """Stop the runs that earlier executions of a cell have launched in the background."""
    launched = [(run, run.launched_by) for run in list(going) if run.launched_by is not None]
    earlier = [run for run, then in launched if then.cell == now.cell and then.number != now.number]
    for run in earlier:
        run.ask_to_stop()
    for run in earlier:
        run.wait_for_the_end()


def _check_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: dict[str, Any]) -> None:
    """Check that `fn(worker, *args, **kwargs)` is a call that fn accepts."""
    if not callable(fn):
        raise TypeError(f"launch() takes a function to call on every rank, got a {type(fn).__name__}: {fn!r:.80}")
    title = name_of(fn)
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"{title} is an async function; launch() takes an ordinary one (def, not async def)")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some built-in functions do not say
        return
    taken = [n for n, value in own.items() if n in signature.parameters and value is not None]
    if taken and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        name = taken[0]
        raise ValueError(
            f"{title} has a parameter called {name!r}, but launch() keeps {name}=… for itself and does not pass it on. "
            f"Rename it in {title}, or bind it: functools.partial({title}, {name}=…)"
        )
    try:
        signature.bind(object(), *args, **kwargs)
    except TypeError as error:
        given = ", ".join(["worker", *(f"{a!r:.30}" for a in args), *(f"{k}=…" for k in kwargs)])
        raise TypeError(
            f"{title}{signature} cannot be called as {title}({given}): {error}. "
            "Its first parameter is the worker; launch() passes on all arguments that are not its own "
            "(world_size, backend, wait, timeout_s, seed, name, live, on, watch, log_to, trace)"
        ) from None


@functools.cache
def _say_once_that_tpus_are_not_used() -> None:
    if has_tpu():
        said = "labkit: TPUs are not supported; the ranks compute on this machine's CPU cores"
        warnings.warn(said, stacklevel=4)


def ranks_on(on: Any, world_size: Any) -> Target:
    """Return where to launch, which is the first ranks of a session if fewer are wanted than it has."""
    if not hasattr(on, "engine"):
        raise TypeError(f"on is labkit.Slurm(…), Ray(…), Torchrun(…), a Session or labkit.Here(), got {on!r:.80}")
    if world_size is not None and hasattr(on, "first"):
        return on.first(check_world_size(world_size, 0))
    if world_size not in (None, on.world_size):
        raise ValueError(f"{on!r} has {on.world_size} ranks, but world_size={world_size!r}; leave world_size away")
    return on


def check_world_size(world_size: Any, gpus: int) -> int:
    """Return the number of ranks, by default one per GPU, or 2. Raises TypeError or ValueError for what is none."""
    if world_size is None:
        return gpus or 2
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size is a whole number of ranks, got {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    return world_size


def check_backend(backend: Any, world_size: int, gpus: int | None) -> str | None:
    """Return the backend to use; None: the ranks find out. Raises TypeError or ValueError for what cannot be used."""
    if gpus == 0:
        _say_once_that_tpus_are_not_used()
    if backend is None:
        if gpus is None:
            return None  # the ranks will find out what GPUs they have
        return "nccl" if 0 < world_size <= gpus and dist.is_nccl_available() else "gloo"
    if not isinstance(backend, str):
        raise TypeError(f"backend is a name such as 'gloo' or 'nccl', got {backend!r}")
    known = [str(b) for b in dist.Backend.backend_list if b != "undefined"]
    for part in backend.split(","):  # "gloo", or by device: "cpu:gloo,cuda:nccl"
        library = part.rpartition(":")[2].lower()
        if library == "xla":
            raise ValueError(f"TPUs are not supported: ranks compute on GPUs or CPU cores. Use 'gloo'\n{more('tpu')}")
        if library not in known:
            raise ValueError(f"unknown backend {backend!r}; this PyTorch knows {', '.join(known)}")
        if not dist.is_backend_available(library):
            raise ValueError(f"backend {backend!r} is not built into this PyTorch; use 'gloo'")
        if library == "nccl" and gpus is not None and gpus < world_size:
            raise ValueError(
                f"backend {backend!r} needs a GPU of its own for each of the {world_size} ranks; "
                f"found {gpus}. Use backend='gloo'"
            )
    return backend.lower()


def _check_options(timeout_s: Any, seed: Any, name: Any, live: Any, watch: Any) -> None:
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and 0 < timeout_s < math.inf):
        raise ValueError(f"timeout_s is a number of seconds greater than 0, or None; got {timeout_s!r}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed is a whole number or None, got {seed!r}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is a text, got {name!r}")
    if live not in (True, False, None):
        raise TypeError(f"live is True, False or None (where a person watches), got {live!r}")
    if watch not in ("nan", None):
        raise ValueError(f"watch is 'nan', which ends the run at the first NaN or Inf, or None; got {watch!r:.60}")
