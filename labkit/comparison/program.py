"""What a step of a rank consists of, as PyTorch dispatches it: multiplications, collectives, messages, waits.

The problem: ranks that share cores fight for them, so their step times rank how they fight. What does not work: having
each layer last as long as on a device of its own, by the clock, for whatever else the machine does is then in the
time. So one step is recorded where every operator passes (`TorchDispatchMode`, as PyTorch's FlopCounterMode and
CommDebugMode do), and `replay` computes how long it takes on ideal devices. That sees what autograd, DDP's reducer and
FSDP2 call, too, on gloo as on NCCL.

What C++ waits for, no operator says: a collective that was called in a backward pass and that Python does not wait for
is awaited at that pass's end, as DDP does; any other where it was called. What this leaves out: operators without a
formula in PyTorch's registry take no time (`Program.uncounted` has them), and neither do the optimizer and loading.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.trace.profiling import kept_on, size_bytes


class Piece(NamedTuple):
    """Something that a rank does in a step."""

    what: str
    """"forward", "backward" or "optimizer" of computing; "copy", between devices of the rank; "wait"; or the kind of a
    call: "all_reduce", "send", …"""
    device: int = 0
    """Which of the rank's devices computes, or which sends the copy."""
    flops: float = 0.0
    size: int = 0
    """Bytes that this rank puts in, or copies."""
    sent: float = 0.0
    """Bytes that it sends, the mean over the ranks of the call, as this backend does it."""
    ranks: tuple[int, ...] = ()
    """Of the call's group."""
    peer: int = 0
    """The other rank of a message; of a copy the device that gets it."""
    number: int = -1
    """Of a call: a wait has the number of the call that it waits for."""


class Work(NamedTuple):
    """An operator of a step, by what its time on a device depends on."""

    flops: float
    moved: int
    """Bytes of the tensors that it reads and writes."""
    numbers: str = "32"
    """Bits of the numbers that it multiplies: "64", "32", "16"; "conv 32" of convolutions, which may use TF32."""
    in_step: bool = False
    """Whether the optimizer calls it, which on a GPU steps all parameters in a few kernels."""


@dataclass(frozen=True)
class Program:
    """One step of one rank."""

    pieces: tuple[Piece, ...] = ()
    uncounted: dict[str, float] = field(default_factory=dict)
    """Operators without a formula, by name: the share of the step's time in all operators that they took here."""
    work: dict[Work, int] = field(default_factory=dict)
    """All operators but views, and how often each was called."""

    @property
    def devices(self) -> int:
        """How many devices of the rank compute or get copies."""
        used = (max(p.device, p.peer) if p.what == "copy" else p.device for p in self.pieces)
        return 1 + max(used, default=0)

    @property
    def flops(self) -> float:
        """Floating-point operations of the step."""
        return sum(piece.flops for piece in self.pieces)

    @property
    def bytes_sent(self) -> float:
        """What the rank and its devices send in the step."""
        return float(sum(piece.sent for piece in self.pieces))


def expected_bytes(kind: str, size: int, ranks: float) -> float:
    """Return the bytes that a rank sends for one call, the mean over ranks, as textbooks have it; NaN if unknown.

    `size` is how many bytes this rank put in: all that is reduced or broadcast, its own part of what is gathered;
    `ranks` are those of the call's group.
    """
    if kind == "send":
        return float(size)
    if kind in ("recv", "barrier"):
        return 0.0
    others = (ranks - 1) / ranks if ranks else math.nan
    each = {
        "all_reduce": 2 * others,  # a ring: Patarasuk and Yuan 2009
        **dict.fromkeys(("reduce_scatter", "broadcast", "reduce", "scatter", "all_to_all", "gather"), others),
        "all_gather": ranks - 1,
    }
    return each.get(kind, math.nan) * size


KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "recv_any_source": "recv",
    "isend": "send",
    "irecv": "recv",
}
"""What PyTorch's operators are called where the name is not the collective's."""

PUT_IN_SECOND = ("all_gather", "reduce_scatter", "gather", "all_to_all")
"""Calls of c10d whose first argument is what the rank gets."""


