"""Exercise: FSDP's units by hooks: gather, free, gather again, reduce-scatter, and prefetch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course.exercises.base import Cost, Exercise, ring_bytes
from course.exercises.traffic import Event
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="20",
    title="FSDP's units, by hooks",
    statement="""
    `units` are modules that follow each other, with one `weight` each, whose storage is empty: its
    `weight.untyped_storage()` has 0 bytes. `shards[i]` is this rank's part of unit i's weight, flat.
    Complete the hooks, such that `units` compute forward and backward on every rank as if they were whole.
    Before its forward and before its backward pass a unit all-gathers its weight, and then begins to
    gather the next one to be used, while it computes itself. After each pass its storage is empty
    again. After backward `shards[i].grad` is this rank's part of the mean gradient, and the weight has
    no `grad`. The units train for several steps.
    """,
    hints=(
        "Four hooks: `register_forward_pre_hook`, `register_forward_hook` and `register_full_backward_pre_hook` of the "
        "unit, and `register_post_accumulate_grad_hook` of its weight, which runs when its gradient is complete.",
        "`weight.untyped_storage().resize_(weight.nbytes)` makes room, `resize_(0)` frees it. Gather into "
        "`weight.data.view(-1)`: autograd does not track what is written through `.data`.",
        "Begin each gather with `async_op=True`, keep the work by the unit's number, and `wait()` before the unit "
        "computes. Forward unit i + 1 is next, backward unit i − 1.",
        "`shards[i].grad = torch.empty_like(shards[i])` first; then `reduce_scatter_tensor(shards[i].grad, "
        "gradient.flatten())` adds up. Divide by the number of ranks.",
    ),
    why="A rank holds two units at most, the one that computes and the one that is being gathered; all others exist in "
    "shards only. `fully_shard` registers such hooks, too.",
    allowed=("all_gather_into_tensor", "reduce_scatter_tensor"),
    given={
        "body": '''

        def before(i, following):
            """Unit i is about to compute, and then unit `following`, if it exists."""
            ...

        def after_forward(i):
            """Unit i has computed."""
            ...

        def after_backward(i):
            """`units[i].weight.grad` is complete, and the weight is not needed any more."""
            ...

        for i, unit in enumerate(units):
            unit.register_forward_pre_hook(lambda *_, i=i: before(i, i + 1))
            unit.register_forward_hook(lambda *_, i=i: after_forward(i))
            unit.register_full_backward_pre_hook(lambda *_, i=i: before(i, i - 1))
            unit.weight.register_post_accumulate_grad_hook(lambda _, i=i: after_backward(i))
        '''
    },
    cases=({"units": 3, "rows": 1, "batch": 2}, {"units": 2, "rows": 2, "batch": 1}),
)


@EXERCISE.reference
def sharded_units(units, shards):
    """Register hooks, so that the units compute, though between their passes each rank has only `shards`."""
    gathers = {}

    def gather(i):
        if i in range(len(units)) and i not in gathers:
            weight = units[i].weight.data
            weight.untyped_storage().resize_(weight.nbytes)
            gathers[i] = dist.all_gather_into_tensor(weight.view(-1), shards[i].data, async_op=True)

    def before(i, following):
        gather(i)
        gathers[i].wait()
        gather(following)

    def after_forward(i):
        del gathers[i]
        units[i].weight.untyped_storage().resize_(0)

    def after_backward(i):
        shards[i].grad = torch.empty_like(shards[i])
        dist.reduce_scatter_tensor(shards[i].grad, units[i].weight.grad.flatten())
        shards[i].grad /= dist.get_world_size()
        units[i].weight.grad = None
        after_forward(i)

    for i, unit in enumerate(units):
        unit.register_forward_pre_hook(lambda *_, i=i: before(i, i + 1))
        unit.register_forward_hook(lambda *_, i=i: after_forward(i))
        unit.register_full_backward_pre_hook(lambda *_, i=i: before(i, i - 1))
        unit.weight.register_post_accumulate_grad_hook(lambda _, i=i: after_backward(i))


class _Unit(nn.Module):
    """A linear layer whose passes say what they find."""

    def __init__(self, number: int, watch: _Watch, size: int) -> None:
        super().__init__()
        self.number, self._watch = number, [watch]
        self.weight = nn.Parameter(torch.zeros(size, size))
        self.weight.untyped_storage().resize_(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight."""
        found: torch.Tensor = _Product.apply(x, self.weight, self.number, self._watch[0])
        return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, number: int, watch: _Watch) -> torch.Tensor:
        watch.look("forward", number)
        ctx.save_for_backward(x)
        ctx.others = weight, number, watch
        return x @ weight.detach().T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        weight, number, watch = ctx.others
        watch.look("backward", number)
        return gradients[0] @ weight.detach(), gradients[0].T @ ctx.saved_tensors[0], None, None


