"""What the chief is told of the training, for whoever watches the job: each batch's loss, and where its time went."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch

import psgrad

_cuda: Any = torch.cuda  # In part without types.
_UNREAD_MAX = 8  # Losses that a card has not brought yet; older ones are left out.


class Reports:
    """Tells `psgrad.Client.report_step` of each batch, and never waits for a card."""

    def __init__(self, client: psgrad.Client) -> None:
        self._client = client
        self._loss: float | None = None  # Of the batch whose step comes next.
        self._unread: collections.deque[_OnItsWay] = collections.deque(maxlen=_UNREAD_MAX)

    def train_loss(self, loss: Any) -> None:
        """Of a batch. TypeError if it is no number."""
        if isinstance(loss, torch.Tensor) and loss.is_cuda:
            self._unread.append(_OnItsWay(loss))
        else:
            self._loss = _number("loss", loss)

    def step(self, step: int, samples: int, result: psgrad.Result | None, times: tuple[float, float, float]) -> None:
        """`times`: of the forward pass, the backward pass and step(), in seconds."""
        if self._unread and self._unread[0].is_there():
            self._loss = self._unread.popleft().value()
        loss, self._loss = self._loss, None
        forward_s, backward_s, step_s = times
        if result is None:  # Nothing was exchanged: step() is the worker's optimizer.
            self._client.report_step(samples, loss, step=step, forward_s=forward_s, backward_s=backward_s + step_s)
            return
        push_s, wait_s, pull_s = waited_for(result, step_s)
        self._client.report_step(
            samples,
            loss,
            step=step,
            forward_s=forward_s,
            backward_s=backward_s,
            push_s=push_s,
            wait_s=wait_s,
            pull_s=pull_s,
            other_s=max(0.0, step_s - push_s - wait_s - pull_s),
        )

    def evaluated(self, step: int, version: int, split: str, values: Mapping[str, Any]) -> None:
        told = {name: _number(name, values[name]) for name in ("loss", "accuracy") if name in values}
        if told:
            self._client.report_evaluation(split, **told, step=step, version=version)


def waited_for(result: psgrad.Result, step_s: float) -> tuple[float, float, float]:
    """What of an exchange step() waited for: sending, parked, receiving. What it did not wait for came first."""
    parts = [result.pull_s, result.wait_s, result.push_s]
    left = step_s
    for i, part in enumerate(parts):
        parts[i] = min(part, left)
        left -= parts[i]
    return parts[2], parts[1], parts[0]


class _OnItsWay:
    """A number that a card has computed, or is about to, and copies to the host."""

    def __init__(self, loss: torch.Tensor) -> None:
        if loss.numel() != 1:
            raise TypeError(f"loss={loss!r}: a number is expected")
        self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
        self._host.copy_(loss.detach().reshape(()), non_blocking=True)
        self._copied = _cuda.Event()
        self._copied.record(_cuda.current_stream(loss.device))

    def is_there(self) -> bool:
        return bool(self._copied.query())

    def value(self) -> float:
        return float(self._host)


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}={value!r}: a number is expected") from None
