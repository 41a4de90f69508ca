"""Where in an epoch a training is: resumed at any step, samples and random numbers are as they were, or a warning."""

from __future__ import annotations

import itertools
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

    def __init__(self, generator=None):
        self.generator = generator

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index + torch.rand(1) + (torch.rand(1, generator=self.generator) if self.generator else 0)


class Stream(IterableDataset):
    def __iter__(self):
        yield from (number + random.random() for number in range(SAMPLES))


class OfNumpy(torch.utils.data.Sampler):
    def __init__(self, dice):
        self.dice = dice

    def __iter__(self):
        yield from (self.dice.permutation(SAMPLES) if hasattr(self.dice, "permutation") else self.shuffled()).tolist()

    def shuffled(self):
        return np.array(self.dice.sample(range(SAMPLES), SAMPLES))

    def __len__(self):
        return SAMPLES


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
    "wrapped by tqdm": lambda g: tqdm(DataLoader(range(SAMPLES), BATCH, shuffle=True, generator=g), disable=True),
    "augmented": lambda g: DataLoader(Noisy(), BATCH, shuffle=True),
    "augmented by a generator": lambda g: DataLoader(Noisy(g), BATCH, shuffle=True, generator=g),
    "a stream": lambda g: DataLoader(Stream(), BATCH),
    "a sampler of NumPy's": lambda g: DataLoader(range(SAMPLES), BATCH, sampler=OfNumpy(np.random.default_rng(4))),
    "a sampler of Python's": lambda g: DataLoader(range(SAMPLES), BATCH, sampler=OfNumpy(random.Random(4))),
    "a list": lambda g: [torch.tensor(n) for n in range(BATCHES)],
}
OR_A_WARNING = {
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


def train(folder, make, *, resumes=False, stop_at=None, cut=None, after=None, wrap=iter, seed=5):
    """Train; return the samples and the random numbers of each step.

    Args:
        make: makes the loader from a generator, which the training draws from, too.
        stop_at: the step after which it saves and is killed.
        cut: batches after which each epoch is left by `break`.
        after: the epoch after which it saves and is killed.
        wrap: what the loop iterates over, of the batches.
        seed: of the process, and another one where it resumes.
    """
    seed_all(seed + 70 if resumes else seed)
    ITS_OWN.manual_seed(seed + 70 if resumes else seed)
    own = torch.Generator().manual_seed(9)
    loader = make(own)
    checkpoint = labkit.Checkpoint(folder, model=nn.BatchNorm1d(1), dice=own)
    checkpoint.resume()
    seen = []
    while checkpoint.epoch < EPOCHS:
        for number, batch in enumerate(wrap(checkpoint.batches(loader)), 1):
            dice = torch.rand(1).item(), torch.rand(1, generator=own).item(), random.random(), np.random.rand()  # noqa: NPY002
            seen.append((checkpoint.step, batch.tolist(), dice))
            if checkpoint.step == stop_at:
                checkpoint.save()
                return seen
            if number == cut:
                break
        if checkpoint.epoch == after:
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
            assert any(name in " ".join(said) for name in ("RandomSampler", "Lazy", "Hidden"))


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


@pytest.mark.parametrize("leave", ["break", "return", "exhausted by zip"])
def test_what_leaves_a_loop_on_purpose_completes_the_epoch(leave, tmp_path):
    checkpoint = labkit.Checkpoint(tmp_path, model=nn.Linear(1, 1))

    def steps():
        batches = checkpoint.batches(range(10))
        if leave == "exhausted by zip":
            for _ in zip(range(2), batches, strict=False):
                del batches
                batches = None
            return
        del batches
        for _ in checkpoint.batches(range(10)):
            if checkpoint.step == 2 and leave == "return":
                return
            if checkpoint.step == 2:
                break

    steps()
    assert checkpoint.epoch == 1


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


def of_a_trainer(name):
    """What prepares a loader: Accelerate, Fabric, or nothing; without ranks."""
    if name == "Accelerate":
        accelerate = pytest.importorskip("accelerate")
        return accelerate.Accelerator(cpu=True).prepare
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    return fabric.setup_dataloaders


@pytest.mark.parametrize("name", ["Accelerate", "Fabric"])
def test_loaders_of_trainers_give_the_same_samples(name, tmp_path):
    prepare = of_a_trainer(name)

    def make(own):
        return prepare(DataLoader(range(SAMPLES), BATCH, shuffle=True, generator=own))

    whole = train(tmp_path / "whole", make)
    for stop_at in itertools.islice(range(1, len(whole)), 5):
        first = train(tmp_path / f"{stop_at}", make, stop_at=stop_at)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rest = train(tmp_path / f"{stop_at}", make, resumes=True)
        assert first + rest == whole or any("has other samples" in str(each.message) for each in caught)


def train_all(worker, folder, **how):
    """Train with each kind of loader in turn; return what each rank saw, and what it was warned of."""
    found = {}
    for kind in LOADERS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = train(folder / kind, LOADERS[kind], seed=5 + worker.rank, **how)
        found[kind] = seen, [str(each.message) for each in caught]
    return found


@pytest.mark.spawns
@pytest.mark.parametrize("stop_at", [2, 7])
def test_ranks_go_on_as_uninterrupted_and_another_number_of_them_is_warned_of(stop_at, tmp_path):
    def launch(folder, world_size, **how):
        return labkit.launch(train_all, tmp_path / folder, world_size=world_size, on=ranks, live=False, **how).results

    with labkit.Session(3) as ranks:
        whole = launch("whole", 2)
        first = launch("stopped", 2, stop_at=stop_at)
        rest = launch("stopped", 2, resumes=True)
        launch("other", 2, stop_at=stop_at)
        others = {world_size: launch("other", world_size, resumes=True) for world_size in (3, 1)}
    for rank, kind in itertools.product(range(2), LOADERS):
        seen, said = first[rank][kind][0] + rest[rank][kind][0], rest[rank][kind][1]
        is_named = any("has other samples" in each for each in said)
        assert (seen == whole[rank][kind][0] and not is_named) or (is_named and kind not in EXACT)
    for world_size, found in others.items():
        assert len(found) == world_size
        for kind in LOADERS:
            assert any("goes on with" in each and "samples and random numbers" in each for each in found[0][kind][1])
