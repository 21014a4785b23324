"""All that the function experiment runs, in order."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field

from .function_gloo import Gloo, run_gloo
from .function_runs import INTERVALS, NEVER, Plan, Setting, Training, train
from .lab import Lab
from .network import FLAGS
from .program import run_program

_GRID = 401  # Values of x for the plot of the fitted function.
_HIGHEST_X = 20.0


@dataclass
class Fit:
    """What the network says of each x of grid() at a moment of its training."""

    interval: int
    epochs: float
    outputs: list[float]


@dataclass
class Choice:
    """Initial weights and a learning rate, and the loss after a few epochs, or why there is none."""

    init: str
    learning_rate: float
    outcome: Training


@dataclass
class Results:
    """By interval where it is a dict."""

    plan: Plan
    code: dict[int, list[Training]] = field(default_factory=dict)  # In the order of the plan's seeds.
    text: dict[int, Training] = field(default_factory=dict)
    mixed: dict[int, Training] = field(default_factory=dict)
    tcp: dict[int, Training] = field(default_factory=dict)
    full_batch: Training = field(default_factory=lambda: Training(1, 0))
    choices: list[Choice] = field(default_factory=list)
    gloo: Gloo = field(default_factory=Gloo)
    fits: list[Fit] = field(default_factory=list)

    def first(self, interval: int) -> Training:
        """The code's setting with the first seed, which all other settings have too."""
        return self.code[interval][0]

    def best(self, interval: int) -> Training:
        """Of the code's setting the seed with the lowest loss after the first leg, whose training goes on."""
        return min(self.code[interval], key=lambda one: one.loss_at(self.plan.leg_epochs) or math.inf)


def grid() -> list[tuple[float, float]]:
    """x and y of the function."""
    xs = [_HIGHEST_X * k / (_GRID - 1) for k in range(_GRID)]
    return [(x, math.sqrt(x) * math.sin(3.14 * x / 5)) for x in xs]


def best_constant() -> float:
    """The loss of the constant that fits the function best: its variance."""
    ys = [y for _, y in grid()]
    centre = sum(ys) / len(ys)
    return sum((y - centre) ** 2 for y in ys) / len(ys)


def measure(lab: Lab, plan: Plan) -> Results:
    """Runs what has not been run yet."""
    results = Results(plan)
    for init in ("he", "glorot"):
        for setting in (plan.text, plan.code):
            results.choices.append(_choice(lab, plan, init, setting))
    # Seed by seed, so that the times of all intervals are of the same minutes.
    for seed in plan.seeds:
        for interval in INTERVALS:
            results.code.setdefault(interval, []).append(train(lab, plan, plan.code, interval, seed))
    for interval, legs in plan.legs_max.items():
        best = results.best(interval)
        place = results.code[interval].index(best)
        results.code[interval][place] = train(lab, plan, plan.code, interval, best.seed, legs)
    for interval, legs in plan.text_legs.items():
        results.text[interval] = train(lab, plan, plan.text, interval, plan.seeds[0], legs)
    for interval in plan.mixed_intervals:
        results.mixed[interval] = train(lab, plan, plan.mixed, interval, plan.seeds[0])
    for interval in plan.tcp_intervals:
        epochs = plan.tcp_epochs
        results.tcp[interval] = train(lab, plan, plan.code, interval, plan.seeds[0], epochs=epochs, shared_memory=False)
    results.full_batch = train(lab, plan, plan.code, 1, plan.seeds[0], more=["--batch_size=full"])
    results.gloo = run_gloo(lab, plan)
    for interval in (1, NEVER):
        results.fits += _fits(lab, results.best(interval))
    return results


def _choice(lab: Lab, plan: Plan, init: str, setting: Setting) -> Choice:
    training = train(lab, plan, setting, 1, plan.seeds[0], epochs=plan.choice_epochs, more=[f"--init={init}"])
    return Choice(init, setting.learning_rate, training)


def _fits(lab: Lab, training: Training) -> list[Fit]:
    """After its first leg, half of them, and the last."""
    legs = len(training.weights)
    return [_fit(lab, training, leg) for leg in sorted({0, legs // 2, legs - 1}) if legs]


def _fit(lab: Lab, training: Training, leg: int) -> Fit:
    weights = training.weights[leg]
    data, outputs = weights.parent / "grid.csv", weights.parent / "outputs.csv"
    data.write_text("".join(f"{x:.9g},{y:.9g}\n" for x, y in grid()), encoding="utf-8")
    flags = [flag for flag in FLAGS if not flag.startswith(("--dataset", "--shuffle", "--init"))]
    flags += [f"--dataset=csv:{data},task=regression", f"--init_weights={weights}", f"--predict={outputs}"]
    run_program(lab, "predict", [str(lab.bin / "ps_worker"), *flags], weights.parent)
    with outputs.open(encoding="utf-8", newline="") as lines:
        said = [float(row["output"]) for row in csv.DictReader(lines)]
    return Fit(training.interval, training.leg_ends[leg], said)
