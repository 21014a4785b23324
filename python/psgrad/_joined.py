"""What a worker has joined: its place in the job, and what the job asks of it."""

from __future__ import annotations

from psgrad import _core
from psgrad._generations import Generations


class Joined:
    """As the generation of the job says that runs now."""

    def __init__(self, generations: Generations):
        self._generations = generations

    @property
    def _running(self) -> _core.Client:
        return self._generations.core

    @property
    def rank(self) -> int:
        """Of this worker, from 0."""
        return self._running.rank

    @property
    def num_workers(self) -> int:
        """Of the job."""
        return self._running.num_workers

    @property
    def num_shards(self) -> int:
        """Servers that the model is spread over."""
        return self._running.num_shards

    @property
    def incarnation(self) -> int:
        """Grows whenever the rank is handed out again."""
        return self._running.incarnation

    @property
    def generation(self) -> int:
        """Of the job's servers."""
        return self._running.generation

    @property
    def server_timeout(self) -> float:
        """For so many seconds a server that died is waited for; 0: the job keeps no checkpoints to go back to."""
        return self._running.server_timeout

    @property
    def resized(self) -> tuple[int, int]:
        """Unless both are 0, a checkpoint was restored with another number of workers: at this step, when these many
        samples had been used. Batches of a fixed share are counted from there.
        """
        return self._running.resized

    @property
    def rolled_back_to(self) -> int | None:
        """The step that the job was rolled back to, until the next push has ended; None: it was not."""
        return self._generations.rolled_back_to

    @property
    def next_step(self) -> int:
        """That this worker is to make, as the last exchange or rollback named it."""
        return self._generations.next_step

    @property
    def rollbacks(self) -> int:
        """How often the job was rolled back since this worker joined it."""
        return self._generations.rollbacks

    @property
    def name(self) -> str:
        """Under which the worker has joined."""
        return self._running.name

    @property
    def mode(self) -> str:
        """bsp, asp, ssp, backup, local_sgd or easgd."""
        return self._running.mode

    @property
    def synchronous(self) -> bool:
        """A version is made of one step of all workers: version and step advance together."""
        return self._running.synchronous

    @property
    def exact_versions(self) -> bool:
        """A push_pull of step v brings version v + 1, however often it is asked; else the newest."""
        return self._running.exact_versions

    @property
    def empty_contributions(self) -> bool:
        """A worker without samples in a step pushes an empty contribution; else it pushes nothing."""
        return self._running.empty_contributions

    @property
    def local_steps(self) -> _core.LocalSteps | None:
        """Set in modes in which workers take optimizer steps by themselves (local_sgd, easgd)."""
        return self._running.local_steps

    @property
    def start_step(self) -> int:
        """The first step of this worker, in this generation of the job."""
        return self._running.start_step

    @property
    def lead(self) -> bool:
        """This worker is the lowest live rank, which evaluates and saves."""
        return self._running.lead

    @property
    def replaced(self) -> str:
        """The live worker whose rank this one took, as "NAME on HOST"; else empty."""
        return self._running.replaced

    @property
    def hands_out_runs(self) -> bool:
        """The servers run with --budget=job: workers take runs of samples from the chief (``take_run``)."""
        return self._running.hands_out_runs
