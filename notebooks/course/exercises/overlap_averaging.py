"""Exercise: average while backward still computes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course.exercises.base import Exercise
from course.exercises.traffic import Event
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="03",
    title="Average while backward computes",
    statement="""
    What DDP does: begin to average a gradient as soon as `backward` has made it, while the layers before it are still
    computed. `overlap_averaging(model)` is called once. From then on, after every `loss.backward()`, the function
    that it returned is called (without arguments), and when that returns all gradients are the mean over the ranks.

    Use `dist.all_reduce(…, async_op=True)`, one for each gradient; the trace shows whether it began in time. The
    model is trained for several steps.
    """,
    hints=(
        "Register one hook with every parameter; it begins that parameter's all-reduce.",
        "With `async_op=True` the call returns at once, with something to `wait()` for. Keep it, with its parameter.",
        "In the returned function: wait for each, then divide; then forget them, for the next step has new ones.",
    ),
    why="The hook begins each all-reduce while earlier layers are still computed, and nothing is waited for "
    "before it is needed.",
    allowed=("all_reduce",),
    cases=({"sizes": (3, 4, 4, 2)}, {"sizes": (2, 5, 1)}),
)


@EXERCISE.reference
def overlap_averaging(model):
    """Have gradients averaged while backward runs; return the function that waits until all are."""
    begun = []

    def begin(parameter):
        begun.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))

    def finish():
        for parameter, work in begun:
            work.wait()
            parameter.grad /= dist.get_world_size()
        begun.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(begin)
    return finish


class _Marked(nn.Module):
    """Layers whose backward passes are noted among what the rank does."""

    def __init__(self, t: Trial, sizes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self._t = [t]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        for index, layer in enumerate(self.layers):
            if x.requires_grad:
                x.register_hook(
                    lambda _, i=index: self._t[0].traffic.events.append(Event(f"backward of layer {i}", None, 0))
                )
            x = layer(x).relu() + 0.1
        return x


def _gradients(t: Trial, model: nn.Module, sizes: tuple[int, ...], step: int, rank: int) -> dict[str, torch.Tensor]:
    x = t.numbers(3, sizes[0], of=rank, salt=f"step {step}") / 10
    found = torch.autograd.grad(model(x).pow(2).mean(), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), found, strict=True))


@EXERCISE.trial
def trial(t: Trial, sizes: tuple[int, ...]) -> None:
    """Train two steps, compare the gradients, and look into the trace."""
    model, plain = _Marked(t, sizes), _Marked(t, sizes)
    finish = t.call(model)
    t.require(callable(finish), f"returned a {type(finish).__name__}, expected the function that waits")
    for step in range(2):
        given = [_gradients(t, plain, sizes, step, rank) for rank in range(t.world_size)]
        t.traffic.forget()
        model.zero_grad()
        x = t.numbers(3, sizes[0], salt=f"step {step}") / 10
        loss = model(x).pow(2).mean()
        t.watch(loss.backward)
        begun = [event.kind for event in t.traffic.events]
        t.watch(finish)
        for name, parameter in model.named_parameters():
            total = torch.stack([gradients[name] for gradients in given]).sum(0)
            known = {"summed, not averaged?": total}
            what = f"{name}.grad in step {step}"
            t.equal(what, parameter.grad, total / t.world_size, given[t.rank][name], known)
        _in_time(t, begun, len(list(model.parameters())))


def _in_time(t: Trial, begun: list[str], gradients: int) -> None:
    last = max(index for index, kind in enumerate(begun) if kind.startswith("backward"))
    early = begun[:last].count("all_reduce")
    t.require(early, f"no all_reduce began before the last layer's backward ({begun[last]}): nothing overlaps")
    calls = t.traffic.count("all_reduce")
    t.require(calls == gradients, f"called all_reduce {calls} times in a step, expected {gradients}, once per gradient")
    t.require(
        len(t.traffic.works) == calls, "all_reduce without async_op=True: backward waits for it, nothing overlaps"
    )
    t.require("wait" not in begun, "waited within backward: nothing overlaps")
