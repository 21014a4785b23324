"""Imports the modules in this order, uses them, and trains: ``importing_worker.py ADDRESS MODULE…``."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np


def use(name: str, module: Any) -> None:
    """So that it has loaded what it loads late."""
    if name == "torch":
        assert float(module.ones(3).sum()) == 3
    elif name == "grpc":
        with module.insecure_channel("127.0.0.1:1") as channel:
            future = module.channel_ready_future(channel)
            future.cancel()
    elif name == "tensorflow":
        assert float(module.reduce_sum(module.ones(3))) == 3


def main(address: str, *names: str) -> None:
    modules = {name: importlib.import_module(name) for name in names}
    for name, module in modules.items():
        use(name, module)
    psgrad: Any = modules["psgrad"]
    optimizer = psgrad.OptimizerSettings("sgd", {"learning_rate": 0.5})
    client = psgrad.Client.join(address, [psgrad.Tensor("w", (3, 4))], optimizer=optimizer)
    weights = [np.ones((3, 4), np.float32)]
    result = client.start(weights, weights)
    for _ in range(3):
        result = client.push_pull(result.next_step, [np.ones((3, 4), np.float32)], weights, version=result.version)
    assert (weights[0] == -0.5).all()
    for name, module in modules.items():
        use(name, module)
    client.done()
    client.leave()
    print(f"version {result.version}")


main(*sys.argv[1:])
