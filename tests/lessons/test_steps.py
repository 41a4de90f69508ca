"""The batches that the lessons on sharding share."""

from __future__ import annotations

import itertools

import torch

import course
from course import steps


def test_batches_are_the_same_for_every_rank_that_asks_and_never_end():
    train_set, _ = course.datasets.load("digits")
    first, again, other = (steps.batches(train_set, 600, seed, "cpu") for seed in (0, 0, 1))
    of_first, of_again = list(itertools.islice(first, 5)), list(itertools.islice(again, 5))
    for (images, labels), (same_images, same_labels) in zip(of_first, of_again, strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)
    images, labels = next(other)
    assert images.dtype == torch.float64
    assert not torch.equal(labels, of_first[0][1]), "another seed, another order"
