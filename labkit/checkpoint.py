"""Save a training so that a killed run goes on as if nothing had happened.

    checkpoint-000012/   moved into place, whole, by one rename; until then it has another name
        about.json       epoch, step, world size, your values, and the size of every other file
        rank-0.pt        {"state": {"model": …, "optimizer": …}, …}: rank 0's objects and random states
        rank-1.pt …      another rank's random states, and its objects, as far as they differ from rank 0's
        shards/          sharded tensors (DTensors), by `torch.distributed.checkpoint` (DCP): every rank's pieces

Why DCP writes only DTensors: of tensors with one name its planner keeps one, of any rank, so that pipeline stages of
your own would overwrite each other; 100 small layers take it ten times as long as `torch.save`; and `get_state_dict`
takes a step with an optimizer that has no state yet, which changes the next step.

Nothing here runs code from a file of another user: `torch.load(weights_only=True)` reads the tensors, and the index of
DCP, which is a pickle, is read only where it is your own.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import random
import shutil
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from labkit.protocol.pages import help_hint

__all__ = ["Checkpoint", "CheckpointError", "Saved", "checkpoints", "load", "random_state", "set_random_state"]

T = TypeVar("T")

Where = tuple[Any, ...]
"""Where a tensor is in nested dicts and lists: the keys that lead to it."""

CULPRIT_FIRST_S = 0.5
"""How long a rank waits before it raises another rank's error, so that the one that failed is seen to fail first."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; what was saved before is as it was."""

    def __str__(self) -> str:
        return f"{self.args[0]}\n{help_hint('checkpoint')}"


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
    machine, with as many ranks and threads as before, bit for bit, as far as the training itself is deterministic.
    (With three or more ranks DDP adds gradients in another order until it has rebuilt its buckets, so that the last
    bits may differ.) One run at a time uses a folder.

    An object has `state_dict` and `load_state_dict`, or is a `torch.Generator`, or a dict, which is filled in place.
    `DistributedDataParallel`, `nn.DataParallel` and `torch.compile` are unwrapped: no key begins with `module.`. An
    object is saved once if all ranks hold the same, and for each rank if they do not. (Of a DDP model rank 0's weights
    and buffers are everybody's, unless it has a communication hook or broadcasts no buffers.) Sharded tensors
    (`fully_shard`, `parallelize_module`) are saved piece by piece, and resume on another number of ranks. Saved
    besides: each rank's random states (Python's, NumPy's if imported, PyTorch's, CUDA's if used), and how far `batches`
    has come.

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
        if keep < 1:
            raise ValueError(f"keep is how many checkpoints to keep, at least 1; got {keep!r}")
        if not objects:
            raise ValueError("a Checkpoint needs something to save: Checkpoint(folder, model=model, optimizer=…)")
        for name, thing in objects.items():
            if not isinstance(thing, (dict, torch.Generator)) and not hasattr(thing, "load_state_dict"):
                raise TypeError(
                    f"{name} is a {type(thing).__name__}, which has no state_dict() and load_state_dict(); "
                    "plain values go to save(…) by name"
                )
        self.folder, self.keep = Path(folder).expanduser().absolute(), keep
        self.epoch = self.step = 0
        grouped = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        self._given, self._objects = objects, {name: _unwrapped(thing) for name, thing in objects.items()}
        self._position = 0
        """Batches of the current epoch that were given …"""
        self._epoch_begun = 0
        """… in this one …"""
        self._glimpse = ""
        """… and some numbers of the last one."""
        self._loader: Any = None
        self._began = self._before = random_state(_generators(self._objects, None))
        """The random states with which the current epoch began, and those before its last batch was drawn."""
        self._resumed: dict[str, Any] | None = None
        """Where in an epoch to go on, until `batches` has taken notice."""
        self._group: Any = None
        self._pool = ThreadPoolExecutor(1, "labkit-checkpoint")
        self._saving: Future[None] | None = None
        self._each(f"write to {self.folder}", self._try_the_folder)

    def save(self, *, wait: bool = True, **values: Any) -> Path:
        """Write a checkpoint and return its folder. Called by every rank, after `optimizer.step()`.

        Saved within the loop over `batches`, it goes on with the next batch; saved after the loop, with the next epoch.

        Args:
            wait: False returns once the state has been copied, and a thread writes the copy. `wait()`, the next `save`,
                or `resume` raises what went wrong; call `wait()` before the function returns.
            values: plain numbers, texts, lists and dicts of them, which `resume` and `checkpoints` return.

        Raises CheckpointError on every rank if one of them fails, because the disk is full, say. Whatever happens,
        the checkpoints that were there before stay whole.
        """
        if {"epoch", "step"} & set(values):
            raise ValueError(
                "save(…): the checkpoint counts epoch and step itself; set checkpoint.epoch, checkpoint.step"
            )
        self.wait()
        state: dict[str, Any] = {}
        shards: dict[Where, Tensor] = {}
        drafts = self._together("prepare a checkpoint", lambda: self._draft(state, shards, values, copies=not wait))
        aside, digests, _ = drafts[0]
        assert aside is not None
        differ = sorted(name for name in digests if len({draft.digests[name] for draft in drafts}) > 1)
        own = {name: part for name, part in state.items() if self.rank == 0 or name in differ}
        mine = {
            "state": own,
            "random": random_state(_generators(self._objects, self._loader)),
            "began": self._began,
            "before": self._before,
            "position": self._position if self._is_within_epoch() else 0,
            "batch_size": _batch_size(self._loader),
            "glimpse": self._glimpse,
        }
        pieces = {_shard_name(where, leaf, where[0] in differ): leaf for where, leaf in shards.items()}
        is_sharded = any(draft.is_sharded for draft in drafts)
        about = {
            "epoch": self.epoch,
            "step": self.step,
            "world_size": self.world_size,
            "objects": list(self._objects),
            "differ": differ,
            "values": values,
        }
        write = f"write a checkpoint in {self.folder}"

        def write_mine() -> None:
            _write_tensors(aside / f"rank-{self.rank}.pt", mine)

        self._each(write, lambda: write_mine() if self.rank else None)
        begun: Callable[[], object] | None = None
        if is_sharded and wait:
            self._each(write, lambda: _write_shards(pieces, aside))
        elif is_sharded:
            if self._group is None and self.world_size > 1:
                self._group = dist.new_group(backend="gloo")  # its collectives do not mix with the training's
            begun = _begin_shards(pieces, aside, self._group)

        def finish() -> None:
            try:
                if self.rank == 0:
                    write_mine()
            finally:
                if begun is not None:
                    begun()  # on rank 0 it returns when all ranks have written
            if self.rank == 0:
                self._commit(aside, about)

        if wait:
            self._each(write, finish)
        else:
            self._saving = self._pool.submit(finish)
        return _place_of(aside)

    def wait(self) -> None:
        """Return when a checkpoint that `save(wait=False)` began is in place; raise what went wrong. On every rank."""
        saving, self._saving = self._saving, None
        if saving is not None:
            self._each(f"write a checkpoint in {self.folder}", saving.result)

    def resume(self) -> dict[str, Any]:
        """Go on from the newest checkpoint that is whole: set every object, the random states, `epoch` and `step`.

        Called by every rank, before the training loop. Returns epoch, step and the values that `save` was given;
        an empty dict if there is nothing to resume. Checkpoints that are damaged are skipped with a warning.

        With another number of ranks than saved it, weights and optimizer are the same, DTensors are sharded anew, and
        an epoch goes on after as many samples. A rank that was there gets its random states back, a new one keeps what
        it was seeded with. That cannot be bit for bit, and a warning says so.

        Raises CheckpointError on every rank: none of the checkpoints is whole, the newest holds other objects, or it
        takes as many ranks as saved it, because each held something else.
        """
        self.wait()
        search = f"find a checkpoint in {self.folder}"
        found = self._together(search, lambda: None if self.rank else _newest(self.folder))[0]
        if found is None:
            return {}
        saved, damage = found
        if damage and self.rank == 0:
            warnings.warn(f"{damage}. Going on from {saved.path} instead", stacklevel=2)
        if saved.world_size != self.world_size and self.rank == 0:
            warnings.warn(
                f"{saved.path} was saved by {saved.world_size} ranks and goes on with {self.world_size}: weights and "
                "optimizer are the same, which rank takes which samples and random numbers is not",
                stacklevel=2,
            )
        resume = f"resume from {saved.path}"
        mine = self._each(resume, lambda: self._read(saved))
        self._each(resume, lambda: self._restore(saved, mine))
        self.epoch, self.step = saved.epoch, saved.step
        return {"epoch": saved.epoch, "step": saved.step, **saved.values}

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of one epoch; after `resume`, those that had not been done. Counts `step` and `epoch`.

        The batches that are skipped are drawn nevertheless, from the random states with which the epoch began: so
        every sampler, shuffling `DataLoader` and worker process gives what it would have given. Where the last of them
        is not what it was (`persistent_workers` that draw random numbers, say), a warning names the loader.

        An epoch that you leave by `break`, or that an exception ends, is not completed: after `save` and `resume` the
        rest of it follows. If it is done all the same, write `checkpoint.epoch += 1`.
        """
        resumed, self._resumed = self._resumed, None
        if resumed is None and self._is_within_epoch():
            self.epoch += 1  # the last one was left by `break`
        self._loader, self._position, self._epoch_begun = loader, 0, self.epoch
        generators = _generators(self._objects, loader)
        if resumed is not None:
            samples = resumed["position"] * resumed["batch_size"] * resumed["world_size"]
            self._position = samples // (_batch_size(loader) * self.world_size)
            set_random_state(resumed["began" if self._position else "random"], generators)
        self._began = random_state(generators)
        batches = iter(loader)
        if resumed is not None and self._position:
            is_as_before = resumed["world_size"] == self.world_size
            for left in reversed(range(self._position)):
                if left == 0 and is_as_before:  # the training's own draws came in between
                    set_random_state(resumed["before"], generators)
                batch = next(batches, None)
            if is_as_before and _glimpse(batch) != resumed["glimpse"]:
                warnings.warn(
                    f"batch {self._position} of the {type(loader).__name__} is not what it was before: the rest of "
                    "this epoch has other samples. Give the loader's own random generators to Checkpoint(…) by name",
                    stacklevel=2,
                )
            set_random_state(resumed["random"], generators)
        while True:
            self._before = random_state(generators)
            try:
                batch = next(batches)
            except StopIteration:
                break
            self._glimpse = _glimpse(batch)
            self._position += 1
            self.step += 1
            yield batch
        self.epoch += 1
        self._position = 0

    # What a rank does of it

    def _together(self, what: str, part: Callable[[], T]) -> list[T]:
        """Do this rank's part and return what the parts of all ranks returned. If one fails, raise on all of them."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = part()
        except Exception as error:
            failure = error
        outcomes: list[Any] = [(result, "" if failure is None else _describe(failure))]
        if self.world_size > 1:
            mine, outcomes = outcomes[0], [None] * self.world_size
            dist.all_gather_object(outcomes, mine)
        for rank, (_, message) in enumerate(outcomes):
            if message:
                self._clear()
                if failure is None:
                    time.sleep(CULPRIT_FIRST_S)
                raise CheckpointError(f"rank {rank} could not {what}: {message}") from failure
        return [result for result, _ in outcomes]

    def _each(self, what: str, part: Callable[[], T]) -> T:
        """Do this rank's part and return what it returned. If another rank's fails, raise here too."""
        kept: list[T] = []
        self._together(what, lambda: kept.append(part()))
        return kept[0]

    def _is_within_epoch(self) -> bool:
        return self._position > 0 and self.epoch == self._epoch_begun

    def _try_the_folder(self) -> None:
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / ".checkpoint-probe"
            probe.mkdir(exist_ok=True)
            probe.rmdir()

    def _draft(
        self, state: dict[str, Any], shards: dict[Where, Tensor], values: dict[str, Any], *, copies: bool
    ) -> _Draft:
        """Collect this rank's state, DTensors apart. Rank 0 makes the folder."""

        def sort_out(where: Where, leaf: Tensor) -> Tensor:
            if _is_sharded(leaf):
                shards[where] = leaf.detach()
                return _described(where, leaf)
            if not _is_plain(leaf):
                raise TypeError(f"{'.'.join(map(str, where))} is no dense tensor of an ordinary type")
            leaf = leaf.detach()
            # `torch.save` writes a tensor's whole storage, however little of it the tensor shows.
            is_part = leaf.untyped_storage().nbytes() > leaf.numel() * leaf.element_size()
            return leaf.to("cpu", copy=True) if copies else leaf.clone() if is_part else leaf

        if unfit := [name for name, value in values.items() if not _is_plain_value(value)]:
            raise TypeError(
                f"save({unfit[0]}=…): a value is plain numbers, texts, lists, and dicts whose keys are texts"
            )
        digests = {}
        for name, thing in self._objects.items():
            state[name] = _mapped(_state_of(thing), sort_out, (name,))
            _check_readable(name, state[name])
            if self.world_size > 1 and not _is_replicated(self._given[name]):
                digests[name] = _digest(state[name], shards, name)
        return _Draft(self._make_aside() if self.rank == 0 else None, digests, bool(shards))

    def _make_aside(self) -> Path:
        """Make a folder for the next checkpoint, under a name that no reader looks for."""
        self._clear()
        number = max((int(path.name[11:]) for path in _folders(self.folder)), default=0) + 1
        aside = self.folder / f".checkpoint-{number:06d}.writing"
        aside.mkdir()
        return aside

    def _clear(self) -> None:
        """Remove what a run that was killed, or a save that failed, has left."""
        if self.rank == 0:
            for path in self.folder.glob(".checkpoint-*"):
                shutil.rmtree(path, ignore_errors=True)

    def _commit(self, aside: Path, about: dict[str, Any]) -> None:
        """Write the sizes, move the folder into place, remove all but the last `keep`."""
        names = [f"rank-{rank}.pt" for rank in range(self.world_size)]
        if missing := [name for name in names if not (aside / name).is_file()]:
            raise OSError(
                f"{aside / missing[0]} was written but is not there on rank 0; "
                "ranks on several nodes need a folder on a file system that they share"
            )
        sizes = {str(path.relative_to(aside)): path.stat().st_size for path in aside.rglob("*") if path.is_file()}
        with open(aside / "about.json", "w", encoding="utf-8") as file:
            json.dump({**about, "sizes": sizes}, file, indent=1)
            _flush(file)
        _flush_folder(aside)
        aside.rename(_place_of(aside))
        _flush_folder(self.folder)
        for old in _folders(self.folder)[: -self.keep]:
            with contextlib.suppress(OSError):  # the new one is in place; the next save clears what is left of this
                shutil.rmtree(old.rename(old.with_name(f".{old.name}")))

    def _read(self, saved: Saved) -> dict[str, Any]:
        """Read what this rank is to go on with, and change nothing yet."""
        about = _about(saved.path)
        if set(about["objects"]) != set(self._objects):
            raise ValueError(
                f"it holds {', '.join(about['objects'])}, but this Checkpoint has {', '.join(self._objects)}. "
                "Give the same objects, or use another folder; labkit.checkpoint.load reads weights alone"
            )
        own = [name for name in about["differ"] if not isinstance(self._objects[name], (dict, torch.Generator))]
        if own and saved.world_size != self.world_size:
            raise ValueError(
                f"ranks held different parts of {', '.join(own)}, so it takes {saved.world_size} ranks to resume; "
                f"there are {self.world_size}"
            )
        live: dict[Where, Tensor] = {}
        for name, thing in self._objects.items():
            if isinstance(thing, (nn.Module, dict)):
                _mapped(_state_of(thing), live.setdefault, (name,))
            if isinstance(thing, torch.optim.Optimizer):  # its state is sharded as its parameters are
                parameters = (parameter for group in thing.param_groups for parameter in group["params"])
                live |= {(name, "state", index): parameter for index, parameter in enumerate(parameters)}
        return _read(saved.path, self.rank if self.rank < saved.world_size else 0, about, live)

    def _restore(self, saved: Saved, mine: dict[str, Any]) -> None:
        """Set all objects and the random states to what was read."""
        for name, thing in self._objects.items():
            _load_into(thing, mine["state"].pop(name))
        if self.rank >= saved.world_size:
            mine["began"] = mine["before"] = mine["random"] = random_state(_generators(self._objects, None))
        self._position = 0
        self._resumed = {**mine, "world_size": saved.world_size}
        set_random_state(mine["random"], _generators(self._objects, None))


class _Draft(NamedTuple):
    """What a rank says before it writes."""

    aside: Path | None
    """The folder to write in, from rank 0."""
    digests: dict[str, str]
    """Of every object that ranks may hold differently."""
    is_sharded: bool


# Reading


def checkpoints(folder: str | Path) -> list[Saved]:
    """Return the checkpoints in a folder, oldest first; the size of each file is compared with what was written.

    Raises CheckpointError if there is no such folder.
    """
    folder = Path(folder).expanduser().absolute()
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder}; checkpoints are made by labkit.Checkpoint(folder, …).save()"
        )
    return [_look_at(path) for path in _folders(folder)]


