"""What a rank does before, around and after the reader's function. Runs in the rank's own process.

Imported by every spawned process, so it stays cheap: torch and the standard library, no pandas, Plotly or widgets.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import linecache
import multiprocessing
import multiprocessing.connection
import operator
import os
import random
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from queue import SimpleQueue as JobQueue
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import cloudpickle
import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from labkit import dynamo, isolation, process_group, records
from labkit.packing import pack_result
from labkit.waiting import look

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.queues import SimpleQueue

STOP_PATIENCE_S = 0.5
"""How long a rank that has posted its log calls waits at least for the others' posts, to agree on a last step …"""

STOP_PATIENCE_STEPS = 2
"""… and for so many of its own steps: within one, others that meet it in a collective have heard and logged, too."""

STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)
"""Makes a rank write its stacks, where the system has such a signal."""

OWN_FILES = {__file__}
"""Those whose code calls the reader's; a traceback begins below them."""

TRACEBACK_CHARACTERS = 50_000
"""A longer traceback loses its middle."""


class Stopped(BaseException):
    """Raised by `worker.log` once the run was asked to stop, on every rank at the same step where ranks log in step.

    Not an `Exception`, so that a training loop's own error handling does not swallow it. Catch it to return what the
    rank has so far:

    >>> def train(worker):
    ...     try:
    ...         ...  # the training loop, with worker.log(...) in it
    ...     except labkit.Stopped:
    ...         pass
    ...     return model.state_dict()
    """


class Cell(NamedTuple):
    """A cell of the notebook, so that a rank's traceback can show its lines."""

    title: str
    """As the reader knows it: "Cell In[3]"."""
    text: str


class Job(NamedTuple):
    """Everything a rank must know to run the function; sent to it through a pipe once its process is up, or a file."""

    function: bytes
    """(function, args, kwargs), pickled by value."""
    world_size: int
    backend: str | None
    """None: the ranks find out."""
    cuda_devices: int | None
    """GPUs that the ranks of a machine share out; 0 means CPU, None those that a rank finds."""
    threads: int | None
    """CPU threads per rank; None: the cores that a rank finds, divided by the ranks there."""
    seed: int | None
    port: int
    """Of the notebook's rendezvous store, on loopback; 0 where the ranks make their own."""
    start_s: float
    """When the run was launched, as `time.time()`."""
    environment: dict[str, str]
    cells: dict[str, Cell]
    """The notebook's cells by the file names that tracebacks know them by."""
    reserved: bool = False
    """Whether the process stays when the job is done, for another one."""
    group: int | None = None
    """On reserved ranks: the number of the process group that stays from cell to cell. None: one of the job's own."""
    surroundings: isolation.Surroundings | isolation.Modules | None = None
    """On reserved ranks: those of the notebook now; None leaves the process's own."""


class Place(NamedTuple):
    """Where a rank is among the others."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """Number of ranks on this machine."""


class Ends(NamedTuple):
    """One rank's ends of its channels to the notebook."""

    inbox: Connection
    """Receives (rank, `Job`), then perhaps "stop"; on reserved ranks over and over, and at last "leave". Its closing
    means that the notebook is gone."""
    queue: SimpleQueue[Any]
    """Carries `records` to the notebook."""
    output: Connection
    """The write end that becomes the rank's stdout and stderr."""
    stacks: Connection
    """The write end for the stack of every thread, when the rank is asked where it stands."""

    def close(self) -> None:
        """Let go of all of them in this process."""
        for end in self:
            end.close()


