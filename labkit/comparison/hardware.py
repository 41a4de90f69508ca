"""Devices and links by name: the peaks of their data sheets, and how much of these programs reach.

No program reaches a peak. `efficiency` says which part one does; yours may differ, so change it:
`dataclasses.replace(DEVICES["A100"], efficiency=0.4)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from labkit.protocol.text import known


@dataclass(frozen=True)
class Device:
    """What computes, and holds memory."""

    name: str
    tflops: Mapping[str, float]
    """Peak, 10¹² floating-point operations a second, by the bits of the numbers: "64", "32", "16"; "conv 32" of
    convolutions of 32 bits, for which PyTorch uses TF32 where a device has it."""
    memory_gb: float
    """10⁹ bytes."""
    memory_gbytes_s: float
    """10⁹ bytes a second between its memory and what computes."""
    source: str
    nvlink_gbytes_s: float = 0.0
    """10⁹ bytes a second in each direction over NVLink to the others of its machine; 0 without one."""
    efficiency: float = 0.85
    """Which part of its peak a large matrix product reaches, and which part of the bandwidth anything else does."""
    launch_us: float = 5.0
    """Microseconds that any operator takes at least: PyTorch calls one after the other."""

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is a part of the peak, from 0 to 1, got {self.efficiency!r}")

    def seconds(self, flops: float, moved: float, numbers: str = "32") -> float:
        """Return how long an operator takes: computing or memory is the limit, or calling it."""
        peak = self.tflops.get(numbers) or self.tflops[numbers.removeprefix("conv ")]
        computing_s = flops / (peak * 1e12 * self.efficiency)
        return max(computing_s, moved / (self.memory_gbytes_s * 1e9 * self.efficiency), self.launch_us / 1e6)


@dataclass(frozen=True)
class Link:
    """What carries messages from a rank to the next one of a ring."""

    name: str
    gbytes_s: float
    """Peak, 10⁹ bytes a second in each direction; between machines, of all that the machine has."""
    latency_us: float
    """Microseconds that a message takes however small it is: no data sheet has that, these are usual ones."""
    source: str
    efficiency: float = 0.75
    """Which part of the peak NCCL reaches."""

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is a part of the peak, from 0 to 1, got {self.efficiency!r}")
        if not 0 < self.gbytes_s < math.inf:
            raise ValueError(f"gbytes_s must be a number greater than 0, got {self.gbytes_s!r}")

    @property
    def byte_s(self) -> float:
        """Seconds that a byte takes."""
        return 1 / (self.gbytes_s * 1e9 * self.efficiency)


DEVICES = {
    each.name: each
    for each in (
        Device(
            "H100",
            {"64": 34.0, "32": 67.0, "conv 32": 495.0, "16": 989.0},
            80,
            3350,
            "NVIDIA H100 SXM data sheet (2023), without sparsity",
            450,
        ),
        Device(
            "A100",
            {"64": 9.7, "32": 19.5, "conv 32": 156.0, "16": 312.0},
            80,
            2039,
            "NVIDIA A100 80 GB SXM data sheet (2021), without sparsity",
            300,
        ),
        Device(
            "V100",
            {"64": 7.8, "32": 15.7, "16": 125.0},
            16,
            900,
            "NVIDIA V100 SXM2 data sheet (2020); 16 bits are float16",
            150,
        ),
        Device("L4", {"64": 0.5, "32": 30.3, "conv 32": 60.0, "16": 121.0}, 24, 300, "NVIDIA L4 data sheet (2023)"),
        Device("T4", {"64": 0.25, "32": 8.1, "16": 65.0}, 16, 320, "NVIDIA T4 data sheet (2019); 16 bits are float16"),
        Device(
            "laptop",
            {"64": 0.03, "32": 0.06, "16": 0.06},
            8,
            20,
            "a core with AVX2 does 16 operations of 64 bits a cycle (Intel 64 Optimization Reference Manual); two of "
            "them reach a half of that",
            efficiency=1.0,
        ),
    )
}
"""Real ones, by name."""

LINKS = {
    each.name: each
    for each in (
        Link("PCIe 4", 31.5, 5, "16 lanes: PCI-SIG, PCI Express 4.0 (2017)"),
        Link("PCIe 3", 15.75, 5, "16 lanes: PCI-SIG, PCI Express 3.0 (2010)"),
        Link("8 × 400 Gb/s", 400, 5, "a 400 Gb/s InfiniBand adapter per GPU: NVIDIA DGX H100 data sheet (2023)"),
        Link("8 × 200 Gb/s", 200, 5, "a 200 Gb/s InfiniBand adapter per GPU: NVIDIA DGX A100 data sheet (2020)"),
        Link("100 Gb/s", 12.5, 20, "IEEE 802.3bj (2014); InfiniBand EDR"),
        Link("25 Gb/s", 3.125, 30, "IEEE 802.3by (2016)"),
        Link("loopback", 2.0, 20, "gloo on one machine, as lesson 03 measures it", 1.0),
    )
}
"""Real ones, by name; "NVLink" is the device's own."""


def device_of(given: str | Device) -> Device:
    """Return a device by its name, or as it is. Raises ValueError for an unknown name."""
    return known("device", given, DEVICES) if isinstance(given, str) else given


def link_of(given: str | Link, device: Device) -> Link:
    """Return a link by its name, or as it is; by default NVLink where the device has it, else PCIe 4.

    Raises ValueError for an unknown name, or NVLink where there is none.
    """
    own = {"NVLink": Link("NVLink", device.nvlink_gbytes_s, 2, device.source)} if device.nvlink_gbytes_s else {}
    given = given or ("NVLink" if own else "PCIe 4")
    if given == "NVLink" and not own:
        raise ValueError(f"{device.name} has no NVLink; take one of {', '.join(LINKS)}")
    return known("link", given, LINKS | own) if isinstance(given, str) else given