def load(path: str | Path, rank: int = 0) -> dict[str, Any]:
    """Return what a checkpoint holds, by name, on the CPU: `model.load_state_dict(load("runs/digits")["model"])`.

    Args:
        path: a checkpoint, or a folder of them, of which it takes the newest that is whole.
        rank: whose part, of objects that ranks held differently. Sharded tensors are put together.

    Needs no process group. Raises CheckpointError if the checkpoint is damaged, or is none; it names the newest that
    is whole.
    """
    path = Path(path).expanduser().absolute()
    found = _newest(path)
    saved, damage = found or (_look_at(path), "")
    if saved.damage:
        whole = [each.path for each in map(_look_at, _folders(path.parent)) if not each.damage]
        offer = f"The newest that is whole is {whole[-1]}" if whole else f"No checkpoint in {path.parent} is whole"
        raise CheckpointError(f"{saved.damage}. {offer}")
    if damage:
        warnings.warn(f"{damage}. This is {saved.path} instead", stacklevel=2)
    state: dict[str, Any] = _read(saved.path, rank, _about(saved.path), {})["state"]
    return state


def _folders(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, whole or not, oldest first."""
    found = (path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit())
    return sorted(found, key=lambda path: int(path.name[11:]))


def _look_at(path: Path) -> Saved:
    """Describe a checkpoint; say what is wrong with it."""
    try:
        about = _about(path)
        epoch, step, world_size = about["epoch"], about["step"], about["world_size"]
        values, sizes = about["values"], about["sizes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        damage = f"{path} is damaged, or no checkpoint: its about.json cannot be read ({type(error).__name__}: {error})"
        return Saved(path, 0, 0, 0, 0, {}, damage)
    there = {name: (path / name).stat().st_size if (path / name).exists() else 0 for name in sizes}
    wrong = (name for name in sizes if there[name] != sizes[name])
    damages = (f"{path / name} has {there[name]:,} bytes of the {sizes[name]:,} that were written" for name in wrong)
    return Saved(path, epoch, step, world_size, sum(there.values()), values, next(damages, ""))


def _about(path: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((path / "about.json").read_text(encoding="utf-8"))
    return about


def _newest(folder: Path) -> tuple[Saved, str] | None:
    """Return the newest checkpoint that is whole, and what is wrong with newer ones."""
    damaged: list[str] = []
    for path in reversed(_folders(folder)):
        saved = _look_at(path)
        if not saved.damage:
            return saved, ". ".join(damaged)
        damaged.append(saved.damage)
    if damaged:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {'; '.join(damaged)}. Move them away to begin anew")
    return None


def _read(path: Path, rank: int, about: dict[str, Any], live: dict[Where, Tensor]) -> dict[str, Any]:
    """Return what a rank has saved, sharded as the live tensors are; without one, a tensor is whole."""
    mine = torch.load(path / f"rank-{rank}.pt", map_location="cpu", weights_only=True)
    first = mine if rank == 0 else torch.load(path / "rank-0.pt", map_location="cpu", weights_only=True, mmap=True)
    mine["state"] = {name: mine["state"].get(name, first["state"][name]) for name in about["objects"]}
    shards: dict[Where, Tensor] = {}

    def find(where: Where, leaf: Tensor) -> Tensor:
        like: Any = live.get(where, live.get(where[:3]))  # an optimizer's state is sharded as the parameter is
        if like is None or not _is_sharded(like) or like.shape != leaf.shape:
            if leaf.is_meta:
                leaf = shards[where] = torch.empty(leaf.shape, dtype=leaf.dtype)
        elif leaf.is_meta:
            leaf = shards[where] = torch.empty_like(like, dtype=leaf.dtype, requires_grad=False)
        else:
            from torch.distributed.tensor import distribute_tensor

            leaf = distribute_tensor(leaf, like.device_mesh, like.placements, src_data_rank=None)
        return leaf

    mine["state"] = _mapped(mine["state"], find)
    if shards:
        _read_shards(path, shards, rank, about["differ"])
    return mine


# Objects and trees


def _unwrapped(thing: Any) -> Any:
    while True:
        if isinstance(thing, (DistributedDataParallel, DataParallel)):
            thing = thing.module
        elif isinstance(thing, nn.Module) and hasattr(thing, "_orig_mod"):  # torch.compile's
            thing = thing._orig_mod
        else:
            return thing


def _is_replicated(thing: Any) -> bool:
    """Whether DDP keeps all ranks alike: it averages gradients, and sends rank 0's buffers before each forward pass.

    A communication hook may average less often, or among some ranks (`post_localSGD_hook`).
    """
    ddp = getattr(thing, "_orig_mod", thing) if isinstance(thing, nn.Module) else thing
    if not isinstance(ddp, DistributedDataParallel) or ddp.parameters_to_ignore or ddp._comm_hooks:
        return False
    return ddp.broadcast_buffers and dist.get_world_size(ddp.process_group) == dist.get_world_size()


def _state_of(thing: Any) -> Any:
    if isinstance(thing, dict):
        return thing
    if isinstance(thing, torch.Generator):
        return {"state": thing.get_state()}
    state = thing.state_dict()
    return _renamed(state, _plain_key) if isinstance(thing, nn.Module) else state


def _load_into(thing: Any, state: dict[str, Any]) -> None:
    if isinstance(thing, dict):
        thing.clear()
        thing.update(state)
    elif isinstance(thing, torch.Generator):
        thing.set_state(state["state"])
    elif isinstance(thing, nn.Module):
        keys = {_plain_key(key): key for key in thing.state_dict()}
        thing.load_state_dict(_renamed(state, lambda key: keys.get(key, key)))
    else:
        thing.load_state_dict(state)


def _plain_key(key: str) -> str:
    return key.replace("_orig_mod.", "")  # of a layer that was compiled by itself


def _renamed(state: Any, name: Callable[[str], str]) -> Any:
    renamed = OrderedDict((name(key), value) for key, value in state.items())
    vars(renamed).update(vars(state) if isinstance(state, OrderedDict) else {})  # the versions of the modules
    return renamed


def _mapped(tree: Any, change: Callable[[Where, Tensor], Any], where: Where = ()) -> Any:
    """Return nested dicts, lists and tuples with every tensor changed."""
    if type(tree) in (dict, OrderedDict):
        mapped = copy.copy(tree)
        mapped.update((key, _mapped(value, change, (*where, key))) for key, value in tree.items())
        return mapped
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, change, (*where, index)) for index, value in enumerate(tree))
    return change(where, tree) if isinstance(tree, Tensor) else tree


def _is_sharded(leaf: Tensor) -> bool:
    return hasattr(leaf, "device_mesh")


def _described(where: Where, leaf: Tensor) -> Tensor:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")


def _is_plain_value(value: Any) -> bool:
    """Whether JSON gives it back as it is, but for tuples."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain_value(inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain_value, value))
    return value is None or isinstance(value, (str, int, float))


def _check_readable(name: str, state: Any) -> None:
    """Raise TypeError for what `torch.load(weights_only=True)` does not read back."""
    file = io.BytesIO()
    try:
        torch.save(_mapped(state, _described), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if "Unsupported" in line), str(error))
        raise TypeError(
            f"{name} holds something that torch.load(weights_only=True) does not read back ({reason:.200}). A "
            "checkpoint holds tensors, plain numbers and texts, and dicts, lists and tuples of them"
        ) from error


