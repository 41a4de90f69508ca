"""How long a training step takes on any number of ranks: a cost model, and its fit to a few measured points.

A step computes, waits for the slowest rank, and communicates. `CostModel` adds that up from a handful of plain numbers;
`fit` finds some of these from measurements and says how sure it is. On the notebook's side only; no rank needs it.

Where the formulas are from:
    ring all-reduce, latency + bytes / bandwidth: Thakur, Rabenseifner, Gropp 2005 (https://doi.org/10.1177/1094342005051521),
        Patarasuk and Yuan 2009 (https://doi.org/10.1016/j.jpdc.2008.09.002)
    communication in buckets beside the backward pass: Li et al. 2020 (https://arxiv.org/abs/2006.15704)
    FSDP sends 1.5 times as much as DDP: Rajbhandari et al. 2020, section 7 (https://arxiv.org/abs/1910.02054)
    a pipeline's (m + p − 1) / m: Huang et al. 2019 (https://arxiv.org/abs/1811.06965)
    which ranks form a pipeline, and that stages on different machines send less: Narayanan et al. 2021, section 3
        (https://arxiv.org/abs/2104.04473)
    the slowest of n: Blom 1958, the expected greatest of n normal values
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from course.formulas import check_split, check_whole
from labkit.protocol.text import titled

_Array = NDArray[np.float64]

STRATEGIES = ("DDP", "FSDP", "pipeline", "pipeline over machines")
"""The two pipelines differ in who forms one. "pipeline": neighbours, so that its stages lie on one machine as long as
that has ranks for them; each machine then has the whole network, and the gradients of all stages cross its link.
"pipeline over machines": ranks far apart (Megatron's order), so that the copies of a stage average its gradients inside
a machine as far as that goes, and what crosses the link is what stages send on."""

BACKWARD_SHARE = 2 / 3
"""Of computing: gradients are taken for inputs and for weights, so a backward pass costs two forward passes."""

UNKNOWN_NOISE = 0.05
"""Assumed of a model's error, as a part of the step time, where as many numbers are fitted as there are points."""


@dataclasses.dataclass(frozen=True)
class CostModel:
    """What a step costs, in seconds and bytes. Only `sample_s` must be known; what is left out costs nothing.

    Args:
        sample_s: forward and backward pass of one sample on one rank.
        fixed_s: what every step costs whatever the batch: the optimizer's step, starting kernels.
        cores: how many all ranks share for all that they compute, where they have no device of their own; 0: each
            has what it needs.
        fixed_cores: how many they share for `fixed_s` only, where samples are computed on devices of their own; 0:
            each has what it needs.
        parameter_bytes: of the whole network; its gradients are as large.
        latency_s: α: what a message between two ranks costs however small it is.
        byte_s: β: each byte more, 1 / bandwidth.
        far_byte_s: β of the one link that a machine has to the others, if that is slower; a ring is as fast as its
            slowest link, and rings that cross the same link at the same time share it.
        node_ranks: ranks per machine; 0 means that all ranks are on one.
        buckets: pieces in which parameters or gradients travel, each with its own latency.
        overlap: share of the time for computing beside which they can travel, 0 … 1. The last bucket has
            nothing left to hide behind.
        spread: standard deviation of a rank's computing time, as a part of it: all wait for the slowest.
        stages: of a pipeline. More ranks make several chains side by side; the ranks with the same stage average
            its gradients around a ring of their own.
        micro_batches: in which a pipeline cuts a chain's batch.
        activation_bytes: what a pipeline's stage sends on for one sample.
    """

    sample_s: float
    fixed_s: float = 0.0
    cores: int = 0
    fixed_cores: int = 0
    parameter_bytes: float = 0.0
    latency_s: float = 0.0
    byte_s: float = 0.0
    far_byte_s: float = 0.0
    node_ranks: int = 0
    buckets: int = 1
    overlap: float = 0.0
    spread: float = 0.0
    stages: int = 8
    micro_batches: int = 8
    activation_bytes: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name} must be a number from 0 on, got {value!r}")
        if self.sample_s == 0:
            raise ValueError("sample_s must be greater than 0: a sample takes time")
        if self.overlap > 1:
            raise ValueError(f"overlap is a share, 0 … 1, got {self.overlap}")
        for name in ("buckets", "stages", "micro_batches"):
            check_whole(name, getattr(self, name))

    def step_s(self, ranks: int, batch_size: int, strategy: str = "DDP") -> float:
        """Return the seconds of one step. `batch_size` is the sum over all ranks."""
        return sum(self.parts_s(ranks, batch_size, strategy).values())

    def parts_s(self, ranks: int, batch_size: int, strategy: str = "DDP") -> dict[str, float]:
        """Return the seconds of one step by what they are for; they add up to the step.

        "compute", "stragglers" (waiting for the slowest rank), "bubble" (a pipeline's idle time), "communication" that
        nothing hides.

        Raises ValueError for a strategy that is neither in `STRATEGIES` nor a slug of one, for less than one sample per
        rank or chain, and for ranks that do not make whole chains.
        """
        strategy = titled(strategy, STRATEGIES)
        check_whole("ranks", ranks)
        chain = min(self.stages, ranks) if strategy.startswith("pipeline") else 1
        if ranks % chain:
            raise ValueError(f"{ranks} ranks do not make whole chains of {chain} stages; take a multiple of {chain}")
        copies = ranks // chain
        over_machines = strategy == "pipeline over machines"
        check_split(batch_size, copies)
        share = math.ceil(batch_size / copies)  # the largest: everyone waits for it
        crowd = max(1.0, ranks / self.cores) if self.cores else 1.0
        fixed_crowd = max(crowd, ranks / self.fixed_cores) if self.fixed_cores else crowd
        compute_s = self.fixed_s * fixed_crowd + share * self.sample_s * crowd / chain
        stragglers_s = compute_s * self.spread * _expected_greatest(ranks)
        bubble_s = sent_s = 0.0
        if chain > 1:
            pieces = min(self.micro_batches, share)
            begun = pieces + chain - 1
            bubble_s = (chain - 1) / pieces * share * self.sample_s * crowd / chain
            byte_s = self._byte_s(ranks, copies) if over_machines else self._byte_s(chain)
            one_way_s = self.latency_s + share / pieces * self.activation_bytes * byte_s
            sent_s = 2 * begun * one_way_s  # activations forward, gradients back
        if strategy == "FSDP":
            # All-gather for the forward pass and again for the backward pass, then reduce-scatter.
            sent_s += self._exposed_s(self.ring_s(3, copies, self.parameter_bytes), compute_s)
        else:
            # A ring all-reduce is a reduce-scatter and an all-gather. In a pipeline, each stage has a ring.
            over, rings = (copies, 1) if over_machines else (ranks, chain)
            ring_s = self.ring_s(2, copies, self.parameter_bytes / chain, over, rings)
            sent_s += self._exposed_s(ring_s, BACKWARD_SHARE * compute_s)
        return {
            "compute": compute_s,
            "stragglers": stragglers_s,
            "bubble": bubble_s,
            "communication": sent_s,
        }

    def ring_s(self, rounds: int, ranks: int, size_bytes: float, over: int | None = None, rings: int = 1) -> float:
        """Return the seconds of `rounds` times around a ring: 1 for all-gather or reduce-scatter, 2 for all-reduce.

        Each round has ranks − 1 steps; in each, every rank sends 1 / ranks of the bytes. `over` is the number of ranks
        that the ring spans, if others lie between its own; `rings` such rings go around at the same time and share the
        links between machines.
        """
        steps = rounds * (ranks - 1)
        return steps * (self.buckets * self.latency_s + size_bytes / ranks * self._byte_s(over or ranks, rings))

    def _exposed_s(self, whole_s: float, beside_s: float) -> float:
        return max(whole_s - self.overlap * beside_s, whole_s / self.buckets)

    def _byte_s(self, span: int, senders: int = 1) -> float:
        """Return β among `span` neighbouring ranks, of which so many send through a machine's link at once."""
        if not 0 < self.node_ranks < span:
            return self.byte_s
        return max(self.byte_s, self.far_byte_s * min(senders, self.node_ranks))


