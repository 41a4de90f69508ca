"""Which way to train on other devices: what fits, how long a step is, and whether it equals one process's.

Every number stands beside what it assumes, and every time has a range. What is not known is said.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Never

from torch import Tensor, nn

from labkit.comparison.comparison import Comparison
from labkit.comparison.hardware import Device, Link, device_of, link_of
from labkit.comparison.reading import measured
from labkit.comparison.why import BATCH_NORM, DROPOUT, suspects
from labkit.protocol import former_names
from labkit.protocol.text import titled
from labkit.scaling import known
from labkit.scaling.cost_model import CostModel
from labkit.scaling.counting import remembered, resized
from labkit.scaling.known import Known
from labkit.scaling.rank_memory import CUT, largest, predict_memory, sent_by_stages

if TYPE_CHECKING:
    import pandas as pd

ROOM = 0.9
"""Which part of a device's memory tensors may fill: the rest is CUDA's, NCCL's, and the allocator's gaps."""

SLOWER, QUICKER = 0.6, 1.4
"""By how much the speed of computing is in doubt, as factors: programs that fuse operators are faster than what is
counted here, one after the other. Published tables lie within (tests/scaling/test_published.py)."""

CHAINS = "DDP × 1F1B"
"""Pipelines side by side, each with a part of the batch."""

WAYS = ("DDP", "DataParallel", "ZeRO-1", "FSDP2", "model parallel", "GPipe", "1F1B", CHAINS)
"""Several devices' ways. Of those that cannot be told apart the first is recommended."""

SHARED = ("DDP", "DataParallel", "ZeRO-1", "FSDP2")
"""Those in which every device has a part of the batch."""

STEP_OF = {"DDP": "DDP", "ZeRO-1": "DDP", "FSDP2": "FSDP", "GPipe": "pipeline", "1F1B": "pipeline"}
"""What the cost model calls them."""


class Row(NamedTuple):
    """One way to train, and what is said of it. A number that is not known is NaN."""

    way: str
    held_gb: float
    """10⁹ bytes on the device that holds most."""
    fits: bool | None
    """None where that is not known."""
    step_s: float
    low_s: float
    high_s: float
    efficiency: float
    """The speed-up over one device that had memory enough for the whole batch, divided by the number of devices; as in
    a comparison."""
    equal: str
    """Whether a step equals one process's, in words."""
    assumes: str