def _is_plain(leaf: Tensor) -> bool:
    is_strided = type(leaf) in (Tensor, nn.Parameter) and leaf.layout == torch.strided and not leaf.is_quantized
    return is_strided and not leaf.is_conj() and not leaf.is_neg()


def _digest(state: Any, shards: dict[Where, Any], name: str) -> str:
    """Return a digest of what this rank holds of an object; of a sharded tensor, of the ranks that have its pieces.

    To write what is equal only once takes a pass over all of it on every rank, at some 1.5 GB/s: less than to write it.
    """
    digest = hashlib.sha256()

    def add(where: Where, leaf: Tensor) -> str:
        if where in shards:
            digest.update(repr(shards[where].device_mesh.mesh.tolist()).encode())
        else:
            data = leaf.detach().cpu().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
            digest.update(data.numpy().data)
        return f"{leaf.dtype} {tuple(leaf.shape)}"

    digest.update(repr(_mapped(state, add, (name,))).encode())
    return digest.hexdigest()


# Files


def _place_of(aside: Path) -> Path:
    return aside.with_name(aside.stem[1:])


def _write_tensors(path: Path, value: Any) -> None:
    with open(path, "wb") as file:
        torch.save(value, file)
        _flush(file)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _describe(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error.args[0])
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__  # torch.save hides the system's error behind its own
    return f"{type(cause or error).__name__}: {cause or error}"


