"""Exercise: forward and backward over two stages."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from course.exercises.base import POINT_TO_POINT, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="05",
    title="Forward and backward over two stages",
    statement="""
    A network is cut in two: the first stage has `model` and the `inputs`, the second its own `model` and the `targets`
    (what a rank does not have is None). `peer` is the other's rank. Do one forward and one backward pass with `send`
    and `recv`: afterwards every parameter of both has its gradient. The second stage returns the loss,
    `loss_fn(outputs, targets)`, as a float, the first None.

    The activations have the shape `hidden_shape`, and so has their gradient. Receive each on the device of the rank's
    data.
    """,
    hints=(
        "`send` carries numbers, not the graph of operations: what the second stage receives is a new leaf, and must "
        "ask for a gradient.",
        "After `loss.backward()` in the second stage the gradient of what it received is in `hidden.grad`.",
        "The first stage goes on with `hidden.backward(gradient)`.",
    ),
    why="The gradient with respect to what was sent is all that the first stage needs to know of the second.",
    allowed=POINT_TO_POINT,
    world_sizes=(2,),
    cases=({"batch": 5, "width": 3}, {"batch": 1, "width": 4}),
)


@EXERCISE.reference
def two_stages(model, inputs, targets, hidden_shape, peer, loss_fn):
    """Do one step with the rank `peer`; return the loss where `targets` are, None where `inputs` are."""
    if targets is None:
        hidden = model(inputs)
        dist.send(hidden.detach(), peer)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, peer)
        hidden.backward(gradient)
        return None
    hidden = torch.empty(hidden_shape, device=targets.device)
    dist.recv(hidden, peer)
    hidden.requires_grad_()
    loss = loss_fn(model(hidden), targets)
    loss.backward()
    dist.send(hidden.grad, peer)
    return loss.item()


@EXERCISE.trial
def trial(t: Trial, batch: int, width: int) -> None:
    """Call it, then compare with the whole network on one process."""
    torch.manual_seed(batch)
    stages = [nn.Sequential(nn.Linear(4, width), nn.Tanh()), nn.Sequential(nn.Linear(width, 2))]
    inputs, targets = t.numbers(batch, 4, of=0) / 50, t.numbers(batch, 2, of=1) / 50
    whole = copy.deepcopy(stages)
    loss = mse_loss(whole[1](whole[0](inputs)), targets)
    loss.backward()
    stage = stages[t.rank]
    given = (inputs, None) if t.rank == 0 else (None, targets)
    found = t.call(stage, *given, (batch, width), 1 - t.rank, mse_loss)
    for (name, parameter), true in zip(stage.named_parameters(), whole[t.rank].parameters(), strict=True):
        what = f"model.{name}.grad"
        t.require(parameter.grad is not None, f"`{what}` is None: backward has not come to this stage")
        assert true.grad is not None
        t.equal(what, parameter.grad, true.grad)
    if t.rank == 0:
        t.same("returned", found, None)
    else:
        t.require(isinstance(found, float), f"returned a {type(found).__name__}, expected the loss as a float")
        t.equal("loss", torch.tensor(found), loss.detach())
