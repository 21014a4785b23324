"""A convolutional network on Fashion-MNIST, with as many workers as there are.

    psrun --workers=2 --mode=bsp python/examples/cnn.py
    psrun --workers=2 --mode=asp python/examples/cnn.py

The data are of the Debian package dataset-fashion-mnist (or in --data, as IDX files). It reaches 90 % on the
test images in three epochs with two workers, in either mode.
"""

from __future__ import annotations

import argparse
import gzip
import struct
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import psgrad.torch

IDX_UINT8 = 8


def read_idx(folder: Path, name: str) -> torch.Tensor:
    """An IDX file of bytes, as a tensor of its shape. FileNotFoundError, ValueError."""
    path = folder / name
    if path.exists():
        data = path.read_bytes()
    elif path.with_name(f"{name}.gz").exists():
        data = gzip.decompress(path.with_name(f"{name}.gz").read_bytes())
    else:
        raise FileNotFoundError(f"{path}(.gz): apt install dataset-fashion-mnist, or --data=FOLDER")
    zero, kind, dimensions = struct.unpack_from(">HBB", data)
    if zero != 0 or kind != IDX_UINT8:
        raise ValueError(f"{path}: not an IDX file of bytes")
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    return torch.frombuffer(bytearray(data[4 + 4 * dimensions :]), dtype=torch.uint8).reshape(shape)


def load(folder: Path, split: str) -> TensorDataset:
    """Images [n, 1, 28, 28], about zero mean and unit variance, and labels [n]."""
    images = read_idx(folder, f"{split}-images-idx3-ubyte").float().div(255).sub(0.286).div(0.353)
    return TensorDataset(images.unsqueeze(1), read_idx(folder, f"{split}-labels-idx1-ubyte").long())


def network() -> torch.nn.Sequential:
    """Gives the scores [n, 10] of images [n, 1, 28, 28]."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.BatchNorm2d(32),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 7 * 7, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )


@torch.no_grad()
def accuracy(model: torch.nn.Module, data: TensorDataset) -> float:
    """The part of the images that are recognised."""
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(data, 500))
    model.train()
    return right / len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="samples of a worker's batch")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--images", type=int, default=0, help="of the training split, the first so many; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server", help="HOST:PORT; else $PS_SERVER")
    parser.add_argument("--metrics_file")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    train, test = load(arguments.data, "train"), load(arguments.data, "t10k")
    if arguments.images:
        train = TensorDataset(*(tensor[: arguments.images] for tensor in train.tensors))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9, weight_decay=1e-4)
    opt = psgrad.torch.DistributedOptimizer(
        optimizer, model, server=arguments.server, metrics_file=arguments.metrics_file
    )
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        train, opt.num_workers, opt.rank, seed=arguments.seed
    )
    loader = DataLoader(train, arguments.batch, sampler=sampler)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        opt, arguments.lr, total_steps=arguments.epochs * len(loader) + 1, cycle_momentum=False
    )
    began = time.monotonic()
    with opt:
        for epoch in range(arguments.epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                opt.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                opt.report(loss=loss)
                opt.step()
                scheduler.step()
            if opt.lead:
                with opt.idle("evaluating"):
                    right = accuracy(model, test)
                opt.report(split="test", accuracy=right)
                print(f"epoch {epoch + 1}: test accuracy {100 * right:.1f} %", flush=True)
    if opt.rank == 0:
        seconds = time.monotonic() - began
        print(
            f"{opt.mode}, {opt.num_workers} workers: test accuracy {100 * accuracy(model, test):.1f} %, {seconds:.0f} s"
        )


if __name__ == "__main__":
    main()
