"""The function experiment's plots."""

from __future__ import annotations

from typing import Any

from figures import Figure
from spread import mean

from .function_claims import PUBLISHED_S, averaged, time_ratio
from .function_results import Results, grid
from .function_runs import INTERVALS, NEVER, Training
from .page import SERIES, figure

COLOURS = dict(zip(INTERVALS, SERIES, strict=False))
_LABELS = {1: "every batch", 2: "every 2nd", 4: "every 4th", 10: "every 10th", NEVER: "never"}


def times(results: Results) -> Figure:
    """Relative to averaging after every batch."""

    def draw(axes: Any, colours: dict[str, str]) -> None:
        places = range(len(INTERVALS))
        published = [PUBLISHED_S[interval] / PUBLISHED_S[1] for interval in INTERVALS]
        axes.plot(places, published, "o--", color=colours["other"], label="published")
        ratios = [time_ratio(results, interval) for interval in INTERVALS]
        known = [(place, ratio.mean) for place, ratio in zip(places, ratios, strict=True) if ratio is not None]
        axes.plot(*zip(*known, strict=True), "o-", color=colours["ssp"], label="ours")
        seconds = results.gloo.thousand_epochs_s
        if 1 in seconds:
            relative = [(place, seconds[k] / seconds[1]) for place, k in enumerate(INTERVALS) if k in seconds]
            axes.plot(*zip(*relative, strict=True), "s-", color=colours["asp"], label="PyTorch/Gloo, here")
        axes.set_xticks(list(places), [_LABELS[interval] for interval in INTERVALS])
        axes.set_ylim(bottom=0)

    caption = "Time for as many epochs, over the time when gradients are averaged after every batch."
    title = "What leaving out exchanges saves"
    return figure("time", title, caption, "gradients are averaged", "time, relative", draw)


def losses(results: Results) -> Figure:
    """Of the code's setting, all seeds."""
    plan = results.plan

    def draw(axes: Any, colours: dict[str, str]) -> None:
        for interval in INTERVALS:
            colour = colours[COLOURS[interval]]
            best = results.best(interval)
            for training in results.code[interval]:
                if training is not best:
                    _line(axes, training, color=colour, alpha=0.35, linewidth=0.8)
            _line(axes, best, color=colour, linewidth=1.4, label=_LABELS[interval])
        axes.axhline(plan.goal, color=colours["quiet"], linestyle=":", linewidth=1)
        _logarithmic(axes)

    caption = (
        f"Loss over all samples, learning rate {plan.code.learning_rate:g}, weights averaged every "
        f"{plan.code.average_every.removesuffix('epochs')} epochs, which is when it is evaluated. Colours are how "
        f"often gradients are averaged; thin lines are the other seeds, dotted is a loss of {plan.goal:g}."
    )
    return figure("loss", "Loss over all samples", caption, "epochs", "loss", draw, height_inches=4.2)


def _logarithmic(axes: Any) -> None:
    """The losses' axis, once all is drawn, with plain numbers."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]
    if len(shown := [tick for tick in ticks if low <= tick <= high]) > 1:
        axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
        axes.minorticks_off()


def _line(axes: Any, training: Training, **style: Any) -> None:
    if training.losses:
        axes.plot(*zip(*training.losses, strict=True), **style)


def settings(results: Results) -> Figure:
    """Text, code and what is between."""

    def draw(axes: Any, colours: dict[str, str]) -> None:
        for trainings, dash, name in (
            ({k: results.first(k) for k in results.text}, "-", "code"),
            (results.mixed, "--", "mixed"),
            (results.text, ":", "text"),
        ):
            for interval, training in trainings.items():
                label = f"{name}, {_LABELS[interval]}" if interval in (1, NEVER) else None
                _line(axes, training, color=colours[COLOURS[interval]], linestyle=dash, label=label)
        _logarithmic(axes)

    caption = "Loss over all samples by setting, first seed. Colours are how often gradients are averaged, as above."
    return figure("settings", "The settings of text and code", caption, "epochs", "loss", draw, legend_columns=2)


def batches(results: Results) -> Figure:
    """Full and mini."""

    def draw(axes: Any, colours: dict[str, str]) -> None:
        end = results.plan.leg_epochs
        mini = [(at, loss) for at, loss in results.first(1).losses if at <= end]
        for points, colour, label in (
            (mini, "ssp", f"batches of {results.plan.batch:,}"),
            (results.full_batch.losses, "asp", "full batch"),
        ):
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=colours[colour], label=label)
        _logarithmic(axes)

    caption = (
        "Loss over all samples after as many passes over them; gradients averaged after every batch, code's setting."
    )
    return figure("batches", "Full batch against mini-batches", caption, "epochs", "loss", draw)


def fits(results: Results) -> Figure:
    """The function and the network at several moments."""
    shown = [interval for interval in (1, NEVER) if any(fit.interval == interval for fit in results.fits)]

    def draw(panels: Any, colours: dict[str, str]) -> None:
        xs, ys = zip(*grid(), strict=True)
        for interval, axes in zip(shown, panels, strict=True):
            lines = axes.plot(xs, ys, color=colours["grid"], linewidth=5)
            mine = [fit for fit in results.fits if fit.interval == interval]
            for fit, colour in zip(mine, ("easgd", "asp", "ssp"), strict=False):
                lines += axes.plot(xs, fit.outputs, color=colours[colour], linewidth=1.2)
            axes.set_title(averaged(interval), loc="left")
            # The moments differ between panels, so each has its own legend.
            labels = ["the function", *(f"after {fit.epochs:,g} epochs" for fit in mine)]
            axes.legend(lines, labels, fontsize=7, loc="lower left")

    caption = "What the network says of each x at several moments of its training, and the function."
    more = {"panels": len(shown), "many_panels": True, "height_inches": 2.7 * max(len(shown), 1)}
    return figure("fit", "The fitted function", caption, "x", "y", draw, **more)


def gloo(results: Results) -> Figure:
    """Training loss of both programs."""
    compared = [interval for interval in (1, NEVER) if interval in results.gloo.batch_losses]
    compared = compared or list(results.gloo.batch_losses)

    def draw(axes: Any, colours: dict[str, str]) -> None:
        for interval in compared:
            colour = colours[COLOURS[interval]]
            mine = _by_epoch(results.first(interval).batch_losses, results.plan.batches_per_epoch)
            theirs = _by_epoch(results.gloo.batch_losses[interval], results.plan.batches_per_epoch)
            axes.plot(mine, color=colour, linewidth=4, alpha=0.35, label=f"ours, {_LABELS[interval]}")
            axes.plot(theirs, color=colour, linestyle="--", label=f"PyTorch/Gloo, {_LABELS[interval]}")
        _logarithmic(axes)

    caption = "Mean training loss of rank 0's batches in each epoch, from the same points and the same initial weights."
    return figure("gloo", "The same by PyTorch over Gloo", caption, "epochs", "loss", draw, legend_columns=2)


def _by_epoch(values: list[float], per_epoch: int) -> list[float]:
    starts = range(0, len(values) - per_epoch + 1, per_epoch)
    return [mean(values[start : start + per_epoch]) or 0.0 for start in starts]
