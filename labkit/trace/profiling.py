"""What a rank does in a step, and what that costs: time by part, bytes sent, memory held."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType

from labkit.steps.counting import Activations as Activations
from labkit.steps.intervals import length, partition, union
from labkit.system import host

PARTS = ("data", "forward", "backward", "communication", "optimizer", "waiting")
"""Of a step. Communication counts before what is computed meanwhile; waiting is what no mark covers."""


class Mark(NamedTuple):
    """Something that a rank did, from when to when, in seconds since the step began on the first rank to begin it."""

    what: str
    start_s: float
    end_s: float


class Clock:
    """Marks what a rank does: `with clock("forward"): …`. On a GPU it waits for the device at either end.

    The clock is the machine's, so that marks of several ranks on one machine can be drawn together.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.steps: list[list[Mark]] = []
        """The marks of each step; the first of each is the step as a whole."""
        self._marks: list[Mark] = []

    def now(self) -> float:
        """Return the time in seconds, once the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.time()

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Mark what happens inside."""
        start_s = self.now()
        yield
        self._marks.append(Mark(what, start_s, self.now()))

    def timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is marked."""

        @functools.wraps(call)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with self(what):
                return call(*args, **kwargs)

        return marked

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Mark a whole step."""
        self._marks = []
        start_s = self.now()
        yield
        self.steps.append([Mark("step", start_s, self.now()), *self._marks])


def split(marks: list[Mark]) -> dict[str, float]:
    """Return the seconds of one step by part (`PARTS`); they add up to the step.

    `marks` begins with the whole step. An instant in which something is being communicated counts as communication,
    whatever is computed meanwhile; one that no mark covers is waiting.
    """
    whole, *rest = marks
    span = whole.start_s, whole.end_s
    sent = union((mark.start_s, mark.end_s) for mark in rest if mark.what == "communication")
    computed = [mark for mark in reversed(rest) if mark.what != "communication"]  # the last one counts
    others = [(mark.what, union([(mark.start_s, mark.end_s)])) for mark in computed]
    found = partition(span, [("communication", sent), *others, ("waiting", [span])])
    return {**dict.fromkeys(PARTS, 0.0), **{part: length(when) for part, when in found.items()}}


def bytes_sent() -> float:
    """Bytes that this rank has sent over TCP connections that are still open, retransmissions excluded.

    What the system counted (Linux's TCP_INFO), gloo's own headers and the traffic with the rendezvous store included.
    NaN where nobody counts: on other systems, and with NCCL, which sends through NVLink, shared memory or InfiniBand.
    """
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return float("nan")
    try:
        return host.bytes_sent()
    except OSError:
        return float("nan")


counted_sent = bytes_sent


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


def tensor_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes on this rank of a model's "parameters", their "gradients" and the "optimizer state"."""
    parameters = list(model.parameters())
    return {
        "parameters": size_bytes(parameters),
        "gradients": size_bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer state": size_bytes(state_of(optimizer)),
    }


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that an optimizer keeps on this rank."""
    own = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer keeps its shard's in `optim`
    for state in own.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


_ledgers: list[_Ledger] = []


@contextlib.contextmanager
def kept_on(device: int) -> Iterator[None]:
    """Have `activations` of the main thread count what this thread keeps, too, as the rank's device of this number."""
    if not _ledgers:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(functools.partial(_ledgers[-1].pack, device=device), _unpack):
        yield


class Kept(dict[str, int]):
    """The most bytes that autograd has kept: of "activations", and of "replicas", which are copies of weights."""

    def __init__(self) -> None:
        super().__init__(activations=0, replicas=0)
        self.by_device: dict[int, dict[str, int]] = {}
        """The same of each of the rank's devices, where threads say which they are (`kept_on`)."""


class _Count:
    """The bytes of storages that autograd keeps, and the most that it has kept at any time. A storage counts once."""

    def __init__(self, changed: Callable[[int], None] | None = None) -> None:
        self.sizes: dict[int, list[int]] = {}
        """Of what is kept now, by storage."""
        self.now = self.most = 0
        self._changed = changed or (lambda _: None)

    def add(self, key: int, size: int) -> None:
        sizes = self.sizes.setdefault(key, [])
        self.now += max(0, size - max(sizes, default=0))
        sizes.append(size)
        self.most = max(self.most, self.now)
        self._changed(self.now)

    def remove(self, key: int, size: int) -> None:
        sizes = self.sizes[key]
        sizes.remove(size)
        self.now -= max(0, size - max(sizes, default=0))
        if not sizes:
            del self.sizes[key]
        self._changed(self.now)


