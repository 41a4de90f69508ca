"""Save a training so that a killed run goes on as if nothing had happened.

`Checkpoint` saves and resumes on the ranks; `checkpoints` and `load` read what was saved, also in the notebook.

    checkpoint-000012/        moved into place, whole, by one rename; until then it has another name
        manifest.json         epoch, step, world size, versions; size and SHA-256 of every other file
        state.pt              {"model": …, "optimizer": …}: what all ranks hold alike; `torch.load` reads it too
        rank-0.pt, rank-1.pt  a rank's random state and what else is its own
        shards/               what is cut over ranks (DTensors), by `torch.distributed.checkpoint`

Nothing here runs code from a file: tensors are read with `weights_only=True`, and of the pickled index that
`torch.distributed.checkpoint` writes (`.metadata`) only plain descriptions of tensors are accepted. The checksums find
damage, not malice.

Needs torch and the standard library only, so that this file can travel alone.
"""

from __future__ import annotations

import copy
import enum
import errno
import functools
import hashlib
import importlib
import json
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

FORMAT = "labkit checkpoint 1"
NAME = re.compile(r"checkpoint-(\d{6,})")
UNFINISHED = re.compile(r"\.checkpoint-\d{6,}\.(writing|removing)")
"""What a killed run may leave behind; the next one removes it."""

MANIFEST = "manifest.json"

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

CULPRIT_FIRST_S = 0.5
"""How long a rank waits before it raises another rank's error, so that the one that failed is seen to fail first."""

T = TypeVar("T")
Place = tuple[str | int, ...]
"""Where a tensor is: ("optimizer", "state", 0, "momentum_buffer")."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; what was saved before is as it was."""


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


