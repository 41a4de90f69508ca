"""The random states of a process."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch


def random_state(is_plain: bool = True) -> dict[str, Any]:
    """Return the state of every generator that training code draws from without naming one.

    With `is_plain=False`, NumPy's is an array, for which `plain` makes a list later: that takes longer than all else.
    """
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return plain(state) if is_plain else state


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state that `torch.load` reads back."""
    if "numpy" not in state:
        return state
    kind, keys, *rest = state["numpy"]
    return {**state, "numpy": (kind, list(map(int, keys)), *rest)}


def set_random_state(state: dict[str, Any]) -> None:
    """Set what `random_state` gave; GPUs by their index, as far as they are there."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        importlib.import_module("numpy").random.set_state(state["numpy"])
    for device, cuda in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, device)