class Point(NamedTuple):
    """One measured step time."""

    ranks: int
    batch_size: int
    """Over all ranks: what really ran."""
    step_s: float
    error: float = 0.0
    """Standard error of `step_s`, as a part of it, where known."""
    strategy: str = "DDP"


class Prediction(NamedTuple):
    """A step time and the range in which a measurement should lie."""

    step_s: float
    low_s: float
    high_s: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """A cost model whose `free` numbers were found from measurements, and how sure they are."""

    model: CostModel
    free: tuple[str, ...]
    noise: float
    """Standard deviation of what the model does not explain, as a part of the step time."""
    drawn: tuple[CostModel, ...] = dataclasses.field(repr=False)
    """Models fitted to points disturbed by as much as they are uncertain."""

    def predict(self, ranks: int, batch_size: int, strategy: str = "DDP", within: float = 0.9) -> Prediction:
        """Predict a step, with the range that holds `within` of the measurements if the model's form is right.

        That form is the assumption that no range can cover: a network that others use, too, is not in it.
        """
        if not 0 < within < 1:
            raise ValueError(f"within is a share between 0 and 1, got {within}")
        steps_s = [model.step_s(ranks, batch_size, strategy) for model in self.drawn]
        measured_s = steps_s * np.exp(self.noise * np.random.default_rng(1).standard_normal(len(steps_s)))
        low_s, high_s = np.quantile(measured_s, [(1 - within) / 2, (1 + within) / 2])
        step_s = self.model.step_s(ranks, batch_size, strategy)
        return Prediction(step_s, min(step_s, float(low_s)), max(step_s, float(high_s)))

    def ranges(self, within: float = 0.9) -> dict[str, tuple[float, float, float]]:
        """Return each fitted number with the range that holds `within` of the draws: (value, low, high)."""
        edges = [(1 - within) / 2, (1 + within) / 2]
        found = {name: np.quantile([getattr(model, name) for model in self.drawn], edges) for name in self.free}
        return {name: (getattr(self.model, name), float(low), float(high)) for name, (low, high) in found.items()}


