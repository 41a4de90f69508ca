"""Exercise: attention over a sequence that lies on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from course.exercises.base import POINT_TO_POINT, Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="22",
    title="Ring attention",
    statement="""
    Each rank has a part of the sequence: `q`, `k` and `v` of its own positions, (time, width) each. Return what its
    queries gather from the keys and values of *all* ranks (every query sees every key). Keys and values go round: each
    rank passes the block that it has to rank + 1 and takes the one of rank − 1, n − 1 times.

    No softmax over all keys is needed at once. Keep, for each query, the mean of the values so far and the logarithm
    of the sum of the exponentials so far, `total`; a further block with the sum `here` makes it
    `both = torch.logaddexp(total, here)`.
    """,
    hints=(
        "`scores = q @ k.T / width ** 0.5`, and `here = scores.logsumexp(1, keepdim=True)`.",
        "The mean so far was divided by exp(total), and should now be divided by exp(both).",
        "`mean = mean * (total - both).exp() + (scores - both).exp() @ v`; begin with 0 and total = −∞.",
        "Send with `isend` from one tensor, receive into another, and wait before you go on with it.",
    ),
    why="A softmax is a quotient of two sums over the keys, and sums can be taken block by block, in any order.",
    allowed=POINT_TO_POINT,
    cases=({"time": 4, "width": 3}, {"time": 2, "width": 5}),
)


@EXERCISE.reference
def ring_attention(q, k, v, rank, world_size):
    """Return (time, width): what this rank's queries gather from the keys and values of all ranks."""
    mean, total = torch.zeros_like(q), q.new_full((len(q), 1), -torch.inf)
    block = torch.stack([k, v])
    for step in range(world_size):
        scores = q @ block[0].T / q.shape[1] ** 0.5
        both = torch.logaddexp(total, scores.logsumexp(1, keepdim=True))
        mean = mean * (total - both).exp() + (scores - both).exp() @ block[1]
        total = both
        if step < world_size - 1:
            arrived = torch.empty_like(block)
            sending = dist.isend(block, (rank + 1) % world_size)
            dist.recv(arrived, (rank - 1) % world_size)
            sending.wait()
            block = arrived
    return mean


def _gathered(q: Any, ks: Any, vs: Any) -> Any:
    return (q @ torch.cat(list(ks)).T / q.shape[1] ** 0.5).softmax(1) @ torch.cat(list(vs))


@EXERCISE.trial
def trial(t: Trial, time: int, width: int) -> None:
    """Call it, and compare with attention over the whole sequence."""
    n = t.world_size
    q = (t.numbers(time, width, salt="q") - 50) / 20
    ks = [(t.numbers(time, width, of=rank, salt="k") - 50) / 20 for rank in range(n)]
    vs = [t.numbers(time, width, of=rank, salt="v") - 50 for rank in range(n)]
    given = [q.clone(), ks[t.rank].clone(), vs[t.rank].clone()]
    found = t.call(*given, t.rank, n)
    known = {"not divided by the root of the width": _gathered(q * width**0.5, ks, vs)}
    if n > 1:
        alone = [_gathered(q, [k], [v]) for k, v in zip(ks, vs, strict=True)]
        some = [(t.rank - step) % n for step in range(n - 1)]
        known["this rank's keys and values only"] = alone[t.rank]
        known["every rank's block counts alike, however well its keys suit"] = sum(alone) / n
        known["each block was normalised by itself, and then added"] = sum(alone)
        known["one block is missing"] = _gathered(q, [ks[r] for r in some], [vs[r] for r in some])
    t.equal("what is returned", found, _gathered(q, ks, vs), None, known, tolerance=1e-4)
    for name, now, before in zip("qkv", given, (q, ks[t.rank], vs[t.rank]), strict=True):
        t.unchanged(name, now, before)
    sent, least = t.traffic.bytes_sent, best(n, time, width).bytes
    t.require(sent <= least, f"{sent} B sent, expected {least} B: n − 1 blocks of keys and values")


@EXERCISE.best
def best(world_size: int, time: int, width: int) -> Cost:
    """Return n − 1 messages with a block of keys and values each."""
    return Cost(world_size - 1, (world_size - 1) * 2 * 4 * time * width)