class Worker:
    """One rank's place in the run: what the launched function gets as its first argument."""

    rank: int
    """Global rank, 0 … world_size − 1."""
    local_rank: int
    """Rank within its machine."""
    world_size: int
    """Number of ranks."""
    device: torch.device
    """Where this rank computes: its GPU, or the CPU."""

    def __init__(self, place: Place, device: torch.device, log: records.LogBatcher, line: Line) -> None:
        self.rank, self.local_rank, self.world_size = place.rank, place.local_rank, place.world_size
        self.device = device
        self._log, self._line = log, line
        self._known_names: set[tuple[str, ...]] = set()
        self._next_step = 0
        self._log_calls = 0
        self._stop_posted: tuple[int, float] | None = None

    def log(self, step: int | None = None, **values: Any) -> None:
        """Send named numbers to the notebook: `worker.log(loss=loss.item(), lr=lr)`.

        The step counts the calls made without `step=`. Two names mean something to the live view and the tables:
        `samples`, how many samples this rank used in the step, gives samples per second; `accuracy` has a column in
        the comparison.

        Raises TypeError for a value that is not one number, ValueError for a reserved name, and `labkit.Stopped` once
        the run was asked to stop.
        """
        if step is None:
            step = self._next_step
            self._next_step += 1
        elif type(step) is not int:
            step = self._whole_number(step)
        names = tuple(values)
        if names not in self._known_names:
            self._check_names(names)
        self._log.add(
            step, names, [v if type(v) is float else records.number(n, v, self.rank) for n, v in values.items()]
        )
        self._log_calls += 1
        if self._line.stop_asked_s is not None:
            self._stop_with_the_others()

    def expect(self, steps: int) -> None:
        """Say how many steps this rank will log in all, so that the live view can show progress and time left.

        Raises ValueError for none: a data set with fewer samples than a batch of all ranks needs trains nothing.
        """
        steps = self._whole_number(steps)
        if steps < 1:
            raise ValueError(
                f"rank {self.rank} expects {steps} steps: with {self.world_size} ranks no whole batch is left for it. "
                "Launch fewer ranks, or use a smaller batch or more samples"
            )
        self._line.send(records.Expect(self.rank, steps))

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop. The next `log` may then raise `labkit.Stopped`."""
        return self._line.stop_asked_s is not None

    def _stop_with_the_others(self) -> None:
        """Raise `Stopped` at the first log call that every rank can still reach.

        Each rank posts how many log calls it had made when it heard of the stop; all end one call after the greatest.
        Ranks that meet in a collective every step are never further apart than that. How long to wait for the others
        is counted from the own post, and in steps: when the stop was heard, all may have been in the midst of a long
        one. Once a rank has left for want of posts, the others leave at their next call, for they miss it.
        """
        store = self._line.store
        assert store is not None
        keys = [f"labkit/stop/{rank}" for rank in range(self.world_size)]
        try:
            if self._stop_posted is None:
                self._stop_posted = self._log_calls, time.monotonic()
                store.set(keys[self.rank], str(self._log_calls))
            if store.check(["labkit/stop/left"]):
                raise Stopped(f"rank {self.rank} stopped; another had left")
            all_posted = store.check(keys)
            last_call = max(int(count) for count in store.multi_get(keys)) if all_posted else 0
            calls, posted_s = self._log_calls - self._stop_posted[0], time.monotonic() - self._stop_posted[1]
            if not all_posted and calls >= STOP_PATIENCE_STEPS and posted_s > STOP_PATIENCE_S:
                store.set("labkit/stop/left", "")
                raise Stopped(f"rank {self.rank} stopped; other ranks do not log")
        except RuntimeError:  # the rank that keeps the store has ended
            raise Stopped(f"rank {self.rank} stopped; rank 0 had ended") from None
        if all_posted and self._log_calls > last_call:
            raise Stopped(f"rank {self.rank} stopped after log call {self._log_calls}")

    def _whole_number(self, value: Any) -> int:
        try:
            return operator.index(value)
        except TypeError:
            raise TypeError(f"rank {self.rank}: a step is a whole number, got {value!r:.60}") from None

    def _check_names(self, names: tuple[str, ...]) -> None:
        if not names:
            raise TypeError(f"rank {self.rank}: worker.log() got nothing to log; name a value: worker.log(loss=…)")
        for name in names:
            if name in records.RESERVED_NAMES:
                raise ValueError(
                    f"rank {self.rank}: worker.log({name}=…): labkit fills in the column {name!r} itself; "
                    "choose another name"
                )
        self._known_names.add(names)

    def __repr__(self) -> str:
        return f"Worker(rank={self.rank}, world_size={self.world_size}, device={str(self.device)!r})"

    def __reduce__(self) -> Any:
        raise TypeError("a worker belongs to its rank and cannot be sent elsewhere; use plain values instead")


class Line:
    """A rank's line to the notebook during one job: takes records there and knows what the notebook has said."""

    def __init__(self) -> None:
        self.stop_asked_s: float | None = None
        """When this rank heard that it should stop, as `time.monotonic()`."""
        self.rank = -1
        self.during = "starting"
        """What the rank is doing, for its report if it fails."""
        self.store: dist.Store | None = None

    def send(self, record: records.Record) -> None:
        """Take one record to the notebook."""
        raise NotImplementedError

    def hear(self, word: str) -> None:
        """Take what the notebook says."""
        if word == "stop":  # perhaps again, for the answer's sake
            self.stop_asked_s = self.stop_asked_s or time.monotonic()
            self.send(look(self.rank))

    def end(self, record: records.Exit) -> None:
        """Tell the notebook that this rank has done its part, where the process stays; nothing is sent after it."""
        raise NotImplementedError


