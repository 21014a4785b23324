"""The client: joins a job, pulls weights, pushes gradients."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psgrad import _core
from psgrad._exchange import Exchange
from psgrad._generations import Generations
from psgrad._joined import Joined
from psgrad._waiting import LOG, call

Result = _core.Result
LocalSteps = _core.LocalSteps

atexit.register(_core.join_calls)


class WaitAgain(Exception):
    """There is no run now, but one may still come back from a worker that is lost: ask again."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a model's layout.

    ``shape`` is that of a float32 array, row by row. The optimizer's learning rate and weight decay are multiplied by
    the factors. ``kind`` is what becomes of it: a ``weight`` is stepped by its gradient; a ``constant`` stays as it was
    initialised, and is never pushed; a ``buffer_lowest`` becomes the value that the lowest rank pushes, and a
    ``buffer_mean`` the mean of the pushed values.
    """

    name: str
    shape: tuple[int, ...]
    learning_rate_factor: float = 1.0
    weight_decay_factor: float = 1.0
    kind: str = "weight"


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer that a worker was written for, by the names of ps_server's flags (docs/optimizers.md).

    Servers started with ``--optimizer=from_worker`` apply it; others must have been started with the same.
    """

    optimizer: str
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    clip_value: float | None = None
    clip_tensor_norm: float | None = None
    clip_norm: float | None = None


def _spec(tensor: Tensor) -> _core.TensorSpec:
    return _core.TensorSpec(
        tensor.name, list(tensor.shape), tensor.learning_rate_factor, tensor.weight_decay_factor, tensor.kind
    )


