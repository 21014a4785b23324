"""Runs of one mode under one condition, taken together: what a table's row and a figure's line are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter

from experiments.compare.modes import family
from experiments.compare.prediction import predict
from experiments.compare.runs import REPORTED, Run
from experiments.compare.settings import CONDITIONS
from experiments.shared.intervals import Interval, Ratio, mean, paired_difference, paired_ratio

PYTORCH = "PyTorch"  # The name of its reference curve.
Value = str | Callable[[Run], "float | None"]  # An attribute of Run, or what is computed of one.


@dataclass(eq=False)
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
        return [run for run in self.runs if not run.done]

    @property
    def cpu_bound(self) -> bool:
        """Whether the times of any run may have been set by the processors."""
        return any(run.cpu_bound for run in self.runs)

    @property
    def is_compared(self) -> bool:
        return self.reference is not None and self.reference is not self

    @property
    def mean_predicted(self) -> float | None:
        return mean(list((self.predicted or {}).values()))

    def by_seed(self, value: Value) -> dict[int, float]:
        """A value of each run that is done and has it, by ascending seed."""
        read = attrgetter(value) if isinstance(value, str) else value
        return {run.seed: found for run in self.done if (found := read(run)) is not None}

    def values(self, value: Value) -> list[float]:
        return list(self.by_seed(value).values())

    def mean(self, value: Value) -> float | None:
        return mean(self.values(value))

    def reached(self, target: float, name: str) -> dict[int, float]:
        """`time_s`, or `samples`, by seed, of the runs that are done and got to that accuracy."""
        return self.by_seed(lambda run: run.reached(target, name))

    def pooled(self, values: Callable[[Run], list[int]]) -> list[int]:
        """The values of all runs, whatever became of them."""
        return [value for run in self.runs for value in values(run)]

    def difference(self, value: Value) -> Interval | None:
        """From the reference, paired by seed; None where there is none, or this is it."""
        return paired_difference(self.by_seed(value), self.reference.by_seed(value)) if self.is_compared else None

    def ratio(self, value: Value) -> Ratio | None:
        """Over the reference, paired by seed; None where there is none, or this is it."""
        return paired_ratio(self.by_seed(value), self.reference.by_seed(value)) if self.is_compared else None

    @property
    def accuracy_difference(self) -> Interval | None:
        return self.difference("accuracy_percent")

    @property
    def speed_ratio(self) -> Ratio | None:
        return self.ratio("samples_per_s")

    def time_ratio(self, target: float) -> Ratio | None:
        """Between the times to an accuracy; None unless every run of both reached it."""
        if any(len(group.reached(target, "time_s")) < len(group.runs) for group in (self, self.reference or self)):
            return None
        return self.ratio(lambda run: run.reached(target, "time_s"))


def did_not_end(count: int) -> str:
    """So many runs, as they should."""
    return "1 run did not end as it should" if count == 1 else f"{count} runs did not end as they should"


def reference_name(run: Run) -> str:
    """`reference_NxB-s1` is of the curve NxB."""
    return run.id.removeprefix("reference_").rsplit("-s", 1)[0]


@dataclass(eq=False)
class Comparison:
    runs: list[Run]
    groups: list[Group]  # kind "comparison", by condition, then in the order of the modes.
    staleness: list[Group]  # kind "staleness", by the enforced staleness, ascending.
    references: list[Group]  # kind "reference".

    @property
    def conditions(self) -> list[str]:
        return list(dict.fromkeys(group.condition for group in self.groups))

    @property
    def modes(self) -> list[str]:
        return list(dict.fromkeys(group.mode for group in self.groups))

    @property
    def reported(self) -> list[Run]:
        """All runs but those that searched for learning rates or measured the machine."""
        return [run for run in self.runs if run.kind in REPORTED]

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.reported})

    def under(self, condition: str) -> list[Group]:
        return [group for group in self.groups if group.condition == condition]

    def group(self, mode: str, condition: str) -> Group | None:
        return next((each for each in self.under(condition) if each.mode == mode), None)

    def reference(self, name: str) -> Group | None:
        return next((each for each in self.references if reference_name(each.runs[0]) == name), None)


def compare(runs: list[Run]) -> Comparison:
    """Groups the runs, and gives each group its reference and its predicted throughput."""
    kinds = {kind: [run for run in runs if run.kind == kind] for kind in REPORTED}
    groups = _grouped(kinds["comparison"], lambda run: (run.condition, run.mode))
    order = {condition: place for place, condition in enumerate(CONDITIONS)}
    groups.sort(key=lambda group: (order.get(group.condition, len(order)), group.condition))
    for group in groups:
        same = (each for each in groups if each.condition == group.condition and family(each.mode) == "bsp")
        group.reference = next(same, None)
        group.predicted = group.by_seed(lambda run: predict(run, runs))
    staleness = _grouped(kinds["staleness"], lambda run: run.staleness or 0)
    staleness.sort(key=lambda group: group.runs[0].staleness or 0)
    for group in staleness:
        group.reference = staleness[0] if not staleness[0].runs[0].staleness else None
    found = Comparison(runs, groups, staleness, _grouped(kinds["reference"], reference_name))
    for group in found.references:
        group.reference = found.reference("NxB")
    return found


def _grouped(runs: Iterable[Run], key: Callable[[Run], object]) -> list[Group]:
    found: dict[object, list[Run]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return [Group(each[0].mode, each[0].condition, sorted(each, key=lambda run: run.seed)) for each in found.values()]
