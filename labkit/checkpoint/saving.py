"""Saving and resuming on the ranks: what each does alone, and what all do together.

Kept by hand where `torch.distributed.checkpoint.state_dict` has something similar: `get_state_dict` gathers a whole
model on rank 0 or nothing, takes one step of an optimizer that has no state yet, and knows models and optimizers only.
Here an object is whatever has a `state_dict`, DTensors are written piece by piece, and saving computes nothing.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from labkit.checkpoint import agreement, collective
from labkit.checkpoint.buckets import BucketOrder, cuts_buckets_anew
from labkit.checkpoint.commit import Writing, commit, make_aside, remove_unfinished
from labkit.checkpoint.compiled import with_compiled, without_compiled
from labkit.checkpoint.epoch import Replay, was_left_by_break
from labkit.checkpoint.files import FORMAT, as_json, write_tensors
from labkit.checkpoint.pytree import KeyPath
from labkit.checkpoint.randomness import random_state, set_random_state
from labkit.checkpoint.reading import newest, read
from labkit.checkpoint.shards import read_shards, with_shards, without_shards, write_shards

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
        self._as_on_rank_0 = {n for n, thing in objects.items() if agreement.rank_0_suffices(thing, self.world_size)}
        self._synced = {n: objects[n] for n in self._as_on_rank_0 if isinstance(objects[n], DistributedDataParallel)}
        self._orders = {name: BucketOrder(thing) for name, thing in objects.items() if cuts_buckets_anew(thing)}
        self._objects = {name: _unwrapped(thing) for name, thing in objects.items()}
        self.epoch = self.step = 0
        self._writing: Writing | None = None
        self._position = 0
        """Batches of the current epoch that were given."""
        self._replay = Replay(())
        """The loader of the current epoch."""
        self._resumed: dict[str, Any] | None = None
        """Where in an epoch to go on, until `batches` has taken notice."""
        self._each(f"write to {self.folder}", self._try_the_folder)

    def save(self, **values: Any) -> Path:
        """Write a checkpoint and return its folder. Called by every rank, after `optimizer.step()`.

        Saved within the loop over `batches`, it goes on with the next batch; saved after the loop, with the next epoch.
        `values` are plain numbers, texts and lists of them, which `resume` and `checkpoints` return.

        Raises CheckpointError on every rank if one of them fails, because the disk is full, say. Whatever happens,
        the checkpoints that were there before stay whole.
        """
        if taken := {"epoch", "step"} & set(values):
            name = taken.pop()
            raise ValueError(f"save({name}=…): the checkpoint counts {name} itself; set checkpoint.{name} to change it")
        state: dict[str, Any] = {}
        shards: dict[KeyPath, Any] = {}
        drafts = self._together("prepare a checkpoint", lambda: self._draft(state, shards, values))
        write, finish = (f"{part} a checkpoint in {self.folder}" for part in ("write", "finish"))
        digests: list[dict[agreement.Piece, str]] = []
        if doubtful := agreement.claimed_twice([draft.pieces for draft in drafts]):
            digests = self._together(write, lambda: agreement.digests_of_pieces(shards, doubtful))
        written = self._together(write, lambda: self._write(drafts, digests, state, shards))
        path = self._together(finish, lambda: self._finish(written, values))[0]
        assert path is not None
        return path

    def resume(self) -> dict[str, Any]:
        """Go on from the newest checkpoint that is whole: set every object, the random states, `epoch` and `step`.

        Called by every rank, before the training loop. Returns epoch, step and the values that `save` was given;
        an empty dict if there is nothing to resume. Checkpoints that are damaged are skipped with a warning.

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
        """Yield the batches of one epoch; after `resume`, those that had not been done. Counts `step` and `epoch`.

        The batches that are skipped are drawn nevertheless, from the random states with which the epoch began: so
        every sampler, shuffling `DataLoader` and worker process gives what it would have given. Where the last of them
        is not what it was (`persistent_workers` that draw random numbers, say), a warning names the loader.

        An epoch that ends by `break` or `return` is completed; one that ends by an exception is not.
        """
        resumed, self._resumed = self._resumed, None
        if resumed is None and self._position:
            self.epoch += 1  # the last epoch was cut short
        replay = self._replay = Replay(loader)
        self._position = 0
        if resumed is not None and resumed["position"]:
            samples = resumed["position"] * resumed["batch_size"] * resumed["world_size"]
            self._position = samples // (replay.batch_size * self.world_size)
            batches = replay.skip(resumed, self._position, resumed["world_size"] == self.world_size)
        else:
            if resumed is not None:
                replay.go_on(resumed)
            batches = iter(loader)
        while True:
            replay.before_batch()
            try:
                batch = next(batches)
            except StopIteration:
                break
            replay.note(batch)
            self._position += 1
            self.step += 1
            try:
                yield batch
            except GeneratorExit:
                if replay is self._replay and was_left_by_break():
                    self.epoch += 1
                    self._position = 0
                raise
        self.epoch += 1
        self._position = 0

    # What a rank does of it

    def _together(self, what: str, part: Callable[[], T]) -> list[T]:
        """Do this rank's part and return what the parts of all ranks returned. If one fails, raise on all of them."""
        return collective.together(what, part, self.world_size, self._clean)

    def _each(self, what: str, part: Callable[[], T]) -> T:
        """Do this rank's part and return what it returned. If another rank's fails, raise here too."""
        kept: list[T] = []
        self._together(what, lambda: kept.append(part()))
        return kept[0]

    def _try_the_folder(self) -> None:
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass

    def _draft(self, state: dict[str, Any], shards: dict[KeyPath, Any], values: dict[str, Any]) -> _Draft:
        """Collect this rank's state, DTensors apart. Rank 0 makes the folder."""
        for name, thing in self._objects.items():
            state[name] = without_shards(self._state_of(thing), name, shards)
        as_json(values, "save")  # raises for what is not plain
        if self.rank == 0:
            self._clean()
            self._writing = make_aside(self.folder)
        digests: agreement.Digests = {}
        if self.world_size > 1:
            is_equal = agreement.equal_by_design(self._synced, self._objects)
            compared = {n: part for n, part in state.items() if not agreement.gathers_on_rank_0(self._objects[n])}
            digests = agreement.digests_of(compared, is_equal)
        aside = self._writing.path if self._writing else None
        return _Draft(aside, digests, list(agreement.pieces_of(shards)))

    def _state_of(self, thing: Any) -> dict[Any, Any]:
        if agreement.gathers_on_rank_0(thing):
            thing.consolidate_state_dict(to=0)
            return thing.state_dict() if self.rank == 0 else {}
        if isinstance(thing, torch.nn.Module):
            return without_compiled(thing.state_dict())
        if hasattr(thing, "state_dict"):
            return thing.state_dict()
        return {"state": thing.get_state()} if hasattr(thing, "get_state") else {"epoch": thing.epoch}

    def _write(
        self,
        drafts: list[_Draft],
        digests: list[dict[agreement.Piece, str]],
        state: dict[str, Any],
        shards: dict[KeyPath, Any],
    ) -> _Written:
        """Write this rank's files."""
        aside = drafts[0].aside
        assert aside is not None
        agreement.check_pieces(digests)
        # First, because all ranks take part: if it fails on one, it raises on all.
        files = write_shards(aside, shards, self.rank) if any(draft.pieces for draft in drafts) else {}
        own: dict[str, dict[Any, Any]] = {}
        without: dict[str, list[Any]] = {}
        for name, found in drafts[self.rank].digests.items():
            theirs = drafts[0].digests[name]
            own[name] = {key: state[name][key] for key, digest in found.items() if theirs.get(key) != digest}
            without[name] = [key for key in theirs if key not in found]
        mine = {
            "own": own,
            "without": without,
            "sharded": list(shards),
            "orders": {name: order.settled() for name, order in self._orders.items()},
            "random": random_state(),
            "data": self._replay.state(self._position),
        }
        files |= write_tensors(aside / f"rank-{self.rank}.pt", mine)
        if self.rank == 0:
            files |= write_tensors(aside / "state.pt", state)
        return _Written(files, [name for name in own if own[name] or without[name]])

    def _finish(self, written: list[_Written], values: dict[str, Any]) -> Path | None:
        """Describe what was written and move it into place: on rank 0."""
        if self.rank:
            return None
        assert self._writing is not None
        manifest = {
            "format": FORMAT,
            "torch": torch.__version__,
            "world_size": self.world_size,
            "progress": {"epoch": self.epoch, "step": self.step, **as_json(values, "save")},
            "objects": list(self._objects),
            "differ": sorted({name for rank in written for name in rank.differ}),
            "as_on_rank_0": sorted(self._as_on_rank_0),
            "files": {name: facts for rank in written for name, facts in rank.files.items()},
        }
        return commit(self._writing, manifest, self.keep)

    def _clean(self) -> None:
        """Remove what was not finished, but not what another run is writing."""
        if self.rank == 0:
            if self._writing is not None:
                self._writing.release()
            remove_unfinished(self.folder)

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
        shards = read_shards(path, {tuple(path): self._now_at(tuple(path)) for path in mine["sharded"]})
        return with_shards(state, shards), mine

    def _restore(self, state: dict[str, Any], mine: dict[str, Any], ranks: int) -> None:
        """Set all objects and the random states to what was read."""
        for name, thing in self._objects.items():
            if isinstance(thing, torch.nn.Module):
                thing.load_state_dict(with_compiled(state[name], thing))
            elif hasattr(thing, "load_state_dict"):
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
            now = random_state()
            self._resumed |= {"random": now, "began": now, "generators": [], "generators_now": []}

    def _now_at(self, path: KeyPath) -> Tensor:
        """Return the tensor that this rank has at a path, by which the checkpoint's is to be cut."""
        name, *keys = path
        thing = self._objects[str(name)]
        if keys[0] == "state" and hasattr(thing, "param_groups"):  # an optimizer's state is made at its first step
            return [p for group in thing.param_groups for p in group["params"]][int(keys[1])]
        value: Any = self._state_of(thing)
        for key in keys:
            value = value[key]
        found: Tensor = value
        return found


class _Draft(NamedTuple):
    """What a rank says before it writes."""

    aside: Path | None
    """The folder to write in, from rank 0."""
    digests: agreement.Digests
    """Of all that may differ by rank; empty on one rank alone."""
    pieces: list[agreement.Piece]
    """Of DTensors, those that lie on this rank."""


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


def _is_generator(thing: Any) -> bool:
    return hasattr(thing, "set_state") and not hasattr(thing, "load_state_dict")
