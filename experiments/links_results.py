"""What the links experiment found, and the figures that its page derives from it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .links_runs import FREE, Outcome, models_carried
from .links_systems import SYSTEMS, Network, System, by_name

ALIKE_BATCHES = 4  # So many are compared between all systems: the slowest makes no more in its shortest run.


@dataclass
class Results:
    """Outcomes by rate and system."""

    of: Network
    outcomes: dict[int | None, dict[str, Outcome]]
    streams: dict[int, float]  # By rate, bytes per second of a plain TCP connection.
    no_mpi: str  # Why there are no ranks; empty if there are.
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    @property
    def rates(self) -> list[int]:
        """That links have, ascending."""
        return sorted(rate for rate in self.outcomes if rate is not FREE)

    @property
    def slowest(self) -> int:
        """Where links matter most."""
        return self.rates[0]

    @property
    def longest(self) -> int:
        """The rate of the runs with most batches, in which beginning and end weigh least."""
        return self.rates[-1]

    def of_system(self, rate: int | None, name: str) -> Outcome | None:
        """None if it was not measured."""
        return self.outcomes.get(rate, {}).get(name)

    def measured(self) -> list[System]:
        """All that were."""
        return [system for system in SYSTEMS if system.name in self.outcomes[self.longest]]

    def in_models(self, rate: int, name: str) -> float | None:
        """A batch's time, in that which the model takes over a link: payload alone."""
        outcome = self.of_system(rate, name)
        return None if outcome is None else outcome.batch_s / (self.of.model_bytes * 8 / (rate * 1e6))

    def carried(self, name: str) -> float | None:
        """Models over the fullest link, one way, for each batch."""
        outcome = self.of_system(self.longest, name)
        return None if outcome is None else models_carried(outcome, self.of)

    def best_mpi(self, rate: int) -> str | None:
        """The fastest of the ways to sum with MPI."""
        found = {name: one.batch_s for name, one in self.outcomes[rate].items() if by_name(name).is_mpi}
        return min(found, key=found.__getitem__) if found else None

    def deviation(self, name: str) -> float | None:
        """The largest relative one of its first batches' losses from those of bsp with one server."""
        ours, theirs = self.of_system(self.longest, "bsp-1"), self.of_system(self.longest, name)
        if ours is None or theirs is None:
            return None
        pairs = list(zip(ours.losses, theirs.losses, strict=False))[:ALIKE_BATCHES]
        return max(abs(one - other) / one for one, other in pairs)

    def bsp_hashes(self) -> set[str]:
        """Of the weights after the longest runs."""
        found = self.outcomes[self.longest]
        return {found[name].weights_hash for name in ("bsp-1", "bsp-4", "bsp-4-colocated")}
