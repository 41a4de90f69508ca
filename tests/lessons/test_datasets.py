import gzip
import hashlib
import pickle
import pwd
import runpy
import socket
import struct
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torchvision.datasets import CIFAR10, cifar, mnist

from course import datasets
from course.datasets import load


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a test of datasets tried to reach the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def idx(array):
    """The bytes of an IDX file, as LeCun describes it: zero, zero, type, dimensions; the sizes; the values."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(root, folder="MNIST", gzipped=False, counts=(60, 20)):
    """Write the four files; gives what was written as (images, labels) for training and testing."""
    raw, rng = root / folder / "raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    written = []
    for part, count in zip(("train", "t10k"), counts, strict=True):
        images, labels = rng.integers(0, 256, (count, 28, 28), np.uint8), rng.integers(0, 10, count, np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            if gzipped:
                (raw / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (raw / name).write_bytes(idx(array))
        written.append((images, labels))
    return raw, written


@pytest.fixture
def write_cifar10(monkeypatch):
    """Writes five training batches of 8 images and a test batch of 6, and makes torchvision expect their checksums.

    Gives all images and labels.
    """

    def write(root):
        place, rng, images, labels = root / CIFAR10.base_folder, np.random.default_rng(0), [], []
        place.mkdir(parents=True)

        def dump(name, content):
            blob = pickle.dumps(content, protocol=2)
            (place / name).write_bytes(blob)
            return [name, hashlib.md5(blob).hexdigest()]

        sums = []
        for name, _ in CIFAR10.train_list + CIFAR10.test_list:
            count = 6 if name == "test_batch" else 8
            data, of_batch = rng.integers(0, 256, (count, 3072), np.uint8), rng.integers(0, 10, count).tolist()
            images.append(data)
            labels += of_batch
            sums.append(dump(name, {"batch_label": name, "data": data, "labels": of_batch, "filenames": [""] * count}))
        meta_sum = dump("batches.meta", {"label_names": list("abcdefghij"), "num_vis": 3072})[1]
        monkeypatch.setattr(CIFAR10, "train_list", sums[:5])
        monkeypatch.setattr(CIFAR10, "test_list", sums[5:])
        monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": meta_sum})
        return np.concatenate(images).reshape(-1, 3, 32, 32), labels

    return write


def write_folder(root, classes=("cat", "dog", "owl"), count=10):
    """A folder per class, each with grey-level images of its own brightness and of unequal sides."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("L", (40 + i, 30), color=100 * label).save(root / name / f"{i}.png")
    return root


def normalised_like(images, train_images):
    """What Images should give, from bytes of shape (count, channels, height, width), in NumPy."""
    scaled = train_images / 255
    mean, std = (f(scaled, axis=(0, 2, 3), keepdims=True) for f in (np.mean, np.std))
    return torch.tensor((images / 255 - mean) / std, dtype=torch.float32)


def check(found, images, labels, train_images):
    assert len(found) == len(labels)
    tensors, found_labels = found.tensors()
    torch.testing.assert_close(tensors, normalised_like(images, train_images), atol=1e-4, rtol=1e-4)
    assert found_labels.dtype == torch.int64
    assert found_labels.tolist() == list(labels)


def test_digits_are_1797_images_like_mnists():
    train, test = load("digits")
    assert (len(train), len(test)) == (1438, 359)
    image, label = train[0]
    assert (image.shape, image.dtype, type(label)) == ((1, 28, 28), torch.float32, int)
    images, labels = train.tensors()
    assert images.shape == (1438, 1, 28, 28)
    assert set(labels.tolist()) == set(test.tensors()[1].tolist()) == set(range(10))
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("gzipped", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_is_read_from_a_folder_that_cannot_be_written(tmp_path, name, folder, gzipped):
    raw, written = write_mnist(tmp_path, folder, gzipped)
    before = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))
    raw.chmod(0o555)
    tmp_path.chmod(0o555)
    try:
        splits = load(name, tmp_path)
    finally:
        tmp_path.chmod(0o755)
        raw.chmod(0o755)
    train_images = written[0][0][:, None]
    assert [len(split) for split in load(name, raw)] == [60, 20], "the files may lie in the root itself"
    for found, (images, labels) in zip(splits, written, strict=True):
        check(found, images[:, None], labels, train_images)
    # The superuser may write anyway, so look.
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*")) == before


def write_cifar10_binary(root):
    """Writes five training files of 8 images and a test file of 6; gives all images and labels."""
    place, rng = root / "cifar-10-batches-bin", np.random.default_rng(0)
    place.mkdir(parents=True)
    images, labels = rng.integers(0, 256, (46, 3, 32, 32), np.uint8), rng.integers(0, 10, 46, np.uint8)
    for index, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        mine = slice(8 * index, 8 * index + 8)
        records = [bytes([label]) + image.tobytes() for image, label in zip(images[mine], labels[mine], strict=True)]
        (place / f"{name}.bin").write_bytes(b"".join(records))
    return images, labels.tolist()


