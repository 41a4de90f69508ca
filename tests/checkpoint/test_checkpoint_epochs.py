"""Where in an epoch a training is: resumed at any step, samples and random numbers are as they were, or a warning."""

from __future__ import annotations

import itertools
import random
import re
import shutil
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


def of_a_trainer(name):
    """What prepares a loader: Accelerate, Fabric, or nothing; without ranks."""
    if name == "Accelerate":
        accelerate = pytest.importorskip("accelerate")
        return accelerate.Accelerator(cpu=True).prepare
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    return fabric.setup_dataloaders


# Trainings at random


class Wrapped:
    """A loader around another, as readers write them."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        for batch in self.inner:
            yield 2 * batch


class Training:
    """A training at random: its loader, who prepares that, how its epochs end, and where it is stopped."""

    PREPARING = ("nobody", "nobody", "tqdm", "a wrapper", "Accelerate", "Fabric")
    ORDERS = ("in order", "shuffled", "RandomSampler", "weights", "batch_sampler", "replacement", "NumPy", "Python")

    def __init__(self, seed):
        rng = random.Random(seed)
        self.seed = seed
        self.samples, self.batch, self.epochs = rng.randrange(4, 15), rng.randrange(1, 5), rng.randrange(1, 4)
        self.order, self.prepared_by = rng.choice(self.ORDERS), rng.choice(self.PREPARING)
        self.noise = rng.choice(["none", "the process's", "the generator's"])
        self.has_generator, self.drop_last = rng.random() < 0.7, rng.random() < 0.3
        self.workers = rng.choice([0] * 7 + [2])
        self.cut = rng.choice([None, None, rng.randrange(1, 4)])
        self.wrap = rng.choice([iter, lambda batches: tqdm(batches, disable=True)])
        self.stops = [rng.random() for _ in range(rng.randrange(1, 4))]

    def __repr__(self):
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name != "wrap")

    def loader(self, own):
        """Its loader; `own` is the generator from which the training draws, too."""
        generator = own if self.has_generator else None
        noisy = {"the process's": Noisy(None, self.samples), "the generator's": Noisy(own, self.samples)}
        data = noisy.get(self.noise, range(self.samples))
        options = {"num_workers": self.workers, "generator": generator}
        samplers = {
            "RandomSampler": RandomSampler(data, generator=generator),
            "weights": WeightedRandomSampler(torch.arange(1.0, self.samples + 1), self.samples, generator=generator),
            "replacement": RandomSampler(data, replacement=True, num_samples=40, generator=generator),
            "NumPy": OfNumpy(np.random.default_rng(4), self.samples),
            "Python": OfNumpy(random.Random(4), self.samples),
        }
        if self.order == "batch_sampler":
            batches = BatchSampler(RandomSampler(data, generator=generator), self.batch, self.drop_last)
            made = DataLoader(data, batch_sampler=batches, **options)
        else:
            options |= {"batch_size": self.batch, "drop_last": self.drop_last and self.samples >= 2 * self.batch}
            made = DataLoader(data, shuffle=self.order == "shuffled", sampler=samplers.get(self.order), **options)
        if self.prepared_by in ("Accelerate", "Fabric"):
            return of_a_trainer(self.prepared_by)(made)
        if self.prepared_by == "tqdm":
            return tqdm(made, disable=True)
        return Wrapped(made) if self.prepared_by == "a wrapper" else made

    def run(self, folder, **how):
        """Train as `train` does; return what was seen and what was warned of."""
        if self.prepared_by in ("Accelerate", "Fabric"):
            of_a_trainer(self.prepared_by)  # is imported now: that may draw random numbers
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = train(folder, self.loader, cut=self.cut, wrap=self.wrap, epochs=self.epochs, **how)
        return seen, [str(each.message) for each in caught]

    def stopping(self, steps):
        """The steps after which it is stopped, of so many in all."""
        return sorted({1 + int(at * (steps - 1)) for at in self.stops}) if steps > 1 else []


def check_is_as_uninterrupted_or_named(training, whole, parts):
    """Return whether the parts are the whole; if not, a warning must name the loader. Steps are always the same."""
    seen, said = [step for part, _ in parts for step in part], [text for _, texts in parts for text in texts]
    assert [step for step, *_ in seen] == [step for step, *_ in whole], training
    named = [text for text in said if "the rest of this epoch has other samples" in text]
    assert seen == whole or named, training
    assert all(re.search(r"batch \d+ of the \w+ is not what it was", text) for text in named), named
    return seen == whole


@pytest.mark.spawns
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.long)])
def test_of_random_trainings_the_rest_is_as_uninterrupted_or_a_warning_names_the_loader(count, tmp_path):
    equal = 0
    for seed in range(count):
        training = Training(seed)
        whole, said = training.run(tmp_path / f"{seed}-whole")
        assert not [text for text in said if "other samples" in text]
        parts = [
            training.run(tmp_path / f"{seed}", resumes=number > 0, stop_at=stop_at)
            for number, stop_at in enumerate([*training.stopping(len(whole)), None])
        ]
        equal += check_is_as_uninterrupted_or_named(training, whole, parts)
    print(f"{count} trainings: {equal} as uninterrupted, {count - equal} with a warning")
    assert equal > 0.5 * count


def train_at_random(worker, folder, seeds, stops=None, **how):
    """Do each training in turn; return what this rank saw, and what it was warned of."""
    return {
        seed: Training(seed).run(
            folder / f"{seed}", seed=5 + worker.rank, stop_at=None if stops is None else stops[seed], **how
        )
        for seed in seeds
    }


@pytest.mark.spawns
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [12, pytest.param(120, marks=pytest.mark.long)])
def test_of_random_trainings_on_ranks_too_and_another_number_of_ranks_is_warned_of(count, tmp_path):
    def launch(folder, world_size, seeds, **how):
        call = train_at_random, tmp_path / folder, seeds
        return labkit.launch(*call, world_size=world_size, on=ranks, live=False, **how).results

    equal = 0
    with labkit.Session(3) as ranks:
        seeds = range(1000, 1000 + count)
        whole = launch("whole", 2, seeds)
        stops = {seed: (Training(seed).stopping(len(whole[0][seed][0])) or [1])[0] for seed in seeds}
        first = launch("stopped", 2, seeds, stops=stops)
        rest = launch("stopped", 2, seeds, resumes=True)
        launch("other", 2, seeds, stops=stops)
        others = {}
        for world_size in (3, 1):
            shutil.copytree(tmp_path / "other", tmp_path / f"other-{world_size}")
            others[world_size] = launch(f"other-{world_size}", world_size, seeds, resumes=True)
    for seed, rank in itertools.product(seeds, range(2)):
        parts = first[rank][seed], rest[rank][seed]
        equal += check_is_as_uninterrupted_or_named(Training(seed), whole[rank][seed][0], parts)
    for world_size, found in others.items():
        assert len(found) == world_size
        for seed in seeds:
            said = " ".join(found[0][seed][1])
            assert "goes on with" in said or not found[0][seed][0], (Training(seed), said)
    print(f"{count} trainings on 2 ranks: {equal / 2:g} as uninterrupted")
    assert equal > 0.5 * 2 * count
