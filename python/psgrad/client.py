"""The client: joins a job, pulls weights, pushes gradients, and goes on where the job goes back to a checkpoint."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from psgrad import _core
from psgrad.reductions import Reductions

Result = _core.Result
LocalSteps = _core.LocalSteps

_log = logging.getLogger("psgrad")
# Signals and the client's notices are looked at so often during a wait.
_POLL_S = 0.2
# As servers say it that were started with an optimizer.
_OPTIMIZER_DIFFERS = "the worker's optimizer differs from the servers'"
# What Ctrl-C has interrupted is given so long to end.
_STOP_S = 0.5
# Others are given so long to bring their numbers, before this worker makes a step without samples for their sake.
_MEANWHILE_AFTER_S = 0.5

_T = TypeVar("_T")
_Waiter = _core.Client | _core.Observer
_waited_for: list[_Waiter] = []  # By any thread, at this moment.
_have_waited: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _end_calls() -> None:
    """At the interpreter's exit a daemon thread may wait: that would hold the exit up, or be cut off within C++."""
    for client in list(_waited_for):
        client.stop()
    _core.join_calls()
    end = time.monotonic() + _STOP_S
    for thread in list(_have_waited):  # What a thread holds ends with it, and does so within C++, too.
        if thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


atexit.register(_end_calls)


