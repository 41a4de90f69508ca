"""The public call: start the ranks, return a `Run`."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from labkit.debugger import Debugger
from labkit.engines.arguments import DEFAULT_SEED, OWN, LaunchArgs, check, naming
from labkit.engines.base import Target
from labkit.engines.local import LocalEngine
from labkit.engines.spawn import check_not_forked
from labkit.monitor.active_runs import active_runs
from labkit.monitor.observers import RunObserver
from labkit.protocol import modules
from labkit.protocol.job import Job
from labkit.protocol.packing import name_of, pack_call
from labkit.protocol.text import printable
from labkit.rank import scripts, settings
from labkit.rank.device import place
from labkit.rank.worker import takes_worker
from labkit.run import Run, RunInterrupted
from labkit.system import threads
from labkit.trace.trace import TraceObserver
from labkit.ui import kernel, present


def launch(
    fn: Callable[..., Any],
    /,
    *positional: Any,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    wait: bool = True,
    stall_s: float | None = None,
    pg_timeout_s: float | None = None,
    seed: int | None = DEFAULT_SEED,
    name: str | None = None,
    live: bool | None = None,
    on: Target | None = None,
    watch: str | None = None,
    trace: int | None = None,
    device: str | None = None,
    **named: Any,
) -> Run:
    """Call `fn(worker, *args, **kwargs)` on every rank, each a process of its own, and return the `Run`.

    A function that has no place for the worker is called without it: `labkit.current()` is the worker then.

    The function may be typed in a notebook cell and may use anything else that the notebook defines: it travels by
    value. `help("labkit.rank.on_ranks")` says what else a rank has of the notebook. All ranks have joined a process
    group when the function begins; `worker` says which rank it is. On this machine it computes with its share of the
    cores, or of OMP_NUM_THREADS where that is less.

    Args:
        fn: what every rank calls; its first parameter is the `labkit.Worker`.
        positional, named: passed on to `fn`.
        args, kwargs: passed on, too: `kwargs={"seed": 1}` for a parameter whose name `launch` keeps for itself.
        world_size: number of ranks; by default one per GPU, or 2 without GPUs.
        backend: of the process group; by default "cpu:gloo,cuda:nccl" where every rank has a GPU of its own, as under
            torchrun, else "gloo".
        wait: whether to return when the run is over. With False the run goes on in the background, and its live view
            too.
        stall_s: end the run when no rank has logged, printed or returned anything for so many seconds.
        pg_timeout_s: how long a collective may take before PyTorch gives up, as `init_process_group(timeout=…)` has it,
            which counts instead where the function calls that. By default as there.
        seed: rank r seeds Python's, NumPy's and PyTorch's generators with `seed + r`; None leaves them alone.
        name: what the run is called in charts and tables; by default the function's name.
        live: whether to show the live view; by default where a person is watching a notebook.
        on: where, if not on new processes of this machine: `labkit.Slurm(…)`, `labkit.Ray(…)`,
            which also say how many ranks there are, or ranks that are reserved, a `labkit.Session`. Of those a smaller
            `world_size` takes the first.
        watch: "nan" ends the run as soon as a rank logs a NaN or an Inf, as that rank's failure, with its variables.
        trace: how many steps, after the first four, to record what every rank does when: `run.trace`.
        device: where ranks compute. By default each on a GPU of its own, or, where there are fewer GPUs than ranks, all
            on the CPU. "cpu": there in any case, and CUDA is not touched. "cuda": on a GPU in any case, which ranks
            share if they must; the backend is then gloo, which can reduce CUDA tensors, but not send them, nor shard.

    Raises:
        TypeError, ValueError: an argument is of no use, or cannot be sent; no process has been started then.
        RuntimeError: SLURM did not take the job, no Ray cluster answers, or another run holds the reserved ranks.
        WorkerFailed: with `wait=True`, a rank failed.
        RunInterrupted: an interrupt, of the cell (■) or by Ctrl-C, has stopped the run. It is a KeyboardInterrupt, so
            that cells that wait for their turn do not run. `labkit.runs[-1]` is the run; where nobody watches, the
            error says where its ranks were. The Stop button ends a run, too; `launch` returns it, and the cell goes on.

    Running a cell again stops what its last execution launched in the background.

    Processes are started by `torch.multiprocessing.spawn`
    (https://docs.pytorch.org/docs/stable/multiprocessing.html#spawning-subprocesses).
    """
    bundles = tuple(name for name, given in {"args": args, "kwargs": kwargs}.items() if given)
    args, kwargs = (*positional, *args), {**named, **(kwargs or {})}
    is_here = on is None or (isinstance(on, Target) and on.is_here)
    gpus = torch.cuda.device_count() if is_here else None
    asked = LaunchArgs(
        *(fn, args, kwargs, world_size, live, wait, trace, backend, stall_s, pg_timeout_s),
        *(seed, name, on, watch, device, bundles),
    )
    check(asked, gpus)
    check_not_forked()
    if on is not None:
        on = on if world_size is None else on.first(world_size)
        world_size = on.world_size
    world_size = world_size or gpus or 2
    function = pack_call(fn, args, kwargs, shares=is_here)
    device = device or (on.device if on else None)
    placement = place(world_size, gpus, device, backend and backend.lower(), on.reserved if on else 0)
    job = Job(
        function=function,
        world_size=world_size,
        backend=placement.backend,
        cuda_devices=placement.gpus,
        threads=threads(world_size) if is_here else None,
        seed=None if seed is None else int(seed),
        port=0,  # the engine's to fill in
        start_s=time.time(),
        environment={},
        cells=kernel.cells(function.head),  # and not what other cells have: a key, say
        argv=kernel.command_line(name_of(fn)),
        device=device,
        unused_gpus=placement.unused,
        path=tuple(modules.search_path()),
        is_here=is_here,
        settings=pickle.dumps(settings.of_this_process()),
        pg_timeout_s=pg_timeout_s,
        watches_nan=watch == "nan",
        takes_worker=takes_worker(fn, args, kwargs),
    )
    observers: list[RunObserver] = [Debugger(wait), *([] if trace is None else [TraceObserver(trace)])]
    name = printable(str(name or name_of(fn)))
    engine = LocalEngine(world_size) if on is None else on.engine(name, stall_s)
    run = Run(engine, world_size, name, stall_s, observers)
    run.launched_by = kernel.this_execution()
    kernel.end_ranks_at_shutdown()
    _stop_earlier(run)
    try:
        run.start(job)
    except KeyboardInterrupt:
        if not run.is_followed:  # nothing has been started, or what was has been ended
            raise
    return show_run(run, live, wait)


@naming("bad_argument")
def run_script(file: str | os.PathLike[str], /, *arguments: Any, **options: Any) -> Run:
    """Run a script on every rank as `torchrun FILE ARGUMENTS` does, and return the `Run`.

    `sys.argv`, `__main__`, imports from the script's folder, and the notebook's working folder are as there, and
    `init_process_group()` finds the ranks. What the script says to `labkit.log(loss=…)` becomes curves; under torchrun
    that does nothing. On a cluster every node needs the file under its path.

    Args:
        file: the script.
        arguments: its command line, `"--lr", 0.1`; each is passed as a text.
        options: those of `labkit.launch`: `world_size`, `on`, `stall_s`, `trace` …

    Raises:
        FileNotFoundError: there is no such file.
        TypeError, ValueError, WorkerFailed, RunInterrupted: as `labkit.launch`.
    """
    return _run(scripts.Script(os.fspath(file), tuple(map(str, arguments))), options)


@naming("bad_argument")
def run_module(module: str, /, *arguments: Any, **options: Any) -> Run:
    """Run a module on every rank as `torchrun -m MODULE ARGUMENTS` does, and return the `Run`.

    Args:
        module: its name, `"package.train"`, or that of a package with a `__main__`.
        arguments: its command line; each is passed as a text.
        options: those of `labkit.launch`.

    Raises:
        ModuleNotFoundError: there is no such module.
        TypeError, ValueError, WorkerFailed, RunInterrupted: as `labkit.launch`.
    """
    return _run(scripts.Script(module, tuple(map(str, arguments)), is_module=True), options)


def _run(script: scripts.Script, options: dict[str, Any]) -> Run:
    if unknown := options.keys() - set(OWN):
        name = min(unknown)
        raise TypeError(
            f"{name}=… is no option of labkit.launch ({', '.join(OWN)}); the script's own are texts: "
            f'"--{name.replace("_", "-")}", {options[name]!r:.30}'
        )
    script.check()
    options.setdefault("name", script.name if script.is_module else os.path.basename(script.name))
    return launch(scripts.run, script, **options)


def _stop_earlier(run: Run) -> None:
    """Stop what earlier executions of the cell that launches this run have launched in the background."""
    earlier = [each for each in list(active_runs) if isinstance(each, Run) and each.is_of_an_earlier_execution(run)]
    for each in earlier:
        each.ask_to_stop()
    for each in earlier:
        each.wait_until_over()


def show_run(run: Run, live: bool | None, wait: bool) -> Run:
    """Show a run that has just begun, and wait for it if that is wanted."""
    watcher = None
    try:
        run.is_watched = kernel.is_interactive()
        watcher = present.watch(run, live, wait)
        if wait:
            run.wait()
    except RunInterrupted:
        pass  # raised below, once the end is shown
    except KeyboardInterrupt:  # before run.wait() could take it
        run.stop_interrupted()
    finally:
        if watcher is not None and run.over.is_set():
            watcher.finish()
    if run.interrupts:
        raise RunInterrupted(run)
    return run
