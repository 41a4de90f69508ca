"""Exercise: the two functions around a layer that is cut, with their backward passes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="21",
    title="Megatron's f and g",
    statement="""
    Two linear layers are cut, columns and then rows: a rank computes `y = g(relu(f(x) @ first.T) @
    second.T)` with its part of the hidden units; `x` is whole on every rank. Return the functions `f`
    and `g`, such that `y` is the whole output on every rank, and after `backward` the gradients of `x`,
    `first` and `second` are those of one process. Only the forward and the backward pass of `f` and `g`
    communicate: one `dist.all_reduce` in each pass.

    Write each as a `torch.autograd.Function`, and return its `apply`.
    """,
    hints=(
        "Forward, every rank has a part of a sum: must it be added up before the layers or after them?",
        "Backward, every rank has the contribution of its own hidden units to the gradient of `x`; these add up, too. "
        "The gradient of `y` is the same on every rank already.",
        "`f` does nothing forward and all-reduces backward; `g` all-reduces forward and does nothing backward.",
        "Do not all-reduce a tensor in place that others may still need: `clone` it first.",
    ),
    why="What is copied to all ranks forward is added up backward, and what is added up forward is copied backward: f "
    "and g are each other's mirror image.",
    allowed=("all_reduce",),
    cases=({"batch": 3, "features": 4, "hidden": 2}, {"batch": 1, "features": 2, "hidden": 5}),
)


@EXERCISE.reference
def f_and_g():
    """Return (f, g): functions of one tensor, for what goes into the cut layers and for what comes out of them."""

    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            total = gradient.clone()
            dist.all_reduce(total)
            return total

    class G(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            total = x.clone()
            dist.all_reduce(total)
            return total

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return F.apply, G.apply


@EXERCISE.trial
def trial(t: Trial, batch: int, features: int, hidden: int) -> None:
    """Train with them, and compare with the layers in one piece."""
    n = t.world_size
    inputs = (t.numbers(batch, features, of=0, salt="inputs") - 50) / 10
    firsts = [(t.numbers(hidden, features, of=rank, salt="first") - 50) / 10 for rank in range(n)]
    seconds = [(t.numbers(features, hidden, of=rank, salt="second") - 50) / 10 for rank in range(n)]
    upstream = (t.numbers(batch, features, of=0, salt="upstream") - 50) / 10
    whole = [each.clone().requires_grad_() for each in (inputs, torch.cat(firsts), torch.cat(seconds, 1))]
    expected = torch.relu(whole[0] @ whole[1].T) @ whole[2].T
    expected.backward(upstream)
    x, first, second = (each.clone().requires_grad_() for each in (inputs, firsts[t.rank], seconds[t.rank]))
    pair = t.call()
    t.require(isinstance(pair, (tuple, list)) and len(pair) == 2, "returned no pair of functions, (f, g)")
    f, g = pair
    part = t.watch(lambda: torch.relu(f(x) @ first.T) @ second.T)
    t.require(t.traffic.count("all_reduce") == 0, "f all-reduces forward: its input is whole already")
    own = part.detach().clone()
    y = t.watch(lambda: g(part))
    known = {"this rank's hidden units only: who adds up?": own}
    t.equal("y", y, expected.detach(), None, known)
    t.unchanged("what g was given", part.detach(), own)
    t.require(t.traffic.count("all_reduce") <= 1, "more than one all-reduce forward")
    given = upstream.clone()
    t.watch(lambda: y.backward(given))
    t.unchanged("the gradient that g was given", given, upstream)
    rows = slice(t.rank * hidden, (t.rank + 1) * hidden)
    of_x, of_first, of_second = (each.grad for each in whole)
    assert of_x is not None
    assert of_first is not None
    assert of_second is not None
    wanted = {"first": of_first[rows], "second": of_second[:, rows], "x": of_x}
    for (name, want), tensor in zip(wanted.items(), (first, second, x), strict=True):
        t.require(tensor.grad is not None, f"`{name}.grad` is None: the graph is cut")
        known = {}
        known["g's gradient was added up, though every rank has all of it"] = n * want
        if name == "x":
            hidden_gradient = (upstream @ seconds[t.rank]) * (inputs @ firsts[t.rank].T > 0)
            known["what this rank's hidden units contribute, only: who adds up backward?"] = (
                hidden_gradient @ firsts[t.rank]
            )
        t.equal(f"{name}.grad", tensor.grad, want, None, known, tolerance=1e-4)
    calls = t.traffic.count("all_reduce")
    t.require(calls <= 2, f"called all_reduce {calls} times, expected twice: once forward, once backward")


@EXERCISE.best
def best(world_size: int, batch: int, features: int, hidden: int) -> Cost:
    """Return an all-reduce of the outputs, and one of the inputs' gradients."""
    return Cost.all_reduce(4 * batch * features, world_size, calls=2)
