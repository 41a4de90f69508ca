"""A training function changed from outside, to find out what makes two of them differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook

KINDS: dict[str, type[nn.Module] | tuple[()]] = {"dropout": _DropoutNd, "BatchNorm": _BatchNorm, "low precision": ()}
"""What can be taken away, and which modules that switches to evaluation."""


def without(function: Callable[..., Any], *what: str) -> Callable[..., Any]:
    """Return a training function that trains as `function` does, without some sources of difference.

    >>> labkit.compare({"one process": course.without(train, "dropout"), "DDP": course.without(train_ddp, "dropout")})

    Args:
        function: a training function, which makes its network itself.
        what: "dropout", whose masks differ by rank; "BatchNorm", whose statistics are those of the rank's part of the
            batch, and are then fixed; "low precision": numbers then have 64 bits unless the function says otherwise.

    Raises ValueError for anything else.
    """
    if unknown := set(what) - set(KINDS):
        raise ValueError(f"known are {', '.join(KINDS)}; got {', '.join(sorted(unknown))}")

    def changed(worker: Any, *args: Any, **named: Any) -> Any:
        def change(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
            if any(isinstance(module, KINDS[each]) for each in what):
                module.eval()
            if "low precision" not in what:
                return None
            return tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

        dtype, hook = torch.get_default_dtype(), register_module_forward_pre_hook(change)
        try:
            torch.set_default_dtype(torch.float64 if "low precision" in what else dtype)
            return function(worker, *args, **named)
        finally:
            hook.remove()
            torch.set_default_dtype(dtype)

    changed.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return changed
