"""What a rank's first step needs, got while the rank has no work."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from labkit import plugins


def get_ready() -> None:
    """Take the first faults of a first step, and import what comes with a job."""
    get_warm()
    importlib.import_module("labkit.debugger.hooks")
    for folder in plugins.__path__:
        for hooks in Path(folder).glob("*/hooks.py"):  # not asked of the packages: some are the notebook's side alone
            importlib.import_module(f"labkit.plugins.{hooks.parent.name}.hooks")


def get_warm() -> None:
    """Take the first faults of a first step."""
    weight = torch.nn.Parameter(torch.zeros(8, 8))  # not a layer: that would draw random numbers
    optimizer = torch.optim.SGD([weight], lr=0.0)
    torch.nn.functional.linear(torch.zeros(4, 8), weight).sum().backward()
    optimizer.step()
