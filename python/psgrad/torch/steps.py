"""Where a worker is, and what it makes of its batches: gradients for the servers, or steps of its own (local.py)."""

from __future__ import annotations

import gc
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, cast

import torch

import psgrad
from psgrad.torch.groups import Hyperparameters, LearningRate, Telling
from psgrad.torch.tensors import Entry, Memory, shortened
from psgrad.torch.watch import Watch

log = logging.getLogger("psgrad")

# The push under way is given so long to end, once the client has been stopped.
_GIVE_UP_S = 5.0
# A worker that catches up: however fast the others are, one of so many pulls falls between two of their steps.
_PULLS_MAX = 100


class WentBack(Exception):
    """The servers went back to a checkpoint, and the client has joined again: the step under way is gone."""


class Progress:
    """Where a worker is: its next step, the version that its weights are of, and what it counts."""

    def __init__(self, client: psgrad.Client, started: psgrad.Result) -> None:
        """After Client.start, which brought this."""
        self._client = client
        self._rollbacks = client.rollbacks
        # Others may have gone on between this worker's join and its start.
        self.step = max(client.start_step, started.version) if client.synchronous else client.start_step
        self.version = started.version
        self.versions: list[int] = list(started.versions)
        self.learning_rate_factor = started.learning_rate_factor  # What the servers' schedule says to local steps.
        self.samples = 1  # So many make the mean gradient of the coming step.
        self.jumped_over = 0  # Samples that others have trained in this worker's place, not told yet.
        self.skipped = 0  # Steps or batches whose gradient was not finite.
        self.dropped = 0  # Pushes that a server refused, as too old.
        # By how many batches rounds were longer than --local_steps, by their step; only those that had another length.
        self.batches_besides: dict[int, int] = {}

    def count_round(self, batches: int, whole: int, *, pushes: bool) -> None:
        """A round of so many batches ends, in place of a whole one's; if it pushes nothing, the next has its step."""
        besides = self.batches_besides.get(self.step, 0) + batches - (whole if pushes else 0)
        self.batches_besides.pop(self.step, None)
        if besides != 0:
            self.batches_besides[self.step] = besides

    def ended(self, result: psgrad.Result, pulled_to: list[Any] | None) -> None:
        """A push has ended; its weights, if it brought any, are in `pulled_to`. WentBack if it did not end as one."""
        self.check_rollback()
        # Where nothing was pushed, the step's number is free again.
        self.step = max(self.step + 1 if result.answers else self.step, result.next_step)
        if "stale" in result.answers:
            self.dropped += 1
        if pulled_to is not None:
            self._brought(result)
            self._catch_up(pulled_to)

    def pull(self, weights: list[Any]) -> None:
        """The newest weights."""
        self._brought(self._client.pull(weights, step=self.step))

    def pull_last(self, weights: list[Any]) -> None:
        """The newest weights, as the servers keep them."""
        self._brought(self._client.pull(weights, float32=True))

    def renew(self, weights: list[Any]) -> None:
        """The newest weights, of one step where the mode is synchronous."""
        self.pull(weights)
        self._catch_up(weights)

    def check_rollback(self) -> None:
        """WentBack, if the client has joined again."""
        if self._client.rollbacks != self._rollbacks:
            self._rollbacks = self._client.rollbacks
            self.step = self._client.next_step
            self.jumped_over = 0
            self.batches_besides = {step: count for step, count in self.batches_besides.items() if step < self.step}
            raise WentBack

    def _brought(self, result: psgrad.Result) -> None:
        self.check_rollback()
        self.version = result.version
        self.versions = list(result.versions)
        self.learning_rate_factor = result.learning_rate_factor

    def _catch_up(self, weights: list[Any]) -> None:
        """Only in backup: the shards of a push that came too late have gone on, and not all equally far."""
        client = self._client
        if not client.synchronous or client.exact_versions:
            return
        for _ in range(_PULLS_MAX):
            self.step = max(self.step, *self.versions)
            if self.version == self.step:
                return
            try:
                self._brought(client.pull(weights, version=self.step, step=self.step))
            except psgrad.Refused:  # Another step was made meanwhile, and this version is gone.
                self._brought(client.pull(weights, step=self.step))
        raise psgrad.Unavailable(f"step {self.step}: after {_PULLS_MAX} pulls the shards' versions still differ")


