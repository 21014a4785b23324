"""The function experiment's jobs: what they are started with, and what is kept of each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .job import JobResult, JobSpec, run_job
from .lab import ExperimentFailed, Lab
from .network import BATCH, FLAGS, SAMPLES

WORKERS = 4
NEVER = 0
INTERVALS = (1, 2, 4, 10, NEVER)  # Every so many batches gradients are averaged.
STUCK = 0.001  # Of the loss: a training whose evaluations in a whole leg differ by less is going nowhere.
_WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Setting:
    """What the source's text and its code have differently."""

    name: str
    learning_rate: float
    average_every: str  # Of weights, as ps_server has it: batches, or epochs.
    eval_epochs: int  # A multiple of that: then there is one model, which can be evaluated.


@dataclass(frozen=True)
class Plan:
    """How much of it a form of the experiment runs. A leg is a job; the next one continues with its weights."""

    code: Setting
    text: Setting
    mixed: Setting  # The code's learning rate, and the text's counting.
    goal: float  # A loss.
    samples: int
    batch: int  # Of each worker.
    leg_epochs: int
    seeds: tuple[int, ...]
    # By interval: for so many legs one seed's training goes on.
    legs_max: dict[int, int]
    text_legs: dict[int, int]  # Of the text's setting.
    mixed_intervals: tuple[int, ...]
    choice_epochs: int  # With each choice of initial weights,
    tcp_epochs: int  # and over TCP, for the times
    tcp_intervals: tuple[int, ...]  # of these.
    gloo_epochs: int
    gloo_intervals: tuple[int, ...]

    @property
    def batches_per_epoch(self) -> int:
        """Of each worker."""
        return self.samples // (WORKERS * self.batch)


FULL = Plan(
    Setting("code", 0.005, "200epochs", 200),
    Setting("text", 0.001, "200", 50),
    Setting("mixed", 0.005, "200", 50),
    *(0.05, SAMPLES, BATCH, 800),
    seeds=(1, 2, 3, 4, 5),
    legs_max={1: 6, 2: 5, 4: 5, 10: 5, NEVER: 8},
    text_legs={1: 5, 2: 1, 4: 1, 10: 1, NEVER: 1},
    mixed_intervals=(10, NEVER),
    choice_epochs=20,
    tcp_epochs=100,
    tcp_intervals=INTERVALS,
    gloo_epochs=60,
    gloo_intervals=INTERVALS,
)
QUICK = Plan(
    Setting("code", 0.005, "2epochs", 2),
    Setting("text", 0.001, "20", 2),
    Setting("mixed", 0.005, "20", 2),
    *(4.39, 8_000, 100, 4),
    seeds=(1, 2),
    legs_max={1: 2, 2: 1, 4: 1, 10: 2, NEVER: 1},
    text_legs={1: 1, NEVER: 1},
    mixed_intervals=(NEVER,),
    choice_epochs=1,
    tcp_epochs=1,
    tcp_intervals=(1,),
    gloo_epochs=4,
    gloo_intervals=(2,),
)


@dataclass
class Training:
    """What came of one seed with one interval, over all its legs."""

    interval: int
    seed: int
    losses: list[tuple[float, float]] = field(
        default_factory=list
    )  # Epochs, and the loss over all samples, or infinity.
    # By leg.
    leg_ends: list[float] = field(default_factory=list)  # Epochs.
    thousand_epochs_s: list[float] = field(default_factory=list)
    weights: list[Path] = field(default_factory=list)  # Where it ended.
    batch_losses: list[float] = field(default_factory=list)  # Of rank 0 in the first leg, before each of its steps.
    diverged: str = ""  # Why it ended early, as the system says it.

    @property
    def epochs(self) -> float:
        """Up to its last evaluation."""
        return self.losses[-1][0] if self.losses else 0

    @property
    def stuck(self) -> bool:
        """Whether a whole leg has brought next to nothing."""
        legs = [0, *self.leg_ends]
        last = [loss for at, loss in self.losses if len(legs) > 1 and at > legs[-2]]
        return len(last) > 1 and max(last) - min(last) < STUCK * max(last)

    def loss_at(self, epochs: float) -> float | None:
        """By an evaluation after just so many."""
        return next((loss for at, loss in self.losses if at == epochs), None)

    def epochs_until(self, goal: float) -> float | None:
        """Of the first evaluation that is under the goal."""
        return next((at for at, loss in self.losses if loss < goal), None)


