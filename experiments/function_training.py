"""The trainings of the function experiment: the network, what each form of it runs, and what is kept of each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.lab import ExperimentFailed, JobSpec, Lab, run_job, run_program
from experiments.shared.intervals import Ratio, paired_ratio
from experiments.shared.machine import file_hash
from experiments.shared.metrics import read_events

# The network and its data, as published, and in ps_worker's flags; other experiments have it too.
SAMPLES = 80_000  # Points of sqrt(x)·sin(3.14·x/5), x uniform from 0 to 20.
BATCH = 1_000  # A worker's batch has so many samples.
LEARNING_RATE = 0.001
MODEL = "mlp:1,80,80,40,1"
FLAGS = (
    "--dataset=function:sqrt_sin",
    f"--model={MODEL}",
    "--activation=relu",
    "--loss=mse",
    "--shuffle=false",
    "--normalize=none",
    "--init=glorot",  # With he's, which is larger, the losses grow without bound at this learning rate.
)
SERVER_FLAGS = ("--mode=bsp", "--optimizer=sgd", f"--learning_rate={LEARNING_RATE}")
DESCRIPTION = (
    f"The network is `{MODEL}` with relu and the mean squared error, fitted to {SAMPLES:,} points of "
    "√x·sin(3.14·x/5), in batches of 1,000 a worker, without shuffling, by SGD at a learning rate of 0.001"
)

WORKERS = 4
NEVER = 0
INTERVALS = (1, 2, 4, 10, NEVER)  # Every so many batches gradients are averaged.
STUCK = 0.001  # A training whose loss changes by a smaller share in a whole leg is going nowhere.
_WEIGHTS = "weights.safetensors"
_IMPORT_LIMIT_S = 120
_PYTORCH = Path(__file__).with_name("function_pytorch.py")


# ---- What is run


@dataclass(frozen=True)
class Setting:
    """What the source's text and its code have differently."""

    name: str
    learning_rate: float
    average_every: str  # Weights are averaged so often, as ps_server has it: batches, or epochs.
    eval_epochs: int  # A multiple of that: then there is one model, which can be evaluated.

    @property
    def counting(self) -> str:
        """When weights are averaged, in words."""
        count = self.average_every.removesuffix("epochs")
        return f"every {count} {'epochs' if self.average_every.endswith('epochs') else 'steps'}"


@dataclass(frozen=True)
class Plan:
    """How much of it a form of the experiment runs. A leg is a job; the next one continues with its weights."""

    code: Setting
    text: Setting
    mixed: Setting  # The code's learning rate, and the text's counting.
    goal: float  # A loss.
    samples: int
    batch: int  # A worker's batch has so many samples.
    leg_epochs: int
    seeds: tuple[int, ...]
    # By interval: for so many legs one seed's training goes on.
    legs_max: dict[int, int]
    text_legs: dict[int, int]  # The same for the text's setting.
    mixed_intervals: tuple[int, ...]
    choice_epochs: int  # With each choice of initial weights,
    tcp_epochs: int  # and over TCP, for the times
    tcp_intervals: tuple[int, ...]  # of these.
    gloo_epochs: int
    gloo_intervals: tuple[int, ...]

    @property
    def batches_per_epoch(self) -> int:
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
    interval: int
    seed: int
    losses: list[tuple[float, float]] = field(default_factory=list)  # Epochs, and the loss of all samples, or infinity.
    # By leg.
    leg_ends: list[float] = field(default_factory=list)  # Epochs.
    weights: list[Path] = field(default_factory=list)  # Where it ended.
    # The times are those of the first leg; rank 0 has a loss before each of its steps.
    thousand_epochs_s: float | None = None
    batch_losses: list[float] = field(default_factory=list)
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
        """At the first evaluation that is under the goal."""
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
    training, epochs = Training(interval, seed), epochs or plan.leg_epochs
    name = "-".join([setting.name, *(flag.rpartition("=")[2] for flag in more), f"every{interval}", f"seed{seed}"])
    name += "" if shared_memory else "-tcp"
    per_epoch = 1 if "--batch_size=full" in more else plan.batches_per_epoch
    server = [
        *("--mode=local_sgd", "--local_sync=gradients", f"--local_steps={interval}"),
        *(f"--average_every={setting.average_every}", "--optimizer=sgd", f"--learning_rate={setting.learning_rate}"),
    ]
    for leg in range(1, legs + 1):
        if training.epochs_until(plan.goal) is not None or training.stuck:
            break
        weights = lab.folder / f"{name}-leg{leg}" / _WEIGHTS
        start = [f"--init_weights={path}" for path in training.weights[-1:]]
        worker = [
            *(flag for flag in FLAGS if not (start and flag.startswith("--init="))),
            *(f"--dataset=function:sqrt_sin,samples={plan.samples}", f"--batch_size={plan.batch}"),
            *(f"--eval_every={setting.eval_epochs}", f"--save_weights={weights}", f"--seed={seed}", *start, *more),
            f"--epochs={epochs}",
        ]
        spec = JobSpec(weights.parent.name, WORKERS, server, worker, shared_memory=shared_memory, all_metrics=False)
        try:
            result = run_job(lab, spec)
        except ExperimentFailed:
            training.diverged = _divergence(weights.parent)
            if not training.diverged:
                raise
            break
        before = training.leg_ends[-1] if training.leg_ends else 0
        moments = [*range(setting.eval_epochs, epochs, setting.eval_epochs), epochs]
        found = [math.inf if event["loss"] is None else event["loss"] for event in result.evaluations()]
        if len(found) != len(moments):
            raise ExperimentFailed(f"{spec.name}: {len(found)} evaluations instead of {len(moments)}")
        training.losses += [(before + at, loss) for at, loss in zip(moments, found, strict=True)]
        training.leg_ends.append(before + epochs)
        training.weights.append(weights)
        if leg == 1:
            training.thousand_epochs_s = 1000 * per_epoch * _batch_s(result.steps["t"])
            training.batch_losses = result.steps["loss"][: plan.gloo_epochs * per_epoch].tolist()
    return training


