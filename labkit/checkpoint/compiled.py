"""The names of a module's weights where `torch.compile` has wrapped parts of it: saved as if it had not."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

COMPILED = "_orig_mod."
"""What `torch.compile` puts before the names of a part that it wraps."""


def without_compiled(state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's state with the names that it would have if no part of it were compiled."""
    if not any(COMPILED in str(key) for key in state):
        return state
    plain: Any = type(state)((plain_name(key), value) for key, value in state.items())
    if hasattr(state, "_metadata"):
        metadata = state._metadata.items()
        plain._metadata = OrderedDict((plain_name(f"{key}.")[:-1], value) for key, value in metadata)
    return plain if len(plain) == len(state) else state


def with_compiled(state: dict[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Return a state with a module's own names, whether or not parts of the module are compiled."""
    names = {plain_name(key): key for key in module.state_dict()}
    if all(name == key for name, key in names.items()) and not any(COMPILED in key for key in state):
        return state
    named: Any = type(state)((names.get(plain_name(key), key), value) for key, value in state.items())
    if metadata := getattr(state, "_metadata", None):
        modules = [name for name, _ in module.named_modules()]
        named._metadata = OrderedDict((name, metadata.get(plain_name(f"{name}.")[:-1], {})) for name in modules)
    return named if len(named) == len(state) else state


def plain_name(key: str) -> str:
    """Return the name that a parameter would have if no part of its module were compiled."""
    return key.replace(COMPILED, "")