class _Watch:
    """Looks at what the rank holds and has begun, whenever a unit computes."""

    def __init__(self, t: Trial, weights: Sequence[torch.Tensor]) -> None:
        self.t = t
        self.weights = list(weights)
        """As they should be when they are gathered."""
        self.units: list[_Unit] = []

    def look(self, what: str, number: int) -> None:
        """End the trial if the unit's weight is not there, or if another one is that should not be."""
        t, n = self.t, len(self.units)
        following = number + 1 if what == "forward" else number - 1
        doing = f"{what} of unit {number}"
        if what == "backward":
            t.traffic.events.append(Event(doing, None, 0))
        weight = self.units[number].weight
        t.require(weight.untyped_storage().nbytes() >= weight.nbytes, f"{doing}: its weight has no storage")
        held = [unit.number for unit in self.units if unit.weight.untyped_storage().nbytes()]
        more = [other for other in held if other not in (number, following)]
        t.require(not more, f"{doing}: unit {more[0] if more else 0}'s weight still has its storage: free it")
        works = [work for work in t.traffic.works if work.what == "all_gather_into_tensor"]
        begun = t.traffic.count("all_gather_into_tensor")
        t.require(len(works) == begun, f"{doing}: all_gather without async_op=True: nothing is prefetched")
        running = sum(not work.was_waited_for for work in works)
        is_last = not 0 <= following < n
        t.require(is_last or following in held, f"{doing}: unit {following} is not being gathered meanwhile")
        t.require(running <= (not is_last), f"{doing}: its gather was not waited for")
        t.require(is_last or running, f"{doing}: unit {following} was waited for: nothing overlaps")
        stale = f"{doing}: its weight is not what the ranks' shards hold"
        t.require(torch.equal(weight.detach(), self.weights[number]), stale)


@EXERCISE.trial
def trial(t: Trial, units: int, rows: int, batch: int) -> None:
    """Train two steps with the hooks, and compare with whole weights."""
    n = t.world_size
    size = rows * n
    watch = _Watch(t, [t.numbers(size, size, of=0, salt=f"unit {i}") / 50 - 1 for i in range(units)])
    watch.units = [_Unit(i, watch, size) for i in range(units)]
    shards = [nn.Parameter(weight.flatten().chunk(n)[t.rank].clone()) for weight in watch.weights]
    t.call(watch.units, shards)
    for step in range(2):
        t.traffic.forget()
        inputs = [t.numbers(batch, size, of=rank, salt=f"inputs {step}") / 50 for rank in range(n)]
        _one_step(t, watch, inputs, shards, f" in step {step}")
        for weight, shard in zip(watch.weights, shards, strict=True):
            assert shard.grad is not None
            weight -= 0.5  # so that what was gathered a step ago is wrong
            shard.data -= 0.5
            shard.grad = None


def _one_step(t: Trial, watch: _Watch, inputs: Sequence[torch.Tensor], shards: Sequence[Any], when: str) -> None:
    whole = [weight.clone().requires_grad_() for weight in watch.weights]
    each, outputs = [], []
    for x in inputs:
        for weight in whole:
            x = x @ weight.T
        outputs.append(x.detach())
        each.append(torch.autograd.grad(x.square().mean(), whole))
    x = inputs[t.rank].clone().requires_grad_()
    found: Any = t.watch(lambda: nn.Sequential(*watch.units)(x))
    t.equal(f"outputs{when}", found, outputs[t.rank])
    _nothing_held(t, watch, f"after forward{when}")
    t.watch(found.square().mean().backward)
    _nothing_held(t, watch, f"after backward{when}")
    n = t.world_size
    for i, shard in enumerate(shards):
        mine = torch.stack([gradients[i] for gradients in each]).flatten(1)
        total = mine.sum(0).chunk(n)[t.rank]
        what = f"shards[{i}].grad{when}"
        t.require(watch.units[i].weight.grad is None, f"unit {i}'s weight still has its whole `grad`{when}")
        t.require(shard.grad is not None, f"`{what}` is None")
        known = {"summed, not averaged?": total, "this rank's gradient alone": mine[t.rank].chunk(n)[t.rank]}
        t.equal(what, shard.grad, total / n, None, known, tolerance=1e-4)
    gathers, least = t.traffic.count("all_gather_into_tensor"), 2 * len(shards)
    t.require(gathers <= least, f"{gathers} all-gathers{when}, expected {least}: two for each unit")


def _nothing_held(t: Trial, watch: _Watch, when: str) -> None:
    held = [unit.number for unit in watch.units if unit.weight.untyped_storage().nbytes()]
    t.require(not held, f"unit {held[0] if held else 0}'s weight still has its storage {when}: free it")


@EXERCISE.best
def best(world_size: int, units: int, rows: int, batch: int) -> Cost:
    """Return two gathers and a reduce-scatter for each unit."""
    size = 4 * (rows * world_size) ** 2
    return Cost(3 * units, 3 * units * ring_bytes(size, world_size))
