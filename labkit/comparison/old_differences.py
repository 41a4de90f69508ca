"""How far the tensors of two runs are apart: sharded ones put together, buffers apart from weights, NaN never lost.

The ranks make their tensors `portable`, without speaking to each other, and the notebook compares them. What cannot be
compared says why, and costs nothing else of the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.trace.profiling import local

BUFFERS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
"""Buffers of normalization layers, by the last part of their names in a `state_dict`."""


class Piece(NamedTuple):
    """The part of a sharded tensor that lies on one rank."""

    tensor: Tensor
    shape: tuple[int, ...]
    """Of the whole."""
    at: tuple[Tensor, ...]
    """For each dimension, at which indices of the whole the part lies."""


class Unknown(NamedTuple):
    """A tensor that could not leave its rank."""

    why: str


Portable = Tensor | Piece | Unknown


class Difference(NamedTuple):
    """The greatest difference of any tensor in two runs, as a part of the greatest number in that tensor."""

    off: float
    """NaN if there is none to tell: see `why`."""
    name: str = ""
    """The tensor that differs most."""
    why: str = ""
    """Why there is no number, in words: "not returned", "not finite (0.weight)", "not comparable: …"."""

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
    """Return a tensor's values in 64 bits: of any type, bool and 8-bit floats included, and of any layout."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


# On the ranks


def buffer_names(modules: Iterable[nn.Module]) -> frozenset[str]:
    """Return the last parts of the names of all buffers of these modules, but for what a parameter is called, too."""
    names, taken = set(), set()
    for module in modules:
        names |= {name for name, _ in module.named_buffers(recurse=False)}
        taken |= {name for name, _ in module.named_parameters(recurse=False)}
    return frozenset(names - taken)


def portable(tensor: Tensor, copy: bool = False) -> Portable:
    """Return what of a tensor the notebook compares, on the CPU; of a sharded one this rank's piece. Raises nothing."""
    try:
        tensor = tensor.detach().clone() if copy else tensor.detach()
        if hasattr(tensor, "device_mesh"):
            return _piece(tensor)
        return tensor if tensor.is_meta else local(tensor).cpu()
    except Exception as error:  # whatever a subclass of Tensor refuses
        return Unknown(f"{type(tensor).__name__}: {error}")


def _piece(tensor: Any) -> Portable:
    """Return this rank's part of a DTensor, without a word to other ranks, which may not have one."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        return Unknown(f"a DTensor of which each rank has a summand, {placements}")
    part = tensor.to_local().cpu()
    if all(placement.is_replicate() for placement in placements):
        return part

    def along(dimension: int) -> Tensor:
        # DTensor itself says which indices are here, whichever kind of shard it is: an index has the same placement.
        own = [_along_0(each) if getattr(each, "dim", None) == dimension else Replicate() for each in placements]
        indices = torch.arange(tensor.shape[dimension])
        return distribute_tensor(indices, tensor.device_mesh, own, src_data_rank=None).to_local().cpu()

    return Piece(part, tuple(tensor.shape), tuple(map(along, range(tensor.dim()))))


def _along_0(placement: Any) -> Any:
    """Return the same kind of shard, of a tensor of one dimension."""
    kind = type(placement)
    return kind(0, split_factor=placement.split_factor) if hasattr(placement, "split_factor") else kind(0)


# In the notebook


def columns(
    first: Sequence[Mapping[str, Portable]], ranks: Sequence[Mapping[str, Portable]], buffers: Iterable[str] = ()
) -> dict[str, Any]:
    """Return what a comparison says of the weights that a run's ranks have returned, beside those of the first run.

    `difference`, the greatest of a weight; `buffers off by`, of a buffer, if there are any; `weights`, both in words.
    `buffers` has the last parts of buffers' names.
    """
    kinds = {*BUFFERS, *buffers}

    def part(given: Sequence[Mapping[str, Portable]], is_of_buffers: bool) -> list[dict[str, Portable]]:
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


def rounding(ranks: Sequence[Mapping[str, Portable]]) -> float:
    """Return up to what difference weights are equal but for rounding, by how many digits their numbers have."""
    tensors = [getattr(part, "tensor", part) for rank in ranks for part in rank.values()]
    kinds = {each.dtype for each in tensors if isinstance(each, Tensor) and each.is_floating_point()}
    return max((torch.finfo(kind).eps ** 0.5 / 10 for kind in kinds), default=0.0)


def weights_difference(first: Sequence[Mapping[str, Portable]], ranks: Sequence[Mapping[str, Portable]]) -> Difference:
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


def _of_one(name: str, first: Sequence[Mapping[str, Portable]], ranks: Sequence[Mapping[str, Portable]]) -> Difference:
    try:
        off = _off([rank[name] for rank in first if name in rank], [rank[name] for rank in ranks if name in rank])
    except IntegersDifferError:
        return Difference(math.nan, name, f"off in integers ({name})")
    except Exception as error:
        return Difference(math.nan, name, f"not comparable: {name}: {str(error).partition(chr(10))[0]:.200}")
    return Difference(off, name) if math.isfinite(off) else Difference(math.nan, name, f"not finite ({name})")


class IntegersDifferError(Exception):
    """Two tensors of integers, such as counts of batches, are not equal."""


def _off(first: Sequence[Portable], ranks: Sequence[Portable]) -> float:
    """Return the greatest difference of one tensor on some ranks to the whole that the first run has of it, relative.

    Raises IntegersDifferError for integers that are not equal: a distance means nothing for them.
    """
    right = whole(first)
    whole(ranks)  # raises if a piece is missing
    off = greatest(largest_difference(*_beside(right, part)) for part in ranks)
    if not (right.is_floating_point() or right.is_complex()) and not isinstance(first[0], Piece):
        if off:
            raise IntegersDifferError
        return 0.0
    size = _wide(right).abs().max().item() if right.numel() else 0.0
    return off / size if size and math.isfinite(size) else off


def _beside(right: Tensor, part: Portable) -> tuple[Tensor, Tensor]:
    """Return what of the whole tensor a rank has a part of, and the part."""
    if not isinstance(part, Piece):
        return right, _tensor(part)
    if part.shape != tuple(right.shape):
        raise ValueError(f"shapes {list(right.shape)} and {list(part.shape)}")
    return right[_place(part)], part.tensor


def whole(parts: Sequence[Portable]) -> Tensor:
    """Return the tensor that ranks hold: the first copy of it, or its pieces put together, then in 64 bits.

    Raises ValueError if a piece is missing, or a tensor could not leave its rank.
    """
    pieces = [part for part in parts if isinstance(part, Piece)]
    if len(pieces) < len(parts):
        return _tensor(next(part for part in parts if not isinstance(part, Piece)))
    made = torch.zeros(pieces[0].shape, dtype=_wide(pieces[0].tensor).dtype)
    is_there = torch.zeros(pieces[0].shape, dtype=torch.bool)
    for piece in pieces:
        made[_place(piece)] = _wide(piece.tensor)
        is_there[_place(piece)] = True
    if not is_there.all():
        raise ValueError(f"the ranks have returned {is_there.sum():,} of its {is_there.numel():,} elements")
    return made


def _place(piece: Piece) -> tuple[Tensor, ...]:
    """Return what of the whole a piece is, as an index: rows, columns, …"""
    last = len(piece.at) - 1
    return tuple(indices.view(-1, *[1] * (last - dimension)) for dimension, indices in enumerate(piece.at))


def _tensor(part: Portable) -> Tensor:
    if isinstance(part, Unknown):
        raise ValueError(part.why)
    assert isinstance(part, Tensor)
    return part