class PipeLine(Line):
    """The line of a rank that the notebook's process started."""

    def __init__(self, queue: SimpleQueue[Any], rank: int) -> None:
        super().__init__()
        self.rank = rank
        self._queue = queue
        self._is_over, self._lock = False, threading.Lock()

    def send(self, record: records.Record) -> None:
        """Put one record on the queue. What a thread sends that outlives its job is dropped: it is no other job's."""
        with self._lock:
            if not self._is_over:
                self._queue.put(record)

    def end(self, record: records.Exit) -> None:
        """Put the last one."""
        with self._lock:
            self._is_over = True
            self._queue.put(record)


class Inbox:
    """Where a process that the notebook started finds its jobs. The process ends if the notebook is gone."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._parts: JobQueue[Part | None] = JobQueue()
        threading.Thread(target=self._listen, name="labkit-inbox", daemon=True).start()

    def next_part(self) -> Part | None:
        """Block until the notebook sends work; return this process's part in it, or None if there will be no more."""
        return self._parts.get()

    @property
    def is_empty(self) -> bool:
        """Whether no work has come."""
        return self._parts.empty()

    def _listen(self) -> None:
        line: PipeLine | None = None
        while True:
            try:
                word = self._ends.inbox.recv()
            except (EOFError, OSError):
                end_children()
                os._exit(1)  # the notebook is gone: nobody is left to report to
            if word == "leave":
                self._parts.put(None)
            elif isinstance(word, tuple):
                rank, job = word
                line = PipeLine(self._ends.queue, rank)  # what is said from now on is of this job, and not of the last
                place = Place(rank, rank, job.world_size, job.world_size)
                self._parts.put(Part(job, place, line, _meet_in_the_notebook))
            elif line is not None:
                line.hear(word)


def main(index: int, all_ends: list[Ends]) -> None:
    """Do a job, report, and end the process; on reserved ranks do job after job. What `mp.spawn` calls.

    `index` says which of the ends are this process's; its rank comes with the job.
    """
    ends = all_ends[index]
    hear_signals(ends.stacks.fileno())
    code = 1
    try:
        for other in all_ends:
            if other is not ends:
                other.close()  # so that a rank's death closes its own channels for good
        _redirect_output(ends.output)
        # A spawned process would spawn its own children too; a DataLoader's workers are to start as in any script.
        multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
        _name_no_sockets()
        dynamo.put_off()
        faulthandler.enable()  # native crashes print where they were, into the rank's output
        inbox = Inbox(ends)
        if inbox.is_empty:
            get_warm()
        ends.queue.put(records.Ready())
        code = do_jobs(inbox.next_part)
    finally:
        # Not sys.exit: C++ destructors that run while gloo's threads are alive abort the process now and then, after
        # all the work was done. See https://github.com/pytorch/pytorch/issues/190489.
        os._exit(code)


def hear_signals(stacks: int) -> None:
    """Answer a question for stacks, leave the notebook's interrupt alone, and end when the notebook is killed."""
    # The interrupt goes to the notebook's whole process group; stopping the ranks is the notebook's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if STACKS_SIGNAL is None:
        return
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, STACKS_SIGNAL})
    # On Linux the system then ends this process when the notebook's has gone, even if native code holds Python's lock
    # so that `Line` cannot notice; and likewise the processes forked here, a DataLoader's workers, say. The signal
    # comes when the parent's *thread* ends, so only the main thread's children have it.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    forks_from_main = False

    def note_the_thread() -> None:
        nonlocal forks_from_main
        forks_from_main = threading.current_thread() is threading.main_thread()

    def end_with_this_process() -> None:
        if forks_from_main:
            _prctl_pr_set_pdeathsig(signal.SIGKILL)

    os.register_at_fork(before=note_the_thread, after_in_child=end_with_this_process)


