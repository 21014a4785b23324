"""Fashion-MNIST's training files, cut into one pair of IDX files for each worker."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from idx_files import IdxError, mnist_files, read_idx

from .lab import Lab, Skipped

RANKS = 4
BATCH = 64  # Of each worker.
SMALL_PART = 20  # In an uneven cut, one worker has a part of so many.

Indices = list[int]


@dataclass
class Samples:
    """A split: images of bytes, and labels."""

    shape: list[int]  # Of an image.
    images: bytes
    labels: bytes

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Indices) -> Samples:
        """Those samples, in that order."""
        size = len(self.images) // len(self.labels)
        images = b"".join(self.images[index * size : (index + 1) * size] for index in indices)
        return Samples(self.shape, images, bytes(self.labels[index] for index in indices))


@dataclass
class Files:
    """A pair of IDX files."""

    images: Path
    labels: Path

    def __str__(self) -> str:
        return f"{self.images},{self.labels}"


def read_splits(lab: Lab) -> tuple[Samples, Samples]:
    """Training and test samples; a twentieth of both in the quick form. Skipped if they are not here."""
    try:
        files = mnist_files("fashion-mnist", "")
        both = [_read(*files[split]) for split in ("train", "t10k")]
    except (IdxError, OSError) as error:
        raise Skipped(f"Fashion-MNIST cannot be read (Debian's package dataset-fashion-mnist): {error}") from None
    train, test = (one.select(list(range(len(one) // lab.pick(1, 20)))) for one in both)
    return train, test


def _read(images: Path, labels: Path) -> Samples:
    (_, *shape), pixels = read_idx(images)
    return Samples(shape, pixels, read_idx(labels)[1])


def as_shared(labels: bytes) -> list[Indices]:
    """What each rank takes of the whole with --shuffle=false, in its order: a run of each global batch."""
    count = len(labels)
    begins = range(0, count, RANKS * BATCH)
    return [
        [
            index
            for begin in begins
            for index in range(begin + rank * BATCH, begin + (rank + 1) * BATCH)
            if index < count
        ]
        for rank in range(RANKS)
    ]


def quarters(labels: bytes) -> list[Indices]:
    """Runs of the file, as long as each other."""
    return _runs(list(range(len(labels))), [len(labels) * rank // RANKS for rank in range(RANKS + 1)])


def uneven(labels: bytes) -> list[Indices]:
    """The last worker has a small part, and the others share the rest."""
    rest = len(labels) - len(labels) // SMALL_PART
    ends = [rest * rank // (RANKS - 1) for rank in range(RANKS)]
    return _runs(list(range(len(labels))), [*ends, len(labels)])


def by_class(labels: bytes) -> list[Indices]:
    """Quarters of the samples in the order of their classes, the highest first: each worker lacks most classes."""
    order = sorted(range(len(labels)), key=lambda index: -labels[index])
    return _runs(order, [len(labels) * rank // RANKS for rank in range(RANKS + 1)])


def _runs(order: Indices, ends: list[int]) -> list[Indices]:
    return [order[begin:end] for begin, end in pairwise(ends)]


CUTS: dict[str, Callable[[bytes], list[Indices]]] = {
    "as shared": as_shared,
    "quarters": quarters,
    "uneven": uneven,
    "by class": by_class,
}


def write_cut(folder: Path, train: Samples, parts: list[Indices]) -> list[Files]:
    """A pair of files for each part. The folder's name says what is in them, so that it is written once."""
    found = []
    for indices in parts:
        inside = folder / f"{len(indices)}-{zlib.crc32(array('q', indices)):08x}"
        found.append(write_files(inside, train.select(indices)))
    return found


def write_files(folder: Path, samples: Samples) -> Files:
    """The samples as a pair of files, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Files(folder / "images-idx3-ubyte", folder / "labels-idx1-ubyte")
    _write(files.images, [len(samples), *samples.shape], samples.images)
    _write(files.labels, [len(samples)], samples.labels)
    return files


def _write(path: Path, shape: list[int], data: bytes) -> None:
    header = bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    if path.exists() and path.stat().st_size == len(header) + len(data):
        return
    path.write_bytes(header + data)