class _Kept:
    """A tensor that autograd keeps: it is counted until autograd lets go of it."""

    def __init__(self, tensor: Tensor, counts: Sequence[_Count], key: int, size: int) -> None:
        self.tensor, self._counts, self._key, self._size = tensor, counts, key, size
        for count in counts:
            count.add(key, size)

    def __del__(self) -> None:
        for count in self._counts:
            count.remove(self._key, self._size)


class _Ledger:
    """What autograd keeps besides weights: activations, and copies of the weights."""

    def __init__(self, weights: Iterable[Tensor], changed: Callable[[int], None] | None = None) -> None:
        self._weights = {local(weight).untyped_storage()._cdata: weight for weight in weights}
        self.activations, self.replicas = _Count(changed), _Count()
        self.devices: dict[int, dict[str, _Count]] = {}

    def pack(self, tensor: Tensor, device: int = 0) -> Any:
        base = tensor if tensor._base is None else tensor._base
        storage = local(tensor).untyped_storage()
        if isinstance(base, nn.Parameter) or storage._cdata in self._weights:
            return tensor
        kind = "replicas" if is_replica(base) else "activations"
        own = self.devices.setdefault(device, {"activations": _Count(), "replicas": _Count()})
        counts = (self.replicas if kind == "replicas" else self.activations), own[kind]
        # A view holds all of what it is a view of; but of a batch, which is there anyway, a part counts as the part.
        size = storage.nbytes() if tensor.requires_grad else min(storage.nbytes(), size_bytes([tensor]))
        # An operator that keeps its own output, with what made it, would keep itself: nobody collects such a cycle.
        tensor = tensor if tensor.grad_fn is None else tensor.detach()
        return _Kept(tensor, counts, storage._cdata, size)


COPYING = ("CloneBackward", "BroadcastBackward")
"""How autograd's graph names what copies a weight for another device: `clone`, and `nn.DataParallel`'s broadcast."""


def is_replica(tensor: Tensor) -> bool:
    """Whether a tensor is a copy of a weight, by which gradients come to that weight: `nn.DataParallel`'s, say."""
    made_by = tensor.grad_fn
    if made_by is None or not made_by.name().rstrip("0").startswith(COPYING):
        return False
    return all(isinstance(getattr(of, "variable", None), nn.Parameter) for of, _ in made_by.next_functions)


def _unpack(kept: Any) -> Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept


def kept_now() -> dict[int, list[int]]:
    """Return what `activations`, which must be counting, finds kept at the time: bytes, by storage. It changes."""
    return _ledgers[-1].activations.sizes


def saved_now() -> tuple[dict[int, int], dict[int, int]]:
    """Return what autograd keeps now, if `activations` counts: bytes by storage, of activations and of replicas."""
    if not _ledgers:
        return {}, {}
    counts = _ledgers[-1].activations, _ledgers[-1].replicas
    activations, replicas = ({key: max(sizes) for key, sizes in count.sizes.items()} for count in counts)
    return activations, replicas


@contextlib.contextmanager
def activations(model: nn.Module, changed: Callable[[int], None] | None = None) -> Iterator[Kept]:
    """Count the bytes that forward passes inside keep for the backward pass, weights excluded.

    Gives `{"activations": …, "replicas": …}`, the most at any time; replicas are copies of weights. `changed` is called
    with the bytes of activations whenever they change. A storage counts once (https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc).
    """
    ledger = _Ledger(model.parameters(), changed)
    counted = Kept()
    _ledgers.append(ledger)
    try:
        with torch.autograd.graph.saved_tensors_hooks(ledger.pack, _unpack):
            yield counted
    finally:
        _ledgers.pop()
        counted.update(activations=ledger.activations.most, replicas=ledger.replicas.most)
        counted.by_device = {
            device: {kind: count.most for kind, count in counts.items()} for device, counts in ledger.devices.items()
        }


# PyTorch's profiler


def profiler(device: torch.device, shapes: bool = True) -> Any:
    """Return PyTorch's profiler of the host and, if there is one, of the GPU; a context, to be given to `events_of`.

    For a GPU it is `torch.profiler.profile`. That one first imports the compiler, to ask it about CUDA graphs: on a CPU
    that is seconds of every rank for nothing, so there it is the profiler inside, `torch.autograd.profiler.profile`.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # what it says of itself is no rank's output
    if device.type != "cuda":
        return torch.autograd.profiler.profile(use_kineto=True, record_shapes=shapes)
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=shapes)


COLLECTIVE = re.compile(r"(?:gloo|nccl):(\w+)")
KERNEL = re.compile(r"nccl(?:Dev)?Kernel_?([A-Za-z]+)")
"""How events of collectives are called, and NCCL's kernels: `ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)`, and without
anything behind it `ncclDevKernel_SendRecv(…)`, of all that passes from one rank to one other.
"""

RECEIVING = ("gloo:recv", "nccl:recv")

ITEM_BYTES = {
    **dict.fromkeys(("double", "long int", "long", "c10::complex<float>"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short int", "short"), 2),
    "c10::complex<double>": 16,
}
"""Bytes per number of the profiler's types; of others 1, as for bool and the 8-bit ones."""


