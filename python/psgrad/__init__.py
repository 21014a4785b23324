"""Train with parameter servers: the client for Python.

A worker joins a job's servers, and from then on exchanges gradients for weights with them:

    client = psgrad.Client.join("127.0.0.1:5000", [psgrad.Tensor("w", (784, 10))])
    weights = client.weight_buffers()
    result = client.start(initial, weights)
    step = result.next_step
    while …:
        result = client.push_pull(step, gradients, weights, version=result.version, samples=64)
        step = result.next_step
    client.done()
    client.leave()

``psgrad.torch.DistributedOptimizer`` does this for a PyTorch model; ``psrun`` starts servers and workers.
"""

from __future__ import annotations

import typing

from psgrad import _loading

_loading.load()

from psgrad._core import Cancelled, Error, Fenced, JobFailed, Refused, RolledBack, ShutDown, Unavailable  # noqa: E402
from psgrad._exchange import Exchange  # noqa: E402
from psgrad.client import (  # noqa: E402
    Client,
    LocalSteps,
    OptimizerSettings,
    Result,
    Tensor,
    WaitAgain,
)
from psgrad.spawn import SpawnError, spawn  # noqa: E402

if typing.TYPE_CHECKING:
    from psgrad.weights import load, save

__version__ = "0.1.0"

__all__ = [
    "Cancelled",
    "Client",
    "Error",
    "Exchange",
    "Fenced",
    "JobFailed",
    "LocalSteps",
    "OptimizerSettings",
    "Refused",
    "Result",
    "RolledBack",
    "ShutDown",
    "SpawnError",
    "Tensor",
    "Unavailable",
    "WaitAgain",
    "load",
    "save",
    "spawn",
]


def __getattr__(name: str) -> object:
    """What only some need is imported when it is asked for."""
    if name in ("load", "save"):
        from psgrad import weights

        return getattr(weights, name)
    raise AttributeError(f"module 'psgrad' has no attribute {name!r}")
