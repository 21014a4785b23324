"""Runs of one mode under one condition, taken together: what a table's row and a figure's line are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prediction import predict
from records import Mark, Run
from spread import Interval, Ratio, mean, paired_difference, paired_ratio

CONDITIONS = ("even", "straggler", "transient")
REFERENCE_MODES = ("bsp", "sync")
PYTORCH = "PyTorch"  # The name of its reference curve.


@dataclass
class Group:
    """All runs of one mode under one condition (or of one enforced staleness, or one reference curve)."""

    mode: str
    condition: str
    runs: list[Run]
    reference: Group | None = None  # bsp under the same condition; staleness 0; the reference curve NxB.
    predicted: dict[int, float] | None = None  # Samples/s by seed.

    @property
    def done(self) -> list[Run]:
        """The runs that ended as they should. Every mean is of these, and says so where others are missing."""
        return [run for run in self.runs if run.done]

    @property
    def lost(self) -> list[Run]:
        """The runs that did not."""
        return [run for run in self.runs if not run.done]

    @property
    def cpu_bound(self) -> bool:
        """Whether the times of any run may have been set by the processors."""
        return any(run.cpu_bound for run in self.runs)

    def by_seed(self, value: Callable[[Run], float | None]) -> dict[int, float]:
        """A value of each run that is done and has it."""
        return {run.seed: found for run in self.done if (found := value(run)) is not None}

    def values(self, value: Callable[[Run], float | None]) -> list[float]:
        """As by_seed, by ascending seed."""
        found = self.by_seed(value)
        return [found[seed] for seed in sorted(found)]

    def mean(self, value: Callable[[Run], float | None]) -> float | None:
        """The mean over the runs that are done."""
        return mean(self.values(value))

    def reached(self, target: float) -> list[Mark]:
        """For the runs that are done and got there: the first evaluation at or above that accuracy."""
        return [mark for run in self.done if (mark := run.reached(target)) is not None]

    def pooled(self, values: Callable[[Run], list[int]]) -> list[int]:
        """The values of all runs, whatever became of them."""
        return [value for run in self.runs for value in values(run)]

    def difference(self, value: Callable[[Run], float | None]) -> Interval | None:
        """From the reference, paired by seed; None where there is none, or this is it."""
        if self.reference is None or self.reference is self:
            return None
        return paired_difference(self.by_seed(value), self.reference.by_seed(value))

    def ratio(self, value: Callable[[Run], float | None]) -> Ratio | None:
        """Over the reference, paired by seed; None where there is none, or this is it."""
        if self.reference is None or self.reference is self:
            return None
        return paired_ratio(self.by_seed(value), self.reference.by_seed(value))

    @property
    def accuracy_difference(self) -> Interval | None:
        """Of the final test accuracy, in percentage points."""
        return self.difference(accuracy_percent)

    @property
    def speed_ratio(self) -> Ratio | None:
        """Of the samples applied per second."""
        return self.ratio(lambda run: run.samples_per_s)

    def time_ratio(self, target: float) -> Ratio | None:
        """Of the time to an accuracy; None unless every run of both reached it."""
        groups = [self, self.reference or self]
        if any(len(group.reached(target)) < len(group.runs) for group in groups):
            return None
        return self.ratio(lambda run: mark.time_s if (mark := run.reached(target)) else None)


def did_not_end(count: int) -> str:
    """So many runs, as they should."""
    return "1 run did not end as it should" if count == 1 else f"{count} runs did not end as they should"


def accuracy_percent(run: Run) -> float | None:
    """Final test accuracy, in percent."""
    return None if run.final_accuracy is None else 100 * run.final_accuracy


def wait_percent(run: Run) -> float | None:
    """Share of all workers' time that they waited."""
    return 100 * run.shares["wait"] if run.shares else None


@dataclass
class Comparison:
    """All runs, grouped."""

    runs: list[Run]
    groups: list[Group]  # kind "comparison", by condition, then in the order of the modes.
    staleness: list[Group]  # kind "staleness", by the enforced staleness, ascending.
    references: list[Group]  # kind "reference".

    @property
    def conditions(self) -> list[str]:
        """Those that ran, in a fixed order."""
        found = {group.condition for group in self.groups}
        return [each for each in CONDITIONS if each in found] + sorted(found - set(CONDITIONS))

    @property
    def modes(self) -> list[str]:
        """Those that ran, in the order of their first run."""
        return list(dict.fromkeys(group.mode for group in self.groups))

    @property
    def seeds(self) -> list[int]:
        """Those of the reported runs."""
        return sorted({run.seed for run in self.reported})

    @property
    def reported(self) -> list[Run]:
        """All runs but those that searched for learning rates or measured the machine."""
        return [run for run in self.runs if run.kind in ("comparison", "staleness", "reference")]

    def under(self, condition: str) -> list[Group]:
        """The groups of one condition."""
        return [group for group in self.groups if group.condition == condition]

    def group(self, mode: str, condition: str) -> Group | None:
        """One group, if it ran."""
        return next((each for each in self.under(condition) if each.mode == mode), None)

    def reference(self, name: str) -> Group | None:
        """One reference curve, if it ran."""
        return next((each for each in self.references if reference_name(each.runs[0]) == name), None)


def compare(runs: list[Run]) -> Comparison:
    """Groups the runs, and gives each group its reference and its predicted throughput."""
    groups = _grouped([run for run in runs if run.kind == "comparison"], lambda run: (run.condition, run.mode))
    for group in groups:
        group.reference = next(
            (each for each in groups if each.mode in REFERENCE_MODES and each.condition == group.condition), None
        )
        predictions = {run.seed: predict(run, runs) for run in group.done}
        group.predicted = {seed: value for seed, value in predictions.items() if value is not None}
    staleness = _grouped([run for run in runs if run.kind == "staleness"], lambda run: (run.staleness or 0,))
    staleness.sort(key=lambda group: group.runs[0].staleness or 0)
    for group in staleness:
        group.reference = staleness[0] if staleness[0].runs[0].staleness in (0, None) else None
    references = _grouped([run for run in runs if run.kind == "reference"], lambda run: (reference_name(run),))
    order = {condition: place for place, condition in enumerate(CONDITIONS)}
    groups.sort(key=lambda group: (order.get(group.condition, len(order)), group.condition))
    found = Comparison(runs, groups, staleness, references)
    for group in references:
        group.reference = found.reference("NxB")
    return found


def reference_name(run: Run) -> str:
    """`reference_NxB-s1` is of the curve NxB."""
    return run.id.removeprefix("reference_").rsplit("-s", 1)[0]


def _grouped(runs: list[Run], key: Callable[[Run], tuple[object, ...]]) -> list[Group]:
    found: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return [Group(each[0].mode, each[0].condition, sorted(each, key=lambda run: run.seed)) for each in found.values()]
