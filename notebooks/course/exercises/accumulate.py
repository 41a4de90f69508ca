"""Exercise: accumulate gradients, and send them once."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from course.exercises.base import Exercise
from course.exercises.traffic import Event
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="08",
    title="Accumulate, and send once",
    statement="""
    `model` is a `DistributedDataParallel`, `batches` a list of equally large micro-batches (inputs, targets). Do a
    forward and a backward pass for each, so that afterwards every gradient is the mean over all micro-batches of all
    ranks. DDP sends gradients in every `backward`, except within `with model.no_sync():`. Have it send
    once.
    """,
    hints=(
        "Gradients add up over backward passes: what turns the sum over micro-batches into their mean?",
        "Only the last micro-batch sends; it sends what has been accumulated until then.",
        "`no_sync` counts when the *forward* pass runs: a `backward` alone inside it still sends.",
    ),
    why="DDP averages whatever is in `grad` by then, so one exchange at the end gives the same as one in each pass.",
    allowed=(),
    imports=("import torch", "from torch.nn.functional import mse_loss"),
    cases=({"micro_batches": 4, "rows": 3}, {"micro_batches": 1, "rows": 2}),
)


@EXERCISE.reference
def accumulate(model, batches):
    """Leave in every `parameter.grad` the mean of mse_loss's gradients over all micro-batches of all ranks."""
    *first, (inputs, targets) = batches
    with model.no_sync():
        for others, aims in first:
            loss = mse_loss(model(others), aims) / len(batches)
            loss.backward()
    loss = mse_loss(model(inputs), targets) / len(batches)
    loss.backward()


@EXERCISE.trial
def trial(t: Trial, micro_batches: int, rows: int) -> None:
    """Call it with a DDP model, compare the gradients, and count what DDP sent."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    module = copy.deepcopy(plain)
    model = DistributedDataParallel(module)

    def counting(state, bucket):  # no annotations: DDP refuses those that are texts
        t.traffic.is_watched = False
        future = default_hooks.allreduce_hook(None, bucket)
        t.traffic.is_watched = True
        size = bucket.buffer().nbytes * (t.world_size - 1) // t.world_size * 2
        t.traffic.events.append(Event("all_reduce", None, size))
        return future

    model.register_comm_hook(None, counting)
    batches = [[_batch(t, rank, i, rows) for i in range(micro_batches)] for rank in range(t.world_size)]
    t.call(model, batches[t.rank])
    sums = [torch.zeros_like(p) for p in plain.parameters()]
    own = [torch.zeros_like(p) for p in plain.parameters()]
    for rank, several in enumerate(batches):
        for inputs, targets in several:
            found = torch.autograd.grad(mse_loss(plain(inputs), targets), list(plain.parameters()))
            sums = [one + other for one, other in zip(sums, found, strict=True)]
            if rank == t.rank:
                own = [one + other for one, other in zip(own, found, strict=True)]
    for (name, parameter), total, mine in zip(module.named_parameters(), sums, own, strict=True):
        what = f"{name}.grad"
        t.require(parameter.grad is not None, f"`{what}` is None: no backward pass?")
        known = {}
        known["the sum over micro-batches, not their mean"] = total / t.world_size
        known["this rank's alone: nothing was sent"] = mine / micro_batches
        expected = total / t.world_size / micro_batches
        assert parameter.grad is not None
        t.equal(what, parameter.grad, expected, None, known)
    calls = t.traffic.count("all_reduce")
    t.require(calls <= 1, f"DDP sent the gradients {calls} times, expected once")


def _batch(t: Trial, rank: int, index: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return t.numbers(rows, 3, of=rank, salt=f"in {index}") / 50, t.numbers(rows, 2, of=rank, salt=f"out {index}") / 50
