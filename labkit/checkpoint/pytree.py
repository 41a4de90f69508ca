"""A state as a tree of dicts, lists and tuples, with tensors and plain values as its leaves.

Not `torch.utils._pytree`, which is private, because of two promises that tests hold. What `torch.load` with
`weights_only=True` would not read back (a named tuple, a defaultdict) is refused when it is saved: here it is a leaf.
And a module's `state_dict()` keeps its `_metadata`, by which modules know which version of themselves wrote it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

KeyPath = tuple[str | int, ...]
"""Where a leaf is: ("optimizer", "state", 0, "momentum_buffer"). Plain values, so that a checkpoint can hold it."""


def tree_map_with_path(function: Callable[[KeyPath, Any], Any], tree: Any, path: KeyPath = ()) -> Any:
    """Return a copy of a tree with every leaf replaced by `function(path, leaf)`."""
    if type(tree) in (dict, OrderedDict):
        mapped = copy.copy(tree)  # with `_metadata`
        for key, inner in tree.items():
            mapped[key] = tree_map_with_path(function, inner, (*path, key))
        return mapped
    if type(tree) in (list, tuple):
        return type(tree)(tree_map_with_path(function, inner, (*path, index)) for index, inner in enumerate(tree))
    return function(path, tree)


def keystr(path: KeyPath) -> str:
    """Return a path as a reader would write it: optimizer.state.0.momentum_buffer."""
    return ".".join(map(str, path))
