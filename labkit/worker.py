"""What a rank does before, around and after the reader's function. Runs in the rank's own process.

Imported by every spawned process, so it stays cheap: torch and the standard library, no pandas, Plotly or widgets.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
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
from queue import SimpleQueue as Words
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import cloudpickle
import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from labkit import dynamo, records
from labkit.packing import pack_result

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.queues import SimpleQueue

STOP_PATIENCE_S = 0.5
"""How long a rank that was asked to stop waits for the others to agree on a common last step."""

LEAVE_TOGETHER_S = 0.25
"""How long a rank that has returned waits for the others to return before it leaves the process group."""

STACKS_SIGNAL = getattr(signal, "SIGUSR2", None)
"""Makes a rank write its stacks, where the system has such a signal."""

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
    """Receives (rank, `Job`), then "stop" or what a session asks. Its closing means that the notebook is gone."""
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
            self._stop_with_the_others(self._line.stop_asked_s)

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

    def _stop_with_the_others(self, asked_s: float) -> None:
        """Raise `Stopped` at the first log call that every rank can still reach.

        Each rank posts how many log calls it had made when it heard of the stop; all end one call after the greatest.
        Ranks that meet in a collective every step are never further apart than that.
        """
        store = self._line.store
        assert store is not None
        keys = [f"labkit/stop/{rank}" for rank in range(self.world_size)]
        if not self._line.stop_posted:
            self._line.stop_posted = True
            store.set(keys[self.rank], str(self._log_calls))
        try:
            all_posted = store.check(keys)
            last_call = max(int(count) for count in store.multi_get(keys)) if all_posted else 0
        except RuntimeError:  # the rank that keeps the store has ended
            raise Stopped(f"rank {self.rank} stopped; rank 0 had ended") from None
        if all_posted:
            if self._log_calls > last_call:
                raise Stopped(f"rank {self.rank} stopped after log call {self._log_calls}")
        elif time.monotonic() - asked_s > STOP_PATIENCE_S:
            raise Stopped(f"rank {self.rank} stopped; other ranks do not log")

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
    """A rank's line to the notebook: takes records there and knows what the notebook has said."""

    def __init__(self) -> None:
        self.stop_asked_s: float | None = None
        """When this rank heard that it should stop, as `time.monotonic()`."""
        self.stop_posted = False
        self.during = "starting"
        """What the rank is doing, for its report if it fails."""
        self.store: dist.Store | None = None
        self.words: Words[Any] = Words()
        """All that the notebook says after the job; for a function that waits for it, a session's."""

    def send(self, record: records.Record) -> None:
        """Take one record to the notebook."""
        raise NotImplementedError

    def hear(self, word: Any) -> None:
        """Take what the notebook says."""
        if word == "stop":
            self.stop_asked_s = time.monotonic()
        self.words.put(word)


class PipeLine(Line):
    """The line of a rank that the notebook's process started. The process ends if the notebook is gone."""

    def __init__(self, ends: Ends) -> None:
        super().__init__()
        self._inbox, self._queue = ends.inbox, ends.queue

    def send(self, record: records.Record) -> None:
        """Put one record on the queue."""
        self._queue.put(record)

    def receive_job(self) -> tuple[int, Job]:
        """Block until the notebook sends work; give the rank that this process is to be, and its job."""
        try:
            if not self._inbox.poll():
                _get_warm()
                self._queue.put(records.Warm())
            rank, job = self._inbox.recv()
        except (EOFError, OSError):
            os._exit(1)
        threading.Thread(target=self._listen, name="labkit-line", daemon=True).start()
        return rank, job

    def _listen(self) -> None:
        while True:
            try:
                word = self._inbox.recv()
            except (EOFError, OSError):
                end_children()
                os._exit(1)  # the notebook is gone: nobody is left to report to
            self.hear(word)


def main(index: int, all_ends: list[Ends]) -> None:
    """Run one job, report, and end the process. What `torch.multiprocessing.spawn` calls.

    `index` says which of the ends are this process's; its rank comes with the job.
    """
    ends = all_ends[index]
    hear_signals(ends.stacks.fileno())
    line = PipeLine(ends)
    code, rank = 1, None
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
        rank, job = line.receive_job()
        code = do(job, Place(rank, rank, job.world_size, job.world_size), line, _meet_in_the_notebook)
    except BaseException as error:
        # A signal handler, that of a DataLoader whose process died, say, raised while `do` was reporting.
        if rank is not None:
            report(error, rank, job, line)
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


