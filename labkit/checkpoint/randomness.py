"""The random states of a process."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Return the state of every generator that training code draws from without naming one."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set what `random_state` gave; GPUs by their index, as far as they are there."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        importlib.import_module("numpy").random.set_state(state["numpy"])
    for device, cuda in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, device)
