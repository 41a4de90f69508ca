"""Which device a tensor is on: a mark on its storage, so that views, gradients and what C++ hands around keep it.

Two modes in every thread do the rest. The first takes what Python asks for (`device="cuda"`, `.to`, `.device`) before
C++ would look for a GPU; the second sees every operator, those of a backward pass too, refuses to mix devices and marks
what comes out. A storage without a mark was made by C++ for itself: it takes the device of those it meets.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretended_gpu import devices, groups

CPU = torch.device("cpu")
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, UninitializedParameter, UninitializedBuffer)
"""What is a tensor itself, and no wrapper of one."""

FREE = {
    *("copy_", "_to_copy", "set_", "resize_", "_foreach_copy_", "_local_scalar_dense", "is_same_size", "_pin_memory"),
    *("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"),
    "record_stream",
}
"""Operators that take tensors of several devices; those that index take their indices from the CPU."""

_base = torch._C.TensorBase
_disabled = torch._C.DisableTorchFunction


class Bytes:
    """Counts a storage's bytes on its device until the storage is gone."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device, self.size = device, size
        devices.add_bytes(device.index, size)

    def __del__(self) -> None:
        devices.add_bytes(self.device.index, -self.size)


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """Return the device of a tensor, or None for one without a mark."""
    if (inner := _inner(tensor)) is not None:
        return device_of(inner)
    with _disabled():
        return _marked(tensor)


_real_device, _storage_of = _base.device.__get__, _base.untyped_storage


def _marked(tensor: torch.Tensor) -> torch.device | None:
    """Return the device of a plain tensor, within `_disabled`: this is called for each argument of each operator."""
    real = _real_device(tensor)
    if real != CPU:
        return real
    try:
        storage = _storage_of(tensor)
    except (RuntimeError, NotImplementedError):  # sparse, or without one
        return getattr(tensor, "pretended_device", None)
    return getattr(storage, "pretended_device", None)


def mark(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Say on which device a tensor is, with all that share its storage."""
    if (inner := _inner(tensor)) is not None:
        mark(inner, device)
        return tensor
    with _disabled():
        if _base.device.__get__(tensor).type != "cpu" or device.type == "meta":
            return tensor
        try:
            storage = _base.untyped_storage(tensor)
        except (RuntimeError, NotImplementedError):
            tensor.pretended_device = device  # type: ignore[attr-defined]
            return tensor
        storage.pretended_device = device  # type: ignore[attr-defined]
        if device.type == "cuda":
            devices.use(device.index)
            storage.pretended_bytes = Bytes(device, storage.nbytes())  # type: ignore[attr-defined]
    return tensor


def _inner(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a wrapper, DTensor's say, holds."""
    if type(tensor) in PLAIN:
        return None
    for name in ("_local_tensor", "elem"):
        inner = getattr(tensor, name, None)
        if isinstance(inner, torch.Tensor):
            return inner
    return None


def full(device: Any) -> torch.device:
    """Return a device with its number, as whoever names it wants it; CUDA is initialised for it."""
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        return found
    torch.cuda._lazy_init()
    found = torch.device("cuda", devices.current() if found.index is None else found.index)
    devices.use(found.index)
    return found


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Return the tensors of arguments, nested as operators' are."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from tensors_in(value)


def outputs_in(found: Any) -> Iterable[torch.Tensor]:
    """Return the tensors that a function has returned."""
    if isinstance(found, torch.Tensor):
        return (found,)
    return tensors_in(found) if isinstance(found, (list, tuple, dict)) else ()


def mixed(found: Iterable[torch.device]) -> RuntimeError:
    """Return PyTorch's own error."""
    names = " and ".join(sorted(map(str, found)))
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {names}! (pretended)"
    )


# Moving


