"""Half a batch: an exhibit of the museum of pitfalls."""

from __future__ import annotations

from torch.utils.data import DataLoader

from course.pitfalls.base import Exhibit

EXHIBIT = Exhibit(
    wing="well_known",
    title="Half a batch",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) gives the loader a
    batch of `128 / float(size)`. What does the loader make of it?
    """,
    choices=(
        "it is cut to a whole number",
        "an error",
    ),
    shows=2,
    kind="error",
)


@EXHIBIT.broken
def half_a_batch(world_size, train_set):
    return DataLoader(train_set, batch_size=128 / float(world_size)).batch_size


@EXHIBIT.symptom
def symptom(seen):
    return "positive integer" in seen


@EXHIBIT.right
def right(world_size, train_set):
    """A division with `/` gives a float, whatever its value. `//` gives a whole number; *A
    batch of 128*, in wing 16c, shows what that does."""
    loader = DataLoader(train_set, batch_size=128 // world_size)
    assert isinstance(loader.batch_size, int)
    return loader.batch_size