@dataclasses.dataclass(frozen=True)
class Advice:
    """What `labkit.advise` says. Shows itself in a cell."""

    title: str
    rows: list[Row]
    recommendation: str
    notes: list[str]

    def frame(self) -> pd.DataFrame:
        """Return the table: a row per way."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "held GB": row.held_gb,
                    "fits": {True: "yes", False: "no", None: "not known"}[row.fits],
                    "step ms": 1000 * row.step_s,
                    "from ms": 1000 * row.low_s,
                    "to ms": 1000 * row.high_s,
                    "efficiency": row.efficiency,
                    "equal to one process?": row.equal,
                    "assumes": row.assumes,
                }
                for row in self.rows
            ],
            index=[row.way for row in self.rows],
        )

    def _shown(self) -> pd.DataFrame:
        frame = self.frame()
        for column, form in (("held GB", "{:,.3g}"), ("efficiency", "{:.0%}")):
            frame[column] = [_said(value, form) for value in frame[column]]
        spans = [
            f"{_milliseconds(row.step_s)} ({_milliseconds(row.low_s)} – {_milliseconds(row.high_s)})"
            if row.step_s == row.step_s
            else "not known"
            for row in self.rows
        ]
        frame.insert(2, "ms a step", spans)
        return frame.drop(columns=["step ms", "from ms", "to ms"])

    def __str__(self) -> str:
        lines = [self.title, self._shown().to_string(), f"→ {self.recommendation}", *self.notes]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        table = self._shown().to_html(escape=True, border=0)
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return (
            f"<p><b>{html.escape(self.title)}</b></p>{table}"
            f"<p>→ {html.escape(self.recommendation)}</p><ul style='font-size:smaller'>{notes}</ul>"
        )


def _milliseconds(seconds: float) -> str:
    ms = 1000 * seconds
    return "not known" if math.isnan(ms) else f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _bytes(size: float) -> str:
    factor, unit = next((each for each in ((1e9, "GB"), (1e6, "MB")) if size >= each[0] / 10), (1e3, "kB"))
    return f"{size / factor:,.3g} {unit}"


def _said(value: float, form: str) -> str:
    return "not known" if math.isnan(value) else form.format(value)


def advise(
    source: nn.Module | Comparison,
    batch: Any = None,
    gpus: int = 8,
    device: str | Device = "H100",
    link: str | Link = "",
    *,
    network: str | Link = "100 Gb/s",
    gpus_per_node: int = 8,
    loss: Callable[..., Tensor] | None = None,
    precision: str | None = None,
    optimizer: str = "AdamW",
    micro_batches: int = 0,
    ways: Sequence[str] = WAYS,
    **former: Never,
) -> Advice:
    """Say in one table which way to train on other devices: what fits, how long a step is, whether it is exact.

    >>> labkit.advise(model, batch=(images, labels), gpus=8, device="A100", precision="bf16 autocast")

    Nothing is started or allocated. Where a way does not fit, it is asked again with recomputed layers.

    Args:
        source: a model; or a comparison that has a run of one process, from which the others are predicted.
        batch: of one step, over all devices: (inputs, targets), a tensor, or a dict of the model's keywords. Only
            shapes count. Of a comparison, how many samples; by default as many as its first run takes.
        gpus: how many devices.
        device: "H100", "A100", "V100", "L4", "T4", "laptop", or a `labkit.comparison.hardware.Device`.
        link: between the devices of a machine: "NVLink", "PCIe 4", … or a `Link`; by default NVLink where there is one.
        network: between machines.
        gpus_per_node: devices of a machine.
        loss: of (outputs, targets); by default what is usual for tensors like these.
        precision: "float32", "bf16 autocast", "bf16", "float64"; by default the model's own.
        optimizer: "AdamW", "SGD" or "SGD, momentum".
        micro_batches: of pipelines; by default four for each stage.
        ways: of several devices, that are asked about; titles or slugs, "fsdp2".

    Returns an `Advice`, which shows itself; `frame()` has the numbers. Raises ValueError for names that are not known,
    a batch that is missing, and a model that cannot be counted.
    """
    former_names.refuse("advise", former)
    computes = device_of(device)
    carries = link_of(link, computes)
    beyond = link_of(network, computes)
    if gpus != int(gpus) or gpus < 1:
        raise ValueError(f"gpus must be a whole number from 1 on, got {gpus!r}")
    is_compared = isinstance(source, Comparison)
    if not is_compared and batch is None:
        raise ValueError("advise() needs a batch of the model: batch=(inputs, targets); only its shapes count")
    facts = (
        known.of_comparison(source, batch)
        if isinstance(source, Comparison)
        else known.of_model(source, batch, loss, precision, optimizer)
    )
    question = _Question(
        source,
        facts,
        batch,
        gpus,
        computes,
        carries,
        beyond,
        gpus_per_node,
        micro_batches or 4 * gpus,
        {"loss": loss, "precision": precision, "optimizer": optimizer},
    )
    with remembered():
        rows = [question.row("one process")]
        if gpus > 1:
            absent = {"DataParallel"} if gpus > gpus_per_node else set()
            if is_compared or not question.lengths_of_chains:
                absent.add(CHAINS)
            rows += [question.row(titled(way, WAYS)) for way in ways if ways is not WAYS or way not in absent]
        rows += [question.row(row.way, True) for row in rows if row.fits is False and not is_compared]
    title = f"{facts.samples:,} samples a step on {gpus} × {computes.name}, {carries.name}" + (
        f", {beyond.name} between machines of {gpus_per_node}" if gpus > gpus_per_node else ""
    )
    return Advice(title, rows, recommend(rows, gpus), question.notes([row.way for row in rows]))


def _not_known(title: str, why: str) -> Row:
    nan = math.nan
    return Row(title, nan, None, nan, nan, nan, nan, "", f"not known: {why}")


class _Question(NamedTuple):
    source: Any
    facts: Known
    batch: Any
    gpus: int
    device: Device
    link: Link
    network: Link
    gpus_per_node: int
    micro_batches: int
    options: dict[str, Any]
    chains: int = 1
    """Pipelines side by side, each of as many devices."""

    @property
    def lengths_of_chains(self) -> list[int]:
        """The lengths that chains can have if there are at least two, all equal."""
        return [
            k for k in range(2, self.gpus // 2 + 1) if self.gpus % k == 0 and self.facts.samples % (self.gpus // k) == 0
        ]

    def best_chains(self, recompute: bool) -> Row:
        """Return the row of the quickest chains that fit; if none does, of those that hold least."""
        title = f"{CHAINS}, recomputed" if recompute else CHAINS
        if isinstance(self.source, Comparison):
            return _not_known(title, "how a comparison's network could be cut; ask with the model itself")
        if not self.lengths_of_chains:
            return _not_known(title, f"{self.gpus} devices and {self.facts.samples} samples make no equal chains")
        found = []
        for length in self.lengths_of_chains:
            chains = self.gpus // length
            samples = self.facts.samples // chains
            one = self._replace(
                gpus=length,
                chains=chains,
                facts=dataclasses.replace(self.facts, samples=samples),
                batch=resized(self.batch, samples),
                micro_batches=max(length, self.micro_batches * length // self.gpus),
            )
            found.append(one.row("1F1B", recompute))
        fitting = [row for row in found if row.fits and not math.isnan(row.step_s)]
        best = min(fitting or found, key=lambda row: row.step_s if fitting else row.held_gb)
        return best._replace(way=title)

    def row(self, way: str, recompute: bool = False) -> Row:
        if way == CHAINS:
            return self.best_chains(recompute)
        ranks = 1 if way == "one process" else self.gpus
        title = f"{way}, recomputed" if recompute else way
        try:
            held, about_memory = self._held(way, ranks, recompute)
        except ValueError as error:
            return _not_known(title, str(error))
        limit_gb = ROOM * self.device.memory_gb
        try:
            step_s, low_s, high_s, efficiency, about_time = self._times(way, ranks, recompute)
        except ValueError as error:
            step_s = low_s = high_s = efficiency = math.nan
            about_time = f"time not known: {error}"
        return Row(
            title,
            held / 1e9,
            None if math.isnan(held) else held / 1e9 <= limit_gb,
            step_s,
            low_s,
            high_s,
            efficiency,
            self._equal(way),
            f"{about_memory}; {about_time}",
        )

    def _held(self, way: str, ranks: int, recompute: bool) -> tuple[float, str]:
        if isinstance(self.source, Comparison):
            return self._held_by_comparison(way, ranks)
        options = dict(self.options, recompute=recompute)
        if way in ("GPipe", "1F1B"):
            options["micro_batches"] = self.micro_batches
        each = largest(predict_memory(self.source, self.batch, way, ranks, **options))
        if self.chains > 1:  # DDP's buckets
            each = each._replace(communication=each.communication + each.gradients)
        words = {"optimizer_state": "optimizer state", "communication": "buffers of communication"}
        parts = [f"{words.get(name, name)} {_bytes(size)}" for name, size in each._asdict().items() if size]
        return each.total, f"counted: {', '.join(parts)}"

    def _held_by_comparison(self, way: str, ranks: int) -> tuple[float, str]:
        run = next(run for run in self.source.runs.values() if known.way_of(run) == "one process")
        (rank,), share = measured(run), self.facts.samples / known.samples_of(run)
        had = rank.most_held
        weights, gradients, state = had["parameters"], had["gradients"], had["optimizer state"]
        activations = had["activations"] * share / (ranks if way in SHARED else 1)
        if way == "one process":
            return weights + gradients + state + activations, "as measured, activations in proportion to the batch"
        if way in ("DDP", "DataParallel"):
            copy = "buckets" if way == "DDP" else "its replica's gradients"
            held = weights + 2 * gradients + state + activations
            return held, f"as one process, with {copy}, and a part of the activations"
        if way == "ZeRO-1":
            held = weights + 2 * gradients + state / ranks + activations
            return held, "as DDP, with a part of the optimizer's state"
        if way == "FSDP2":
            held = (weights + gradients + state) / ranks + weights + activations
            return held, "a part of everything; of what is gathered at most all parameters"
        raise ValueError("how a comparison's network could be cut; ask with the model itself")

    def _times(self, way: str, ranks: int, recompute: bool) -> tuple[float, float, float, float, str]:
        """Return a step's seconds, least and most, its efficiency, and what they assume."""
        if way == "DataParallel" and ranks > self.gpus_per_node:
            raise ValueError(f"nn.DataParallel is one process; a machine has {self.gpus_per_node} devices")
        if ranks > 1 and way in ("GPipe", "1F1B") and self.facts.samples < self.micro_batches:
            raise ValueError(f"{self.facts.samples} samples do not make {self.micro_batches} micro-batches")
        found = [
            self._step_s(way, ranks, recompute, factor, overlap)
            for factor, overlap in ((1.0, 0.9), (QUICKER, 1.0), (SLOWER, 0.5))
        ]
        step_s, low_s, high_s = found
        alone_s = self._alone_s(self.facts.samples * self.chains, self.device, False)
        about = (
            f"{self.device.name} at {self.device.efficiency:.0%} of its peaks, {self.device.launch_us:g} µs a kernel"
        )
        if ranks > 1:
            slowest = self.network if ranks * self.chains > self.gpus_per_node else self.link
            about += f", {slowest.name} at {slowest.efficiency:.0%}"
        if way in ("GPipe", "1F1B"):
            about += f", {f'{self.chains} chains of ' if self.chains > 1 else ''}{ranks} equal stages"
            about += f", {self.micro_batches} micro-batches"
        elif way == "model parallel":
            about += ", one stage computes at a time"
        elif way == "DataParallel":
            about += ", one process starts all kernels, and nothing is sent while it computes"
        return step_s, low_s, high_s, min(1.0, alone_s / step_s / ranks / self.chains), about

    def _alone_s(self, share: float, device: Device, recompute: bool) -> float:
        one = max(1, round(share))
        return self.facts.compute_s(one, device, recompute) * share / one + self.facts.optimizer_s(device)

    def _step_s(self, way: str, ranks: int, recompute: bool, factor: float, overlap: float) -> float:
        device, samples = self.device, self.facts.samples
        link, network = (
            dataclasses.replace(each, efficiency=min(1.0, each.efficiency * factor))
            for each in (self.link, self.network)
        )
        if way == "one process":
            return self._alone_s(samples, device, recompute) / factor
        each = samples // ranks if way in SHARED else samples
        found = known.costs(self.facts, device, link, network, self.gpus_per_node, each, recompute)
        found |= {"overlap": overlap, "stages": ranks, "micro_batches": self.micro_batches}
        if way == "FSDP2":
            found["buckets"] = self.facts.units
        if way in CUT:
            found["activation_bytes"] = self._sent_bytes(way, ranks)
        found |= {name: found[name] / factor for name in ("sample_s", "fixed_s")}
        optimizer_s = self.facts.optimizer_s(device) / factor
        cost = CostModel(**found)
        if way == "model parallel":
            slowest = network if ranks > self.gpus_per_node else link
            message_s = slowest.latency_us / 1e6 + samples * found["activation_bytes"] * slowest.byte_s
            sent_s = 2 * (ranks - 1) * message_s  # outputs forward, gradients back
            return self.facts.compute_s(samples, device, recompute) / factor + optimizer_s / ranks + sent_s
        if way == "DataParallel":
            # Python's lock lets one thread at a time start kernels. Parameters go out, and gradients come back.
            kernels = sum(count for work, count in self.facts.work_of(each, recompute).items() if not work.in_step)
            computing_s = cost.fixed_s - optimizer_s + math.ceil(samples / ranks) * cost.sample_s
            copied_s = 2 * (link.latency_us / 1e6 + self.facts.parameter_bytes * link.byte_s)
            return max(computing_s, ranks * kernels * device.launch_us / 1e6 / factor) + copied_s + optimizer_s
        step_s = cost.step_s(ranks * self.chains, samples * self.chains, STEP_OF[way])
        if way in ("ZeRO-1", "FSDP2"):  # each steps its part
            step_s -= optimizer_s * (1 - 1 / ranks)
        if way == "ZeRO-1":  # and broadcasts it
            step_s += cost.ring_s(1, ranks, self.facts.parameter_bytes)
        return step_s

    def _sent_bytes(self, way: str, ranks: int) -> float:
        """Return what the largest message between two stages has for a sample."""
        if isinstance(self.source, Comparison):
            return self.facts.activation_bytes
        pieces = 1 if way == "model parallel" else self.micro_batches
        options = {**self.options, "micro_batches": pieces}
        return max(sent_by_stages(self.source, self.batch, way, ranks, **options)) * pieces / self.facts.samples

    def _equal(self, way: str) -> str:
        if isinstance(self.source, Comparison):
            return self._equal_as_measured(way)
        if way == "one process":
            return "yes"
        found = suspects(list(self.source.modules()), [])
        cuts_batch = way != "model parallel"
        reasons = []
        if BATCH_NORM in found and cuts_batch:
            parts = {"GPipe": "micro-batch", "1F1B": "micro-batch", "DataParallel": "device's part"}
            what = parts.get(way, "rank's part")
            reasons.append(f"BatchNorm takes the statistics of a {what}")
        if DROPOUT in found:
            reasons.append("dropout's masks are others")
        return f"no: {', '.join(reasons)}" if reasons else "yes, up to rounding"

    def _equal_as_measured(self, way: str) -> str:
        runs = [(title, run) for title, run in self.source.runs.items() if measured(run)]
        # The first of each way: on a CPU `nn.DataParallel` is one process, too.
        titles = {known.way_of(run): title for title, run in reversed(runs)}
        title = titles.get({"one process": "one process"}.get(way, STEP_OF.get(way, "pipeline")))
        if title is None or way in ("ZeRO-1", "DataParallel"):
            return "not measured"
        return f"measured, {title}: {self.source.frame().get('weights', {}).get(title, 'not returned')}"

    def notes(self, ways: Sequence[str] = ()) -> list[str]:
        sources = [f"{self.device.name}: {self.device.source}", f"{self.link.name}: {self.link.source}"]
        if self.gpus > self.gpus_per_node:
            sources.append(f"{self.network.name}: {self.network.source}")
        return [
            f"A row fits if it holds at most {ROOM:.0%} of {self.device.memory_gb:g} GB.",
            f"The range of a step: devices and links {QUICKER:g} to {SLOWER:g} times as fast as that, and 100 to 50 % "
            "of what is sent overlaps with computing.",
            "Efficiency is the speed-up over one device that holds the whole batch, divided by the number of devices. "
            "Kernels that are too short for a device make it small.",
            *(["Recomputed: with activation checkpointing."] if any("recomputed" in way for way in ways) else []),
            "A program that sends gradients only after its backward pass hides nothing, and takes longer.",
            "Not in it: loading, other users of the links, late ranks.",
            *(f"Source: {each}." for each in dict.fromkeys(sources)),
        ]


