"""The data that the lessons train on: small embedded digits by default, the real sets where they are on disk."""

from __future__ import annotations

import contextlib
import gzip
import math
import shutil
import struct
import zlib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

NAMES = ("digits", "mnist", "fashion-mnist", "cifar10", "folder")
CIFAR10_BINARY = "cifar-10-batches-bin"
"""The folder of CIFAR-10's binary version (https://www.cs.toronto.edu/~kriz/cifar.html) …"""
CIFAR10_RECORD = 1 + 3 * 32 * 32
"""… and the bytes of an image there: its label, then its red, green and blue pixels."""

IDX_IMAGES, IDX_LABELS = 0x803, 0x801
"""Magic numbers of the MNIST files (http://yann.lecun.com/exdb/mnist/): unsigned bytes in 3 or in 1 dimension."""


class Images(Dataset[tuple[Tensor, int]]):
    """Images held in memory as bytes, given as normalised floats.

    Item i is (image, label): a float tensor of shape (channels, height, width) with the training set's mean removed
    and its standard deviation made 1, channel by channel; and an int.
    """

    def __init__(self, images: Tensor, labels: Tensor, mean: Tensor, std: Tensor) -> None:
        self.images = images
        """(count, channels, height, width), uint8."""
        self.labels = labels
        """(count,), int64."""
        self.mean, self.std = mean, std
        """Per channel, on the scale 0 … 1: shape (channels, 1, 1)."""

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._normalised(self.images[index]), int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        """Return a batch at once; DataLoader's fetcher calls this."""
        chosen = torch.as_tensor(indices)
        return list(zip(self._normalised(self.images[chosen]), self.labels[chosen].tolist(), strict=True))

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self.mean) / self.std

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all images, normalised, and all labels."""
        return self._normalised(self.images), self.labels


class Splits(NamedTuple):
    """A training set and a test set; both give (image, label) pairs."""

    train: Dataset[tuple[Tensor, int]]
    test: Dataset[tuple[Tensor, int]]


def load(name: str, root: str | Path | None = None, download: bool = False, image_size: int = 32) -> Splits:
    """Return the training and the test set called `name`.

    * `"digits"`: 1,797 handwritten digits (UCI, 8 × 8 grey levels), embedded; enlarged to MNIST's 28 × 28.
    * `"mnist"`, `"fashion-mnist"`: 1 × 28 × 28; `"cifar10"`: 3 × 32 × 32; torchvision's files below `root`
      (MNIST's also gzipped, as they are published; CIFAR-10's also in its binary version, `cifar-10-batches-bin`).
    * `"folder"`, or the folder's path as the name: images below `root`, a folder per class, cropped to `image_size`;
      with `train` and `test` (or `val`) folders above the classes, or a fifth of the images kept for testing.

    `download=True` fetches a real set into `root` first. Do that before launching ranks, not in them.

    Raises ValueError for an unknown name and for truncated or foreign files, FileNotFoundError for missing ones,
    ConnectionError if a download fails; each says which file, and what to do.
    """
    if name not in NAMES and name and Path(name).is_dir():
        name, root = "folder", name
    if name not in NAMES:
        raise ValueError(f"unknown dataset {name!r}; there are {', '.join(map(repr, NAMES))}, or the path of a folder")
    if download and name not in ("digits", "folder") and dist.is_initialized():
        raise RuntimeError(
            f"rank {dist.get_rank()} was asked to download {name}: every rank would write the same files. "
            "Call load(…, download=True) once in the notebook, before launching"
        )
    if name == "digits":
        return _digits()
    if name == "folder":
        if root is None:
            raise ValueError("load('folder') needs root=…, the folder that holds a folder of images per class")
        return _folder(Path(root), image_size)
    root = Path(root) if root is not None else default_root()
    return _cifar10(root, download) if name == "cifar10" else _mnist(name, root, download)


def default_root() -> Path:
    """Return the folder in which `load` looks for the real sets, and to which it downloads them, without `root`.

    Raises ValueError for a user without a home folder, as in some containers.
    """
    try:
        return Path.home() / ".cache" / "labkit"
    except RuntimeError as error:
        raise ValueError(
            "data sets are looked for in ~/.cache/labkit, but this user has no home folder. "
            "Give the folder that holds them: load(…, root=…)"
        ) from error


def _in_memory(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Splits:
    """Make both sets from (images, labels), normalised by the training set's own moments."""
    images = train[0]
    counts = torch.stack([torch.bincount(images[:, c].flatten(), minlength=256) for c in range(images.shape[1])])
    levels = torch.arange(256, dtype=torch.float64) / 255
    share = counts.double() / counts.sum(dim=1, keepdim=True)
    mean = (share * levels).sum(dim=1)
    std = ((share * levels**2).sum(dim=1) - mean**2).clamp(min=1e-12).sqrt()
    mean, std = mean.float().view(-1, 1, 1), std.float().view(-1, 1, 1)
    return Splits(Images(*train, mean, std), Images(*test, mean, std))


