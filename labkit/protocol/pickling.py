"""Pickling by value what travels between notebook and ranks, and saying what of it cannot travel."""

from __future__ import annotations

import builtins
import functools
import getpass
import importlib
import io
import pickle
import sys
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

import cloudpickle
import torch

from labkit.protocol.pages import more


class _Pickler(cloudpickle.Pickler):
    """Sends modules of a type of their own, such as `torch.backends.cudnn`, by name, as any other module."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and type(value) is not ModuleType and sys.modules.get(value.__name__) is value:
            return importlib.import_module, (value.__name__,)
        if (instead := _in_a_script(value)) is not None:
            return getattr, instead
        return super().reducer_override(value)


class _ResultPickler(_Pickler):
    """Sends what the notebook can load: tensors of the CPU, for it may have no GPU, and a DDP model without its wrapper.

    The wrapper belongs to a process group, and the notebook is in none.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.TypedStorage):  # what a tensor is made of, in pickles
            storage = value._untyped_storage
            if (host := to_host(storage)) is not storage:
                return torch.TypedStorage(wrap_storage=host, dtype=value.dtype, _internal=True).__reduce__()
        parallel = sys.modules.get("torch.nn.parallel")
        if parallel is not None and isinstance(value, parallel.DistributedDataParallel):
            return _unwrapped, (value.module,)
        return super().reducer_override(value)


def to_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return the storage, or a copy on the CPU of one that only a process with its device could load."""
    return storage if storage.device.type in ("cpu", "meta") else storage.cpu()


def _unwrapped(model: Any) -> Any:
    return model


def _in_a_script(value: Any) -> tuple[ModuleType, str] | None:
    """Return what a script has in the place of something of IPython's: (module, name)."""
    if type(value).__module__ == "IPython.core.autocall":  # `exit` and `quit`
        return builtins, "exit"
    is_kernels = isinstance(value, MethodType) and type(value.__self__).__module__.startswith("ipykernel.")
    if is_kernels and value.__name__ == "getpass":
        return getpass, "getpass"  # a cell that imports it by its name gets the kernel's
    return None


def dumps(value: Any, pickler: type[_Pickler] = _Pickler) -> bytes:
    """Pickle by value; `cloudpickle.loads` reads it. Raises what the value raises that cannot be pickled."""
    with io.BytesIO() as file:
        pickler(file).dump(value)
        return file.getvalue()


class _Unpickler(pickle.Unpickler):
    """Puts tensors where `map_location` says, as `torch.load` does."""

    def __init__(self, blob: bytes, map_location: Any) -> None:
        super().__init__(io.BytesIO(blob))
        self._map_location = map_location

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return self._load_storage
        return super().find_class(module, name)

    def _load_storage(self, blob: bytes) -> Any:
        return torch.load(io.BytesIO(blob), map_location=self._map_location, weights_only=False)


def loads(blob: bytes, map_location: Any = None) -> Any:
    """Return what `dumps` has packed. Raises whatever unpickling raises.

    `map_location` is where tensors go, as `torch.load` takes it; None leaves them where they were.
    """
    return cloudpickle.loads(blob) if map_location is None else _Unpickler(blob, map_location).load()


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name by which the reader knows a function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pack a call for the ranks. Raises ValueError that names what cannot be sent."""
    try:
        return dumps((fn, args, kwargs))
    except Exception as error:
        from labkit.protocol import plugins  # not above: a rank packs no calls

        why = plugins.first("unsendable", fn, args, kwargs) or error
        raise ValueError(f"{name_of(fn)} cannot be sent to the ranks: {why}\n{more('cannot_be_sent')}") from error


def pack_result(result: Any, what: str = "the function returned") -> bytes:
    """Pack what is to reach the notebook: tensors on the CPU, a DDP model without its wrapper.

    Raises ValueError if that cannot be.
    """
    try:
        return dumps(result, _ResultPickler)
    except Exception as error:
        instead = "plain values, tensors or a state_dict"
        if "ProcessGroup" in str(error):  # of a sharded model
            instead = (
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
            )
        raise ValueError(
            f"{what} a {type(result).__name__} that cannot be sent to the notebook ({error}). "
            f"Return {instead} instead\n{more('cannot_be_sent')}"
        ) from error
