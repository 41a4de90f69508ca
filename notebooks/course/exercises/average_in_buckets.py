"""Exercise: average the gradients in buckets."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course.exercises.base import Cost, Exercise, ring_bytes
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="03",
    title="As few calls as buckets allow",
    statement="""
    Average the gradients as before, but in buckets: copy neighbouring gradients into one flat tensor, as many as
    `bucket_bytes` can hold, and call `dist.all_reduce` once for each bucket. Fill the buckets as DDP does, from the
    last of `model.parameters()` to the first: that is the order in which `backward` makes the gradients.

    A gradient that is larger than a bucket gets one of its own. The mean must come back into `parameter.grad`. All
    parameters have a gradient.
    """,
    hints=(
        "Go through `reversed(list(model.parameters()))` and keep a list; when the next gradient would make it too "
        "large, send the list first.",
        "And after the loop: the last list is to be sent, too.",
        "`torch.cat([p.grad.flatten() for p in bucket])`, all-reduce, divide, then `split` and `copy_` back.",
    ),
    why="A call costs something however little it carries; a limit on the bucket lets the first leave before the last "
    "gradient is there.",
    allowed=("all_reduce",),
    cases=(
        {"sizes": (4, 8, 8, 2), "bucket_bytes": 400},
        {"sizes": (3, 3, 3), "bucket_bytes": 10_000},
        {"sizes": (4, 3), "bucket_bytes": 60},
        {"sizes": (16, 16, 4, 4), "bucket_bytes": 200},
    ),
)


@EXERCISE.reference
def average_in_buckets(model, bucket_bytes):
    """Replace every gradient of `model` by its mean over the ranks, `bucket_bytes` bytes at a time."""
    buckets, room = [], 0
    for parameter in reversed(list(model.parameters())):
        size = parameter.grad.nbytes
        if size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(parameter.grad)
        room -= size
    for bucket in buckets:
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        means = flat.split([gradient.numel() for gradient in bucket])
        for gradient, mean in zip(bucket, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


def _model(sizes: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))


def filled(sizes: list[int], bucket_bytes: int) -> list[int]:
    """Return the bytes of each bucket when gradients of these sizes fill them in this order."""
    buckets: list[int] = []
    for size in sizes:
        if buckets and buckets[-1] + size <= bucket_bytes:
            buckets[-1] += size
        else:
            buckets.append(size)
    return buckets


@EXERCISE.trial
def trial(t: Trial, sizes: tuple[int, ...], bucket_bytes: int) -> None:
    """Give a model gradients, call it, compare, and look at the buckets."""
    model = _model(sizes)
    named = dict(model.named_parameters())
    given = [{name: t.numbers(*p.shape, of=r, salt=name) for name, p in named.items()} for r in range(t.world_size)]
    for name, parameter in named.items():
        parameter.grad = given[t.rank][name].clone()
    t.call(model, bucket_bytes)
    for name, parameter in named.items():
        total = torch.stack([gradients[name] for gradients in given]).sum(0)
        known = {"summed, not averaged?": total}
        t.equal(f"{name}.grad", parameter.grad, total / t.world_size, given[t.rank][name], known)
    nbytes = [p.grad.nbytes for p in named.values() if p.grad is not None]
    calls, expected = t.traffic.count("all_reduce"), filled(nbytes[::-1], bucket_bytes)
    held: list[int] = []
    if t.world_size > 1:  # one rank sends nothing, by the formula
        held = [event.bytes * t.world_size // (t.world_size - 1) // 2 for event in t.traffic.events]
        most = max(bucket_bytes, *nbytes)
        t.require(max(held) <= most, f"a bucket holds {max(held)} B, expected {most} B at most")
    t.require(calls <= len(expected), f"called all_reduce {calls} times, expected {len(expected)}")
    for found, true in zip(held, expected, strict=False):
        t.require(
            abs(found - true) <= 2,  # bytes of a ring are rounded down
            f"the first buckets hold {held[:3]} B, expected {expected[:3]}: backward makes the last gradient first",
        )


@EXERCISE.best
def best(world_size: int, sizes: tuple[int, ...], bucket_bytes: int) -> Cost:
    """Return a call per bucket."""
    nbytes = [4 * p.numel() for p in _model(sizes).parameters()]
    return Cost(len(filled(nbytes[::-1], bucket_bytes)), 2 * ring_bytes(sum(nbytes), world_size))
