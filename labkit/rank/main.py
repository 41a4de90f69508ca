"""What a rank's process does before, around and after the user's function.

Imported by every spawned process, so it stays cheap: torch and the standard library, no pandas, Plotly or widgets.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from labkit.protocol import events
from labkit.protocol.job import Job, RankInfo
from labkit.protocol.packing import pack_result, unpack
from labkit.rank import (
    current,
    failure,
    notebook_main,
    process_group,
    settings,
    staying,
)
from labkit.rank import device as devices
from labkit.rank.channels import Channel
from labkit.rank.describe import CaptureLocals
from labkit.rank.log_batcher import LogBatcher
from labkit.rank.report_collectives import ReportCollectives
from labkit.rank.script_compat.reuse_process_group import ReuseProcessGroup
from labkit.rank.stop_agreement import Stopped
from labkit.rank.worker import Worker
from labkit.system import host

failure.OWN_FILES.add(__file__)


class RankTask(NamedTuple):
    """One rank's part in one job."""

    job: Job
    info: RankInfo
    channel: Channel


BROKEN = (
    "labkit: a kernel has failed on the GPU of rank {}: this process can compute nothing more there, so it ends, and a "
    "new one takes its place\n"
)
"""What a reserved rank says whose CUDA context is of no use any more."""


KILLED_S = 1.0
"""How long a child that is killed may take to be gone: milliseconds, unless the system holds it."""


def fast_exit(code: int) -> NoReturn:
    """End this process now.

    Not sys.exit: C++ destructors that run while gloo's threads are alive abort the process now and then, after all the
    work was done. See https://github.com/pytorch/pytorch/issues/190489.
    """
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            host.end_session(os.getpid(), signal.SIGTERM)  # programs that it has started; who stays is killed after it
        end_children()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def end_if_forked(channel: Channel) -> None:
    """End a process that the launched function has forked and that returns from it: it is not the rank."""
    if not channel.is_copy:
        return
    error, code = sys.exc_info()[1], 0
    try:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            traceback.print_exception(error)
            code = failure.exit_code(error)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def do_jobs(next_task: Callable[[], RankTask | None]) -> int:
    """Do one job after another until there is none left, or one after which the process is to end.

    Return the exit code of the last. On reserved ranks each job is told its end by its channel.
    """
    gc.enable()  # which `die_with_parent` has turned off
    gc.freeze()  # what was imported stays: it need not be looked at in the midst of a step
    while (task := next_task()) is not None:
        job, info, channel = task
        with contextlib.nullcontext(0) if job.stays is None else staying.around(job.group is not None) as left_bytes:
            try:
                code = run_job(task, left_bytes)
            except BaseException as error:
                # A signal handler, that of a DataLoader whose process died, say, raised while `run_job` was reporting.
                failure.report(error, info.rank, job, channel)
                code = failure.exit_code(error)
            if job.stays is None:
                return code
            if devices.is_broken():
                channel.send(events.Output(info.rank, BROKEN.format(info.rank)))
                return code or 1
        channel.end(events.Exit(info.rank, code, at_s=time.time()))
        del task, job, channel
        staying.give_memory_back()
    process_group.leave()
    _tidy_up()
    return 0


def run_job(task: RankTask, left_bytes: int) -> int:
    """Do the job and send what came of it; return the exit code. It has not taken `left_bytes` of the memory."""
    job, info, channel = task
    rank = info.rank
    log = LogBatcher(rank, channel.send, job.start_s)
    channel.hooks = (ReportCollectives(), CaptureLocals(), ReuseProcessGroup(), *channel.hooks)
    code, store = 1, None
    try:
        settled, store = process_group.join_for(*task, set_up)
        channel.store = store if job.group is None else dist.PrefixStore(f"job/{job.start_s}", store)
        failure.show_lines_of(job.cells)
        call_and_send_result(job, info, channel, log, settled)
        code = 0
    except BaseException as error:
        log.close()
        code = failure.exit_code(error)
        failure.report(error, rank, job, channel)
        traceback.clear_frames(error.__traceback__)  # what they refer to must not outlive the job
    try:
        channel.send(events.Memory(rank, *_peak_memory(left_bytes)))
    except Exception:  # no reason to fail
        traceback.print_exc()
    if job.group is None and store is not None:
        process_group.leave_together(job, info, store, code != 0, lambda: channel.receive("details"))
    _tidy_up(at_exit=job.stays is None)
    return code


