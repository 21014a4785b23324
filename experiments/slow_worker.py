"""One of four workers is four times slower: what each mode makes of what they could do together, and what it costs.

The rates of bsp and diloco are those of the page on slow links; asp's follows from bsp's as in deploy/compare.sh. The
quorum's outer momentum is the best of 0.9, 0.5, 0.3 and 0 with seeds 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.accuracy import Accuracies, signed
from experiments.compare.modes import parse_mode
from experiments.lab import JobResult, JobSpec, Lab, run_job
from experiments.page import Claim, Page
from experiments.shared.charts import SERIES, Colours, Figure
from experiments.shared.intervals import spread_text
from experiments.shared.pages import Table

WORKERS, SLOWER = 4, 4
STEP_MS = 20, 4  # What a batch of the others takes; in the full and the quick form, as everything that is a pair.
MODEL = "mlp:784,128,10"
BATCH = 64
EPOCHS = 4, 0.2
SEEDS = 3, 1
LOCAL_STEPS = 16, 4
RATE, MOMENTUM = 0.05, 0.9
OUTER_RATE = 0.7
# Of what all could do, if nobody waited: 3 workers and a quarter.
COULD = WORKERS - 1 + 1 / SLOWER
ENOUGH = 3.2 / COULD
MIDDLE = 0.1, 0.75  # Of a job's time, in which rates are taken.


@dataclass(frozen=True)
class Setup:
    """A mode, with whom its workers wait for."""

    name: str
    mode: list[str]
    outer_momentum: float | None = None  # Where there are rounds.

    def server(self, lab: Lab) -> list[str]:
        rate, momentum = (RATE, MOMENTUM) if self.name != "asp" else parse_mode("asp").untuned(RATE, MOMENTUM, WORKERS)
        optimizer = ["--optimizer=momentum", f"--momentum={momentum}"] if momentum else ["--optimizer=sgd"]
        flags = ["--budget=job", *self.mode, *optimizer, f"--learning_rate={rate}"]
        if self.outer_momentum is None:
            return flags
        rounds = [f"--local_steps={lab.pick(*LOCAL_STEPS)}", f"--outer_lr={OUTER_RATE}"]
        return [*flags, *rounds, f"--outer_momentum={self.outer_momentum}"]


DILOCO = ["--mode=diloco"]
SETUPS = (
    Setup("bsp", ["--mode=bsp"]),
    Setup("backup:1", ["--mode=backup", "--backup_workers=1"]),
    Setup("asp", ["--mode=asp"]),
    Setup("diloco, barrier", DILOCO, 0.9),
    Setup("diloco, quorum of 3", [*DILOCO, "--outer_sync=quorum", "--quorum=3"], 0.5),
    Setup("diloco, async", [*DILOCO, "--outer_sync=async"], 0.9),
)
TARGETS = ("diloco, quorum of 3", "diloco, async")


def could(lab: Lab) -> float:
    """Samples a second of all workers, if nobody waited."""
    return COULD * BATCH / (lab.pick(*STEP_MS) / 1e3)


def train(lab: Lab, setup: Setup, seed: int) -> JobResult:
    worker = [f"--model={MODEL}", "--activation=relu", "--dataset=fashion-mnist", f"--batch_size={BATCH}"]
    worker += [f"--epochs={lab.pick(*EPOCHS)}", f"--experiment_step_time={lab.pick(*STEP_MS)}ms"]
    worker += [f"--experiment_straggler={WORKERS - 1}:{SLOWER}", f"--seed={seed}"]
    name = f"{setup.name.replace(':', '-').replace(', ', '-').replace(' ', '-')}-s{seed}"
    return run_job(lab, JobSpec(name, WORKERS, setup.server(lab), worker, shared_memory=True))


def used_per_s(job: JobResult) -> float:
    """Samples a second of the pushes that versions were made of, in the middle of the job: at its begin workers are not
    all there, and at its end there is no work left for all.
    """
    applied = job.server.named("apply")
    begin, end = applied[0]["t"], applied[-1]["t"]
    first, last = (begin + share * (end - begin) for share in MIDDLE)
    inside = [event for event in applied if first < event["t"] <= last]
    used = sum(sum(event["samples"]) for event in inside[1:])
    return used / (inside[-1]["t"] - inside[0]["t"])


def measure(lab: Lab) -> pd.DataFrame:
    """A row for each run: samples that were used a second, the share that the slow worker had, seconds, accuracy."""
    rows = []
    for seed in range(1, 1 + lab.pick(*SEEDS)):
        for setup in SETUPS:
            job = train(lab, setup, seed)
            ends = [worker.named("end")[-1] for worker in job.workers]
            used = [end["samples"] - end["dropped_samples"] for end in ends]
            rows.append(
                (setup.name, seed, used_per_s(job), used[-1] / sum(used), job.training_s,
                 100 * job.last()["accuracy"])
            )  # fmt: skip
    return pd.DataFrame(rows, columns=["mode", "seed", "samples_per_s", "slow_share", "seconds", "percent"])


def run(lab: Lab) -> Page:
    found = measure(lab)
    by_mode = found.groupby("mode", sort=False)
    share = by_mode["samples_per_s"].median() / could(lab)
    table = Table(
        "What is made of what all could do",
        [
            "whom to wait for",
            "samples/s",
            "of what all could do",
            "the slow worker's part",
            "seconds",
            "test accuracy, %",
        ],
    )
    for mode, own in by_mode:
        table.rows.append(
            [mode, f"{own['samples_per_s'].median():,.0f}", f"{share[mode]:.3f}", f"{own['slow_share'].mean():.1%}",
             f"{own['seconds'].median():.0f}", spread_text(list(own["percent"]), 2)]
        )  # fmt: skip
    accuracies = {(mode, "accuracy"): own.set_index("seed")["percent"].to_dict() for mode, own in by_mode}
    beside = Accuracies("bsp", 2, accuracies)
    quorum = TARGETS[0]
    finding = (
        f"With one of {WORKERS} workers {SLOWER} times slower, a quorum of 3 uses {share[quorum]:.1%} of what all "
        f"could do, and a barrier {share['diloco, barrier']:.1%}; its accuracy after as many samples is "
        f"{signed(beside.apart(quorum, 'accuracy').mean, 2)} points from bsp's."
    )
    return Page(
        "One slow worker: whom to wait for",
        finding,
        "slow_worker.md.j2",
        expected=[_claim(mode, share[mode]) for mode in TARGETS],
        tables={"rates": table, "accuracy": beside.table("whom to wait for")},
        figures=[_figure(share)],
        values={"step_ms": lab.pick(*STEP_MS), "local_steps": lab.pick(*LOCAL_STEPS), "could": could(lab)},
    )


def _claim(mode: str, share: float) -> Claim:
    what = f"{mode}: samples a second, of what all could do if nobody waited"
    why = f"{share * COULD:.2f} of {COULD} workers."
    return Claim(what, f"at least {ENOUGH:.3f} (3.2 of {COULD} workers)", f"{share:.3f}", share >= ENOUGH, why)


def _figure(share: pd.Series[float]) -> Figure:
    def draw(axes: Any, colours: Colours) -> None:
        axes.barh(list(share.index)[::-1], list(share)[::-1], color=colours[SERIES[0]])
        axes.axvline(1, color=colours[SERIES[1]], linewidth=1)
        axes.set_xlim(0, 1.05)

    caption = "The line is what all could do if nobody waited."
    title = "Samples that are used, of what all workers could do"
    return Figure("rates", title, caption, "share", "", draw)
