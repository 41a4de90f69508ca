"""What every rank holds in a training step, by part, for each strategy of `course.transformer`, without allocating it.

Parameters, gradients and optimizer state are the sizes of tensors that a strategy leaves on a rank. Activations are
counted: the rank's part of the network runs, by a CPU's operators, on tensors that have no memory (`counting`). Buffers
of communication follow PyTorch's code (2.15), said beside each. Not in it: what operators write down for a moment, the
allocator's gaps, the few hundred MB that a device's own libraries take.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course.scaling import local_parts, parameters, schedules
from course.scaling.any_module import of_module
from course.scaling.counting import fake, kept, kept_in_halves
from course.scaling.local_parts import Shape
from course.scaling.parameters import Tensors
from course.scaling.parts import OPTIMIZERS, PRECISIONS, Memory, Precision, equal_part, state_bytes
from course.scaling.schedules import Action
from course.transformer import ALL, GPT, GPTStrategy, mean_loss
from course.transformer.pipelines import GPipe
from labkit.protocol.text import known, titled


class Case(NamedTuple):
    """One question to `memory`."""

    shape: Shape
    strategy: type[GPTStrategy]
    ranks: int
    batch: int
    sequence: int
    precision: Precision
    recompute: bool
    optimizer: str

    def features_bytes(self, batch: int, sequence: int) -> int:
        """Bytes of features between two blocks."""
        return batch * sequence * self.shape.width * self.precision.dtype.itemsize


def predict_memory(
    model: nn.Module,
    strategy: str | type[GPTStrategy],
    world_size: int,
    batch: int | tuple[Tensor, Tensor],
    sequence: int = 1,
    precision: str = "float32",
    recompute: bool = False,
    optimizer: str = "AdamW",
    loss: Callable[[Any, Tensor], Tensor] | None = None,
) -> list[Memory]:
    """Return what each rank holds in a step, by part, in bytes; nothing is allocated and no rank is started.

    Args:
        model: a `GPT` of the size that is asked about, or any module; on the meta device if it is
            large. It is left as it is.
        strategy: of a GPT one of `transformer.ALL`, its title or its slug; of any module "one process", "DDP",
            "ZeRO-1" or "FSDP2".
        world_size: how many ranks.
        batch: in a step, over all ranks: of a GPT the number of sequences; of any module (inputs, targets), of which
            only the shapes count.
        sequence: the length of a GPT's sequences.
        precision: "float64", "float32", "bf16 autocast", or "bf16" with the optimizer in 32 bits.
        recompute: whether blocks keep their inputs only; of any module, those in `nn.ModuleList` and `nn.Sequential`.
        optimizer: "AdamW", "SGD" or "SGD, momentum".
        loss: of any module: of (outputs, targets).

    Raises ValueError for what is not known here, and for what cannot be cut so.
    """
    found = known("precision", precision, PRECISIONS)
    known("optimizer", optimizer, OPTIMIZERS)
    size = batch if isinstance(batch, int) else len(batch[0])
    for name, value in (("world_size", world_size), ("batch", size), ("sequence", sequence)):
        if value != int(value) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
    if not isinstance(batch, int):
        if loss is None:
            raise ValueError("a batch of tensors needs the loss that is computed of it: loss=…")
        title = strategy if isinstance(strategy, str) else strategy.title
        return of_module(model, title, world_size, batch, found, recompute, optimizer, loss)
    kind = ALL[titled(strategy, ALL)] if isinstance(strategy, str) else strategy
    if kind not in ALL.values():
        raise ValueError(f"known are the strategies {', '.join(ALL)}; got {kind!r}")
    if kind.title == "DDP, recomputed":
        recompute = True
    if kind.title == "DDP, bf16 autocast":
        found = PRECISIONS["bf16 autocast"]
    if kind.ranks(world_size) != world_size:
        raise ValueError(f"{kind.title} does not run on {world_size} ranks, but on {kind.ranks(world_size)}")
    case = Case(Shape.of(model), kind, world_size, batch, sequence, found, recompute, optimizer)
    if kind.title == "zero bubble" and recompute:
        raise ValueError("zero bubble is not known with recomputed blocks, which two backward passes need; keep them")
    if case.shape.experts and kind.cuts_layers:
        raise ValueError(f"{kind.title} is not known for a mixture of experts; take a model with experts=0")
    return _pipeline(case) if issubclass(kind, GPipe) else _alike(case)


def _check_heads(shape: Shape, parts: int) -> None:
    if shape.heads % parts:
        raise ValueError(f"{shape.heads} heads cannot be cut over {parts} ranks; take a multiple of {parts} heads")


# Every rank does the same


def _alike(case: Case) -> list[Memory]:
    """Strategies in which each rank has a part of every block, or all of it."""
    n, title, shape = case.ranks, case.strategy.title, case.shape
    batch, time = case.batch, case.sequence
    pairs = n // 2 if title == "FSDP2 × tensor parallel" else 1
    cut: tuple[str, int] = ("", 1)
    if case.strategy.cuts_layers:
        cut = ("sequence" if title == "sequence parallel" else "tensor", n // pairs)
        batch = equal_part(batch, pairs, "a batch")
        _check_heads(shape, cut[1])
        if title == "sequence parallel":
            equal_part(time, n, "a sequence")
    elif title.startswith("context parallel"):
        cut = ("ring", n)
        equal_part(time, 2 * n if title == "context parallel" else n, "a sequence")
    else:
        batch = equal_part(batch, n, "a batch")
    if title == "expert parallel":
        if shape.experts == 0 or shape.experts % n:
            raise ValueError(f"{shape.experts} experts cannot be shared by {n} ranks; take a multiple of {n}, not 0")
        cut = ("experts", n)
    whole = _tensors(shape, cut)
    over = pairs if pairs > 1 else n if title.startswith("FSDP2") and not case.strategy.cuts_layers else 1
    owned = parameters.owned(whole, n) if title == "ZeRO-1" else []
    activations = _activations(case, cut, shape.depth, batch, time).most
    buffers = _buffers(case, cut, whole, batch, time)
    found = []
    for rank in range(n):
        held, gradients, state = _states(case, parameters.shards(whole, over, rank // 2 if pairs > 1 else rank))
        if owned:
            state = _states(case, owned[rank])[2]
        if cut[0] in ("tensor", "sequence") and over == 1:
            # The embedding's gradient is whole on every rank (PyTorch 2.15).
            rows = -(-shape.vocabulary // n)
            gradients += (shape.vocabulary - rows) * shape.width * case.precision.dtype.itemsize
        found.append(Memory(held, gradients, state, activations, buffers))
    return found


def _buffers(case: Case, cut: tuple[str, int], whole: Tensors, batch: int, time: int) -> int:
    """Return the bytes of buffers of communication, as PyTorch's code has them."""
    n, title = case.ranks, case.strategy.title
    itemsize = case.precision.dtype.itemsize
    features = case.features_bytes(batch, time)
    size = itemsize * parameters.numbers(whole)
    if n == 1:
        return 0
    if title == "expert parallel":
        return _expert_buffers(case, whole, batch, time)
    buffers = 0
    if title.startswith("FSDP2"):
        # Whole are: what lies outside the blocks; a block that computes, one on its way, and the gradients of a third.
        # Kept after forward: all of them, and the last that arrived once more, until the next has been copied out.
        block = itemsize * parameters.numbers(_of_block(case.shape, cut))
        blocks = case.shape.depth + 1 if "kept" in title else min(3, case.shape.depth + 1)
        buffers = size - case.shape.depth * block + blocks * block
    elif cut[0] in ("", "ring"):
        buffers = size  # DDP's buckets: a second copy of all gradients
    if cut[0] in ("tensor", "sequence"):
        buffers += 2 * features  # what goes into an all-reduce, and what comes out: DTensor's are not in place
    if cut[0] == "sequence":
        buffers += features // n  # the rank's part of the gradient that is gathered backward
    if cut[0] == "ring":
        # A block of keys and values is being used while the next arrives; and so, backward, are their gradients.
        buffers += 6 * features // n
    return buffers