class Recorder:
    """Records a step: `with recorder.recording():`. Then `program()` has it."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._lock = threading.Lock()
        self._calls = 0
        self._works: dict[int, tuple[Any, int]] = {}
        """By id, the handles of calls under way, which keeps them, and the calls' numbers."""
        self._tensors: dict[int, int] = {}
        """By storage, the numbers of functional collectives' results."""
        self._open: dict[int, bool] = {}
        """Calls that nothing has waited for, and whether each was made in a backward pass."""
        self._seconds: dict[str, float] = {}
        self._counted_s = 0.0
        self._work: Counter[Work] = Counter()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this thread does inside, and what others do with `compute_on`."""
        backward = torch.autograd.backward

        def backward_then_wait(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            for number in [number for number, in_backward in self._open.items() if in_backward]:
                self._wait(number)

        with contextlib.ExitStack() as patches:
            patches.callback(setattr, torch.autograd, "backward", backward)
            torch.autograd.backward = backward_then_wait
            if dist.is_available():
                wait = dist.Work.wait

                def noted_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
                    self._wait(self._works.get(id(work), (None, -1))[1])
                    return wait(work, *args, **kwargs)

                patches.callback(setattr, dist.Work, "wait", wait)
                dist.Work.wait = noted_wait  # type: ignore[method-assign, assignment]
            patches.callback(_active.remove, self)
            _active.append(self)
            patches.enter_context(_Mode(self, 0))
            yield

    def _wait(self, number: int) -> None:
        if self._open.pop(number, None) is not None:
            self._add(Piece("wait", number=number))

    def _add(self, piece: Piece) -> None:
        with self._lock:
            last = self._pieces[-1] if self._pieces else None
            if last is not None and piece.flops and (last.what, last.device) == (piece.what, piece.device):
                self._pieces[-1] = last._replace(flops=last.flops + piece.flops)
            else:
                self._pieces.append(piece)

    def copied(self, size: int, source: int, target: int) -> None:
        """Note that so many bytes go from one of the rank's devices to another."""
        self._add(Piece("copy", source, size=size, sent=float(size), peer=target))

    def note_operator(self, func: Any, args: Any, kwargs: Any, outputs: Any, seconds: float, device: int) -> None:
        """Note an operator that was dispatched."""
        node = torch._C._current_autograd_node()
        formula = _formula(func._overloadpacket)
        flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=outputs))
        if not is_view(func):
            self._work[_work(func, args, outputs, flops, node is None and not torch.is_grad_enabled())] += 1
        if formula is None:
            self._seconds[str(func)] = self._seconds.get(str(func), 0.0) + seconds
            return
        self._counted_s += seconds
        metadata: Any = {} if node is None else node.metadata
        device = metadata.get(ON_DEVICE, device)
        what = "forward" if node is None else "backward"
        self._add(Piece(what, device, flops))

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note and do a call of a process group; return what it returns."""
        name = func._overloadpacket.__name__.strip("_").removesuffix("_base").strip("_")
        if name in ("wait_tensor", "monitored_barrier"):
            outputs = func(*args, **kwargs)
            self._wait(self._tensors.get(_key(args[0]), -1))
            return outputs
        kind = KINDS.get(name, name)
        group = _group_of(args)
        is_functional = func.namespace == "_c10d_functional"
        if is_functional and group is None:  # it only wraps another call's result
            return func(*args, **kwargs)
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
        put_in = args[1] if kind in PUT_IN_SECOND and not is_functional else args[0]
        # Before the call, which may replace what is sparse by what all ranks have put in.
        size = size_bytes(_flat(put_in)) * (len(ranks) if kind == "scatter" else 1)
        is_sparse = any(tensor.is_sparse for tensor in _flat(put_in))
        outputs = func(*args, **kwargs)
        number, self._calls = self._calls, self._calls + 1
        peer = ranks[args[2]] if kind in ("send", "recv") and name != "recv_any_source" else -1
        # gloo implements reduce-scatter as an all-reduce; each rank keeps its shard. Sparse tensors are gathered.
        carried = [*_flat(put_in), *_flat(outputs)]
        is_gloo = group is not None and backend_for(carried, dist.get_backend_config(group)) == "gloo"
        done_by = "all_reduce" if is_gloo and kind == "reduce_scatter" else "all_gather" if is_sparse else kind
        sent = expected_bytes(done_by, size, len(ranks))
        self._add(Piece(kind, size=size, sent=sent, ranks=ranks or (-1,), peer=peer, number=number))
        self._open[number] = torch._C._current_autograd_node() is not None
        found = _flat(outputs)
        for output in found if is_functional else ():
            self._tensors[_key(output)] = number
        if not is_functional:
            handle = outputs[-1] if isinstance(outputs, (tuple, list)) else outputs
            with contextlib.suppress(RuntimeError, TypeError, AttributeError):  # a PyTorch that does not give it
                work = dist.Work.unbox(handle)
                self._works[id(work)] = work, number
        return outputs

    def program(self) -> Program:
        """Return what was recorded."""
        pieces: list[Piece] = []
        for piece in self._pieces:
            pieces.append(piece)
            if piece.number in self._open and piece.what != "wait":  # C++ has waited for it at once
                pieces.append(Piece("wait", number=piece.number))
        self._works.clear()
        whole_s = sum(self._seconds.values()) + self._counted_s
        shares = {name: seconds / whole_s for name, seconds in self._seconds.items()}
        by_share = sorted(shares.items(), key=lambda item: -item[1])
        return Program(tuple(pieces), dict(by_share[:8]) | {"all": sum(shares.values())}, dict(self._work))


class _Mode(TorchDispatchMode):
    """Has a recorder see the operators of one thread, which are those of one of the rank's devices."""

    def __init__(self, recorder: Recorder, device: int) -> None:
        super().__init__()
        self._recorder, self._device = recorder, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What is sharded, or on its way, calls the operators of its own parts, and these come here.
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._recorder.call(func, args, kwargs or {})
        began_s = time.perf_counter()
        outputs = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began_s
        self._recorder.note_operator(func, args, kwargs or {}, outputs, seconds, self._device)
        return outputs


