"""What a step costs by arithmetic: operations, and bytes by kind of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils.flop_counter import flop_registry

WRAPPERS = ("DTensor", "AsyncCollectiveTensor")
"""What calls the operators of its own parts, and these are counted: FlopCounterMode counts the whole on every rank."""


class Flops(TorchDispatchMode):
    """Counts floating-point operations of this thread, those of products: `with Flops() as counted:`, `counted.total`.

    NaN where that is not sure: around or within a mode of the user's, and for an LSTM on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = math.nan if _get_current_dispatch_mode() is not None else 0.0
        self._is_on = False

    def __enter__(self) -> Flops:
        # Within a mode of the user's that ends first, this one would be ended in its place.
        if not math.isnan(self.total):
            super().__enter__()
            self._is_on = True
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ in WRAPPERS for kind in types):
            return NotImplemented
        outputs = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=outputs)
        elif "rnn_layer" in func.name():  # oneDNN's LSTM: the one product without a formula
            self.total = math.nan
        return outputs

    def __exit__(self, *error: Any) -> None:
        if not self._is_on:
            return
        above = []  # modes that the user has begun since, and not ended
        while (top := _get_current_dispatch_mode()) not in (None, self):
            above.append(top)
            _pop_mode()
        if top is self:
            super().__exit__(*error)
        if above or top is None:
            self.total = math.nan
        for mode in reversed(above):
            _push_mode(mode)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that lies on this rank, which may be a collective's result on its way."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return getattr(tensor, "elem", tensor)  # AsyncCollectiveTensor has a shape and no memory: its `elem` has that


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors on this rank; of a sharded one, the shard; of a sparse one, its indices and values."""
    return sum(part.numel() * part.element_size() for tensor in tensors for part in _dense_parts(local(tensor)))


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout != torch.sparse_coo:
        return (tensor,)
    rows = tensor.detach().coalesce()  # as it is sent
    return rows.indices(), rows.values()


def state_of(optimizer: Any) -> Iterator[Tensor]:
    """Yield the tensors that an optimizer keeps on this rank."""
    own = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer keeps its shard's in `optim`
    for state in own.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def tensor_bytes(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Bytes on this rank of a model's "parameters", their "gradients" and the "optimizer state"."""
    parameters = list(model.parameters())
    return {
        "parameters": size_bytes(parameters),
        "gradients": gradient_bytes(parameters),
        "optimizer state": size_bytes(state_of(optimizer)),
    }


def gradient_bytes(parameters: Iterable[Tensor]) -> int:
    """Bytes on this rank of the gradients of these."""
    return size_bytes(p.grad for p in parameters if p.grad is not None)


def held(models: Iterable[nn.Module], optimizers: Iterable[Any]) -> dict[str, int]:
    """Return the bytes on this rank of "parameters", trained or not, "gradients", "optimizer" and DDP's "buckets"."""
    models, optimizers = list(models), list(optimizers)
    parameters = parameters_of(models, optimizers)
    ddp = [m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)]
    bucketed = [p for m in ddp if not m.gradient_as_bucket_view for p in m.parameters() if p.requires_grad]
    return {
        "parameters": size_bytes(parameters),
        "gradients": gradient_bytes(parameters),
        # Once: ZeroRedundancyOptimizer steps, and so does the optimizer in it, which has its state.
        "optimizer": size_bytes({id(t): t for optimizer in optimizers for t in state_of(optimizer)}.values()),
        "buckets": size_bytes(bucketed),
    }


def parameters_of(models: Iterable[nn.Module], optimizers: Iterable[Any]) -> list[Tensor]:
    """Return the parameters of networks, and what optimizers train besides, each once."""
    found = {id(p): p for model in models for p in model.parameters()}
    for optimizer in optimizers:
        own = getattr(optimizer, "optim", optimizer)
        found |= {id(p): p for group in own.param_groups for p in group["params"]}
    return list(found.values())


class Activations:
    """The most bytes that autograd keeps for backward passes inside, weights excluded.

    `with Activations(model.parameters()) as kept:`, then `kept.most`. A storage counts once; of the batch, which is
    there anyway, a part counts as the part. What is kept within other such hooks is not seen: by non-reentrant
    checkpointing, `save_on_cpu` (https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc).
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._weights = {local(p).untyped_storage()._cdata: p for p in parameters}  # which stay, so that numbers do
        self.kept: dict[int, list[int]] = {}
        """Bytes that are kept now, by storage."""
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self.now = self.most = 0

    def __enter__(self) -> Activations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        top, pop = (
            torch._C._autograd._top_saved_tensors_default_hooks,
            torch._C._autograd._pop_saved_tensors_default_hooks,
        )
        above = []  # hooks that the user has begun since, and not ended
        while (pair := top(True)) is not None and pair[0] != self._hooks.pack_hook:
            above.append(pair)
            pop()
        if pair is not None:
            pop()
        for pair in reversed(above):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)

    def _pack(self, tensor: Tensor) -> Any:
        storage = local(tensor).untyped_storage()
        if storage._cdata in self._weights or isinstance(tensor._base, nn.Parameter):
            return tensor
        size = storage.nbytes() if tensor.requires_grad else min(storage.nbytes(), size_bytes([tensor]))
        # An operator that keeps its own output, with what made it, would keep itself: nobody collects such a cycle.
        tensor = tensor if tensor.grad_fn is None else tensor.detach()
        return _Kept(self, tensor, storage._cdata, size)

    def count(self, key: int, size: int, is_new: bool) -> None:
        """Note that autograd keeps a storage once more, or once less."""
        sizes = self.kept.setdefault(key, [])
        before = max(sizes, default=0)
        sizes.append(size) if is_new else sizes.remove(size)
        self.now += max(sizes, default=0) - before
        self.most = max(self.most, self.now)
        if not sizes:
            del self.kept[key]


class _Kept:
    """A tensor that autograd keeps: it is counted until autograd lets go of it."""

    def __init__(self, counter: Activations, tensor: Tensor, key: int, size: int) -> None:
        self.tensor, self._counter, self._of = tensor, counter, (key, size)
        counter.count(*self._of, is_new=True)

    def __del__(self) -> None:
        self._counter.count(*self._of, is_new=False)


def _unpack(kept: Any) -> Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept
