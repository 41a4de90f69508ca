"""Exercise: attention, cut by heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from course.exercises.base import Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="21",
    title="Attention, cut by heads",
    statement="""
    The heads of a causal attention are divided among the ranks: each rank has the rows of `query`, `key` and `value`
    that compute its heads, and the columns of `out` that belong to them. All ranks have the same `x`. Return the whole
    outputs on every rank, with a single `dist.all_reduce`.
    """,
    hints=(
        "Heads are independent of each other until `out`: a rank can compute its own from x alone.",
        "`(x @ query.T).view(batch, time, -1, head_width).transpose(1, 2)` is (batch, heads here, time, head_width), "
        "as `scaled_dot_product_attention(q, k, v, is_causal=True)` wants it.",
        "What a rank's heads contribute has the outputs' shape; the contributions add up.",
    ),
    why="Each head attends by itself, and the last product sums over heads: one all-reduce of the outputs is enough.",
    allowed=("all_reduce",),
    cases=(
        {"batch": 2, "time": 3, "width": 5, "heads": 2, "head_width": 4},
        {"batch": 1, "time": 6, "width": 8, "heads": 1, "head_width": 2},
    ),
    imports=(
        "import torch",
        "import torch.distributed as dist",
        "from torch.nn.functional import scaled_dot_product_attention",
    ),
)


@EXERCISE.reference
def attention_by_heads(x, query, key, value, out, head_width):
    """Return (batch, time, width). The weights are (heads · head_width, width) each, `out` the other way round."""
    batch, time, _ = x.shape
    split = [(x @ w.T).view(batch, time, -1, head_width).transpose(1, 2) for w in (query, key, value)]
    found = scaled_dot_product_attention(*split, is_causal=True)
    outputs = found.transpose(1, 2).reshape(batch, time, -1) @ out.T
    dist.all_reduce(outputs)
    return outputs


def _alone(x: Any, weights: Any, out: Any, head_width: int, causal: bool = True) -> Any:
    batch, time, _ = x.shape
    q, k, v = ((x @ w.T).view(batch, time, -1, head_width).transpose(1, 2) for w in weights)
    found = scaled_dot_product_attention(q, k, v, is_causal=causal)
    return found.transpose(1, 2).reshape(batch, time, -1) @ out.T


@EXERCISE.trial
def trial(t: Trial, batch: int, time: int, width: int, heads: int, head_width: int) -> None:
    """Call it, and compare with the attention in one piece."""
    n, rows = t.world_size, heads * head_width
    x = (t.numbers(batch, time, width, of=0, salt="x") - 50) / 25
    parts = [[(t.numbers(rows, width, of=r, salt=w) - 50) / 50 for w in ("query", "key", "value")] for r in range(n)]
    outs = [(t.numbers(width, rows, of=r, salt="out") - 50) / 50 for r in range(n)]
    whole = [torch.cat([part[which] for part in parts]) for which in range(3)]
    expected = _alone(x, whole, torch.cat(outs, 1), head_width)
    given = x.clone()
    found = t.call(given, *(w.clone() for w in parts[t.rank]), outs[t.rank].clone(), head_width)
    mine = _alone(x, parts[t.rank], outs[t.rank], head_width)
    known = {
        "positions see later ones, too": _alone(x, whole, torch.cat(outs, 1), head_width, causal=False),
        "all heads were taken for one": sum(_alone(x, parts[r], outs[r], rows) for r in range(n)),
    }
    known["this rank's heads only"] = mine
    known["averaged, where the heads' contributions add up"] = expected / n
    t.equal("outputs", found, expected, None, known, tolerance=1e-4)
    t.unchanged("x", given, x)
    least, sent = best(n, batch, time, width, heads, head_width), t.traffic.bytes_sent
    t.reduced_once()
    t.require(sent <= least.bytes, f"all-reduces more than the outputs: {sent} B sent, expected {least.bytes} B")


@EXERCISE.best
def best(world_size: int, batch: int, time: int, width: int, heads: int, head_width: int) -> Cost:
    """Return one all-reduce of the outputs."""
    return Cost.all_reduce(4 * batch * time * width, world_size)
