"""Ring attention: keys and values travel from rank to rank past the queries that stay (Liu et al. 2023).

https://arxiv.org/abs/2310.01889. By hand: PyTorch's own `context_parallel` needs attention kernels that only GPUs have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RingAttention:
    """Causal attention over a sequence that lies in parts on the ranks, in any order: `ring(q, k, v)`.

    `positions` says, for every rank, which positions of the sequence it has. Queries, keys and values are the rank's
    own, (batch, heads, time / n, head width) each, and so is the result.
    """

    def __init__(self) -> None:
        self.positions: list[Tensor] = []
        self.work: list[int] = []
        """Of the last forward pass, for each step of the ring: pairs of a query and a key that were multiplied."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what every query gathers from all keys that it may see, wherever these lie."""
        outputs: Tensor = _Ring.apply(q, k, v, self)
        return outputs

    def visible(self, source: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yield pieces of this rank's queries and of a rank's keys that have to do with each other, and their mask.

        The mask is None where every query sees every key. Pieces of which no query sees any key are left out: that is
        half of all work.
        """
        mine, theirs = self.positions[dist.get_rank()], self.positions[source]
        for rows in pieces(mine):
            for columns in pieces(theirs):
                queries, keys = mine[rows], theirs[columns]
                if keys[0] <= queries[-1]:
                    yield rows, columns, (queries[:, None] >= keys if keys[-1] > queries[0] else None)


def pieces(positions: Tensor) -> list[slice]:
    """Return the runs of consecutive positions, none longer than half of all: so as to leave out what nobody sees."""
    edges = ((positions.diff() != 1).nonzero().flatten() + 1).tolist()
    bounds = sorted({0, len(positions) // 2, *edges, len(positions)})
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def pass_on(block: Tensor) -> tuple[Tensor, list[dist.Work]]:
    """Begin to send a block to the next rank; return where the previous one's will lie, and what to await."""
    rank, n = dist.get_rank(), dist.get_world_size()
    arriving = torch.empty_like(block)
    ops = [dist.P2POp(dist.isend, block, (rank + 1) % n), dist.P2POp(dist.irecv, arriving, (rank - 1) % n)]
    return arriving, dist.batch_isend_irecv(ops)


def scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Return (batch, heads, queries, keys): how well each key suits each query; −inf where it must not be seen."""
    found = q @ k.mT / q.shape[-1] ** 0.5
    return found if mask is None else found.masked_fill(~mask, -torch.inf)


class _Ring(torch.autograd.Function):
    """Softmax over all keys without ever having them all.

    For each query the logarithm of the sum of its exponentials so far, `total`, is kept beside the mean of the values
    so far; a further block of keys changes both. Its backward pass goes round once more, and the gradients of keys and
    values travel with them, until they are home.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingAttention) -> Tensor:
        rank, n = dist.get_rank(), dist.get_world_size()
        mean, total = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
        ring.work = []
        block = torch.stack([k, v])
        for step in range(n):
            if step < n - 1:  # sent while it is computed with
                arriving, requests = pass_on(block)
            ring.work.append(_add(ring, q, block, (rank - step) % n, mean, total))
            if step < n - 1:
                for request in requests:
                    request.wait()
                block = arriving
        ctx.save_for_backward(q, k, v, mean, total)
        ctx.ring = ring
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        q, k, v, mean, total = ctx.saved_tensors
        rank, n = dist.get_rank(), dist.get_world_size()
        of_q, block = torch.zeros_like(q), torch.stack([k, v])
        mine, travelling = torch.zeros_like(block), torch.zeros_like(block)
        inner = (gradient * mean).sum(-1, keepdim=True)
        for step in range(n):
            requests: list[dist.Work] = []
            if step < n - 1:
                arriving, requests = pass_on(block)
            target = travelling if step else mine
            _add_gradients(ctx.ring, q, block, (rank - step) % n, total, gradient, inner, of_q, target)
            for request in requests:
                request.wait()
            block = arriving if step < n - 1 else block
            if step:  # after the last step they come home
                travelling, requests = pass_on(travelling)
                for request in requests:
                    request.wait()
        of_k, of_v = mine + travelling
        return of_q, of_k, of_v, None


def _add(ring: RingAttention, q: Tensor, block: Tensor, source: int, mean: Tensor, total: Tensor) -> int:
    """Add a block's keys and values to the means so far, in place; return how many pairs were multiplied."""
    k, v = block
    multiplied = 0
    for rows, columns, mask in ring.visible(source):
        found = scores(q[:, :, rows], k[:, :, columns], mask)
        multiplied += found.shape[-2] * found.shape[-1]
        before, here = total[:, :, rows], found.logsumexp(-1, keepdim=True)
        both = torch.logaddexp(before, here)
        new = (found - both).exp() @ v[:, :, columns]
        mean[:, :, rows] = mean[:, :, rows] * (before - both).exp() + new
        total[:, :, rows] = both
    return multiplied


def _add_gradients(
    ring: RingAttention,
    q: Tensor,
    block: Tensor,
    source: int,
    total: Tensor,
    gradient: Tensor,
    inner: Tensor,
    of_q: Tensor,
    of_block: Tensor,
) -> None:
    """Add what a block contributes to the gradients of the queries, and of its own keys and values, in place."""
    k, v = block
    for rows, columns, mask in ring.visible(source):
        probabilities = (scores(q[:, :, rows], k[:, :, columns], mask) - total[:, :, rows]).exp()
        of_probabilities = gradient[:, :, rows] @ v[:, :, columns].mT
        of_scores = probabilities * (of_probabilities - inner[:, :, rows]) / q.shape[-1] ** 0.5
        of_q[:, :, rows] += of_scores @ k[:, :, columns]
        of_block[0][:, :, columns] += of_scores.mT @ q[:, :, rows]
        of_block[1][:, :, columns] += probabilities.mT @ gradient[:, :, rows]
