"""What a rank's tensors hold in a step, by owner: each storage once, and the most of each kind.

A rank holds more than its optimizer's parameters: a network of which it uses only half, DDP's buckets, a layer that
FSDP2 has gathered. So all tensors that Python's garbage collector tracks are counted: after the network's call, after
the backward pass and when the optimizer has stepped. Two kinds are not among them. DDP's buckets lie in C++; they are
as large as the gradients, unless these lie in them. What autograd keeps is counted as it is saved and let go
(`labkit.profiling.activations`).

On reserved ranks tensors of earlier jobs may be there: a cell's network, or what something still refers to. They are no
part of this step, and do not count unless it trains them.

What still is not seen: what is there only between two looks, such as the buffer of a message on its way.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

from labkit.rank.staying import collect_garbage, left_tensors
from labkit.trace.phases import Phases
from labkit.trace.profiling import Kept, activations, local, saved_now, size_bytes, state_of

KINDS = ("parameters", "gathered", "gradients", "buckets", "replicas", "optimizer state", "activations", "other")
"""Of memory. "gathered": parameters that FSDP2 has put together from all ranks for a moment; "replicas": copies of the
weights for other devices that the backward pass needs; "other": buffers, batches, data, whatever else
the rank has tensors of."""


class Held:
    """The most bytes of each kind that a rank has held at any look."""

    def __init__(self) -> None:
        self.most = dict.fromkeys(KINDS, 0)
        self._trained: frozenset[int] = frozenset()
        """Ids of parameters that count even if they were there before the launch."""
        self._sharded: list[Any] = []
        self._kept: Kept = Kept()

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Count what autograd keeps for this model, and what FSDP2 has gathered whenever a layer has been called.

        Later that may be sharded again, and what autograd has kept, let go.
        """
        self._trained = frozenset(id(parameter) for parameter in model.parameters())
        self._sharded = _sharded(gc.get_objects(), self._earlier())
        hook = register_module_forward_hook(lambda *_: self._look_at_gathered())
        try:
            with activations(model) as kept:
                yield
            self.most.update(kept)
            self._kept = kept
        finally:
            hook.remove()

    def _earlier(self) -> set[int]:
        return {id(tensor) for tensor in left_tensors()} - self._trained

    def by_device(self) -> tuple[dict[str, int], ...]:
        """Return the same for each of the rank's devices: all that is not kept for another lies on the first."""
        others = [dict.fromkeys(KINDS, 0) | kept for number, kept in sorted(self._kept.by_device.items()) if number]
        first = {kind: max(0, size - sum(other[kind] for other in others)) for kind, size in self.most.items()}
        return first, *others

    def _look_at_gathered(self) -> None:
        if self._sharded:
            self.most["gathered"] = max(self.most["gathered"], _count(_gathered(self._sharded), set()))

    def look(self, optimizer: Any) -> None:
        """Look at what is held now, while watching."""
        collect_garbage()  # what nobody refers to any more may still lie in cycles
        now = held(optimizer, self._earlier())
        self.most = {kind: max(self.most[kind], now[kind]) for kind in KINDS}


def held(optimizer: Any, earlier: Collection[int] = ()) -> dict[str, int]:
    """Return the bytes that this process's tensors hold now, by kind; what autograd keeps while `activations` counts.

    Args:
        optimizer: whose state it is; None before there is one.
        earlier: ids of tensors that do not count.
    """
    objects = gc.get_objects()
    tensors = [each for each in objects if issubclass(type(each), Tensor) and id(each) not in earlier]
    modules = [each for each in objects if issubclass(type(each), DistributedDataParallel)]
    gathered = _gathered(_sharded(objects, earlier))
    parameters = [each for each in tensors if isinstance(each, nn.Parameter)]
    saved, copies = saved_now()
    found = dict.fromkeys(KINDS, 0)
    counted = {*saved, *copies}
    found["activations"], found["replicas"] = sum(saved.values()), sum(copies.values())
    for kind, some in (
        ("gathered", gathered),
        ("parameters", parameters),
        ("gradients", (parameter.grad for parameter in parameters if parameter.grad is not None)),
        ("optimizer state", () if optimizer is None else state_of(optimizer)),
        ("other", tensors),
    ):
        found[kind] = _count(some, counted)
    for model in modules:
        if all(id(parameter) in earlier for parameter in model.parameters()):
            continue
        if model.gradient_as_bucket_view:  # gradients lie in buckets, which stay when these are set to None
            found["other"] -= _trained_bytes(model, lambda parameter: parameter.grad is None)
        else:
            found["buckets"] += _trained_bytes(model)
    return found


def _count(tensors: Iterable[Tensor], counted: set[int]) -> int:
    """Return the bytes of the storages of tensors that are not among those counted, which then have them."""
    total = 0
    for tensor in tensors:
        try:
            storage = local(tensor).untyped_storage()
            size = storage.nbytes() if storage.device.type != "meta" else 0
        except (NotImplementedError, RuntimeError):  # sparse ones, and those of transformations, have none
            continue
        if storage._cdata not in counted:
            counted.add(storage._cdata)
            total += size
    return total


def _sharded(objects: Iterable[Any], earlier: Collection[int]) -> list[Any]:
    """Return FSDP2's own record of each parameter that it shards, but of those earlier ones."""
    records = (each for each in objects if type(each).__name__ == "FSDPParam")
    return [each for each in records if id(getattr(each, "sharded_param", None)) not in earlier]


def _gathered(sharded: Iterable[Any]) -> list[Tensor]:
    """Return the parameters that FSDP2 has put together; their storages are empty when they are sharded again."""
    unsharded = (getattr(each, "_unsharded_param", None) for each in sharded)
    return [each for each in unsharded if isinstance(each, Tensor)]


def _trained_bytes(model: DistributedDataParallel, which: Callable[[Tensor], bool] = lambda parameter: True) -> int:
    left_out = getattr(model, "parameters_to_ignore", ())
    trained = [p for name, p in model.module.named_parameters() if p.requires_grad and name not in left_out]
    return size_bytes(parameter for parameter in trained if which(parameter))


@contextlib.contextmanager
def most_held(model: nn.Module, optimizer: Any) -> Iterator[dict[str, int]]:
    """Give the most bytes of each kind that are held in the step inside, once that is over."""
    looks, found = Held(), dict.fromkeys(KINDS, 0)

    def look(what: str, began_s: float) -> None:
        looks.look(optimizer)

    with looks.watching(model), Phases(time.time, look, lambda stepped: None).watching():
        yield found
    found.update(looks.most)
