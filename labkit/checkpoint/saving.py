"""Saving and resuming on the ranks: what each does alone, and what all do together."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from labkit.checkpoint.buckets import BucketOrder, cuts_buckets_anew
from labkit.checkpoint.files import (
    FORMAT,
    MANIFEST,
    UNFINISHED,
    CheckpointError,
    checksum_of,
    folders,
    number,
    sync_folder,
    write_tensors,
)
from labkit.checkpoint.nested import Place, digest_of, dotted, map_leaves
from labkit.checkpoint.randomness import random_state, set_random_state
from labkit.checkpoint.reading import newest, read
from labkit.checkpoint.shards import is_sharded, read_shards, with_shards, write_shards

PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, complex, str, bytes, set, Counter, torch.Size}
PLAIN |= {torch.dtype, torch.device}
"""What `torch.load(weights_only=True)` reads, besides dicts, lists and tuples of these."""

CULPRIT_FIRST_S = 0.5
"""How long a rank waits before it raises another rank's error, so that the one that failed is seen to fail first."""

T = TypeVar("T")


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
        self._orders = {name: BucketOrder(thing) for name, thing in objects.items() if cuts_buckets_anew(thing)}
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
            if is_sharded(leaf):
                shards[place] = leaf
                return None
            if type(leaf) not in PLAIN:
                raise TypeError(
                    f"{dotted(place)} is a {type(leaf).__module__}.{type(leaf).__qualname__}; a checkpoint holds "
                    "tensors, plain numbers and texts, and dicts, lists and tuples of them: nothing else is read back "
                    "safely"
                )
            return leaf

        for name, thing in self._objects.items():
            state[name] = map_leaves(self._state_of(thing), sort_out, (name,))
        json.dumps(values)  # raises for what is not plain
        aside = None
        if self.rank == 0:
            self._clean()
            last = max((number(path) for path in folders(self.folder)), default=0)
            aside = self.folder / f".checkpoint-{last + 1:06d}.writing"
            aside.mkdir()
        digests: dict[str, dict[Any, str]] = {name: {} for name in state}
        if self.world_size > 1:
            digests = {name: {key: digest_of(value) for key, value in part.items()} for name, part in state.items()}
        pieces = {
            (*place, "at", *shard.device_mesh.get_coordinate()): digest_of(shard.to_local())
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
        files = write_shards(aside, shards, self.rank) if any(draft.pieces for draft in drafts) else {}
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
        files |= write_tensors(aside / f"rank-{self.rank}.pt", mine)
        if self.rank == 0:
            files |= write_tensors(aside / "state.pt", state)
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
            json.dump({**manifest, "sha256": checksum_of(manifest)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(aside)
        path = self.folder / aside.name.removeprefix(".").removesuffix(".writing")
        aside.rename(path)
        sync_folder(self.folder)
        for old in folders(self.folder)[: -self.keep]:
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
        return newest(self.folder)

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
        state, mine = read(path, min(self.rank, ranks - 1), as_on_rank_0)
        shards = read_shards(path, {tuple(place): self._place(tuple(place)) for place in mine["sharded"]})
        return with_shards(state, shards), mine

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


def _check_pieces(drafts: list[_Draft]) -> None:
    """Check that DTensors of one name are parts of one tensor; raises CheckpointError, on all ranks alike."""
    known: dict[Place, tuple[int, str]] = {}
    for rank, draft in enumerate(drafts):
        for piece, digest in draft.pieces.items():
            first, expected = known.setdefault(piece, (rank, digest))
            if digest != expected:
                raise CheckpointError(
                    f"{dotted(piece[: piece.index('at')])} is cut over ranks, but ranks {first} and {rank} hold "
                    "different values of the same piece: they belong to different tensors, of two pipeline stages, "
                    "say. Give such ranks' objects different names inside the model"
                )


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
