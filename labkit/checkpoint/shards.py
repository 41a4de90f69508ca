"""Tensors that are cut over ranks (DTensors), written and read by `torch.distributed.checkpoint`."""

from __future__ import annotations

import enum
import pickle
import warnings
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from labkit.checkpoint.files import CheckpointError, facts_of, sync_folder
from labkit.checkpoint.nested import Place, dotted, map_leaves

HARMLESS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""What may occur in the index of `torch.distributed.checkpoint`, besides data types and paths."""


def is_sharded(leaf: Any) -> bool:
    """Whether a leaf is a DTensor."""
    return isinstance(leaf, Tensor) and hasattr(leaf, "device_mesh")


def write_shards(aside: Path, shards: dict[Place, Any], rank: int) -> dict[str, dict[str, Any]]:
    """Write this rank's pieces of DTensors; called by all ranks. Gives {file name: its size and SHA-256}."""
    import torch.distributed.checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:
                raise error.__context__ or error from None  # torch.save hides the system's error behind its own

    folder = aside / "shards"
    try:
        dcp.save({_key(place): shard for place, shard in shards.items()}, storage_writer=Writer(folder))
    except dcp.api.CheckpointException as error:
        if rank in error.failures:
            raise error.failures[rank][0] from None
        return {}  # the rank that failed will say so
    files = [*folder.glob(f"__{rank}_*"), *(folder.glob(".metadata") if rank == 0 else ())]
    if rank == 0:
        sync_folder(folder)
    return {f"shards/{file.name}": facts_of(file) for file in files}


def read_shards(path: Path, places: dict[Place, Tensor | None]) -> dict[Place, Tensor]:
    """Read tensors that were cut over ranks: as the tensors given are cut now, or whole where None is given."""
    if not places:
        return {}
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with open(path / "shards" / ".metadata", "rb") as file:
                metadata = _Metadata(file).load()
            for key, stored in metadata.state_dict_metadata.items():
                if not isinstance(stored, TensorStorageMetadata):  # it would be unpickled
                    raise CheckpointError(f"{path}/shards: {key} is not a tensor")
            return metadata

    reader = Reader(path / "shards")
    stored = reader.read_metadata().state_dict_metadata
    tensors = {}
    for place, like in places.items():
        facts = stored[_key(place)]
        if like is None:
            tensors[place] = torch.empty(facts.size, dtype=facts.properties.dtype)
        elif like.shape == facts.size:
            tensors[place] = torch.empty_like(like, dtype=facts.properties.dtype, requires_grad=False)
        else:
            raise ValueError(f"{dotted(place)} has shape {tuple(facts.size)} there and {tuple(like.shape)} here")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank reads by itself
        dcp.load({_key(place): tensor for place, tensor in tensors.items()}, storage_reader=reader, no_dist=True)
    return tensors


def with_shards(state: dict[str, Any], shards: dict[Place, Tensor]) -> dict[str, Any]:
    """Give the state with its shards put where they belong."""
    return {n: map_leaves(part, lambda place, leaf: shards.get(place, leaf), (n,)) for n, part in state.items()}


class _Metadata(pickle.Unpickler):
    """Reads the index of `torch.distributed.checkpoint`, which is a pickle, without running code from it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in HARMLESS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib":
            return PurePath
        if (module, name) == ("builtins", "getattr"):  # so does Python 3.11.2, say, write an enumeration
            return _member
        raise _not_of_a_tensor(f"{module}.{name}")


def _member(enumeration: Any, name: str) -> enum.Enum:
    if isinstance(enumeration, enum.EnumType):
        return enumeration[name]
    raise _not_of_a_tensor(f"{name!r} of {enumeration!r}")


def _not_of_a_tensor(what: str) -> CheckpointError:
    return CheckpointError(
        f"the index of the shards asks for {what}, which describes no tensor. Nothing of it was run; "
        "use a checkpoint whose origin you know"
    )


def _key(place: Place) -> str:
    return "/".join(map(str, place))