def _batch_s(ends_s: pd.Series) -> float:
    """The mean time from a step's end to the next."""
    return float(ends_s.iloc[-1] - ends_s.iloc[0]) / (len(ends_s) - 1)


def _divergence(folder: Path) -> str:
    """Why the job failed, if it did because values were no longer finite; else empty."""
    for log in sorted(folder.glob("*.log")):
        if found := re.search(r"rank \d+, step \d+: [^;]* is not finite", log.read_text(errors="replace")):
            return found[0]
    return ""


@dataclass
class Gloo:
    """What came of the program by PyTorch over Gloo (function_pytorch.py) with the code's setting, by interval."""

    missing: str = ""  # Why there is nothing.
    version: str = ""  # It is PyTorch's.
    batch_losses: dict[int, list[float]] = field(default_factory=dict)  # Rank 0 has one before each of its steps.
    thousand_epochs_s: dict[int, float] = field(default_factory=dict)


def run_gloo(lab: Lab, plan: Plan) -> Gloo:
    """All intervals of the plan, with its first seed; or what an earlier call left."""
    gloo, folder = Gloo(), lab.folder / "gloo"
    try:
        command = [lab.python, "-c", "import torch; print(torch.__version__)"]
        gloo.version = run_program(lab, "import", command, folder, _IMPORT_LIMIT_S).out.read_text().strip()
        for interval in plan.gloo_intervals:
            steps = _gloo_steps(lab, plan, interval, folder / f"every{interval}", gloo.version)
            gloo.batch_losses[interval] = steps["loss"].tolist()
            gloo.thousand_epochs_s[interval] = 1000 * plan.batches_per_epoch * _batch_s(steps["t"])
    except ExperimentFailed as failed:
        return Gloo(missing="PyTorch is not installed" if "No module named" in str(failed) else str(failed))
    return gloo


def _gloo_steps(lab: Lab, plan: Plan, interval: int, folder: Path, version: str) -> pd.DataFrame:
    """They are rank 0's."""
    flags = [
        *(f"--widths={MODEL.removeprefix('mlp:')}", f"--workers={WORKERS}", f"--samples={plan.samples}"),
        *(f"--batch_size={plan.batch}", f"--epochs={plan.gloo_epochs}", f"--seed={plan.seeds[0]}"),
        *(f"--local_steps={interval}", f"--learning_rate={plan.code.learning_rate}"),
        f"--average_every={int(plan.code.average_every.removesuffix('epochs')) * plan.batches_per_epoch}",
    ]
    identity = {"program": file_hash(_PYTORCH), "flags": flags, "version": version}

    def make() -> dict[str, Any]:
        run_program(lab, "gloo", [lab.python, "-B", str(_PYTORCH), f"--folder={folder}", *flags], folder)
        return {}

    lab.once(f"gloo-{folder.name}", folder / "program.json", identity, make)
    return pd.DataFrame(read_events(folder / "torch0.jsonl").named("step"))