def train(
    lab: Lab,
    plan: Plan,
    setting: Setting,
    interval: int,
    seed: int,
    legs: int = 1,
    *,
    epochs: int = 0,
    more: Sequence[str] = (),
    shared_memory: bool = True,
) -> Training:
    """So many legs, or fewer if an evaluation is under the goal before, or training is stuck.

    `epochs`: of a leg, if not the plan's. `more`: flags of the workers, of which --batch_size=full is understood.
    `shared_memory`: or else TCP.

    Legs are one training in parts: at a leg's end weights are averaged, so that all workers have the saved ones; SGD
    has no state besides; and without shuffling all epochs are alike.
    """
    training = Training(interval, seed)
    name = "-".join([setting.name, *(flag.rpartition("=")[2] for flag in more), f"every{interval}", f"seed{seed}"])
    name += "" if shared_memory else "-tcp"
    per_epoch = 1 if "--batch_size=full" in more else plan.batches_per_epoch
    for leg in range(legs):
        if training.epochs_until(plan.goal) is not None or training.stuck:
            break
        start = [f"--init_weights={training.weights[-1]}"] if training.weights else []
        spec = _job(lab, plan, setting, f"{name}-leg{leg + 1}", interval, [f"--seed={seed}", *start, *more])
        spec.worker.append(f"--epochs={epochs or plan.leg_epochs}")
        spec.shared_memory = shared_memory
        try:
            result = run_job(lab, spec)
        except ExperimentFailed:
            training.diverged = _divergence(lab.folder / spec.name)
            if not training.diverged:
                raise
            break
        _add(training, plan, setting, result, epochs or plan.leg_epochs, per_epoch)
    return training


def _job(lab: Lab, plan: Plan, setting: Setting, name: str, interval: int, more: Sequence[str]) -> JobSpec:
    """One leg, but for how long it is."""
    continues = any(flag.startswith("--init_weights=") for flag in more)
    network = [flag for flag in FLAGS if not (continues and flag.startswith("--init="))]
    return JobSpec(
        name,
        WORKERS,
        [
            *("--mode=local_sgd", "--local_sync=gradients", f"--local_steps={interval}"),
            *(f"--average_every={setting.average_every}", "--optimizer=sgd"),
            f"--learning_rate={setting.learning_rate}",
        ],
        [
            *(*network, f"--dataset=function:sqrt_sin,samples={plan.samples}", f"--batch_size={plan.batch}"),
            *(f"--eval_every={setting.eval_epochs}", f"--save_weights={lab.folder / name / _WEIGHTS}", *more),
        ],
        all_metrics=False,
    )


def _add(training: Training, plan: Plan, setting: Setting, result: JobResult, epochs: int, per_epoch: int) -> None:
    before = training.leg_ends[-1] if training.leg_ends else 0
    moments = [*range(setting.eval_epochs, epochs, setting.eval_epochs), epochs]
    found = result.evaluations()
    if len(found) != len(moments):
        raise ExperimentFailed(f"{result.folder.name}: {len(found)} evaluations instead of {len(moments)}")
    losses = [math.inf if event["loss"] is None else event["loss"] for event in found]
    training.losses += [(before + at, loss) for at, loss in zip(moments, losses, strict=True)]
    training.leg_ends.append(before + epochs)
    steps = result.steps()
    batch_s = (steps[-1]["t"] - steps[0]["t"]) / (len(steps) - 1)
    training.thousand_epochs_s.append(1000 * per_epoch * batch_s)
    training.weights.append(result.folder / _WEIGHTS)
    if not training.batch_losses:
        training.batch_losses = [step["loss"] for step in steps[: plan.gloo_epochs * per_epoch]]


def _divergence(folder: Path) -> str:
    """Why the job failed, if it did because values were no longer finite; else empty."""
    for log in sorted(folder.glob("*.log")):
        if found := re.search(r"rank \d+, step \d+: [^;]* is not finite", log.read_text(errors="replace")):
            return found[0]
    return ""
