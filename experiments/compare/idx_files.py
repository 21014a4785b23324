"""MNIST's files: where ps_worker finds them, and what is in them."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

DATASETS = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}  # And torchvision's folders for them.
TRAINING_SAMPLES = 60_000  # Of each of them.
_SYSTEM = Path("/usr/share/datasets")
_BYTES_TYPE = 8


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
