"""The trainings of the hidden-layers experiment, and what is taken from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from events import Event, named
from idx_files import TRAINING_SAMPLES

from .job import JobResult, JobSpec, run_job
from .lab import ExperimentFailed, Lab

MODEL = "mlp:784,128,64,10"
LEARNING_RATE = 0.01
LARGE_RATE = 0.5  # With which the validation loss rises again, long before the last pass.
BATCH = 64  # Of all workers together, in mini-batches.
VALIDATION_SHARE = 0.1
FULL, MINI = "full batch", "mini-batches"
_QUICK_PER_CLASS = 100  # Training images of each class in the quick form.
LOSS_AGREEMENT = 1e-4  # Relative, of the losses of a pass with any number of workers: they differ by rounding alone.


def passes(lab: Lab) -> int:
    """Iterations, as published: in full batch, each is a pass over the training split."""
    return lab.pick(60, 6)


def workers(lab: Lab) -> tuple[int, ...]:
    """How many of them train."""
    return lab.pick((1, 2, 4), (1, 2))


def samples(lab: Lab) -> int:
    """Of the training split, without those for validation."""
    return round(lab.pick(TRAINING_SAMPLES, 10 * _QUICK_PER_CLASS) * (1 - VALIDATION_SHARE))


def seeds(lab: Lab) -> tuple[int, ...]:
    """Of the trainings with two workers; the others have the first alone."""
    return lab.pick((1, 2, 3), (1, 2))


def rounds(lab: Lab) -> int:
    """Of the timed trainings."""
    return lab.pick(5, 1)


def updates_per_pass(lab: Lab, batches: str) -> int:
    """How often the weights change while all samples are used once."""
    return 1 if batches == FULL else math.ceil(samples(lab) / BATCH)


def _data(lab: Lab) -> list[str]:
    less = [] if not lab.quick else [f"--samples_per_class={_QUICK_PER_CLASS}"]
    return ["--dataset=fashion-mnist", f"--validation_split={VALIDATION_SHARE}", *less]


def _worker(lab: Lab, batches: str, number: int) -> list[str]:
    size = "full" if batches == FULL else str(BATCH // number)
    return [*_data(lab), f"--model={MODEL}", "--activation=sigmoid", f"--batch_size={size}"]


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
    validation: list[Event]
    test: list[Event]  # Of the same weights, but the last ones, unless they are the best.
    best: Event  # The test of the weights that were kept.
    losses: list[float] = field(default_factory=list)  # Of each update's batch; of one worker alone.

    @property
    def best_pass(self) -> float:
        """After which the kept weights were there."""
        return self.best["step"] / self.per_pass

    @property
    def best_validation(self) -> Event:
        """The kept weights on the validation split."""
        return next(event for event in self.validation if event["step"] == self.best["step"])


def train(lab: Lab, batches: str, number: int, seed: int = 1, learning_rate: float = LEARNING_RATE) -> Training:
    """Trains for all passes, evaluates after each, and keeps the best weights by the loss on the validation split."""
    name = f"learn-{_name(batches)}-{number}-s{seed}" + ("" if learning_rate == LEARNING_RATE else "-large")
    kept = [f"--epochs={passes(lab)}", "--eval_every=1", "--keep_best=validation", f"--seed={seed}"]
    spec = JobSpec(
        name,
        number,
        ["--mode=bsp", "--optimizer=sgd", f"--learning_rate={learning_rate}"],
        [*_worker(lab, batches, number), *kept],
        shared_memory=True,
        all_metrics=False,
    )
    job = run_job(lab, spec)
    validation, test = job.evaluations("validation"), named(job.workers[0], "eval")
    test = [event for event in test if event["split"] == "test"]
    if len(validation) != passes(lab) or not test:
        raise ExperimentFailed(f"{name}: {len(validation)} evaluations of {passes(lab)} passes in its metrics")
    per_pass, losses = updates_per_pass(lab, batches), [step["loss"] for step in job.steps()] if number == 1 else []
    return Training(batches, number, seed, learning_rate, per_pass, validation, test[:-1], test[-1], losses)


def train_all(lab: Lab) -> list[Training]:
    """With the published learning rate: each number of workers, and more seeds with two."""
    found = []
    for batches in (FULL, MINI):
        found += [train(lab, batches, number) for number in workers(lab)]
        found += [train(lab, batches, 2, seed) for seed in seeds(lab)[1:]]
    return found


def apart(trainings: list[Training]) -> float:
    """By how much the losses after a pass differ at most, relative to those of one worker with the same seed."""
    found = 0.0
    for one in (each for each in trainings if each.workers == 1):
        like = [each for each in trainings if (each.batches, each.seed) == (one.batches, one.seed)]
        for other in like:
            pairs = zip(one.validation, other.validation, strict=True)
            found = max(found, *(abs(b["loss"] / a["loss"] - 1) for a, b in pairs))
    return found


@dataclass(frozen=True)
class Stages:
    """Where the time of a pass went, in seconds: the mean over the workers, and over all updates but the first."""

    forward: float  # With gathering the batch's samples.
    backward: float
    total: float

    @property
    def exchange(self) -> float:
        """The rest: sending gradients, waiting for the other workers and the server, receiving weights."""
        return max(0.0, self.total - self.forward - self.backward)


STAGES = ("forward", "backward", "exchange", "total")


@dataclass
class Timing:
    """All rounds of one setup."""

    batches: str
    workers: int
    rounds: list[Stages] = field(default_factory=list)

    def seconds(self, stage: str) -> list[float]:
        """Of each round."""
        return [getattr(one, stage) for one in self.rounds]


def time_all(lab: Lab) -> list[Timing]:
    """All setups by turns, without evaluations, and with stages that do not overlap."""
    found = [Timing(batches, number) for batches in (FULL, MINI) for number in workers(lab)]
    for number in range(rounds(lab)):
        for one in found:
            length = f"--epochs={lab.pick(2, 1)}" if one.batches == MINI else f"--steps={lab.pick(12, 4)}"
            spec = JobSpec(
                f"time-{_name(one.batches)}-{one.workers}-r{number + 1}",
                one.workers,
                ["--mode=bsp", "--optimizer=sgd", f"--learning_rate={LEARNING_RATE}"],
                [*_worker(lab, one.batches, one.workers), length, "--overlap=false"],
                shared_memory=True,
            )
            one.rounds.append(stages_of(run_job(lab, spec), updates_per_pass(lab, one.batches)))
    return found


def stages_of(job: JobResult, per_pass: int) -> Stages:
    """Of a pass, from a job with any number of updates above one."""
    forward, backward, total = [], [], []
    for rank in range(len(job.workers)):
        for before, now in pairwise(job.steps(rank)):
            forward.append(now["forward_s"])
            backward.append(now["backward_s"])
            total.append(now["t"] - before["t"])
    if not total:
        raise ExperimentFailed(f"{job.folder.name}: no step in its metrics but the first")
    scale = per_pass / len(total)
    return Stages(scale * sum(forward), scale * sum(backward), scale * sum(total))
