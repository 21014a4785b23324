"""MNIST's files, and what a seed decides: the initial weights, and the order of the samples.

The latter is computed a second time from its definition. It shares no code with the worker (common/random.h,
worker/data, worker/model/options.cc), so that a curve that begins with it checks them. Nothing here needs packages.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

DATASETS = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}  # And torchvision's folders for them.
TRAINING_SAMPLES = 60_000  # Each of them has so many.
_SYSTEM = Path("/usr/share/datasets")
_BYTES_TYPE = 8
_BITS_64 = 2**64 - 1
_WORDS = 312  # The generator's state has so many.
_OFFSET = 156
_INITIAL_WEIGHTS = 2**33  # The first of the seed's streams that belong to them; epoch e has stream e.


def mt19937_64(seed: int) -> Iterator[int]:
    """Nishimura and Matsumoto's generator, as the C++ standard fixes it."""
    state = [seed]
    for place in range(1, _WORDS):
        state.append((6364136223846793005 * (state[-1] ^ state[-1] >> 62) + place) & _BITS_64)
    while True:
        for place in range(_WORDS):
            joined = state[place] & 0xFFFFFFFF80000000 | state[(place + 1) % _WORDS] & 0x7FFFFFFF
            twisted = joined >> 1 ^ (0xB5026F5AA96619E9 if joined & 1 else 0)
            state[place] = state[(place + _OFFSET) % _WORDS] ^ twisted
            number = state[place]
            number ^= number >> 29 & 0x5555555555555555
            number ^= number << 17 & 0x71D67FFFEDA60000
            number ^= number << 37 & 0xFFF7EEE000000000
            yield number ^ number >> 43


def _mixed(value: int) -> int:
    """SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = value + 0x9E3779B97F4A7C15 & _BITS_64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _BITS_64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _BITS_64
    return value ^ value >> 31


def stream(seed: int, number: int) -> Iterator[int]:
    """One of a seed's independent streams of 64-bit numbers."""
    return mt19937_64(_mixed(_mixed(seed) ^ number))


def below(numbers: Iterator[int], bound: int) -> int:
    """Uniform in [0, bound), by Lemire's product (2019)."""
    while True:
        product = next(numbers) * bound
        if product & _BITS_64 >= 2**64 % bound:
            return product >> 64


def permutation(samples: int, seed: int, epoch: int) -> list[int]:
    """The order of the training samples in an epoch: Fisher and Yates, from the last place down."""
    order, numbers = list(range(samples)), stream(seed, epoch)
    for left in range(samples, 1, -1):
        chosen = below(numbers, left)
        order[left - 1], order[chosen] = order[chosen], order[left - 1]
    return order


def uniform_weights(widths: list[int], seed: int) -> list[tuple[float, list[float]]]:
    """For each layer He's limit, sqrt(6 / inputs), and numbers of 24 bits in [-1, 1): the weight [out, in], row-major,
    is the float32 product of both. Biases begin with 0.
    """
    layers = []
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        numbers = stream(seed, _INITIAL_WEIGHTS + 1 + 2 * layer)  # A layer has two tensors.
        layers.append((math.sqrt(6 / inputs), [(next(numbers) >> 40) / 2**23 - 1 for _ in range(inputs * outputs)]))
    return layers


class IdxError(Exception):
    """What is wrong with a file, or which one is missing."""


def mnist_files(dataset: str, data_dir: str) -> dict[str, tuple[Path, Path]]:
    """Images and labels of the splits "train" and "t10k". IdxError."""
    folders = [_SYSTEM / dataset]
    if data_dir:
        folders = [Path(data_dir) / dataset, Path(data_dir) / DATASETS[dataset], Path(data_dir)]
    for folder in folders:
        found = {split: (_file(folder, f"{split}-images", 3), _file(folder, f"{split}-labels", 1))
                 for split in ("train", "t10k")}  # fmt: skip
        if all(path is not None for pair in found.values() for path in pair):
            return found  # type: ignore[return-value]
    raise IdxError(f"{dataset} is in none of {', '.join(map(str, folders))}")


def _file(folder: Path, stem: str, dimensions: int) -> Path | None:
    names = [f"{stem}{dot}idx{dimensions}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_idx(path: Path) -> tuple[list[int], bytes]:
    """Shape and elements of a file of bytes. IdxError; OSError."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        magic = file.read(4)
        if len(magic) < 4 or magic[:3] != bytes([0, 0, _BYTES_TYPE]):
            raise IdxError(f"{path}: no IDX file of bytes")
        shape = [int.from_bytes(file.read(4), "big") for _ in range(magic[3])]
        data = file.read()
    if len(data) != math.prod(shape):
        raise IdxError(f"{path}: holds {len(data)} elements, declares {shape}")
    return shape, data
