"""What the notebook sends to a rank: the job, the cells that its tracebacks may name, and its numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from labkit.protocol.definitions import Definitions
    from labkit.protocol.modules import Search
    from labkit.protocol.pickling import Message


class Cell(NamedTuple):
    """A cell of the notebook, so that a rank's traceback can show its lines."""

    title: str
    """As the reader knows it: "Cell In[3]"."""
    text: str


class ProcessIsolation(Protocol):
    """What a rank that stays does around each job, so that it neither sees the last one nor an old notebook."""

    def around(self, is_cell: bool) -> AbstractContextManager[int]:
        """Return the context in which the process that calls this does the job: as good as new, but for cells.

        It gives how many bytes of memory earlier jobs have left there.
        """

    def join(self, part: Any) -> tuple[Any, Any]:
        """Return where the rank computes in a `labkit.rank.main.RankTask`, and the store of the group that it is in."""

    def keep_group(self) -> bool:
        """Keep the process group of a launch that has ended well for the next one, if it may be; return whether."""

    def give_memory_back(self) -> None:
        """Let go of what the job has left and nobody refers to."""

    def take_over(self) -> None:
        """Have the process that calls this take over the notebook's folder, path and environment, say."""


class RankHook:
    """What takes part in a job on a rank: `labkit.rank.hooks` lists those of every job, others are sent with theirs.

    Each method may be left as it is. `channel` is the rank's `labkit.rank.channels.Channel`.
    """

    def around(self, job: Job, channel: Any) -> AbstractContextManager[None]:
        """Return the context in which the rank, a member of its process group, calls the function."""
        return nullcontext()

    def receive(self, word: str, channel: Any) -> None:
        """Note a word from the notebook, in the thread that receives it, from the job's first moment on.

        "stop": the rank should; "details": say what is known of the rank, for whoever asks where it stands.
        """

    def failed(self, error: BaseException, job: Job, channel: Any) -> None:
        """Say more of what the function has raised, before the failure is reported."""


class Job(NamedTuple):
    """Everything a rank must know to run the function; sent to it through a pipe once its process is up, or a file."""

    function: Message
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
    """`MASTER_PORT` of ranks that the notebook has started, free for a script; 0 where ranks find one themselves."""
    start_s: float
    """When the run was launched, as `time.time()`."""
    environment: dict[str, str]
    cells: dict[str, Cell]
    """The notebook's cells by the file names that tracebacks know them by."""
    group: int | None = None
    """On reserved ranks: the number of the process group that stays from cell to cell. None: one of the job's own."""
    isolation: ProcessIsolation | None = None
    """On reserved ranks, whose processes stay for other jobs. None: the process ends with the job."""
    hooks: tuple[RankHook, ...] = ()
    """What takes part on each rank besides what every job has, the debugger's part, say."""
    store: str = ""
    """Where ranks meet: the file of a store on this machine, or tcp://HOST:PORT."""
    argv: tuple[str, ...] = ("-c",)
    """`sys.argv` of a rank, for the reader's own command line."""
    imported: tuple[str, ...] = ()
    """The modules that the notebook's cells import."""
    search: Search | None = None
    """Where the rank finds its modules; None: where its process does."""
    settings: Mapping[str, Any] | None = None
    """Of the notebook's process (`labkit.rank.settings`); None: the rank keeps its own."""
    definitions: Definitions | None = None
    """What the rank's `__main__` has besides what the function brings; None: that stays as it is."""
    device: str | None = None
    """As `labkit.launch` was asked: "cpu", "cuda" or None."""
    lasting_store: str = ""
    """The file of a store that lasts as long as the reserved ranks, for a process group that may outlive its launch."""
    spared_gpus: int = 0
    """GPUs that there are, where the ranks compute on the CPU because they are too few."""
    watches_nan: bool = False
    """Whether a rank fails at the first NaN or Inf that it logs."""
    pg_timeout_s: float | None = None
    """How long a collective may take before PyTorch gives up; None: PyTorch's own default."""
    takes_worker: bool = True
    """Whether the function is called with the worker first."""

    def with_hook(self, hook: RankHook) -> Job:
        """Return the job with this one, too."""
        return self._replace(hooks=(*self.hooks, hook))


class RankInfo(NamedTuple):
    """Where a rank is among the others."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    """Number of ranks on this machine."""
