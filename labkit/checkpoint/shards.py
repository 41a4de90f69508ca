"""Tensors that are cut over ranks (DTensors), written and read by `torch.distributed.checkpoint`."""

from __future__ import annotations

import enum
import io
import pickle
import warnings
from collections import Counter
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from labkit.checkpoint.files import CheckpointError, facts_of, sync_folder
from labkit.checkpoint.pytree import KeyPath, keystr, tree_map_with_path

PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, complex, str, bytes, set, Counter, torch.Size}
PLAIN |= {torch.dtype, torch.device}
"""What `torch.load(weights_only=True)` reads, besides dicts, lists and tuples of these."""

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


def without_shards(part: dict[Any, Any], name: str, shards: dict[KeyPath, Any]) -> dict[Any, Any]:
    """Return an object's state with None in place of its DTensors, which go to `shards`.

    Raises TypeError for what could not be read back safely.
    """

    def sort_out(path: KeyPath, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and hasattr(leaf, "device_mesh"):
            shards[path] = leaf
            return None
        if type(leaf) not in PLAIN:
            raise TypeError(
                f"{keystr(path)} is a {type(leaf).__module__}.{type(leaf).__qualname__}; a checkpoint holds tensors, "
                "plain numbers and texts, and dicts, lists and tuples of them: nothing else is read back safely"
            )
        if isinstance(leaf, Tensor) and (leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized):
            _check_readable(keystr(path), leaf)
        return leaf

    sorted_out: dict[Any, Any] = tree_map_with_path(sort_out, part, (name,))
    return sorted_out


def _check_readable(name: str, tensor: Tensor) -> None:
    """Write a tensor of a rare kind into memory and read it back. Raises TypeError that names it if that fails."""
    try:
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        reason = str(error).strip().partition("\n")[0]
        raise TypeError(
            f"{name} is a tensor ({kind}) that torch.load does not read back ({reason:.200}). Save what it is made "
            "from, or register it with persistent=False"
        ) from error


def write_shards(aside: Path, shards: dict[KeyPath, Any], rank: int) -> dict[str, dict[str, Any]]:
    """Write this rank's pieces of DTensors; called by all ranks. Return {file name: its size and SHA-256}."""
    import torch.distributed.checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:
                raise error.__context__ or error from None  # torch.save hides the system's error behind its own

    folder = aside / "shards"
    try:
        dcp.save({_key(path): shard for path, shard in shards.items()}, storage_writer=Writer(folder))
    except dcp.api.CheckpointException as error:
        if rank in error.failures:
            raise error.failures[rank][0] from None
        return {}  # the rank that failed will say so
    files = [*folder.glob(f"__{rank}_*"), *(folder.glob(".metadata") if rank == 0 else ())]
    if rank == 0:
        sync_folder(folder)
    return {f"shards/{file.name}": facts_of(file) for file in files}


def read_shards(folder: Path, likes: dict[KeyPath, Tensor | None]) -> dict[KeyPath, Tensor]:
    """Read tensors that were cut over ranks: as the tensors given are cut now, or whole where None is given."""
    if not likes:
        return {}
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with open(folder / "shards" / ".metadata", "rb") as file:
                metadata = _Metadata(file).load()
            for key, stored in metadata.state_dict_metadata.items():
                if not isinstance(stored, TensorStorageMetadata):  # it would be unpickled
                    raise CheckpointError(f"{folder}/shards: {key} is not a tensor")
            return metadata

    reader = Reader(folder / "shards")
    stored = reader.read_metadata().state_dict_metadata
    tensors = {}
    for path, like in likes.items():
        facts = stored[_key(path)]
        if like is None:
            tensors[path] = torch.empty(facts.size, dtype=facts.properties.dtype)
        elif like.shape == facts.size:
            tensors[path] = torch.empty_like(like, dtype=facts.properties.dtype, requires_grad=False)
        else:
            raise ValueError(f"{keystr(path)} has shape {tuple(facts.size)} there and {tuple(like.shape)} here")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank reads by itself
        dcp.load({_key(path): tensor for path, tensor in tensors.items()}, storage_reader=reader, no_dist=True)
    return tensors


def with_shards(state: dict[str, Any], shards: dict[KeyPath, Tensor]) -> dict[str, Any]:
    """Return the state with its shards put where they belong."""
    whole: dict[str, Any] = tree_map_with_path(lambda path, leaf: shards.get(path, leaf), state)
    return whole


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


def _key(path: KeyPath) -> str:
    return "/".join(map(str, path))
