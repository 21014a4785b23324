"""Where a worker is: its next step, and the version that its weights are of."""

from __future__ import annotations

from typing import Any

import psgrad

# Of a worker that catches up: however fast the others are, one of so many pulls falls between two of their steps.
_PULLS_MAX = 100


class WentBack(Exception):
    """The servers went back to a checkpoint, and the client has joined again: the step under way is gone."""


class Progress:
    def __init__(self, client: psgrad.Client, started: psgrad.Result) -> None:
        """After Client.start, which brought this."""
        self._client = client
        self._rollbacks = client.rollbacks
        # Others may have gone on between this worker's join and its start.
        self.step = max(client.start_step, started.version) if client.synchronous else client.start_step
        self.version = started.version
        self.versions: list[int] = list(started.versions)
        self.learning_rate_factor = started.learning_rate_factor  # Of the servers' schedule, where the worker steps.
        self.jumped_over = 0  # Samples that others have trained in this worker's place, not told yet.
        self.skipped = 0  # Steps or batches whose gradient was not finite.
        self.dropped = 0  # Pushes that a server refused, as too old.

    def ended(self, result: psgrad.Result, pulled_to: list[Any] | None) -> None:
        """A push has ended; its weights, if it brought any, are in `pulled_to`. WentBack if it did not end as one."""
        self._check_rollback()
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

    def _check_rollback(self) -> None:
        if self._client.rollbacks != self._rollbacks:
            self._rollbacks = self._client.rollbacks
            self.step = self._client.next_step
            self.jumped_over = 0
            raise WentBack

    def _brought(self, result: psgrad.Result) -> None:
        self._check_rollback()
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