class Unused:
    """What is said of parameters without a gradient."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._said: set[int] = set()

    def check(self, unused: list[Entry], step: int) -> None:
        """RuntimeError, naming them, if that is the policy; else each is named once."""
        if not unused:
            return
        if self._policy == "error":
            raise RuntimeError(
                f"step {step}: no gradient reached {shortened([entry.name for entry in unused])} in this worker's "
                'backward passes. unused="skip" counts them as zeros, and leaves them where no worker has one; to drop '
                "this step: opt.empty_step()"
            )
        new = [entry for entry in unused if entry.index not in self._said]
        if new:
            self._said.update(entry.index for entry in new)
            log.warning(
                "step %d: no gradient reached %s. In such a step it counts as zeros beside other workers' gradients, "
                'and without any the parameter stays as it is (unused="error" raises)',
                step,
                shortened([entry.name for entry in new]),
            )


class Steps(ABC):
    """One of these drives the exchanges; used by the thread that trains (and by autograd's, in its hooks)."""

    began = 0.0  # When the last step's first gradient was sent; 0 where none is sent in backward. time.monotonic().

    def __init__(
        self, client: psgrad.Client, memory: Memory, progress: Progress, learning_rate: LearningRate, unused: Unused
    ) -> None:
        self.client = client
        self.memory = memory
        self.progress = progress
        self.learning_rate = learning_rate
        self.unused = unused
        self.weights = [entry for entry in memory.entries if entry.kind == "weight"]
        self.pushed = [entry for entry in memory.entries if entry.pushed]

    @abstractmethod
    def step(self, samples: int) -> psgrad.Result | None:
        """The batch's gradients are in `.grad`, or have been sent. None: no exchange belongs to this step."""

    @abstractmethod
    def overflow(self, samples: int) -> psgrad.Result | None:
        """A step that counts for nothing, as a GradScaler has found gradients that are not finite."""

    @abstractmethod
    def empty(self) -> psgrad.Result | None:
        """A step without samples; what was sent of it, if anything, does not count."""

    @abstractmethod
    def settle(self) -> None:
        """No batch follows, or none yet: what was trained is exchanged, and no exchange is under way."""

    @property
    def open_batches(self) -> int:
        """Steps that no exchange which has ended has been told of."""
        return 0

    @property
    def awaits_step(self) -> bool:
        """A batch has been through backward(), and no step() has taken its gradients yet."""
        return False

    @property
    def pushes_to_settle(self) -> int:
        """So many pushes settle() makes."""
        return int(self.open_batches > 0)

    @property
    def local_step(self) -> int:
        """Steps of the worker's own since the last exchange."""
        return 0

    @property
    def open_samples(self) -> int:
        """The samples of these."""
        return 0

    def servers_weights(self) -> list[torch.Tensor] | None:
        """The servers' weights, by tensor of `pushed`, as they came last; None: they are the model's."""
        return None

    @torch.no_grad()
    def unscale(self, scale: torch.Tensor | None) -> None:
        """Takes off what a GradScaler has multiplied the loss with; None: the script has called its unscale_().

        ValueError, as GradScaler's, for float16.
        """
        if scale is None:
            return
        inverse = scale.double().reciprocal().float()  # As GradScaler does, so that bits are the same.
        on_device = {inverse.device: inverse}
        for entry in self.weights:
            gradient = entry.tensor.grad
            if gradient is None:
                continue
            if gradient.dtype is torch.float16:
                raise ValueError(
                    f"{entry.name}: its gradient is float16, in which small ones would become 0 as they are "
                    "unscaled: keep the model in float32, under torch.autocast"
                )
            device = gradient.device
            if device not in on_device:  # The host does not wait, unless it is what the scale is copied to.
                on_device[device] = inverse.to(device, non_blocking=device.type != "cpu")
            gradient.mul_(on_device[device])

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of backward passes in it stay where they are."""
        return nullcontext()

    def close(self, why: str) -> None:  # noqa: B027
        """No gradient is sent any more; a backward pass raises with this reason until let_go()."""

    def let_go(self) -> None:
        """The model is the user's again, as soon as nothing reads the gradients of the push under way any more."""
        self.memory.staging.close()


class PushGradients(Steps):
    """Each batch gives a gradient, which is pushed, and the next one is computed on the weights that come back.

    A hook on each parameter sends its gradient as soon as backward has accumulated it. One gradient (or the buffers,
    where there are any) is held back until step(): servers answer with new weights only when all has been sent, so no
    weight changes before step(), however the backward pass reads them. Nor has any server the whole push before, so
    that it can be given up, and begun again with what `.grad` is by then.
    """

    def __init__(self, *shared: Any, overlap: str, accumulate: int) -> None:
        super().__init__(*shared)
        self._falls_back = overlap == "auto"
        self._sends = overlap != "none"  # In backward.
        self._accumulate = accumulate
        count = len(self.memory.entries)
        self._empty: list[Any] = [None] * count
        # These are the step's, by index of the layout:
        self._fires = [0] * count  # Backward passes that gave it a gradient, but those within no_sync().
        self._sent: list[torch.Tensor | None] = [None] * count  # The gradient that was sent: kept until it has arrived,
        self._versions = [0] * count  # and its version counter then.
        self._watch = Watch([entry.index for entry in self.weights if entry.device is None])
        self._unsent = len(self.weights)
        # So many of the weights' gradients wait for step().
        self._held = 0 if any(entry.kind != "weight" for entry in self.pushed) else 1
        self._exchange: psgrad.Exchange | None = None
        self._ready_at: Callable[[int, int], None] | None = None
        self._told = Telling(Hyperparameters())  # What the push under way tells of hyperparameters,
        self._told_samples = 0  # the samples,
        self._told_besides = 0  # and those that others have trained in this worker's place.
        self._quiet = False  # In no_sync().
        self._ran_quietly = False  # A backward pass has, since the last step.
        self._sparse: set[int] = set()  # It was said of these.
        self._said_late = False  # It was said.
        self._closed = ""  # Why no gradient can be sent any more.
        self.memory.pin_gradients()
        # Autograd has a thread for each device.
        several = len({entry.device for entry in self.weights}) > 1
        self._hook_lock = threading.Lock() if several else None
        self._hooks = [self._hook(entry) for entry in self.weights]

    @property
    def awaits_step(self) -> bool:
        return self._ran_quietly or any(self._fires)

    def step(self, samples: int) -> psgrad.Result:
        step = self.progress.step
        if self._exchange is None:
            self._check_has_gradient()
        self.memory.check_bound()
        self.memory.check_unwritten(step)
        if self._sends:
            self._check_sent()
        if not self._sends:
            self._give_up()
            self._check_has_gradient()
        unsent = [entry for entry in self.weights if self._sent[entry.index] is None]
        self.unused.check([each for each in unsent if not self._fires[each.index] and each.tensor.grad is None], step)
        buffers = self.memory.take_buffers()
        remaining = [(entry.index, self._source(entry)) for entry in unsent]
        remaining.extend((entry.index, self.memory.gradients[entry.index].data_ptr()) for entry in buffers)
        if self._exchange is None:
            self._begin()
        return self._end(remaining, samples)

    def overflow(self, samples: int) -> psgrad.Result:
        log.warning(
            "step %d: GradScaler has found gradients that are not finite: the step was skipped", self.progress.step
        )
        self.progress.skipped += 1
        self._give_up()
        self._begin()
        return self._drop()

    def unscale(self, scale: torch.Tensor | None) -> None:
        # Before gradients are changed: whoever mends what these find calls step() again, with the same scale.
        self._check_has_gradient()
        self.memory.check_bound()
        self.memory.check_unwritten(self.progress.step)
        if self._sends:
            self._unexpected(
                "torch.amp.GradScaler takes this step, and the gradients that were sent in backward() are scaled"
            )
        self._give_up()
        super().unscale(scale)

    def empty(self) -> psgrad.Result | None:
        if self._exchange is not None:
            return self._drop()
        self._forget()
        client, progress, into = self.client, self.progress, self.memory.weight_buffers
        if not client.empty_contributions:
            progress.pull(into)
            self.memory.publish()
            return None
        versions = {"version": progress.version, "versions": progress.versions}
        return self._took(client.push_pull(progress.step, self._empty, into, samples=0, **versions))

    def settle(self) -> None:
        if self._exchange is None:
            self._forget()
            return
        log.warning("step %d: the last backward() had no step(): it does not count", self.progress.step)
        self._drop()

    # ---- In backward

    def _hook(self, entry: Entry) -> torch.utils.hooks.RemovableHandle:
        index, fits, accumulate, on_card = entry.index, entry.in_place, self._accumulate, entry.device is not None
        fires, sent, versions = self._fires, self._sent, self._versions
        strided, float32, watch = torch.strided, torch.float32, self._watch

        # Runs once for each parameter and backward pass, so it is short: tests/python/bench/hook_cost.py.
        def hook(parameter: torch.Tensor) -> None:
            if self._quiet:
                self._backward_aside()
                return
            if not self._sends:
                self._ran_quietly = True
                return
            count = fires[index] = fires[index] + 1
            if count != accumulate:
                if count > accumulate:
                    self._once_more(entry)
                return
            if self._unsent == self._held:
                return
            if self._ready_at is None:
                self._begin()
            gradient = parameter.grad
            if fits and gradient.layout is strided and gradient.is_contiguous() and gradient.dtype is float32:  # type: ignore[union-attr]
                address = gradient.data_ptr()  # type: ignore[union-attr]
            elif on_card:
                self._stage(index, gradient)
                return
            else:
                address = self._copied(index, gradient)
            sent[index] = gradient
            versions[index] = gradient._version  # type: ignore[union-attr]
            if watch.every or index == watch.one:
                watch.saw(index, gradient)  # type: ignore[arg-type]
            self._unsent -= 1
            self._ready_at(index, address)  # type: ignore[misc]

        parameter: Any = entry.tensor
        chosen = hook if self._hook_lock is None else _locked(self._hook_lock, hook)
        return cast("torch.utils.hooks.RemovableHandle", parameter.register_post_accumulate_grad_hook(chosen))

    def _backward_aside(self) -> None:
        if self._closed:
            raise RuntimeError(self._closed)
        self._ran_quietly = True

    def _once_more(self, entry: Entry) -> None:
        passes = (
            "a second backward()" if self._accumulate == 1 else f"more than accumulate={self._accumulate} backward()s"
        )
        self._unexpected(
            f"{passes} before step() reached {entry.name}, whose gradient was final",
            "To add up several and send them in the last: accumulate=, which psgrad.data.Batches and set_samples() "
            "count by, or opt.no_sync() around all but that. (With torch.utils.checkpoint: use_reentrant=False)",
        )

    def _unexpected(self, seen: str, advice: str = "") -> None:
        """With overlap="auto" no gradient is sent in backward any more, else RuntimeError.

        What was sent of this step is given up by step(), which sends what `.grad` is then.
        """
        seen = f"step {self.progress.step}: {seen}"
        if not self._falls_back:
            raise RuntimeError(f'{seen}. overlap="none" sends in step(); to drop this step: opt.empty_step(). {advice}')
        self._sends = False
        log.warning(
            '%s: from now on gradients are sent in step(), as with overlap="none", and what was sent of this step does '
            "not count. %s",
            seen,
            advice,
        )

    def _copied(self, index: int, gradient: torch.Tensor | None) -> int:
        """The address of a float32, contiguous copy."""
        target = self.memory.gradients[index]
        with torch.no_grad():
            target.copy_(self._dense(index, gradient))
        return target.data_ptr()

    def _stage(self, index: int, gradient: torch.Tensor | None) -> None:
        """Has a gradient on a card sent as soon as it is in the host's memory."""
        assert gradient is not None
        self._sent[index] = gradient
        self._versions[index] = gradient._version
        self._unsent -= 1
        self.memory.staging.send(index, self._dense(index, gradient), self.memory.gradients[index])

    def _dense(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor:
        assert gradient is not None
        strided = gradient.layout is torch.strided
        if not strided and index not in self._sparse:
            self._sparse.add(index)
            log.warning(
                "%s: its sparse gradient is made dense to be sent: %d bytes in each step instead of %d in this one",
                self.memory.entries[index].name,
                self.memory.gradients[index].nbytes,
                gradient._indices().nbytes + gradient._values().nbytes,
            )
        with torch.no_grad():
            return gradient if strided else gradient.to_dense()

    def _begin(self) -> None:
        if self._closed:
            raise RuntimeError(self._closed)
        progress = self.progress
        self._told = self.learning_rate.to_tell(self.client.lead)
        self._told_samples = max(1, progress.samples)  # With none, weights would come while backward goes on.
        self._told_besides, progress.jumped_over = progress.jumped_over, 0
        self.began = time.monotonic()
        self._exchange = self.client.begin(
            progress.step,
            self._empty,
            self.memory.weight_buffers_later,
            version=progress.version,
            versions=progress.versions,
            samples=self._told_samples,
            passed=self._told_samples + self._told_besides if self._told_besides else None,
            learning_rate=self._told.learning_rate,
            groups=self._told.groups,
            skip_not_finite=True,
            deferred=True,
        )
        self._ready_at = self._exchange.ready_at
        self.memory.staging.begin(f"rank {self.client.rank}, step {progress.step}", self._ready_at)

    # ---- In step()

    def _check_has_gradient(self) -> None:
        if all(entry.tensor.grad is None for entry in self.weights):
            raise RuntimeError(
                f"step {self.progress.step}: step() without a backward(): no parameter has a gradient. A worker "
                "without samples in this step calls opt.empty_step()"
            )

    def _check_sent(self) -> None:
        """Looks for what makes this step another one than what was sent of it."""
        sent, versions = self._sent, self._versions
        changed = [
            entry.name
            for entry in self.weights
            if (gradient := sent[entry.index]) is not None
            and (entry.tensor.grad is not gradient or gradient._version != versions[entry.index])
        ]
        if not changed:
            entries = self.memory.entries
            changed = [entries[index].name for index in self._watch.changed(lambda i: cast("torch.Tensor", sent[i]))]
        averaged = self._watch.every and self._exchange is not None and _averaged_by_ddp(self.weights)
        late = self.learning_rate.changed_since(self._told) if self._exchange is not None and self.client.lead else ""
        if not self._ran_quietly and not any(self._fires):
            self._unexpected(
                "step() without a backward() since the last one takes what is in .grad",
                "A worker without samples in a step calls opt.empty_step()",
            )
        elif averaged:
            self._unexpected(
                "DistributedDataParallel averages these gradients after they are accumulated, when they have been sent "
                "already",
                "psgrad.torch.NodeOptimizer trains a DistributedDataParallel as one worker",
            )
        elif changed:
            self._unexpected(
                f".grad of {shortened(changed)} was changed after backward() and before step(), when it had been sent "
                "already",
                "To clip, give DistributedOptimizer clip_norm=: servers apply it to the mean of all workers' gradients",
            )
        elif late and self._falls_back:
            self._unexpected(f"{late} was changed between backward() and step()", "Change it after step()")
        elif late and not self._said_late:
            self._said_late = True
            log.warning(
                "step %d: %s was changed between backward() and step(), when the push was under way: it is told with "
                'the next one (overlap="none" tells it with this one)',
                self.progress.step,
                late,
            )

    def _source(self, entry: Entry) -> int | torch.Tensor | None:
        """The address of a weight's gradient that is to be sent now; or the gradient, on a card; None: it has none."""
        gradient = entry.tensor.grad
        if gradient is None:
            return None
        plain = entry.in_place and gradient.layout is torch.strided and gradient.dtype is torch.float32
        if plain and gradient.is_contiguous():
            return gradient.data_ptr()
        return self._copied(entry.index, gradient) if entry.device is None else self._dense(entry.index, gradient)

    def _give_up(self) -> None:
        """Ends the push under way, as if it had not been begun."""
        if self._exchange is None:
            return
        sent = (entry.index for entry in self.weights if self._sent[entry.index] is not None)
        staging = self.memory.staging
        try:
            staging.settle()  # If the job was rolled back, the push ends with a checkpoint's weights.
            staging.give_up()
            self._exchange.give_up(next(sent, self.weights[0].index))
        finally:
            self._forget()
        self.progress.check_rollback()
        self.progress.jumped_over += self._told_besides

    def _drop(self) -> psgrad.Result:
        """Makes the push under way an empty contribution, and waits for its weights."""
        zeros = self.memory.zeros_address()
        return self._end([(entry.index, zeros) for entry in self.pushed if self._sent[entry.index] is None], 0)

    def _end(self, remaining: Sequence[tuple[int, int | torch.Tensor | None]], samples: int) -> psgrad.Result:
        memory, staging = self.memory, self.memory.staging
        followed = bool(memory.on_cards) and self.client.exact_versions  # Else no tensor's weights come by themselves.
        exchange, ready_at = self._exchange, self._ready_at
        assert exchange is not None
        assert ready_at is not None
        try:
            if samples != self._told_samples:
                exchange.set_samples(samples)
            staging.settle()
            for index, source in remaining:
                if source is None:
                    exchange.absent(index)
                elif isinstance(source, torch.Tensor):
                    staging.send(index, source, memory.gradients[index])
                else:
                    ready_at(index, source)
            staging.drain()
            memory.expect_weights()
            if followed:
                memory.follow(exchange)
            result = exchange.wait()
        finally:
            self._forget()
        self.learning_rate.was_told(self._told, result)
        if not result.answers:
            # What has arrived of it is dropped by the next push of this number, which differs in what it says passed.
            self.progress.jumped_over += self._told_samples + self._told_besides
        return self._took(result, followed)

    def _took(self, result: psgrad.Result, followed: bool = False) -> psgrad.Result:
        # Where weights are followed, no other ones are pulled after them.
        self.progress.ended(result, self.memory.weight_buffers_later if followed else self.memory.weight_buffers)
        self.memory.publish(followed)
        return result

    def _forget(self) -> None:
        """The step has ended, in one way or the other."""
        if self._exchange is not None:
            self._watch.next_step()
        self._exchange = None
        self._ready_at = None
        self.memory.staging.end()
        self._ran_quietly = False
        self._unsent = len(self.weights)
        for entry in self.weights:
            self._fires[entry.index] = 0
            self._sent[entry.index] = None

    # ---- The worker's life

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before or bool(self._closed)

    def close(self, why: str) -> None:
        self._closed = why
        self._quiet = True

    def let_go(self) -> None:
        if self._exchange is not None:
            with suppress(psgrad.Error, TimeoutError):
                self._exchange.wait(_GIVE_UP_S)
            self._forget()
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        super().let_go()


def _locked(lock: threading.Lock, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    def locked(parameter: torch.Tensor) -> None:
        with lock:
            hook(parameter)

    return locked


def _averaged_by_ddp(weights: Sequence[Entry]) -> bool:
    """Whether a DistributedDataParallel has one of these parameters, which do not know of it themselves.

    It averages a gradient after the hook that sends it, and may do so without changing the version counter.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    mine = {id(entry.tensor) for entry in weights}
    kind = torch.nn.parallel.DistributedDataParallel
    # By type(): isinstance() would ask objects that stand for others what they are.
    wrappers = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    return any(id(parameter) in mine for wrapper in wrappers for parameter in wrapper.parameters())
