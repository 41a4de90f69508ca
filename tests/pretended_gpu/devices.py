"""What stands for `torch.cuda`: its Python is PyTorch's own, what it calls in C++ is replaced here.

So CUDA is initialised lazily, queued calls included, exactly where PyTorch would; each such moment is recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch

TOTAL_BYTES = 16 * 2**30
ASSERTED = (
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API "
    "call, so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)

_lock = threading.Lock()
_of_thread = threading.local()
contexts: set[int] = set()
"""Devices on which this process has a context."""

broken = False
"""Whether a kernel has failed: the context is of no use any more, and every call says so."""

held: dict[int, int] = {}
"""Bytes by device."""

peak: dict[int, int] = {}


def record(what: str, **details: Any) -> None:
    """Write down what this process does, one line of JSON."""
    if not (log := os.environ.get("LABKIT_PRETENDED_LOG")):
        return
    entry = {"what": what, "pid": os.getpid(), "parent": os.getppid(), "rank": os.environ.get("RANK"), **details}
    with open(log, "a") as file:  # one write a line: processes append side by side
        file.write(json.dumps(entry) + "\n")


def all_devices() -> int:
    """How many the machine has."""
    return int(os.environ.get("LABKIT_PRETENDED_GPUS") or 0)


def visible() -> int:
    """How many this process sees, as CUDA reads its variable: up to the first that is not there; a name stands for one.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return all_devices()
    count = 0
    for word in given.split(","):
        word = word.strip()
        is_there = word.isdigit() and int(word) < all_devices() or word.startswith(("GPU-", "MIG-"))
        if not is_there:
            break
        count += 1
    return min(count, all_devices())


def current() -> int:
    """The current device of this thread."""
    return getattr(_of_thread, "device", 0)


def check() -> None:
    """Raise what every call raises once a kernel has failed."""
    if broken:
        raise torch.AcceleratorError(ASSERTED) if hasattr(torch, "AcceleratorError") else RuntimeError(ASSERTED)


def break_context() -> None:
    """A kernel has failed: whoever waits for the device next is told."""
    global broken
    broken = True
    record("assert", device=current())


def use(device: int) -> None:
    """Something is put on a device, or it is made the current one: it has a context then."""
    if not 0 <= device < visible():
        raise RuntimeError(
            "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?\n"
        )
    with _lock:
        if device not in contexts:
            contexts.add(device)
            record("context", device=device)


def add_bytes(device: int, size: int) -> None:
    """Count bytes that are put on a device, or taken from it."""
    held[device] = held.get(device, 0) + size
    peak[device] = max(peak.get(device, 0), held[device])


# What torch._C does


def _init() -> None:
    if not visible():
        raise RuntimeError("No CUDA GPUs are available")
    record("initialise")


def _set_device(device: int) -> None:
    torch.cuda._lazy_init()
    check()
    record("set_device", device=device)
    use(device)
    _of_thread.device = device


def _get_device() -> int:
    torch.cuda._lazy_init()
    return current()


def _exchange(device: int) -> int:
    before = current()
    if device >= 0:
        torch.cuda._lazy_init()
        use(device)
        _of_thread.device = device
    return before


class Stream:
    """One of the streams, which are all one."""

    device_index = 0
    device_type = 1
    stream_id = 0
    cuda_stream = 0
    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", current())

    def record_event(self, event: Any = None) -> Any:
        """Return an event that is over."""
        return event or Event()

    def query(self) -> bool:
        """Whether all is done."""
        return True

    def wait_stream(self, _: Any) -> None:
        """Wait for nothing."""

    wait_event = wait_stream

    def synchronize(self) -> None:
        """Wait for nothing; a kernel that has failed is noticed."""
        check()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class Event:
    """A moment of the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at_s = time.perf_counter()

    def record(self, *_: Any) -> None:
        """Be now."""
        self._at_s = time.perf_counter()

    def wait(self, *_: Any) -> None:
        """Wait for nothing."""

    synchronize = wait

    def query(self) -> bool:
        """It has come."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host's clock."""
        return 1000 * (end._at_s - self._at_s)


def _properties(device: Any = None) -> Any:
    torch.cuda._lazy_init()
    index = torch.cuda._utils._get_device_index(device, optional=True)
    if not 0 <= index < visible():
        raise AssertionError("Invalid device id")
    return SimpleNamespace(
        name="Pretended GPU",
        total_memory=TOTAL_BYTES,
        multi_processor_count=40,
        major=8,
        minor=0,
    )


