"""Two hidden layers on Fashion-MNIST: full batch and mini-batches, the best weights kept, each stage's time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from experiments.lab import ExperimentFailed, JobSpec, Lab, by_turns, run_job
from experiments.page import Claim, Page
from experiments.shared.charts import Colours, Figure
from experiments.shared.data import TRAINING_SAMPLES
from experiments.shared.intervals import Ratio, mean, paired_ratio, spread_text
from experiments.shared.machine import cores
from experiments.shared.metrics import Event
from experiments.shared.pages import NONE, Table, plural

MODEL = "mlp:784,128,64,10"
LEARNING_RATE = 0.01
LARGE_RATE = 0.5  # With which the validation loss rises again, long before the last pass.
BATCH = 64  # All workers together have so many, in mini-batches.
VALIDATION_SHARE = 0.1
FULL, MINI = "full batch", "mini-batches"
STAGES = ["forward", "backward", "exchange", "total"]
COMPARED = ["forward", "backward", "total"]
NEARLY_HALF = (0.40, 0.55)  # What is still called nearly 50 %: of the time that is saved, or of speed that is won.
LOSS_AGREEMENT = 1e-4  # Relative, of the losses of a pass with any number of workers: they differ by rounding alone.
_PUBLISHED = "nearly 50 %"
_SMOOTHED = 0.15  # A point of the loss's curve is the mean over so large a share of the updates before it.
_QUICK_PER_CLASS = 100  # Training images of each class in the quick form.
# In the full and the quick form: iterations, of which each is a pass over the training split in full batch; how many
# workers train; and how often each timed training runs.
PASSES = 60, 6
WORKERS = (1, 2, 4), (1, 2)
ROUNDS = 5, 1
_BSP = ["--mode=bsp", "--optimizer=sgd"]


def samples(lab: Lab) -> int:
    """The training split has so many, without those for validation."""
    return round(lab.pick(TRAINING_SAMPLES, 10 * _QUICK_PER_CLASS) * (1 - VALIDATION_SHARE))


def updates_per_pass(lab: Lab, batches: str) -> int:
    """How often the weights change while all samples are used once."""
    return 1 if batches == FULL else math.ceil(samples(lab) / BATCH)


def _worker(lab: Lab, batches: str, number: int) -> list[str]:
    less = [f"--samples_per_class={_QUICK_PER_CLASS}"] if lab.quick else []
    size = "full" if batches == FULL else BATCH // number
    data = ["--dataset=fashion-mnist", f"--validation_split={VALIDATION_SHARE}", *less]
    return [*data, f"--model={MODEL}", "--activation=sigmoid", f"--batch_size={size}"]


def _name(batches: str) -> str:
    return "full" if batches == FULL else "mini"


@dataclass
class Training:
    """What the lead found on the way: after each pass, on the validation and the test split."""

    batches: str
    workers: int
    seed: int
    learning_rate: float
    per_pass: int  # Updates.
    # By step. They are of the same weights, but for the last ones, unless these are the best.
    validation: pd.DataFrame
    test: pd.DataFrame
    best: Event  # The test of the weights that were kept.
    losses: list[float] = field(default_factory=list)  # Each update's batch has one, where there is one worker.

    @property
    def best_pass(self) -> float:
        """After which the kept weights were there."""
        return self.best["step"] / self.per_pass

    @property
    def best_validation(self) -> pd.Series:
        """The kept weights on the validation split."""
        return self.validation.loc[self.best["step"]]


def train(lab: Lab, batches: str, number: int, seed: int = 1, learning_rate: float = LEARNING_RATE) -> Training:
    """Trains for all passes, evaluates after each, and keeps the best weights by the loss on the validation split."""
    name = f"learn-{_name(batches)}-{number}-s{seed}" + ("" if learning_rate == LEARNING_RATE else "-large")
    kept = [f"--epochs={lab.pick(*PASSES)}", "--eval_every=1", "--keep_best=validation", f"--seed={seed}"]
    server, worker = [*_BSP, f"--learning_rate={learning_rate}"], [*_worker(lab, batches, number), *kept]
    job = run_job(lab, JobSpec(name, number, server, worker, shared_memory=True, all_metrics=False))
    validation, test = job.evaluations("validation"), job.workers[0].named("eval")
    test = [event for event in test if event["split"] == "test"]
    if len(validation) != lab.pick(*PASSES) or not test:
        raise ExperimentFailed(f"{name}: {len(validation)} evaluations of {lab.pick(*PASSES)} passes in its metrics")
    losses = job.steps["loss"].tolist() if number == 1 else []
    per_pass = updates_per_pass(lab, batches)
    both = (pd.DataFrame(events).set_index("step") for events in (validation, test[:-1]))
    return Training(batches, number, seed, learning_rate, per_pass, *both, test[-1], losses)


def train_all(lab: Lab) -> list[Training]:
    """With the published learning rate: each number of workers, and more seeds with two."""
    found = []
    for batches in (FULL, MINI):
        found += [train(lab, batches, number) for number in lab.pick(*WORKERS)]
        found += [train(lab, batches, 2, seed) for seed in lab.pick((2, 3), (2,))]
    return found


def apart(trainings: list[Training]) -> float:
    """By how much the losses after a pass differ at most, relative to those of one worker with the same seed."""
    alone = {(one.batches, one.seed): one.validation["loss"] for one in trainings if one.workers == 1}
    pairs = ((alone.get((one.batches, one.seed)), one.validation["loss"]) for one in trainings)
    return max(float((theirs / ours - 1).abs().max()) for ours, theirs in pairs if ours is not None)


Timings = dict[tuple[str, int], pd.DataFrame]  # By batches and workers.


def time_all(lab: Lab) -> Timings:
    """All setups by turns, without evaluations, and with stages that do not overlap. A row a round: where the time of a
    pass went, in seconds, the mean over the workers and all updates but the first; `computing` is forward and backward.
    """

    def one_round(setup: tuple[str, int], number: int) -> dict[str, float]:
        batches, workers = setup
        length = f"--epochs={lab.pick(2, 1)}" if batches == MINI else f"--steps={lab.pick(12, 4)}"
        name = f"time-{_name(batches)}-{workers}-r{number}"
        worker = [*_worker(lab, batches, workers), length, "--overlap=false"]
        server = [*_BSP, f"--learning_rate={LEARNING_RATE}"]
        job = run_job(lab, JobSpec(name, workers, server, worker, shared_memory=True))
        if job.iterations.empty:
            raise ExperimentFailed(f"{name}: no step in its metrics but the first")
        found = updates_per_pass(lab, batches) * job.iterations[["forward", "backward", "total"]].mean()
        computing = found["forward"] + found["backward"]
        return {**found, "computing": computing, "exchange": max(0.0, found["total"] - computing)}

    setups = [(batches, number) for batches in (FULL, MINI) for number in lab.pick(*WORKERS)]
    return by_turns(lab.pick(*ROUNDS), setups, one_round)


def ratio(timings: Timings, batches: str, workers: int, stage: str) -> Ratio:
    """A stage's time to that of one worker, round by round; the total is compared with computing alone."""
    alone = timings[batches, 1]["computing" if stage == "total" else stage]
    found = paired_ratio(timings[batches, workers][stage], alone)
    assert found is not None  # Both have all rounds, and none takes no time.
    return found