class Event(NamedTuple):
    """One of the profiler's events, in seconds."""

    name: str
    start_s: float
    end_s: float
    thread: int = 0
    """The system's number of the thread; on a GPU of the stream."""
    on_device: bool = False
    scope: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    link: int = 0
    """Number of an operator, and of the kernels that it launched."""

    @property
    def size(self) -> int:
        """Bytes of the tensors put in."""
        pairs = zip(self.shapes, self.dtypes, strict=False)
        return sum(math.prod(shape) * ITEM_BYTES.get(dtype, 1) for shape, dtype in pairs)


def events_of(profiler: Any, zero_ns: int = 0) -> list[Event]:
    """Return what a `profiler` that has ended recorded, in seconds since a time in ns since 1970."""
    found = []
    for event in getattr(profiler, "profiler", profiler).kineto_results.events():
        start_ns = event.start_ns() - zero_ns
        on_device = event.device_type() != DeviceType.CPU
        inputs = [(tuple(shape), kind) for shape, kind in zip(event.shapes(), event.dtypes(), strict=False) if shape]
        found.append(
            Event(
                event.name(),
                start_ns / 1e9,
                (start_ns + event.duration_ns()) / 1e9,
                event.device_resource_id(),
                on_device,
                event.scope(),
                tuple(shape for shape, _ in inputs),
                tuple(kind for _, kind in inputs),
                event.linked_correlation_id() if on_device else event.correlation_id(),
            )
        )
    return found


def received(events: Sequence[Event]) -> list[Event]:
    """Return the kernels that awaited a message. NCCL's are the same for sending; only what spans them tells."""
    spans = [e for e in events if e.on_device and e.name.startswith("nccl:recv")]
    kernels = [e for e in events if e.on_device and (kind := KERNEL.match(e.name)) and kind[1] == "SendRecv"]
    return [k for k in kernels if any(s.start_s <= k.start_s and k.end_s <= s.end_s for s in spans)]


STEP = "labkit step"


def trace(clock: Clock, step: Callable[[], Any], steps: int = 5) -> list[list[Mark]]:
    """Take some steps under PyTorch's profiler; return their marks, and those of every collective or send on the way.

    On a GPU they are those of the device: the host only hands NCCL its work. What waits to receive is not marked: the
    time may go by in computing, or it is waiting.
    """
    from torch.profiler import record_function

    on_device = torch.cuda.is_available()
    zero_ns = time.time_ns()
    with profiler(torch.device("cuda" if on_device else "cpu"), shapes=False) as profiled:
        for _ in range(steps):
            with record_function(STEP):
                step()
            if on_device:
                torch.cuda.synchronize()
    begun_s, sent_s = traced(events_of(profiled, zero_ns))
    marked = []
    for marks, zero_s in zip(clock.steps[-steps:], begun_s, strict=True):
        start_s, end_s = marks[0].start_s, marks[0].end_s
        spans = [(start_s + begin_s - zero_s, start_s + sent_by_s - zero_s) for begin_s, sent_by_s in sent_s]
        inside = [Mark("communication", a, min(b, end_s)) for a, b in spans if start_s <= a < end_s]
        marked.append([*marks, *inside])
    return marked


def traced(events: Sequence[Event]) -> tuple[list[float], list[tuple[float, float]]]:
    """Return when each step began, and from when to when each collective or send went on, in seconds.

    gloo works on the host, where its events begin and end with the work. An event of NCCL's there ends when the work
    has been handed over; a device event of the same name spans the work itself (where there is none, its kernels).
    """
    here = [event for event in events if not event.on_device]
    device = [event for event in events if event.on_device]
    begun_s = [event.start_s for event in here if event.name == STEP]
    on_device = [e for e in device if COLLECTIVE.match(e.name)] or [e for e in device if KERNEL.match(e.name)]
    sent = [e for e in here if e.name.startswith("gloo:")] + on_device
    return begun_s, [(event.start_s, event.end_s) for event in sent if not event.name.startswith(RECEIVING)]
