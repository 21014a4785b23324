"""Modes in which the worker takes optimizer steps by itself, on weights of its own, between two exchanges.

In place of gradients, differences of weights are exchanged. Each way is a class.
"""

from __future__ import annotations

from typing import Any

import torch

import psgrad
from psgrad.torch._local_training import LocalTraining
from psgrad.torch.groups import LearningRate
from psgrad.torch.memory import Memory
from psgrad.torch.progress import Progress
from psgrad.torch.steps import Unused


class AverageWeights(LocalTraining):
    """Rounds of `steps` batches, the last one shorter. A worker that had no samples in a round has not moved."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pulled = self.copy()  # The servers' weights as the round began.
        self._batches = 0  # Of the round so far.
        self._samples = 0  # Likewise.

    def step(self, samples: int) -> psgrad.Result | None:
        self.check()
        return self._passed(self.train(samples))

    def empty(self) -> psgrad.Result | None:
        return self._passed(0)

    def _passed(self, samples: int) -> psgrad.Result | None:
        self._batches += 1
        self._samples += samples
        return self._end_round() if self._batches >= self.local.steps else None

    def settle(self) -> None:
        if self._batches > 0:
            self._end_round()

    @property
    def open_batches(self) -> int:
        return self._batches

    def _end_round(self) -> psgrad.Result:
        out = self.difference(1, self._pulled)
        samples, self._samples, self._batches = self._samples, 0, 0
        result = self.push_pull(out, self.memory.weight_buffers, samples, difference=True)
        self.memory.publish()
        self._pulled = self.copy()
        return result


class AverageGradients(LocalTraining):
    """Every `steps` batches the gradient is pushed instead of applied; every so many batches weights are averaged.

    Between two averagings of weights a worker's own x drift from the servers' w: x takes the worker's steps, w only the
    averaged gradients', which x takes as well.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not self.local.average_every_steps:
            raise psgrad.Refused(
                "the servers average weights by epochs, whose length a torch worker does not know: start them with "
                "--average_every=N, in steps"
            )
        self._pulled = self.copy()  # The servers' weights w as they came last.
        self._open = 0  # Batches since the last exchange of either kind,
        self._moved = False  # and whether there were any since the last averaging of weights.
        memory = self.memory
        self._spare = [torch.empty_like(weights) for weights in memory.weights]  # For those that come next.
        self._batches = 0
        self._samples = 0  # Since the last averaging of weights.

    def step(self, samples: int) -> psgrad.Result | None:
        self.check()
        self._batches += 1
        self._open += 1
        self._moved = True
        if self.local.steps and self._batches % self.local.steps == 0 and not self._averages():
            self._samples += samples
            return self._exchange_gradients(samples)
        self._samples += self.train(samples)
        return self._exchange_weights() if self._averages() else None

    def empty(self) -> psgrad.Result | None:
        self._batches += 1
        self._open += 1
        self._moved = True
        if self._averages():
            return self._exchange_weights()
        if self.local.steps and self._batches % self.local.steps == 0:
            return self._exchange_gradients(0)
        return None

    def _averages(self) -> bool:
        """Whether the batch is one after which weights are averaged."""
        return bool(self._batches % self.local.average_every_steps == 0)

    def settle(self) -> None:
        if self._moved:
            self._exchange_weights()

    @property
    def open_batches(self) -> int:
        return self._open

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

    def _exchange_weights(self) -> psgrad.Result:
        out = self.difference(1, self._pulled)
        samples, self._samples = self._samples, 0
        result = self.push_pull(out, self.memory.weight_buffers, samples, difference=True)
        self.memory.publish()
        self._pulled = self.copy()
        self._open = 0
        self._moved = False
        return result


class Elastic(LocalTraining):
    """After each round x and the servers' weights, the centre, draw each other.

    What a worker takes off its own weights is on its way to the centre while the worker goes on.
    Source: Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, 2015 (arXiv:1412.6651), algorithm 1.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._centre = [torch.empty_like(weights) for weights in self.memory.weights]  # As it came last.
        self._batches = 0  # Of the round so far.
        self._samples = 0  # Likewise.
        self._exchange: psgrad.Exchange | None = None
        self._pushed = 0  # Batches that it is of.

    def step(self, samples: int) -> psgrad.Result | None:
        self.check()
        result = self._end_exchange()
        self._passed(self.train(samples))
        return result

    def empty(self) -> psgrad.Result | None:
        result = self._end_exchange()
        self._passed(0)
        return result

    def _passed(self, samples: int) -> None:
        self._batches += 1
        self._samples += samples
        if self._batches >= self.local.steps:
            self._end_round()

    def settle(self) -> None:
        self._end_exchange()
        if self._batches > 0:
            self._end_round()
            self._end_exchange()

    @property
    def open_batches(self) -> int:
        return self._batches + self._pushed

    @torch.no_grad()
    def _end_round(self) -> None:
        samples, batches = self._samples, self._batches
        self._samples = self._batches = 0
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


def local_steps(
    client: psgrad.Client,
    memory: Memory,
    progress: Progress,
    optimizer: torch.optim.Optimizer,
    learning_rate: LearningRate,
    unused: Unused,
) -> AverageWeights | AverageGradients | Elastic:
    """What the mode asks for. Refused if it needs what this worker does not know."""
    assert client.local_steps is not None
    ways: dict[str, type[AverageWeights] | type[AverageGradients] | type[Elastic]] = {
        "average_weights": AverageWeights,
        "average_gradients": AverageGradients,
        "elastic": Elastic,
    }
    return ways[client.local_steps.exchange](client, memory, progress, optimizer, learning_rate, unused)
