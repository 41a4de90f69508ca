"""What the notebook sends to a rank: the job, the cells that its tracebacks may name, and its numbers."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from labkit.protocol.packed import Packed


class Cell(NamedTuple):
    """A cell of the notebook, so that a rank's traceback can show its lines."""

    title: str
    """As the user knows it: "Cell In[3]"."""
    text: str


class Surroundings(NamedTuple):
    """What of the notebook's process a rank that stays takes over as a job begins, as a new process inherits it."""

    folder: str
    """The working folder."""
    environment: dict[str, str] | None = None
    """None for ranks on other machines, which may not have the folder either."""


class RankHook:
    """What takes part in a job on a rank: `labkit.rank.main` lists those of every job, others are sent with theirs.

    Each method may be left as it is. `channel` is the rank's `labkit.rank.channels.Channel`.
    """

    def around(self, job: Job, channel: Any) -> AbstractContextManager[None]:
        """Return the context in which the rank, a member of its process group, calls the function."""
        return nullcontext()

    def receive(self, word: str, channel: Any) -> None:
        """Note a word from the notebook, in the thread that receives it, from the job's first moment on.

        "stop": the rank should; "details": say what is known of the rank, for a report of where it stands.
        """

    def failed(self, error: BaseException, job: Job, channel: Any) -> None:
        """Say more of what the function has raised, before the failure is reported."""


class Job(NamedTuple):
    """Everything a rank must know to run the function; sent to it through a pipe once its process is up, or a file.

    What a rank alone can read without importing torch first is pickled within it: an agent that passes the job on has
    no torch.
    """

    function: Packed
    """(function, args, kwargs)."""
    world_size: int
    backend: str | None
    """None: the ranks find out."""
    cuda_devices: int | None
    """GPUs that the ranks of a machine share out; 0 means CPU, None those that a rank finds."""
    threads: int | None
    """CPU threads per rank; None: the cores that a rank finds, divided by the ranks there."""
    seed: int | None
    port: int
    """`MASTER_PORT` of ranks that the notebook has started, free for a script; 0 where ranks find one themselves."""
    start_s: float
    """When the run was launched, as `time.time()`."""
    environment: dict[str, str]
    cells: dict[str, Cell]
    """The notebook's cells by the file names that tracebacks know them by."""
    group: int | None = None
    """On reserved ranks: the number of the process group that stays from cell to cell. None: one of the job's own."""
    stays: Surroundings | None = None
    """On reserved ranks, whose processes stay for other jobs. None: the process ends with the job."""
    hooks: tuple[bytes, ...] = ()
    """What takes part on each rank besides what every job has, the debugger's part, say; pickled."""
    store: str = ""
    """Where ranks meet: the file of a store on this machine, or tcp://HOST:PORT."""
    argv: tuple[str, ...] = ("-c",)
    """`sys.argv` of a rank, for the user's own command line."""
    path: tuple[str, ...] = ()
    """The notebook's `sys.path`, each entry absolute; (): the rank keeps its own."""
    is_here: bool = True
    """Whether the ranks are processes of the notebook's machine."""
    settings: bytes | None = None
    """Of the notebook's process (`labkit.rank.settings`), pickled; None: the rank keeps its own, and its `__main__`."""
    device: str | None = None
    """As `labkit.launch` was asked: "cpu", "cuda" or None."""
    unused_gpus: int = 0
    """GPUs that there are, where the ranks compute on the CPU because they are too few."""
    watches_nan: bool = False
    """Whether a rank fails at the first NaN or Inf that it logs."""
    pg_timeout_s: float | None = None
    """How long a collective may take before PyTorch gives up; None: PyTorch's own default."""
    takes_worker: bool = True
    """Whether the function is called with the worker first."""

    def with_hook(self, hook: RankHook) -> Job:
        """Return the job with this one, too."""
        return self._replace(hooks=(*self.hooks, pickle.dumps(hook)))

    def own_hooks(self) -> tuple[RankHook, ...]:
        """Return the hooks that the job brings along."""
        return tuple(map(pickle.loads, self.hooks))


class RankInfo(NamedTuple):
    """Where a rank is among the others."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """Number of ranks on this machine."""
