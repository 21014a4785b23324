"""What is under each heading of the function experiment's page."""

from __future__ import annotations

import math
from collections.abc import Mapping

from . import function_plots as plots
from .function_claims import PUBLISHED_EPOCHS, PUBLISHED_S, how_often, time_ratio
from .function_notes import choices, counting, left_out
from .function_results import Results, best_constant
from .function_runs import INTERVALS, STUCK, WORKERS, Training
from .page import NOT_MEASURED, Section, Table, spread_text

_CLOSE = 1e-3  # Relative: losses of two programs that compute the same in float32.
_FIRST_EPOCHS = 10
_INTERVAL = "gradients averaged"
_NOT_RUN = "not run"


def sections(results: Results) -> list[Section]:
    """All of them."""
    return [
        _times(results),
        _losses(results),
        _settings(results),
        _batches(results),
        _fits(results),
        _gloo(results),
        choices(results),
        left_out(results),
    ]


def _times(results: Results) -> Section:
    plan = results.plan
    tcp = {interval: one.thousand_epochs_s[0] for interval, one in results.tcp.items() if one.thousand_epochs_s}
    rows = []
    for interval in INTERVALS:
        seconds = [one.thousand_epochs_s[0] for one in results.code[interval] if one.thousand_epochs_s]
        ratio = time_ratio(results, interval)
        rows.append(
            [
                *(how_often(interval), f"{PUBLISHED_S[interval]}", f"{PUBLISHED_S[interval] / PUBLISHED_S[1]:.2f}"),
                *(spread_text(seconds, 1), "—" if ratio is None else f"{ratio.mean:.2f}"),
                *_time_and_ratio(tcp, interval, _NOT_RUN),
                *_time_and_ratio(results.gloo.thousand_epochs_s, interval, NOT_MEASURED),
            ]
        )
    columns = [
        *(_INTERVAL, "published, s", "ratio", "ours, shared memory, s", "ratio", "ours, TCP, s", "ratio"),
        *("PyTorch/Gloo here, s", "ratio"),
    ]
    text = (
        "From the end of rank 0's first batch to the end of its last, code's setting, scaled to a thousand epochs: "
        f"through shared memory from the first {plan.leg_epochs:,} of each seed, over TCP from {plan.tcp_epochs}, and "
        f"of the PyTorch program from {plan.gloo_epochs}. Each ratio is to averaging after every batch; with several "
        "seeds, the geometric mean of theirs."
    )
    table = Table("Time for a thousand epochs", columns, rows)
    return Section("Time for a thousand epochs", [text], [table], [plots.times(results)])


def _time_and_ratio(seconds: Mapping[int, float], interval: int, missing: str) -> tuple[str, str]:
    if interval not in seconds:
        return missing, missing
    return f"{seconds[interval]:.1f}", f"{seconds[interval] / seconds[1]:.2f}" if 1 in seconds else missing


def _losses(results: Results) -> Section:
    plan = results.plan
    rows = []
    for interval in INTERVALS:
        best = results.best(interval)
        rows.append(
            [
                *(how_often(interval), *(_at(one, plan.leg_epochs) for one in results.code[interval])),
                *(f"{best.seed}", f"{PUBLISHED_EPOCHS[interval]:,}", _reached(best, plan.goal)),
                f"{best.losses[-1][1]:.3f}" if best.losses else "diverged",
            ]
        )
    columns = [
        *(_INTERVAL, *(f"seed {seed}" for seed in plan.seeds)),
        *("the seed that went on", "published epochs", f"epochs until under {plan.goal:g}", "last loss"),
    ]
    most = [legs * plan.leg_epochs for legs in plan.legs_max.values()]
    text = (
        f"The code's setting. Under *seed*: the loss over all samples after {plan.leg_epochs:,} epochs. The lead "
        f"evaluates it every {plan.code.eval_epochs} epochs, just after weights were averaged. A constant can come to "
        f"{best_constant():.2f}. For each interval the seed with the lowest loss went on until an evaluation was under "
        f"{plan.goal:g}, or for {min(most):,} to {max(most):,} epochs, or until it was stuck: {plan.leg_epochs:,} "
        f"epochs in which its evaluations differed by less than {100 * STUCK:g} %. The published epochs are given in "
        "thousands."
    )
    return Section("Loss", [text], [Table("Loss, code's setting", columns, rows)], [plots.losses(results)])


def _reached(training: Training, goal: float) -> str:
    reached = training.epochs_until(goal)
    if reached is not None:
        return f"{reached:,g}"
    if training.diverged:
        return "diverged"
    return "stuck" if training.stuck else f"over {training.epochs:,g}"


