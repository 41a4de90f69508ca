"""What each rank holds of any `nn.Module`, by part, with DDP, ZeRO-1 or FSDP2.

Parameters, gradients and optimizer state are the sizes of tensors that a strategy leaves on a rank. Activations are
counted in a step of a copy without memory. Buffers of communication follow PyTorch's code (2.15).

Not PyTorch's own `torch.distributed._tools.mem_tracker.MemTracker` (2.15): it follows every storage through a step on
fake tensors, too, and knows what is there for a moment. But it takes five to twenty times as long, and sees nothing of
DDP's buckets, which lie in C++.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from course.scaling import parameters
from course.scaling.counting import fake, kept
from course.scaling.parameters import Tensors
from course.scaling.parts import Memory, Precision, equal_part, state_bytes
from labkit.protocol.text import titled
from labkit.steps.counting import Activations

WAYS = ("one process", "DDP", "ZeRO-1", "FSDP2")

Loss = Callable[[Any, Tensor], Tensor]


def of_module(
    model: nn.Module,
    strategy: str,
    ranks: int,
    batch: tuple[Tensor, Tensor],
    precision: Precision,
    recompute: bool,
    optimizer: str,
    loss: Loss,
) -> list[Memory]:
    """Return what each rank holds; `batch` is that of all ranks. See `course.scaling.predict_memory`."""
    strategy = titled(strategy, WAYS)
    if strategy == "one process" and ranks > 1:
        raise ValueError(f"one process does not run on {ranks} ranks, but on 1")
    share = equal_part(len(batch[0]), ranks, "a batch")
    inputs, targets = (torch.empty_like(tensor[:1], device="meta").expand(share, *tensor.shape[1:]) for tensor in batch)
    itemsize = precision.dtype.itemsize
    everything = _shapes(model.parameters())
    trained = _shapes(p for p in model.parameters() if p.requires_grad)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    kept_bytes = _kept_in_step(model, inputs, targets, precision, recompute, loss)
    owned = parameters.owned(trained, ranks) if strategy == "ZeRO-1" else []
    is_sharded = strategy == "FSDP2" and ranks > 1
    communication = 0
    if ranks > 1:  # DDP's buckets are a second copy of all gradients
        communication = (
            _gathered_bytes(model, ranks, itemsize) if is_sharded else itemsize * parameters.numbers(trained)
        )
    found = []
    for rank in range(ranks):
        held, own = (parameters.shards(each, ranks if is_sharded else 1, rank) for each in (everything, trained))
        size = itemsize * parameters.numbers(held) + buffers
        state = state_bytes(owned[rank] if owned else own, optimizer, precision)
        found.append(Memory(size, itemsize * parameters.numbers(own), state, kept_bytes, communication))
    return found


def blocks(network: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP2 wraps: children that have parameters; of module lists and dicts, the elements.

    These are never called themselves. Children that share a weight are left to the whole network: FSDP2 wants both in
    one group.
    """
    found = [child for child in _children(network) if any(True for _ in child.parameters())]
    owners = Counter(id(parameter) for child in found for parameter in child.parameters())
    return [child for child in found if all(owners[id(parameter)] == 1 for parameter in child.parameters())]


def _children(network: nn.Module) -> Iterator[nn.Module]:
    for child in network.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _children(child)
        else:
            yield child


def layers(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a network's layers in the order in which they stand, by their names in it.

    What is in `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict`, nested too, are layers of their own: a residual
    block, say.
    """
    found = []
    for name, child in network.named_children():
        if isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            found += [(f"{name}.{deeper}", layer) for deeper, layer in layers(child)]
        else:
            found.append((name, child))
    return found


def _shapes(tensors: Iterable[Tensor]) -> Tensors:
    return Counter(tuple(tensor.shape) for tensor in tensors)


def _gathered_bytes(model: nn.Module, ranks: int, itemsize: int) -> int:
    """Return the bytes of what FSDP2 gathers, and of what it has on the way.

    Whole are: what lies outside the blocks; the block that has computed its backward pass, and its gradients, which are
    on their way; and the block before it, which is just being gathered. Rows are padded, so that every rank has as
    many. Blocks that are not computed one after the other, such as embeddings side by side, hold more.
    """

    def padded(module: nn.Module, but: set[int]) -> int:
        mine = {id(p): p for p in module.parameters() if id(p) not in but}
        return sum(
            itemsize * (-(-len(p) // ranks) * ranks * math.prod(p.shape[1:]) if p.dim() else 1) for p in mine.values()
        )

    inside: set[int] = set()
    sizes = []
    for block in blocks(model):
        sizes.append(padded(block, inside))
        inside |= {id(p) for p in block.parameters()}
    most = max((2 * size + before for before, size in zip([0, *sizes], sizes, strict=False)), default=0)
    return padded(model, inside) + most


def _kept_in_step(
    model: nn.Module, inputs: Tensor, targets: Tensor, precision: Precision, recompute: bool, loss: Loss
) -> int:
    """Return the bytes that autograd keeps of a step, with the block that is being recomputed."""

    def made(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=precision.dtype if tensor.is_floating_point() else tensor.dtype)

    with fake(precision.dtype):
        copied, given, wanted = _fake_copy(model, precision.dtype), made(inputs), made(targets)

        def forward() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision.autocast):
                outputs = copied(given)
            is_short = isinstance(outputs, Tensor) and outputs.dtype.itemsize < 4
            return loss(outputs.float() if is_short else outputs, wanted)  # the loss's 32 bits

        try:
            recomputed = 0
            if recompute:
                recomputed = _most_of_a_block(copied, forward)
                _recompute(copied)
            return kept(copied, forward) + recomputed
        except Exception as error:
            raise ValueError(
                f"a step of {type(model).__name__} cannot be counted without computing it: {type(error).__name__}: "
                f"{str(error).splitlines()[0][:200]}. Its forward pass must not depend on the values of tensors; check "
                "that `batch` is (inputs, targets), two tensors, and that `loss` is of (outputs, targets)"
            ) from error


def _fake_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy whose parameters and buffers have no memory; what is tied stays tied. To be called in `fake`."""
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
    try:
        return copy.deepcopy(model, memo).train(model.training)
    except Exception as error:
        raise ValueError(f"a copy of {type(model).__name__} cannot be made: {type(error).__name__}: {error}") from error


def recomputed_blocks(model: nn.Module) -> list[nn.Module]:
    """Return what is recomputed: the layers that lie in lists and sequences and have parameters."""
    direct = {id(child) for child in model.children()}
    return [
        layer
        for _, layer in layers(model)
        if (id(layer) not in direct or isinstance(model, (nn.Sequential, nn.ModuleList)))
        and any(True for _ in layer.parameters())
    ]


def _recompute(model: nn.Module) -> None:
    from torch.utils.checkpoint import checkpoint

    for block in recomputed_blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _most_of_a_block(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Return the most bytes that a block keeps besides its input: what is there while it is recomputed.

    `checkpoint` has hooks of its own, which hide that from others.
    """
    before: list[int] = []
    most, counted = 0, Activations(model.parameters())

    def begin(*_: Any) -> None:
        before.append(counted.now)

    def end(*_: Any) -> None:
        nonlocal most
        most = max(most, counted.now - before.pop())

    hooks: list[Any] = []
    for block in recomputed_blocks(model):
        hooks += [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]
    try:
        with counted:
            value = forward()
            del value
    finally:
        for hook in hooks:
            hook.remove()
    return most
