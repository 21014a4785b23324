"""How far two curves that should be one are apart: bsp, one worker with its batches together, and plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from records import Mark
from summary import PYTORCH, Comparison, Group

WHY = (
    "NxB and PyTorch begin with equal weights and see equal batches. So does bsp, where no worker asks for a batch a "
    "whole step late, but that it fills the version at an epoch's end with batches of the next epoch where N·B does "
    "not divide the samples. At first they differ by rounding alone. Training amplifies that: an input of a ReLU "
    "that is once on the other side of 0 is enough."
)


@dataclass(frozen=True)
class Gap:
    """Absolute differences of two marks, or the largest of several; accuracy in points."""

    accuracy: float | None
    loss: float | None

    def __str__(self) -> str:
        parts = [] if self.accuracy is None else [f"{self.accuracy:.2f} points of accuracy"]
        parts += [] if self.loss is None else [f"{self.loss:.2g} of loss"]
        return " and ".join(parts)


def _gap(pairs: list[tuple[Mark, Mark]]) -> Gap:
    accuracies = [
        100 * abs(a.accuracy - b.accuracy) for a, b in pairs if a.accuracy is not None and b.accuracy is not None
    ]
    losses = [abs(a.loss - b.loss) for a, b in pairs if a.loss is not None and b.loss is not None]
    return Gap(max(accuracies, default=None), max(losses, default=None))


def _pairs(group: Group, other: Group) -> list[list[tuple[Mark, Mark]]]:
    """The marks of both after the same number of samples, or within a batch of it, for each seed that both have."""
    found = []
    runs = {run.seed: run for run in other.done}
    for run in group.done:
        if run.seed in runs:
            batch = max(each.batch_size * each.workers for each in (run, runs[run.seed]))
            marks = zip(run.marks, runs[run.seed].marks, strict=False)
            found.append([(a, b) for a, b in marks if abs(a.samples - b.samples) < batch])
    return [pairs for pairs in found if pairs]


def sentence(group: Group, name: str, other: Group, other_name: str) -> str:
    """How far they are apart; empty if they share no marks."""
    seeds = _pairs(group, other)
    if not seeds:
        return ""
    largest, first = _gap([pair for pairs in seeds for pair in pairs]), _gap([pairs[0] for pairs in seeds])
    if not str(largest):
        return ""
    count = f"{len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}"
    marks = sum(map(len, seeds))
    return (
        f"{name} and {other_name}: at most {largest} apart, at {marks} marks of {count}; at the first mark, after "
        f"{seeds[0][0][0].samples} samples, {first}."
    )


def sentences(comparison: Comparison) -> list[str]:
    """For each pair of the three that ran."""
    curves = [(f"bsp with {bsp.runs[0].workers} workers", bsp) for bsp in [comparison.group("bsp", "even")] if bsp]
    for name in ("NxB", PYTORCH):
        if (group := comparison.reference(name)) is not None:
            curves.append((name, group))
    found = [
        sentence(group, name, other, other_name)
        for place, (other_name, other) in enumerate(curves)
        for name, group in curves[place + 1 :]
    ]
    return [each for each in found if each]
