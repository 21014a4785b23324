"""Means, their spread over seeds, and differences paired by seed with a 95 % interval of Student's t."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The 97.5 % quantile of Student's t for 1 to 30 degrees of freedom; beyond, that of the normal distribution.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL_975 = 1.960


def t_975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t."""
    if degrees < 1:
        raise ValueError("Student's t needs at least one degree of freedom")
    return _T_975[degrees - 1] if degrees <= len(_T_975) else _NORMAL_975


def mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation (n - 1); None of fewer than two values."""
    if len(values) < 2:
        return None
    centre = sum(values) / len(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank: a value that occurred."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class Interval:
    """A mean with the half width of its 95 % interval, which one value alone does not have."""

    mean: float
    half: float | None
    count: int

    @property
    def low(self) -> float | None:
        """The interval's lower end."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """The interval's upper end."""
        return None if self.half is None else self.mean + self.half

    def excludes(self, value: float) -> bool:
        """Whether a statement that the truth is not `value` is allowed."""
        return self.half is not None and abs(self.mean - value) > self.half


def interval(values: Sequence[float]) -> Interval | None:
    """The mean of the values with its 95 % interval; None of nothing."""
    if not values:
        return None
    centre = sum(values) / len(values)
    spread = deviation(values)
    half = None if spread is None else t_975(len(values) - 1) * spread / math.sqrt(len(values))
    return Interval(centre, half, len(values))


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval | None:
    """`values` minus `reference`, both by seed, over the seeds that both have; None if they share none."""
    seeds = sorted(set(values) & set(reference))
    return interval([values[seed] - reference[seed] for seed in seeds])


@dataclass(frozen=True)
class Ratio:
    """A geometric mean of ratios, with its 95 % interval."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def differs(self) -> bool:
        """Whether a statement that the truth is not 1 is allowed."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def paired_ratio(values: Mapping[int, float], reference: Mapping[int, float]) -> Ratio | None:
    """`values` over `reference`, both positive and by seed, over the seeds that both have; None if they share none."""
    logs = paired_difference(
        {seed: math.log(value) for seed, value in values.items() if value > 0},
        {seed: math.log(value) for seed, value in reference.items() if value > 0},
    )
    if logs is None:
        return None
    if logs.low is None or logs.high is None:
        return Ratio(math.exp(logs.mean), None, None, logs.count)
    return Ratio(math.exp(logs.mean), _exp(logs.low), _exp(logs.high), logs.count)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
