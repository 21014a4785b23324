"""The demo's training with gradients and weights in 16 bits, and with the largest hundredth of each gradient alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from experiments.lab import JobResult, JobSpec, Lab, run_job
from experiments.page import Claim, Page
from experiments.shared.charts import DASHED, SERIES, Colours, Figure
from experiments.shared.intervals import Interval, interval, mean, paired_difference
from experiments.shared.pages import NONE, Table, plural

WORKERS = 2
MODEL = "mlp:784,256,128,10"
BATCH = 64
MOMENTUM = 0.9
RATES = {"bsp": 0.05, "asp": 0.025}
_SERVERS_MOMENTUM = ("--optimizer=momentum", f"--momentum={MOMENTUM}")
_WORKERS_MOMENTUM = ("--optimizer=sgd", "--compress=topk:0.01", f"--momentum_correction={MOMENTUM}")
_HALF = ("--wire_dtype=bfloat16", "--weights_wire_dtype=bfloat16")
WHOLE = "float32"


@dataclass(frozen=True)
class Form:
    """How what is sent is sent."""

    name: str
    server: tuple[str, ...]
    within: float = 0.0  # Points from float32's accuracy that are expected at most; 0: it is float32.


FORMS = (
    Form(WHOLE, _SERVERS_MOMENTUM),
    Form("bfloat16", (*_SERVERS_MOMENTUM, *_HALF), 0.3),
    Form("bfloat16, error feedback", (*_SERVERS_MOMENTUM, *_HALF, "--error_feedback"), 0.3),
    Form("top-k 1 %", _WORKERS_MOMENTUM, 1.0),
    Form("top-k 1 %, bfloat16", (*_WORKERS_MOMENTUM, *_HALF), 1.0),
)


@dataclass
class Outcome:
    """A form in a mode."""

    form: Form
    mode: str
    percent: dict[int, float] = field(default_factory=dict)  # Accuracy on the test split at the end, by seed.
    curve: dict[float, list[float]] = field(default_factory=dict)  # The same by epoch: a value a seed.


Outcomes = dict[tuple[str, str], Outcome]  # By form and mode.


def seeds(lab: Lab, mode: str) -> range:
    """There are more where the order of arrivals scatters results by more than what is expected at most."""
    return range(1, 1 + lab.pick(20 if mode == "asp" else 5, 1))


def epochs(lab: Lab) -> float:
    """The demo's, but in the quick form."""
    return lab.pick(10, 0.2)


def train_all(lab: Lab) -> Outcomes:
    """All forms in all modes, seed by seed."""
    outcomes = {(form.name, mode): Outcome(form, mode) for mode in RATES for form in FORMS}
    for seed in range(1, 1 + max(len(seeds(lab, mode)) for mode in RATES)):
        for one in outcomes.values():
            if seed not in seeds(lab, one.mode):
                continue
            marks = _train(lab, one, seed).evaluations()
            one.percent[seed] = 100 * marks[-1]["accuracy"]
            for number, mark in enumerate(marks, start=1):
                epoch = epochs(lab) * number / len(marks)
                one.curve.setdefault(epoch, []).append(100 * mark["accuracy"])
    return outcomes


def _train(lab: Lab, one: Outcome, seed: int) -> JobResult:
    folder = f"{one.mode}-{one.form.name.replace(',', '').replace(' %', '').replace(' ', '-')}-s{seed}"
    server = [f"--mode={one.mode}", f"--learning_rate={RATES[one.mode]}", *one.form.server]
    worker = [f"--model={MODEL}", "--activation=relu", "--dataset=fashion-mnist", f"--batch_size={BATCH}"]
    worker += [f"--epochs={epochs(lab)}", f"--eval_every={lab.pick(0.5, 0.1)}", "--validation_split=0.1"]
    job = run_job(lab, JobSpec(folder, WORKERS, server, [*worker, f"--seed={seed}"], shared_memory=True))
    job.last()  # There must be one.
    return job


def run(lab: Lab) -> Page:
    """Trains every form in every mode with every seed."""
    outcomes = train_all(lab)
    return Page(
        "Half the bytes, and a hundredth: what accuracy they cost",
        _finding(outcomes),
        "wire.md.j2",
        expected=[_claim(one, outcomes) for one in outcomes.values() if one.form.name != WHOLE],
        tables={"accuracy": _accuracy(outcomes)},
        figures=[_curves(outcomes)],
    )


def _points(one: Outcome, outcomes: Outcomes) -> Interval:
    """From float32's accuracy with the same seeds."""
    found = paired_difference(one.percent, outcomes[WHOLE, one.mode].percent)
    assert found is not None  # Both have the same seeds.
    return found


def _finding(outcomes: Outcomes) -> str:
    worst: dict[str, float] = {}
    for one in outcomes.values():
        if one.form.name != WHOLE:
            kind, lost = one.form.name.split(",")[0], _points(one, outcomes).mean
            worst[kind] = min(worst.get(kind, lost), lost)
    said = ", ".join(f"{kind} {_minus(f'{lost:+.2f}')}" for kind, lost in worst.items())
    return f"Points of test accuracy from float32's, the least of all modes and forms: {said}."


def _minus(text: str) -> str:
    return text.replace("-", "−")


def _accuracy(outcomes: Outcomes) -> Table:
    """A row for each form, and for each mode its accuracy, and how far that is from float32's."""
    columns = (column for mode in RATES for column in (mode, f"{mode}, points from float32"))
    table = Table("Test accuracy, %", ["sent as", *columns])
    for form in FORMS:
        row = [form.name]
        for mode in RATES:
            one = outcomes[form.name, mode]
            found = interval(list(one.percent.values()))
            row.append(NONE if found is None else found.text())
            row.append(NONE if form.name == WHOLE else _minus(_points(one, outcomes).text(sign="+")))
        table.rows.append(row)
    return table


def _claim(one: Outcome, outcomes: Outcomes) -> Claim:
    """That no form loses more than is expected of it; it agrees if the mean of the differences does not."""
    lost = _points(one, outcomes)
    why = f"The mean over {plural(lost.count, 'seed')}, each beside float32 with the same seed."
    what, expected = f"{one.form.name}, {one.mode}: points from float32", f"at most {one.form.within:g} less"
    return Claim(what, expected, _minus(lost.text(sign="+")), lost.mean >= -one.form.within, why)


def _curves(outcomes: Outcomes) -> Figure:
    """Test accuracy by epoch, of both modes."""

    def draw(panels: list[Any], colours: Colours) -> None:
        for axes, mode in zip(panels, RATES, strict=True):
            for form, series in zip(FORMS, ("bsp", *SERIES), strict=False):
                curve = sorted((epoch, mean(values)) for epoch, values in outcomes[form.name, mode].curve.items())
                look = {"linestyle": "-" if form.name == WHOLE else DASHED, "color": colours[series], "linewidth": 1.6}
                axes.plot(*zip(*curve, strict=True), **look, label=form.name)
            axes.set_title(mode)

    caption = "Each line is the mean over the seeds. Top-k sends a hundredth of each slice of a gradient."
    more = {"panels": 2, "height_inches": 6.0}
    return Figure("accuracy", "Test accuracy, by what is sent", caption, "epochs", "accuracy, %", draw, **more)
