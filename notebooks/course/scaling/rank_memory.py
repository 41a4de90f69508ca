"""What each rank holds in a training step of any `nn.Module`, by part: no rank is started, and nothing is allocated.

Parameters, gradients and optimizer state are the sizes of tensors that a strategy leaves on a rank. Activations are
counted in a step on tensors without memory (`counting`). Buffers of communication follow PyTorch's code (2.15), said
beside each. Not in it: what operators write down for a moment, the allocator's gaps, the few hundred MB that a device's
own libraries take.

Not PyTorch's own `torch.distributed._tools` (2.15): `MemTracker` follows every storage through a step on fake tensors,
too, and knows what is there for a moment. But it takes five to twenty times as long, and
sees nothing of DDP's buckets, which lie in C++; its tracker for FSDP2 needs a process group in the notebook's process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course.chain import Stage, blocks, check_chain, split_stages
from course.scaling import parameters
from course.scaling.fake_steps import (
    Counted,
    batch_size,
    counted,
    fake,
    fake_batch,
    fake_copy,
    kept_of_stage,
    resized,
    tensors_bytes,
)
from course.scaling.parameters import Tensors
from labkit.protocol.text import known, titled


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

WAYS = ("one process", "DataParallel", "DDP", "ZeRO-1", "FSDP2", "model parallel", "GPipe", "1F1B")
"""Ways to train of which the memory of any module is known."""

CUT = ("model parallel", "GPipe", "1F1B")
"""Those that cut a network between its layers."""

MICRO_BATCHES = 4


def numbers_of(precision: str | None) -> tuple[torch.dtype | None, bool, bool]:
    """Return a precision's dtype, autocast and master; without one, numbers are as they are."""
    return (None, False, False) if precision is None else known("precision", precision, PRECISIONS)


class Asked(NamedTuple):
    """One question to `predict_memory`."""

    model: nn.Module
    batch: Any
    """Of all ranks."""
    strategy: str
    ranks: int
    loss: Callable[..., Tensor] | None
    dtype: torch.dtype | None
    """Of all real numbers; None: as they are."""
    autocast: bool
    master: bool
    optimizer: str
    recompute: bool
    micro_batches: int

    def counted(self, batch: Any) -> Counted:
        """Count a step of the whole model."""
        return counted(self.model, batch, self.loss, self.dtype, self.autocast, self.recompute)

    def bytes_each(self, tensor: Tensor) -> int:
        """Return the bytes of one of a tensor's numbers."""
        is_changed = tensor.is_floating_point() and self.dtype is not None
        return self.dtype.itemsize if is_changed and self.dtype else tensor.element_size()


def predict_memory(
    model: nn.Module,
    batch: Any,
    strategy: str = "DDP",
    world_size: int = 1,
    *,
    loss: Callable[..., Tensor] | None = None,
    precision: str | None = None,
    optimizer: str = "AdamW",
    recompute: bool = False,
    micro_batches: int = MICRO_BATCHES,
) -> list[Memory]:
    """Return what each rank holds in a step, by part, in bytes; nothing is allocated and no rank is started.

    Args:
        model: any module, on the meta device if it is large. It is left as it is.
        batch: of one step, over all ranks: (inputs, targets), a tensor, or a dict of the model's keywords. Only shapes
            count, so it may be on the meta device, too.
        strategy: one of `WAYS`, or its slug: "fsdp2".
        world_size: how many ranks; of "DataParallel", which is one process, how many devices.
        loss: of (outputs, targets); by default what is usual for tensors like these.
        precision: "float64", "float32", "bf16 autocast", or "bf16" with the optimizer in 32 bits; by default numbers
            stay as they are.
        optimizer: "AdamW", "SGD" or "SGD, momentum".
        recompute: whether the layers of `nn.ModuleList` and `nn.Sequential` keep their inputs only.
        micro_batches: of "GPipe" and "1F1B".

    Raises ValueError for what is not known here, for what cannot be cut so, and for a model that cannot be counted.
    """
    asked = _asked(model, batch, strategy, world_size, loss, precision, optimizer, recompute, micro_batches)
    if asked.strategy in CUT and world_size > 1:
        return _stages(asked)
    return _alike(asked)