def _expert_buffers(case: Case, whole: Tensors, batch: int, time: int) -> int:
    """Return those of expert parallel: slots on their way, or one flat buffer of the gradients that are averaged."""
    shape, itemsize = case.shape, case.precision.dtype.itemsize
    capacity = math.ceil(1.25 * time / shape.experts)
    slots = batch * shape.experts * capacity * shape.width * itemsize
    shared = itemsize * parameters.numbers({tensor: count for tensor, count in whole.items() if len(tensor) < 3})
    return max(3 * slots, shared)


# Parameters


def _tensors(shape: Shape, cut: tuple[str, int]) -> Tensors:
    """Return the shapes of a rank's parameters; gathered, if they are sharded."""
    before, after = _outside(shape, cut)
    return before + after + parameters.times(_of_block(shape, cut), shape.depth)


@functools.cache
def _outside(shape: Shape, cut: tuple[str, int]) -> tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]]:
    """Return those before the blocks, and those after them."""
    with fake(torch.float32):
        one = _local(shape, 1, cut, cut[1])
        first, *rest = [tuple(p.shape) for name, p in one.named_parameters() if not name.startswith("blocks.")]
    return Counter([first]), Counter(rest)


@functools.cache
def _of_block(shape: Shape, cut: tuple[str, int]) -> Counter[tuple[int, ...]]:
    """Return those of one block."""
    with fake(torch.float32):
        return Counter(tuple(p.shape) for p in _local(shape, 1, cut, cut[1]).blocks.parameters())