class Move(torch.autograd.Function):
    """A copy on another device; its gradient goes back to where the tensor came from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: torch.device, options: dict[str, Any]) -> torch.Tensor:
        ctx.source, ctx.dtype = device_of(tensor), tensor.dtype
        return mark(_base.to(tensor.detach(), **options, copy=True), device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (mark(gradient.to(ctx.dtype, copy=True), ctx.source) if ctx.source else gradient), None, None


def move(tensor: torch.Tensor, device: torch.device, **options: Any) -> torch.Tensor:
    """Return a tensor on a device, itself if it is there."""
    if device.type == "meta":
        return _base.to(tensor, device, **options)
    here = device_of(tensor)
    if here is not None and here.type == "meta" or _inner(tensor) is not None:
        return _base.to(tensor, **options) if options else tensor
    if here == device or (here is None and device.type == "cpu"):
        return _base.to(tensor, **options) if options else tensor
    if (here or CPU).type == "cuda":
        devices.check()
    options.pop("non_blocking", None)
    options.pop("copy", None)
    return Move.apply(tensor, device, options)


def _to(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    device = options.pop("device", None)
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            device, options["dtype"] = device_of(argument) or CPU, argument.dtype
        elif isinstance(argument, torch.dtype):
            options["dtype"] = argument
        elif isinstance(argument, (str, int, torch.device)) and not isinstance(argument, bool):
            device = argument
        elif argument is None:
            continue
        else:  # .to(other, non_blocking, copy), all by position
            options["copy"] = options.get("copy", False)
    if options.get("dtype", ...) is None:
        del options["dtype"]
    if device is None:
        return _base.to(tensor, **options) if options else tensor
    if isinstance(device, torch.device) and device.type not in ("cpu", "cuda", "meta"):
        return _base.to(tensor, device, **options)
    return move(tensor, full(device), **options)


def _numpy(function: Any, tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    device = device_of(tensor)
    if device is not None and device.type == "cuda":
        devices.check()
        raise TypeError(
            f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory "
            "first."
        )
    return function(tensor, *arguments, **options)


# What Python asks for


def _type_of(tensor: torch.Tensor) -> torch.device:
    return device_of(tensor) or CPU


GETTERS = {
    torch.Tensor.device.__get__: _type_of,
    torch.Tensor.is_cuda.__get__: lambda tensor: _type_of(tensor).type == "cuda",
    torch.Tensor.is_cpu.__get__: lambda tensor: _type_of(tensor).type == "cpu",
    torch.Tensor.get_device: lambda tensor: _type_of(tensor).index if _type_of(tensor).type == "cuda" else -1,
    torch.Tensor.cpu: lambda tensor, *_, **__: move(tensor, CPU),
    torch.Tensor.to: _to,
    torch.Tensor.is_pinned: lambda tensor, *_: False,
    torch.Tensor.pin_memory: lambda tensor, *_: tensor.clone(),
}


def _cuda(tensor: torch.Tensor, device: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    return move(tensor, full("cuda" if device is None else device))


class Asking(TorchFunctionMode):
    """Takes what Python asks of PyTorch."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return function(*arguments, **options)  # the other mode's
        if (getter := GETTERS.get(function)) is not None:
            return getter(*arguments, **options)
        name = getattr(function, "__name__", "")
        if function is torch.Tensor.cuda:
            return _cuda(*arguments, **options)
        if name in ("numpy", "__array__"):
            return _numpy(function, *arguments, **options)
        if name == "__reduce_ex__":
            return function(*arguments, **options)  # its storage's mark is its location, as with `torch.save`
        if name == "is_shared" and _type_of(arguments[0]).type == "cuda":
            return True
        if name == "_parse_to":  # of `Module.to(device=…)`, which makes nothing
            return function(*arguments, **options)
        if options.get("device") is None:
            found = function(*arguments, **options)
            if not any(True for _ in tensors_in(arguments)) and name not in ("__set__", "__delete__"):
                for tensor in outputs_in(found):
                    if device_of(tensor) is None:
                        mark(tensor, CPU)
            if name == "__deepcopy__" and (device := device_of(arguments[0])) is not None:
                mark(found, device)
            return found
        return self._make(function, name, arguments, dict(options))

    def _make(self, function: Any, name: str, arguments: Any, options: dict[str, Any]) -> Any:
        """Make something on a device that is named."""
        device = full(options["device"])
        if device.type not in ("cpu", "cuda"):
            return function(*arguments, **options)
        generator = options.get("generator")
        if generator is not None and device.type == "cuda" and generator.device.type == "cpu":
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if device.type == "cuda":
            options["pin_memory"] = False
            if "pin_memory" not in str(getattr(function, "__text_signature__", "")):
                options.pop("pin_memory")
        if name == "as_tensor" and isinstance(arguments[0], torch.Tensor):
            return move(arguments[0], device, **{k: v for k, v in options.items() if k != "device"})
        options["device"] = CPU
        found = function(*arguments, **options)
        for tensor in outputs_in(found):
            mark(tensor, device)
        return found


# What every operator does


