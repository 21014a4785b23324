"""An exchange in progress: a push of gradients, a pull of weights, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psgrad import _core
from psgrad._generations import Generations
from psgrad._waiting import until


class Exchange:
    """An exchange in progress. No weight is written, and no server has the whole push, before the last ``ready``."""

    def __init__(
        self,
        core: _core.Exchange,
        client: _core.Client,
        generations: Generations,
        step: int,
        weights: _core.Tensors | None,
    ):
        """Of this client, which runs in the generation that is the newest now. Use ``Client.begin``."""
        self._core = core
        self._client = client
        self._generations = generations
        self._weights = weights
        self._went_back: _core.Result | None = None
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

    def wait_tensor(self, tensor: int, timeout: float | None = None) -> None:
        """Waits until this tensor's new weights are in place. TimeoutError after ``timeout`` seconds."""
        if self._went_back is not None:
            return
        try:
            until(
                lambda seconds: True if self._core.wait_tensor_for(tensor, seconds) else None,
                self._client,
                timeout,
                f"{self._where}: the weights of tensor {tensor}",
            )
        except _core.RolledBack:
            self._go_back()

    def wait(self, timeout: float | None = None) -> _core.Result:
        """Waits until the exchange has ended. TimeoutError after ``timeout`` seconds; then it goes on.

        If the job was rolled back meanwhile, the worker joins it again first, for which ``timeout`` does not count.
        """
        if self._went_back is not None:
            return self._went_back
        try:
            result = until(self._core.wait_for, self._client, timeout, f"{self._where}: the exchange")
        except _core.RolledBack:
            return self._go_back()
        self._generations.pushed(self._client, result)
        return result

    def _go_back(self) -> _core.Result:
        self._went_back = self._generations.go_back(self._client, self._weights)
        return self._went_back
