"""Exercise: what must be saved."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="14",
    title="What must be saved",
    statement="""
    Return a dict from which training on a CPU goes on as if it had never stopped, bit for bit. It is written to a
    file a little later, when training already goes on: what it holds must not change meanwhile.

    It is resumed with a new network, optimizer and scheduler: each takes what is under `"model"`, `"optimizer"` and
    `"scheduler"` by `load_state_dict`; `"rng"` goes to `torch.set_rng_state`, and `"epoch"` is the first epoch to do.
    What the dict lacks is not put back. `model` is wrapped as by DDP: `model.module` is the network.
    """,
    hints=(
        "Whose keys begin with `module.`? The network's own do not.",
        "SGD with momentum remembers, a scheduler counts, dropout draws random numbers.",
        "`state_dict()` refers to the live tensors: `copy.deepcopy` takes a picture of them.",
        "`epoch` has just been done.",
    ),
    why="Whatever the next step reads is state: weights, momentum, learning rate, random numbers, and where one is.",
    world_sizes=(),
    imports=("import copy", "", "import torch"),
    cases=({"epochs": 3, "stop_after": 0}, {"epochs": 5, "stop_after": 2}),
)


@EXERCISE.reference
def training_state(model, optimizer, scheduler, epoch):
    """Return {"model", "optimizer", "scheduler", "rng", "epoch"}; `epoch` (0, 1, …) has just been done."""
    return copy.deepcopy(
        {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "epoch": epoch + 1,
        }
    )


class _Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


def _new() -> tuple[nn.Module, torch.optim.SGD, torch.optim.lr_scheduler.StepLR]:
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    return network, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def _epoch(network: nn.Module, optimizer: Any, scheduler: Any) -> float:
    """Train an epoch of three steps, and return the last loss."""
    loss = torch.zeros(())
    for step in range(3):
        x = torch.linspace(-1, 1, 20).view(5, 4) * (step + 1) / 3
        loss = (network(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    return loss.item()


def _pickled(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@EXERCISE.trial
def trial(t: Trial, epochs: int, stop_after: int) -> None:
    """Train, ask for the state on the way, train on; resume from the state, and compare."""
    with torch.random.fork_rng(devices=[]):
        _compare(t, epochs, stop_after)


def _compare(t: Trial, epochs: int, stop_after: int) -> None:
    torch.manual_seed(3)
    network, optimizer, scheduler = _new()
    losses, state, at_first = [], None, b""
    for epoch in range(epochs):
        losses.append(_epoch(_Wrapped(network), optimizer, scheduler))
        if epoch == stop_after:
            state = t.call(_Wrapped(network), optimizer, scheduler, epoch)
            t.require(isinstance(state, dict), f"returned a {type(state).__name__}, expected a dict")
            at_first = _pickled(state)
    assert state is not None
    same = _pickled(state) == at_first
    t.require(same, "what the dict holds has changed while training went on: state_dict() refers to the live tensors")
    torch.manual_seed(99)
    network, optimizer, scheduler = _new()
    _put_back(t, state, network, optimizer, scheduler)
    first = state.get("epoch", 0)
    t.require(
        first == stop_after + 1, f"`epoch` is {first!r}, expected {stop_after + 1}: the first that is still to be done"
    )
    for epoch in range(first, epochs):
        loss = _epoch(network, optimizer, scheduler)
        if loss != losses[epoch]:
            missing = [f'"{key}"' for key in ("model", "optimizer", "scheduler", "rng") if key not in state]
            why = f"; the dict has no {', '.join(missing)}" if missing else ""
            t.fail(f"after resuming, the loss of epoch {epoch} is {loss:.6g}, uninterrupted {losses[epoch]:.6g}{why}")


def _put_back(t: Trial, state: dict[str, Any], network: Any, optimizer: Any, scheduler: Any) -> None:
    for key, target in (("model", network), ("optimizer", optimizer), ("scheduler", scheduler)):
        if key not in state:
            continue
        if key == "model" and any(name.startswith("module.") for name in state[key]):
            t.fail("the keys under `model` begin with `module.`, and the bare network has no such parameters")
        try:
            target.load_state_dict(state[key])
        except Exception as error:
            t.fail(f"load_state_dict refuses what is under `{key}`: {str(error).splitlines()[0]}")
    if "rng" in state:
        torch.set_rng_state(state["rng"])