def _states(case: Case, tensors: Tensors) -> tuple[int, int, int]:
    """Return the bytes of parameters, of gradients and of the optimizer's state for them."""
    size = parameters.numbers(tensors) * case.precision.dtype.itemsize
    return size, size, state_bytes(tensors, case.optimizer, case.precision)


# Activations


class Kept(NamedTuple):
    """What a forward pass keeps for the backward pass, in bytes."""

    most: int
    """At any time, with the block that is being recomputed."""
    forward: int
    """After the forward pass."""


def _local(shape: Shape, blocks: int, cut: tuple[str, int], time: int) -> GPT:
    """Return a rank's network, with so many blocks."""
    model, (how, parts) = shape.model(blocks), cut
    if how in ("tensor", "sequence", "blocks"):
        local_parts.narrow(model, parts, ends=how != "blocks")
    if how == "sequence":
        local_parts.cut_between(model, parts, time)
    if how == "ring":
        local_parts.attend_in_ring(model)
    if how == "experts":
        local_parts.share_experts(model, parts)
    return model


def _activations(
    case: Case, cut: tuple[str, int], blocks: int, batch: int, time: int, is_first: bool = True, is_last: bool = True
) -> Kept:
    """Return what a rank keeps of some blocks, and of what is before the first and after the last of all."""
    count = functools.partial(_count, case.shape._replace(depth=0), cut, batch, time, case.precision)
    ends = is_first, is_last
    # Blocks are alike: two are counted, and the second stands for all others.
    one, two = (count(blocks, False, *ends).forward for blocks in (1, 2))
    forward = one + (blocks - 1) * (two - one)
    if not case.recompute:
        return Kept(forward, forward)
    inputs_of_one, inputs_of_two = (count(blocks, True, *ends).forward for blocks in (1, 2))
    own, inputs = two - one, inputs_of_two - inputs_of_one
    forward = inputs_of_one + (blocks - 1) * inputs
    return Kept(max(forward, blocks * inputs + own - inputs), forward)