def _name_no_sockets() -> None:
    """Keep the sockets by which a DataLoader's workers hand over tensors out of the file system, where that can be.

    Their folders would stay behind when a worker is killed. Such a socket asks for its process's key in any case.
    """
    if sys.platform == "linux":
        connection: Any = multiprocessing.connection
        by_default = connection.arbitrary_address
        connection.arbitrary_address = lambda family: (
            f"\0labkit-{secrets.token_hex(16)}" if family == "AF_UNIX" else by_default(family)
        )


def get_warm() -> None:
    """Take the first faults of a first step, while there is nothing else to do."""
    weight = torch.nn.Parameter(torch.zeros(8, 8))  # not a layer: that would draw random numbers
    optimizer = torch.optim.SGD([weight], lr=0.0)
    torch.nn.functional.linear(torch.zeros(4, 8), weight).sum().backward()
    optimizer.step()


class Part(NamedTuple):
    """One rank's part in one job."""

    job: Job
    place: Place
    line: Line
    meet: Callable[[Job, Place], dist.Store]
    """Returns the store through which the ranks meet."""


def do_jobs(next_part: Callable[[], Part | None]) -> int:
    """Do one job after another until there is none left, or one after which the process is to end.

    Return the exit code of the last. On reserved ranks each job is told its end by its line, and the process is then
    as good as new: a launched function begins in the state in which the process was before its first job.
    """
    fresh: isolation.State | None = None
    while (part := next_part()) is not None:
        if not part.job.reserved:
            return _do_safely(part)
        if fresh is None:
            fresh = isolation.capture()
            gc.freeze()  # what was imported stays: it need not be looked at after each job
        is_cell = part.job.group is not None
        with contextlib.nullcontext() if is_cell else isolation.isolated(fresh):
            _forget_peaks()
            code = _do_safely(part)
        part.line.end(records.Exit(part.place.rank, code, at_s=time.time()))
        del part
        gc.collect()
    process_group.leave()
    _tidy_up()
    return 0


def _do_safely(part: Part) -> int:
    try:
        return do(*part)
    except BaseException as error:
        # A signal handler, that of a DataLoader whose process died, say, raised while `do` was reporting.
        report(error, part.place.rank, part.job, part.line)
        return 1


def do(job: Job, place: Place, line: Line, meet: Callable[[Job, Place], dist.Store]) -> int:
    """Do the job and send what came of it; return the exit code. `meet` returns the store through which ranks meet."""
    rank = place.rank
    log = records.LogBatcher(rank, line.send, job.start_s)
    code = 1
    try:
        if kept := process_group.kept_for(job):
            device, store = kept.device, kept.store
        else:
            # Cells keep their settings and random states, also where a launch has ended their process group.
            device = process_group.device_of_cells(job) or _set_up(job, place)
            line.during = "joining the process group"
            store = process_group.join(job, place, device, meet)
        line.store = store if job.group is None else dist.PrefixStore(f"job/{job.start_s}", store)
        line.during = "receiving the function"
        show_lines_of(job.cells)
        function, args, kwargs = cloudpickle.loads(job.function)
        line.send(records.Started(rank))
        line.during = "running"
        result = function(Worker(place, device, log, line), *args, **kwargs)
        log.close()
        line.during = "sending the result"
        line.send(records.Result(rank, pack_result(result)))
        code = 0
    except Stopped:
        log.close()
        line.send(records.Stopped(rank))
        code = 0
    except BaseException as error:
        log.close()
        report(error, rank, job, line)
        traceback.clear_frames(error.__traceback__)  # what they refer to must not outlive the job
    line.send(records.Memory(rank, *_peak_memory()))
    if job.group is None:
        if code == 0:
            process_group.leave_together(job, place)
        elif job.reserved:
            process_group.leave()
    _tidy_up(at_exit=not job.reserved)
    return code


def do_and_exit(prepare: Callable[[], Callable[[], Part | None]]) -> NoReturn:
    """Do the jobs that what `prepare` returns brings, and end the process, as `main` does."""
    code = 1
    try:
        dynamo.put_off()
        code = do_jobs(prepare())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def show_lines_of(cells: Mapping[str, Cell]) -> None:
    """Let tracebacks find the lines of the notebook's cells."""
    for file, cell in cells.items():
        linecache.cache[file] = (len(cell.text), None, cell.text.splitlines(keepends=True), file)


def report(error: BaseException, rank: int, job: Job, line: Line) -> None:
    """Tell the notebook of a failure.

    Before leaving the process group: once this rank is gone the others fail too, and their errors would bury the one
    that matters.
    """
    failed_s = time.time() - job.start_s
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # no DataLoader is to raise another exception in here
    line.send(records.Failure(rank, failed_s, line.during, *describe(error, job.cells)))


