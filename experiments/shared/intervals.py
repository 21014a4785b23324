"""Means, their spread over seeds, and differences paired by seed with a 95 % interval of Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from scipy import stats

Values = Sequence[float] | pd.Series
BySeed = Mapping[int, float] | pd.Series


def mean(values: Values) -> float | None:
    return statistics.fmean(values) if len(values) else None


def deviation(values: Values) -> float | None:
    """The sample standard deviation (n - 1); None of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def percentile(values: Values, share: float) -> float | None:
    """Nearest rank: a value that occurred."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if len(values) else None


@dataclass(frozen=True)
class Interval:
    """A mean with the half width of its 95 % interval, which one value alone does not have."""

    mean: float
    half: float | None
    count: int

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half

    def excludes(self, value: float) -> bool:
        """Whether a statement that the truth is not `value` is allowed."""
        return self.half is not None and abs(self.mean - value) > self.half

    def text(self, digits: int = 2, sign: str = "") -> str:
        """With half of its interval, if it has one."""
        half = "" if self.half is None else f" ± {self.half:.{digits}f}"
        return f"{self.mean:{sign}.{digits}f}{half}"


def interval(values: Values) -> Interval | None:
    """The mean of the values with its 95 % interval; None of nothing."""
    if not len(values):
        return None
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)) if len(values) > 1 else None
    return Interval(statistics.fmean(values), half, len(values))


def paired_difference(values: BySeed, reference: BySeed) -> Interval | None:
    """`values` minus `reference`, both by seed, over the seeds that both have; None if they share none."""
    return interval((pd.Series(values, dtype=float) - pd.Series(reference, dtype=float)).dropna())


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

    @property
    def range(self) -> str:
        """The interval; empty if there is none."""
        return "" if self.low is None else f"{self.low:.2f} to {self.high:.2f}"

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f" ({self.range})" if self.range else "")


def paired_ratio(values: BySeed, reference: BySeed) -> Ratio | None:
    """`values` over `reference`, both positive and by seed, over the seeds that both have; None if they share none."""
    each = (pd.Series(one, dtype=float) for one in (values, reference))
    logs = paired_difference(*(one[one > 0].map(math.log) for one in each))
    if logs is None:
        return None
    ends = [None if end is None else math.exp(min(end, 700.0)) for end in (logs.low, logs.high)]
    return Ratio(math.exp(logs.mean), *ends, logs.count)


def spread_text(values: Values, digits: int = 2) -> str:
    """The mean and half of its 95 % interval, or the one value that there is."""
    found = interval(values)
    return "—" if found is None else found.text(digits)
