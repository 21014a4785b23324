# psgrad/client.py documents what it uses here, and so does worker/client/include/ps/client.h.
from collections.abc import Sequence
from typing import Any

class Error(RuntimeError): ...
class JobFailed(Error): ...
class ShutDown(JobFailed): ...
class Fenced(Error): ...
class Unavailable(Error): ...
class RolledBack(Unavailable): ...
class Refused(Error): ...
class Cancelled(Error): ...

class Call:
    def wait_for(self, seconds: float) -> bool: ...
    def result(self) -> Any: ...

def join_calls() -> None: ...
def was_used() -> bool: ...

class Tensors: ...
class OptimizerState: ...

class TensorSpec:
    def __init__(
        self,
        name: str,
        shape: list[int],
        learning_rate_factor: float,
        weight_decay_factor: float,
        kind: str,
        group: int,
        /,
    ) -> None: ...

class OptimizerSettings:
    def __init__(
        self,
        optimizer: str,
        hyperparameters: dict[str, float],
        clip_value: float | None,
        clip_tensor_norm: float | None,
        clip_norm: float | None,
        groups: list[dict[str, float]],
    ) -> None: ...

class ClientOptions:
    server: str
    job: str
    name: str
    rank: int | None
    shared_memory: str
    long_links: bool
    experiment: dict[str, str]
    samples_per_epoch: int
    counts_steps: bool
    does_fragments: bool
    optimizer: OptimizerSettings | None
    def set_times(self, connect_timeout: float, start_timeout: float, notice_every: float, /) -> None: ...

class PushInfo:
    step: int
    version: int
    versions: list[int]
    samples: int
    passed: int | None
    runs: int | None
    learning_rate: float | None
    groups: list[dict[str, float]] | None
    tensors: list[int]
    skip_not_finite: bool
    is_difference: bool

class Result:
    """How an exchange has ended."""

    @property
    def version(self) -> int:
        """The pulled weights' version: the lowest of all shards' (in bsp all are equal)."""
    @property
    def versions(self) -> list[int]:
        """By shard."""
    @property
    def answers(self) -> list[str]:
        """To the push, by shard: applied, duplicate, stale or fenced; empty where nothing was pushed."""
    @property
    def next_step(self) -> int:
        """That the worker is to continue at."""
    @property
    def hyperparameters(self) -> dict[str, float]:
        """In modes with local steps: the optimizer's, by the names of their flags."""
    @property
    def position(self) -> int:
        """In modes with local steps: where the schedule is, in samples."""
    @property
    def learning_rate_factor(self) -> float:
        """In modes with local steps: what the schedule multiplies the learning rate by."""
    @property
    def skipped(self) -> str:
        """With skip_not_finite: the tensor whose gradient was not finite; else empty."""
    @property
    def why_skipped(self) -> str:
        """What is wrong with it: "is not finite", or also "too large for" what the job sends; else empty."""
    @property
    def push_s(self) -> float:
        """Seconds: sending; wait_s: parked at the servers; pull_s: receiving."""
    @property
    def wait_s(self) -> float: ...
    @property
    def pull_s(self) -> float: ...

class LocalSteps:
    """What a worker does between two exchanges (docs: ps.proto, LocalSteps)."""

    @property
    def exchange(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def average_every_steps(self) -> int: ...
    @property
    def average_every_epochs(self) -> float: ...
    @property
    def alpha(self) -> float: ...
    @property
    def fragments(self) -> list[list[int]]:
        """Push s carries the tensors of fragment s mod len alone; empty: all of them. `steps` is from push to push."""

    @property
    def overlap(self) -> int: ...
    @property
    def mix(self) -> float: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def clip_value(self) -> float: ...
    @property
    def clip_tensor_norm(self) -> float: ...
    @property
    def clip_norm(self) -> float: ...

class Exchange:
    def ready(self, tensor: int, gradient: Any | None) -> None: ...
    def ready_at(self, tensor: int, address: int, /) -> None: ...
    def absent(self, tensor: int, /) -> None: ...
    def set_samples(self, samples: int, /) -> bool: ...
    def wait_tensor_for(self, tensor: int, seconds: float, /) -> bool: ...
    def wait_for(self, seconds: float, /) -> Result | None: ...

class Client:
    # To be read only.
    rank: int
    incarnation: int
    generation: int
    resized: tuple[int, int]
    server_timeout: float
    num_workers: int
    num_shards: int
    name: str
    mode: str
    synchronous: bool
    start_step: int
    replaced: str
    lead: bool
    asked_to_leave: bool
    hands_out_runs: bool
    exact_versions: bool
    empty_contributions: bool
    local_steps: LocalSteps | None
    def __init__(self, options: ClientOptions, layout: list[TensorSpec], /) -> None: ...
    def join(self) -> Call: ...
    def again(self) -> Client: ...
    def stop(self) -> None: ...
    def take_notices(self) -> list[str]: ...
    def gradient_buffers(self) -> list[Any]: ...
    def weight_buffers(self) -> list[Any]: ...
    def prepare(self, arrays: Sequence[Any], writable: bool, what: str, /) -> Tensors: ...
    def begin(self, push: PushInfo, gradients: Tensors | None, weights: Tensors | None, deferred: bool) -> Exchange: ...
    def prepare_state(self, state: Sequence[tuple[int, Sequence[Any]] | None], /) -> OptimizerState: ...
    def start(self, initial: Tensors | None, weights: Tensors | None, state: OptimizerState | None) -> Call: ...
    def pull_state(self, version: int | None) -> Call: ...
    def pull(self, weights: Tensors | None, version: int | None, step: int | None, float32: bool) -> Call: ...
    def done(self, counts_as_empty: bool, /) -> Call: ...
    def count_local_step(self) -> None: ...
    def set_busy(self, what: str, /) -> None: ...
    def leave(self, reason: str, /) -> Call: ...
    def weights_hash(self) -> Call: ...
    def reduce(self, operation: str, name: str, values: list[float], /) -> Call: ...
    def take_run(
        self, number: int, finished: int, samples: int, batch_size: int, runs: int, wait: float | None, ahead: int
    ) -> Call: ...