class Checkpoint:
    """Saves and resumes everything that a training depends on. Every rank makes one, and calls its methods together.

    >>> checkpoint = labkit.Checkpoint("runs/digits", model=model, optimizer=optimizer, scheduler=scheduler)
    >>> checkpoint.resume()
    >>> for epoch in range(checkpoint.epoch, epochs):
    ...     sampler.set_epoch(epoch)
    ...     for images, labels in checkpoint.batches(loader):
    ...         ...  # forward, backward, optimizer.step()
    ...         if checkpoint.step % 100 == 0:
    ...             checkpoint.save()
    ...     scheduler.step()
    ...     checkpoint.save()

    Launching the same function again then goes on where the last run was stopped, killed or requeued: on the same
    machine, with as many ranks and threads as before, bit for bit (on GPUs, as far as the training itself is
    deterministic: `torch.use_deterministic_algorithms`). One run at a time uses a folder.

    Objects are named by the reader. An object has `state_dict` and `load_state_dict`, or is a `torch.Generator`, or a
    sampler with `set_epoch`. `DistributedDataParallel` and `torch.compile` are unwrapped, so that no key begins with
    `module.`. Saved besides: each rank's random states (Python's, NumPy's if imported, PyTorch's, CUDA's if used), and
    how far `batches` has come.

    What all ranks hold alike is stored once, what differs by rank for every rank, and DTensors (`fully_shard`,
    `parallelize_module`) piece by piece, by `torch.distributed.checkpoint`. A `ZeroRedundancyOptimizer` is gathered on
    rank 0.

    Args:
        folder: where checkpoints are kept; made if missing. On several nodes, a file system that they share, with
            room for one checkpoint more than are kept.
        keep: how many of the last checkpoints to keep.
        objects: what to save, by name.

    Raises ValueError or TypeError for arguments of no use, `CheckpointError` if the folder cannot be written.

    See https://docs.pytorch.org/tutorials/recipes/recipes/saving_and_loading_a_general_checkpoint.html and
    https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
    """

    epoch: int
    """Epochs completed; `batches` counts them. Loops of another kind set it."""
    step: int
    """Steps taken in all, that of the current batch included; `batches` counts them. Loops of another kind set it."""

    def __init__(self, folder: str | Path, /, *, keep: int = 3, **objects: Any) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep is how many checkpoints to keep, at least 1; got {keep!r}")
        if not objects:
            raise ValueError("a Checkpoint needs something to save: Checkpoint(folder, model=model, optimizer=…)")
        for name, thing in objects.items():
            if not any(hasattr(thing, method) for method in ("load_state_dict", "set_state", "set_epoch")):
                raise TypeError(
                    f"{name} is a {type(thing).__name__}, which has no state_dict() and load_state_dict(); "
                    "plain values go to save(…) by name"
                )
        self.folder = Path(folder).expanduser().absolute()
        self.keep = keep
        grouped = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self._as_on_rank_0 = {name for name, thing in objects.items() if _equal_by_design(thing, self.world_size)}
        self._orders = {name: _Order(thing) for name, thing in objects.items() if _cuts_buckets_anew(thing)}
        self._objects = {name: _unwrapped(thing) for name, thing in objects.items()}
        self.epoch = self.step = 0
        self._position = 0
        """Batches of the current epoch that were given."""
        self._began: dict[str, Any] = {}
        """Random states as they were before the current epoch's first batch was drawn."""
        self._loader: Any = None
        self._resumed: dict[str, Any] | None = None
        """Where in an epoch to go on, until `batches` has taken notice."""
        self._each(f"write to {self.folder}", self._try_the_folder)

    def save(self, **values: Any) -> Path:
        """Write a checkpoint and give its folder. Called by every rank, after `optimizer.step()`.

        Saved within the loop over `batches`, it goes on with the next batch; saved after the loop, with the next epoch.
        `values` are plain numbers, texts and lists of them, which `resume` and `checkpoints` give back.

        Raises CheckpointError on every rank if one of them fails, because the disk is full, say. Whatever happens,
        the checkpoints that were there before stay whole.
        """
        if taken := {"epoch", "step"} & set(values):
            name = taken.pop()
            raise ValueError(f"save({name}=…): the checkpoint counts {name} itself; set checkpoint.{name} to change it")
        state: dict[str, Any] = {}
        shards: dict[Place, Any] = {}
        drafts = self._together("prepare a checkpoint", lambda: self._draft(state, shards, values))
        write, finish = (f"{part} a checkpoint in {self.folder}" for part in ("write", "finish"))
        written = self._together(write, lambda: self._write(drafts, state, shards))
        path = self._together(finish, lambda: self._finish(drafts, written, values))[0]
        assert path is not None
        return path

    def resume(self) -> dict[str, Any]:
        """Go on from the newest checkpoint that is whole: set every object, the random states, `epoch` and `step`.

        Called by every rank, before the training loop. Gives epoch, step and the values that `save` was given; an
        empty dict if there is nothing to resume. Checkpoints that are damaged are skipped with a warning.

        With other than the number of ranks that saved, weights and optimizer are the same, DTensors cut anew, and an
        epoch goes on after as many samples. A rank that was there gets its random state back, a new one keeps what it
        was seeded with. That cannot be bit for bit, and a warning says so.

        Raises CheckpointError on every rank: none of the checkpoints is whole, or the newest holds other objects.
        """
        found = self._together(f"find a checkpoint in {self.folder}", self._find)[0]
        if found is None:
            return {}
        path, manifest, damage = found
        ranks = manifest["world_size"]
        if damage and self.rank == 0:
            warnings.warn(f"{damage}. Going on from {path} instead", stacklevel=2)
        if ranks != self.world_size and self.rank == 0:
            warnings.warn(
                f"{path} was saved by {ranks} ranks and goes on with {self.world_size}: weights and optimizer are the "
                "same, which rank takes which samples and random numbers is not",
                stacklevel=2,
            )
        resume = f"resume from {path}"
        state, mine = self._each(resume, lambda: self._read(path, manifest))
        for name, order in mine["orders"].items():
            if name in self._orders:
                self._orders[name].repeat(order)
        self._each(resume, lambda: self._restore(state, mine, ranks))
        progress: dict[str, Any] = manifest["progress"]
        self.epoch, self.step = progress["epoch"], progress["step"]
        return progress

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Give the batches of one epoch; after `resume`, those that had not been done. Counts `step` and `epoch`.

        The batches that are skipped are drawn nevertheless, from the random states with which the epoch began: so
        every sampler, shuffling `DataLoader` and worker process gives what it would have given. (Not if
        `persistent_workers` draw random numbers: what those depend on lies further back.)
        """
        resumed, self._resumed = self._resumed, None
        generators, skip = _generators(loader), 0
        if resumed is not None:
            for generator, state in zip(generators, resumed["generators"], strict=False):
                generator.set_state(state)
            if resumed["position"]:
                samples = resumed["position"] * resumed["batch_size"] * resumed["world_size"]
                skip = samples // (_batch_size(loader) * self.world_size)
                set_random_state(resumed["began"])
        elif self._position:
            self.epoch += 1  # the last epoch was cut short
        self._loader = loader
        self._began = {"began": random_state(), "generators": [g.get_state() for g in generators]}
        batches = iter(loader)
        for _ in range(skip):
            next(batches, None)
        if skip and resumed is not None:
            set_random_state(resumed["random"])
        self._position = skip
        for batch in batches:
            self._position += 1
            self.step += 1
            yield batch
        self.epoch += 1
        self._position = 0

    # What a rank does of it

    def _together(self, what: str, part: Callable[[], T]) -> list[T]:
        """Do this rank's part and give what the parts of all ranks gave. If one fails, raise on all of them."""
        result, failure = None, None
        try:
            result = part()
        except Exception as error:
            failure = error
        said = None if failure is None else _in_words(failure)
        outcomes = [(result, said)]
        if self.world_size > 1:
            outcomes *= self.world_size
            dist.all_gather_object(outcomes, (result, said))
        for rank, (_, said) in enumerate(outcomes):
            if said is not None:
                if self.rank == 0:
                    self._clean()  # what is half written may be what fills the disk
                if failure is None:
                    time.sleep(CULPRIT_FIRST_S)
                raise CheckpointError(f"rank {rank} could not {what}: {said}") from failure
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def _each(self, what: str, part: Callable[[], T]) -> T:
        """Do this rank's part and give what it gave. If another rank's fails, raise here too."""
        kept: list[T] = []
        self._together(what, lambda: kept.append(part()))
        return kept[0]

    def _try_the_folder(self) -> None:
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass

    def _draft(self, state: dict[str, Any], shards: dict[Place, Any], values: dict[str, Any]) -> _Draft:
        """Collect this rank's state, DTensors apart. Rank 0 makes the folder, under a name that no reader looks for."""

        def sort_out(place: Place, leaf: Any) -> Any:
            if _is_sharded(leaf):
                shards[place] = leaf
                return None
            if type(leaf) not in PLAIN:
                raise TypeError(
                    f"{_dotted(place)} is a {type(leaf).__module__}.{type(leaf).__qualname__}; a checkpoint holds "
                    "tensors, plain numbers and texts, and dicts, lists and tuples of them: nothing else is read back "
                    "safely"
                )
            return leaf

        for name, thing in self._objects.items():
            state[name] = _map(self._state_of(thing), sort_out, (name,))
        json.dumps(values)  # raises for what is not plain
        aside = None
        if self.rank == 0:
            self._clean()
            last = max((_number(path) for path in _folders(self.folder)), default=0)
            aside = self.folder / f".checkpoint-{last + 1:06d}.writing"
            aside.mkdir()
        digests: dict[str, dict[Any, str]] = {name: {} for name in state}
        if self.world_size > 1:
            digests = {name: {key: _digest(value) for key, value in part.items()} for name, part in state.items()}
        pieces = {
            (*place, "at", *shard.device_mesh.get_coordinate()): _digest(shard.to_local())
            for place, shard in shards.items()
        }
        return _Draft(aside, digests, pieces)

    def _state_of(self, thing: Any) -> dict[Any, Any]:
        if hasattr(thing, "consolidate_state_dict"):
            thing.consolidate_state_dict(to=0)
            return thing.state_dict() if self.rank == 0 else {}
        if hasattr(thing, "state_dict"):
            return thing.state_dict()
        return {"state": thing.get_state()} if hasattr(thing, "get_state") else {"epoch": thing.epoch}

    def _write(self, drafts: list[_Draft], state: dict[str, Any], shards: dict[Place, Any]) -> _Written:
        """Write this rank's files."""
        aside = drafts[0].aside
        assert aside is not None
        _check_pieces(drafts)
        # First, because all ranks take part: if it fails on one, it raises on all.
        files = _write_shards(aside, shards, self.rank) if any(draft.pieces for draft in drafts) else {}
        own: dict[str, dict[Any, Any]] = {}
        without: dict[str, list[Any]] = {}
        for name, digests in drafts[self.rank].digests.items():
            theirs = drafts[0].digests[name]
            if hasattr(self._objects[name], "consolidate_state_dict"):
                continue  # rank 0 has it all
            own[name] = {key: state[name][key] for key, sha in digests.items() if theirs.get(key) != sha}
            without[name] = [key for key in theirs if key not in digests]
        mine = {
            "own": own,
            "without": without,
            "sharded": list(shards),
            "orders": {name: order.settled() for name, order in self._orders.items()},
            "random": random_state(),
            "data": self._where_in_the_epoch(),
        }
        files |= _write_tensors(aside / f"rank-{self.rank}.pt", mine)
        if self.rank == 0:
            files |= _write_tensors(aside / "state.pt", state)
        return _Written(files, [name for name in own if own[name] or without[name]])

    def _where_in_the_epoch(self) -> dict[str, Any]:
        if self._position:
            return {"position": self._position, "batch_size": _batch_size(self._loader), **self._began}
        return {"position": 0, "generators": [g.get_state() for g in _generators(self._loader)]}

    def _finish(self, drafts: list[_Draft], written: list[_Written], values: dict[str, Any]) -> Path | None:
        """Describe what was written, move it into place, and remove what is older than the last `keep`: on rank 0."""
        if self.rank:
            return None
        aside = drafts[0].aside
        assert aside is not None
        files = {name: facts for rank in written for name, facts in rank.files.items()}
        for name, facts in files.items():
            if not (aside / name).is_file() or (aside / name).stat().st_size != facts["bytes"]:
                raise OSError(
                    f"{aside / name}, {facts['bytes']:,} bytes, was written but is not there on rank 0; "
                    "ranks on several nodes need a folder on a file system that they share"
                )
        manifest = {
            "format": FORMAT,
            "torch": torch.__version__,
            "world_size": self.world_size,
            "progress": {"epoch": self.epoch, "step": self.step, **values},
            "objects": list(self._objects),
            "differ": sorted({name for rank in written for name in rank.differ}),
            "as_on_rank_0": sorted(self._as_on_rank_0),
            "files": files,
        }
        with open(aside / MANIFEST, "w", encoding="utf-8") as file:
            json.dump({**manifest, "sha256": _digest_of(manifest)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(aside)
        path = self.folder / aside.name.removeprefix(".").removesuffix(".writing")
        aside.rename(path)
        _sync_folder(self.folder)
        for old in _folders(self.folder)[: -self.keep]:
            try:
                old.rename(self.folder / f".{old.name}.removing")
            except OSError as error:
                warnings.warn(f"rank 0 could not remove the old checkpoint {old}: {error}", stacklevel=2)
        self._clean()
        return path

    def _clean(self) -> None:
        """Remove what was not finished. Nobody writes meanwhile."""
        for path in self.folder.glob(".checkpoint-*"):
            if UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _find(self) -> tuple[Path, dict[str, Any], str] | None:
        if self.rank:
            return None
        self._clean()
        return _newest(self.folder)

    def _read(self, path: Path, manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read what this rank is to go on with, and change nothing yet."""
        if set(manifest["objects"]) != set(self._objects):
            raise ValueError(
                f"it holds {', '.join(manifest['objects'])}, but this Checkpoint has {', '.join(self._objects)}. "
                "Give the same objects, or use another folder; labkit.checkpoint.load reads weights alone"
            )
        ranks = manifest["world_size"]
        as_on_rank_0: list[str] = []
        if ranks != self.world_size:
            as_on_rank_0 = manifest["as_on_rank_0"]
            own = set(manifest["differ"]) - set(as_on_rank_0)
            if own := {name for name in own if not _is_generator(self._objects[name])}:
                raise ValueError(
                    f"ranks held different parts of {', '.join(sorted(own))}, so it takes {ranks} ranks to resume; "
                    f"there are {self.world_size}"
                )
        state, mine = _read(path, min(self.rank, ranks - 1), as_on_rank_0)
        shards = _read_shards(path, {tuple(place): self._place(tuple(place)) for place in mine["sharded"]})
        return _with_shards(state, shards), mine

    def _restore(self, state: dict[str, Any], mine: dict[str, Any], ranks: int) -> None:
        """Set all objects and the random states to what was read."""
        for name, thing in self._objects.items():
            if hasattr(thing, "load_state_dict"):
                thing.load_state_dict(state[name])
            elif not hasattr(thing, "set_state"):
                thing.set_epoch(state[name]["epoch"])
            elif self.rank < ranks:
                thing.set_state(state[name]["state"])
        self._position = 0
        self._resumed = {**mine["data"], "random": mine["random"], "world_size": ranks}
        if self.rank < ranks:
            set_random_state(mine["random"])
        else:
            self._resumed |= {"random": random_state(), "began": random_state(), "generators": []}

    def _place(self, place: Place) -> Tensor:
        """Give a tensor that is cut over ranks as that of the checkpoint is to be."""
        name, *keys = place
        thing = self._objects[str(name)]
        if keys[0] == "state" and hasattr(thing, "param_groups"):  # an optimizer's state is made at its first step
            return [p for group in thing.param_groups for p in group["params"]][int(keys[1])]
        value = thing.state_dict()
        for key in keys:
            value = value[key]
        return value


class _Draft(NamedTuple):
    """What a rank says before it writes."""

    aside: Path | None
    """The folder to write in, from rank 0."""
    digests: dict[str, dict[Any, str]]
    """Of each entry of each object's state, to find what is equal on all ranks."""
    pieces: dict[Place, str]
    """Of each piece of a DTensor, by its name and its place on the mesh."""


class _Written(NamedTuple):
    """What a rank says after it has written."""

    files: dict[str, dict[str, Any]]
    differ: list[str]
    """Objects that are not as on rank 0."""


# Reading, anywhere


def checkpoints(folder: str | Path) -> list[Saved]:
    """Give the checkpoints in a folder, oldest first; each is read and compared with its checksums.

    Raises CheckpointError if there is no such folder.
    """
    folder = Path(folder).expanduser().absolute()
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder}; checkpoints are made by labkit.Checkpoint(folder, …).save()"
        )
    listed = []
    for path in _folders(folder):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        try:
            manifest = _verified(path)
        except CheckpointError as error:
            listed.append(Saved(path, 0, 0, 0, size, {}, str(error)))
        else:
            values = dict(manifest["progress"])
            epoch, step = values.pop("epoch"), values.pop("step")
            listed.append(Saved(path, epoch, step, manifest["world_size"], size, values, ""))
    return listed


def load(path: str | Path, rank: int = 0) -> dict[str, Any]:
    """Give what a checkpoint holds, by name, on the CPU: `model.load_state_dict(load("runs/digits")["model"])`.

    `path` is a checkpoint, or a folder of them, of which it takes the newest that is whole. Tensors that were cut over
    ranks are put together; of what differs by rank it gives the part of `rank`. Needs no process group.

    Raises CheckpointError if the checkpoint is damaged, or is none; it names the newest that is whole.
    """
    path = Path(path).expanduser().absolute()
    if not NAME.fullmatch(path.name) and _folders(path):
        found = _newest(path)
        assert found is not None
        path, manifest, damage = found
        if damage:
            warnings.warn(f"{damage}. This is {path} instead", stacklevel=2)
    else:
        try:
            manifest = _verified(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {_offer(path.parent)}") from error
    if not 0 <= rank < manifest["world_size"]:
        raise ValueError(f"{path} was saved by ranks 0 to {manifest['world_size'] - 1}; there is no rank {rank}")
    state, mine = _read(path, rank)
    shards = _read_shards(path, {tuple(place): None for place in mine["sharded"]})
    return _with_shards(state, shards)


def _offer(folder: Path) -> str:
    whole = [saved for saved in checkpoints(folder) if not saved.damage] if folder.is_dir() else []
    if not whole:
        return "There is no whole checkpoint beside it"
    return f"The newest that is whole is {whole[-1].path} (epoch {whole[-1].epoch}, step {whole[-1].step})"


def _newest(folder: Path) -> tuple[Path, dict[str, Any], str] | None:
    """Give the newest checkpoint that is whole, its manifest, and what is wrong with newer ones."""
    damaged: list[str] = []
    for path in reversed(_folders(folder)):
        try:
            manifest = _verified(path)
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        return path, manifest, ". ".join(damaged)
    if damaged:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {'; '.join(damaged)}. Move them away to begin anew")
    return None


def _folders(folder: Path) -> list[Path]:
    """Give the checkpoints in a folder, whole or not, oldest first."""
    return sorted((path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _verified(path: Path) -> dict[str, Any]:
    """Give a checkpoint's manifest. Raises CheckpointError unless every file is as it was written."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; a checkpoint of labkit is a folder with a {MANIFEST}")
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a checkpoint of labkit: there is no {MANIFEST} in it") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} is truncated or damaged: {error}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{path / MANIFEST} says format {found!r}; this version of labkit reads {FORMAT!r}")
    if manifest.pop("sha256", None) != _digest_of(manifest):
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not match its own checksum")
    for name, facts in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if (size := file.stat().st_size) != facts["bytes"]:
            raise CheckpointError(f"{file} has {size:,} bytes of the {facts['bytes']:,} that were written")
        if (sha256 := _measure(file)["sha256"]) != facts["sha256"]:
            raise CheckpointError(
                f"{file} is damaged: its SHA-256 is {sha256[:12]}…, written was {facts['sha256'][:12]}…"
            )
    return manifest


def _read(path: Path, rank: int, as_on_rank_0: Iterable[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give the objects' state as one rank held it, and what else that rank saved."""
    state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    mine = torch.load(path / f"rank-{rank}.pt", map_location="cpu", weights_only=True)
    for name in set(mine["own"]) - set(as_on_rank_0):
        state[name].update(mine["own"][name])
        for key in mine["without"][name]:
            del state[name][key]
    return state, mine


def _with_shards(state: dict[str, Any], shards: dict[Place, Tensor]) -> dict[str, Any]:
    return {n: _map(part, lambda place, leaf: shards.get(place, leaf), (n,)) for n, part in state.items()}


class _Order:
    """In which order the first backward pass makes the gradients of a DDP model ready.

    By that order DDP cuts its buckets anew, once. From three ranks on, sums depend in the last bit on where in a bucket
    a gradient lies, so that a resumed run must begin with the buckets that the interrupted one had. See
    https://docs.pytorch.org/docs/stable/notes/ddp.html#internal-design.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._parameters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self._names: list[str] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note, name))
            for name, parameter in self._parameters.items()
        ]

    def _note(self, name: str, parameter: Tensor) -> None:
        if len(self._names) < len(self._parameters):
            self._names.append(name)

    def settled(self) -> list[str]:
        """Give the parameters' names in that order; empty before the first backward pass is over."""
        if len(self._names) < len(self._parameters):
            return []
        while self._hooks:
            self._hooks.pop().remove()
        return self._names

    def repeat(self, names: list[str]) -> None:
        """Let a backward pass of zeros make gradients ready in that order; called by all ranks. Changes no weight."""
        if not names or self._names:
            return
        gradients = [parameter.grad for parameter in self._parameters.values()]
        network = self._model.module
        self._model.module = _Zeros(network, [self._parameters[name] for name in names])
        try:
            self._model().backward()
        finally:
            self._model.module = network
        for parameter, gradient in zip(self._parameters.values(), gradients, strict=True):
            parameter.grad = gradient


class _Zeros(torch.nn.Module):
    """Stands in for a network and gives zero, made of its parameters such that their gradients come in their order."""

    def __init__(self, network: torch.nn.Module, parameters: list[Tensor]) -> None:
        super().__init__()
        self.network = network  # DDP broadcasts its buffers
        self._parameters_in_order = parameters

    def forward(self) -> Tensor:
        """Use the first parameter last: backward, it comes first."""
        return sum((p * 0).sum() for p in reversed(self._parameters_in_order))  # type: ignore[return-value]


def _cuts_buckets_anew(thing: Any) -> bool:
    return isinstance(thing, DistributedDataParallel) and not (thing.find_unused_parameters or thing.static_graph)


# Tensors and files


def _unwrapped(thing: Any) -> Any:
    while True:
        if isinstance(thing, (DistributedDataParallel, DataParallel)):
            thing = thing.module
        elif hasattr(thing, "_orig_mod"):  # torch.compile's
            thing = thing._orig_mod
        else:
            return thing


def _equal_by_design(thing: Any, world_size: int) -> bool:
    """Whether rank 0's state is all that is needed. Under DDP, ranks differ in buffers only; it broadcasts those."""
    if isinstance(thing, DistributedDataParallel):
        return thing.process_group.size() == world_size
    return hasattr(thing, "consolidate_state_dict")


def _is_generator(thing: Any) -> bool:
    return hasattr(thing, "set_state") and not hasattr(thing, "load_state_dict")


def _generators(loader: Any) -> list[torch.Generator]:
    """Give the generators that a DataLoader draws its order from, other than PyTorch's own."""
    found = [getattr(place, "generator", None) for place in (loader, getattr(loader, "sampler", None))]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def _batch_size(loader: Any) -> int:
    return getattr(loader, "batch_size", None) or 1


def _is_sharded(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and hasattr(leaf, "device_mesh")


def _map(value: Any, change: Callable[[Place, Any], Any], place: Place) -> Any:
    """Give a copy of nested dicts, lists and tuples with every leaf changed."""
    if type(value) in (dict, OrderedDict):
        changed = copy.copy(value)  # with what a module's state_dict carries as an attribute
        for key, inner in value.items():
            changed[key] = _map(inner, change, (*place, key))
        return changed
    if type(value) in (list, tuple):
        return type(value)(_map(inner, change, (*place, index)) for index, inner in enumerate(value))
    return change(place, value)


def _digest(value: Any) -> str:
    """Give the SHA-256 of a nested value, bit by bit."""
    sha = hashlib.sha256()

    def add(place: Place, leaf: Any) -> None:
        sha.update(repr(place).encode())
        if isinstance(leaf, Tensor):
            sha.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            sha.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
        else:
            sha.update(repr(leaf).encode())

    _map(value, add, ())
    return sha.hexdigest()


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check_pieces(drafts: list[_Draft]) -> None:
    """Check that DTensors of one name are parts of one tensor; raises CheckpointError, on all ranks alike."""
    known: dict[Place, tuple[int, str]] = {}
    for rank, draft in enumerate(drafts):
        for piece, digest in draft.pieces.items():
            first, expected = known.setdefault(piece, (rank, digest))
            if digest != expected:
                raise CheckpointError(
                    f"{_dotted(piece[: piece.index('at')])} is cut over ranks, but ranks {first} and {rank} hold "
                    "different values of the same piece: they belong to different tensors, of two pipeline stages, "
                    "say. Give such ranks' objects different names inside the model"
                )


class _Checked:
    """A file that remembers what it was given to write, so that what arrived can be compared with it."""

    def __init__(self, file: Any) -> None:
        self._file, self._sha, self._bytes = file, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error  # torch.save raises another one
            raise
        self._sha.update(data)
        self._bytes += len(data)
        return len(data)

    def flush(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._sha.hexdigest()}


def _write_tensors(path: Path, value: Any) -> dict[str, dict[str, Any]]:
    """Write a value by `torch.save`, to the disk itself; give {file name: its size and SHA-256}."""
    with open(path, "wb") as file:
        checked = _Checked(file)
        try:
            torch.save(value, checked)  # type: ignore[arg-type]
        except Exception as error:
            raise checked.error or error from None
        file.flush()
        os.fsync(file.fileno())
    return {path.name: checked.facts()}


def _measure(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _write_shards(aside: Path, shards: dict[Place, Any], rank: int) -> dict[str, dict[str, Any]]:
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
        _sync_folder(folder)
    return {f"shards/{file.name}": _measure(file) for file in files}


def _read_shards(path: Path, places: dict[Place, Tensor | None]) -> dict[Place, Tensor]:
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
            raise ValueError(f"{_dotted(place)} has shape {tuple(facts.size)} there and {tuple(like.shape)} here")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank reads by itself
        dcp.load({_key(place): tensor for place, tensor in tensors.items()}, storage_reader=reader, no_dist=True)
    return tensors


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


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))


def _in_words(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            text += ". Make room, or choose another folder"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            text += ". Choose a folder that can be written"
    return text


def _sync_folder(folder: Path) -> None:
    """Let what happened in a folder reach the disk."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def random_state() -> dict[str, Any]:
    """Give the state of every generator that training code draws from without naming one."""
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set what `random_state` gave; GPUs by their index, as far as they are there."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        importlib.import_module("numpy").random.set_state(state["numpy"])
    for device, cuda in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, device)
