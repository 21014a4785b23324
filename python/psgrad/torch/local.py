"""Modes in which the worker takes optimizer steps by itself, on weights of its own, between two exchanges.

The wrapped torch optimizer takes the steps, with its own state. In place of gradients, differences of weights are
exchanged. x are the model's weights here, and the tensors of the layout are those that servers have a say over, buffers
included. Each way is a class.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import psgrad
from psgrad.torch.groups import Hyperparameters, Telling
from psgrad.torch.steps import Steps
from psgrad.torch.tensors import shortened

log = logging.getLogger("psgrad")


class LocalTraining(Steps):
    """What the ways have in common: training, and comparing weights with those of the servers."""

    def __init__(self, local: psgrad.LocalSteps, optimizer: torch.optim.Optimizer, *shared: Any) -> None:
        super().__init__(*shared)
        self.local = local
        self._optimizer = optimizer
        self._open = 0  # Batches since the last exchange,
        self._samples = 0  # and their samples.
        self._overflowed = False  # A GradScaler has found the batch's gradients not finite, whatever they are now.
        self.memory.gradients  # noqa: B018  (the memory that differences are computed to)
        rounded = [entry for entry in self.weights if entry.tensor.dtype is not torch.float32]
        if rounded:
            log.warning(
                "%s is %s: this worker's own optimizer steps it in that type, so that steps smaller than its rounding "
                "are lost. Keep the model in float32, and compute under torch.autocast",
                shortened([entry.name for entry in rounded]),
                str(rounded[0].tensor.dtype).removeprefix("torch."),
            )

    @property
    def open_batches(self) -> int:
        return self._open

    @property
    def local_step(self) -> int:
        return self._open

    @property
    def open_samples(self) -> int:
        return self._samples

    @contextmanager
    def showing(self, weights: list[torch.Tensor]) -> Iterator[None]:
        """In it the model has these weights, by tensor of `pushed`; after it its own again."""
        own = self.copy()
        self._put(weights)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: list[torch.Tensor]) -> None:
        self.memory.staging.settle()
        for entry, values in zip(self.pushed, weights, strict=True):
            self.memory.weights[entry.index].copy_(values)
        self.memory.publish()

    def unscale(self, scale: torch.Tensor | None) -> None:
        self.check()
        super().unscale(scale)

    def overflow(self, samples: int) -> psgrad.Result | None:
        self._overflowed = True
        try:
            return self.step(samples)
        finally:
            self._overflowed = False

    def check(self) -> None:
        """RuntimeError: no backward() ran, memory has moved, or unused parameters are errors."""
        unused = [entry for entry in self.weights if entry.tensor.grad is None]
        if len(unused) == len(self.weights):
            raise RuntimeError(
                f"step {self.progress.step}: step() without a backward(): no parameter has a gradient. A worker "
                "without samples in this step calls opt.empty_step()"
            )
        self.memory.check_bound()
        self.unused.check(unused, self.progress.step)

    def not_finite(self) -> str:
        """What has a gradient that is not finite, or "". One that is applied would stay in the state."""
        if self._overflowed:
            return "the loss as GradScaler has scaled it"
        entries = [entry for entry in self.weights if entry.tensor.grad is not None]
        gradients = [_values(entry.tensor.grad) for entry in entries]
        sums = [gradient.sum(dtype=torch.float64) for gradient in gradients]
        if torch.stack([each.to(sums[0].device) for each in sums]).isfinite().all():
            return ""
        # Finite gradients may be so large that their sum is not: so each is looked at.
        found = (entry for entry, gradient in zip(entries, gradients, strict=True) if not gradient.isfinite().all())
        return next((entry.name for entry in found), "")

    def train(self, samples: int) -> int:
        """Takes a step with the batch's gradients, and returns its samples; 0 if a gradient is not finite."""
        self.client.count_local_step()
        skipped = self.not_finite()
        if not skipped:
            self._apply()
            return samples
        return self._skip(samples, skipped)

    def _skip(self, samples: int, not_finite: str) -> int:
        progress = self.progress
        progress.skipped += 1
        progress.jumped_over += samples
        log.warning("step %d: the gradient of %s is not finite: the batch was skipped", progress.step, not_finite)
        return 0

    def _apply(self) -> None:
        """One step of the optimizer: gradients are clipped, and the rate is scheduled, as the servers' flags say.

        The schedule is at the place where it was when weights came last.
        """
        parameters = [entry.tensor for entry in self.weights if entry.tensor.grad is not None]
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
        """A copy of x, by tensor of `pushed`."""
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
        out: list[Any] = [None] * len(memory.entries)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for entry in self.weights:
            gradient = entry.tensor.grad
            if gradient is not None:
                dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
                pairs.append((dense, memory.gradients[entry.index]))
                out[entry.index] = memory.gradient_buffers[entry.index]
        memory.staging.fetch(pairs)
        for entry in memory.take_buffers():
            out[entry.index] = memory.gradient_buffers[entry.index]
        return out

    def push_pull(self, out: list[Any], into: list[Any], samples: int, *, difference: bool) -> psgrad.Result:
        """The next step's push, whose weights come to `into`. A weight without a gradient is absent from it."""
        told = self.learning_rate.to_tell(self.client.lead)
        progress = self.progress
        absent = {entry.index for entry in self.pushed if samples > 0 and out[entry.index] is None}
        exchange = self.client.begin(
            progress.step,
            out if samples > 0 else [None] * len(out),
            into,
            version=progress.version,
            versions=progress.versions,
            samples=samples,
            passed=self.take_passed(samples),
            learning_rate=told.learning_rate,
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
        self.learning_rate.was_told(told, result)
        progress.ended(result, into)
        return result

    def take_passed(self, samples: int) -> int | None:
        """What schedules are to count of a push, where it is not its samples alone."""
        jumped_over, self.progress.jumped_over = self.progress.jumped_over, 0
        return samples + jumped_over if jumped_over else None


class AverageWeights(LocalTraining):
    """Rounds of `steps` batches, the last one shorter. A worker that had no samples in a round has not moved."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pulled = self.copy()  # The servers' weights w, as they came last.

    def step(self, samples: int) -> psgrad.Result | None:
        self.check()
        return self._passed(self.train(samples))

    def empty(self) -> psgrad.Result | None:
        return self._passed(0)

    def _passed(self, samples: int) -> psgrad.Result | None:
        self._open += 1
        self._samples += samples
        return self._exchange_weights() if self._open >= self.local.steps else None

    def settle(self) -> None:
        if self._open > 0:
            self._exchange_weights()

    def servers_weights(self) -> list[torch.Tensor]:
        return self._pulled

    def _round_ends(self, pushes: bool) -> None:
        self.progress.count_round(self._open, self.local.steps, pushes=pushes)

    def _exchange_weights(self) -> psgrad.Result | None:
        pushes = self._samples > 0 or self.client.empty_contributions
        self._round_ends(pushes)
        if not pushes:  # Nobody waits for it, and x has not moved.
            self._open = 0
            return None
        out = self.difference(1, self._pulled)
        samples, self._open = self._samples, 0
        result = self.push_pull(out, self.memory.weight_buffers, samples, difference=True)
        self._samples = 0
        self.memory.publish()
        self._pulled = self.copy()
        return result


@dataclass
class _Fragment:
    """A part of the model, and the versions that the servers' weights of it are of, as they came last."""

    tensors: list[int]
    version: int
    versions: list[int]
    samples: int = 0  # Since it was pushed last.


class AverageFragments(LocalTraining):
    """The model is averaged in fragments, one after the other, while the worker trains on.

    After every `steps` batches the servers' weights w of one are taken, whose difference was pushed `overlap` batches
    before; the worker's own become mix * x + (1 - mix) * w. What it pushes of this fragment next is their difference
    from w. To settle, all fragments are exchanged.
    Source: Douillard et al., Streaming DiLoCo with overlapping communication, 2025 (arXiv:2501.18512), algorithm 2.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.memory.collect()
        # w, by tensor of the layout. Of the fragment whose exchange is under way it is being written.
        self._servers = [weights.clone() for weights in self.memory.weights]
        progress = self.progress
        parts = self.local.fragments or [[entry.index for entry in self.pushed]]
        self._fragments = [_Fragment(list(part), progress.version, list(progress.versions)) for part in parts]
        self._trained = 0  # Batches so far,
        self._told = 0  # how many there were at the push that has ended last, and at the last one,
        self._pushed_at = 0
        self._settled = 0  # and when all fragments were exchanged last.
        self._counted = 0  # So many batches the rounds of `progress` count.
        self._passed = 0  # Samples since the last push.
        self._exchange: psgrad.Exchange | None = None
        self._result: psgrad.Result | None = None  # Its end, if that was waited for before its weights are taken.
        self._pushed: _Fragment | None = None  # Its weights are to be taken.
        self._pushed_samples = 0
        self._told_values = Telling(Hyperparameters())  # What the push tells of hyperparameters.

    def step(self, samples: int) -> psgrad.Result | None:
        self.check()
        return self._count(self.train(samples))

    def empty(self) -> psgrad.Result | None:
        return self._count(0)

    @property
    def open_batches(self) -> int:
        return self._trained - self._told

    @property
    def open_samples(self) -> int:
        under_way = self._pushed if self._exchange is not None else None
        return max(each.samples + (self._pushed_samples if each is under_way else 0) for each in self._fragments)

    @property
    def pushes_to_settle(self) -> int:
        if self._trained == self._settled:
            return 0
        return len(self._fragments) + (self._exchange is not None)

    def settle(self) -> None:
        if self._trained == self._settled:
            return
        self._take()
        for _ in self._fragments:
            self._push()
            self._take()
        self._settled, self._open = self._trained, 0

    def servers_weights(self) -> list[torch.Tensor]:
        # The round goes on to where the weights will be taken.
        self._end_exchange(self._trained - self._open + self.local.steps)
        return [self._servers[entry.index] for entry in self.pushed]

    def _count(self, samples: int) -> psgrad.Result | None:
        self._trained += 1
        self._open += 1
        self._passed += samples
        for fragment in self._fragments:
            fragment.samples += samples
        if self._open == self.local.steps - self.local.overlap:
            self._push()
        if self._open < self.local.steps:
            return None
        self._open = 0
        return self._take()

    @torch.no_grad()
    def _push(self) -> None:
        """The next fragment, unless there is nothing to push: nobody waits for it, and its x has not moved."""
        memory, progress = self.memory, self.progress
        fragment = self._fragments[progress.step % len(self._fragments)]
        self._pushed_at = self._trained
        if fragment.samples == 0 and not self.client.empty_contributions:
            return
        memory.collect()
        out: list[Any] = [None] * len(memory.entries)
        for index in fragment.tensors:
            torch.sub(memory.weights[index], self._servers[index], out=memory.gradients[index])
            out[index] = memory.gradient_buffers[index]
        samples, fragment.samples = fragment.samples, 0
        self._pushed_samples = samples
        passed, self._passed = self._passed + progress.jumped_over, 0
        progress.jumped_over = 0
        self._told_values = self.learning_rate.to_tell(self.client.lead)
        self._pushed = fragment
        self._exchange = self.client.begin(
            progress.step,
            out if samples > 0 else [None] * len(out),
            self._servers,
            version=fragment.version,
            versions=fragment.versions,
            samples=samples,
            passed=passed,
            learning_rate=self._told_values.learning_rate,
            skip_not_finite=True,
            difference=True,
            tensors=fragment.tensors,
        )

    def _round_ends(self, at: int, *, pushes: bool) -> None:
        """After so many batches of all."""
        batches, self._counted = at - self._counted, at
        self.progress.count_round(batches, self.local.steps, pushes=pushes)

    def _end_exchange(self, round_ends: int) -> None:
        """Waits for the weights of the fragment that is under way; x stays as it is."""
        if self._exchange is None:
            return
        assert self._pushed is not None
        self._round_ends(round_ends, pushes=True)
        exchange, self._exchange = self._exchange, None
        self._result = exchange.wait()
        self.learning_rate.was_told(self._told_values, self._result)
        self.progress.ended(self._result, self._servers)
        self._pushed.version, self._pushed.versions = self.progress.version, self.progress.versions
        self._told = self._pushed_at

    @torch.no_grad()
    def _take(self) -> psgrad.Result | None:
        if self._exchange is not None:
            self._end_exchange(self._trained)
        else:  # It has ended before, or there was nothing to push.
            self._round_ends(self._trained, pushes=False)
        if self._pushed is None:
            self._told = self._pushed_at
            return None
        fragment, self._pushed = self._pushed, None
        result, self._result = self._result, None
        assert result is not None
        if result.skipped:
            self._begin_anew()
            return result
        memory = self.memory
        memory.collect()
        for index in fragment.tensors:
            own, servers = memory.weights[index], self._servers[index]
            if self.local.mix == 0:
                own.copy_(servers)
            else:
                own.mul_(self.local.mix).add_(servers, alpha=1 - self.local.mix)
        memory.publish()
        return result

    @torch.no_grad()
    def _begin_anew(self) -> None:
        """A difference was not finite: what was trained of the other fragments with it is worth as little."""
        self.progress.pull(self._servers)
        self._put([self._servers[entry.index] for entry in self.pushed])
        for fragment in self._fragments:
            fragment.samples = 0
            fragment.version, fragment.versions = self.progress.version, self.progress.versions


class AverageGradients(AverageWeights):
    """Every `steps` batches the gradient is pushed instead of applied; every so many batches weights are averaged.

    Between two averagings of weights a worker's own x drift from the servers' w: x takes the worker's steps, w only the
    averaged gradients', which x takes as well. Samples are counted from one averaging of weights to the next.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if not self.local.average_every_steps:
            raise psgrad.Refused(
                "the servers average weights by epochs, whose length a torch worker does not know: start them with "
                "--average_every=N, in steps"
            )
        self._spare = [torch.empty_like(weights) for weights in self.memory.weights]  # For those that come next.
        self._batches = 0  # All that there were,
        self._averaged = 0  # and how many of them when weights were averaged last.

    def step(self, samples: int) -> psgrad.Result | None:
        self.check()
        self._count()
        if self._averages_gradients():
            samples = self._skip(samples, self.not_finite()) if self._overflowed else samples
            self._samples += samples
            return self._exchange_gradients(samples)
        self._samples += self.train(samples)
        return self._exchange_weights() if self._averages_weights() else None

    def empty(self) -> psgrad.Result | None:
        self._count()
        if self._averages_gradients():
            return self._exchange_gradients(0)
        return self._exchange_weights() if self._averages_weights() else None

    def settle(self) -> None:
        if self._batches > self._averaged:
            self._exchange_weights()

    def _round_ends(self, pushes: bool) -> None:
        pass  # Which batches are exchanged, their numbers say.

    def _count(self) -> None:
        self._batches += 1
        self._open += 1

    def _averages_weights(self) -> bool:
        """Whether the batch is one after which weights are averaged."""
        return self._batches % self.local.average_every_steps == 0

    def _averages_gradients(self) -> bool:
        every = self.local.steps
        return every > 0 and self._batches % every == 0 and not self._averages_weights()

    @torch.no_grad()
    def _exchange_gradients(self, samples: int) -> psgrad.Result:
        memory = self.memory
        memory.collect()
        result = self.push_pull(self.gradients(), self._spare, samples, difference=False)
        for entry, pulled in zip(self.pushed, self._pulled, strict=True):
            spare = self._spare[entry.index]
            memory.weights[entry.index].add_(spare - pulled)
            pulled.copy_(spare)
        memory.publish()
        self._open = 0
        return result

    def _exchange_weights(self) -> psgrad.Result | None:
        result = super()._exchange_weights()
        self._averaged = self._batches
        return result


class Elastic(LocalTraining):
    """After each round x and the servers' weights, the centre, draw each other.

    What a worker takes off its own weights is on its way to the centre while the worker goes on.
    Source: Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, 2015 (arXiv:1412.6651), algorithm 1.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._centre = [torch.empty_like(weights) for weights in self.memory.weights]  # As it came last.
        self._exchange: psgrad.Exchange | None = None
        self._pushed = 0  # Batches whose difference it carries.

    def step(self, samples: int) -> psgrad.Result | None:
        self.check()
        result = self._end_exchange()
        self._passed(self.train(samples))
        return result

    def empty(self) -> psgrad.Result | None:
        result = self._end_exchange()
        self._passed(0)
        return result

    def servers_weights(self) -> list[torch.Tensor]:
        self._end_exchange()
        self.progress.pull(self._centre)
        return [self._centre[entry.index] for entry in self.pushed]

    def _passed(self, samples: int) -> None:
        self._open += 1
        self._samples += samples
        if self._open >= self.local.steps:
            self._end_round()

    def settle(self) -> None:
        self._end_exchange()
        if self._open > 0:
            self._end_round()
            self._end_exchange()

    @property
    def open_batches(self) -> int:
        return self._open + self._pushed

    @torch.no_grad()
    def _end_round(self) -> None:
        samples, batches, self._samples, self._open = self._samples, self._open, 0, 0
        self.progress.count_round(batches, self.local.steps, pushes=samples > 0)
        if samples == 0:  # x has not moved, and this mode has no use for an empty contribution.
            return
        memory, progress = self.memory, self.progress
        progress.pull(self._centre)
        centre = [self._centre[entry.index] for entry in self.pushed]
        out = self.difference(self.local.alpha, centre)
        for entry, theirs in zip(self.pushed, centre, strict=True):
            if entry.kind == "buffer_lowest":  # The lowest rank's becomes the servers', and each keeps its own.
                torch.sub(memory.weights[entry.index], theirs, out=memory.gradients[entry.index])
        for entry in self.pushed:
            if not torch.isfinite(memory.gradients[entry.index]).all():
                raise FloatingPointError(f"step {progress.step}: {entry.name} is not finite any more on this worker")
        for entry in self.pushed:
            if entry.kind != "buffer_lowest":
                memory.weights[entry.index].sub_(memory.gradients[entry.index])
        memory.publish()
        self._exchange = self.client.begin(
            progress.step,
            out,
            None,
            version=progress.version,
            versions=progress.versions,
            samples=samples,
            passed=self.take_passed(samples),
            difference=True,
        )
        self._pushed = batches

    def _end_exchange(self) -> psgrad.Result | None:
        if self._exchange is None:
            return None
        exchange, self._exchange, self._pushed = self._exchange, None, 0
        result = exchange.wait()
        self.progress.ended(result, None)
        return result


_WAYS: dict[str, type[LocalTraining]] = {
    "average_weights": AverageWeights,
    "average_gradients": AverageGradients,
    "elastic": Elastic,
}


def local_steps(local: psgrad.LocalSteps, optimizer: torch.optim.Optimizer, *shared: Any) -> LocalTraining:
    """What the mode asks for. Refused if it needs what this worker does not know."""
    if local.exchange == "average_weights" and (local.fragments or local.overlap > 0 or local.mix > 0):
        return AverageFragments(local, optimizer, *shared)
    return _WAYS[local.exchange](local, optimizer, *shared)


def _values(gradient: torch.Tensor | None) -> torch.Tensor:
    """All that a gradient has, without the zeros of a sparse one."""
    assert gradient is not None
    return gradient.coalesce().values() if gradient.is_sparse else gradient
