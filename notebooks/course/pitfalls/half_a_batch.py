"""Half a batch."""

from torch.utils.data import DataLoader

from course.pitfalls.base import Exhibit, has

EXHIBIT = Exhibit(
    wing="well_known",
    title="128 / float(size)",
    story="""
    [*Writing Distributed Applications with
    PyTorch*](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) gives the loader a
    batch of `128 / float(size)`. What does the loader do with it?
    """,
    choices=(
        "it is rounded down",
        "an error",
    ),
    shows=2,
    gives=has("positive integer"),
    expects=lambda world_size: 128 // world_size,
    kind="error",
)


@EXHIBIT.broken
def half_a_batch(world_size, train_set):
    return DataLoader(train_set, batch_size=128 / float(world_size)).batch_size


@EXHIBIT.right
def right(world_size, train_set):
    """`/` gives a float, whatever its value, and `//` an integer. *A batch of 128*, in 16c, shows
    the effect of `//`."""
    loader = DataLoader(train_set, batch_size=128 // world_size)
    assert isinstance(loader.batch_size, int)
    return loader.batch_size
