"""Exercise: causal attention over a sequence that is cut in a zigzag."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from course.exercises.base import POINT_TO_POINT, Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="22",
    title="Causal, in a zigzag",
    statement="""
    The same ring, but causal: a query sees only keys at its own position and before. The sequence is
    cut into 2 n pieces of equal length; rank r has piece r and, after it, piece 2 n − 1 − r. `q`, `k`
    and `v` are this rank's, (time, width) each, where `time` is twice the length of a piece. Return
    what its queries gather, (time, width). Keys and values go round by `isend` and `recv`, n − 1 times.
    """,
    hints=(
        "Write down first which positions a rank has: those of two pieces. In step s the block that has come is "
        "that of rank r − s.",
        "Mask with `scores.masked_fill(keys > queries[:, None], -torch.inf)`.",
        "Begin with your own block: every query sees at least itself there, so `total` is finite from then on, and a "
        "block in which a query sees nothing changes nothing.",
    ),
    why="Only the positions decide what is masked, so the same running softmax works for any order of the pieces; the "
    "zigzag gives every rank as many visible pairs.",
    allowed=POINT_TO_POINT,
    cases=({"length": 2, "width": 3}, {"length": 1, "width": 5}, {"length": 3, "width": 2}),
)


@EXERCISE.reference
def zigzag_attention(q, k, v, rank, world_size):
    """Return (time, width): what this rank's queries gather from all keys at their own positions and before."""

    def positions(rank):
        pieces = torch.arange(len(q) * world_size, device=q.device).chunk(2 * world_size)
        return torch.cat([pieces[rank], pieces[-1 - rank]])

    queries = positions(rank)
    mean, total = torch.zeros_like(q), q.new_full((len(q), 1), -torch.inf)
    block = torch.stack([k, v])
    for step in range(world_size):
        keys = positions((rank - step) % world_size)
        scores = q @ block[0].T / q.shape[1] ** 0.5
        scores = scores.masked_fill(keys > queries[:, None], -torch.inf)
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


def _positions(rank: int, n: int, length: int) -> torch.Tensor:
    pieces = torch.arange(2 * n * length).view(2 * n, length)
    return torch.cat([pieces[rank], pieces[2 * n - 1 - rank]])


def _gathered(q: Any, k: Any, v: Any, is_visible: Any) -> Any:
    scores = q @ k.T / q.shape[1] ** 0.5
    return scores.masked_fill(~is_visible, -torch.inf).softmax(1) @ v


@EXERCISE.trial
def trial(t: Trial, length: int, width: int) -> None:
    """Call it, and compare with causal attention over the whole sequence."""
    n, time = t.world_size, 2 * length
    qs, ks, vs = (
        [(t.numbers(time, width, of=rank, salt=name) - 50) / scale for rank in range(n)]
        for name, scale in (("q", 20), ("k", 20), ("v", 1))
    )
    queries, keys = _positions(t.rank, n, length), torch.cat([_positions(rank, n, length) for rank in range(n)])
    q, k, v = qs[t.rank], torch.cat(ks), torch.cat(vs)
    given = [each[t.rank].clone() for each in (qs, ks, vs)]
    found = t.call(*given, t.rank, n)
    causal = queries[:, None] >= keys
    own = keys.view(n, time)[t.rank]
    known = {
        "every query sees every key: it is to be causal": _gathered(q, k, v, torch.ones_like(causal)),
        "a query does not see its own position": torch.where(
            queries[:, None] == 0, vs[0][:1], _gathered(q, k, v, queries[:, None] > keys)
        ),
        "keys at later positions are seen, not those before": _gathered(q, k, v, queries[:, None] <= keys),
    }
    if n > 1:
        in_order = torch.arange(n * time)
        rows = in_order.view(n, time)[t.rank]
        alone, ordered = "this rank's keys and values only", "masked as if the sequence were cut in order"
        if t.rank:
            known[alone] = _gathered(q, ks[t.rank], vs[t.rank], queries[:, None] >= own)
        # On rank 0 both come to the same: in order, its queries see no other rank's keys.
        known[ordered if t.rank else f"{alone}, or {ordered}"] = _gathered(q, k, v, rows[:, None] >= in_order)
    finite = isinstance(found, torch.Tensor) and bool(torch.isfinite(found).all())
    if isinstance(found, torch.Tensor) and not finite:
        t.fail("not all numbers are finite: has a query seen nothing yet? Begin with your own block")
    t.equal("what is returned", found, _gathered(q, k, v, causal), None, known, tolerance=1e-4)
    for name, now, before in zip("qkv", given, (q, ks[t.rank], vs[t.rank]), strict=True):
        t.unchanged(name, now, before)
    sent, least = t.traffic.bytes_sent, best(n, length, width).bytes
    t.require(sent <= least, f"{sent} B sent, expected {least} B: n − 1 blocks of keys and values")


@EXERCISE.best
def best(world_size: int, length: int, width: int) -> Cost:
    """Return n − 1 messages with a block of keys and values each."""
    return Cost(world_size - 1, (world_size - 1) * 2 * 4 * 2 * length * width)
