"""The toy of asyncdiloco, a mixture of Gaussians: the losses that its notebook prints, and what not waiting gains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.lab import ExperimentFailed, Lab, Skipped, run_program
from experiments.page import Claim, Page
from experiments.shared.charts import SERIES, Colours, Figure
from experiments.shared.intervals import spread_text
from experiments.shared.machine import file_hash
from experiments.shared.pages import Table

WORKERS = 4
LOCAL_STEPS = 20
# Of the notebook's "Sanity Check": after each round, of sync training with an outer SGD at 0.5.
PRINTED = (1.391600, 1.357046, 1.325124, 1.307899, 1.300403, 1.298819)
APART = 1e-3
WIDTH = 65_000, 64  # In the full and the quick form, as everything that is a pair.
STEP_MS = "5.8,7.5,15.1,33.3"  # A hundredth of the notebook's seconds for a step, by worker.
SMALL_WIDTH = 1_000, 64  # A step takes less than the fastest worker's time.
SECONDS = 20, 1.0
REPEATS = 3, 1
OUTER_RATE = "--outer_lr=0.7"
BARRIER, QUORUM, ASYNC = "barrier", "quorum of 2", "async"
SYNCS = {
    BARRIER: ["--outer_sync=barrier", OUTER_RATE, "--outer_momentum=0.9"],
    QUORUM: ["--outer_sync=quorum", "--quorum=2", OUTER_RATE, "--outer_momentum=0.5"],
    ASYNC: ["--outer_sync=async", OUTER_RATE, "--outer_momentum=0.9"],
}
_WORKER = Path(__file__).with_name("gaussians_worker.py")
_LIMIT_S = 1_800


def train(lab: Lab, name: str, server: Sequence[str], worker: Sequence[str]) -> dict[str, Any]:
    """What rank 0 wrote of the servers' weights: "losses", with their seconds; "last", when it stopped, of all samples;
    and "seconds" until then.
    """
    folder = lab.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "losses.json"
    flags = [f"--workers={WORKERS}", "--mode=diloco", "--optimizer=local", f"--local_steps={LOCAL_STEPS}", *server]
    package = lab.bin.parent / "python"
    command = ["env", f"PYTHONPATH={package}", f"PSGRAD_BIN={lab.bin}", lab.python, "-B", "-m", "psgrad.run", *flags]
    command += [str(_WORKER), f"--output={output}", *worker]
    identity = {"programs": [lab.file_hash("ps_server"), file_hash(_WORKER)], "flags": [*flags, *worker]}

    def make() -> dict[str, Any]:
        run_program(lab, name, command, folder, limit_s=_LIMIT_S)
        return {}

    lab.once(name, folder / "job.json", identity, make)
    written: dict[str, Any] = json.loads(output.read_text())
    return written


def check_available(lab: Lab) -> None:
    """Skipped if there is no PyTorch, or no psgrad that it can import."""
    package = lab.bin.parent / "python"
    command = ["env", f"PYTHONPATH={package}", lab.python, "-c", "import psgrad.torch"]
    try:
        run_program(lab, "import", command, lab.folder, 120)
    except ExperimentFailed as failed:
        raise Skipped(
            f"psgrad.torch cannot be imported (--python, and a build with PS_BUILD_PYTHON): {failed}"
        ) from None


def printed_losses(lab: Lab) -> list[float]:
    """Ours, of the same rounds."""
    rounds = len(PRINTED) - 1
    server = ["--outer_optimizer=sgd", "--outer_lr=0.5", "--outer_weighting=uniform"]
    worker = [f"--width={lab.pick(*WIDTH)}", f"--updates={rounds * LOCAL_STEPS}", f"--rounds={rounds}"]
    return [loss for _, loss in train(lab, "printed", server, worker)["losses"]]


def timed(lab: Lab) -> tuple[pd.DataFrame, dict[str, list[float]], dict[str, list[float]]]:
    """A row for each evaluation; by whom is waited for, the last losses, and the seconds."""
    seconds = lab.pick(*SECONDS)
    worker = [f"--width={lab.pick(*SMALL_WIDTH)}", "--updates=4000", f"--seconds={seconds}", f"--step_ms={STEP_MS}"]
    rows = []
    last: dict[str, list[float]] = {sync: [] for sync in SYNCS}
    seconds_of: dict[str, list[float]] = {sync: [] for sync in SYNCS}
    for repeat in range(1, 1 + lab.pick(*REPEATS)):
        for sync, flags in SYNCS.items():
            # A barrier has as many rounds as its slowest worker makes.
            own = [f"--rounds={max(1, int(seconds * 1e3 / (33.3 * LOCAL_STEPS)))}"] if sync == BARRIER else []
            found = train(lab, f"{sync.replace(' ', '-')}-{repeat}", flags, [*worker, *own])
            rows += [(sync, repeat, at, loss) for at, loss in found["losses"]]
            last[sync].append(found["last"])
            seconds_of[sync].append(found["seconds"])
    return pd.DataFrame(rows, columns=["sync", "repeat", "seconds", "loss"]), last, seconds_of


def run(lab: Lab) -> Page:
    check_available(lab)
    ours = printed_losses(lab)
    found, last, seconds_of = timed(lab)
    means = {sync: sum(losses) / len(losses) for sync, losses in last.items()}
    apart = max(abs(one - other) for one, other in zip(ours, PRINTED, strict=True))
    what = "the losses after each of five rounds, of one server and four workers"
    same = Claim(what, "within 0.001 of those printed", f"at most {apart:.6f} apart", apart <= APART, "The same data.")
    if lab.quick:  # Of another network.
        same = Claim(what, same.published, "not comparable", None, "A smaller network.")
    claims = [same]
    for sync in (QUORUM, ASYNC):
        why = "As many seconds of training, with workers of four speeds."
        claims.append(
            Claim(f"{sync}: the loss after as long a time", f"below the barrier's, {means[BARRIER]:.3f}",
                  f"{means[sync]:.3f}", means[sync] < means[BARRIER], why)
        )  # fmt: skip
    finding = (
        f"The losses that asyncdiloco's notebook prints come out to {apart:.0e}. With workers of four speeds the loss "
        f"after {lab.pick(*SECONDS):g} s is {means[BARRIER]:.3f} with a barrier, {means[QUORUM]:.3f} with a quorum of "
        f"2, and {means[ASYNC]:.3f} if nobody waits."
    )
    losses = Table("The loss after each round", ["updates of all workers", "printed", "ours"])
    for number, (theirs, own) in enumerate(zip(PRINTED, ours, strict=True)):
        losses.rows.append([f"{number * WORKERS * LOCAL_STEPS}", f"{theirs:.6f}", f"{own:.6f}"])
    times = Table("The loss after as long a time", ["whom to wait for", "loss", "seconds"])
    times.rows = [[sync, spread_text(values, 4), spread_text(seconds_of[sync], 1)] for sync, values in last.items()]
    return Page(
        "A mixture of Gaussians: DiLoCo beside asyncdiloco",
        finding,
        "gaussians.md.j2",
        expected=claims,
        tables={"losses": losses, "times": times},
        figures=[_figure(found)],
        values={"width": lab.pick(*WIDTH), "small": lab.pick(*SMALL_WIDTH), "seconds": lab.pick(*SECONDS)},
    )


def _figure(found: pd.DataFrame) -> Figure:
    def draw(axes: Any, colours: Colours) -> None:
        for (sync, own), series in zip(found.groupby("sync", sort=False), SERIES, strict=False):
            first = own[own["repeat"] == 1]
            axes.plot(first["seconds"], first["loss"], color=colours[series], linewidth=1.6, label=sync)

    caption = "The first run of each, on a twentieth of the samples that the table's are of."
    return Figure("times", "The servers' loss", caption, "seconds", "loss", draw)