@functools.cache
def _count(
    shape: Shape,
    cut: tuple[str, int],
    batch: int,
    time: int,
    precision: Precision,
    blocks: int,
    recompute: bool,
    is_first: bool,
    is_last: bool,
    halves: bool = False,
) -> schedules.Kept:
    """Return the bytes that a forward pass keeps; with `halves`, also those that zero bubble's first half does."""
    time = time // cut[1] if cut[0] == "ring" else time
    with fake(precision.dtype):
        model = _local(shape, blocks, cut, time)
        local_parts.part_of_pipeline(model, is_first, is_last)
        if recompute:
            local_parts.recomputed(model)
        targets = torch.zeros(batch, time, dtype=torch.long)
        inputs = targets.clone() if is_first else torch.zeros(batch, time, shape.width, requires_grad=True)
        around: Callable[[], Any] = contextlib.nullcontext
        if precision.autocast:
            around = functools.partial(torch.autocast, "cpu", torch.bfloat16)

        def forward() -> Any:
            with around():
                outputs = model(inputs)
            outputs = outputs.float() if precision.autocast or precision.master else outputs  # the loss's 32 bits
            return mean_loss(outputs, targets) if is_last else outputs

        return kept_in_halves(model, inputs, forward) if halves else schedules.Kept(kept(model, forward))


# Pipelines


def _in_flight(case: Case, cut: tuple[str, int], order: Sequence[Action], depths: Sequence[int], batch: int) -> int:
    """Return the bytes that a rank's stages keep at most, of all micro-batches of so many samples."""
    kept_of, recomputing = {}, 0
    for stage in {action.stage for action in order}:
        ends = stage == 0, stage == len(depths) - 1
        if any(action.what == "I" for action in order):
            count = functools.partial(_count, case.shape._replace(depth=0), cut, batch, case.sequence, case.precision)
            pair = zip(*(count(blocks, False, *ends, halves=True) for blocks in (1, 2)), strict=True)
            kept_of[stage] = schedules.Kept(*(one + (depths[stage] - 1) * (two - one) for one, two in pair))
        else:
            found = _activations(case, cut, depths[stage], batch, case.sequence, *ends)
            kept_of[stage] = schedules.Kept(found.forward)
            recomputing = max(recomputing, found.most - found.forward)
    return schedules.most_kept(order, kept_of) + recomputing


def _pipeline(case: Case) -> list[Memory]:
    """Strategies in which each rank has some of the blocks, and micro-batches in flight."""
    kind: Any = case.strategy
    parts = 2 if kind.cuts_layers else 1
    chains = case.ranks // getattr(kind, "ranks_per_replica", case.ranks)
    cut = ("blocks", parts) if parts > 1 else ("", 1)
    _check_heads(case.shape, parts)
    length, pieces, each = case.ranks // chains // parts, kind.micro_batches, kind.stages_per_rank
    if kind.schedule == "Schedule1F1B" and pieces < length:
        raise ValueError(f"1F1B needs as many micro-batches as stages: {pieces} are too few for {length} ranks")
    batch = equal_part(equal_part(case.batch, chains, "a batch"), pieces, "a batch")
    depths = local_parts.stage_depths(case.shape.depth, length * each)
    before, after = _outside(case.shape, ("", 1))
    features = case.features_bytes(batch, case.sequence)
    found = []
    for rank, order in enumerate(schedules.orders(kind.schedule, length, pieces, each)):
        own = range(rank, len(depths), length)
        mine = parameters.times(_of_block(case.shape, cut), sum(depths[stage] for stage in own))
        mine = mine + (before if 0 in own else Counter()) + (after if len(depths) - 1 in own else Counter())
        messages = schedules.most_messages(kind.schedule, order, len(depths), pieces) if length > 1 else 0
        buffers = messages * features
        if chains > 1:  # then gradients of equal stages are averaged in one flat buffer, beside the losses' inputs
            left = pieces * features if len(depths) - 1 in own else 0
            buffers = max(buffers, _states(case, mine)[0] + left)
        found.append(Memory(*_states(case, mine), _in_flight(case, cut, order, depths, batch), buffers))
    return [memory for memory in found for _ in range(parts)] * chains
