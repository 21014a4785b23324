"""The step of a ResNet-50 (161 tensors, 25.6 M parameters): plain torch, psgrad, and DistributedDataParallel on Gloo.

    PYTHONPATH=build/python python tests/python/bench/resnet_step.py [--workers=1] [--images=4] [--size=64] [--rounds=3]

Each worker is a process with one thread. The ways take turns, `--rounds` times; a figure is the median of all steps but
the first ones, and its ratio to plain torch is of the same round's figures. psgrad's servers run on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch


class Bottleneck(torch.nn.Module):
    """1×1, 3×3 and 1×1 convolutions, each with batch normalisation, beside a shortcut."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = [(into, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        self.convolutions = torch.nn.ModuleList(
            [torch.nn.Conv2d(i, o, k, s, k // 2, bias=False) for i, o, k, s in sizes]
        )
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm2d(o) for _, o, _, _ in sizes])
        self.shortcut: torch.nn.Module | None = None
        if into != 4 * width:
            self.shortcut = torch.nn.Sequential(
                torch.nn.Conv2d(into, 4 * width, 1, stride, bias=False), torch.nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for place, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            if place < 2:
                y = torch.relu(y)
        return torch.relu(y + (x if self.shortcut is None else self.shortcut(x)))


def resnet50() -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = [
        torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(3, 2, 1),
    ]
    into = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            layers.append(Bottleneck(into, width, 2 if stage > 0 and block == 0 else 1))
            into = 4 * width
    layers += [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(into, 1000)]
    return torch.nn.Sequential(*layers)


def worker(arguments: argparse.Namespace) -> None:
    """Prints the seconds of each step, as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    model: torch.nn.Module = resnet50()
    inner: torch.nn.Module = model
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if arguments.way == "ddp":
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    elif arguments.way.startswith("psgrad"):
        import psgrad.torch

        if arguments.way == "psgrad-tcp":
            join = psgrad.Client.join
            psgrad.Client.join = lambda *a, **k: join(*a, **k, shared_memory="off")  # type: ignore[method-assign]
        optimizer = psgrad.torch.DistributedOptimizer(optimizer, inner)
    x = torch.randn(arguments.images, 3, arguments.size, arguments.size)
    y = torch.randint(0, 1000, (arguments.images,))
    times = []
    for _ in range(arguments.steps + arguments.warmup):
        began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    print(json.dumps(times[arguments.warmup :]), flush=True)
    if arguments.way.startswith("psgrad"):
        optimizer.finish()
    elif arguments.way == "ddp":
        torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def servers(arguments: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Runs a server, and yields the environment that names it."""
    from psgrad._supervisor import find_program

    command = [str(find_program("ps_server")), "--listen=127.0.0.1:0", f"--num_workers={arguments.workers}"]
    command += ["--mode=bsp", "--optimizer=from_worker", *arguments.server_flag]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        yield {"PS_SERVER": server.stdout.readline().removeprefix("listening on ").strip()}
        server.wait()


def measure(way: str, arguments: argparse.Namespace) -> float:
    """The median step, in seconds, of all workers."""
    running = servers(arguments) if way.startswith("psgrad") else None
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment.update(next(running) if running is not None else {})
    command = [sys.executable, __file__, *sys.argv[1:], f"--way={way}"]
    workers = []
    for rank in range(arguments.workers):
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(arguments.workers)}
        workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**environment, **ranks}))
    times: list[float] = []
    for process in workers:
        output, _ = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"{way}: a worker ended with status {process.returncode}")
        times += json.loads(output.splitlines()[-1])
    if running is not None:
        next(running, None)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--images", type=int, default=4, help="of a worker's batch")
    parser.add_argument("--size", type=int, default=64, help="of an image, in pixels a side")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server_flag", action="append", default=[], help="more flags of ps_server")
    parser.add_argument("--ways", default="plain,psgrad,psgrad-tcp,ddp")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        worker(arguments)
        return
    ways = arguments.ways.split(",")
    steps: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way in ways:
            steps[way].append(measure(way, arguments))
    print(f"{arguments.workers} workers, {arguments.images} images of {arguments.size}², {arguments.rounds} rounds")
    for way in ways:
        figures = " ".join(f"{1e3 * value:7.1f}" for value in steps[way])
        ratios = " ".join(f"{value / base:5.2f}" for value, base in zip(steps[way], steps[ways[0]], strict=True))
        print(f"{way:12} {figures} ms a step   by {ways[0]}: {ratios}")


if __name__ == "__main__":
    main()
