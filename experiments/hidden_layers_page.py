"""Tables and plots of the hidden-layers experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from figures import Figure
from spread import Ratio, mean, paired_ratio

from .hidden_layers_runs import FULL, MINI, STAGES, Timing, Training
from .page import Table, figure

LEARNT = "What was kept of each training"
TIMES = "Milliseconds of a pass over the training split, and their ratios to the sequential program's"
_SMOOTHED = 0.15  # A point of the loss's curve is the mean over so large a share of the updates before it.


def learnt(trainings: Sequence[Training]) -> Table:
    """A row for each."""
    columns = ["training", "workers", "seed", "updates", "kept after pass", "validation loss", "test loss"]
    table = Table(LEARNT, [*columns, "test accuracy"])
    for one in trainings:
        table.rows.append(
            [
                f"{one.batches}, learning rate {one.learning_rate:g}",
                str(one.workers),
                str(one.seed),
                f"{one.per_pass * len(one.validation):,}",
                f"{one.best_pass:g} of {len(one.validation)}",
                f"{one.best_validation['loss']:.4f}",
                f"{one.best['loss']:.4f}",
                percent(one.best["accuracy"], 2),
            ]
        )
    return table


def loss_figure(full: Training, mini: Training) -> Figure:
    """The training loss over the updates, both of one worker."""

    def draw(axes: Any, colours: dict[str, str]) -> None:
        for one, colour, width in ((mini, "asp", 1.4), (full, "bsp", 2.6)):
            curve = smoothed(one.losses) if one.batches == MINI else list(enumerate(one.losses, 1))
            axes.plot(*zip(*curve, strict=True), color=colours[colour], linewidth=width, label=one.batches)
        axes.set_xscale("log")

    caption = (
        "The loss of the batch that an update is made of, with one worker and the same learning rate and initial "
        f"weights; of mini-batches the mean over the last {percent(_SMOOTHED)} of the updates so far."
    )
    return figure("updates", "Training loss over updates", caption, "updates of the weights", "training loss", draw)


def smoothed(losses: Sequence[float]) -> list[tuple[float, float]]:
    """Means over windows that grow with the number of updates, at some two hundred places."""
    found, last = [], 0
    for step in range(201):
        end = round(len(losses) ** (step / 200))
        if end > last:
            window = losses[min(end - 1, round(end * (1 - _SMOOTHED))) : end]
            found.append((end, sum(window) / len(window)))
            last = end
    return found


def passes_figure(trainings: Sequence[Training]) -> Figure:
    """Validation loss and test accuracy after each pass; a dot is what was kept."""
    looks = ("bsp", "asp", "ssp")

    def draw(all_axes: list[Any], colours: dict[str, str]) -> None:
        for one, colour in zip(trainings, looks, strict=True):
            look = {"color": colours[colour], "linewidth": 1.6}
            label = f"{one.batches}, {one.learning_rate:g}"
            loss = [(event["step"] / one.per_pass, event["loss"]) for event in one.validation]
            tested = [*one.test, *([one.best] if one.best["step"] > one.test[-1]["step"] else [])]
            accuracy = [(event["step"] / one.per_pass, 100 * event["accuracy"]) for event in tested]
            kept = (one.best_pass, one.best_validation["loss"]), (one.best_pass, 100 * one.best["accuracy"])
            for axes, curve, dot in zip(all_axes, (loss, accuracy), kept, strict=True):
                axes.plot(*zip(*curve, strict=True), **look, label=label)
                axes.plot(*dot, "o", color=colours[colour], markersize=6)
        all_axes[0].set_ylabel("validation loss")
        all_axes[1].set_ylabel("test accuracy, %")

    caption = (
        "After each pass over the training split; a dot is what was kept, by the loss on the validation split. Two "
        "workers, first seed."
    )
    options = {"panels": 2, "many_panels": True, "height_inches": 4.8}
    return figure("passes", "The best by validation loss", caption, "passes", "", draw, **options)


def ratio(one: Timing, stage: str, sequential: Timing) -> Ratio:
    """Of a stage's time to that of one worker; the total is compared with computing alone, round by round."""
    alone = computing(sequential) if stage == "total" else sequential.seconds(stage)
    found = paired_ratio(dict(enumerate(one.seconds(stage))), dict(enumerate(alone)))
    assert found is not None  # Both have all rounds, and none takes no time.
    return found


def computing(timing: Timing) -> list[float]:
    """Forward and backward of each round: what a program alone takes, which exchanges nothing."""
    return [one.forward + one.backward for one in timing.rounds]


def of(timings: Sequence[Timing], batches: str, workers: int) -> Timing:
    """The one with so many workers."""
    return next(one for one in timings if (one.batches, one.workers) == (batches, workers))


def times(timings: Sequence[Timing]) -> Table:
    """Sequential and with workers, in full batch and in mini-batches."""
    columns = ["training", *STAGES, "forward, ratio", "backward, ratio", "total, ratio"]
    table = Table(TIMES, columns)
    for batches in (FULL, MINI):
        one = of(timings, batches, 1)
        forward, backward = mean(one.seconds("forward")), mean(one.seconds("backward"))
        sequential = [forward, backward, None, mean(computing(one))]
        table.rows.append([f"{batches}, sequential", *map(_ms, sequential), "1", "1", "1"])
        for each in (timing for timing in timings if timing.batches == batches):
            name = f"{batches}, {each.workers} worker{'s' * (each.workers > 1)}"
            shown = [_ms(mean(each.seconds(stage))) for stage in STAGES]
            table.rows.append([name, *shown, *(_times(each, stage, one) for stage in ("forward", "backward", "total"))])
    return table


def _ms(seconds: float | None) -> str:
    return "—" if seconds is None else f"{1000 * seconds:.1f}"


def _times(one: Timing, stage: str, sequential: Timing) -> str:
    return f"{ratio(one, stage, sequential).mean:.2f}"


def percent(share: float, digits: int = 0) -> str:
    """For people."""
    return f"{100 * share:.{digits}f} %".replace("-", "−")


def stages_figure(timings: Sequence[Timing]) -> Figure:
    """A bar for each setup."""
    names, bars = [], []
    for batches in (FULL, MINI):
        one = of(timings, batches, 1)
        names.append(f"{batches}, sequential")
        bars.append((mean(one.seconds("forward")) or 0, mean(one.seconds("backward")) or 0, 0))
        for each in (timing for timing in timings if timing.batches == batches):
            names.append(f"{each.workers} worker{'s' * (each.workers > 1)}")
            bars.append(tuple(mean(each.seconds(stage)) or 0 for stage in STAGES[:3]))

    def draw(axes: Any, colours: dict[str, str]) -> None:
        places = [place + (0.5 if place >= len(bars) // 2 else 0) for place in range(len(bars))]
        left = [0.0] * len(bars)
        for number, (stage, colour) in enumerate(zip(STAGES, ("compute", "ssp", "wait"), strict=False)):
            widths = [1000 * bar[number] for bar in bars]
            axes.barh(places, widths, left=left, color=colours[colour], label=stage, height=0.75)
            left = [at + width for at, width in zip(left, widths, strict=True)]
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.grid(False, axis="y")

    caption = (
        "Of a pass over the training split, with stages that do not overlap: means over the workers and the rounds. "
        "Sequential is one worker's computing without its exchange."
    )
    title = "Where the time goes"
    return figure("stages", title, caption, "milliseconds", "", draw, height_inches=3.4)
