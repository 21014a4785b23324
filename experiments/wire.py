"""The demo's training with gradients and weights in 16 bits, and with the largest hundredth of each gradient alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.accuracy import Accuracies, signed
from experiments.lab import JobSpec, Lab, run_job
from experiments.page import Claim, Page
from experiments.shared.charts import DASHED, SERIES, Colours, Figure
from experiments.shared.pages import plural

WORKERS = 2
MODEL = "mlp:784,256,128,10"
BATCH = 64
MOMENTUM = 0.9
EPOCHS = 10, 0.2  # The demo's, and those of the quick form.
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


def seeds(lab: Lab, mode: str) -> range:
    """There are more where the order of arrivals scatters results by more than what is expected at most."""
    return range(1, 1 + lab.pick(20 if mode == "asp" else 5, 1))


def train_all(lab: Lab) -> pd.DataFrame:
    """All forms in all modes, seed by seed: a row for each evaluation, with its epoch and the test accuracy."""
    rows = []
    for seed in range(1, 1 + max(len(seeds(lab, mode)) for mode in RATES)):
        for mode in (mode for mode in RATES if seed in seeds(lab, mode)):
            for form in FORMS:
                marks = _train(lab, form, mode, seed)
                for number, mark in enumerate(marks, start=1):
                    epoch = lab.pick(*EPOCHS) * number / len(marks)
                    rows.append((form.name, mode, seed, epoch, 100 * mark["accuracy"]))
    return pd.DataFrame(rows, columns=["form", "mode", "seed", "epoch", "percent"])


def _train(lab: Lab, form: Form, mode: str, seed: int) -> list[dict[str, Any]]:
    folder = f"{mode}-{form.name.replace(',', '').replace(' %', '').replace(' ', '-')}-s{seed}"
    server = [f"--mode={mode}", f"--learning_rate={RATES[mode]}", *form.server]
    worker = [f"--model={MODEL}", "--activation=relu", "--dataset=fashion-mnist", f"--batch_size={BATCH}"]
    worker += [f"--epochs={lab.pick(*EPOCHS)}", f"--eval_every={lab.pick(0.5, 0.1)}", "--validation_split=0.1"]
    job = run_job(lab, JobSpec(folder, WORKERS, server, [*worker, f"--seed={seed}"], shared_memory=True))
    job.last()  # There must be one.
    return job.evaluations()


def run(lab: Lab) -> Page:
    found = train_all(lab)
    last = found.groupby(["form", "mode", "seed"])["percent"].last()
    keys = [(form.name, mode) for mode in RATES for form in FORMS]
    accuracies = Accuracies(WHOLE, 2, {key: last[key].to_dict() for key in keys})
    worst: dict[str, float] = {}
    for form, mode in keys:
        if form != WHOLE:
            kind, lost = form.split(",")[0], accuracies.apart(form, mode).mean
            worst[kind] = min(worst.get(kind, lost), lost)
    said = ", ".join(f"{kind} {signed(lost, 2)}" for kind, lost in worst.items())
    return Page(
        "Half the bytes, and a hundredth: what accuracy they cost",
        f"Points of test accuracy from float32's, the least of all modes and forms: {said}.",
        "wire.md.j2",
        expected=[_claim(form, mode, accuracies) for mode in RATES for form in FORMS if form.name != WHOLE],
        tables={"accuracy": accuracies.table("sent as")},
        figures=[_curves(found)],
    )


def _claim(form: Form, mode: str, accuracies: Accuracies) -> Claim:
    """That no form loses more than is expected of it; it agrees if the mean of the differences does not."""
    lost = accuracies.apart(form.name, mode)
    why = f"The mean over {plural(lost.count, 'seed')}, each beside float32 with the same seed."
    what, expected = f"{form.name}, {mode}: points from float32", f"at most {form.within:g} less"
    return Claim(what, expected, accuracies.apart_text(form.name, mode), lost.mean >= -form.within, why)


def _curves(found: pd.DataFrame) -> Figure:
    means = found.groupby(["form", "mode", "epoch"])["percent"].mean()

    def draw(panels: list[Any], colours: Colours) -> None:
        for axes, mode in zip(panels, RATES, strict=True):
            for form, series in zip(FORMS, ("bsp", *SERIES), strict=False):
                curve = means[form.name, mode]
                look = {"linestyle": "-" if form.name == WHOLE else DASHED, "color": colours[series], "linewidth": 1.6}
                axes.plot(curve.index, curve, **look, label=form.name)
            axes.set_title(mode)

    caption = "Each line is the mean over the seeds. Top-k sends a hundredth of each slice of a gradient."
    more = {"panels": 2, "height_inches": 6.0}
    return Figure("accuracy", "Test accuracy, by what is sent", caption, "epochs", "accuracy, %", draw, **more)
