"""A psgrad.Client without servers: workers are threads of one process, and a job is an object that they share.

It does what the interface says as plainly as it can, in numpy: the optimizers are written from docs/optimizers.md, not
from torch.optim. It reads a gradient when it is ready, and writes weights in wait(), once all are.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WAIT_S = 30.0


def stub_package(path: str) -> types.ModuleType:
    """A `psgrad` for the tests of psgrad.torch where psgrad._core has not been built."""
    module = types.ModuleType("psgrad")
    module.__path__ = [path]

    class Error(RuntimeError):
        rank: int | None = None
        step: int | None = None

    @dataclass
    class Tensor:
        name: str
        shape: tuple[int, ...]
        learning_rate_factor: float = 1.0
        weight_decay_factor: float = 1.0
        kind: str = "weight"
        group: int = 0

    @dataclass
    class OptimizerSettings:
        optimizer: str
        hyperparameters: dict[str, float] = field(default_factory=dict)
        clip_value: float | None = None
        clip_tensor_norm: float | None = None
        clip_norm: float | None = None
        groups: Sequence[dict[str, float]] = ()

    names: dict[str, Any] = {"Error": Error, "Tensor": Tensor, "OptimizerSettings": OptimizerSettings}
    for name in ("JobFailed", "Fenced", "Unavailable", "Refused", "Cancelled"):
        names[name] = type(name, (Error,), {})
    names["RolledBack"] = type("RolledBack", (names["Unavailable"],), {})
    names.update(Client=FakeClient, Exchange=FakeExchange, Result=FakeResult)
    for name, value in names.items():
        setattr(module, name, value)
    sys.modules["psgrad"] = module
    return module


def psgrad() -> Any:
    return sys.modules["psgrad"]


@dataclass
class FakeResult:
    version: int
    versions: list[int]
    answers: list[str] = field(default_factory=list)
    next_step: int = 0
    hyperparameters: dict[str, float] = field(default_factory=dict)
    learning_rate_factor: float = 1.0
    skipped: str = ""
    why_skipped: str = ""
    push_s: float = 0.001
    wait_s: float = 0.002
    pull_s: float = 0.003


@dataclass
class LocalSteps:
    exchange: str
    steps: int = 1
    average_every_steps: int = 0
    average_every_epochs: float = 0
    alpha: float = 0
    optimizer: str = "sgd"
    clip_value: float = 0
    clip_tensor_norm: float = 0
    clip_norm: float = 0
    fragments: tuple[tuple[int, ...], ...] = ()
    overlap: int = 0
    mix: float = 0


@dataclass
class Push:
    rank: int
    samples: int
    gradients: list[np.ndarray | None]
    difference: bool
    learning_rate: float | None
    passed: int | None = None
    groups: Sequence[dict[str, float]] | None = None


@dataclass
class FakeReduction:
    """The numbers of one round; the result, once all have brought theirs."""

    kind: tuple[str, str, int] | None = None
    brought: dict[int, list[float]] = field(default_factory=dict)
    result: tuple[list[float], int] | None = None


KNOWN_OPTIMIZERS = ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw")
_addresses = itertools.count()
_servers: dict[str, FakeServer] = {}


class FakeServer:
    """A job. `pushes` is the history, for tests to look at."""

    def __init__(self, workers: int = 1, mode: str = "bsp", local: LocalSteps | None = None, version: int = 0) -> None:
        self.workers = workers
        self.mode = mode
        self.local = local
        self.version = version
        self.start_version = version
        self.synchronous = mode in ("bsp", "local_sgd")
        self.condition = threading.Condition()
        self.layout: list[Any] = []
        self.settings: Any = None
        self.learning_rate = 0.0
        self.of_all: dict[str, float] = {}  # What pushes have told for all, and of groups, by number.
        self.of_groups: dict[int, dict[str, float]] | None = None
        self.weights: list[np.ndarray] = []
        self.state: list[dict[str, np.ndarray]] = []
        self.skipped: list[int] = []  # Updates of each tensor that nobody had a gradient for.
        self.joined: set[int] = set()
        self.done: set[int] = set()
        self.left: dict[int, str] = {}
        self.failure = ""
        self.gathered: dict[int, dict[int, Push]] = {}
        self.pushes: list[Push] = []
        self.steps = dict.fromkeys(range(workers), version)
        self.reduction = FakeReduction()
        self.stale: set[int] = set()  # Counts of pushes, in asp, that are answered "stale".
        self.address = f"fake:{next(_addresses)}"
        _servers[self.address] = self

    def wait(self, condition: Any, what: str) -> None:
        """With the lock held."""
        if not self.condition.wait_for(lambda: condition() or bool(self.failure), WAIT_S):
            raise psgrad().Unavailable(f"{what}: {WAIT_S} s have passed")
        if self.failure:
            raise psgrad().JobFailed(self.failure)

    @property
    def lead(self) -> int:
        return min(self.joined - set(self.left), default=0)

    def push(self, step: int, push: Push) -> str:
        """With the lock held."""
        self.pushes.append(push)
        if self.failure:
            raise psgrad().JobFailed(self.failure)
        if not self.synchronous:
            self.steps[push.rank] = step + 1
            if len(self.pushes) in self.stale:
                return "stale"
            if push.samples > 0:
                self.update([push])
            self.condition.notify_all()
            return "applied"
        if step < self.version:
            return "duplicate"
        assert step == self.version, (step, self.version)
        self.gathered.setdefault(step, {})[push.rank] = push
        self.look()
        return "applied"

    def look(self) -> None:
        """Makes the next version, if all its pushes are there."""
        while True:
            gathered = self.gathered.get(self.version, {})
            wanted = set(range(self.workers)) - self.done
            if not gathered or not wanted <= set(gathered):
                break
            self.update([gathered[rank] for rank in sorted(gathered)])
        self.condition.notify_all()

    def look_at_reduction(self) -> None:
        """Ends the round, if nobody is missing. With the lock held."""
        brought = self.reduction.brought
        if not brought or not self.joined - self.done - set(self.left) <= set(brought):
            return
        assert self.reduction.kind is not None
        operation = {"sum": sum, "min": min, "max": max}[self.reduction.kind[0]]
        columns = zip(*(brought[rank] for rank in sorted(brought)), strict=True)
        self.reduction.result = [float(operation(column)) for column in columns], len(brought)
        self.reduction = FakeReduction()
        self.condition.notify_all()

    def update(self, pushes: list[Push]) -> None:
        counting = [push for push in pushes if push.samples > 0]
        if counting:
            if counting[0].learning_rate is not None:
                self.learning_rate = counting[0].learning_rate
            if counting[0].groups is not None:
                self.of_all.update(counting[0].groups[0])
                self.of_groups = dict(enumerate(counting[0].groups))
            total = sum(push.samples for push in counting)
            shares = [np.float32(push.samples / total) for push in counting]
            if counting[0].difference:
                self.add_differences(counting, shares)
            else:
                self.step_weights(counting, shares)
        self.version += 1

    def add_differences(self, pushes: list[Push], shares: list[np.float32]) -> None:
        for index, spec in enumerate(self.layout):
            if spec.kind != "constant":
                for push, share in zip(pushes, shares, strict=True):
                    self.weights[index] += share * push.gradients[index]

    def step_weights(self, pushes: list[Push], shares: list[np.float32]) -> None:
        gradients: dict[int, np.ndarray] = {}
        for index, spec in enumerate(self.layout):
            if spec.kind == "constant":
                continue
            values = [push.gradients[index] for push in pushes]
            present = [share * value for share, value in zip(shares, values, strict=True) if value is not None]
            if not present:
                self.skipped[index] += 1
                continue
            mean = sum(present)
            if spec.kind == "weight":
                gradients[index] = np.asarray(mean, np.float32)
            elif spec.kind == "buffer_lowest":
                if self.synchronous or pushes[0].rank == self.lead:
                    self.weights[index][...] = values[0]
            elif self.synchronous:
                self.weights[index][...] = mean
            else:
                self.weights[index] += (values[0] - self.weights[index]) / self.workers
        if self.settings.clip_norm is not None:
            norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
            factor = np.float32(min(1.0, self.settings.clip_norm / (norm + 1e-6)))
            gradients = {index: gradient * factor for index, gradient in gradients.items()}
        for index, gradient in gradients.items():
            self.optimize(
                self.layout[index],
                self.weights[index],
                gradient,
                self.state[index],
                self.version + 1 - self.skipped[index],
            )

    def optimize(self, spec: Any, w: np.ndarray, g: np.ndarray, state: dict[str, np.ndarray], t: int) -> None:
        """docs/optimizers.md, in float32 but for factors."""
        own = dict(enumerate(self.settings.groups, 1)) if self.of_groups is None else self.of_groups
        h = {**self.settings.hyperparameters, **self.of_all, "learning_rate": self.learning_rate}
        if spec.group > 0:
            h.update(own.get(spec.group, {}))
        name = self.settings.optimizer
        rate = h["learning_rate"] * spec.learning_rate_factor
        decay = h.get("weight_decay", 0.0) * spec.weight_decay_factor

        def kept(key: str, initial: float = 0.0) -> np.ndarray:
            return state.setdefault(key, np.full(w.shape, initial, np.float32))

        if name == "adamw":
            w -= np.float32(rate * decay) * w
        elif decay:
            g = g + np.float32(decay) * w
        if name == "sgd":
            w -= np.float32(rate) * g
        elif name in ("momentum", "nesterov"):
            v = kept("v")
            v *= np.float32(h["momentum"])
            v += g
            w -= np.float32(rate) * (v if name == "momentum" else g + np.float32(h["momentum"]) * v)
        elif name == "adagrad":
            s = kept("s", h["initial_accumulator_value"])
            s += g * g
            w -= np.float32(rate / (1 + (t - 1) * h["lr_decay"])) * g / (np.sqrt(s) + np.float32(h["eps"]))
        elif name == "rmsprop":
            s = kept("s")
            s *= np.float32(h["alpha"])
            s += np.float32(1 - h["alpha"]) * g * g
            w -= np.float32(rate) * g / (np.sqrt(s) + np.float32(h["eps"]))
        else:
            m, v = kept("m"), kept("v")
            m *= np.float32(h["beta1"])
            m += np.float32(1 - h["beta1"]) * g
            v *= np.float32(h["beta2"])
            v += np.float32(1 - h["beta2"]) * g * g
            first, second = 1 - h["beta1"] ** t, 1 - h["beta2"] ** t
            w -= np.float32(rate / first) * m / (np.sqrt(v) / np.float32(np.sqrt(second)) + np.float32(h["eps"]))


def array(value: Any) -> np.ndarray:
    """An array of numpy or torch as one of numpy, without a copy."""
    if hasattr(value, "detach"):
        value = value.detach().numpy()
    value = np.asarray(value)
    if value.dtype != np.float32 or not value.flags.c_contiguous:
        raise TypeError(f"float32 and C-contiguous is expected, not {value.dtype}")
    return value


class FakeExchange:
    def __init__(self, client: FakeClient, step: int, push: Push, weights: Any, skip_not_finite: bool) -> None:
        self.client = client
        self.step = step
        self.push = push
        self.weights = weights
        self.skip_not_finite = skip_not_finite
        self.skipped = ""
        self.answer = ""
        self.given: Any = None  # With begin().
        self.result: FakeResult | None = None  # Once wait_tensor() has waited for it.
        layout = client.server.layout
        self.missing = {index for index, spec in enumerate(layout) if spec.kind != "constant"}

    def ready(self, index: int, gradient: Any = None) -> None:
        self.take(index, array(self.given[index] if gradient is None else gradient))

    def ready_at(self, index: int, address: int) -> None:
        shape = self.client.server.layout[index].shape
        count = int(np.prod(shape))
        memory = np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
        self.take(index, memory.reshape(shape))

    def absent(self, index: int) -> None:
        assert self.client.server.layout[index].kind == "weight"
        assert not self.push.difference
        self.take(index, None)

    def take(self, index: int, gradient: np.ndarray | None) -> None:
        if index not in self.missing:
            raise ValueError(f"tensor {index} was ready already")
        spec = self.client.server.layout[index]
        if gradient is not None:
            assert gradient.shape == tuple(spec.shape), (spec, gradient.shape)
            self.push.gradients[index] = np.array(gradient)
            if not self.skipped and spec.kind == "weight" and not np.isfinite(gradient).all():
                self.skipped = spec.name
        self.missing.discard(index)
        if not self.missing:
            self.send()

    def send(self) -> None:
        if self.skipped:
            if not self.skip_not_finite:
                raise ValueError(f"the gradient of {self.skipped} is not finite")
            self.push.samples = 0
        server = self.client.server
        if self.push.samples == 0 and not server.synchronous:  # There is no push.
            return
        with server.condition:
            self.answer = server.push(self.step, self.push)

    def set_samples(self, samples: int) -> None:
        assert self.missing, "set_samples after the last ready()"
        self.push.samples = samples

    def wait_tensor(self, tensor: int, timeout: float | None = None) -> None:
        """All come together."""
        if self.result is None:
            self.result = self.wait()

    def give_up(self, tensor: int) -> None:
        assert self.missing - {tensor}, "give_up() of a push that is complete"
        self.missing = {tensor}

    def wait(self, timeout: float | None = None) -> FakeResult:
        if self.result is not None:
            return self.result
        server = self.client.server
        if self.missing and self.client.stopped:
            raise sys.modules["psgrad"].Cancelled(f"rank {self.client.rank}: stopped")
        assert not self.missing, f"wait() without ready() of {self.missing}"
        with server.condition:
            if server.synchronous:
                server.wait(lambda: server.version > self.step, f"step {self.step}")
            if self.weights is not None:
                self.client.bring(self.weights, pushed=True)
            next_step = self.step + (1 if self.answer else 0)
            return FakeResult(
                server.version,
                [server.version],
                [self.answer] if self.answer else [],
                next_step,
                skipped=self.skipped,
                why_skipped="is not finite" if self.skipped else "",
            )


class FakeClient:
    num_shards = 1
    incarnation = 1
    generation = 1
    name = "fake"
    replaced = ""
    hands_out_runs = False
    has_taken_runs = False
    asked_to_leave = False
    rollbacks = 0
    next_step = 0
    rolled_back_to = None

    def __init__(self, server: FakeServer, rank: int, layout: Sequence[Any]) -> None:
        self.server = server
        self.rank = rank
        self.layout = list(layout)
        self.closed = False
        self.busy_with: list[str] = []
        self.reports: list[dict[str, Any]] = []  # What it was told for whoever watches the job.
        self.evaluations: list[dict[str, Any]] = []
        self.device = ""
        self.expected_steps = 0
        self.stopped = False
        zeros = {kind: [np.zeros(spec.shape, np.float32) for spec in layout] for kind in ("weights", "gradients")}
        self.buffers: dict[str, list[np.ndarray]] = zeros

    @classmethod
    def join(
        cls,
        server: str,
        layout: Sequence[Any],
        *,
        job: str = "default",
        rank: int | None = None,
        optimizer: Any = None,
        **_: Any,
    ) -> FakeClient:
        job_ = _servers[server]
        with job_.condition:
            if not job_.layout:
                job_.layout = list(layout)
                job_.settings = optimizer
                if optimizer.optimizer not in KNOWN_OPTIMIZERS:
                    raise ValueError(f"the worker's optimizer: --optimizer={optimizer.optimizer}: expected another")
                job_.learning_rate = optimizer.hyperparameters["learning_rate"]
                job_.state = [{} for _ in layout]
                job_.skipped = [0 for _ in layout]
            if job_.layout != list(layout):
                raise psgrad().Refused("the layout is another one")
            if job_.settings != optimizer:
                raise psgrad().Refused(f"the optimizer is {job_.settings}, not {optimizer}")
            mine = rank if rank is not None else min(set(range(job_.workers)) - job_.joined)
            job_.joined.add(mine)
            job_.condition.notify_all()
            return cls(job_, mine, layout)

    @property
    def num_workers(self) -> int:
        return self.server.workers

    @property
    def mode(self) -> str:
        return self.server.mode

    @property
    def synchronous(self) -> bool:
        return self.server.synchronous

    exact_versions = empty_contributions = property(lambda self: self.server.synchronous)

    @property
    def local_steps(self) -> LocalSteps | None:
        return self.server.local

    @property
    def start_step(self) -> int:
        return self.server.start_version

    @property
    def lead(self) -> bool:
        return self.server.lead == self.rank

    def weight_buffers(self) -> list[np.ndarray]:
        return self.buffers["weights"]

    def gradient_buffers(self) -> list[np.ndarray]:
        return self.buffers["gradients"]

    def bring(self, weights: Any, *, pushed: bool = False) -> None:
        for index, spec in enumerate(self.layout):
            if weights[index] is not None and not (pushed and spec.kind == "constant"):
                array(weights[index])[...] = self.server.weights[index]

    def start(self, initial: Any, weights: Any) -> FakeResult:
        server = self.server
        with server.condition:
            if self.rank == min(server.joined) and not server.weights:
                server.wait(lambda: len(server.joined) == server.workers, "start")
                if self.rank == min(server.joined):
                    server.weights = [np.array(array(value)) for value in initial]
                    server.condition.notify_all()
            server.wait(lambda: server.weights and len(server.joined) == server.workers, "start")
            self.bring(weights)
            return FakeResult(server.version, [server.version])

    def begin(
        self,
        step: int,
        gradients: Any,
        weights: Any,
        *,
        version: int,
        versions: Sequence[int] = (),
        samples: int,
        passed: int | None = None,
        learning_rate: float | None = None,
        groups: Sequence[dict[str, float]] | None = None,
        skip_not_finite: bool = False,
        difference: bool = False,
        deferred: bool = False,
    ) -> FakeExchange:
        assert not self.closed
        given = Push(self.rank, samples, [None] * len(self.layout), difference, learning_rate, passed, groups)
        exchange = FakeExchange(self, step, given, weights, skip_not_finite)
        exchange.given = gradients
        if not deferred:
            if samples == 0:
                exchange.missing.clear()
                exchange.send()
            for index in sorted(exchange.missing):
                exchange.ready(index, gradients[index])
        return exchange

    def push_pull(self, step: int, gradients: Any, weights: Any, **options: Any) -> FakeResult:
        return self.begin(step, gradients, weights, **options).wait()

    def pull(
        self, weights: Any, *, version: int | None = None, step: int | None = None, float32: bool = False
    ) -> FakeResult:
        assert not self.closed
        with self.server.condition:
            self.bring(weights)
            return FakeResult(self.server.version, [self.server.version])

    def reduce(self, operation: str, name: str, values: list[float], meanwhile: Any = None) -> tuple[list[float], int]:
        server = self.server
        with server.condition:
            mine = server.reduction
            kind = (operation, name, len(values))
            if mine.kind not in (None, kind):
                raise psgrad().Refused(f"rank {self.rank} brings {kind}, and others {mine.kind}")
            mine.kind = kind
            mine.brought[self.rank] = values
            server.look_at_reduction()
            server.wait(lambda: mine.result is not None, name)
            assert mine.result is not None
            return mine.result

    def count_local_step(self) -> None:
        pass

    def set_busy(self, what: str) -> None:
        self.busy_with.append(what)

    def report_step(self, samples: int, loss: float | None = None, **told: Any) -> None:
        self.reports.append({"samples": samples, "loss": loss, **told})

    def report_evaluation(
        self, split: str, loss: float | None = None, accuracy: float | None = None, **told: int
    ) -> None:
        self.evaluations.append({"split": split, "loss": loss, "accuracy": accuracy, **told})

    def report_device(self, device: str) -> None:
        self.device = device

    def expects_steps(self, steps: int) -> None:
        self.expected_steps = steps

    def done(self, counts_as_empty: bool = False) -> None:
        server = self.server
        with server.condition:
            server.done.add(self.rank)
            server.look()
            server.look_at_reduction()
            everyone = set(range(server.workers))
            server.wait(lambda: server.done | set(server.left) >= everyone, "done")
            server.wait(lambda: server.lead == self.rank or len(server.left) > 0, "the lead")

    def stop(self) -> None:
        """As the product's: what is not complete by then ends so."""
        self.stopped = True

    def leave(self, reason: str = "") -> None:
        server = self.server
        with server.condition:
            if self.closed:
                return
            self.closed = True
            server.left[self.rank] = reason
            if reason and server.synchronous and self.rank not in server.done:
                server.failure = server.failure or f"rank {self.rank} has left: {reason}"
            server.look_at_reduction()
            server.condition.notify_all()

    def close(self) -> None:
        self.leave()

    def weights_hash(self) -> str:
        return str(hash(b"".join(value.tobytes() for value in self.server.weights)))
