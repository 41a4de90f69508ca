"""Some steps of one device: how long they are, and what it did in them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from labkit.trace.profiling import PARTS, Mark, split


@dataclass(frozen=True)
class Timed:
    """Some steps of one rank, in seconds on one clock, so that ranks can be drawn together."""

    steps: list[Mark] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    """What the rank did from the first of the steps to the last; "waiting": a message was awaited."""

    @property
    def step_s(self) -> float:
        """Seconds of a step, the median; NaN without any."""
        return statistics.median(s.end_s - s.start_s for s in self.steps) if self.steps else math.nan

    @property
    def busy_s(self) -> float:
        """Seconds of a step in which the device computes, the mean; NaN without any."""
        computing = (m.end_s - m.start_s for s in self.steps for m in clip(self.marks, s) if m.what in COMPUTING)
        return sum(computing) / len(self.steps) if self.steps else math.nan

    def parts_s(self) -> dict[str, float]:
        """Return the seconds of a step by part (`labkit.profiling.PARTS`), the median of each.

        "data" is loading, logging and whatever else no mark covers.
        """
        each = [split([s, Mark("data", s.start_s, s.end_s), *clip(self.marks, s)]) for s in self.steps]
        return {part: statistics.median(e[part] for e in each) if each else math.nan for part in PARTS}


@dataclass(frozen=True)
class Load:
    """What the machine's cores did while steps were timed."""

    seconds: float = math.nan
    machine_s: float = math.nan
    """Seconds of computing by all programs, over all cores; what a hypervisor has taken away counts, too."""
    own_s: float = math.nan
    """By this rank."""
    device: str = ""
    """Of a rank with a GPU, what that is called."""


class LoadMeter:
    """Measures that from when it is made to `load()`."""

    def __init__(self) -> None:
        self._began = _cpu_s()

    def load(self, device: torch.device) -> Load:
        """Return what has been done since."""
        seconds, machine_s, own_s = (now - then for now, then in zip(_cpu_s(), self._began, strict=True))
        return Load(seconds, machine_s, own_s, torch.cuda.get_device_name(device) if device.type == "cuda" else "")


def _cpu_s() -> tuple[float, float, float]:
    import psutil

    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    guests_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # Linux counts them as user's, too
    return time.monotonic(), sum(times) - idle_s - guests_s, time.process_time()


COMPUTING = ("forward", "backward", "optimizer")


def clip(marks: Sequence[Mark], span: Mark) -> list[Mark]:
    """Return what of these marks lies within a span."""
    inside = [Mark(w, max(a, span.start_s), min(b, span.end_s)) for w, a, b in marks]
    return [mark for mark in inside if mark.end_s > mark.start_s]
