"""Where in an epoch a training is: the batches that were given, and the random numbers that a loader goes on from.

The problem: a loader's state is inside its iterator, and nothing in PyTorch saves that. What is done: the batches that
were given are drawn again, from the random states with which the epoch began, and dropped; then every generator is set
to where it was at the save, because the training may have drawn from the same one. What does not work: to believe
that. A sampler that draws now and then, between the training's own draws, or a loader that hides a generator, gives
other samples without a word. So the last of those batches is compared with the one that was given, and a warning names
the loader where they differ. What still fails: batches that differ in other numbers than the few that are compared;
and, after a save between two epochs, where there is no batch to compare, a generator that nothing leads to.
"""

from __future__ import annotations

import dis
import random
import sys
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from labkit.checkpoint.pytree import tree_map_with_path
from labkit.checkpoint.randomness import plain, random_state, set_random_state

GLIMPSE = 64
"""Numbers of each tensor of a batch that are kept to be compared."""

DEPTH = 4
"""How far a generator may be inside a loader; loaders and samplers inside each other, as Accelerate's, do not count."""


class Replay:
    """A loader, and all generators that it draws its order from, other than the process's own."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._generators = list(_generators_in(loader, DEPTH, set()))
        self._began = self._states()
        self._before = self._began
        self._glimpse: list[Any] | None = None

    def state(self, position: int) -> dict[str, Any]:
        """Return what a checkpoint keeps of an epoch after its first `position` batches."""
        if not position:
            return {"position": 0, "generators": self._states()["generators"]}
        began, before = self._began, self._before
        return {
            "position": position,
            "batch_size": self.batch_size,
            "began": plain(began["random"]),
            "generators": began["generators"],
            "before": plain(before["random"]),
            "generators_before": before["generators"],
            "generators_now": self._states()["generators"],
            "glimpse": self._glimpse,
        }

    def go_on(self, resumed: dict[str, Any]) -> None:
        """Set the generators as a checkpoint has them, that was saved between two epochs."""
        self._set(resumed.get("generators", []))
        self._began = self._before = self._states()

    def skip(self, resumed: dict[str, Any], batches: int, is_as_before: bool) -> Iterator[Any]:
        """Begin the epoch again, and return its iterator after so many batches.

        Args:
            resumed: what `state` returned.
            batches: how many to draw and drop.
            is_as_before: whether there are as many ranks as before, so that batches are the same.
        """
        set_random_state(resumed["began"])
        self._set(resumed["generators"])
        self._began = self._states()
        drawn = iter(self.loader)
        for _ in range(batches - 1):
            next(drawn, None)
        if is_as_before and "before" in resumed:
            set_random_state(resumed["before"])
            self._set(resumed["generators_before"])
        self._before = self._states()
        if batches:
            last = next(drawn, None)
            self.note(last)
            if is_as_before and not _is_same(resumed.get("glimpse"), self._glimpse):
                warnings.warn(
                    f"the rest of this epoch has other samples than if the training had not stopped: batch {batches} "
                    f"of {_title(self.loader)} is not what it was. It draws random numbers that a checkpoint does not "
                    "have, or in between the training's own; give its sampler a torch.Generator of its own, or save "
                    "between epochs",
                    stacklevel=3,
                )
        set_random_state(resumed["random"])
        self._set(resumed.get("generators_now", []))
        return drawn

    def before_batch(self) -> None:
        """Note the random states with which the next batch is drawn."""
        self._before = self._states()

    def note(self, batch: Any) -> None:
        """Note what a batch looks like."""
        self._glimpse = _glimpse_of(batch)

    @property
    def batch_size(self) -> int:
        """Samples in a batch; 1 if the loader does not say."""
        for holder in (self.loader, getattr(self.loader, "batch_sampler", None)):
            if isinstance(size := getattr(holder, "batch_size", None), int):
                return size
        return 1

    def _states(self) -> dict[str, Any]:
        return {
            "random": random_state(is_plain=False),
            "generators": [_state_of(generator) for generator in self._generators],
        }

    def _set(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            _set_state(generator, state)


def was_left_by_break() -> bool:
    """Whether a generator that is being closed was left by `break` or `return`, and not by an exception.

    The problem: all of them close it, and an exception on its way cannot be seen from here. But the frame that lets go
    of the generator is at an instruction that drops a value, where the loop was left on purpose; where it was not, at
    the instruction that raised. Called in the generator itself.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if name not in ("YIELD_VALUE", "RESUME"):  # of another generator that is closed, tqdm's
            return name in ("POP_TOP", "POP_ITER", "END_FOR", "FOR_ITER")
        frame = frame.f_back
    return False


# Generators


def _generators_in(thing: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yield the generators inside a loader, each once."""
    if id(thing) in seen or isinstance(thing, (type, types.FunctionType, types.ModuleType, Tensor, torch.nn.Module)):
        return
    seen.add(id(thing))
    if _is_generator(thing):
        yield thing
        return
    if isinstance(thing, Dataset) and depth:
        depth = 1  # only what it has itself: it may hold all samples
    if not depth:
        return
    if isinstance(thing, (list, tuple)) and len(thing) < 10:
        inner = list(thing)
    else:
        inner = list(getattr(thing, "__dict__", {}).values())
    for part in inner:
        yield from _generators_in(part, depth if isinstance(thing, (DataLoader, Sampler)) else depth - 1, seen)


def _is_generator(thing: Any) -> bool:
    return isinstance(thing, (torch.Generator, random.Random)) or isinstance(
        getattr(getattr(thing, "bit_generator", None), "state", None), dict
    )


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return tree_map_with_path(
        lambda path, leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, generator.bit_generator.state
    )


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


# Batches


def _glimpse_of(batch: Any) -> list[Any]:
    """Return a few numbers of each tensor of a batch; copied where they are, so that no GPU is waited for."""
    found: list[Any] = []

    def look(thing: Any) -> None:
        if isinstance(thing, (list, tuple)):
            found.append(len(thing))
            for part in thing[:100]:
                look(part)
        elif isinstance(thing, dict):
            for key, part in thing.items():
                found.append(str(key))
                look(part)
        elif type(thing).__module__ == "numpy" and getattr(thing.dtype, "kind", "") in "biufc":
            look(torch.as_tensor(thing))
        elif isinstance(thing, Tensor) and thing.layout == torch.strided and not thing.is_nested:
            found.append(f"{thing.dtype} {tuple(thing.shape)}")
            if thing.is_contiguous():
                values = thing.detach().view(-1)
                found.append(values[:: max(1, len(values) // GLIMPSE)][:GLIMPSE].clone())
        elif isinstance(thing, (bool, int, float, str)):
            found.append(thing)

    look(batch)
    return found


def _is_same(one: list[Any] | None, other: list[Any] | None) -> bool:
    if one is None or other is None or len(one) != len(other):
        return one is None

    def bits(value: Any) -> Any:
        return value.cpu().contiguous().view(torch.uint8).tolist() if isinstance(value, Tensor) else repr(value)

    return all(bits(mine) == bits(theirs) for mine, theirs in zip(one, other, strict=True))


def _title(loader: Any) -> str:
    if isinstance(loader, DataLoader):
        drawn_by = loader.sampler if loader.batch_size is not None else loader.batch_sampler
        return f"the {type(loader).__name__} of {type(loader.dataset).__name__} with {type(drawn_by).__name__}"
    return f"the {type(loader).__name__}"