def _digits() -> Splits:
    with resources.files("course").joinpath("data/digits.npz").open("rb") as file, np.load(file) as arrays:
        small, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"]).long()
    # As in MNIST: the digit is 20 × 20, in the middle of 28 × 28.
    large = torch.nn.functional.interpolate(small.float().unsqueeze(1) * (255 / 16), size=20, mode="bilinear")
    images = torch.nn.functional.pad(large, (4, 4, 4, 4)).round().to(torch.uint8)
    return _in_memory(*_fifth_for_testing(images, labels))


def _fifth_for_testing(images: Tensor, labels: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    test = _test_indices(len(images))
    keep = torch.ones(len(images), dtype=torch.bool)
    keep[test] = False
    return (images[keep], labels[keep]), (images[test], labels[test])


def _test_indices(count: int) -> Tensor:
    """Return a fixed fifth of the indices, the same in every process."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order[: count // 5].sort().values


def _mnist(name: str, root: Path, download: bool) -> Splits:
    folder = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}[name]
    if download:
        from torchvision import datasets

        with _clear_download_errors(name, root / folder / "raw"):
            getattr(datasets, folder)(str(root), download=True)
    sets = []
    for part in ("train", "t10k"):
        files = [_find_idx(name, root, folder, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")]
        images, labels = (_read_idx(file, magic) for file, magic in zip(files, (IDX_IMAGES, IDX_LABELS), strict=True))
        if len(images) != len(labels):
            listed = ", ".join(f"{file} has {len(each):,}" for file, each in zip(files, (images, labels), strict=True))
            raise ValueError(f"images and labels of {name} do not belong together: {listed}")
        sets.append((images.unsqueeze(1), labels.long()))
    return _in_memory(*sets)


def _find_idx(name: str, root: Path, folder: str, file: str) -> Path:
    places = [root / folder / "raw", root]
    for place in places:
        for candidate in (place / file, place / f"{file}.gz"):
            if candidate.is_file():
                return candidate
    raise FileNotFoundError(
        f"{name}: there is no {file} (or {file}.gz) in {places[0]}. Put the four files of {name} there, "
        f"or call course.datasets.load({name!r}, root={str(root)!r}, download=True) once, before launching"
    )


def _read_idx(source: Path, magic: int) -> Tensor:
    """Return what an IDX file has, gzipped or not, after checking that it is whole."""
    what = "images" if magic == IDX_IMAGES else "labels"
    try:
        with (gzip.open if source.suffix == ".gz" else open)(source, "rb") as file:
            data = file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{source} is not a whole gzip file ({error}); fetch it again") from error
    dimensions = 3 if magic == IDX_IMAGES else 1
    header = 4 * (1 + dimensions)
    found = int.from_bytes(data[:4], "big")
    if found != magic:
        raise ValueError(
            f"{source} is no file of MNIST {what}: it should begin with the number {magic:#x}, "
            f"found {found:#x}. Check which file it is, or fetch it again"
        )
    if len(data) < header:
        raise ValueError(
            f"{source} is truncated: its header alone has {header} bytes, it has {len(data)}. Fetch it again"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    expected = header + math.prod(shape)
    if len(data) != expected:
        raise ValueError(
            f"{source} is truncated or damaged: its header promises {shape[0]:,} {what}, that is {expected:,} bytes, "
            f"but it has {len(data):,}. Fetch it again"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header).view(shape)


def _cifar10(root: Path, download: bool) -> Splits:
    from torchvision.datasets import CIFAR10

    place = root / CIFAR10.base_folder
    if not download and not place.is_dir() and (root / CIFAR10_BINARY).is_dir():
        return _cifar10_binary(root / CIFAR10_BINARY)
    if download:
        with _clear_download_errors("cifar10", place):
            CIFAR10(str(root), download=True)
    files = [file for file, _ in (*CIFAR10.train_list, *CIFAR10.test_list)] + [CIFAR10.meta["filename"]]
    missing = [file for file in files if not (place / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"cifar10: there is no {missing[0]} in {place}. Unpack cifar-10-python.tar.gz in {root}, "
            f"or call course.datasets.load('cifar10', root={str(root)!r}, download=True) once, before launching"
        )
    try:
        sets = [CIFAR10(str(root), train=train) for train in (True, False)]
    except RuntimeError as error:  # torchvision compares checksums
        raise ValueError(
            f"cifar10: a file in {place} is truncated or is not CIFAR-10's (its checksum differs). "
            "Unpack cifar-10-python.tar.gz there again"
        ) from error
    return _in_memory(*((torch.from_numpy(s.data).permute(0, 3, 1, 2), torch.tensor(s.targets)) for s in sets))


def _cifar10_binary(place: Path) -> Splits:
    parts = []
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        file = place / name
        if not file.is_file():
            raise FileNotFoundError(
                f"cifar10: there is no {name} in {place}. Unpack cifar-10-binary.tar.gz there again"
            )
        data = bytearray(file.read_bytes())
        if not data or len(data) % CIFAR10_RECORD:
            raise ValueError(
                f"{file} is truncated: an image takes {CIFAR10_RECORD:,} bytes, and it has {len(data):,}. "
                "Unpack cifar-10-binary.tar.gz there again"
            )
        records = torch.frombuffer(data, dtype=torch.uint8).view(-1, CIFAR10_RECORD)
        if (most := int(records[:, 0].max())) > 9:
            raise ValueError(f"{file} is not CIFAR-10's: its labels are 0 to 9, found {most}")
        parts.append((records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()))
    images, labels = zip(*parts[:-1], strict=True)
    return _in_memory((torch.cat(images), torch.cat(labels)), parts[-1])


def _folder(root: Path, image_size: int) -> Splits:
    from torch.utils.data import Subset
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}; it should hold a folder of images for each class")
    transform = v2.Compose(
        [
            v2.Resize(image_size),
            v2.CenterCrop(image_size),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )
    parts = [root / "train", root / ("val" if (root / "val").is_dir() else "test")]
    try:
        if any(part.is_dir() for part in parts):
            train, test = (ImageFolder(str(part), transform) for part in parts)
            if train.classes != test.classes:
                odd = sorted(set(train.classes) ^ set(test.classes))
                raise ValueError(f"{parts[0]} and {parts[1]} hold different classes: {', '.join(odd)} is in one only")
            return Splits(train, test)
        whole = ImageFolder(str(root), transform)
        if len(whole) < 5:
            raise ValueError(f"{root} holds {len(whole)} images; to keep a fifth for testing it takes at least 5")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{root} should hold a folder of images for each class: {error}") from error
    held_back = set(_test_indices(len(whole)).tolist())
    return Splits(Subset(whole, [i for i in range(len(whole)) if i not in held_back]), Subset(whole, sorted(held_back)))


@contextlib.contextmanager
def _clear_download_errors(name: str, place: Path) -> Iterator[None]:
    try:
        usage = shutil.disk_usage(next(p for p in (place, *place.parents) if p.exists()))
        yield
    except (URLError, RuntimeError, OSError) as error:
        raise ConnectionError(
            f"{name} could not be downloaded to {place}: {error}. Check the network and that the folder can be "
            f"written ({usage.free / 1e9:.1f} GB free), or put the files there by hand"
        ) from error