@pytest.mark.parametrize("is_binary", [False, True], ids=["pickled", "binary"])
def test_cifar10_is_read_from_either_of_its_versions(tmp_path, write_cifar10, is_binary):
    images, labels = (write_cifar10_binary if is_binary else write_cifar10)(tmp_path)
    train, test = load("cifar10", tmp_path)
    check(train, images[:40], labels[:40], images[:40])
    check(test, images[40:], labels[40:], images[:40])


def test_a_folder_of_images_keeps_a_fifth_for_testing(tmp_path):
    root = write_folder(tmp_path)
    splits = load(str(root), image_size=16)
    assert [len(split) for split in splits] == [24, 6]
    for split in splits:
        for image, label in split:
            assert image.shape == (3, 16, 16)
            assert image.unique().item() == pytest.approx(label * 100 / 255 * 2 - 1)
    again = load("folder", root)
    assert [split.indices for split in splits] == [split.indices for split in again]
    assert not set(splits.train.indices) & set(splits.test.indices)


def test_a_folder_with_train_and_test_is_split_by_them(tmp_path):
    write_folder(tmp_path / "train", count=4)
    write_folder(tmp_path / "test", count=1)
    train, test = load("folder", tmp_path)
    assert (len(train), len(test)) == (12, 3)
    assert [label for _, label in test] == [0, 1, 2]


# Bad input: each changes good files and gives the arguments for load.


def mnist_with(name, change):
    def spoil(root):
        raw, _ = write_mnist(root, gzipped=name.endswith(".gz"))
        content = change((raw / name).read_bytes())
        (raw / name).write_bytes(content) if content is not None else (raw / name).unlink()
        return "mnist", root

    return spoil


def cut(size):
    return lambda content: content[:size]


def folder_with(*empty):
    def spoil(root):
        for name in empty:
            (root / name).mkdir(parents=True)
        return "folder", root

    return spoil


def other_classes(root):
    write_folder(root / "train", ("cat", "dog"), count=1)
    write_folder(root / "test", ("cat", "owl"), count=1)
    return "folder", root


IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
BAD_INPUT = {
    "unknown name": (lambda _: ("minst", None), ValueError, "unknown dataset 'minst'; there are 'digits', 'mnist'"),
    "no files": (lambda root: ("mnist", root), FileNotFoundError, rf"no {IMAGES} .*download=True\) once, before"),
    "missing file": (mnist_with(LABELS, lambda _: None), FileNotFoundError, f"no {LABELS} .*Put the four files"),
    "truncated gzip": (mnist_with(f"{IMAGES}.gz", cut(200)), ValueError, rf"{IMAGES}.gz is not a whole gzip.*again"),
    "truncated idx": (mnist_with(IMAGES, cut(-1)), ValueError, f"{IMAGES} is truncated.*60 images.*47,056.*47,055"),
    "idx too long": (mnist_with(IMAGES, lambda content: content + b"!"), ValueError, f"{IMAGES} is truncated or dam"),
    "foreign file": (
        mnist_with(IMAGES, lambda _: idx(np.zeros(60, np.uint8))),
        ValueError,
        f"{IMAGES} is no file of MNIST images: it should begin with the number 0x803, found 0x801",
    ),
    "more images than labels": (
        mnist_with(LABELS, lambda _: idx(np.zeros(19, np.uint8))),
        ValueError,
        f"do not belong together: .*t10k-images-idx3-ubyte has 20, .*{LABELS} has 19",
    ),
    "no cifar10": (lambda root: ("cifar10", root), FileNotFoundError, r"no data_batch_1 in .*cifar-10-python.tar.gz"),
    "folder without root": (lambda _: ("folder", None), ValueError, r"load\('folder'\) needs root="),
    "empty folder": (folder_with(), FileNotFoundError, "should hold a folder of images for each class"),
    "other classes": (other_classes, ValueError, "hold different classes: dog, owl"),
}


@pytest.mark.parametrize(("spoil", "error", "said"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_named_and_the_next_step_said(tmp_path, spoil, error, said):
    name, root = spoil(tmp_path)
    with pytest.raises(error, match=said):
        load(name, root)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_a_rank_is_not_allowed_to_download(tmp_path, monkeypatch, name):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(RuntimeError, match=f"rank 3 was asked to download {name}.*once in the notebook, before"):
        load(name, tmp_path, download=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_a_failed_download_says_where_to_and_what_to_check(tmp_path, monkeypatch, name):
    def unreachable(*_, **__):
        raise URLError("Name or service not known")

    for module in (mnist, cifar):
        monkeypatch.setattr(module, "download_and_extract_archive", unreachable)
    root = tmp_path / "data"
    with pytest.raises(ConnectionError, match=f"{name} could not be downloaded to {root}") as failure:
        load(name, root, download=True)
    said = str(failure.value)
    assert [words for words in ("Name or service not known", "GB free", "by hand") if words not in said] == []


def test_a_user_without_a_home_folder_has_the_digits_and_says_where_the_others_are(monkeypatch, tmp_path):
    def nobody(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    imported_there = runpy.run_path(datasets.__file__)["load"]
    assert len(imported_there("digits").train) == 1438
    with pytest.raises(ValueError, match=r"this user has no home folder.*load\(…, root=…\)"):
        imported_there("mnist")
    write_mnist(tmp_path)
    assert len(imported_there("mnist", root=tmp_path).test) == 20
