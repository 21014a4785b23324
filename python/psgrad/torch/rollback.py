"""What a worker says and does when the servers went back to a checkpoint."""

from __future__ import annotations

import logging

log = logging.getLogger("psgrad")


class Rollbacks:
    """Where the job went back to, and whether the training loop goes back there, too."""

    def __init__(self) -> None:
        self.data_rewinds = False  # psgrad.data.Batches feeds the loop.
        self.to: int | None = None  # The step that the last call went back to.
        self._said = False

    def tell(self, at: int, to: int) -> None:
        """Notes it. A plain loop is told once that what it makes is not what it would have been."""
        self.to = to
        if self.data_rewinds:
            log.warning("step %d: went back to step %d, and so do the batches", at, to)
            return
        log.warning("step %d: went back to step %d, and goes on with the loop's next batch", at, to)
        if not self._said:
            self._said = True
            log.warning(
                "the result is not exactly that of a run without the rollback: the batches of the steps that were lost "
                "are not trained again. psgrad.data.Batches goes back by itself; another loop can look at "
                "opt.rolled_back_to after each step()"
            )
