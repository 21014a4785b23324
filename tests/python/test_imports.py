"""psgrad beside other packages that bring libraries of their own, in any order of imports; each process trains."""

from __future__ import annotations

import importlib.util
import itertools
import pathlib
import subprocess
import sys

import pytest

from server_processes import ServerProcesses
from torch_support import environment

SCRIPT = pathlib.Path(__file__).with_name("importing_worker.py")


def train(servers: ServerProcesses, *modules: str) -> None:
    """A worker that imports these in this order makes three steps."""
    command = [sys.executable, SCRIPT, servers.start(1), *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(), check=False)
    assert done.returncode == 0, f"{modules}: {done.returncode}\n{done.stderr}"
    assert done.stdout.endswith("version 3\n"), done.stdout
    assert servers.wait() == [0]
    servers.processes.clear()


def test_torch_and_grpcio_live_with_psgrad_in_any_order(servers: ServerProcesses) -> None:
    """Each is also used: a tensor, a channel."""
    modules = ["psgrad", "torch", *(["grpc"] if importlib.util.find_spec("grpc") else [])]
    for order in itertools.permutations(modules):
        train(servers, *order)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflow_lives_with_psgrad_in_either_order(servers: ServerProcesses) -> None:
    """Its libraries, with a gRPC among them, are visible to all that is loaded later."""
    train(servers, "tensorflow", "psgrad")
    train(servers, "psgrad", "tensorflow")
