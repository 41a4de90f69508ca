"""Nested dicts, lists and tuples with tensors as their leaves, which is what a state is."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Place = tuple[str | int, ...]
"""Where a tensor is: ("optimizer", "state", 0, "momentum_buffer")."""


def map_leaves(value: Any, change: Callable[[Place, Any], Any], place: Place) -> Any:
    """Give a copy of nested dicts, lists and tuples with every leaf changed."""
    if type(value) in (dict, OrderedDict):
        changed = copy.copy(value)  # with what a module's state_dict carries as an attribute
        for key, inner in value.items():
            changed[key] = map_leaves(inner, change, (*place, key))
        return changed
    if type(value) in (list, tuple):
        return type(value)(map_leaves(inner, change, (*place, index)) for index, inner in enumerate(value))
    return change(place, value)


def digest_of(value: Any) -> str:
    """Give the SHA-256 of a nested value, bit by bit."""
    sha = hashlib.sha256()

    def add(place: Place, leaf: Any) -> None:
        sha.update(repr(place).encode())
        if isinstance(leaf, Tensor):
            sha.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            sha.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
        else:
            sha.update(repr(leaf).encode())

    map_leaves(value, add, ())
    return sha.hexdigest()


def dotted(place: Place) -> str:
    """Write a place as a reader would: optimizer.state.0.momentum_buffer."""
    return ".".join(map(str, place))
