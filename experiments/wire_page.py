"""The table, the claims and the plot of the wire experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from figures import Figure
from spread import interval, mean, paired_difference

from .page import SERIES, Claim, Table, figure
from .wire_runs import FORMS, RATES, WHOLE, Outcome

ACCURACY = "Test accuracy, %"


def of(outcomes: Sequence[Outcome], form: str, mode: str) -> Outcome:
    """The one of this form and mode."""
    return next(one for one in outcomes if (one.form.name, one.mode) == (form, mode))


def points(one: Outcome, outcomes: Sequence[Outcome]) -> tuple[float, float | None]:
    """From float32's accuracy with the same seeds: the mean, and half of its 95 % interval."""
    found = paired_difference(one.accuracy, of(outcomes, WHOLE, one.mode).accuracy)
    assert found is not None  # Both have the same seeds.
    return 100 * found.mean, None if found.half is None else 100 * found.half


def _text(value: float, half: float | None, sign: str = "") -> str:
    return f"{value:{sign}.2f}".replace("-", "−") + ("" if half is None else f" ± {half:.2f}")


def accuracy(outcomes: Sequence[Outcome]) -> Table:
    """A row for each form, and for each mode its accuracy, and how far that is from float32's."""
    table = Table(
        ACCURACY, ["sent as", *(column for mode in RATES for column in (mode, f"{mode}, points from float32"))]
    )
    for form in FORMS:
        row = [form.name]
        for mode in RATES:
            one = of(outcomes, form.name, mode)
            found = interval([100 * value for value in one.accuracy.values()])
            assert found is not None  # Each has a seed.
            row.append(_text(found.mean, found.half))
            row.append("—" if form.name == WHOLE else _text(*points(one, outcomes), sign="+"))
        table.rows.append(row)
    return table


def claims(outcomes: Sequence[Outcome]) -> list[Claim]:
    """That no form loses more than is expected of it; it agrees if the mean of the differences does not."""
    found = []
    for one in outcomes:
        if one.form.name == WHOLE:
            continue
        lost, half = points(one, outcomes)
        count = len(one.accuracy)
        why = f"The mean over {count} seed{'s' * (count > 1)}, each beside float32 with the same seed."
        what = f"{one.form.name}, {one.mode}: points from float32"
        expected = f"at most {one.form.within:g} less"
        found.append(Claim(what, expected, _text(lost, half, sign="+"), lost >= -one.form.within, why))
    return found


def curves(outcomes: Sequence[Outcome]) -> Figure:
    """Test accuracy by epoch, of both modes."""

    def draw(panels: Any, colours: dict[str, str]) -> None:
        for axes, mode in zip(panels, RATES, strict=True):
            for form, series in zip(FORMS, ("bsp", *SERIES), strict=False):
                curve = of(outcomes, form.name, mode).curve
                means = [100 * (mean(curve[epoch]) or 0.0) for epoch in sorted(curve)]
                dash = "-" if form.name == WHOLE else (0, (5, 2))
                axes.plot(sorted(curve), means, linestyle=dash, color=colours[series], linewidth=1.6, label=form.name)
            axes.set_title(mode)

    caption = "Each line is the mean over the seeds. Top-k sends a hundredth of each slice of a gradient."
    return figure(
        "accuracy",
        "Test accuracy, by what is sent",
        caption,
        "epochs",
        "accuracy, %",
        draw,
        panels=2,
        many_panels=True,
        height_inches=6.0,
        legend_columns=3,
    )
