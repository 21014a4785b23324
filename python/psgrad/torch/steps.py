"""What a worker makes of its batches: gradients for the servers, or steps of its own (local.py)."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Protocol

import psgrad
from psgrad.torch.memory import Memory
from psgrad.torch.progress import Progress
from psgrad.torch.sending import Sender
from psgrad.torch.tensors import Entry, shortened

log = logging.getLogger("psgrad")


class Steps(Protocol):
    """One of these drives the exchanges; used by the thread that trains."""

    def step(self, samples: int) -> psgrad.Result | None:
        """The batch's gradients are in `.grad`, or have been sent. None: no exchange belongs to this step."""

    def empty(self) -> psgrad.Result | None:
        """A step without samples; what was sent of it, if anything, does not count."""

    def settle(self) -> None:
        """No batch follows, or none yet: what was trained is exchanged, and no exchange is under way."""

    @property
    def open_batches(self) -> int:
        """Steps that no exchange which has ended has been told of."""

    def no_sync(self) -> AbstractContextManager[None]: ...

    @property
    def began(self) -> float:
        """When the last step's first gradient was sent; 0 where none is sent in backward. time.monotonic()."""

    def close(self, why: str) -> None: ...

    def give_up(self) -> None: ...

    def remove_hooks(self) -> None: ...


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


class PushGradients:
    """Each batch gives a gradient, which is pushed, and the next one is computed on the weights that come back."""

    def __init__(
        self, client: psgrad.Client, memory: Memory, progress: Progress, sender: Sender, unused: Unused
    ) -> None:
        self._client = client
        self._memory = memory
        self._progress = progress
        self._sender = sender
        self._unused = unused

    def step(self, samples: int) -> psgrad.Result:
        sender = self._sender
        if not sender.ran():
            raise RuntimeError(
                f"step {self._progress.step}: step() without a backward() since the last one: there is nothing to "
                "send. A worker without samples in this step calls opt.empty_step()"
            )
        self._memory.check_bound()
        self._memory.check_unwritten(self._progress.step)
        sender.check_unchanged()
        self._unused.check(sender.unused(), self._progress.step)
        return self._took(sender.complete(samples))

    def empty(self) -> psgrad.Result | None:
        dropped = self._sender.drop()
        if dropped is not None:
            return self._took(dropped)
        client, progress, memory = self._client, self._progress, self._memory
        if not client.empty_contributions:
            progress.pull(memory.weight_buffers)
            memory.publish()
            return None
        nothing = [None] * len(memory.entries)
        return self._took(
            client.push_pull(
                progress.step,
                nothing,
                memory.weight_buffers,
                version=progress.version,
                versions=progress.versions,
                samples=0,
            )
        )

    def settle(self) -> None:
        dropped = self._sender.drop()
        if dropped is not None:
            log.warning("step %d: the last backward() had no step(): it does not count", self._progress.step)
            self._took(dropped)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._sender.no_sync()

    @property
    def open_batches(self) -> int:
        return 0  # No exchange outlasts a step.

    @property
    def began(self) -> float:
        return self._sender.began

    def close(self, why: str) -> None:
        self._sender.close(why)

    def give_up(self) -> None:
        self._sender.give_up()

    def remove_hooks(self) -> None:
        self._sender.remove_hooks()

    def _took(self, result: psgrad.Result) -> psgrad.Result:
        self._progress.ended(result, self._memory.weight_buffers)
        self._memory.publish()
        return result
