"""Where in an epoch a training is: resumed at any step, samples and random numbers are as they were, or a warning."""

from __future__ import annotations

import os
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from tqdm import tqdm

import labkit
from tests.support.tiers import few

SAMPLES, BATCH, EPOCHS = 10, 3, 2
BATCHES = 4
STOPS = range(1, EPOCHS * BATCHES) if os.environ.get("LABKIT_WIDE") else (2, BATCHES, BATCHES + 3)
"""Steps after which a training is stopped: in the middle of an epoch, and at the end of one."""


class Noisy(Dataset):
    """Augments with the process's random numbers, and with a generator of its own if it has one."""

    def __init__(self, generator=None, samples=SAMPLES):
        self.generator, self.samples = generator, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return index + torch.rand(1) + (torch.rand(1, generator=self.generator) if self.generator else 0)


class Stream(IterableDataset):
    def __iter__(self):
        yield from (number + random.random() for number in range(SAMPLES))


EXACT = {
    "in order": lambda g: DataLoader(range(SAMPLES), BATCH),
    "shuffled": lambda g: DataLoader(range(SAMPLES), BATCH, shuffle=True),
    "one generator for order and noise": lambda g: DataLoader(range(SAMPLES), BATCH, shuffle=True, generator=g),
    "batch_sampler with a generator": lambda g: DataLoader(
        range(SAMPLES), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES), generator=g), BATCH, False)
    ),
    "augmented by a generator": lambda g: DataLoader(Noisy(g), BATCH, shuffle=True, generator=g),
    "a stream": lambda g: DataLoader(Stream(), BATCH),
    "a list": lambda g: [torch.tensor(n) for n in range(BATCHES)],
}
OR_A_WARNING = {
    "wrapped by tqdm": lambda g: tqdm(DataLoader(range(SAMPLES), BATCH, shuffle=True, generator=g), disable=True),
}
LOADERS = {**EXACT, **OR_A_WARNING}


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def train(folder, make, *, resumes=False, stop_at=None):
    """Train; return the samples and the random numbers of each step.

    Args:
        make: makes the loader from a generator, which the training draws from, too.
        resumes: goes on from what was saved, in a process with another seed.
        stop_at: the step after which it saves and is killed.
    """
    seed_all(75 if resumes else 5)
    own = torch.Generator().manual_seed(9)
    loader = make(own)
    checkpoint = labkit.Checkpoint(folder, model=nn.BatchNorm1d(1), dice=own)
    checkpoint.resume()
    seen = []
    while checkpoint.epoch < EPOCHS:
        for batch in checkpoint.batches(loader):
            dice = torch.rand(1).item(), torch.rand(1, generator=own).item(), random.random(), np.random.rand()  # noqa: NPY002
            seen.append((checkpoint.step, batch.tolist(), dice))
            if checkpoint.step == stop_at:
                checkpoint.save()
                return seen
    return seen


@pytest.mark.parametrize("kind", LOADERS)
def test_stopped_at_any_step_the_rest_is_as_uninterrupted_or_a_warning_names_the_loader(kind, tmp_path):
    make = LOADERS[kind]
    whole = train(tmp_path / "whole", make)
    for stop_at in STOPS:
        first = train(tmp_path / f"{stop_at}", make, stop_at=stop_at)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rest = train(tmp_path / f"{stop_at}", make, resumes=True)
        # PyTorch's own may come here if an earlier test has read a sparse tensor that was damaged.
        said = [text for each in caught if "sparse tensor invariants" not in (text := str(each.message))]
        assert [step for step, *_ in first + rest] == [step for step, *_ in whole]
        if kind in EXACT:
            assert (first + rest, said) == (whole, [])
        elif first + rest != whole:
            assert any("the rest of this epoch has other samples" in each for each in said), (stop_at, said)
            assert any(name in " ".join(said) for name in ("DataLoader", "tqdm"))


def test_an_epoch_left_by_break_goes_on_unless_it_is_said_to_be_done(tmp_path):
    def leave(folder, is_done):
        checkpoint = labkit.Checkpoint(folder, model=nn.Linear(1, 1))
        for batch in checkpoint.batches(range(10)):
            if batch == 3:
                break
        checkpoint.epoch += is_done
        checkpoint.save()
        again = labkit.Checkpoint(folder, model=nn.Linear(1, 1))
        again.resume()
        return again.epoch, next(again.batches(range(10))), next(checkpoint.batches(range(10))), checkpoint.epoch

    assert leave(tmp_path / "goes on", is_done=False) == (0, 4, 0, 1)
    assert leave(tmp_path / "done", is_done=True) == (1, 0, 0, 1)


@pytest.mark.spawns
@pytest.mark.parametrize("persistent", few([False, True], 2))
def test_workers_give_the_same_samples(persistent, tmp_path):
    def make(own):
        return DataLoader(Noisy(), BATCH, shuffle=True, generator=own, num_workers=2, persistent_workers=persistent)

    whole = train(tmp_path / "whole", make)
    for stop_at in (2, 6):
        first = train(tmp_path / f"{stop_at}", make, stop_at=stop_at)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rest = train(tmp_path / f"{stop_at}", make, resumes=True)
        said = any("has other samples" in str(each.message) for each in caught)
        assert (first + rest == whole, said) in ([(True, False)] if not persistent else [(True, False), (False, True)])