def fit(points: Iterable[Point], start: CostModel, free: Sequence[str], draws: int = 100) -> Fit:
    """Find the `free` numbers of a cost model from measured steps; the others stay as in `start`.

    Minimises the relative errors (Levenberg and Marquardt's method) over the logarithms of the free numbers, so that
    none becomes negative. `start` is a guess, taken to be right within a factor of ten or so: what the points do not
    say stays near it. How sure the numbers are is found by fitting again, `draws` times, to points and guesses that
    are disturbed as much as they are uncertain (a parametric bootstrap).

    Raises ValueError for fewer points than free numbers, a name that cannot be fitted, a guess of 0, or a step time
    that is not positive.
    """
    points, free = list(points), tuple(free)
    _check_fit(points, start, free)
    guess = np.array([_to_free(name, getattr(start, name)) for name in free])
    logs = np.log([point.step_s for point in points])

    def model_at(theta: _Array) -> CostModel:
        values: dict[str, Any] = {name: _from_free(name, at) for name, at in zip(free, theta, strict=True)}
        return dataclasses.replace(start, **values)

    def errors(theta: _Array) -> _Array:
        model = model_at(theta)
        return np.log([model.step_s(p.ranks, p.batch_size, p.strategy) for p in points]) - logs

    def best(begin: _Array, noise: float, off: _Array, doubt: _Array) -> _Array:
        return _least_squares(
            lambda theta: np.concatenate([errors(theta) / noise - off, (theta - guess) / math.log(10) - doubt]), begin
        )

    known = math.sqrt(sum(point.error**2 for point in points) / len(points))
    spare = len(points) - len(free)
    exact = np.zeros(len(points)), np.zeros(len(free))
    theta, noise = guess, max(known, 0.01)
    for _ in range(3):  # how much the model leaves unexplained is known only once it is fitted
        theta = best(theta, noise, *exact)
        noise = max(known, float(np.linalg.norm(errors(theta))) / math.sqrt(spare) if spare else UNKNOWN_NOISE, 1e-3)
    random = np.random.default_rng(0).standard_normal((draws, len(points) + len(free)))
    drawn = (best(theta, noise, row[: len(points)], row[len(points) :]) for row in random)
    return Fit(model_at(theta), free, noise, tuple(map(model_at, drawn)))


def _check_fit(points: list[Point], start: CostModel, free: tuple[str, ...]) -> None:
    fittable = [field.name for field in dataclasses.fields(CostModel) if field.type == "float"]
    for name in free:
        if name not in fittable:
            raise ValueError(f"{name!r} cannot be fitted; these can: {', '.join(fittable)}")
        if not 0 < getattr(start, name) < (1 if name == "overlap" else math.inf):
            raise ValueError(f"the fit needs a guess for {name}: give `start` a value greater than 0, if only roughly")
    if not free or len(points) < len(free):
        raise ValueError(f"{len(points)} points cannot tell {len(free)} numbers apart ({', '.join(free)})")
    for point in points:
        if not (math.isfinite(point.step_s) and point.step_s > 0):
            raise ValueError(f"a step takes more than 0 s, got {point.step_s!r} for {point.ranks} ranks")


def _least_squares(residuals: Callable[[_Array], _Array], theta: _Array) -> _Array:
    """Return the theta with the least sum of squares, by Levenberg and Marquardt's method."""
    damping, here = 1e-3, residuals(theta)
    for _ in range(50):
        slopes = np.stack([(residuals(theta + 1e-5 * unit) - here) / 1e-5 for unit in np.eye(len(theta))], axis=1)
        square = slopes.T @ slopes
        while damping < 1e9:
            step = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slopes.T @ here)
            there = residuals(theta + np.clip(step, -2, 2))
            if there @ there < here @ here:
                break
            damping *= 4
        else:
            return theta
        gained = 1 - (there @ there) / (here @ here)
        theta, here, damping = theta + np.clip(step, -2, 2), there, damping / 5
        if gained < 1e-6:
            return theta
    return theta


def _to_free(name: str, value: float) -> float:
    return math.log(value / (1 - value)) if name == "overlap" else math.log(value)


def _from_free(name: str, theta: float) -> float:
    return 1 / (1 + math.exp(-theta)) if name == "overlap" else math.exp(theta)


@functools.cache
def _expected_greatest(count: int) -> float:
    """Return the expected greatest of `count` standard normal values, to within .03."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
