"""What is known of a training before it runs on other devices: its work, its bytes, its samples.

From a model and a batch, by a step on tensors without memory; or from a comparison, which has measured all that.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from labkit.comparison.chain import blocks
from labkit.comparison.comparison import Comparison
from labkit.comparison.hardware import LINKS, Device, Link, device_of, link_of
from labkit.comparison.program import Program, Work
from labkit.comparison.reading import measured, samples_per_step
from labkit.protocol.text import known
from labkit.run import Run
from labkit.scaling.counting import batch_size, counted, resized
from labkit.scaling.rank_memory import OPTIMIZERS, numbers_of, trained_parameters

BUCKET_BYTES = 25 * 2**20
"""DDP's `bucket_cap_mb`."""


@dataclass(frozen=True)
class Known:
    """What a step's length and a rank's memory depend on."""

    samples: int
    """Of a step, over all ranks."""
    parameter_bytes: float
    """Of what is sent: all gradients together."""
    buckets: int
    optimizer_bytes: float
    """That the optimizer's step reads and writes."""
    work_of: Callable[[int, bool], Mapping[Work, int]]
    """By a number of samples, and whether blocks are recomputed: what one process has to do."""
    units: int = 1
    """Parts in which FSDP gathers parameters: the blocks, and the rest."""
    activation_bytes: float = 0.0
    """Of what a cut between layers sends for a sample; 0 where that is not known."""

    def compute_s(self, samples: int, device: Device, recompute: bool = False) -> float:
        """Return the seconds of the forward and backward pass of so many samples on one device."""
        return work_s(self.work_of(samples, recompute), device)

    def optimizer_s(self, device: Device) -> float:
        """Return the seconds of the optimizer's step on one device."""
        return self.optimizer_bytes / (device.memory_gbytes_s * 1e9 * device.efficiency)


def work_s(work: Mapping[Work, int], device: Device) -> float:
    """Return how long a device takes for all of this, but for the optimizer's step."""
    return sum(count * device.seconds(*each[:3]) for each, count in work.items() if not each.in_step)


def of_model(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    precision: str | None = None,
    optimizer: str = "AdamW",
) -> Known:
    """Return what is known of a model that trains on batches like this one, whose size is that over all ranks.

    Raises ValueError as `labkit.scaling.predict_memory` does.
    """
    dtype, autocast, master = numbers_of(precision)
    kept_numbers = known("optimizer", optimizer, OPTIMIZERS)
    programs: dict[tuple[int, bool], Program] = {}

    def work_of(samples: int, recompute: bool) -> Mapping[Work, int]:
        key = samples, recompute
        if key not in programs:
            of_this = resized(batch, samples)
            programs[key] = counted(model, of_this, loss, dtype, autocast, recompute).program
        return programs[key].work

    trained = trained_parameters(model).values()
    numbers = sum(parameter.numel() for parameter in trained)
    itemsize = dtype.itemsize if dtype else max((p.element_size() for p in trained), default=4)
    # It reads gradients, and reads and writes parameters and its own numbers.
    each = itemsize + 2 * (4 if master else itemsize) * (1 + kept_numbers) + itemsize * master
    size = numbers * itemsize
    buckets = max(1, round(size / BUCKET_BYTES))
    return Known(batch_size(batch), size, buckets, numbers * each, work_of, len(blocks(model)) + 1)


def of_comparison(comparison: Comparison, samples: int | None = None) -> Known:
    """Return what a comparison has measured, of its first run and of whatever it has sent.

    Raises ValueError where nothing was measured, or no run has logged `samples`.
    """
    runs = [run for run in comparison.runs.values() if measured(run)]
    if not runs:
        raise ValueError("this comparison has measured nothing: no function of it has taken enough steps")
    first = next((run for run in runs if way_of(run) == "one process"), None)
    if first is None:
        raise ValueError(
            "none of this comparison's runs is of one process, from which the others are predicted; add one"
        )
    (rank, *_), trained_on = measured(first), samples_of(first)
    if not rank.program.work:
        raise ValueError("the first run was too short to be recorded: give its function more steps")

    def work_of(wanted: int, recompute: bool) -> Mapping[Work, int]:
        share = wanted / trained_on
        return {
            each._replace(flops=each.flops * share, moved=round(each.moved * share)): count
            for each, count in rank.program.work.items()
        }

    def calls(way: str, what: str) -> list[int]:
        ranks = [measured(run)[0] for run in runs if way_of(run) == way]
        return [sum(piece.what == what for piece in each.program.pieces) for each in ranks]

    size = rank.most_held["gradients"]
    moved = sum(each.moved * count for each, count in rank.program.work.items() if each.in_step)
    cuts = [
        max(piece.size for one in measured(run) for piece in one.program.pieces if piece.what == "send")
        / samples_of(run)
        for run in runs
        if way_of(run) == "pipeline"
    ]
    return Known(
        samples or round(trained_on),
        size,
        next(iter(calls("DDP", "all_reduce")), max(1, round(size / BUCKET_BYTES))),
        moved,
        work_of,
        max(calls("FSDP", "reduce_scatter"), default=1),
        max(cuts, default=0.0),
    )