_active: list[Recorder] = []
"""The recorder at work, if any."""


# Several devices of one rank, as `nn.DataParallel` has them

ON_DEVICE = "labkit device"
"""Under which a node of autograd's graph keeps which device computed it forward: that one computes it backward."""


def compute_on(device: int, module: nn.Module, *inputs: Any) -> Any:
    """Call a module in this thread as the rank's device of this number; what it computes and keeps counts as that's."""
    with kept_on(device), _Mode(_active[-1], device) if _active else contextlib.nullcontext():
        outputs = module(*inputs)
    if _active:
        _mark_graph([each.grad_fn for each in _flat(outputs) if each.grad_fn is not None], device)
    return outputs


def note_copy(tensors: Iterable[Tensor], source: int, target: int) -> None:
    """Note that tensors are copied from one of the rank's devices to another, for the comparison that watches."""
    if _active and source != target:
        _active[-1].copied(size_bytes(tensors), source, target)


def _mark_graph(nodes: list[Any], device: int) -> None:
    while nodes:
        node = nodes.pop()
        if ON_DEVICE not in node.metadata and not node.name().startswith("Broadcast"):
            node.metadata[ON_DEVICE] = device
            nodes += [before for before, _ in node.next_functions if before is not None]


def backend_for(tensors: Iterable[Tensor], config: str) -> str:
    """Return which backend carries tensors, by `dist.get_backend_config()` of a group: "cpu:gloo,cuda:nccl", say."""
    by_device = dict(each.split(":") for each in config.split(","))
    return by_device.get("cuda" if any(tensor.is_cuda for tensor in tensors) else "cpu", "")  # a barrier has no tensors


# Of operators


def _formula(packet: Any) -> Callable[..., float] | None:
    """Return PyTorch's formula for an operator's floating-point operations, or None."""
    from torch.utils.flop_counter import flop_registry

    if packet in flop_registry:
        return flop_registry[packet]
    # On a CPU attention has an operator of its own, for which older versions of PyTorch have no formula.
    same = getattr(torch.ops.aten, packet.__name__.replace("_for_cpu", ""), None)
    return flop_registry.get(same)


def is_view(func: Any) -> bool:
    """Whether an operator returns a view of a tensor, or allocates one and writes nothing to it."""
    returns = [each.alias_info for each in func._schema.returns]
    only_alias = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    return only_alias or func._overloadpacket.__name__ in (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "detach",
    )


def _work(func: Any, args: Sequence[Any], outputs: Any, flops: float, in_step: bool) -> Work:
    tensors = [*_flat(list(args)), *_flat(outputs)]
    first = next((each.dtype.itemsize for each in tensors if each.is_floating_point()), 4)
    numbers = {8: "64", 2: "16"}.get(first, "32")
    if numbers == "32" and "convolution" in func._overloadpacket.__name__:
        numbers = "conv 32"
    return Work(flops, sum(each.numel() * each.element_size() for each in tensors), numbers, in_step)


def _group_of(args: Sequence[Any]) -> Any:
    """Return the process group that a call was given: an object, or the last text, which is its name."""
    for each in args:
        if isinstance(each, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, TypeError):
                return dist.ProcessGroup.unbox(each)
    names = [each for each in args if isinstance(each, str)]
    with contextlib.suppress(Exception):
        return dist.distributed_c10d._resolve_process_group(names[-1])  # type: ignore[arg-type]
    return None


def _flat(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [tensor for each in given for tensor in _flat(each)] if isinstance(given, (list, tuple)) else []


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