def _settings(results: Results) -> Section:
    plan = results.plan
    at = plan.leg_epochs
    rows = [
        [
            how_often(interval),
            *(_at(trainings.get(interval), at) for trainings in (results.text, results.mixed)),
            _at(results.first(interval), at),
        ]
        for interval in INTERVALS
    ]
    columns = [_INTERVAL]
    for setting in (plan.text, plan.mixed, plan.code):
        columns.append(f"{setting.name}: {setting.learning_rate:g}, {counting(setting)}")
    long = results.text[1]
    text = (
        f"Loss over all samples after {at:,} epochs, with seed {plan.seeds[0]}, by learning rate and by how often "
        f"weights are averaged. An epoch has {plan.batches_per_epoch} steps. Where gradients are averaged after every "
        "batch, all workers have the same weights anyway, and only the learning rate makes a difference. "
    )
    if long.epochs > at and not long.diverged:
        text += f"With the text's setting that training went on, and its loss after {long.epochs:,g} epochs is "
        text += f"{long.losses[-1][1]:.3f}."
    table = Table(f"Loss after {at:,} epochs by setting", columns, rows)
    return Section("The text's setting and the code's", [text], [table], [plots.settings(results)])


def _at(training: Training | None, epochs: float) -> str:
    if training is None:
        return _NOT_RUN
    loss = training.loss_at(epochs)
    return "diverged" if loss is None or math.isinf(loss) else f"{loss:.3f}"


def _batches(results: Results) -> Section:
    plan, full, mini = results.plan, results.full_batch, results.first(1)
    rows = [
        [
            *(name, f"{steps:,}", _at(training, plan.leg_epochs)),
            f"{training.thousand_epochs_s[0]:.1f}" if training.thousand_epochs_s else "—",
        ]
        for name, steps, training in (
            (f"batches of {plan.batch:,}", plan.batches_per_epoch * plan.leg_epochs, mini),
            (f"full batch, {plan.samples // WORKERS:,}", plan.leg_epochs, full),
        )
    ]
    columns = ["each worker's batch", "steps", f"loss after {plan.leg_epochs:,} epochs", "a thousand epochs, s"]
    text = (
        "As many passes over all samples, with gradients averaged after every batch, the code's learning rate and seed "
        f"{plan.seeds[0]}: `--batch_size={plan.batch}`, and `--batch_size=full`, which makes one step of an epoch."
    )
    table = Table("Full batch against mini-batches", columns, rows)
    return Section("Full batch against mini-batches", [text], [table], [plots.batches(results)])


def _fits(results: Results) -> Section:
    text = (
        "`ps_worker --predict` wrote the outputs of the weights that the lead had saved, for 401 values of x, code's "
        "setting, with the seeds that went on."
    )
    return Section("The fitted function", [text], [], [plots.fits(results)] if results.fits else [])


def _gloo(results: Results) -> Section:
    plan, gloo = results.plan, results.gloo
    text = (
        "`experiments/function_pytorch.py` is a program of its own: processes that average gradients and "
        "weights by Gloo's `all_reduce`, in one message for all tensors, with one thread each. It draws the same "
        f"points and initial weights of seed {plan.seeds[0]}, by the definition of what a seed decides."
    )
    if gloo.missing:
        return Section("The same by PyTorch over Gloo", [text, f"{NOT_MEASURED.capitalize()}: {gloo.missing}."])
    rows, worst = [], []
    for interval, theirs in gloo.batch_losses.items():
        ours = results.first(interval).batch_losses
        if not ours:
            continue  # It has diverged.
        apart = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
        first = max(apart[: _FIRST_EPOCHS * plan.batches_per_epoch])
        worst.append(first)
        rows.append([how_often(interval), f"{first:.1e}", f"{max(apart):.1e}", f"{len(apart):,}"])
    columns = [_INTERVAL, f"first {_FIRST_EPOCHS} epochs", "all", "batches compared"]
    bound = f"more than {100 * _CLOSE:g} %"
    if not worst:
        verdict = "Their losses are not compared: ours diverged."
    elif max(worst) <= _CLOSE:
        verdict = (
            f"Both programs compute the same: in the first {_FIRST_EPOCHS} epochs no loss differs by {bound}. Later "
            "the rounding of float32, which differs, may grow."
        )
    else:
        verdict = f"**They do not agree**: in the first {_FIRST_EPOCHS} epochs losses differ by {bound}."
    caption = "Largest relative difference of rank 0's losses, batch by batch"
    paragraphs = [f"{text} PyTorch {gloo.version}; its times are in the table of times.", verdict]
    return Section("The same by PyTorch over Gloo", paragraphs, [Table(caption, columns, rows)], [plots.gloo(results)])
