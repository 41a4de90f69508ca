"""The parts of a rank's memory, and what they take by number formats and optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from course.scaling import parameters
from course.scaling.parameters import Tensors


class Memory(NamedTuple):
    """Bytes that one rank holds, each part when it holds most of it."""

    parameters: int
    """Of the model, its buffers, such as BatchNorm's statistics, included."""
    gradients: int
    optimizer_state: int
    activations: int
    """What autograd keeps for the backward pass, and the one block that is being recomputed; of zero bubble, also the
    gradients from which its second backward pass begins."""
    communication: int
    """What is handed to collectives and messages and counts nowhere else; whole parameters that FSDP2 has gathered."""

    @property
    def total(self) -> int:
        """The sum of the parts: enough, for not all parts are at their largest at the same time."""
        return sum(self)


class Precision(NamedTuple):
    """In which numbers a model is trained."""

    dtype: torch.dtype
    """Of parameters, gradients and, if nothing else is said, of activations and of the optimizer's state."""
    autocast: bool = False
    """Whether products are of 16 bits."""
    master: bool = False
    """Whether the optimizer has its state, and parameters of its own, in 32 bits."""


PRECISIONS = {
    "float64": Precision(torch.float64),
    "float32": Precision(torch.float32),
    "bf16 autocast": Precision(torch.float32, autocast=True),
    # 2 + 2 bytes of parameters and gradients, 12 of the optimizer: Rajbhandari et al. 2020, section 3.1.
    "bf16": Precision(torch.bfloat16, master=True),
}
OPTIMIZERS = {"AdamW": 2, "SGD": 0, "SGD, momentum": 1}
"""How many numbers each keeps for every parameter."""
STEP_BYTES = 4
"""AdamW counts the steps of each parameter tensor, in a number of 32 bits."""


def state_bytes(tensors: Tensors, optimizer: str, precision: Precision) -> int:
    """Return the bytes of an optimizer's state for parameters of these shapes."""
    numbers, each = parameters.numbers(tensors), OPTIMIZERS[optimizer]
    state = numbers * ((1 + each) * 4 if precision.master else each * precision.dtype.itemsize)
    if optimizer == "AdamW":
        state += STEP_BYTES * sum(count for tensor, count in tensors.items() if math.prod(tensor))
    return state


def equal_part(size: int, parts: int, what: str) -> int:
    """Return the size of one of `parts` equal parts. Raises ValueError where there are none."""
    if size % parts:
        raise ValueError(f"{what} of {size} cannot be cut into {parts} equal parts; take a multiple of {parts}")
    return size // parts


def largest(ranks: Sequence[Memory]) -> Memory:
    """Return the memory of the rank that holds most."""
    return max(ranks, key=lambda memory: memory.total)
