"""The trainings of the wire experiment: the demo's job, its gradients and weights sent in several forms."""

from __future__ import annotations

from dataclasses import dataclass, field

from .job import JobResult, JobSpec, run_job
from .lab import Lab

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
    """A form in a mode, by seed."""

    form: Form
    mode: str
    accuracy: dict[int, float] = field(default_factory=dict)  # On the test split, at the end.
    curve: dict[float, list[float]] = field(default_factory=dict)  # Likewise, by epoch: a value a seed.


def seeds(lab: Lab, mode: str) -> range:
    """Of each form. More where the order of arrivals scatters results by more than what is expected at most."""
    return range(1, 1 + lab.pick(20 if mode == "asp" else 5, 1))


def epochs(lab: Lab) -> float:
    """The demo's, but in the quick form."""
    return lab.pick(10, 0.2)


def train_all(lab: Lab) -> list[Outcome]:
    """All forms in all modes, seed by seed."""
    outcomes = [Outcome(form, mode) for mode in RATES for form in FORMS]
    for seed in range(1, 1 + max(len(seeds(lab, mode)) for mode in RATES)):
        for one in outcomes:
            if seed not in seeds(lab, one.mode):
                continue
            job = _train(lab, one, seed)
            one.accuracy[seed] = job.last()["accuracy"]
            marks = job.evaluations()
            for number, mark in enumerate(marks, start=1):
                epoch = epochs(lab) * number / len(marks)
                one.curve.setdefault(epoch, []).append(mark["accuracy"])
    return outcomes


def _train(lab: Lab, one: Outcome, seed: int) -> JobResult:
    folder = f"{one.mode}-{one.form.name.replace(',', '').replace(' %', '').replace(' ', '-')}-s{seed}"
    server = [f"--mode={one.mode}", f"--learning_rate={RATES[one.mode]}", *one.form.server]
    worker = [f"--model={MODEL}", "--activation=relu", "--dataset=fashion-mnist", f"--batch_size={BATCH}"]
    worker += [
        f"--epochs={epochs(lab)}",
        f"--eval_every={lab.pick(0.5, 0.1)}",
        "--validation_split=0.1",
        f"--seed={seed}",
    ]
    return run_job(lab, JobSpec(folder, WORKERS, server, worker, shared_memory=True))