def _asked(
    model: nn.Module,
    batch: Any,
    strategy: str,
    world_size: int,
    loss: Callable[..., Tensor] | None = None,
    precision: str | None = None,
    optimizer: str = "AdamW",
    recompute: bool = False,
    micro_batches: int = MICRO_BATCHES,
) -> Asked:
    """Return a question, checked."""
    strategy = titled(strategy, WAYS)
    known("optimizer", optimizer, OPTIMIZERS)
    dtype, autocast, master = numbers_of(precision)
    for name, value in (("world_size", world_size), ("micro_batches", micro_batches)):
        if value != int(value) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
    if strategy == "one process" and world_size > 1:
        raise ValueError(f"one process is one rank, got {world_size}")
    return Asked(model, batch, strategy, world_size, loss, dtype, autocast, master, optimizer, recompute, micro_batches)


# Every rank has the whole network, or a part of each parameter


def _alike(asked: Asked) -> list[Memory]:
    n, model, strategy = asked.ranks, asked.model, asked.strategy
    share = equal_part(asked.batch, n, "a batch")
    step = asked.counted(share)
    whole = trained_parameters(model)
    sizes = {name: tensor.numel() * asked.bytes_each(tensor) for name, tensor in whole.items()}
    frozen = sum(p.numel() * asked.bytes_each(p) for p in model.parameters() if not p.requires_grad)
    extra = frozen + buffer_bytes(model)
    held = [sum(sizes.values()) + extra] * n
    gradients, states = [sum(sizes.values())] * n, [_state_bytes(asked, shapes(whole))] * n
    communication = 0
    if strategy == "FSDP2" and n > 1:
        everything = dict(model.named_parameters())
        parts = [parameters.shards(shapes(everything), n, rank) for rank in range(n)]
        own = [parameters.shards(shapes(whole), n, rank) for rank in range(n)]
        each = asked.bytes_each(next(iter(everything.values())))
        held = [each * parameters.numbers(part) + buffer_bytes(model) for part in parts]
        gradients = [each * parameters.numbers(part) for part in own]
        states = [_state_bytes(asked, part) for part in own]
        communication = gathered_bytes(asked)
    elif strategy == "DataParallel" and n > 1:
        return _replicas(asked, Memory(held[0], gradients[0], states[0], step.kept, 0))
    elif n > 1:
        communication = gradients[0]  # DDP's buckets: a second copy of all gradients
    if strategy == "ZeRO-1" and n > 1:
        states = [_state_bytes(asked, part) for part in parameters.owned(shapes(whole), n)]
    return [Memory(held[rank], gradients[rank], states[rank], step.kept, communication) for rank in range(n)]


def _replicas(asked: Asked, first: Memory) -> list[Memory]:
    """Return what each device of `nn.DataParallel` holds; `first` is what the first holds before gradients arrive.

    Every forward pass copies the parameters, without the optimizer's state; their gradients are added up on the first
    device, in buffers as large as they are (`torch.nn.parallel.comm.reduce_add_coalesced`).
    """
    other = Memory(first.parameters, first.gradients, 0, first.activations, 0)
    return [first._replace(communication=first.gradients), *[other] * (asked.ranks - 1)]