def recommend(rows: list[Row], gpus: int) -> str:
    """Return the sentence that follows from the rows."""
    fitting = [row for row in rows if row.fits and not math.isnan(row.step_s)]
    if not fitting:
        counted = [row for row in rows if row.fits is False]
        if not counted:
            return "Not known: none of the ways could be counted."
        least = min(counted, key=lambda row: row.held_gb)
        return (
            f"Nothing fits: {least.way} comes nearest, with {least.held_gb:,.3g} GB. Take more devices, a smaller "
            "batch, or numbers of fewer bits."
        )
    best = min(fitting, key=lambda row: row.step_s)
    # Of those that cannot be told apart the first, which is the simplest.
    alike = [row for row in fitting if row.step_s <= 1.1 * best.step_s]
    chosen = alike[0]
    said = f"{chosen.way}: {_milliseconds(chosen.step_s)} ms a step"
    (one, *_) = rows
    if chosen.way != one.way and one.fits and not math.isnan(one.step_s):
        said += f", {one.step_s / chosen.step_s:.3g} times as fast as one device"
    elif chosen.way != one.way and one.fits is False:
        said += f"; one device would have to hold {one.held_gb:,.3g} GB"
    others = [row.way for row in alike[1:]]
    if others:
        said += f". {', '.join(others)} cannot be told apart from it (within 10 %)"
    if chosen.way != one.way and chosen.efficiency < 0.7:
        said += f". Its efficiency is {chosen.efficiency:.0%}: a larger batch would raise it"
    if chosen.equal.startswith("no"):
        said += f". It is not equal to one process: {chosen.equal.removeprefix('no: ')}"
    unknown = [row.way for row in rows if row.fits is None or math.isnan(row.step_s)]
    if unknown:
        said += f". Not known: {', '.join(unknown)}"
    return said + "."
