"""Exercise: average the gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="03",
    title="Average the gradients",
    statement="""
    Every rank has called `backward` on samples of its own, with equal weights. Replace the gradient of each parameter
    by its mean over the ranks, in place, with `dist.all_reduce`. The weights stay as they are.

    A parameter that took no part in the loss has no gradient (`grad is None`), on every rank alike: leave it so.
    """,
    hints=(
        "`dist.all_reduce(t)` replaces `t` by the sum over the ranks. What is missing from the sum to the mean?",
        "`model.parameters()` gives all parameters, also those without a gradient.",
    ),
    why="The mean of the ranks' gradients, over equally many samples each, is the gradient of the whole batch; the sum "
    "would be a step n times as long.",
    allowed=("all_reduce",),
    imports=("import torch.distributed as dist",),
    cases=({"sizes": (3, 4, 2)}, {"sizes": (5, 1), "unused": True}, {"sizes": (2, 3, 3, 1), "unused": True}),
)


@EXERCISE.reference
def average_gradients(model):
    """Replace the gradient of every parameter of `model` by its mean over the ranks, in place."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _gradients(t: Trial, model: nn.Module, of: int) -> dict[str, torch.Tensor]:
    """Return the gradients that a rank begins with."""
    return {name: t.numbers(*p.shape, of=of, salt=name) for name, p in model.named_parameters() if "unused" not in name}


@EXERCISE.trial
def trial(t: Trial, sizes: tuple[int, ...], unused: bool = False) -> None:
    """Give a model gradients, call it, and compare with their mean."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))
    if unused:
        model.add_module("unused", nn.Linear(2, 2))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    given = [_gradients(t, model, rank) for rank in range(t.world_size)]
    for name, parameter in model.named_parameters():
        if name in given[t.rank]:
            parameter.grad = given[t.rank][name].clone()
    t.call(model)
    for name, parameter in model.named_parameters():
        t.require(torch.equal(parameter, weights[name]), f"the weights `{name}` have changed; only gradients should")
        if name not in given[0]:
            t.require(parameter.grad is None, f"`{name}.grad` was None and is no more: it had no part in the loss")
            continue
        total = torch.stack([gradients[name] for gradients in given]).sum(0)
        known = {"summed, not averaged?": total}
        t.equal(f"{name}.grad", parameter.grad, total / t.world_size, given[t.rank][name], known)


@EXERCISE.best
def best(world_size: int, sizes: tuple[int, ...], unused: bool = False) -> Cost:
    """Return one all-reduce of all gradients in one buffer."""
    count = sum(a * b + b for a, b in zip(sizes, sizes[1:], strict=False))
    return Cost.all_reduce(4 * count, world_size)
