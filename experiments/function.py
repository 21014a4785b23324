"""Four workers learn a function, and average gradients after every batch, or more rarely, or never."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.function_training import (
    FULL,
    FUNCTION,
    GRID,
    INTERVALS,
    MODEL,
    NEVER,
    QUICK,
    STUCK,
    WORKERS,
    Results,
    Training,
    measure,
)
from experiments.lab import Lab
from experiments.page import NOT_MEASURED, Claim, Page
from experiments.shared.charts import SERIES, Colours, Figure
from experiments.shared.intervals import mean, spread_text
from experiments.shared.pages import NONE, Table, sentence

PUBLISHED_S = {1: 330, 2: 183, 4: 136, 10: 99, NEVER: 88}  # For a thousand epochs.
PUBLISHED_EPOCHS = {1: 4000, 2: 6000, 4: 6000, 10: 7000, NEVER: 8000}  # Until the loss is under 0.05.
RATIO_APART_MAX = 0.1
EPOCHS_FACTOR_MAX = 1.5
SEEDS_FACTOR_MIN = 2
_SETTINGS = 4  # Two learning rates times two ways of counting.
CLOSE = 1e-3  # Relative: losses of two programs that compute the same in float32.
FIRST_EPOCHS = 10
_COLOURS = dict(zip(INTERVALS, SERIES, strict=False))
_LABELS = {1: "every batch", 2: "every 2nd", 4: "every 4th", 10: "every 10th", NEVER: "never"}


def run(lab: Lab) -> Page:
    results = measure(lab, lab.pick(FULL, QUICK))
    plan, gloo = results.plan, results.gloo
    others = [interval for interval in INTERVALS if interval != 1]
    compared, worst = _gloo_compared(results)
    seconds = [one.thousand_epochs_s for each in results.code.values() for one in each if one.thousand_epochs_s]
    whole = max(PUBLISHED_EPOCHS.values()) * len(INTERVALS) * _SETTINGS * 5
    long = results.text[1]
    return Page(
        "Averaging gradients rarely: a function learnt by four workers",
        _finding(results),
        "function.md.j2",
        [
            _order_of_times(results),
            *(_time(results, interval) for interval in others),
            *(_epochs(results, interval) for interval in INTERVALS),
            _learning_rate(results),
            _order_of_epochs(results),
            _seeds(results),
        ],
        tables={
            "times": _times(results),
            "losses": _losses(results),
            "settings": _settings(results),
            "batches": _batches(results),
            "gloo": compared,
            "choices": _choices(results),
        },
        figures=[
            *(_time_figure(results), _loss_figure(results), _settings_figure(results), _batches_figure(results)),
            *([_fit_figure(results)] if results.fits else []),
            *([] if gloo.missing else [_gloo_figure(results)]),
        ],
        values={
            "plan": plan,
            "model": MODEL,
            "stuck": STUCK,
            "constant": float(np.var(FUNCTION)),  # The loss of the constant that fits best.
            "most": sorted({legs * plan.leg_epochs for legs in plan.legs_max.values()}),
            "long": long if long.epochs > plan.leg_epochs and not long.diverged else None,
            "gloo": gloo,
            "worst": worst,
            "published_epochs": max(PUBLISHED_EPOCHS.values()),
            "whole": whole,
            "hours": whole / 1000 * (mean(seconds) or 0.0) / 3600,
        },
    )


# ---- What is said of it


def how_often(interval: int) -> str:
    """When gradients are averaged, in words."""
    if interval == NEVER:
        return "never"
    return "after every batch" if interval == 1 else f"after every {interval}{'nd' if interval == 2 else 'th'} batch"


def averaged(interval: int) -> str:
    """The same with its subject."""
    return "gradients never averaged" if interval == NEVER else f"gradients averaged {how_often(interval)}"


def intervals_text(intervals: Sequence[int]) -> str:
    return "every interval" if set(intervals) == set(INTERVALS) else " and ".join(map(averaged, intervals))


def _finding(results: Results) -> str:
    never, reached = results.time_ratio(NEVER), results.best(1).epochs_until(results.plan.goal)
    parts = []
    if never is not None:
        than = "of the time that averaging after every batch takes"
        parts.append(f"never averaging gradients takes {never.mean:.2f} {than}")
    if reached is not None:
        parts.append(f"with every gradient averaged the loss is under {results.plan.goal:g} after {reached:,g} epochs")
    return sentence("; ".join(parts) or "it diverged")


def _order_of_times(results: Results) -> Claim:
    ratios = [results.time_ratio(interval) for interval in INTERVALS]
    known = [ratio.mean for ratio in ratios if ratio is not None]
    agrees = known == sorted(known, reverse=True) if len(known) == len(INTERVALS) else None
    why = {
        True: "Each exchange that is left out saves what it costs, here as there.",
        False: "The order is not kept here; the seconds and their spread are in the table of times.",
        None: "Not all of them could be timed.",
    }
    published = " > ".join(f"{PUBLISHED_S[interval]}" for interval in INTERVALS) + " s"
    ours = ", ".join(NONE if ratio is None else f"{ratio.mean:.2f}" for ratio in ratios) + " times the first"
    what = "the less often gradients are averaged, the less time as many epochs take"
    return Claim(what, published, ours, agrees, why[agrees])


def _time(results: Results, interval: int) -> Claim:
    """Seconds are of different machines; what can be compared is the share of the time that is left."""
    published = PUBLISHED_S[interval] / PUBLISHED_S[1]
    ratio, never = results.time_ratio(interval), results.time_ratio(NEVER)
    what = f"time for as many epochs, {averaged(interval)}, over that after every batch"
    if ratio is None or never is None:
        return Claim(what, f"{published:.2f}", "diverged", None, "It could not be timed.")
    agrees = abs(ratio.mean - published) <= RATIO_APART_MAX
    here, there = 1 - never.mean, 1 - PUBLISHED_S[NEVER] / PUBLISHED_S[1]
    if agrees:
        why = f"The ratios are at most {RATIO_APART_MAX} apart."
    elif ratio.mean <= published:
        why = "Leaving out these exchanges saves more of the time."
    elif here >= there:
        why = "Leaving out these exchanges saves less of the time."
    else:
        why = "Leaving out exchanges saves less, since there is less to save."
    why += (
        f" Averaging after every batch takes {100 * here:.0f} % of the time here, and took {100 * there:.0f} % there, "
        "on another machine and by another program."
    )
    return Claim(what, f"{published:.2f}", str(ratio), agrees, why)


def _within(reached: float, published: int) -> bool:
    return published / EPOCHS_FACTOR_MAX <= reached <= published * EPOCHS_FACTOR_MAX


def _epochs(results: Results, interval: int) -> Claim:
    training, published, plan = results.best(interval), PUBLISHED_EPOCHS[interval], results.plan
    reached, factor = training.epochs_until(plan.goal), f"a factor of {EPOCHS_FACTOR_MAX}"
    agrees: bool | None
    if reached is not None:
        ours, agrees = f"{reached:,g}", _within(reached, published)
        side = f"More than {factor} {'fewer' if reached < published else 'more'}"
        why = f"{f'Within {factor}' if agrees else side}, with the code's setting."
    else:
        ours, agrees, why = _not_reached(training, published)
    why += (
        f" It is the one of {len(plan.seeds)} seeds that was best after {plan.leg_epochs:,} epochs, and the source "
        "says that its results vary greatly."
    )
    what = f"epochs until the loss is under {plan.goal:g}, {averaged(interval)}"
    return Claim(what, f"{published:,}", ours, agrees, why)


def _not_reached(training: Training, published: int) -> tuple[str, bool | None, str]:
    """What to say instead of epochs; the verdict; and why.

    None of it contradicts for want of epochs: until EPOCHS_FACTOR_MAX times as many as published, it might come under.
    """
    if training.diverged:
        return "diverged", False, f"It failed: {training.diverged}."
    ours, enough = f"more than {training.epochs:,g}", published * EPOCHS_FACTOR_MAX
    loss = f"at a loss of {training.losses[-1][1]:.3g}" + ", where it was stuck" * training.stuck
    if training.epochs >= enough:
        return ours, False, f"After {training.epochs:,g} epochs it was {loss}."
    ended = f"Training ended at {training.epochs:,g} epochs, {loss}; {enough:,g} would be needed for a verdict."
    return ours, None, ended


def _learning_rate(results: Results) -> Claim:
    """The text's rate, with every gradient averaged, where nothing but the rate differs from the code's."""
    training, plan, published = results.text[1], results.plan, PUBLISHED_EPOCHS[1]
    reached, by_code = training.epochs_until(plan.goal), results.best(1).epochs_until(plan.goal)
    code = f"With {plan.code.learning_rate:g}, as in the published code, it is "
    code += "not under it either." if by_code is None else f"after {by_code:,g}."
    agrees: bool | None
    if reached is not None:
        ours, agrees = f"{reached:,g}", _within(reached, published)
        why = f"{'Within' if agrees else 'Not within'} a factor of {EPOCHS_FACTOR_MAX}. {code}"
    else:
        ours, agrees, ended = _not_reached(training, published)
        why = f"{ended} {code}"
        if agrees is False and by_code is not None:
            why += " So the published epochs look like those of the code's rate."
    what = f"epochs until the loss is under {plan.goal:g}, {averaged(1)}, with the text's learning rate"
    return Claim(f"{what} of {plan.text.learning_rate:g}", f"{published:,}", ours, agrees, why)


def _order_of_epochs(results: Results) -> Claim:
    trainings = [results.best(interval) for interval in INTERVALS]
    reached = [training.epochs_until(results.plan.goal) for training in trainings]
    known = [epochs for epochs in reached if epochs is not None]
    # What did not come under it needs more than it was given.
    least = [training.epochs if at is None else at for training, at in zip(trainings, reached, strict=True)]
    agrees: bool | None = None
    if known != sorted(known):
        agrees = False
    elif known == reached[: len(known)] and least == sorted(least) and len(known) >= len(INTERVALS) - 1:
        agrees = True
    one_seed = (
        "It is one seed of each, the best one, and the loss jumps between evaluations, so that when it is first under "
        f"{results.plan.goal:g} is partly chance; below are all seeds after equally many epochs."
    )
    why = {
        True: f"Workers drift apart between two averagings, and what each learns is of its own samples. {one_seed}",
        False: f"The order is not kept. {one_seed}",
        None: "Too few of them came under it in the epochs that they were given.",
    }
    said = [f"{at:,g}" if at is not None else f"over {given:,g}" for at, given in zip(reached, least, strict=True)]
    published = ", ".join(f"{PUBLISHED_EPOCHS[interval]:,}" for interval in INTERVALS)
    what = "the less often gradients are averaged, the more epochs it takes"
    return Claim(what, published, ", ".join(said), agrees, why[agrees])


def _seeds(results: Results) -> Claim:
    """Agrees where at least half of the intervals have seeds that differ by SEEDS_FACTOR_MIN."""
    at = results.plan.leg_epochs
    said, large, compared = [], 0, 0
    for trainings in results.code.values():
        losses = [loss for one in trainings if (loss := one.loss_at(at)) is not None]
        diverged = any(one.diverged for one in trainings)
        if len(losses) > 1:
            compared += 1
            large += diverged or max(losses) >= SEEDS_FACTOR_MIN * min(losses)
            said.append(f"{min(losses):.3g} to {'diverged' if diverged else f'{max(losses):.3g}'}")
    ours = f"after {at:,} epochs, {len(results.plan.seeds)} seeds: {'; '.join(said)}"
    why = (
        f"With {large} of {compared} intervals the largest loss is at least {SEEDS_FACTOR_MIN} times the smallest. "
        "A seed decides points and initial weights, and nothing else differs: with the same one, the same weights come "
        "out, bit for bit."
    )
    agrees = 2 * large >= compared if compared else None
    return Claim("results vary greatly from run to run", "so it says", ours, agrees, why)


# ---- Tables and figures

_INTERVAL = "gradients averaged"
_NOT_RUN = "not run"


def _times(results: Results) -> Table:
    tcp = {interval: one.thousand_epochs_s for interval, one in results.tcp.items() if one.thousand_epochs_s}
    columns = [_INTERVAL, "published, s", "ratio", "ours, shared memory, s", "ratio", "ours, TCP, s", "ratio"]
    table = Table("Time for a thousand epochs", [*columns, "PyTorch/Gloo here, s", "ratio"])
    for interval in INTERVALS:
        seconds = [one.thousand_epochs_s for one in results.code[interval] if one.thousand_epochs_s]
        ratio = results.time_ratio(interval)
        row = [how_often(interval), f"{PUBLISHED_S[interval]}", f"{PUBLISHED_S[interval] / PUBLISHED_S[1]:.2f}"]
        row += [spread_text(seconds, 1), NONE if ratio is None else f"{ratio.mean:.2f}"]
        row += _time_and_ratio(tcp, interval, _NOT_RUN)
        table.rows.append([*row, *_time_and_ratio(results.gloo.thousand_epochs_s, interval, NOT_MEASURED)])
    return table


def _time_and_ratio(seconds: Mapping[int, float], interval: int, missing: str) -> list[str]:
    if interval not in seconds:
        return [missing, missing]
    return [f"{seconds[interval]:.1f}", f"{seconds[interval] / seconds[1]:.2f}" if 1 in seconds else missing]


def _losses(results: Results) -> Table:
    plan = results.plan
    columns = [_INTERVAL, *(f"seed {seed}" for seed in plan.seeds), "the seed that went on", "published epochs"]
    table = Table("Loss, code's setting", [*columns, f"epochs until under {plan.goal:g}", "last loss"])
    for interval in INTERVALS:
        best = results.best(interval)
        reached = best.epochs_until(plan.goal)
        until = "diverged" if best.diverged else "stuck" if best.stuck else f"over {best.epochs:,g}"
        row = [how_often(interval), *(_at(one, plan.leg_epochs) for one in results.code[interval]), f"{best.seed}"]
        row += [f"{PUBLISHED_EPOCHS[interval]:,}", until if reached is None else f"{reached:,g}"]
        table.rows.append([*row, f"{best.losses[-1][1]:.3f}" if best.losses else "diverged"])
    return table


def _at(training: Training | None, epochs: float) -> str:
    if training is None:
        return _NOT_RUN
    loss = training.loss_at(epochs)
    return "diverged" if loss is None or math.isinf(loss) else f"{loss:.3f}"


def _settings(results: Results) -> Table:
    plan, at = results.plan, results.plan.leg_epochs
    shown = [
        (plan.text, results.text),
        (plan.mixed, results.mixed),
        (plan.code, dict(zip(INTERVALS, map(results.first, INTERVALS), strict=True))),
    ]
    columns = [f"{setting.name}: {setting.learning_rate:g}, {setting.counting}" for setting, _ in shown]
    table = Table(f"Loss after {at:,} epochs by setting", [_INTERVAL, *columns])
    for interval in INTERVALS:
        table.rows.append([how_often(interval), *(_at(trainings.get(interval), at) for _, trainings in shown)])
    return table


def _batches(results: Results) -> Table:
    plan = results.plan
    columns = ["each worker's batch", "steps", f"loss after {plan.leg_epochs:,} epochs", "a thousand epochs, s"]
    table = Table("Full batch against mini-batches", columns)
    for name, steps, training in (
        (f"batches of {plan.batch:,}", plan.batches_per_epoch * plan.leg_epochs, results.first(1)),
        (f"full batch, {plan.samples // WORKERS:,}", plan.leg_epochs, results.full_batch),
    ):
        seconds = f"{training.thousand_epochs_s:.1f}" if training.thousand_epochs_s else NONE
        table.rows.append([name, f"{steps:,}", _at(training, plan.leg_epochs), seconds])
    return table


def _gloo_compared(results: Results) -> tuple[Table, float | None]:
    """Batch by batch, and the largest difference of the first epochs; None if ours have diverged."""
    plan, worst = results.plan, []
    caption = "Largest relative difference of rank 0's losses, batch by batch"
    table = Table(caption, [_INTERVAL, f"first {FIRST_EPOCHS} epochs", "all", "batches compared"])
    for interval, theirs in results.gloo.batch_losses.items():
        if ours := results.first(interval).batch_losses:
            apart = np.abs(np.array(ours) - theirs) / np.abs(theirs)
            worst.append(apart[: FIRST_EPOCHS * plan.batches_per_epoch].max())
            table.rows.append([how_often(interval), f"{worst[-1]:.1e}", f"{apart.max():.1e}", f"{len(apart):,}"])
    return table, max(worst, default=None)


def _choices(results: Results) -> Table:
    table = Table("Initial weights", ["initial weights", "learning rate", "outcome"])
    for (init, rate), one in results.choices.items():
        said = f"fails: {one.diverged}" if one.diverged else f"loss {one.losses[-1][1]:.3f}"
        table.rows.append([f"`--init={init}`", f"{rate:g}", said])
    return table


def _time_figure(results: Results) -> Figure:
    published = {interval: PUBLISHED_S[interval] / PUBLISHED_S[1] for interval in INTERVALS}
    ours = {interval: ratio.mean for interval in INTERVALS if (ratio := results.time_ratio(interval)) is not None}
    seconds = results.gloo.thousand_epochs_s
    theirs = {interval: one / seconds[1] for interval, one in seconds.items()} if 1 in seconds else {}

    def draw(axes: Any, colours: Colours) -> None:
        for times, form, colour, label in (
            (published, "o--", "other", "published"),
            (ours, "o-", "ssp", "ours"),
            (theirs, "s-", "asp", "PyTorch/Gloo, here"),
        ):
            if times:
                places = [INTERVALS.index(interval) for interval in times]
                axes.plot(places, list(times.values()), form, color=colours[colour], label=label)
        axes.set_xticks(range(len(INTERVALS)), [_LABELS[interval] for interval in INTERVALS])
        axes.set_ylim(bottom=0)

    caption = "Time for as many epochs, over the time when gradients are averaged after every batch."
    title = "What leaving out exchanges saves"
    return Figure("time", title, caption, "gradients are averaged", "time, relative", draw)


def _loss_figure(results: Results) -> Figure:
    plan = results.plan

    def draw(axes: Any, colours: Colours) -> None:
        for interval, trainings in results.code.items():
            colour, best = colours[_COLOURS[interval]], results.best(interval)
            for training in trainings:
                if training is not best:
                    _line(axes, training.losses, color=colour, alpha=0.35, linewidth=0.8)
            _line(axes, best.losses, color=colour, linewidth=1.4, label=_LABELS[interval])
        axes.axhline(plan.goal, color=colours["quiet"], linestyle=":", linewidth=1)
        _logarithmic(axes)

    caption = (
        f"Loss over all samples, learning rate {plan.code.learning_rate:g}, weights averaged {plan.code.counting}, "
        "which is when it is evaluated. Colours are how often gradients are averaged; thin lines are the other seeds, "
        f"dotted is a loss of {plan.goal:g}."
    )
    return Figure("loss", "Loss over all samples", caption, "epochs", "loss", draw, height_inches=4.2)


def _logarithmic(axes: Any) -> None:
    """The losses' axis, once all is drawn, with plain numbers."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [digit * 10.0**power for power in range(-4, 4) for digit in (1, 2, 5)]
    if len(shown := [tick for tick in ticks if low <= tick <= high]) > 1:
        axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
        axes.minorticks_off()