def call_and_send_result(job: Job, info: RankInfo, channel: Channel, log: LogBatcher, settled: devices.Settled) -> None:
    """Call the job's function and send what it returns, or that it was stopped. Raises what the function raises."""
    channel.during = "receiving the function"
    try:
        with notebook_main.of(job):
            with contextlib.ExitStack() as around:
                for hook in channel.hooks:
                    around.enter_context(hook.around(job, channel))
                function, args, kwargs = unpack(job.function, settled.device)
                channel.send(events.Started(info.rank, settled.where, settled.note))
                channel.during = "running"
                worker = Worker(info, settled.device, log, channel, job.watches_nan)
                try:
                    with current.is_now(worker):
                        result = call(function, *((worker,) if job.takes_worker else ()), *args, **kwargs)
                finally:
                    end_if_forked(channel)
            log.close()
            channel.during = "sending the result"
            channel.send(events.Result(info.rank, pack_result(result, memory=channel.memory)))
    except Stopped:
        log.close()
        channel.send(events.Stopped(info.rank))


def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the launched function as a script's `main` is called: `sys.exit()` and `sys.exit(0)` end it well.

    Raises `Stopped` where the function has made of that an exit of its own: `except BaseException: sys.exit(1)`.
    """
    try:
        return function(*args, **kwargs)
    except SystemExit as error:
        if error.code is None or (isinstance(error.code, int) and not error.code):
            return None
        if isinstance(stopped := failure.behind(error), Stopped):
            raise stopped from None
        raise


def set_up(job: Job, info: RankInfo) -> None:
    """Set the environment, threads and seeds of this rank."""
    rank = info.rank
    threads = job.threads or max(1, host.cores() // info.local_world_size)
    if job.stays is not None:
        staying.begin_in(job.stays)
    sys.argv[:] = job.argv
    if job.path:  # on another machine, besides what there is
        sys.path[:] = job.path if job.is_here else dict.fromkeys([*sys.path, *job.path])
    os.environ.update(job.environment)
    for name, value in host.rank_environment.items():
        os.environ.setdefault(name, value)
    # The variables that torchrun sets, for libraries that look there.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(info.local_rank),
        WORLD_SIZE=str(info.world_size),
        LOCAL_WORLD_SIZE=str(info.local_world_size),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(info.world_size),
        ROLE_NAME="default",
        OMP_NUM_THREADS=str(threads),
    )
    machines = {"GROUP_RANK": rank // info.local_world_size}
    machines |= {"GROUP_WORLD_SIZE": info.world_size // info.local_world_size}
    restarts = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    for variable, number in (machines | restarts).items():
        os.environ.setdefault(variable, str(number))  # torchrun's own, where it is there, knows better
    if job.settings is not None:
        settings.apply(pickle.loads(job.settings))
    torch.set_num_threads(threads)
    if job.seed is not None:
        # Different on every rank, so that dropout masks and augmentation differ too. DDP gives all ranks rank 0's
        # weights; code that builds equal models by hand calls torch.manual_seed itself.
        seed = job.seed + rank
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)


def _peak_memory(left_bytes: int) -> tuple[int, int]:
    """Peak resident memory of this process and peak memory allocated on its GPUs, in bytes."""
    peak_bytes = max(0, host.peak_bytes(os.getpid()) - left_bytes)
    return peak_bytes, devices.peak_bytes()


def _tidy_up(at_exit: bool = True) -> None:
    """Do what an ordinary exit would do at Python's level: exit handlers, flushed streams, no child left."""
    try:
        if at_exit:
            atexit._run_exitfuncs()
    finally:
        host.ignore_sigchld()  # which are ended now
        end_children()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()


def end_children() -> None:
    """End the processes that this one has started."""
    for child in multiprocessing.active_children():
        child.kill()
        child.join(KILLED_S)  # so that the next job does not find it
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    if pid := getattr(server, "_forkserver_pid", None):
        with contextlib.suppress(OSError):
            os.kill(pid, host.kill_signal)
            host.wait_for(pid)  # multiprocessing asks for its exit code itself