def gathered_bytes(asked: Asked) -> int:
    """Return the bytes of what FSDP2 gathers, and of what it has on the way.

    Whole are: what lies outside the blocks; the block that has computed its backward pass, and its gradients, which are
    on their way; and the block before it, which is just being gathered. Rows are padded, so that every rank has as
    many.
    """
    n, model = asked.ranks, asked.model

    def padded(module: nn.Module, but: set[int]) -> int:
        mine = {id(p): p for p in module.parameters() if id(p) not in but}
        return sum(
            -(-len(p) // n) * n * math.prod(p.shape[1:]) * asked.bytes_each(p) if p.dim() else asked.bytes_each(p)
            for p in mine.values()
        )

    inside: set[int] = set()
    sizes = []
    for block in blocks(model):
        sizes.append(padded(block, inside))
        inside |= {id(p) for p in block.parameters()}
    most = max((2 * size + before for before, size in zip([0, *sizes], sizes, strict=False)), default=0)
    return padded(model, inside) + most


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that get gradients, each once, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def shapes(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return how many of these tensors have which shape."""
    return Counter(tuple(tensor.shape) for tensor in tensors.values())


def buffer_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's buffers."""
    return sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


def _state_bytes(asked: Asked, tensors: Tensors) -> int:
    """Return the bytes of the optimizer's state for these."""
    dtype = asked.dtype or next(iter(trained_parameters(asked.model).values()), torch.empty(0)).dtype
    return state_bytes(tensors, asked.optimizer, dtype.itemsize, asked.master)


def state_bytes(tensors: Tensors, optimizer: str, itemsize: int, master: bool) -> int:
    """Return the bytes of an optimizer's state for parameters of these shapes.

    With `master` it has parameters of its own, and all in 32 bits.
    """
    numbers, each = parameters.numbers(tensors), OPTIMIZERS[optimizer]
    state = numbers * ((1 + each) * 4 if master else each * itemsize)
    if optimizer == "AdamW":
        state += STEP_BYTES * sum(count for tensor, count in tensors.items() if math.prod(tensor))
    return state


def equal_part(batch: Any, parts: int, what: str) -> Any:
    """Return a batch of one of `parts` equal parts. Raises ValueError where it cannot be cut so."""
    size = batch_size(batch)
    if size % parts:
        raise ValueError(f"{what} of {size} cannot be cut into {parts} equal parts; take a multiple of {parts}")
    return resized(batch, size // parts)


# A stage on each rank


def _stages(asked: Asked) -> list[Memory]:
    pieces = 1 if asked.strategy == "model parallel" else asked.micro_batches
    if asked.strategy == "1F1B" and pieces < asked.ranks:
        raise ValueError(f"1F1B needs as many micro-batches as stages: {pieces} are too few for {asked.ranks} ranks")
    if not isinstance(asked.batch, tuple) or len(asked.batch) != 2 or not isinstance(asked.batch[0], Tensor):
        raise ValueError(f"{asked.strategy} needs a batch of (inputs, targets), with one tensor as inputs")
    micro_batch = equal_part(asked.batch, pieces, "a batch")
    kept, sent, stages, is_kept = _kept_by_stages(asked, micro_batch)
    found = []
    for rank in range(asked.ranks):
        # GPipe takes all micro-batches forward first (Huang et al. 2019), 1F1B one for each stage that is still to come
        # (Narayanan et al. 2019).
        most = kept[rank] * (min(pieces, asked.ranks - rank) if asked.strategy == "1F1B" else pieces)
        into, out = (sent[rank - 1] if rank else 0), (sent[rank] if rank < asked.ranks - 1 else 0)
        if asked.strategy == "model parallel":
            # Outputs and what was received stay to the end, when autograd has let go of them; and their gradients.
            communication = 2 * (out + into)
        elif out and is_kept[rank]:
            # Outputs that wait to be sent are counted with the activations.
            communication = (2 if asked.strategy == "GPipe" else 1) * out + (into if rank else 0)
        else:
            communication = most_messages(asked.strategy, rank, asked.ranks, pieces) * max(into, out)
        whole = trained_parameters(stages[rank])
        size = sum(p.numel() * p.element_size() for p in stages[rank].parameters())
        gradients = sum(p.numel() * p.element_size() for p in whole.values())
        state = _state_bytes(asked, shapes(whole))
        found.append(Memory(size + buffer_bytes(stages[rank]), gradients, state, most, communication))
    return found


def most_messages(strategy: str, rank: int, ranks: int, micro_batches: int) -> int:
    """Return how many micro-batches' features lie in messages at most, on a rank of a pipeline.

    What was received is kept by autograd and counts there, as long as it is. As PyTorch 2.15 waits for what it sends:
    GPipe, for outputs when all forward passes are over, for gradients when all backward passes are; a rank in the
    middle has one more on its way. 1F1B: with each neighbour one goes while one comes. In both the last stage's inputs
    stay to the end, for the losses hold on to them.
    """
    is_first, is_last = rank == 0, rank == ranks - 1
    if strategy == "GPipe":
        return 2 * micro_batches if is_last else micro_batches + (not is_first)
    return micro_batches + 1 if is_last else 2 if is_first else 4


def sent_by_stages(model: nn.Module, batch: Any, strategy: str, ranks: int, **options: Any) -> list[int]:
    """Return the bytes that each stage returns for a micro-batch; `options` are those of `predict_memory`."""
    asked = _asked(model, batch, strategy, ranks, **options)
    pieces = 1 if asked.strategy == "model parallel" else asked.micro_batches
    return _kept_by_stages(asked, equal_part(batch, pieces, "a batch"))[1][:-1]


def _kept_by_stages(asked: Asked, micro_batch: Any) -> tuple[list[int], list[int], list[Stage], list[bool]]:
    """Return what each stage keeps of a micro-batch, the bytes of what it returns, the stages, without memory.

    And whether autograd keeps what a stage returns.
    """
    with fake(asked.dtype or torch.get_default_dtype()):
        copied = fake_copy(asked.model, asked.dtype)
        inputs, targets = fake_batch(micro_batch, asked.dtype)
        check_chain(copied, inputs, asked.strategy)
        stages = split_stages(copied, asked.ranks)
        kept, sent, is_kept = [], [], []
        for index, stage in enumerate(stages):
            last = index == len(stages) - 1
            size, outputs, is_output_kept = kept_of_stage(
                stage, inputs, targets if last else None, asked.loss, asked.autocast, asked.recompute
            )
            kept.append(size)
            is_kept.append(is_output_kept)
            sent.append(tensors_bytes(outputs))
            inputs = torch.empty_like(outputs).requires_grad_() if not last else outputs
    return kept, sent, stages, is_kept


# What fits


def fits(limit_bytes: float, model: nn.Module, batch: Any, strategy: str, world_size: int, **options: Any) -> bool:
    """Return whether no rank holds more than `limit_bytes`; `options` are those of `predict_memory`."""
    return largest(predict_memory(model, batch, strategy, world_size, **options)).total <= limit_bytes


def largest_batch(
    limit_bytes: float, model: nn.Module, batch: Any, strategy: str, world_size: int, most: int = 2**16, **options: Any
) -> int:
    """Return the largest batch, over all ranks, with which every rank stays below the limit; 0 if none does.

    Only batches that the strategy can cut are tried, and none above `most`. The samples are like those of `batch`.
    Raises ValueError as `predict_memory` does.
    """
    strategy = titled(strategy, WAYS)
    each = options.get("micro_batches", MICRO_BATCHES) if strategy in ("GPipe", "1F1B") else 1
    each = each if strategy in CUT else world_size

    def total(times: int) -> int:
        return largest(predict_memory(model, resized(batch, times * each), strategy, world_size, **options)).total

    return each * most_that_fit(limit_bytes, total, max(1, most // each))


def fewest_ranks(
    limit_bytes: float, model: nn.Module, batch: Any, strategy: str, most: int = 1024, **options: Any
) -> int | None:
    """Return the fewest ranks on which a batch fits, of 1, 2, 4, 8, … `most`; None if it fits on none of them.

    Numbers of ranks by which the strategy cannot cut model or batch are passed over. Raises ValueError, with the last
    reason, if that is so of all of them.
    """
    return fewest_that_fit(strategy, lambda ranks: fits(limit_bytes, model, batch, strategy, ranks, **options), most)


def most_that_fit(limit_bytes: float, total: Callable[[int], int], most: int) -> int:
    """Return the greatest number up to `most` with whose total, which grows with it, a rank stays below; 0 if none."""
    one = total(1)
    if one > limit_bytes:
        return 0
    more = max(1, total(2) - one)  # memory grows nearly in proportion: begin where it would be full
    times = max(1, min(most, 1 + int((limit_bytes - one) // more)))
    while times > 1 and total(times) > limit_bytes:
        times -= 1
    while times < most and total(times + 1) <= limit_bytes:
        times += 1
    return times


def fewest_that_fit(what: str, does: Callable[[int], bool], most: int) -> int | None:
    """Return the first of 1, 2, 4, … `most` ranks that does, or None. Raises ValueError if all are refused."""
    refused, tried = "", False
    for ranks in (2**power for power in range(most.bit_length())):
        try:
            found = does(ranks)
        except ValueError as error:
            refused = str(error)
            continue
        tried = True
        if found:
            return ranks
    if not tried:
        raise ValueError(f"{what} runs on no number of ranks up to {most}: {refused}")
    return None


def largest(ranks: Sequence[Memory]) -> Memory:
    """Return the memory of the rank that holds most."""
    return max(ranks, key=lambda memory: memory.total)