def run(lab: Lab) -> Page:
    timings = time_all(lab)
    trainings = train_all(lab)
    large = train(lab, MINI, 2, learning_rate=LARGE_RATE)
    first = {(one.batches, one.workers): one for one in reversed(trainings)}
    full, mini, two = first[FULL, 1], first[MINI, 1], [first[batches, 2] for batches in (FULL, MINI)]
    number, ours = len(full.losses), timings[MINI, 2].mean()
    around = mini.losses[max(0, number - 10) : number + 10]
    of_two = {
        batches: [one for one in trainings if (one.batches, one.workers) == (batches, 2)] for batches in (FULL, MINI)
    }
    saved = {stage: ratio(timings, FULL, 2, stage) for stage in COMPARED}
    return Page(
        "Two hidden layers, in full batch and in mini-batches",
        _finding(lab, full, mini, saved),
        "hidden_layers.md.j2",
        [_claim(timings[FULL, 2].mean(), stage, found) for stage, found in saved.items()],
        tables={"learnt": _learnt([*trainings, large]), "times": _times(timings)},
        figures=[_loss_figure(full, mini), _passes_figure([*two, large]), _stages_figure(timings)],
        values={
            "held_out": round(samples(lab) / (1 - VALIDATION_SHARE) * VALIDATION_SHARE),
            "full": full,
            "mini": mini,
            "two": two,
            "large": large,
            "around": (len(around), mean(around)),
            "apart": apart(trainings),
            "numbers": sorted({one.workers for one in trainings} - {1}),
            "seeds": len(of_two[FULL]),
            "accuracies": {
                batches: spread_text([100 * one.best["accuracy"] for one in own], 1) for batches, own in of_two.items()
            },
            "update_us": 1e6 * timings[MINI, 1]["computing"].mean() / updates_per_pass(lab, MINI),
            "exchange_share": ours["exchange"] / ours["total"],
        },
    )


