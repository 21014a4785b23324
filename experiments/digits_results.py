"""What the digits experiment found, and the figures that its page derives from it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .digits_runs import LINK, MEMORY, SAMPLES, WIDTHS, Curve, Digits, Filled, Reference, Timing, elements, reference

MODEL_BYTES = 4 * elements(WIDTHS)
# Of an iteration: two for each weight and sample forward, as many for the weights' gradients, and, but for the first
# layer, as many for the gradients that are handed on.
OPERATIONS = 2 * SAMPLES * (2 * WIDTHS[0] * WIDTHS[1] + 3 * WIDTHS[1] * WIDTHS[2])


@dataclass
class Results:
    """What was measured; a part that this machine could not run is empty."""

    digits: Digits
    curves: list[Curve] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    filled: Filled | None = None
    no_link: str = ""  # Why nothing was measured over links.
    numpy: Reference = field(default_factory=reference)
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def timing(self, place: str, workers: int) -> Timing | None:
        """None if it was not measured."""
        return next((one for one in self.timings if (one.place, one.workers) == (place, workers)), None)

    @property
    def speed_up(self) -> float | None:
        """Of two machines: one worker's iteration on one host over that of two on hosts of their own."""
        one, two = self.timing(MEMORY, 1), self.timing(LINK, 2)
        return one.median_ms("total") / two.median_ms("total") if one and two else None

    def deviation(self, curve: Curve) -> float:
        """The largest relative one of the curve's costs from NumPy's."""
        return max(abs(ours - theirs) / theirs for ours, theirs in zip(curve.cost, self.numpy.cost, strict=False))

    def accuracies(self, curve: Curve) -> list[tuple[int, float, float]]:
        """Steps, ours and NumPy's, at each number of steps that both have."""
        both = sorted(set(curve.accuracy) & set(self.numpy.accuracy))
        return [(steps, curve.accuracy[steps], self.numpy.accuracy[steps]) for steps in both]