def _redirect_output(output: Connection) -> None:
    """Make `output` this process's stdout and stderr, for Python and for native code."""
    if os.name == "posix":
        for stream, descriptor in (("stdout", 1), ("stderr", 2)):
            os.dup2(output.fileno(), descriptor)
            # Anew: the old one may believe that it writes to a file.
            setattr(sys, stream, os.fdopen(descriptor, "w", 1, "utf-8", "backslashreplace", closefd=False))
    output.close()


def _set_up(job: Job, place: Place) -> torch.device:
    """Set the environment, threads, seeds and device of this rank."""
    rank = place.rank
    threads = job.threads or max(1, cores() // place.local_world_size)
    if job.surroundings is not None:
        job.surroundings.take_over()
    os.environ.update(job.environment)
    # The variables that torchrun sets, for libraries that look there.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(place.local_rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        OMP_NUM_THREADS=str(threads),
    )
    torch.set_num_threads(threads)
    if job.seed is not None:
        # Different on every rank, so that dropout masks and augmentation differ too. DDP gives all ranks rank 0's
        # weights; code that builds equal models by hand calls torch.manual_seed itself.
        seed = job.seed + rank
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
    elif job.reserved:
        random.seed()  # as in a process that has just been started; torch begins with a seed of its own there
    devices = torch.cuda.device_count() if job.cuda_devices is None else job.cuda_devices
    if not devices:
        return torch.device("cpu")
    here = torch.cuda.device_count()
    if here < min(devices, place.local_world_size):
        raise RuntimeError(
            f"rank {rank} finds {here} GPUs where the notebook found {devices}: one has failed, or "
            f"CUDA_VISIBLE_DEVICES has changed (it is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r} here). "
            "Look at nvidia-smi, and restart the kernel so that it counts again"
        )
    device = torch.device("cuda", place.local_rank % devices)
    torch.cuda.set_device(device)
    return device


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _meet_in_the_notebook(job: Job, place: Place) -> dist.Store:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job.port))
    return dist.TCPStore("127.0.0.1", job.port, place.world_size, is_master=False, timeout=timedelta(seconds=60))


def describe(error: BaseException, cells: Mapping[str, Cell]) -> tuple[str, str, tuple[tuple[str, int, str], ...]]:
    """Give an exception's summary line, its traceback and its frames, as `records.Failure` takes them.

    The traceback is without the frames of `OWN_FILES` above the reader's and knows cells by their titles.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in OWN_FILES:
        trace = trace.tb_next
    described = traceback.TracebackException(type(error), error, trace, compact=True)
    text = "".join(described.format())
    for file, cell in cells.items():
        text = text.replace(f'File "{file}"', cell.title)
    if len(text) > TRACEBACK_CHARACTERS:
        half = TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"
    summary = "".join(described.format_exception_only()).strip().splitlines()
    frames = tuple((frame.filename, frame.lineno or 0, frame.name) for frame in reversed(described.stack[-50:]))
    return (summary[0][:500] if summary else type(error).__name__), text, frames


def _forget_peaks() -> None:
    """Begin to measure peak memory anew, for the next job."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def _peak_memory() -> tuple[int, int]:
    """Peak resident memory of this process and peak memory allocated on its GPU, in bytes."""
    return peak_resident_bytes(os.getpid()), torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


def peak_resident_bytes(pid: int) -> int:
    """Peak resident memory of a process in bytes; where the system does not keep it, what is resident now."""
    if sys.platform == "linux":
        # Not getrusage: its peak is inherited from the process that forked this one, the notebook's kernel.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
            for row in status:
                if row.startswith("VmHWM:"):
                    return int(row.split()[1]) * 1024
        return 0
    import psutil

    with contextlib.suppress(psutil.Error):
        memory = psutil.Process(pid).memory_info()
        return getattr(memory, "peak_wset", memory.rss)
    return 0


def _tidy_up(at_exit: bool = True) -> None:
    """Do what an ordinary exit would do at Python's level: exit handlers, flushed streams, no child left."""
    try:
        if at_exit:
            atexit._run_exitfuncs()
    finally:
        end_children()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()


def end_children() -> None:
    """End the processes that this one has started."""
    for child in multiprocessing.active_children():  # a DataLoader's workers, say
        child.kill()