def _finding(lab: Lab, full: Training, mini: Training, saved: dict[str, Ratio]) -> str:
    less = [percent(1 - saved[stage].mean) for stage in ("forward", "backward")]
    return (
        f"{lab.pick(*PASSES)} iterations in full batch reach {percent(full.best['accuracy'], 1)} test accuracy, as "
        f"many passes in mini-batches {percent(mini.best['accuracy'], 1)}; in full batch two workers take {less[0]} "
        f"less time for the forward stage and {less[1]} for the backward one (published: {_PUBLISHED})."
    )


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %".replace("-", "−")


def _claim(two: pd.Series, stage: str, found: Ratio) -> Claim:
    saved = 1 - found.mean
    several = found.low is not None and found.high is not None
    interval = f" ({percent(1 - found.high)} to {percent(1 - found.low)})" if several else ""
    agrees = NEARLY_HALF[0] <= saved <= NEARLY_HALF[1]
    names = {"forward": "the forward stage", "backward": "the backward stage", "total": "an iteration in all"}
    what = f"time of {names[stage]}, two workers against sequential, full batch"
    less = f"{percent(saved)} less" if saved >= 0 else f"{percent(-saved)} more"
    return Claim(what, _PUBLISHED, less + interval, agrees, _why(two, stage, saved))


def _why(two: pd.Series, stage: str, saved: float) -> str:
    low, high = NEARLY_HALF
    faster = 1 / (1 - saved) - 1
    other = "would agree too" if low <= faster <= high else "would not agree"
    said = [
        'Published is a speed-up per stage of "nearly 50 %". It is read here as nearly 50 % less time; '
        f"{percent(low)} to {percent(high)} counts as that. Read as nearly 50 % faster, it {other}: ours is "
        f"{percent(abs(faster))} {'faster' if faster >= 0 else 'slower'}. Each of two workers computes half of the "
        "samples."
    ]
    if stage == "total":
        said.append(
            "The exchange, which a sequential program does not have, is "
            f"{percent(two['exchange'] / two['total'])} of the iteration with two workers: waiting for the "
            "slower one is in it."
        )
    if saved < 0.5:
        said.append(
            f"What is missing to 50 % may be what two workers that compute at once on {len(cores())} cores take from "
            "each other (memory bandwidth, caches, the clock), and what else ran there."
        )
    else:
        said.append(
            "Half or more can be saved where half of a batch fits into caches that the whole does not fit into, or "
            "where something else slowed the sequential runs."
        )
    return " ".join(said)


def _learnt(trainings: Sequence[Training]) -> Table:
    columns = ["training", "workers", "seed", "updates", "kept after pass", "validation loss", "test loss"]
    table = Table("What was kept of each training", [*columns, "test accuracy"])
    for one in trainings:
        count = len(one.validation)
        row = [f"{one.batches}, learning rate {one.learning_rate:g}", str(one.workers), str(one.seed)]
        row += [f"{one.per_pass * count:,}", f"{one.best_pass:g} of {count}", f"{one.best_validation['loss']:.4f}"]
        table.rows.append([*row, f"{one.best['loss']:.4f}", percent(one.best["accuracy"], 2)])
    return table


