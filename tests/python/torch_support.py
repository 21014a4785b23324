"""What the tests of psgrad.torch share: jobs on the fake client and, where psgrad is built, on real servers."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import fake_client

PACKAGE = Path(__file__).parents[2] / "python" / "psgrad"
JOIN_S = 120.0

try:
    importlib.import_module("psgrad._core")
    HAVE_CORE = True
except ImportError:
    HAVE_CORE = False
    sys.modules.pop("psgrad", None)
    fake_client.stub_package(str(PACKAGE))

import psgrad  # noqa: E402
import psgrad.torch  # noqa: E402
from psgrad._supervisor import find_program  # noqa: E402
from server_processes import ServerProcesses  # noqa: E402

torch.set_num_threads(1)
REAL_CLIENT = psgrad.Client


class Job:
    """Servers, and workers that are threads of this process."""

    def __init__(self, address: str, workers: int, server: fake_client.FakeServer | None = None) -> None:
        self.address = address
        self.workers = workers
        self.server = server  # There is one in a fake job.

    def wrap(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, **options: Any) -> Any:
        return psgrad.torch.DistributedOptimizer(optimizer, model, server=self.address, **options)

    def run(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` returns in each worker, in no order. Raises the first exception."""
        results: list[Any] = []
        errors: list[BaseException] = []

        def body() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=body, daemon=True) for _ in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
        if errors:
            raise errors[0]
        assert len(results) == self.workers, "a worker hangs"
        return results


def ps_server() -> str | None:
    if not HAVE_CORE:
        return None
    try:
        return find_program("ps_server")
    except FileNotFoundError:
        return None


class Jobs:
    """Makes jobs of one kind; ends their servers."""

    def __init__(self, real: bool) -> None:
        self.real = real
        self._servers = ServerProcesses(Path(os.devnull))

    def __call__(self, workers: int = 1, mode: str = "bsp", *flags: str, shards: int = 1, **fake: Any) -> Job:
        if self.real:
            return Job(self._servers.start(workers, *flags, shards=shards, mode=mode), workers)
        server = fake_client.FakeServer(workers, mode, **fake)
        return Job(server.address, workers, server)

    def end(self) -> None:
        self._servers.end()


_seeding = threading.Lock()  # PyTorch has one generator for all threads.


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    """A model whose initial weights depend on the seed alone, also where workers make theirs at the same time."""
    with _seeding:
        torch.manual_seed(seed)
        return make()


def mlp(seed: int = 0, activation: type[torch.nn.Module] = torch.nn.Tanh) -> torch.nn.Sequential:
    model = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(6, 5), activation(), torch.nn.Linear(5, 3)), seed)
    assert isinstance(model, torch.nn.Sequential)
    return model


def batch(step: int, rank: int, samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [samples, 6] and targets [samples, 3]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(samples, 6, generator=generator), torch.randn(samples, 3, generator=generator)


def loss_of(model: torch.nn.Module, step: int, rank: int, samples: int = 4) -> torch.Tensor:
    x, y = batch(step, rank, samples)
    return torch.nn.functional.mse_loss(model(x), y)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def environment() -> dict[str, str]:
    """For a child process that imports psgrad."""
    folders = [str(Path(__file__).parent), str(Path(psgrad.__path__[0]).parent), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(folders)
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
