"""How far the tensors of two runs are apart: buffers apart from weights, NaN never lost.

What cannot be compared says why, and costs nothing else of the comparison. Shards have been put together on the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""What one rank has returned, by name."""

BUFFERS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
"""Buffers of normalization layers, by the last part of their names in a `state_dict`."""


class Difference(NamedTuple):
    """The greatest difference of any tensor in two runs, relative to the greatest number in that tensor."""

    off: float
    """NaN if there is none to tell: see `why`."""
    name: str = ""
    """The tensor that differs most."""
    why: str = ""
    """Why there is no number: "not returned", "not finite (0.weight)", "not comparable: …"."""

    def words(self, limit: float) -> str:
        """Say whether the tensors are equal, up to differences of `limit`, and by how much they are not."""
        if self.why or not self.off:
            return self.why or "equal"
        where = "" if self.off <= limit else f" ({self.name})"
        return f"{'equal to' if self.off <= limit else 'off by'} {self.off:.0e}{where}"


def greatest(values: Iterable[float]) -> float:
    """Return the greatest value, and NaN if there is one among them: Python's `max([0.0, nan])` is 0. NaN for none."""
    kept = list(values)
    return math.nan if not kept or any(map(math.isnan, kept)) else max(kept)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the greatest difference of two tensors' elements; NaN if any element is NaN, 0 where infinities are equal.

    Raises ValueError for tensors of different shapes.
    """
    if one.shape != other.shape:
        raise ValueError(f"shapes {list(one.shape)} and {list(other.shape)}")
    one, other = _wide(one), _wide(other)
    if not one.numel():
        return 0.0
    apart = torch.where(one == other, 0.0, (one - other).abs())
    return apart.max().item()  # unlike Python's, NaN if there is one


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor's values in 64 bits, on the CPU: of any type, bool and 8-bit floats included, and any layout."""
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def columns(first: Sequence[Tensors], ranks: Sequence[Tensors], buffers: Iterable[str] = ()) -> dict[str, Any]:
    """Return what a comparison says of the tensors that a run's ranks have returned, beside those of the first run.

    `difference`, the greatest of a weight; `buffers off by`, of a buffer, if there are any; `weights`, both as text.
    `buffers` has the last parts of buffers' names.
    """
    kinds = {*BUFFERS, *buffers}

    def part(given: Sequence[Tensors], is_of_buffers: bool) -> list[dict[str, Tensor]]:
        return [
            {name: each for name, each in rank.items() if (name.rpartition(".")[2] in kinds) == is_of_buffers}
            for rank in given
        ]

    limit = rounding(first)
    weights = weights_difference(part(first, False), part(ranks, False))
    found: dict[str, Any] = {"difference": weights.off, "weights": weights.words(limit)}
    mine = part(ranks, True)
    if any(mine):
        off = weights_difference(part(first, True), mine)
        found["buffers off by"] = off.off
        if not off.off <= limit:
            among = weights_difference(mine[:1], mine)
            said = "differ by rank, " if not among.why and among.off > limit else ""
            found["weights"] += f"; buffers {said}{off.words(limit)}"
    return found


def rounding(ranks: Sequence[Tensors]) -> float:
    """Return up to what difference weights are equal but for rounding, by how many digits their numbers have."""
    kinds = {each.dtype for rank in ranks for each in rank.values() if each.is_floating_point()}
    return max((torch.finfo(kind).eps ** 0.5 / 10 for kind in kinds), default=0.0)


def weights_difference(first: Sequence[Tensors], ranks: Sequence[Tensors]) -> Difference:
    """Return the greatest difference of any rank's tensors to those of the first run; each is given rank by rank."""
    names = {name for rank in ranks for name in rank}
    expected = {name for rank in first for name in rank}
    if not names or not expected:
        return Difference(math.nan, why="not returned")
    if names != expected:
        return Difference(math.nan, why=_other_names(names - expected, expected - names))
    found = [_of_one(name, first, ranks) for name in sorted(names)]
    without = [each for each in found if each.why]
    # What is not finite is said first: it has gone wrong whatever else there is.
    return min(without, key=lambda each: not each.why.startswith("not finite"), default=max(found))


def _other_names(here: set[str], there: set[str]) -> str:
    """Say which names only one of two runs has, and what that comes from where it is known."""

    def some(names: set[str]) -> str:
        return ", ".join(sorted(names)[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")

    said = [f"only here {some(here)}"] if here else []
    said += [f"only in the first run {some(there)}"] if there else []
    if {name.removeprefix("module.") for name in here} == there:
        said.append("return model.module.state_dict()")
    return f"other names: {'; '.join(said)}"


def _of_one(name: str, first: Sequence[Tensors], ranks: Sequence[Tensors]) -> Difference:
    """Return how far one tensor on some ranks is from what the first run has of it."""
    right = next(rank[name] for rank in first if name in rank)
    parts = [rank[name] for rank in ranks if name in rank]
    try:
        if any(hasattr(each, "device_mesh") for each in (right, *parts)):
            raise ValueError("a shard, of which not all ranks have returned their part")
        off = greatest(largest_difference(right, part) for part in parts)
        if off and not (right.is_floating_point() or right.is_complex()):  # a distance means nothing for integers
            return Difference(math.nan, name, f"off in integers ({name})")
        size = _wide(right).abs().max().item() if right.numel() else 0.0
    except Exception as error:  # whatever a subclass of Tensor refuses
        return Difference(math.nan, name, f"not comparable: {name}: {str(error).partition(chr(10))[0]:.200}")
    off = off / size if size and math.isfinite(size) else off
    return Difference(off, name) if math.isfinite(off) else Difference(math.nan, name, f"not finite ({name})")
