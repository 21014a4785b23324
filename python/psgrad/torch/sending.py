"""Gradients on their way to the servers while backward goes on.

A hook on each parameter sends its gradient as soon as backward has accumulated it. One gradient (or the buffers, where
there are any) is held back until step(): servers answer with new weights only when all has been sent, so no weight
changes before step(), however the backward pass reads them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import torch

import psgrad
from psgrad.torch.groups import LearningRate
from psgrad.torch.memory import Memory
from psgrad.torch.progress import Progress
from psgrad.torch.tensors import Entry, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("psgrad")

_GIVE_UP_S = 5.0


class Sender:
    """The gradients of one step after the other. Used by the thread that trains (and by autograd's, in its hooks)."""

    def __init__(
        self,
        client: psgrad.Client,
        memory: Memory,
        progress: Progress,
        learning_rate: LearningRate,
        *,
        overlap: bool,
        accumulate: int,
        samples: Callable[[], int],
    ) -> None:
        self._client = client
        self._memory = memory
        self._progress = progress
        self._learning_rate = learning_rate
        self._samples = samples
        self._overlap = overlap
        self._accumulate = accumulate
        count = len(memory.entries)
        self._weights = [entry for entry in memory.entries if entry.kind == "weight"]
        self._empty: list[Any] = [None] * count
        self._buffers = any(entry.kind.startswith("buffer") for entry in memory.entries)
        # Of the step, by index of the layout:
        self._fires = [0] * count  # Backward passes that gave it a gradient, but those within no_sync().
        self._sent: list[torch.Tensor | None] = [None] * count  # The gradient that was sent: kept until it has arrived,
        self._versions = [0] * count  # and its version counter then.
        self._unsent = len(self._weights)
        self._held = 0 if self._buffers else 1  # So many of the weights' gradients wait for step().
        self._exchange: psgrad.Exchange | None = None
        self._ready_at: Callable[[int, int], None] | None = None
        self._told: float | None = None  # The learning rate that the push under way tells.
        self._told_samples = 0  # Likewise.
        self._quiet = False  # In no_sync().
        self._ran_quietly = False  # A backward pass has, since the last step.
        self._sparse: set[int] = set()  # It was said of these.
        self._late_rate = False  # It was said.
        self.began = 0.0  # When the first gradient of the last step was sent; time.monotonic().
        self.closed = ""  # Why no gradient can be sent any more.
        self._hooks = [self._hook(entry) for entry in self._weights]

    def _hook(self, entry: Entry) -> torch.utils.hooks.RemovableHandle:
        index, fits, accumulate = entry.index, entry.in_place, self._accumulate
        fires, sent, versions = self._fires, self._sent, self._versions
        strided, float32 = torch.strided, torch.float32

        # Runs once for each parameter and backward pass, so it is short: tests/python/bench/hook_cost.py.
        def hook(parameter: torch.Tensor) -> None:
            if self._quiet:
                self._backward_aside()
                return
            count = fires[index] = fires[index] + 1
            if count != accumulate:
                if count > accumulate:
                    raise self._too_many(entry)
                return
            if not self._overlap:
                return
            if self._ready_at is None:
                self._begin()
            if self._unsent == self._held:
                return
            gradient = parameter.grad
            if fits and gradient.layout is strided and gradient.is_contiguous() and gradient.dtype is float32:  # type: ignore[union-attr]
                address = gradient.data_ptr()  # type: ignore[union-attr]
            else:
                address = self._copied(index, gradient)
            sent[index] = gradient
            versions[index] = gradient._version  # type: ignore[union-attr]
            self._unsent -= 1
            self._ready_at(index, address)  # type: ignore[misc]

        parameter: Any = entry.tensor
        return cast("torch.utils.hooks.RemovableHandle", parameter.register_post_accumulate_grad_hook(hook))

    def _backward_aside(self) -> None:
        if self.closed:
            raise RuntimeError(self.closed)
        self._ran_quietly = True

    def _too_many(self, entry: Entry) -> RuntimeError:
        passes = (
            "a second backward()" if self._accumulate == 1 else f"more than accumulate={self._accumulate} backward()s"
        )
        return RuntimeError(
            f"step {self._progress.step}: {passes} before step() reached {entry.name}, whose gradient was final. To "
            "add up several: accumulate=, or opt.no_sync() around all but the last; to drop this step: "
            "opt.empty_step(). (With torch.utils.checkpoint: use_reentrant=False)"
        )

    def _copied(self, index: int, gradient: torch.Tensor | None) -> int:
        """The address of a float32, contiguous copy."""
        assert gradient is not None
        target = self._memory.gradients[index]
        strided = gradient.layout is torch.strided
        if not strided:
            self._say_sparse(index)
        with torch.no_grad():
            target.copy_(gradient if strided else gradient.to_dense())
        return target.data_ptr()

    def _say_sparse(self, index: int) -> None:
        if index not in self._sparse:
            self._sparse.add(index)
            log.warning("%s: its sparse gradient is made dense to be sent", self._memory.entries[index].name)

    def _begin(self) -> None:
        if self.closed:
            raise RuntimeError(self.closed)
        progress = self._progress
        jumped_over, progress.jumped_over = progress.jumped_over, 0
        self.began = time.monotonic()
        self._told_samples = max(1, self._samples())  # With none, weights would come while backward goes on.
        self._told = self._learning_rate.to_tell(self._client.lead)
        self._exchange = self._client.begin(
            progress.step,
            self._empty,
            self._memory.weight_buffers,
            version=progress.version,
            versions=progress.versions,
            samples=self._told_samples,
            passed=self._told_samples + jumped_over if jumped_over else None,
            learning_rate=self._told,
            skip_not_finite=True,
            deferred=True,
        )
        self._ready_at = self._exchange.ready_at

    # ---- Called by step()

    def ran(self) -> bool:
        """Whether a backward pass has run since the last step."""
        return self._ran_quietly or any(self._fires)

    def unused(self) -> list[Entry]:
        """Parameters without a gradient in this step, as servers are told."""
        return [
            entry
            for entry in self._weights
            if self._sent[entry.index] is None and not self._fires[entry.index] and entry.tensor.grad is None
        ]

    def check_unchanged(self) -> None:
        """RuntimeError, naming the tensor, if a gradient that was sent is not what `.grad` is now."""
        sent, versions = self._sent, self._versions
        changed = []
        for entry in self._weights:
            gradient = sent[entry.index]
            if gradient is None:
                continue
            if entry.tensor.grad is not gradient or gradient._version != versions[entry.index]:
                changed.append(entry.name)
        if changed:
            raise RuntimeError(
                f"step {self._progress.step}: .grad of {shortened(changed)} was changed after backward() and before "
                "step(), when it had been sent already. To clip, give DistributedOptimizer clip_norm=, which servers "
                "apply to the "
                'mean of all workers\' gradients; for anything else, overlap="none" sends in step(); to drop this '
                "step: "
                "opt.empty_step()"
            )

    def complete(self, samples: int) -> psgrad.Result:
        """Sends what has not been sent, and waits for the new weights."""
        if self._exchange is None:
            self._begin()
        assert self._exchange is not None
        assert self._ready_at is not None
        if self._client.lead and not self._late_rate and self._learning_rate.differs(self._told):
            self._late_rate = True
            log.warning(
                "step %d: lr was changed between backward() and step(), when the push was under way: it is told with "
                "the "
                'next one (overlap="none" tells it with this one)',
                self._progress.step,
            )
        remaining: list[tuple[int, int | None]] = []
        for entry in self._weights:
            index = entry.index
            if self._sent[index] is None:
                remaining.append((index, self._address(entry)))
        remaining.extend(
            (entry.index, self._memory.gradients[entry.index].data_ptr()) for entry in self._memory.take_buffers()
        )
        return self._end(remaining, samples)

    def _address(self, entry: Entry) -> int | None:
        """Of the gradient of a weight, to be sent now; None: it has none."""
        gradient = entry.tensor.grad
        if gradient is None:
            return None
        self._sent[entry.index] = gradient
        plain = entry.in_place and gradient.layout is torch.strided and gradient.dtype is torch.float32
        if plain and gradient.is_contiguous():
            return gradient.data_ptr()
        return self._copied(entry.index, gradient)

    def drop(self) -> psgrad.Result | None:
        """Makes the push under way an empty contribution, and waits for its weights; None if none is under way."""
        if self._exchange is None:
            self._forget()
            return None
        zeros = self._memory.zeros_address()
        pushed = [entry for entry in self._memory.entries if entry.pushed]
        return self._end([(entry.index, zeros) for entry in pushed if self._sent[entry.index] is None], 0)

    def _end(self, remaining: Sequence[tuple[int, int | None]], samples: int) -> psgrad.Result:
        exchange, ready_at = self._exchange, self._ready_at
        assert exchange is not None
        assert ready_at is not None
        try:
            if samples != self._told_samples:
                exchange.set_samples(samples)
            for index, address in remaining:
                if address is None:
                    exchange.absent(index)
                else:
                    ready_at(index, address)
            result = exchange.wait()
        finally:
            self._forget()
        if all(answer in ("applied", "duplicate") for answer in result.answers):
            self._learning_rate.was_told(self._told if result.answers else None)
        if not result.answers:
            # What has arrived of it is dropped by the next push of this number, which differs in what it says passed.
            self._progress.jumped_over += self._told_samples
        return result

    def _forget(self) -> None:
        """The step has ended, in one way or the other."""
        self._exchange = None
        self._ready_at = None
        self._ran_quietly = False
        self._unsent = len(self._weights)
        for entry in self._weights:
            self._fires[entry.index] = 0
            self._sent[entry.index] = None

    # ---- Of the optimizer's life

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in it stay where they are."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before or bool(self.closed)

    def close(self, why: str) -> None:
        """No gradient is sent any more; a backward pass raises with this reason, unless hooks are removed."""
        self.closed = why
        self._quiet = True

    def give_up(self) -> None:
        """Waits until nothing reads the gradients of the push under way any more; the client has been stopped."""
        if self._exchange is not None:
            with suppress(psgrad.Error, TimeoutError):
                self._exchange.wait(_GIVE_UP_S)
            self._forget()

    def remove_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