# Sharded tensors


def _shard_name(where: Where, leaf: Any, is_own: bool) -> str:
    """Name a sharded tensor. Of an object that ranks hold differently, the name has the ranks that share this one."""
    name = "/".join(map(str, where))
    return f"{leaf.device_mesh.mesh.flatten().tolist()}/{name}" if is_own else name


def _write_shards(pieces: dict[str, Tensor], aside: Path) -> None:
    """Write this rank's pieces of DTensors. Called by all ranks."""
    import torch.distributed.checkpoint as dcp

    with _raising_one_failure():
        dcp.save(pieces, checkpoint_id=aside / "shards")


def _begin_shards(pieces: dict[str, Tensor], aside: Path, group: Any) -> Callable[[], object]:
    """Copy this rank's pieces and begin to write them. Called by all ranks; return what waits for all of them."""
    import torch.distributed.checkpoint as dcp

    begun: Any = dcp.async_save(pieces, checkpoint_id=aside / "shards", process_group=group)

    def result() -> None:
        with _raising_one_failure():
            begun.result()

    return result


@contextlib.contextmanager
def _raising_one_failure() -> Iterator[None]:
    """Raise the first rank's failure in place of PyTorch's `CheckpointException`, which is no `Exception`."""
    from torch.distributed.checkpoint import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # in one process
        try:
            yield
        except CheckpointException as error:
            rank, (failure, _) = min(error.failures.items())
            raise CheckpointError(f"rank {rank}: {_describe(failure)}") from failure


