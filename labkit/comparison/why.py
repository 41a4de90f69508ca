"""Why two ways to train end with other weights: each suspect is taken away from both, and they are run again.

A reason is said only where that makes them equal. Suspects are what the networks have: dropout, whose masks differ by
rank; BatchNorm, whose statistics are those of the rank's part of the batch; and rounding, which 64 bits all but remove.
Whether both have seen the same samples is known from their first steps.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook

DROPOUT, BATCH_NORM, SHORT = "dropout", "BatchNorm", "32 bits"

CHANGES = {
    DROPOUT: ("without dropout", "dropout: each rank draws masks of its own"),
    BATCH_NORM: (
        "with BatchNorm's statistics fixed",
        "BatchNorm: its statistics are those of a part of the batch. Of ranks' parts torch.nn.SyncBatchNorm makes one "
        "batch; of a pipeline's micro-batches and nn.DataParallel's replicas nothing does",
    ),
    SHORT: ("in 64 bits", "rounding: numbers of 32 bits are added up in another order"),
}
"""Of each suspect: what is changed to try it, and what is said where that makes the weights equal."""


class Trial(NamedTuple):
    """Both runs once more, with something changed."""

    changed: str
    difference: float
    """The greatest of a weight, as a part of that weight's size; NaN where it cannot be said."""
    words: str


class Why(NamedTuple):
    """Why a run's weights differ from the first run's."""

    reason: str
    """"" where it is not known."""
    trials: Sequence[Trial]

    def __str__(self) -> str:
        lines = [f"{trial.changed}: {trial.words}" for trial in self.trials]
        known = self.reason or "the reason is not among those that were tried (lesson 12 has more)"
        return "\n".join([*lines, f"→ {known}"])

    def __repr__(self) -> str:
        return str(self)


def suspects(modules: Sequence[nn.Module], weights: Sequence[Tensor]) -> frozenset[str]:
    """Return what of these modules and weights may make ranks differ from one process."""
    found = set()
    for module in modules:
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            found.add(DROPOUT)
        if isinstance(module, _BatchNorm) and module.training and not isinstance(module, nn.SyncBatchNorm):
            found.add(BATCH_NORM)
    if any(weight.is_floating_point() and weight.dtype != torch.float64 for weight in weights):
        found.add(SHORT)
    return frozenset(found)


def fingerprints(batch: Tensor) -> set[int]:
    """Return a checksum of each sample of a batch, (n, …); none where there is no telling."""
    try:
        rows = batch.detach().cpu().reshape(len(batch), -1).contiguous().view(torch.uint8).numpy()
    except (TypeError, RuntimeError):  # of no dimension, or a subclass of Tensor that has no bytes here
        return set()
    return {zlib.crc32(row.tobytes()) for row in rows}


@contextlib.contextmanager
def without(changes: Sequence[str]) -> Iterator[None]:
    """Take suspects away from every network that is called inside."""

    def change(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if DROPOUT in changes and isinstance(module, _DropoutNd):
            module.eval()
        if BATCH_NORM in changes and isinstance(module, _BatchNorm):
            module.eval()
        if SHORT not in changes:
            return None
        return tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)

    dtype = torch.get_default_dtype()
    hook = register_module_forward_pre_hook(change)
    try:
        if SHORT in changes:
            torch.set_default_dtype(torch.float64)
        yield
    finally:
        hook.remove()
        torch.set_default_dtype(dtype)


def find(
    found: frozenset[str], try_without: Callable[[Sequence[str]], tuple[float, str]], same_samples: bool | None
) -> Why:
    """Take away one suspect after the other, then all of them; stop where the weights are equal.

    Args:
        found: the suspects in either network.
        try_without: runs both without some; returns the difference of their weights, and words for it.
        same_samples: whether both saw the same samples in their first step; None if that is not known.
    """
    if same_samples is False:
        return Why(
            "other inputs: the ranks' first batches together are not that of the first run. Other samples; or the "
            "same, augmented with other random numbers",
            [],
        )
    # 64 bits first: if they make the weights equal, it was rounding alone, which BatchNorm's statistics enlarge.
    together = tuple(each for each in CHANGES if each in found)
    alone = sorted(together, key=lambda each: each != SHORT)
    trials: list[Trial] = []
    for tried in [*((each,) for each in alone), *([together] if len(alone) > 1 else [])]:
        changed = " and ".join(CHANGES[each][0] for each in tried)
        difference, words = try_without(tried)
        trials.append(Trial(changed, difference, words))
        if words.startswith("equal"):
            return Why("; ".join(CHANGES[each][1] for each in tried), trials)
    return Why("", trials)
