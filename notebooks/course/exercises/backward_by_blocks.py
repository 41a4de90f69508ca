"""Exercise: a backward pass that computes every block once more."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from course.exercises.base import Exercise
from course.exercises.trial import Trial
from labkit import profiling

EXERCISE = Exercise(
    lesson="20",
    title="Recompute, block by block",
    statement="""
    Run a forward and a backward pass through `blocks`. At no time keep more than the input of each block, and what one
    single block saves for its backward pass. `gradient` is the gradient of the last block's output.

    The gradients are to be those of a plain pass. The blocks have dropout.
    """,
    hints=(
        "Inside `torch.no_grad()` a block saves nothing for the backward pass. Keep the input of each block.",
        "From the last block to the first: `given.detach().requires_grad_()`, compute the block once more, and "
        "`.backward(gradient)`. What is then in `given.grad` is the gradient for the block before.",
        "Dropout must draw the same random numbers the second time: `torch.get_rng_state()` before a block's first "
        "pass, `torch.set_rng_state(…)` before its second.",
    ),
    why="A block's input, and the state of the random numbers before it, are all that it needs to be computed again.",
    world_sizes=(),
    imports=("import torch",),
    cases=({"width": 6, "depth": 3}, {"width": 4, "depth": 1}, {"width": 5, "depth": 6}),
)


@EXERCISE.reference
def backward_by_blocks(blocks, x, gradient):
    """Return the gradient of `x`, (batch, width); the parameters' are in their `.grad`, as after backward."""
    inputs, states = [], []
    with torch.no_grad():
        for block in blocks:
            inputs.append(x)
            states.append(torch.get_rng_state())
            x = block(x)
    while inputs:
        given = inputs.pop().detach().requires_grad_()
        torch.set_rng_state(states.pop())
        blocks[len(inputs)](given).backward(gradient)
        gradient = given.grad
    return gradient


def blocks_of(width: int, depth: int) -> nn.Sequential:
    """Return blocks of which each keeps several times its input, and drops some numbers."""
    wide = 4 * width
    each = (nn.Sequential(nn.Linear(width, wide), nn.Tanh(), nn.Dropout(0.3), nn.Linear(wide, width)) for _ in range(9))
    return nn.Sequential(*list(each)[:depth])


@EXERCISE.trial
def trial(t: Trial, width: int, depth: int) -> None:
    """Call it, and compare with a plain pass from the same random numbers."""
    with torch.random.fork_rng(devices=[]):
        _compare(t, width, depth)


def _compare(t: Trial, width: int, depth: int) -> None:
    torch.manual_seed(t.case)
    blocks, x, gradient = blocks_of(width, depth), torch.randn(7, width), torch.randn(7, width)
    with profiling.Activations(blocks.parameters()) as one:
        kept = blocks[0](x.clone().requires_grad_())
    del kept
    given, handed = x.clone(), gradient.clone()

    def once(call: Any) -> Any:
        blocks.zero_grad()
        torch.manual_seed(t.case)
        return call(blocks, given, handed)

    known = {
        "dropout has dropped other numbers the second time": once(draws_anew),
        "that is the gradient of the last block's output": gradient,
    }
    expected = once(_plain)
    parameters = [p.grad.clone() for p in blocks.parameters() if p.grad is not None]
    with profiling.Activations(blocks.parameters()) as held:
        found = once(t.call)
    t.equal("the gradient of x", found, expected, None, known)
    for (name, parameter), right in zip(blocks.named_parameters(), parameters, strict=True):
        t.require(parameter.grad is not None, f"`{name}.grad` is None, expected the parameter's gradient")
        t.equal(f"{name}.grad", parameter.grad, right)
    t.unchanged("x", given, x)
    t.unchanged("gradient", handed, gradient)
    most, limit = held.most, one.most
    t.require(
        most <= limit, f"{most:,} B were kept for the backward pass at once, one block leaves {limit:,} B: all at once?"
    )


def _plain(blocks: Any, x: Any, gradient: Any) -> Any:
    x = x.clone().requires_grad_()
    blocks(x).backward(gradient)
    return x.grad


def draws_anew(blocks, x, gradient):
    """No state of the random numbers."""
    inputs = []
    with torch.no_grad():
        for block in blocks:
            inputs.append(x)
            x = block(x)
    for block, given in zip(reversed(blocks), reversed(inputs), strict=True):
        given = given.clone().requires_grad_()
        block(given).backward(gradient)
        gradient = given.grad
    return gradient