class WaitAgain(Exception):
    """There is no run now, but one may still come back from a worker that is lost: ask again."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a model's layout.

    ``shape`` is that of a float32 array, row by row. The optimizer's learning rate and weight decay are multiplied by
    the factors. ``kind`` is what becomes of it: a ``weight`` is stepped by its gradient; a ``constant`` stays as it was
    initialised, and is never pushed; a ``buffer_lowest`` becomes the value that the lowest rank pushes, and a
    ``buffer_mean`` the mean of the pushed values. ``group``: the number of its group (OptimizerSettings.groups), at
    most 1024; 0: none.
    """

    name: str
    shape: tuple[int, ...]
    learning_rate_factor: float = 1.0
    weight_decay_factor: float = 1.0
    kind: str = "weight"
    group: int = 0


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer that a worker was written for, by the names of ps_server's flags (docs/optimizers.md).

    Servers started with ``--optimizer=from_worker`` apply it; others must have been started with the same, and know no
    ``groups``: of the groups 1, 2 and so on (Tensor.group), what differs from ``hyperparameters``.
    """

    optimizer: str
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    clip_value: float | None = None
    clip_tensor_norm: float | None = None
    clip_norm: float | None = None
    groups: Sequence[Mapping[str, float]] = ()


def _until(poll: Callable[[float], _T | None], client: _Waiter, timeout: float | None, what: str) -> _T:
    """What ``poll(seconds)`` returns once it is something. Signals are handled in between: Ctrl-C ends the wait."""
    end = None if timeout is None else time.monotonic() + timeout
    _have_waited.add(threading.current_thread())
    _waited_for.append(client)
    try:
        while True:
            result = poll(_POLL_S if end is None else min(_POLL_S, max(0.0, end - time.monotonic())))
            if result is not None:
                return result
            _log_notices(client)
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{what}: not within {timeout} s")
    except Exception:
        raise
    except BaseException:  # Ctrl-C, or what a handler of a signal raises.
        client.stop()
        with contextlib.suppress(_core.Error):
            poll(_STOP_S)
        raise
    finally:
        _waited_for.remove(client)
        _log_notices(client)


def _log_notices(client: _Waiter) -> None:
    for notice in client.take_notices():
        # What it waits for is to be seen also where nobody has set up logging.
        _log.log(logging.INFO if notice.startswith("exchanging with ") else logging.WARNING, "%s", notice)


def call(running: _core.Call, client: _Waiter) -> Any:
    """What it returns, or raises, once it has ended."""
    _until(lambda seconds: running.wait_for(seconds) or None, client, None, "")
    return running.result()


class Exchange:
    """A push of gradients, a pull of weights, or both, in progress.

    No weight is written, and no server has the whole push, before the last ``ready``.
    """

    def __init__(
        self,
        core: _core.Exchange,
        client: Client,
        generation: _core.Client,
        step: int,
        weights: _core.Tensors | None,
    ):
        """Use ``Client.begin``."""
        self._core = core
        self._client = client
        self._generation = generation  # The client's, when this began: the exchange ends with it.
        self._weights = weights
        self._went_back: Result | None = None
        self._where = f"rank {client.rank}, step {step}"
        #: ``ready_at(tensor, address)``: as ``ready``, of memory that the caller keeps until the exchange has ended.
        #: Nothing is checked but that there is such a tensor: this is for hooks, and costs less than a microsecond.
        self.ready_at: Callable[[int, int], None] = core.ready_at

    def ready(self, tensor: int, gradient: Any = None) -> None:
        """The gradient of this tensor (its number in the layout) is final, and may be sent.

        ``gradient``: the array that holds it, if ``begin`` was given none: float32, C-contiguous, in this host's
        memory. It is kept alive and must not be changed until the exchange has ended. Never blocks.
        """
        self._core.ready(tensor, gradient)

    def absent(self, tensor: int) -> None:
        """Instead of ``ready``: there is no gradient of this weight.

        Where others have one, this counts as zeros. A step in which nobody has one leaves the weight as it is, and the
        optimizer's state and count of updates of it.
        """
        self._core.absent(tensor)

    def set_samples(self, samples: int) -> bool:
        """How many samples the gradients are the mean of, where it is not what ``begin`` was told.

        0: nothing counts; the push becomes an empty contribution. Has an effect until the last ``ready``; returns
        whether it had. A number that changed costs sending the gradients again.
        """
        return self._core.set_samples(samples)

    def give_up(self, tensor: int) -> None:
        """Ends a push that is not complete. It counts nowhere, and the next one may be of the same step.

        ``tensor`` is a weight, and another tensor is not ready yet: so no server has the whole push, and each drops
        what it has of it for the next one. Waits until nothing reads the gradients any more.
        """
        for _ in range(2):  # A tensor that is ready twice ends an exchange (ps/client.h).
            self._core.absent(tensor)
        with contextlib.suppress(ValueError):
            self.wait()

    def wait_tensor(self, tensor: int, timeout: float | None = None) -> None:
        """Waits until this tensor's new weights are in place. TimeoutError after ``timeout`` seconds."""
        if self._went_back is not None:
            return
        try:
            _until(
                lambda seconds: self._core.wait_tensor_for(tensor, seconds) or None,
                self._generation,
                timeout,
                f"{self._where}: the weights of tensor {tensor}",
            )
        except _core.RolledBack:
            self._went_back = self._client._go_back(self._generation, self._weights)

    def wait(self, timeout: float | None = None) -> Result:
        """Waits until the exchange has ended. TimeoutError after ``timeout`` seconds; then it goes on.

        If the job was rolled back meanwhile, the worker joins it again first, for which ``timeout`` does not count.
        """
        if self._went_back is not None:
            return self._went_back
        try:
            result = _until(self._core.wait_for, self._generation, timeout, f"{self._where}: the exchange")
        except _core.RolledBack:
            self._went_back = self._client._go_back(self._generation, self._weights)
            return self._went_back
        self._client._passed(self._generation, result)
        return result


