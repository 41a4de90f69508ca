"""What was saved, read back anywhere: on a rank, in the notebook, with no process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from labkit.checkpoint.files import NAME, CheckpointError, folders, verified
from labkit.checkpoint.shards import read_shards, with_shards


class Saved(NamedTuple):
    """One checkpoint on disk."""

    path: Path
    epoch: int
    """Epochs completed."""
    step: int
    """Steps taken in all."""
    world_size: int
    """Ranks that saved it."""
    bytes: int
    values: dict[str, Any]
    """What else `save` was given."""
    damage: str
    """Why it cannot be read; empty if it can."""


def checkpoints(folder: str | Path) -> list[Saved]:
    """Return the checkpoints in a folder, oldest first; each is read and compared with its checksums.

    Raises CheckpointError if there is no such folder.
    """
    folder = Path(folder).expanduser().absolute()
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder}; checkpoints are made by labkit.Checkpoint(folder, …).save()"
        )
    listed = []
    for path in folders(folder):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        try:
            manifest = verified(path)
        except CheckpointError as error:
            listed.append(Saved(path, 0, 0, 0, size, {}, error.args[0]))
        else:
            values = dict(manifest["progress"])
            epoch, step = values.pop("epoch"), values.pop("step")
            listed.append(Saved(path, epoch, step, manifest["world_size"], size, values, ""))
    return listed


def load(path: str | Path, rank: int = 0) -> dict[str, Any]:
    """Return what a checkpoint holds, by name, on the CPU: `model.load_state_dict(load("runs/digits")["model"])`.

    `path` is a checkpoint, or a folder of them, of which it takes the newest that is whole. Tensors that were cut over
    ranks are put together; of what differs by rank it returns the part of `rank`. Needs no process group.

    Raises CheckpointError if the checkpoint is damaged, or is none; it names the newest that is whole.
    """
    path = Path(path).expanduser().absolute()
    if not NAME.fullmatch(path.name) and folders(path):
        found = newest(path)
        assert found is not None
        path, manifest, damage = found
        if damage:
            warnings.warn(f"{damage}. This is {path} instead", stacklevel=2)
    else:
        try:
            manifest = verified(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error.args[0]}. {_offer(path.parent)}") from error
    if not 0 <= rank < manifest["world_size"]:
        raise ValueError(f"{path} was saved by ranks 0 to {manifest['world_size'] - 1}; there is no rank {rank}")
    state, mine = read(path, rank)
    shards = read_shards(path, {tuple(key): None for key in mine["sharded"]})
    return with_shards(state, shards)


def _offer(folder: Path) -> str:
    whole = [saved for saved in checkpoints(folder) if not saved.damage] if folder.is_dir() else []
    if not whole:
        return "There is no whole checkpoint beside it"
    return f"The newest that is whole is {whole[-1].path} (epoch {whole[-1].epoch}, step {whole[-1].step})"


def newest(folder: Path) -> tuple[Path, dict[str, Any], str] | None:
    """Return the newest checkpoint that is whole, its manifest, and what is wrong with newer ones."""
    damaged: list[str] = []
    for path in reversed(folders(folder)):
        try:
            manifest = verified(path)
        except CheckpointError as error:
            damaged.append(error.args[0])
            continue
        return path, manifest, ". ".join(damaged)
    if damaged:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {'; '.join(damaged)}. Move them away to begin anew")
    return None


def read(path: Path, rank: int, as_on_rank_0: Iterable[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the objects' state as one rank held it, and what else that rank saved."""
    state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    mine = torch.load(path / f"rank-{rank}.pt", map_location="cpu", weights_only=True)
    for name in set(mine["own"]) - set(as_on_rank_0):
        state[name].update(mine["own"][name])
        for key in mine["without"][name]:
            del state[name][key]
    return state, mine