def _get_warm() -> None:
    """Take the first faults of a first step, while there is nothing else to do."""
    weight = torch.nn.Parameter(torch.zeros(8, 8))  # not a layer: that would draw random numbers
    optimizer = torch.optim.SGD([weight], lr=0.0)
    torch.nn.functional.linear(torch.zeros(4, 8), weight).sum().backward()
    optimizer.step()


def do(job: Job, place: Place, line: Line, meet: Callable[[Job, Place], dist.Store]) -> int:
    """Do the job and send what came of it; give the exit code. `meet` gives the store through which ranks meet."""
    rank = place.rank
    log = records.LogBatcher(rank, line.send, job.start_s)
    code = 1
    try:
        device = _set_up(job, place)
        line.during = "joining the process group"
        line.store = meet(job, place)
        _join_group(job.backend, place, device, line.store)
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
    line.send(records.Memory(rank, *_peak_memory()))
    if code == 0:
        _leave_together(job, place, line.store)
    _tidy_up()
    return code


def do_and_exit(prepare: Callable[[], tuple[Job, Place, Line, Callable[[Job, Place], dist.Store]]]) -> NoReturn:
    """Do the job that `prepare` gives, with what `do` wants besides, and end the process, as `main` does."""
    code = 1
    try:
        dynamo.put_off()
        job, place, line, meet = prepare()
        try:
            code = do(job, place, line, meet)
        except BaseException as error:  # raised by a signal handler while `do` was reporting
            report(error, place.rank, job, line)
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


def _join_group(backend: str | None, place: Place, device: torch.device, store: dist.Store) -> None:
    if backend is None:
        backend = _backend_for(place, device, store)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        device_id=device if backend == "nccl" else None,
    )


def _backend_for(place: Place, device: torch.device, store: dist.Store) -> str:
    """Choose nccl where every rank has a GPU of its own, wherever the ranks are; else gloo."""
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    keys = [f"labkit/gpu/{rank}" for rank in range(place.world_size)]
    store.set(keys[place.rank], mine)
    gpus = set(store.multi_get(keys))
    return "nccl" if b"" not in gpus and len(gpus) == place.world_size and dist.is_nccl_available() else "gloo"


def describe(error: BaseException, cells: Mapping[str, Cell]) -> tuple[str, str, tuple[tuple[str, int, str], ...]]:
    """Give an exception's summary line, its traceback and its frames, as `records.Failure` takes them.

    The traceback is without the frames of this file and knows cells by their titles.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
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


def _leave_together(job: Job, place: Place, store: dist.Store | None) -> None:
    """Wait a moment for the other ranks to return, then leave the process group.

    A rank that closes its connections while another still reads the last collective can make that one fail. Ranks
    that return much later are not waited for: if they are in a collective, they must learn that this rank is gone.
    """
    together = False
    with contextlib.suppress(RuntimeError):  # the rank that keeps the store has left
        together = store is not None and _wait_for(store, "labkit/returned", 1, job.world_size)
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except RuntimeError as error:
        print(f"labkit: leaving the process group failed: {error}", file=sys.stderr)
    if store is not None and together and not job.port:  # rank 0 keeps the store, and so leaves last
        with contextlib.suppress(RuntimeError):
            if place.rank:
                store.add("labkit/left", 1)
            else:
                _wait_for(store, "labkit/left", 0, job.world_size - 1)


def _wait_for(store: dist.Store, key: str, mine: int, expected: int) -> bool:
    """Count oneself, and wait a moment until all have been counted."""
    count = store.add(key, mine)
    deadline = time.monotonic() + LEAVE_TOGETHER_S
    while count < expected and time.monotonic() < deadline:
        time.sleep(0.002)
        count = store.add(key, 0)
    return count >= expected


def _tidy_up() -> None:
    """Do what an ordinary exit would do at Python's level: exit handlers, flushed streams, no child left."""
    try:
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