def _times(timings: Timings) -> Table:
    caption = "Milliseconds of a pass over the training split, and their ratios to the sequential program's"
    table = Table(caption, ["training", *STAGES, *(f"{stage}, ratio" for stage in COMPARED)])
    for (batches, number), rounds in timings.items():
        ms = (1000 * rounds.mean()).map("{:.1f}".format)
        if number == 1:
            parts = [ms["forward"], ms["backward"], NONE, ms["computing"]]
            table.rows.append([f"{batches}, sequential", *parts, "1", "1", "1"])
        compared = [f"{ratio(timings, batches, number, stage).mean:.2f}" for stage in COMPARED]
        table.rows.append([f"{batches}, {plural(number, 'worker')}", *ms[STAGES], *compared])
    return table


def _loss_figure(full: Training, mini: Training) -> Figure:
    def draw(axes: Any, colours: Colours) -> None:
        axes.plot(*zip(*_smoothed(mini.losses), strict=True), color=colours["asp"], linewidth=1.4, label=mini.batches)
        updates = range(1, len(full.losses) + 1)
        axes.plot(updates, full.losses, color=colours["bsp"], linewidth=2.6, label=full.batches)
        axes.set_xscale("log")

    caption = (
        "The loss of the batch that an update is made of, with one worker and the same learning rate and initial "
        f"weights; of mini-batches the mean over the last {percent(_SMOOTHED)} of the updates so far."
    )
    return Figure("updates", "Training loss over updates", caption, "updates of the weights", "training loss", draw)


def _smoothed(losses: Sequence[float]) -> list[tuple[float, float]]:
    """Means over windows that grow with the number of updates, at some two hundred places."""
    ends = sorted({round(len(losses) ** (step / 200)) for step in range(201)})
    begins = [min(end - 1, round(end * (1 - _SMOOTHED))) for end in ends]
    return [(end, sum(losses[begin:end]) / (end - begin)) for begin, end in zip(begins, ends, strict=True)]


def _passes_figure(trainings: Sequence[Training]) -> Figure:
    def draw(all_axes: list[Any], colours: Colours) -> None:
        for one, colour in zip(trainings, ("bsp", "asp", "ssp"), strict=True):
            shown = [(one.validation, "loss", one.best_validation), (one.test, "accuracy", one.best)]
            if one.best["step"] > one.test.index[-1]:
                shown[1] = (pd.concat([one.test, pd.DataFrame([one.best]).set_index("step")]), "accuracy", one.best)
            for axes, (events, name, kept) in zip(all_axes, shown, strict=True):
                factor, label = 100 if name == "accuracy" else 1, f"{one.batches}, {one.learning_rate:g}"
                curve = factor * events[name]
                axes.plot(curve.index / one.per_pass, curve, color=colours[colour], linewidth=1.6, label=label)
                axes.plot(one.best_pass, factor * kept[name], "o", color=colours[colour], markersize=6)
        all_axes[0].set_ylabel("validation loss")
        all_axes[1].set_ylabel("test accuracy, %")

    caption = (
        "After each pass over the training split; a dot is what was kept, by the loss on the validation split. Two "
        "workers, first seed."
    )
    options = {"panels": 2, "height_inches": 4.8}
    return Figure("passes", "The best by validation loss", caption, "passes", "", draw, **options)


def _stages_figure(timings: Timings) -> Figure:
    names, bars = [], []
    for (batches, number), rounds in timings.items():
        if number == 1:
            names.append(f"{batches}, sequential")
            bars.append([*rounds[["forward", "backward"]].mean(), 0])
        names.append(plural(number, "worker"))
        bars.append(rounds[STAGES[:3]].mean().tolist())

    def draw(axes: Any, colours: Colours) -> None:
        places = [place + (0.5 if place >= len(bars) // 2 else 0) for place in range(len(bars))]
        widths = 1000 * pd.DataFrame(bars, columns=STAGES[:3])
        left = widths.cumsum(axis=1) - widths
        for stage, colour in zip(STAGES, ("compute", "ssp", "wait"), strict=False):
            axes.barh(places, widths[stage], left=left[stage], color=colours[colour], label=stage, height=0.75)
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.grid(False, axis="y")

    caption = (
        "Of a pass over the training split, with stages that do not overlap: means over the workers and the rounds. "
        "Sequential is one worker's computing without its exchange."
    )
    return Figure("stages", "Where the time goes", caption, "milliseconds", "", draw, height_inches=3.4)