def _line(axes: Any, losses: Sequence[tuple[float, float]], *form: str, **style: Any) -> None:
    if losses:
        axes.plot(*zip(*losses, strict=True), *form, **style)


def _settings_figure(results: Results) -> Figure:
    code = {interval: results.first(interval) for interval in results.text}

    def draw(axes: Any, colours: Colours) -> None:
        for trainings, dash, name in ((code, "-", "code"), (results.mixed, "--", "mixed"), (results.text, ":", "text")):
            for interval, training in trainings.items():
                label = f"{name}, {_LABELS[interval]}" if interval in (1, NEVER) else None
                _line(axes, training.losses, color=colours[_COLOURS[interval]], linestyle=dash, label=label)
        _logarithmic(axes)

    caption = "Loss over all samples by setting, first seed. Colours are how often gradients are averaged, as above."
    return Figure("settings", "The settings of text and code", caption, "epochs", "loss", draw, legend_columns=2)


def _batches_figure(results: Results) -> Figure:
    mini = [(at, loss) for at, loss in results.first(1).losses if at <= results.plan.leg_epochs]

    def draw(axes: Any, colours: Colours) -> None:
        _line(axes, mini, "o-", color=colours["ssp"], label=f"batches of {results.plan.batch:,}")
        _line(axes, results.full_batch.losses, "o-", color=colours["asp"], label="full batch")
        _logarithmic(axes)

    caption = (
        "Loss over all samples after as many passes over them; gradients averaged after every batch, code's setting."
    )
    return Figure("batches", "Full batch against mini-batches", caption, "epochs", "loss", draw)


