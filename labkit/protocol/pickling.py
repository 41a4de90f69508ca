"""Pickling by value what travels between notebook and ranks, and saying what of it cannot travel."""

from __future__ import annotations

import functools
import importlib
import io
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cloudpickle

from labkit.protocol.pages import more


class _Pickler(cloudpickle.Pickler):
    """Sends modules of a type of their own, such as `torch.backends.cudnn`, by name, as any other module."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and type(value) is not ModuleType and sys.modules.get(value.__name__) is value:
            return importlib.import_module, (value.__name__,)
        return super().reducer_override(value)


def dumps(value: Any) -> bytes:
    """Pickle by value; `cloudpickle.loads` reads it. Raises what the value raises that cannot be pickled."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


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
    """Pack what is to reach the notebook. Raises ValueError if that cannot be."""
    try:
        return dumps(result)
    except Exception as error:
        raise ValueError(
            f"{what} a {type(result).__name__} that cannot be sent to the notebook ({error}). "
            f"Return plain values, tensors or a state_dict instead\n{more('cannot_be_sent')}"
        ) from error