@dataclass
class Fit:
    """What the network says of each x of GRID at a moment of its training."""

    interval: int
    epochs: float
    outputs: list[float]


GRID = np.linspace(0, 20, 401)
FUNCTION = np.sqrt(GRID) * np.sin(3.14 * GRID / 5)


@dataclass
class Results:
    """By interval where it is a dict."""

    plan: Plan
    choices: dict[tuple[str, float], Training]  # By initial weights and learning rate, after a few epochs.
    code: dict[int, list[Training]]  # In the order of the plan's seeds.
    text: dict[int, Training]
    mixed: dict[int, Training]
    tcp: dict[int, Training]
    full_batch: Training
    gloo: Gloo
    fits: list[Fit] = field(default_factory=list)

    def first(self, interval: int) -> Training:
        """The code's setting with the first seed, which all other settings have too."""
        return self.code[interval][0]

    def best(self, interval: int) -> Training:
        """The code's setting with the seed that has the lowest loss after the first leg, whose training goes on."""
        return min(self.code[interval], key=lambda one: one.loss_at(self.plan.leg_epochs) or math.inf)

    def time_ratio(self, interval: int) -> Ratio | None:
        """The time for as many epochs with this interval over that with averaging after every batch; by seed, the
        first leg. None where one of them has diverged with every seed.
        """
        times = ({one.seed: one.thousand_epochs_s for one in self.code[each] if one.thousand_epochs_s}
                 for each in (interval, 1))  # fmt: skip
        return paired_ratio(*times)


def measure(lab: Lab, plan: Plan) -> Results:
    """Runs what has not been run yet."""
    code, first = plan.code, plan.seeds[0]
    choices, trainings = {}, {interval: [] for interval in INTERVALS}
    for init in ("he", "glorot"):
        for setting in (plan.text, code):
            more = {"epochs": plan.choice_epochs, "more": [f"--init={init}"]}
            choices[init, setting.learning_rate] = train(lab, plan, setting, 1, first, **more)
    # Seed by seed, so that the times of all intervals are of the same minutes.
    for seed in plan.seeds:
        for interval in INTERVALS:
            trainings[interval].append(train(lab, plan, code, interval, seed))
    results = Results(plan, choices, trainings, {}, {}, {}, Training(1, 0), Gloo())
    for interval, legs in plan.legs_max.items():
        best = results.best(interval)
        place = trainings[interval].index(best)
        trainings[interval][place] = train(lab, plan, code, interval, best.seed, legs)
    results.text = {each: train(lab, plan, plan.text, each, first, legs) for each, legs in plan.text_legs.items()}
    results.mixed = {each: train(lab, plan, plan.mixed, each, first) for each in plan.mixed_intervals}
    tcp = {"epochs": plan.tcp_epochs, "shared_memory": False}
    results.tcp = {each: train(lab, plan, code, each, first, **tcp) for each in plan.tcp_intervals}
    results.full_batch = train(lab, plan, code, 1, first, more=["--batch_size=full"])
    results.gloo = run_gloo(lab, plan)
    for training in map(results.best, (1, NEVER)):
        legs = len(training.weights)  # After the first, half of them, and the last.
        results.fits += [_fit(lab, training, leg) for leg in sorted({0, legs // 2, legs - 1}) if legs]
    return results


def _fit(lab: Lab, training: Training, leg: int) -> Fit:
    weights = training.weights[leg]
    data, outputs = weights.parent / "grid.csv", weights.parent / "outputs.csv"
    np.savetxt(data, np.column_stack([GRID, FUNCTION]), "%.9g", ",")
    flags = [flag for flag in FLAGS if not flag.startswith(("--dataset", "--shuffle", "--init"))]
    flags += [f"--dataset=csv:{data},task=regression", f"--init_weights={weights}", f"--predict={outputs}"]
    run_program(lab, "predict", [str(lab.bin / "ps_worker"), *flags], weights.parent)
    return Fit(training.interval, training.leg_ends[leg], pd.read_csv(outputs)["output"].tolist())