def _fit_figure(results: Results) -> Figure:
    shown = [interval for interval in (1, NEVER) if any(fit.interval == interval for fit in results.fits)]

    def draw(panels: list[Any], colours: Colours) -> None:
        for interval, axes in zip(shown, panels, strict=True):
            lines = axes.plot(GRID, FUNCTION, color=colours["grid"], linewidth=5)
            mine = [fit for fit in results.fits if fit.interval == interval]
            for fit, colour in zip(mine, ("easgd", "asp", "ssp"), strict=False):
                lines += axes.plot(GRID, fit.outputs, color=colours[colour], linewidth=1.2)
            axes.set_title(averaged(interval), loc="left")
            # The moments differ between panels, so each has its own legend.
            labels = ["the function", *(f"after {fit.epochs:,g} epochs" for fit in mine)]
            axes.legend(lines, labels, fontsize=7, loc="lower left")

    caption = "What the network says of each x at several moments of its training, and the function."
    more = {"panels": len(shown), "height_inches": 2.7 * len(shown)}
    return Figure("fit", "The fitted function", caption, "x", "y", draw, **more)


def _gloo_figure(results: Results) -> Figure:
    theirs, per_epoch = results.gloo.batch_losses, results.plan.batches_per_epoch
    compared = [interval for interval in (1, NEVER) if interval in theirs] or list(theirs)

    def draw(axes: Any, colours: Colours) -> None:
        for interval in compared:
            colour = colours[_COLOURS[interval]]
            for name, losses, look in (
                ("ours", results.first(interval).batch_losses, {"linewidth": 4, "alpha": 0.35}),
                ("PyTorch/Gloo", theirs[interval], {"linestyle": "--"}),
            ):
                whole = losses[: len(losses) // per_epoch * per_epoch]
                by_epoch = np.reshape(whole, (-1, per_epoch)).mean(axis=1)
                axes.plot(by_epoch, color=colour, label=f"{name}, {_LABELS[interval]}", **look)
        _logarithmic(axes)

    caption = "Mean training loss of rank 0's batches in each epoch, from the same points and the same initial weights."
    return Figure("gloo", "The same by PyTorch over Gloo", caption, "epochs", "loss", draw, legend_columns=2)