def _number(device: Any) -> int:
    return int(torch.cuda._utils._get_device_index(device, optional=True))


def _reset_peak(device: Any = None) -> None:
    index = _number(device)
    peak[index] = held.get(index, 0)


def _synchronize(device: Any = None) -> None:
    torch.cuda._lazy_init()
    use(_number(device))
    check()


def _random_states() -> list[torch.Tensor]:
    torch.cuda._lazy_init()
    return [_states.setdefault(index, torch.zeros(16, dtype=torch.uint8)).clone() for index in range(visible())]


_states: dict[int, torch.Tensor] = {}


def _set_random_state(state: torch.Tensor, device: Any = "cuda") -> None:
    torch.cuda._lazy_init()
    _states[_number(device)] = state.clone()


def _set_random_states(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        _set_random_state(state, index)


def install() -> None:
    """Replace what of `torch.cuda`, `torch.accelerator` and `torch._C` asks a driver."""
    cuda, c = torch.cuda, torch._C
    for name, function in {
        "_cuda_init": _init,
        "_cuda_getDeviceCount": visible,
        "_cuda_setDevice": _set_device,
        "_cuda_getDevice": _get_device,
        "_cuda_exchangeDevice": _exchange,
        "_cuda_maybeExchangeDevice": _exchange,
        "_cuda_hasPrimaryContext": lambda device: device in contexts,
        "_cuda_synchronize": lambda: _synchronize(),
        "_cuda_emptyCache": lambda *_: record("empty_cache"),
        "_get_accelerator": lambda *_: torch.device("cuda" if visible() else "cpu"),
        "_accelerator_getAccelerator": lambda *_: torch.device("cuda"),
        "_accelerator_getDeviceIndex": current,
        "_accelerator_setDeviceIndex": _set_device,
        "_accelerator_exchangeDevice": _exchange,
        "_accelerator_maybeExchangeDevice": _exchange,
        "_accelerator_synchronizeDevice": _synchronize,
        "_accelerator_getStream": Stream,
    }.items():
        setattr(c, name, function)
    for name, function in {
        "_device_count_nvml": visible,  # which does not mind that the driver is too old
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _exchange,
        "get_device_properties": _properties,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_name": lambda device=None: _properties(device).name,
        "synchronize": _synchronize,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": lambda stream=None: stream if stream is not None else contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state_all": _random_states,
        "set_rng_state_all": _set_random_states,
        "get_rng_state": lambda device="cuda": _random_states()[_number(device)],
        "set_rng_state": _set_random_state,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }.items():
        setattr(cuda, name, function)
        if hasattr(cuda.random, name):
            setattr(cuda.random, name, function)
    memory = {
        "mem_get_info": lambda device=None: (TOTAL_BYTES - held.get(_number(device), 0), TOTAL_BYTES),
        "memory_allocated": lambda device=None: held.get(_number(device), 0),
        "memory_reserved": lambda device=None: held.get(_number(device), 0),
        "max_memory_allocated": lambda device=None: peak.get(_number(device), 0),
        "max_memory_reserved": lambda device=None: peak.get(_number(device), 0),
        "reset_peak_memory_stats": _reset_peak,
        "memory_stats": lambda device=None: {"allocated_bytes.all.peak": peak.get(_number(device), 0)},
    }
    for name, function in memory.items():
        setattr(cuda, name, function)
        setattr(cuda.memory, name, function)
    # Those that the wheel has queued for the first initialisation ask the driver; whatever comes later stays.
    cuda._queued_calls.clear()
    _profile_the_host_only()
    torch.Stream, torch.Event = Stream, Event  # type: ignore[assignment, misc]
    torch.accelerator.is_available = lambda: visible() > 0  # type: ignore[assignment]
    torch.accelerator.device_count = visible  # type: ignore[assignment]
    torch.cuda.nccl.version = lambda: (2, 27, 3)  # type: ignore[assignment]
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None  # type: ignore[attr-defined]
    torch.optim.Optimizer._cuda_graph_capture_health_check = lambda self: None  # type: ignore[attr-defined]


def _profile_the_host_only() -> None:
    """Have the profiler record no CUDA events: each would raise, and print its stack, in C++."""
    profile: Any = torch.autograd.profiler.profile
    begin = profile.__init__

    def on_host(self: Any, *arguments: Any, **options: Any) -> None:
        options.pop("use_cuda", None)  # of older versions
        begin(self, *arguments, **{**options, "use_device": None})

    profile.__init__ = on_host
