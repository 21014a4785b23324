"""What a worker does that takes optimizer steps by itself, whatever it exchanges: it trains, and compares weights.

The wrapped torch optimizer takes the steps, with its own state. x are the model's weights here, and the tensors of the
layout are those that servers have a say over, buffers included.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import psgrad
from psgrad.torch.groups import LearningRate
from psgrad.torch.memory import Memory
from psgrad.torch.progress import Progress
from psgrad.torch.steps import Unused

log = logging.getLogger("psgrad")


class LocalTraining:
    """What the ways of local.py have in common."""

    def __init__(
        self,
        client: psgrad.Client,
        memory: Memory,
        progress: Progress,
        optimizer: torch.optim.Optimizer,
        learning_rate: LearningRate,
        unused: Unused,
    ) -> None:
        local = client.local_steps
        assert local is not None
        self.local = local
        self.client = client
        self.memory = memory
        self.progress = progress
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._unused = unused
        self.pushed = [entry for entry in memory.entries if entry.pushed]
        self._weights = [entry for entry in memory.entries if entry.kind == "weight"]
        memory.gradients  # noqa: B018  (the memory that differences are computed to)

    def check(self) -> None:
        """RuntimeError: no backward() ran, memory has moved, or unused parameters are errors."""
        unused = [entry for entry in self._weights if entry.tensor.grad is None]
        if len(unused) == len(self._weights):
            raise RuntimeError(
                f"step {self.progress.step}: step() without a backward(): no parameter has a gradient. A worker "
                "without samples in this step calls opt.empty_step()"
            )
        self.memory.check_bound()
        self._unused.check(unused, self.progress.step)

    def not_finite(self) -> str:
        """The name of a weight whose gradient is not finite, or "". One that is applied would stay in the state."""
        entries = [entry for entry in self._weights if entry.tensor.grad is not None]
        gradients = [_values(entry.tensor.grad) for entry in entries]
        if torch.stack([gradient.sum(dtype=torch.float64) for gradient in gradients]).isfinite().all():
            return ""
        # Of finite gradients this large the sum may not be: so each is looked at.
        found = (entry for entry, gradient in zip(entries, gradients, strict=True) if not gradient.isfinite().all())
        return next((entry.name for entry in found), "")

    def train(self, samples: int) -> int:
        """Takes a step with the batch's gradients, and returns its samples; 0 if a gradient is not finite."""
        skipped = self.not_finite()
        if not skipped:
            self._apply()
            return samples
        progress = self.progress
        progress.skipped += 1
        progress.jumped_over += samples
        log.warning("step %d: the gradient of %s is not finite: the batch was skipped", progress.step, skipped)
        return 0

    def _apply(self) -> None:
        """One step of the optimizer: gradients are clipped, and the rate is scheduled, as the servers' flags say.

        The schedule is at the place where it was when weights came last.
        """
        parameters = [entry.tensor for entry in self._weights if entry.tensor.grad is not None]
        if self.local.clip_value:
            torch.nn.utils.clip_grad_value_(parameters, self.local.clip_value)
        if self.local.clip_tensor_norm:
            for parameter in parameters:
                torch.nn.utils.clip_grad_norm_(parameter, self.local.clip_tensor_norm)
        if self.local.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, self.local.clip_norm)
        factor = self.progress.learning_rate_factor
        if factor == 1:
            self._optimizer.step()
            return
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        try:
            self._optimizer.step()
        finally:
            for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    @torch.no_grad()
    def copy(self) -> list[torch.Tensor]:
        """Of x, by tensor of `pushed`."""
        self.memory.collect()
        return [self.memory.weights[entry.index].clone() for entry in self.pushed]

    @torch.no_grad()
    def difference(self, scale: float, other: list[torch.Tensor]) -> list[Any]:
        """scale · (x − other), to the gradients' memory."""
        memory = self.memory
        memory.collect()
        out: list[Any] = [None] * len(memory.entries)
        for entry, subtrahend in zip(self.pushed, other, strict=True):
            target = memory.gradients[entry.index]
            torch.sub(memory.weights[entry.index], subtrahend, out=target)
            if scale != 1:
                target.mul_(scale)
            out[entry.index] = memory.gradient_buffers[entry.index]
        return out

    @torch.no_grad()
    def gradients(self) -> list[Any]:
        """Those of the batch, and the buffers' values, in the gradients' memory; None: there is none."""
        memory = self.memory
        for entry in self._weights:
            gradient = entry.tensor.grad
            if gradient is not None:
                target = memory.gradients[entry.index]
                target.copy_(gradient if gradient.layout is torch.strided else gradient.to_dense())
        memory.take_buffers()
        absent = {entry.index for entry in self._weights if entry.tensor.grad is None}
        return [
            memory.gradient_buffers[entry.index] if entry.pushed and entry.index not in absent else None
            for entry in memory.entries
        ]

    def push_pull(self, out: list[Any], into: list[Any], samples: int, *, difference: bool) -> psgrad.Result:
        """The next step's push, whose weights come to `into`. A weight without a gradient is absent from it."""
        rate = self._learning_rate.to_tell(self.client.lead)
        progress = self.progress
        absent = [entry.index for entry in self.pushed if samples > 0 and out[entry.index] is None]
        exchange = self.client.begin(
            progress.step,
            out if samples > 0 else [None] * len(out),
            into,
            version=progress.version,
            versions=progress.versions,
            samples=samples,
            passed=self.take_passed(samples),
            learning_rate=rate,
            skip_not_finite=True,
            difference=difference,
            deferred=bool(absent),
        )
        for entry in self.pushed if absent else ():
            if entry.index in absent:
                exchange.absent(entry.index)
            else:
                exchange.ready(entry.index)
        result = exchange.wait()
        if result.answers and all(answer in ("applied", "duplicate") for answer in result.answers):
            self._learning_rate.was_told(rate)
        progress.ended(result, into)
        return result

    def take_passed(self, samples: int) -> int | None:
        """What schedules are to count of a push, where it is not its samples alone."""
        jumped_over, self.progress.jumped_over = self.progress.jumped_over, 0
        return samples + jumped_over if jumped_over else None

    # ---- Of Steps

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()  # Nothing is sent by a backward pass.

    @property
    def began(self) -> float:
        return 0.0

    def close(self, why: str) -> None:
        pass

    def give_up(self) -> None:
        """What is being sent is in the client's own memory."""

    def remove_hooks(self) -> None:
        pass


def _values(gradient: torch.Tensor | None) -> torch.Tensor:
    """All that a gradient has, without the zeros of a sparse one."""
    assert gradient is not None
    return gradient.coalesce().values() if gradient.is_sparse else gradient
