"""The clock gap: by how many steps a worker is ahead of the slowest one. It is counted in versions, not by clocks."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field


@dataclass
class Steps:
    """What a worker did, in order: which step began on which version, and which of its steps a version contains."""

    begun: list[tuple[int, int]] = field(default_factory=list)  # (version read, step), both ascending.
    applied: list[tuple[int, int]] = field(default_factory=list)  # (version made, step), both ascending.

    def done_at(self, version: int) -> int | None:
        """How many steps the worker had behind it at `version`; None once nothing more is heard of it."""
        last = max((entries[-1][0] for entries in (self.begun, self.applied) if entries), default=-1)
        if version > last:
            return None
        begun = bisect_right(self.begun, (version, 1 << 62))
        applied = bisect_right(self.applied, (version, 1 << 62))
        return max(self.begun[begun - 1][1] if begun else 0, self.applied[applied - 1][1] + 1 if applied else 0)


def clock_gaps(workers: dict[int, Steps]) -> list[int]:
    """For each step of each worker: its number minus the steps that the slowest worker had behind it by then."""
    gaps = []
    for steps in workers.values():
        for version, step in steps.begun:
            others = [done for other in workers.values() if (done := other.done_at(version)) is not None]
            gaps.append(max(0, step - min([step, *others])))
    return gaps