def way_of(run: Run) -> str:
    """Return what a run's recorded step does: "one process", "DDP", "FSDP", "pipeline", or "" for anything else."""
    ranks = measured(run)
    kinds = {piece.what for rank in ranks for piece in rank.program.pieces if piece.ranks}
    if not kinds and len(ranks) == 1:
        return "one process" if ranks[0].program.devices == 1 else ""
    if "all_gather" in kinds:
        return "FSDP"
    if kinds & {"send", "recv"}:
        return "pipeline"
    is_ddp = "all_reduce" in kinds and kinds <= {"all_reduce", "broadcast", "barrier"}  # buffers are broadcast
    return "DDP" if is_ddp else ""


def samples_of(run: Run) -> float:
    """Return how many samples a run takes in a step, over all its ranks. Raises ValueError if it has logged none."""
    samples = samples_per_step(run)
    if math.isnan(samples):
        raise ValueError(f"{run.name} has not logged how many samples a step has: worker.log(samples=len(inputs))")
    return samples


# For the cost model, which has these as its fields


def costs(
    source: Any,
    device: str | Device,
    link: str | Link = "",
    network: str | Link = "100 Gb/s",
    node_ranks: int = 8,
    samples: int = 0,
    recompute: bool = False,
) -> dict[str, Any]:
    """Return what a training costs on named devices, by the fields of `CostModel`.

    `samples` are those of one rank, around which time is in proportion to them; by default those of a step. Raises
    TypeError for a source that is neither a comparison nor `Known`.
    """
    facts = of_comparison(source) if isinstance(source, Comparison) else source
    if not isinstance(facts, Known):
        raise TypeError(
            "CostModel.of() takes a comparison, or labkit.scaling.known.of_model(model, batch), got a "
            f"{type(source).__name__}"
        )
    computes = device_of(device)
    carries, beyond = link_of(link, computes), link_of(network, computes)
    share = max(1, samples or facts.samples)
    one_s, two_s = (facts.compute_s(times * share, computes, recompute) for times in (1, 2))
    sample_s = max((two_s - one_s) / share, 1e-12)
    return {
        "sample_s": sample_s,
        "fixed_s": max(0.0, one_s - share * sample_s) + facts.optimizer_s(computes),
        "parameter_bytes": facts.parameter_bytes,
        "latency_s": carries.latency_us / 1e6,
        "byte_s": carries.byte_s,
        "far_byte_s": beyond.byte_s,
        "node_ranks": node_ranks,
        "buckets": facts.buckets,
        "overlap": 1.0,
        "activation_bytes": facts.activation_bytes,
    }


def points_of(comparison: Comparison) -> list[tuple[int, int, float, float, str]]:
    """Return the measured steps of those runs whose way the cost model knows: the fields of `Point`."""
    points = []
    for run in comparison.runs.values():
        steps_s = [second for rank in measured(run) for second in rank.steps_s]
        way = way_of(run) if steps_s else ""
        if way:
            middle_s = statistics.median(steps_s)
            error = 1.25 * statistics.pstdev(steps_s) / middle_s / math.sqrt(len(steps_s))
            strategy = "DDP" if way == "one process" else way
            points.append((run.world_size, round(samples_of(run)), middle_s, error, strategy))
    return points


def this_machine(comparison: Comparison) -> dict[str, Any]:
    """Return a guess at what a comparison's steps cost on the machine that has run it, by the fields of `CostModel`."""
    facts = of_comparison(comparison)
    run = next(run for run in comparison.runs.values() if way_of(run) == "one process")
    (rank,) = measured(run)
    here_s = statistics.median(rank.steps_s) if rank.steps_s else rank.timed.step_s
    return {
        "sample_s": here_s / samples_of(run),
        "cores": 0 if rank.is_on_gpu else os.cpu_count() or 1,
        "parameter_bytes": facts.parameter_bytes,
        "latency_s": LINKS["loopback"].latency_us / 1e6,
        "byte_s": LINKS["loopback"].byte_s,
        "buckets": facts.buckets,
        "activation_bytes": facts.activation_bytes,
    }
