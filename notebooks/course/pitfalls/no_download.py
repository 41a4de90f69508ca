"""No download, nowhere."""

import struct

import torchvision

from course.pitfalls.base import Exhibit, Expected, has

EXHIBIT = Exhibit(
    wing="data",
    title="download=False",
    story="""
    [The text on ResNet-50 and
    SLURM](https://avoid.overfit.cn/post/67095b9014cb40888238b84fea17e872) does the
    opposite: `download=False`, without saying how the data get there. What happens in an
    empty folder?
    """,
    choices=(
        "an empty data set",
        "it is downloaded all the same",
        "an error",
    ),
    shows=3,
    gives=has("Dataset not found"),
    expects=Expected("at least one image", lambda found: found > 0),
    kind="error",
)


@EXHIBIT.broken
def no_download(folder):
    return len(torchvision.datasets.MNIST(str(folder / "empty"), download=False))


@EXHIBIT.right
def right(folder):
    """Put the files there once, before the ranks start. (Here two images, as files of the
    right format.)"""
    raw = folder / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        header = struct.pack(">IIII", 2051, 2, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + bytes(2 * 28 * 28))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, 2) + bytes([3, 7]))
    staged = torchvision.datasets.MNIST(str(folder / "data"), download=False)
    assert staged.targets.tolist() == [3, 7]
    return len(staged)
