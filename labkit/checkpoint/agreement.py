"""What the ranks of a save hold alike, so that it is stored once, and what each holds for itself.

The problem: to find what is equal by comparing SHA-256 reads the whole state on every rank, which takes longer than to
write it. `torch.distributed.checkpoint` does not compare: of tensors with one name its planner keeps one, of whichever
rank has less to write. Where ranks hold different values under one name (batch norm's statistics, the model parallel
stages of a reader's own), the others are lost, unsaid; tests hold that none is.

So the design is believed where there is one, and checked where that costs little:

* DDP keeps parameters equal, and so the state of an optimizer that has no others. Of these only the sums of the bits
  are compared: one pass at the speed of memory, on the tensors' own device.
* A piece of a DTensor lies on one rank. Only pieces that several ranks claim under one name are hashed.
* An optimizer that is gathered on rank 0 (ZeRO) is on no other.
* Everything else is hashed.

What still fails: parameters that drift apart under DDP (steps within `no_sync`), though the sum of a tensor's bits is
the same on all ranks. Rank 0's are then everybody's after `resume`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from labkit.checkpoint.compiled import plain_name
from labkit.checkpoint.files import CheckpointError
from labkit.checkpoint.pytree import KeyPath, keystr, tree_map_with_path

Digests = dict[str, dict[Any, str]]
"""Of every entry of every object's state, by the object's name and the entry's key."""

Piece = tuple[KeyPath, tuple[int, ...]]
"""A piece of a DTensor: the tensor's path, and where on its mesh the piece lies."""


def gathers_on_rank_0(thing: Any) -> bool:
    """Whether an object's state is gathered on rank 0, as that of a `ZeroRedundancyOptimizer` is."""
    return hasattr(thing, "consolidate_state_dict")


def rank_0_suffices(thing: Any, world_size: int) -> bool:
    """Whether rank 0's state is all that is needed. Under DDP, ranks differ in buffers only; it broadcasts those."""
    if isinstance(thing, DistributedDataParallel):
        return thing.process_group.size() == world_size
    return gathers_on_rank_0(thing)


def equal_by_design(
    models: Mapping[str, DistributedDataParallel], objects: Mapping[str, Any]
) -> Callable[[KeyPath], bool]:
    """Return what tells of a leaf's path whether all ranks hold the same there, because DDP sees to it.

    Args:
        models: by name, those that are averaged over all ranks.
        objects: everything that is saved, by name.
    """
    kept = {
        name: {
            plain_name(key): parameter
            for key, parameter in model.module.named_parameters(remove_duplicate=False)
            if key not in model.parameters_to_ignore
        }
        for name, model in models.items()
    }
    parameters = {id(parameter) for found in kept.values() for parameter in found.values()}
    optimizers = {
        name
        for name, thing in objects.items()
        if isinstance(thing, torch.optim.Optimizer)
        and all(id(parameter) in parameters for group in thing.param_groups for parameter in group["params"])
    }

    def is_equal(path: KeyPath) -> bool:
        name, key = str(path[0]), path[1]
        return key in kept.get(name, ()) or (name in optimizers and key == "state")

    return is_equal


def digests_of(state: dict[str, Any], is_equal: Callable[[KeyPath], bool]) -> Digests:
    """Return the digest of every entry of a state; of leaves that `is_equal` vouches for, only their bits are added."""
    return {
        name: {key: digest_of(value, (name, key), is_equal) for key, value in part.items()}
        for name, part in state.items()
    }


def digest_of(tree: Any, path: KeyPath = (), is_equal: Callable[[KeyPath], bool] = lambda path: False) -> str:
    """Return the SHA-256 of a tree, bit by bit; of leaves that `is_equal` vouches for, the sum of bits goes in."""
    sha = hashlib.sha256()

    def add(path: KeyPath, leaf: Any) -> None:
        sha.update(repr(path).encode())
        if not isinstance(leaf, Tensor):
            sha.update(repr(leaf).encode())
            return
        sha.update(f"{leaf.dtype} {tuple(leaf.shape)} {leaf.layout}".encode())
        for part in _parts_of(leaf.detach()):
            data = part.contiguous().flatten()
            if data.stride(0) != 1:  # of one number, that counts as contiguous
                data = data.clone(memory_format=torch.contiguous_format)
            data = data.view(torch.uint8)
            if is_equal(path):
                sha.update(repr(_sum_of_bits(data)).encode())
            else:
                sha.update(data.cpu().numpy())  # type: ignore[arg-type]

    tree_map_with_path(add, tree, path)
    return sha.hexdigest()


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that hold a tensor's values: of a sparse one, its indices and values."""
    if tensor.is_meta:
        return []
    if tensor.is_quantized:
        return [tensor.int_repr()]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.resolve_conj().resolve_neg()]


def _sum_of_bits(data: Tensor) -> tuple[int, list[int]]:
    """Return the sum of bytes, eight at a time and modulo 2**64, and those that are left over. `data`: (bytes,)."""
    if data.storage_offset() % 8:
        data = data.clone()  # eight bytes at a time begin at a multiple of eight
    whole = len(data) // 8 * 8
    return int(data[:whole].view(torch.int64).sum()), data[whole:].tolist()


def pieces_of(shards: Mapping[KeyPath, Any]) -> dict[Piece, Tensor]:
    """Return this rank's pieces of DTensors."""
    return {(path, tuple(shard.device_mesh.get_coordinate())): shard.to_local() for path, shard in shards.items()}


def digests_of_pieces(shards: Mapping[KeyPath, Any], wanted: set[Piece]) -> dict[Piece, str]:
    """Return the digests of those pieces on this rank that are wanted."""
    return {piece: digest_of(tensor) for piece, tensor in pieces_of(shards).items() if piece in wanted}


def claimed_twice(claims: list[list[Piece]]) -> set[Piece]:
    """Return the pieces that more than one rank holds. `claims`: the pieces of every rank."""
    return {piece for piece, ranks in Counter(piece for rank in claims for piece in rank).items() if ranks > 1}


def check_pieces(digests: list[dict[Piece, str]]) -> None:
    """Check that pieces of one name are of one tensor. `digests`: of every rank, of what `claimed_twice` names.

    Raises CheckpointError, on all ranks alike.
    """
    known: dict[Piece, tuple[int, str]] = {}
    for rank, found in enumerate(digests):
        for piece, digest in found.items():
            first, expected = known.setdefault(piece, (rank, digest))
            if digest != expected:
                raise CheckpointError(
                    f"{keystr(piece[0])} is cut over ranks, but ranks {first} and {rank} hold different values of the "
                    "same piece: they belong to different tensors, of two pipeline stages, say. Give such ranks' "
                    "objects different names inside the model"
                )
