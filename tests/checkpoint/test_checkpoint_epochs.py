"""Where in an epoch a training is: resumed at any step, samples and random numbers are as they were, or a warning."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler
from tqdm import tqdm

import labkit

SAMPLES, BATCH, EPOCHS = 10, 3, 2
BATCHES = 4


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


class OfNumpy(torch.utils.data.Sampler):
    def __init__(self, dice, samples=SAMPLES):
        self.dice, self.samples = dice, samples

    def __iter__(self):
        is_numpys = hasattr(self.dice, "permutation")
        yield from (self.dice.permutation(self.samples) if is_numpys else self.shuffled()).tolist()

    def shuffled(self):
        return np.array(self.dice.sample(range(self.samples), self.samples))

    def __len__(self):
        return self.samples


class Behind(torch.utils.data.Sampler):
    """A sampler that passes on what another has, as Accelerate's share of a batch sampler does."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        yield from self.inner

    def __len__(self):
        return len(self.inner)


class Lazy(torch.utils.data.Sampler):
    """Shuffles in a small buffer, with the process's random numbers, when it is asked."""

    def __iter__(self):
        buffer = []
        for number in range(SAMPLES):
            buffer.append(number)
            if len(buffer) > 4:
                yield buffer.pop(random.randrange(len(buffer)))
        yield from buffer

    def __len__(self):
        return SAMPLES


class Hidden:
    """A loader whose generator nothing leads to, and that draws it now and then."""

    def __iter__(self):
        dice = ITS_OWN
        for _ in range(BATCHES):
            yield torch.rand(2, generator=dice)


ITS_OWN = torch.Generator().manual_seed(5)

EXACT = {
    "in order": lambda g: DataLoader(range(SAMPLES), BATCH),
    "shuffled": lambda g: DataLoader(range(SAMPLES), BATCH, shuffle=True),
    "one generator for order and noise": lambda g: DataLoader(range(SAMPLES), BATCH, shuffle=True, generator=g),
    "batch_sampler with a generator": lambda g: DataLoader(
        range(SAMPLES), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES), generator=g), BATCH, False)
    ),
    "weights with a generator": lambda g: DataLoader(
        range(SAMPLES), BATCH, sampler=WeightedRandomSampler(torch.arange(1.0, 11), SAMPLES, generator=g)
    ),
    "augmented": lambda g: DataLoader(Noisy(), BATCH, shuffle=True),
    "augmented by a generator": lambda g: DataLoader(Noisy(g), BATCH, shuffle=True, generator=g),
    "a stream": lambda g: DataLoader(Stream(), BATCH),
    "a list": lambda g: [torch.tensor(n) for n in range(BATCHES)],
}
OR_A_WARNING = {
    "wrapped by tqdm": lambda g: tqdm(DataLoader(range(SAMPLES), BATCH, shuffle=True, generator=g), disable=True),
    "a sampler of NumPy's": lambda g: DataLoader(range(SAMPLES), BATCH, sampler=OfNumpy(np.random.default_rng(4))),
    "a sampler of Python's": lambda g: DataLoader(range(SAMPLES), BATCH, sampler=OfNumpy(random.Random(4))),
    "a sampler behind others": lambda g: tqdm(
        DataLoader(
            range(SAMPLES),
            batch_sampler=Behind(Behind(Behind(BatchSampler(OfNumpy(random.Random(4)), BATCH, False)))),
        ),
        disable=True,
    ),
    "draws in between": lambda g: DataLoader(
        range(64), 16, sampler=RandomSampler(range(64), replacement=True, num_samples=64, generator=g)
    ),
    "a buffer": lambda g: DataLoader(range(SAMPLES), BATCH, sampler=Lazy()),
    "a hidden generator": lambda g: Hidden(),
}
LOADERS = {**EXACT, **OR_A_WARNING}


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def train(folder, make, *, resumes=False, stop_at=None, cut=None, after=None, wrap=iter, seed=5, epochs=EPOCHS):
    """Train; return the samples and the random numbers of each step.

    Args:
        make: makes the loader from a generator, which the training draws from, too.
        stop_at: the step after which it saves and is killed; after the loop, if that step ends its epoch by `break`.
        cut: batches after which each epoch is left by `break`.
        after: the epoch after which it saves and is killed.
        wrap: what the loop iterates over, of the batches.
        seed: of the process, and another one where it resumes.
        epochs: to train in all.
    """
    seed_all(seed + 70 if resumes else seed)
    ITS_OWN.manual_seed(seed + 70 if resumes else seed)
    own = torch.Generator().manual_seed(9)
    loader = make(own)
    checkpoint = labkit.Checkpoint(folder, model=nn.BatchNorm1d(1), dice=own)
    number = (checkpoint.resume() or {}).get("number", 0)
    seen = []
    while checkpoint.epoch < epochs:
        for batch in wrap(checkpoint.batches(loader)):
            number += 1
            dice = torch.rand(1).item(), torch.rand(1, generator=own).item(), random.random(), np.random.rand()  # noqa: NPY002
            seen.append((checkpoint.step, batch.tolist(), dice))
            if number == cut:
                checkpoint.epoch += 1
                break
            if checkpoint.step == stop_at:
                checkpoint.save(number=number)
                return seen
        number = 0
        if after == checkpoint.epoch or (stop_at == checkpoint.step and seen):
            checkpoint.save()
            return seen
    return seen


@pytest.mark.parametrize("kind", LOADERS)
def test_stopped_at_any_step_the_rest_is_as_uninterrupted_or_a_warning_names_the_loader(kind, tmp_path):
    make = LOADERS[kind]
    whole = train(tmp_path / "whole", make)
    for stop_at in range(1, len(whole)):
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
            assert any(name in " ".join(said) for name in ("DataLoader", "tqdm", "Hidden"))


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("wrap", [iter, lambda batches: tqdm(batches, disable=True)], ids=["plain", "tqdm"])
def test_an_epoch_that_break_ends_is_not_trained_again(kind, wrap, tmp_path):
    make = EXACT[kind]
    for cut in range(1, BATCHES):
        whole = train(tmp_path / f"{cut}-whole", make, cut=cut, wrap=wrap)
        assert len(whole) == cut * EPOCHS
        first = train(tmp_path / f"{cut}", make, cut=cut, after=1, wrap=wrap)
        assert first + train(tmp_path / f"{cut}", make, cut=cut, resumes=True, wrap=wrap) == whole


def test_an_epoch_that_an_exception_ends_goes_on(tmp_path):
    checkpoint = labkit.Checkpoint(tmp_path, model=nn.Linear(1, 1))

    def steps():
        for _ in checkpoint.batches(range(10)):
            if checkpoint.step == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps()
    checkpoint.save()
    again = labkit.Checkpoint(tmp_path, model=nn.Linear(1, 1))
    assert again.resume() == {"epoch": 0, "step": 4}
    assert list(again.batches(range(10))) == [4, 5, 6, 7, 8, 9]


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
@pytest.mark.parametrize("persistent", [False, True])
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