class Operating(TorchDispatchMode):
    """Sees every operator of a thread, also those of a backward pass and of C++."""

    supports_higher_order_operators = True
    """Those that call another operator, as DTensor's random numbers do: that one is then seen."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether those who look for modes of users leave it alone."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if isinstance(function, HigherOrderOperator):
            if (
                function.name() == "run_dtensor_rng_op"
            ):  # on CUDA it sets the generator for the operator; here: the CPU's
                _, _, function, *arguments = arguments
            with self:
                return function(*arguments, **options)
        if any(kind.__name__ == "FakeTensor" for kind in types):
            return function(*arguments, **options)  # its mode's, which comes after this one
        if any(kind not in PLAIN for kind in types):
            return NotImplemented
        namespace, name = function.namespace, function._schema.name.rpartition("::")[2]
        named = options.get("device")
        if named is not None and named.type == "cuda":
            named, options = full(named), {**options, "device": CPU}
        else:
            named = None  # to C++ everything is on the CPU: that says nothing
        given = [*tensors_in(arguments), *tensors_in(options)]
        if namespace in ("c10d", "_c10d_functional"):
            groups.refuse(name, arguments, given)
        found, unmarked, first = set(), [], None
        with _disabled():
            for number, tensor in enumerate(given):
                device = _marked(tensor)
                if number == 0:
                    first = device
                if device is None:
                    unmarked.append(tensor)
                elif device.type == "cuda" or tensor.dim():
                    found.add(device)
        is_read = name in ("_local_scalar_dense", "copy_", "_to_copy", "equal", "nonzero")
        if devices.broken and is_read and any(device.type == "cuda" for device in found):
            devices.check()
        if len(found) > 1 and name not in FREE and namespace == "aten":
            raise mixed(found)
        target = named or (first if first in found else None)
        target = target or next(iter(found), None)
        if target is not None and target.type == "cuda" and name not in FREE:
            for tensor in unmarked:
                if tensor.dim():
                    mark(tensor, target)
        try:
            if name == "_allgather_base_":  # for NCCL only the number of elements counts; gloo wants the shapes to fit
                arguments = (arguments[0].view(-1), arguments[1].reshape(-1), *arguments[2:])
            result = function(*arguments, **options)
        except IndexError:
            if os.environ.get("LABKIT_PRETENDED_ASSERT") and target is not None and target.type == "cuda":
                devices.break_context()
                raise devices_error() from None
            raise
        if target is None and given and not unmarked:
            target = CPU
        if target is not None:
            with _disabled():
                new = [tensor for tensor in outputs_in(result) if _marked(tensor) is None]
            for tensor in new:
                mark(tensor, target)
        return result


def devices_error() -> Exception:
    """Return what the first call after a failed kernel raises."""
    try:
        devices.check()
    except Exception as error:
        return error
    raise AssertionError("no kernel has failed")


# Files


def _location_of(storage: Any) -> str | None:
    device = getattr(getattr(storage, "_untyped_storage", storage), "pretended_device", None)
    return str(device) if device is not None and device.type == "cuda" else None


def _restore(storage: Any, location: str) -> Any:
    if not location.startswith("cuda"):
        return None
    if not torch.cuda.is_available():
        return None  # PyTorch's own then says so
    device = full(location)
    storage = storage.clone()
    storage.pretended_device = device
    return storage


# In every thread


def _enter() -> None:
    Operating().__enter__()
    Asking().__enter__()


def install() -> None:
    """Enter the modes in this thread, and in each that will be started."""
    torch.serialization.register_package(5, _location_of, _restore)
    run = threading.Thread.run

    @functools.wraps(run)
    def run_with_devices(self: threading.Thread) -> None:
        _enter()
        run(self)

    threading.Thread.run = run_with_devices  # type: ignore[method-assign]
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    @functools.wraps(bootstrap)
    def bootstrap_with_devices(self: threading.Thread) -> None:
        if type(self).run is not run_with_devices:  # a subclass with a `run` of its own
            _enter()
        bootstrap(self)

    threading.Thread._bootstrap_inner = bootstrap_with_devices  # type: ignore[attr-defined]
    _say_where_tensors_are()
    _keep_asking_in_backward()
    _enter()


def _say_where_tensors_are() -> None:
    """Have tensors say so also where the mode is off: in hooks that are called in the midst of an operator."""
    kind: Any = torch.Tensor
    real = kind.device  # of the class in C++, from which the one in Python inherits it

    def where(tensor: torch.Tensor) -> torch.device:
        is_other = type(tensor) not in PLAIN and _inner(tensor) is None
        return real.__get__(tensor) if is_other else _type_of(tensor)

    kind.device = property(where)
    kind.is_cuda = property(lambda tensor: tensor.device.type == "cuda")
    kind.is_cpu = property(lambda tensor: tensor.device.type == "cpu")
    kind.get_device = lambda tensor: tensor.device.index if tensor.device.type == "cuda" else -1
    kind.record_stream = lambda *_: None  # FSDP switches the modes off to call it
    wrapper = kind._make_wrapper_subclass

    def on_the_cpu(*arguments: Any, device: Any = None, **options: Any) -> torch.Tensor:
        """To C++ a tensor around another is where that one is."""
        is_cuda = device is not None and torch.device(device).type == "cuda"
        return wrapper(*arguments, device=CPU if is_cuda else device, **options)

    kind._make_wrapper_subclass = staticmethod(on_the_cpu)


def _keep_asking_in_backward() -> None:
    """Have hooks and `Function.backward` find the mode, which the call of `backward` has switched off."""
    run_backward = torch.autograd.graph._engine_run_backward

    def _engine_run_backward(*arguments: Any, **options: Any) -> Any:
        with Asking():
            return run_backward(*arguments, **options)

    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = _engine_run_backward
