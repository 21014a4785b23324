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

import contextlib
import ctypes
import importlib
import os
import sys
import typing


def _has_foreign_grpc() -> bool:
    """Whether a gRPC's symbols are visible to all libraries, as TensorFlow's are: some of ours would be bound to them.

    TensorFlow 2.21 has libraries in which dlsym() finds nothing of gRPC, but the loader does; so they are told by name.
    """
    if hasattr(ctypes.CDLL(None), "grpc_init"):
        return True
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return any("/libtensorflow_" in line for line in maps)
    return "tensorflow" in sys.modules


def _preloaded_malloc() -> str:
    """A malloc that was preloaded: with RTLD_DEEPBIND ours would use another one for the same memory."""
    for library in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
        if any(name in os.path.basename(library) for name in ("malloc", "asan", "tsan")):
            return library
    return ""


def _load_core() -> None:
    """Loads psgrad._core. Libraries that were loaded before it must not take the place of those that it needs."""
    if "psgrad._core" in sys.modules:
        return
    if not _has_foreign_grpc():
        importlib.import_module("psgrad._core")
        return
    if malloc := _preloaded_malloc():
        raise ImportError(
            f"import psgrad before tensorflow: TensorFlow has loaded a gRPC of its own, and with {malloc} preloaded "
            "psgrad cannot be kept apart from it"
        )
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
    try:
        importlib.import_module("psgrad._core")
    finally:
        sys.setdlopenflags(flags)


_load_core()

from psgrad._core import Cancelled, Error, Fenced, JobFailed, Refused, RolledBack, ShutDown, Unavailable  # noqa: E402
from psgrad.client import Client, Exchange, LocalSteps, OptimizerSettings, Result, Tensor, WaitAgain  # noqa: E402
from psgrad.observer import JobStatus, Observed, Observer  # noqa: E402
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
    "JobStatus",
    "LocalSteps",
    "Observed",
    "Observer",
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