class Client(Joined):
    """One worker of a job. It belongs to the process that joined; threads may share it.

    Waits end when what is waited for has come, the job has failed, or a server has been silent for
    ``connect_timeout``; whom they wait for is logged (logger ``psgrad``). Ctrl-C ends each within a second with
    KeyboardInterrupt, and then the client is closed for everything but ``leave``. RuntimeError for what waits for the
    start of the job, before this worker has called ``start``.

    Where the servers keep checkpoints, they may go back to one: after a server died and was started again. Then the
    call that notices it joins again under the same name and rank, waiting for ``server_timeout`` at most, and for all
    other workers. An exchange, ``start`` and ``pull`` end with the weights of the checkpoint and with ``next_step``,
    where to go on; ``rolled_back_to`` tells. What the worker was about to push is gone. ``done`` and ``weights_hash``
    raise RolledBack if there are steps to be made again.
    """

    def __init__(self, core: _core.Client, layout: Sequence[Tensor]):
        """Use ``join``."""
        super().__init__(Generations(core))
        self._started = False
        self._left = False
        self._done: bool | None = None  # What ``done`` was told, when it has returned.
        self._prepared: dict[int, tuple[Any, _core.Tensors]] = {}
        self._gradient_buffers: list[Any] | None = None
        self._weight_buffers: list[Any] | None = None
        self.layout = tuple(layout)

    @classmethod
    def join(
        cls,
        server: str,
        layout: Sequence[Tensor],
        *,
        job: str = "default",
        name: str = "",
        rank: int | None = None,
        shared_memory: str = "auto",
        long_links: bool = False,
        optimizer: OptimizerSettings | None = None,
        experiment: Mapping[str, str] | None = None,
        samples_per_epoch: int = 0,
        counts_steps: bool = False,
        connect_timeout: float = 30.0,
        start_timeout: float = 600.0,
        notice_every: float = 10.0,
    ) -> Client:
        """Joins the job of the servers whose chief is at ``server`` (HOST:PORT or unix:PATH). Times are in seconds.

        ``long_links``: what may be on its way grows with the links' delay, as with the servers' flag of that name.
        ``rank`` claims one; else it is the lowest that is free. A live worker of the same ``name`` is replaced.
        ``experiment``: settings that all workers must share. ``samples_per_epoch``: of the training split, for
        schedules in epochs. ``counts_steps``: each push counts for 1 sample, whatever it was computed on, so that no
        schedule can count samples. Raises Refused, naming what differs, where model, settings or optimizer are not
        the job's; Unavailable if the servers are not reached within ``connect_timeout``, or others have not joined
        within ``start_timeout``; JobFailed; ValueError for what cannot be.
        """
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < 2**32):
            raise ValueError(f"rank={rank!r}: a whole number from 0 to {2**32 - 1} is expected")
        if not isinstance(server, str):
            raise TypeError(f"server={server!r}: HOST:PORT or unix:PATH is expected")
        options = _core.ClientOptions()
        options.server = server
        options.job = job
        options.name = name
        options.rank = rank
        options.shared_memory = shared_memory
        options.long_links = long_links
        options.experiment = dict(experiment or {})
        options.samples_per_epoch = samples_per_epoch
        options.counts_steps = counts_steps
        if optimizer is not None:
            options.optimizer = _core.OptimizerSettings(
                optimizer.optimizer,
                dict(optimizer.hyperparameters),
                optimizer.clip_value,
                optimizer.clip_tensor_norm,
                optimizer.clip_norm,
            )
        options.set_times(connect_timeout, start_timeout, notice_every)
        core = _core.Client(options, [_spec(tensor) for tensor in layout])
        call(core.join(), core)
        return cls(core, layout)

    @property
    def closed(self) -> bool:
        """It has left."""
        return self._left

    # ---- Memory

    def gradient_buffers(self) -> list[Any]:
        """Memory for gradients, one array for each tensor, which servers of this host read where it lies."""
        if self._gradient_buffers is None:
            self._gradient_buffers = self._running.gradient_buffers()
            self._keep(self._gradient_buffers, writable=False, what="gradients")
        return self._gradient_buffers

    def weight_buffers(self) -> list[Any]:
        """Memory to pull weights into, one array for each tensor.

        Arrays of both kinds are float32, zeroed at first, and of the tensor's shape; ``torch.from_dlpack`` and
        ``numpy.from_dlpack`` make theirs of them. The memory lives as long as any of these.
        """
        if self._weight_buffers is None:
            self._weight_buffers = self._running.weight_buffers()
            self._keep(self._weight_buffers, writable=True, what="weights")
        return self._weight_buffers

    def _keep(self, arrays: list[Any], writable: bool, what: str) -> None:
        self._prepared[id(arrays)] = (arrays, self._running.prepare(arrays, writable, what))

    def _prepare(self, arrays: Sequence[Any] | None, writable: bool, what: str) -> _core.Tensors | None:
        if arrays is None:
            return None
        known = self._prepared.get(id(arrays))
        return known[1] if known is not None else self._running.prepare(arrays, writable, what)

    # ---- Exchanges

    def start(self, initial: Sequence[Any], weights: Sequence[Any]) -> Result:
        """The start of training: waits until the job runs, and pulls the newest version into ``weights``.

        Sends ``initial`` if the chief asks this worker for the initial values; it is kept, and should stay as it is,
        as a job that is rolled back before its first checkpoint begins anew with it. ``next_step`` of the result is
        the first step to make.
        """
        self._check_open()
        self._generations.initial = self._prepare(initial, False, "initial values")
        prepared = self._prepare(weights, True, "weights")
        core = self._running
        try:
            result: Result = call(core.start(self._generations.initial, prepared), core)
            self._generations.next_step = result.next_step
        except _core.RolledBack:
            result = self._generations.go_back(core, prepared)
        self._started = True
        return result

    def begin(
        self,
        step: int,
        gradients: Sequence[Any] | None,
        weights: Sequence[Any] | None,
        *,
        version: int = 0,
        versions: Sequence[int] = (),
        samples: int = 1,
        passed: int | None = None,
        learning_rate: float | None = None,
        skip_not_finite: bool = False,
        difference: bool = False,
        deferred: bool = False,
    ) -> Exchange:
        """Begins a push of ``gradients`` (None: only a pull) and a pull into ``weights`` (None: only a push).

        Both are one array for each tensor: float32, C-contiguous, in this host's memory, and weights writable; else
        TypeError or ValueError, naming the tensor. Nothing is ever copied to make it fit. Until the exchange has ended
        gradients must not be changed, and weights neither changed nor read. An entry of ``gradients`` may be None
        where there is none (constants), or, if ``deferred``, where ``ready`` names it.

        ``step`` ascends, from ``start_step``; ``version`` (or ``versions``, by shard): of the weights that the
        gradients were computed on; ``samples``: that they are the mean of, which is their weight; ``passed``: samples
        used since the last push, for schedules, if not ``samples``. ``learning_rate``: the job's, from the version on
        that this push makes; rank 0's counts. ``skip_not_finite``: a push whose gradient is not finite becomes an
        empty contribution (Result.skipped names the tensor) instead of an error. ``difference``: what is pushed are
        differences of weights. ``deferred``: each gradient is sent once its ``ready`` (or ``absent``) is called.

        If the job is rolled back meanwhile, the result has no ``answers``. ValueError, where versions are exact, for a
        first push after it that is not of the step ``rolled_back_to``.
        """
        self._check_started("begin")
        self._generations.check_step(step)
        push = _core.PushInfo()
        push.step = step
        push.version = version
        push.versions = list(versions)
        push.samples = samples
        push.passed = passed
        push.learning_rate = learning_rate
        push.skip_not_finite = skip_not_finite
        push.is_difference = difference
        prepared = self._prepare(weights, True, "weights")
        client = self._running
        core = client.begin(push, self._prepare(gradients, False, "gradients"), prepared, deferred)
        return Exchange(core, client, self._generations, step, prepared)

    def push_pull(self, step: int, gradients: Sequence[Any], weights: Sequence[Any], **push: Any) -> Result:
        """As ``begin``, and waits for the end."""
        return self.begin(step, gradients, weights, **push).wait()

    def push(self, step: int, gradients: Sequence[Any], **push: Any) -> Result:
        """Only a push. As ``begin``, and waits for the end."""
        return self.begin(step, gradients, None, **push).wait()

    def pull(
        self, weights: Sequence[Any], *, version: int | None = None, step: int | None = None, float32: bool = False
    ) -> Result:
        """Pulls exactly this version, or the newest, into ``weights``. ``step``: of the gradient computed on it.

        ``float32``: the newest as the servers keep them, to evaluate or save; else they are rounded where the job says
        so (--weights_wire_dtype).

        If the job is rolled back meanwhile, it brings the newest version, whichever was asked for.
        """
        if float32 and (version is not None or step is not None):
            raise ValueError("pull: float32=True brings the newest version: leave version and step out")
        self._check_started("pull")
        prepared = self._prepare(weights, True, "weights")
        core = self._running
        try:
            result: Result = call(core.pull(prepared, version, step, float32), core)
        except _core.RolledBack:
            return self._generations.go_back(core, prepared)
        return result

    # ---- The job

    def take_run(
        self, number: int, finished: int, samples: int, batch_size: int, runs: int, wait: float | None = None
    ) -> int | None:
        """With --budget=job: the next run of samples for this worker; None: all have been used.

        ``number`` counts this worker's runs from 1; ``finished`` of them, the first that it took, have been used;
        ``samples`` are those of the training split, cut into runs of ``batch_size``, and ``runs`` all of the job.
        Waits for ``wait`` seconds at most while there is none; then it raises WaitAgain. RolledBack, if the job is
        rolled back meanwhile: ``pull`` joins again and brings the weights, then ``number`` counts from 1 again.
        """
        self._check_started("take_run")
        run = call(self._running.take_run(number, finished, samples, batch_size, runs, wait), self._running)
        if run == -1:
            raise WaitAgain(f"there is no run now for rank {self.rank}, but one may come back")
        return None if run is None else int(run)

    def _check_open(self) -> None:
        if self._left:
            raise _core.Cancelled(f"rank {self.rank} has left the job; join again")

    def _check_started(self, what: str) -> None:
        self._check_open()
        if not self._started:
            raise RuntimeError(
                f"rank {self.rank}: {what}() before start(): the job begins when all its workers have called start(), "
                "so this would wait for itself"
            )

    def weights_hash(self) -> str:
        """The fingerprint of the newest version's weights, and the shards' versions where they differ.

        RolledBack as of ``done``.
        """
        while True:
            self._check_started("weights_hash")
            core = self._running
            try:
                return str(call(core.weights_hash(), core))
            except _core.RolledBack:
                self._go_back_at_end(core)

    def set_busy(self, what: str) -> None:
        """Says that this worker makes no step for a while though nothing is wrong ("evaluating"); "": that is over.

        Those who wait for it are told, and the servers' --progress_timeout does not count meanwhile. It is told within
        a third of the lease, so what is over sooner may not be.
        """
        self._check_open()
        self._running.set_busy(what)

    def done(self, counts_as_empty: bool = False) -> None:
        """This worker has used up its budget: waits until all have.

        On the lead it returns first. ``counts_as_empty``: in steps that others still make, this worker counts as an
        empty contribution; else, in a synchronous mode, they must make none. RolledBack, if the job is rolled back
        meanwhile to a step that this worker has made: it has joined again, and is to make it again (``pull`` brings
        the weights).
        """
        while True:
            self._check_started("done")
            core = self._running
            try:
                call(core.done(counts_as_empty), core)
                self._done = counts_as_empty
                return
            except _core.RolledBack:
                self._go_back_at_end(core)

    def _go_back_at_end(self, core: _core.Client) -> None:
        """Joins again. RolledBack if there are steps to be made again: the checkpoint is not of the end."""
        made = self._generations.next_step
        result = self._generations.go_back(core, None)
        if result.next_step < made:
            raise _core.RolledBack(
                f"rank {self.rank}: the job was rolled back to step {result.next_step}, and this worker had made "
                f"{made} steps and was done: it has to make the others again from there"
            )

    def leave(self, reason: str = "") -> None:
        """Leaves the job: normally after ``done``, else for this reason."""
        if self._left:
            return
        self._left = True
        while True:
            core = self._running
            try:
                call(core.leave(reason), core)
                return
            except _core.RolledBack:
                if reason or self._done is None:  # Of that generation there is nothing left to leave.
                    return
                self._left = False
                self.done(self._done)
                self._left = True

    def stop(self) -> None:
        """Ends every wait and every exchange of this client with Cancelled; after that it can only leave."""
        self._generations.stop()

    def close(self) -> None:
        """Leaves the job, if that was not done. Never raises: that it could not be told is logged."""
        self._leave_anyhow("the worker ended without leaving")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.leave()
        else:  # What is raised is that one.
            self._leave_anyhow(f"{type(error).__name__}: {error}")

    def _leave_anyhow(self, reason: str) -> None:
        if self._left:
            return
        try:
            self.leave(reason)
        except _core.Error as failed:
            LOG.warning("%s", failed)
