"""What one rank has found out about a training function, or about a strategy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.comparison import old_differences as differences
from labkit.comparison.old_differences import Portable
from labkit.comparison.program import Program
from labkit.comparison.timed import Load, Timed, clip
from labkit.trace.profiling import Mark


@dataclass(frozen=True)
class Measured:
    """What one rank found out about a training function, and what that returned; or about a strategy."""

    returned: Any
    """Of a strategy, the weights that this rank holds, by the whole network's names."""
    timed: Timed
    """Steps as they are on this machine, with marks from PyTorch's profiler."""
    steps_s: tuple[float, ...]
    """Seconds of other steps, in which nobody looked."""
    program: Program
    """What one step consists of, to be replayed on ideal devices."""
    wire_bytes: float
    """What the system says that a step has sent over TCP; NaN where it does not count, as with NCCL."""
    most_held: dict[str, int]
    """The most bytes held of each kind (`KINDS` in `labkit/comparison/held.py`)."""
    most_held_by_device: tuple[dict[str, int], ...] = ()
    """The same for each of the rank's devices; of a strategy none."""
    is_on_gpu: bool = False
    buffers: frozenset[str] = frozenset()
    """The last parts of the names of the network's buffers."""
    is_one_replica: bool = False
    """Whether `nn.DataParallel` was called where it has fewer than two devices, and so calls the network as it is."""
    load: Load = Load()
    """What the machine did up to the last of `steps_s`."""
    exact: bool | None = None
    """Whether a strategy claims to compute the same step as one process."""
    bytes_expected: float = math.nan
    """What a strategy sends in a step by its formula."""

    @property
    def weights(self) -> dict[str, Portable]:
        """The tensors by name among what was returned, if that is a mapping."""
        given = self.returned.items() if isinstance(self.returned, Mapping) else ()
        return {str(name): part for name, part in given if isinstance(part, Portable)}

    @property
    def bytes_sent(self) -> float:
        """Bytes that the rank sends in a step: the calls that PyTorch dispatched, as textbooks have them."""
        return self.program.bytes_sent

    @property
    def marks(self) -> list[Mark]:
        """What the rank did in the last of the profiled steps, which comes first."""
        steps = self.timed.steps
        return [steps[-1], *clip(self.timed.marks, steps[-1])] if steps else []

    @staticmethod
    def columns(ranks: Sequence[Measured], first: Sequence[Measured]) -> dict[str, Any]:
        """Return a run's columns in a comparison: `ranks` are its results, `first` those of the first run.

        `difference`, the greatest of any rank's weight to the first run's, as a part of that weight's size (NaN where
        weights were not returned, or are not finite), `buffers off by`, likewise, and `weights`, both in words. Of a
        strategy also whether it claims to be `exact`, and KiB that it sends by its formula, the mean over ranks.
        """
        own = ranks[0]
        found = differences.columns([rank.weights for rank in first], [rank.weights for rank in ranks], own.buffers)
        if own.exact is not None:
            found["exact"] = own.exact
            found["formula KiB"] = statistics.fmean(rank.bytes_expected for rank in ranks) / 1024
        return found