class Client(Reductions):
    """One worker of a job. It belongs to the process that joined; threads may share it.

    Waits end when what is waited for has come, the job has failed, or a server has been silent for
    ``connect_timeout``; whom they wait for is logged (logger ``psgrad``). Ctrl-C ends each within a second with
    KeyboardInterrupt, and then the client is closed for everything but ``leave``. RuntimeError for what waits for the
    start of the job, before this worker has called ``start``.

    Where the servers keep checkpoints, they may go back to one: after a server died and was started again. Then the
    call that notices it joins again under the same name and rank, waiting for ``server_timeout`` at most, and for all
    other workers. An exchange, ``start`` and ``pull`` end with the weights of the checkpoint and with ``next_step``,
    where to go on; ``rolled_back_to`` tells. What the worker was about to push is gone. ``done`` and ``weights_hash``
    raise RolledBack if there are steps to be made again, and ``all_mean`` and its like in any case.
    """

    def __init__(self, core: _core.Client, layout: Sequence[Tensor]):
        """Use ``join``."""
        #: The step that this worker is to make, as the last exchange or rollback named it.
        self.next_step = 0
        #: How often the job was rolled back since this worker joined it.
        self.rollbacks = 0
        #: The step that the job was rolled back to, until the next push has ended; None: it was not.
        self.rolled_back_to: int | None = None
        self._core = core  # It is of one generation of the job; memory is the worker's, and outlasts it.
        self._started = False
        self._has_taken_runs = False
        self._used_runs: int | None = None
        self._was_asked_to_leave = False
        self._left = False
        self._stopped = False
        self._done: bool | None = None  # What ``done`` was told, when it has returned.
        self._initial: _core.Tensors | None = None  # Kept: a job without a checkpoint yet begins anew with them,
        self._initial_state: _core.OptimizerState | None = None  # and with it.
        self._device = ""  # As report_device was told.
        self._expected_steps = 0  # 0: nobody knows.
        self._prepared: dict[int, tuple[Any, _core.Tensors]] = {}
        self._gradient_buffers: list[Any] | None = None
        self._weight_buffers: list[Any] | None = None
        self._joining: _core.Client | None = None  # The next generation's, while it joins.
        self._joins = threading.Lock()
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
        does_fragments: bool = False,
        connect_timeout: float = 30.0,
        start_timeout: float = 600.0,
        notice_every: float = 10.0,
    ) -> Client:
        """Joins the job of the servers whose chief is at ``server`` (HOST:PORT or unix:PATH). Times are in seconds.

        ``long_links``: what may be on its way grows with the links' delay, as with the servers' flag of that name.
        ``rank`` claims one; else it is the lowest that is free. A live worker of the same ``name`` is replaced.
        ``experiment``: settings that all workers must share. ``samples_per_epoch``: of the training split, for
        schedules in epochs. ``counts_steps``: each push counts for 1 sample, whatever it was computed on, so that no
        schedule can count samples. ``does_fragments``: the caller does what ``local_steps`` says of fragments, overlap
        and mix; else a job that asks for them refuses it. Raises Refused, naming what differs, where model, settings or
        optimizer are not the job's; Unavailable if the servers are not reached within ``connect_timeout``, or others
        have not joined within ``start_timeout``; JobFailed; ValueError for what cannot be.
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
        options.does_fragments = does_fragments
        if optimizer is not None:
            options.optimizer = _core.OptimizerSettings(
                optimizer.optimizer,
                dict(optimizer.hyperparameters),
                optimizer.clip_value,
                optimizer.clip_tensor_norm,
                optimizer.clip_norm,
                [dict(group) for group in optimizer.groups],
            )
        options.set_times(connect_timeout, start_timeout, notice_every)
        specs = [
            _core.TensorSpec(
                each.name,
                list(each.shape),
                each.learning_rate_factor,
                each.weight_decay_factor,
                each.kind,
                each.group,
            )
            for each in layout
        ]
        core = _core.Client(options, specs)
        try:
            call(core.join(), core)
        except _core.Refused as refused:
            if _OPTIMIZER_DIFFERS not in str(refused):
                raise
            raise _core.Refused(
                f"{refused}; servers that are started with --optimizer=from_worker do what the worker's optimizer says"
            ) from None
        return cls(core, layout)

    # ---- What it has joined

    @property
    def rank(self) -> int:
        """This worker's number in the job, from 0."""
        return self._core.rank

    @property
    def num_workers(self) -> int:
        """How many workers the job has when it starts."""
        return self._core.num_workers

    @property
    def num_shards(self) -> int:
        """How many servers the model is spread over."""
        return self._core.num_shards

    @property
    def incarnation(self) -> int:
        """Grows whenever the rank is handed out again."""
        return self._core.incarnation

    @property
    def generation(self) -> int:
        """Grows whenever the job is started or rolled back."""
        return self._core.generation

    @property
    def server_timeout(self) -> float:
        """A server that died is waited for so many seconds; 0: the job keeps no checkpoints to go back to."""
        return self._core.server_timeout

    @property
    def resized(self) -> tuple[int, int]:
        """Unless both are 0, a checkpoint was restored with another number of workers: at this step, when these many
        samples had been used. Batches of a fixed share are counted from there.
        """
        return self._core.resized

    @property
    def name(self) -> str:
        """The name under which the worker has joined."""
        return self._core.name

    @property
    def mode(self) -> str:
        """bsp, asp, ssp, backup, local_sgd, diloco or easgd."""
        return self._core.mode

    @property
    def synchronous(self) -> bool:
        """A version is made of one step of all workers: version and step advance together."""
        return self._core.synchronous

    @property
    def exact_versions(self) -> bool:
        """A push_pull of step v brings version v + 1, however often it is asked; else the newest."""
        return self._core.exact_versions

    @property
    def empty_contributions(self) -> bool:
        """A worker without samples in a step pushes an empty contribution; else it pushes nothing."""
        return self._core.empty_contributions

    @property
    def local_steps(self) -> _core.LocalSteps | None:
        """Set in modes in which workers take optimizer steps by themselves (local_sgd, diloco, easgd)."""
        return self._core.local_steps

    @property
    def start_step(self) -> int:
        """The first step of this worker, in this generation of the job."""
        return self._core.start_step

    @property
    def lead(self) -> bool:
        """This worker is the lowest live rank, which evaluates and saves."""
        return self._core.lead

    @property
    def replaced(self) -> str:
        """The live worker whose rank this one took, as "NAME on HOST"; else empty."""
        return self._core.replaced

    @property
    def hands_out_runs(self) -> bool:
        """The servers run with --budget=job: workers take runs of samples from the chief (``take_run``)."""
        return self._core.hands_out_runs

    @property
    def asked_to_leave(self) -> bool:
        """An operator asks this worker to leave the job (ps_ctl drain). psgrad.data.Batches does so by itself."""
        self._was_asked_to_leave |= self._core.asked_to_leave  # Another generation's client is not told again.
        return self._was_asked_to_leave

    @property
    def has_taken_runs(self) -> bool:
        """This worker has asked for a run of samples."""
        return self._has_taken_runs

    @property
    def closed(self) -> bool:
        """It has left."""
        return self._left

    # ---- Memory

    def gradient_buffers(self) -> list[Any]:
        """Memory for gradients, one array for each tensor, which servers of this host read where it lies."""
        if self._gradient_buffers is None:
            self._gradient_buffers = self._core.gradient_buffers()
            self._keep(self._gradient_buffers, writable=False, what="gradients")
        return self._gradient_buffers

    def weight_buffers(self) -> list[Any]:
        """Memory to pull weights into, one array for each tensor.

        Arrays of both kinds are float32, zeroed at first, and of the tensor's shape; ``torch.from_dlpack`` and
        ``numpy.from_dlpack`` make theirs of them. The memory lives as long as any of these.
        """
        if self._weight_buffers is None:
            self._weight_buffers = self._core.weight_buffers()
            self._keep(self._weight_buffers, writable=True, what="weights")
        return self._weight_buffers

    def _keep(self, arrays: list[Any], writable: bool, what: str) -> None:
        self._prepared[id(arrays)] = (arrays, self._core.prepare(arrays, writable, what))

    def _prepare(self, arrays: Sequence[Any] | None, writable: bool, what: str) -> _core.Tensors | None:
        if arrays is None:
            return None
        known = self._prepared.get(id(arrays))
        return known[1] if known is not None else self._core.prepare(arrays, writable, what)

    # ---- Exchanges

    def start(
        self,
        initial: Sequence[Any],
        weights: Sequence[Any],
        *,
        state: Sequence[tuple[int, Sequence[Any]] | None] | None = None,
    ) -> Result:
        """The start of training: waits until the job runs, and pulls the newest version into ``weights``.

        Sends ``initial`` if the chief asks this worker for the initial values; it is kept, and should stay as it is,
        as a job that is rolled back before its first checkpoint begins anew with it. ``next_step`` of the result is
        the first step to make.

        ``state``: what the servers' optimizer is to begin with, as ``pull_state`` has brought it from an earlier job,
        say. It is given where ``initial`` is, and copied; all workers bring the same. A weight without an entry (None)
        begins as in a new job. ValueError, naming the tensor, if it is not what the servers' optimizer has.
        """
        self._check_open()
        self._initial = self._prepare(initial, False, "initial values")
        self._initial_state = None if state is None else self._core.prepare_state(state)
        prepared = self._prepare(weights, True, "weights")
        core = self._core
        try:
            result: Result = call(core.start(self._initial, prepared, self._initial_state), core)
            self.next_step = result.next_step
        except _core.RolledBack:
            result = self._go_back(core, prepared)
        if self.server_timeout == 0:  # No other generation follows.
            self._initial_state = None
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
        groups: Sequence[Mapping[str, float]] | None = None,
        skip_not_finite: bool = False,
        difference: bool = False,
        deferred: bool = False,
        tensors: Sequence[int] = (),
    ) -> Exchange:
        """Begins a push of ``gradients`` (None: only a pull) and a pull into ``weights`` (None: only a push).

        Both are one array for each tensor: float32, C-contiguous, in this host's memory, and weights writable; else
        TypeError or ValueError, naming the tensor. Nothing is ever copied to make it fit. Until the exchange has ended
        gradients must not be changed, and weights neither changed nor read. An entry of ``gradients`` may be None
        where there is none (constants), or, if ``deferred``, where ``ready`` names it.

        ``step`` ascends, from ``start_step``; ``version`` (or ``versions``, by shard): of the weights that the
        gradients were computed on; ``samples``: that they are the mean of, which is their weight; ``passed``: samples
        used since the last push, for schedules, if not ``samples``. ``learning_rate``: the job's, from the version on
        that this push makes; rank 0's counts. ``groups``: from then on, too, what groups have of their own
        (OptimizerSettings.groups), in place of all that they had; the first is of group 0, and changes what holds for
        all. ``skip_not_finite``: a push whose gradient is not finite becomes an empty contribution (Result.skipped
        names the tensor) instead of an error. ``difference``: what is pushed are differences of weights. ``deferred``:
        each gradient is sent once its ``ready`` (or ``absent``) is called. ``tensors``: unless empty, the push carries
        these tensors alone, and the pull brings them alone: their indices in the layout, ascending
        (LocalSteps.fragments). Entries of others may be None; servers leave them as they are.

        If the job is rolled back meanwhile, the result has no ``answers``. ValueError, where versions are exact, for a
        first push after it that is not of the step ``rolled_back_to``.
        """
        self._check_started("begin")
        if self.rolled_back_to is not None and self.exact_versions and step != self.rolled_back_to:
            raise ValueError(
                f"rank {self.rank}: a push of step {step}, but the job was rolled back to step {self.rolled_back_to}, "
                "and goes on there (Result.next_step, Client.rolled_back_to)"
            )
        push = _core.PushInfo()
        push.step = step
        push.version = version
        push.versions = list(versions)
        push.samples = samples
        push.passed = passed
        push.runs = self._used_runs
        push.learning_rate = learning_rate
        push.groups = None if groups is None else [dict(group) for group in groups]
        push.skip_not_finite = skip_not_finite
        push.is_difference = difference
        push.tensors = list(tensors)
        prepared = self._prepare(weights, True, "weights")
        generation = self._core
        core = generation.begin(push, self._prepare(gradients, False, "gradients"), prepared, deferred)
        return Exchange(core, self, generation, step, prepared)

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
        core = self._core
        try:
            result: Result = call(core.pull(prepared, version, step, float32), core)
        except _core.RolledBack:
            return self._go_back(core, prepared)
        return result

    def pull_state(self, version: int | None = None) -> list[tuple[int, list[Any]] | None]:
        """The optimizer's state, which the servers have to themselves else: of exactly this version, or the newest.

        For each tensor of the layout the number of updates that it has had, and float32 arrays of its shape in the
        order of docs/optimizers.md; None for what is no weight. Synchronous modes have it of one version. Refused if
        the version is not kept any more, or in modes in which the workers' optimizers step. RolledBack as of ``done``.
        """
        return list(self._call_at_end("pull_state", lambda core: core.pull_state(version)))

    # ---- The job

    def take_run(
        self,
        number: int,
        finished: int,
        samples: int,
        batch_size: int,
        runs: int,
        wait: float | None = None,
        ahead: int = 0,
    ) -> int | None:
        """With --budget=job: the next run of samples for this worker; None: all have been used.

        ``number`` counts this worker's runs from 1; ``finished`` of them, the first that it took, have been used;
        ``samples`` are those of the training split, cut into runs of ``batch_size``, and ``runs`` all of the job.
        ``ahead`` of them, at most 64, are taken before they are used: then ``use_runs`` has to say which are.
        Waits for ``wait`` seconds at most while there is none; then it raises WaitAgain. RolledBack, if the job is
        rolled back meanwhile: ``pull`` joins again and brings the weights, then ``number`` counts from 1 again.
        """
        self._check_started("take_run")
        self._has_taken_runs = True
        run = call(self._core.take_run(number, finished, samples, batch_size, runs, wait, ahead), self._core)
        if run == -1:
            raise WaitAgain(f"there is no run now for rank {self.rank}, but one may come back")
        return None if run is None else int(run)

    def use_runs(self, count: int | None) -> None:
        """Pushes that begin from now on are made with the first ``count`` runs that this worker took; None: with all.

        If the worker is lost, only those that no push was made with are handed out again.
        """
        self._used_runs = count

    def weights_hash(self) -> str:
        """The fingerprint of the newest version's weights, and the shards' versions where they differ.

        RolledBack as of ``done``.
        """
        return str(self._call_at_end("weights_hash", lambda core: core.weights_hash()))

    def reduce(
        self, operation: str, name: str, values: list[float], meanwhile: Callable[[], object] | None = None
    ) -> tuple[list[float], int]:
        """RolledBack, if the job is rolled back meanwhile: ``pull`` joins again and brings the weights.

        ``meanwhile`` is called now and then while others are waited for.
        """
        self._check_started("a reduction")
        core = self._core
        running = core.reduce(operation, name, values)
        begun = time.monotonic()

        def poll(seconds: float) -> bool | None:
            if running.wait_for(seconds):
                return True
            if meanwhile is not None and time.monotonic() - begun >= _MEANWHILE_AFTER_S:
                meanwhile()
            return None

        _until(poll, core, None, "")
        reduced, workers = running.result()
        return reduced, workers

    def count_local_step(self) -> None:
        """Says that this worker has taken a step of its own, between two exchanges.

        As long as there are such steps, the servers' --progress_timeout does not count.
        """
        self._check_open()
        self._core.count_local_step()

    def set_busy(self, what: str) -> None:
        """Says that this worker makes no step for a while though nothing is wrong ("evaluating"); "": that is over.

        Those who wait for it are told, and the servers' --progress_timeout does not count meanwhile. It is told within
        a third of the lease, so what is over sooner may not be.
        """
        self._check_open()
        self._core.set_busy(what)

    # ---- For whoever watches the job

    def report_step(
        self,
        samples: int,
        loss: float | None = None,
        *,
        step: int | None = None,
        forward_s: float = 0.0,
        backward_s: float = 0.0,
        push_s: float = 0.0,
        wait_s: float = 0.0,
        pull_s: float = 0.0,
        other_s: float = 0.0,
    ) -> None:
        """Says that this worker has trained on a batch, for whoever watches the job (docs/watching.md).

        ``loss``: the batch's mean. ``step``: that the batch belongs to; None: the one before ``next_step``. The seconds
        say where the time went that training took; of an exchange what it was waited for. The chief is told of all
        batches together, at most once a second. Nothing is decided by it, it does not wait, and it does nothing once
        the worker has left. A client that is told of no batches counts its pushes and their samples. ValueError for a
        number of samples that cannot be.
        """
        if not 0 <= samples < 2**32:
            raise ValueError(f"samples={samples}: a number from 0 to {2**32 - 1} is expected")
        if self._left:
            return
        seconds = (forward_s, backward_s, push_s, wait_s, pull_s, other_s)
        of = max(0, self.next_step - 1) if step is None else step
        self._core.report_step(of, samples, loss, seconds, self._expected_steps)

    def expects_steps(self, steps: int) -> None:
        """This worker is done after so many steps of the job, as far as it knows. psgrad.data.Batches says it."""
        self._expected_steps = steps

    def report_evaluation(
        self, split: str, loss: float | None = None, accuracy: float | None = None, *, step: int, version: int
    ) -> None:
        """Says what the weights of this version, and after this step, are worth on a split ("test"), as report_step.

        ``accuracy`` is 0 to 1. The last two splits' are kept.
        """
        if not self._left:
            self._core.report_evaluation(split, step, version, math.nan if loss is None else loss, accuracy)

    def report_device(self, device: str) -> None:
        """Says which device this worker computes on ("cpu", "cuda:0"), as report_step."""
        self._device = device
        if not self._left:
            self._core.report_device(device)

    def done(self, counts_as_empty: bool = False) -> None:
        """This worker has used up its budget: waits until all have.

        On the lead it returns first. ``counts_as_empty``: in steps that others still make, this worker counts as an
        empty contribution; else, in a synchronous mode, they must make none. RolledBack, if the job is rolled back
        meanwhile to a step that this worker has made: it has joined again, and is to make it again (``pull`` brings
        the weights).
        """
        self._call_at_end("done", lambda core: core.done(counts_as_empty))
        self._done = counts_as_empty

    def _call_at_end(self, what: str, begin: Callable[[_core.Client], _core.Call]) -> Any:
        """RolledBack, once this has joined again, if there are steps to be made again."""
        while True:
            self._check_started(what)
            core = self._core
            try:
                return call(begin(core), core)
            except _core.RolledBack:
                made = self.next_step
                result = self._go_back(core, None)
                if result.next_step < made:
                    raise _core.RolledBack(
                        f"rank {self.rank}: the job was rolled back to step {result.next_step}, and this worker had "
                        f"made {made} steps and was done: it has to make the others again from there"
                    ) from None

    def leave(self, reason: str = "") -> None:
        """Leaves the job: normally after ``done``, else for this reason."""
        if self._left:
            return
        self._left = True
        while True:
            core = self._core
            try:
                call(core.leave(reason), core)
                return
            except _core.RolledBack:
                if reason or self._done is None:  # Nothing of that generation is left to leave.
                    return
                self._left = False
                self.done(self._done)
                self._left = True

    def stop(self) -> None:
        """Ends every wait and every exchange of this client with Cancelled; after that it can only leave."""
        self._stopped = True
        for core in (self._core, self._joining):
            if core is not None:
                core.stop()

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
            _log.warning("%s", failed)

    # ---- What every call begins with, and rollbacks

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

    def _passed(self, core: _core.Client, result: Result) -> None:
        """A push has ended in this generation."""
        if core is self._core:
            self.next_step = max(self.next_step, result.next_step)
            if result.answers:
                self.rolled_back_to = None

    def _go_back(self, over: _core.Client, weights: _core.Tensors | None) -> Result:
        """After RolledBack of this generation: joins the next one, and brings its newest weights, if wanted.

        ``next_step`` of the result is the step to go on at. Raises what a join raises: Refused, and Unavailable if the
        servers have not come back within their --server_timeout.
        """
        while True:
            core = self._join_after(over)
            try:
                result: Result = call(core.start(self._initial, weights, self._initial_state), core)
            except _core.RolledBack:
                over = core
                continue
            except BaseException as error:
                self._stopped |= not isinstance(error, Exception)  # Ctrl-C.
                raise
            self.next_step = self.rolled_back_to = result.next_step
            _log.warning(
                "generation %d: rolled back to step %d (version %d); going on",
                core.generation,
                result.next_step,
                result.version,
            )
            return result

    def _join_after(self, over: _core.Client) -> _core.Client:
        with self._joins:
            if self._stopped:
                raise _core.Cancelled(f"rank {over.rank}: this client was stopped; join again")
            if self._core is not over:  # Another thread was first.
                return self._core
            _log.warning("the job was rolled back: joining it again as %s, rank %d", over.name, over.rank)
            self._was_asked_to_leave |= over.asked_to_leave
            self._used_runs = None if self._used_runs is None else 0
            core = self._joining = over.again()
            if self._stopped:  # stop() came in between.
                core.stop()
            try:
                call(core.join(), core)
                core.report_device(self._device)
                self._core = core
            except BaseException as error:
                self._stopped |= not isinstance(error, Exception)  # Ctrl-C.
                raise
            finally:
                self._joining = None
            self.rollbacks += 1
            return core
