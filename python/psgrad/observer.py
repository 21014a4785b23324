"""Looking on at a job: a process that reads its weights and takes no part in it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psgrad import _core
from psgrad.client import Tensor, call


@dataclass(frozen=True)
class Observed:
    """Weights of one version of each shard; in a synchronous mode of one version of all."""

    #: The lowest of all shards'.
    version: int
    #: By shard.
    versions: tuple[int, ...]
    #: Of the job: it grows whenever the job is started or rolled back, and versions grow within one.
    generation: int
    #: Arrays by the names of the layout.
    weights: dict[str, Any]


@dataclass(frozen=True)
class JobStatus:
    """What the first server says of the job."""

    job: str
    generation: int
    #: "gathering", "running", "finished", "failed" or "shut down".
    phase: str
    #: Why, in "failed".
    failure: str
    #: Whom or what the job waits for; empty: for nobody.
    waiting_for: str
    #: How many workers are in it now.
    workers: int


class Observer:
    """Reads the weights of a job: an evaluator, or an actor that acts by the newest.

        observer = psgrad.Observer("127.0.0.1:5000")
        seen = observer.pull()
        print(seen.version, seen.weights["0.weight"].mean())

    It needs no layout, has no rank, and no worker waits for it; any number of them may look on. It follows a job over
    restarts of its servers. Threads may share it. For torch there is ``psgrad.torch.load_into``.

    ``server``: the first server (HOST:PORT or unix:PATH). ``timeout``: seconds that each call waits at most, for
    servers that cannot be reached, have no weights yet, or have no room for another reader (--max_versions). Ctrl-C
    ends a wait within a second, and then the observer is closed.

    Each call raises Unavailable, naming whom or what it has waited for; JobFailed, or ShutDown, where that is why there
    are no weights; Cancelled after Ctrl-C or close().
    """

    def __init__(self, server: str, *, timeout: float = 30.0) -> None:
        if not isinstance(server, str):
            raise TypeError(f"server={server!r}: HOST:PORT or unix:PATH is expected")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: more than 0 s is expected")
        self.server = server
        self._core = _core.Observer(server, timeout)
        self._known: tuple[Tensor, ...] | None = None
        #: Held by whoever uses ``staged``, memory for one model that is kept from pull to pull.
        self.staging = threading.Lock()
        self.staged: dict[str, Any] | None = None

    @property
    def layout(self) -> tuple[Tensor, ...]:
        """The model's tensors, in the servers' order. Waits until there is a model: the first worker brings it."""
        if self._known is None:
            found = call(self._core.layout(), self._core)
            self._known = tuple(Tensor(name, tuple(shape), *others) for name, shape, *others in found)
        return self._known

    def status(self) -> JobStatus:
        """What the job does at the moment."""
        return JobStatus(*call(self._core.status(), self._core))

    def pull(self, into: Mapping[str, Any] | None = None, *, version: int | None = None) -> Observed:
        """The newest weights, or those of exactly this version, in float32 as the servers keep them.

        ``into``: arrays by name to write to: float32, C-contiguous, in this host's memory; else TypeError or
        ValueError, naming the tensor. All others are new NumPy arrays. While it runs they must neither be changed nor
        read; after an exception what is in them is worth nothing.

        Refused for a version that is gone, or if the job of these servers has another model by now.
        """
        layout = self.layout
        given = dict(into or {})
        known = {tensor.name for tensor in layout}
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"into: the model has no tensor {unknown[0]}")
        weights = {
            tensor.name: given[tensor.name] if tensor.name in given else _empty(tensor.shape) for tensor in layout
        }
        specs = [_core.TensorSpec(each.name, list(each.shape), 1.0, 1.0, each.kind, 0) for each in layout]
        prepared = _core.tensors(specs, list(weights.values()), "weights")
        versions, generation = call(self._core.pull(prepared, version), self._core)
        return Observed(min(versions), tuple(versions), generation, weights)

    def close(self) -> None:
        """Ends every wait with Cancelled."""
        self._core.stop()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _empty(shape: Sequence[int]) -> Any:
    numpy: Any = importlib.import_module("numpy")  # Whoever gives arrays need not have it.
    return numpy.empty(shape, numpy.float32)