def _read_shards(path: Path, shards: dict[Where, Tensor], rank: int, differ: list[str]) -> None:
    """Read sharded tensors in place, each rank by itself."""
    import torch.distributed.checkpoint as dcp

    index = path / "shards" / ".metadata"
    if index.stat().st_uid != os.getuid():
        raise CheckpointError(
            f"{index} is another user's, and is a pickle, which can run code. If you trust it, copy the folder"
        )
    reader = dcp.FileSystemReader(path / "shards")
    stored = list(reader.read_metadata().state_dict_metadata)

    def name(where: Where) -> str:
        plain = "/".join(map(str, where))
        if where[0] not in differ:
            return plain
        return next(key for key in stored if key.endswith(f"]/{plain}") and rank in json.loads(key.partition("/")[0]))

    with _raising_one_failure():
        dcp.load({name(where): leaf for where, leaf in shards.items()}, storage_reader=reader, no_dist=True)


# Random states, and the place in an epoch


def random_state(generators: Iterable[torch.Generator] = ()) -> dict[str, Any]:
    """Return the states of this process's random number generators, and of those that are given."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys), *rest)
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    state["generators"] = [generator.get_state() for generator in generators]
    return state


def set_random_state(state: dict[str, Any], generators: Iterable[torch.Generator] = ()) -> None:
    """Set them to what `random_state` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy(), *rest))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    for generator, own in zip(generators, state["generators"], strict=False):
        generator.set_state(own)


def _generators(objects: dict[str, Any], loader: Any) -> list[torch.Generator]:
    """Return the generators among the objects, then those that a loader and its samplers have of their own."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [*objects.values(), *(getattr(part, "generator", None) for part in parts)]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _batch_size(loader: Any) -> int:
    of_sampler = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return getattr(loader, "batch_size", None) or of_sampler or 1


def _glimpse(batch: Any) -> str:
    """Return some of the numbers of a batch as text."""
    numbers: list[Any] = []

    def note(where: Where, leaf: Tensor) -> None:
        if _is_plain(leaf) and leaf.device.type == "cpu":  # a copy from a GPU would wait for it
            numbers.append(leaf.detach().take(torch.arange(0, leaf.numel(), max(1, leaf.numel() // 16))).tolist())

    _mapped(batch, note)
    return repr(numbers or batch)[:400]
