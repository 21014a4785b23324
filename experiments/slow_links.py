"""Long rounds over slow links: what share of the time workers compute, and what accuracy it costs to exchange rarely,
and in few bits.

The rates of TRAININGS are the best of a search with seeds 11 and 12, which the page's runs do not use: learning rates
of 0.05, 0.1 and 0.2 (bsp), and 0.05 and 0.1 with outer rates and momenta of 0.7 and 0.9, 0.7 and 0.5, 1 and 0.3, 1 and
0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.accuracy import Accuracies, signed
from experiments.hosts import check_available
from experiments.lab import ExperimentFailed, JobSpec, Lab, Skipped, run_job, run_program
from experiments.page import Claim, Page
from experiments.shared.charts import DASHED, SERIES, Colours, Figure
from experiments.shared.pages import NONE, Table

WORKERS = SERVERS = 4
LINK_RATES = (10, 100, 1_000), (1_000,)  # Mbit/s; in the full and the quick form, as everything that is a pair.
LOCAL_STEPS = (1, 8, 64, 512), (1, 8)  # H. Of 1, an exchange follows each step, as in bsp.
STREAMED = (4, 8), (2, 1)  # Fragments and overlap of streamed exchanges, where rounds are long enough for them.
MODEL_BYTES = 16 << 20, 1 << 20
COMPUTE_MS = 50, 5  # What a step takes.
ROUNDS = 3
BY_BYTES_MIN = 0.95  # The share of what the bytes allow that is expected at least.

# ---- Training
MODEL = "mlp:784,256,128,10"
BATCH = 64
EPOCHS = 10, 0.2
SEEDS = 10, 1
MOMENTUM = 0.9
BSP = "bsp"
POINTS_LESS = 1.0  # Training has arrived once its accuracy is bsp's last, less so many points.
BEYOND = 10  # A link rate of so many times the fastest one measured is not told apart.


@dataclass(frozen=True)
class Form:
    """How what is sent is sent."""

    name: str
    flags: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        return self.name.replace(",", "").replace(" ", "-")


FLOAT32 = Form("float32")
HALF = Form("bfloat16", ("--wire_dtype=bfloat16", "--weights_wire_dtype=bfloat16"))
E3M0 = Form("e3m0, weights in bfloat16", ("--wire_dtype=e3m0", "--weights_wire_dtype=bfloat16"))
FORMS = (FLOAT32, HALF, E3M0)


@dataclass(frozen=True)
class Training:
    """A mode with its rates."""

    mode: str
    local_steps: int
    learning_rate: float
    outer: tuple[float, float] | None = None  # The outer learning rate and momentum.
    streamed: tuple[int, int, float] | None = None  # Fragments, overlap and mix.

    def server(self) -> list[str]:
        flags = [f"--mode={self.mode}", "--optimizer=momentum", f"--momentum={MOMENTUM}"]
        flags.append(f"--learning_rate={self.learning_rate}")
        if self.outer is not None:
            flags += [f"--local_steps={self.local_steps}", f"--outer_lr={self.outer[0]}"]
            flags.append(f"--outer_momentum={self.outer[1]}")
        if self.streamed is not None:
            flags += [f"--{flag}={value}" for flag, value in zip(_STREAM_FLAGS, self.streamed, strict=True)]
        return flags

    @property
    def batches_per_push(self) -> int:
        return self.local_steps // (self.streamed[0] if self.streamed else 1)

    @property
    def name(self) -> str:
        name = self.mode if self.outer is None else f"{self.mode}:{self.local_steps}"
        return f"{name} in {self.streamed[0]} fragments" if self.streamed else name


_STREAM_FLAGS = ("fragments", "overlap", "mix")
TRAININGS = (
    Training(BSP, 1, 0.05),
    Training("diloco", 8, 0.05, (0.7, 0.5)),
    Training("diloco", 64, 0.05, (0.7, 0.9)),
    Training("diloco", 64, 0.05, (0.7, 0.9), (4, 8, 0.5)),
    Training("diloco", 512, 0.05, (0.7, 0.5)),
)


# ---- What share of the time workers compute


def measure(lab: Lab) -> pd.DataFrame:
    """A row for each link rate, form, whole or streamed, and H: the share of the time that workers compute, and by the
    bytes alone.
    """
    rows = []
    for rate in lab.pick(*LINK_RATES):
        for form in FORMS:
            for streamed in (False, True):
                for steps in _rounds(lab, streamed=streamed):
                    found = _bench(lab, rate, form, steps, streamed=streamed)
                    shares = (found["p50_s"], found["utilisation"], found["utilisation_by_bytes"])
                    rows.append((rate, form.name, streamed, steps, *shares))
    return pd.DataFrame(rows, columns=["rate", "form", "streamed", "steps", "exchange_s", "share", "by_bytes"])


def _rounds(lab: Lab, *, streamed: bool) -> list[int]:
    """The H for which that can be."""
    fragments, overlap = lab.pick(*STREAMED)
    return [steps for steps in lab.pick(*LOCAL_STEPS) if not streamed or steps // fragments > overlap]


def _bench(lab: Lab, rate: int, form: Form, steps: int, *, streamed: bool) -> dict[str, Any]:
    """The row that one run of ps_bench printed, or the same that was made before."""
    name = f"link-{rate}-{form.folder}-{steps}{'-streamed' if streamed else ''}"
    command = [str(lab.bin / "ps_bench"), "--json", "--mode=diloco", f"--workers={WORKERS}", f"--servers={SERVERS}"]
    command += [f"--mbit_per_s={rate}", f"--local_steps={steps}", f"--compute={lab.pick(*COMPUTE_MS)}ms"]
    command += [f"--bytes={lab.pick(*MODEL_BYTES)}", f"--repeats={ROUNDS}", *form.flags]
    if streamed:
        command += [f"--{flag}={value}" for flag, value in zip(_STREAM_FLAGS, lab.pick(*STREAMED), strict=False)]
    command.append("link")
    identity = {"programs": [lab.file_hash(one) for one in ("ps_bench", "ps_server")], "flags": command[1:]}
    out, mark = lab.folder / f"{name}.out", lab.folder / f"{name}.json"

    def make() -> dict[str, Any]:
        run_program(lab, name, command, lab.folder, limit_s=1800)
        return {}

    lab.once(name, mark, identity, make)
    text = out.read_text()
    if text.startswith("SKIPPED:"):
        mark.unlink(missing_ok=True)
        raise Skipped(text.removeprefix("SKIPPED:").strip())
    try:
        return json.loads(text)["rows"][0]
    except (ValueError, KeyError, IndexError) as error:
        mark.unlink(missing_ok=True)
        raise ExperimentFailed(f"{name}: what ps_bench printed is not understood: {error}") from None


def _shares(lab: Lab, found: pd.DataFrame) -> Table:
    steps = lab.pick(*LOCAL_STEPS)
    table = Table("The share of the time that workers compute; in brackets, what the bytes allow", ["link", "sent as"])
    table.columns += [f"H = {one}" for one in steps]
    cells = found.set_index(["rate", "form", "streamed", "steps"])
    for rate in lab.pick(*LINK_RATES):
        for form in FORMS:
            for streamed in (False, True):
                row = [f"{rate:,} Mbit/s", _sent(form.name, streamed=streamed)]
                for one in steps:
                    key = (rate, form.name, streamed, one)
                    cell = cells.loc[key] if key in cells.index else None
                    row.append(NONE if cell is None else f"{cell['share']:.3f} ({cell['by_bytes']:.3f})")
                table.rows.append(row)
    return table


def _sent(form: str, *, streamed: bool) -> str:
    return f"{form}, streamed" if streamed else form


def _by_bytes(found: pd.DataFrame) -> list[Claim]:
    """Of long rounds, that the exchange takes hardly longer than its bytes."""
    claims = []
    for (rate, form, streamed), rows in found[found["steps"] > 1].groupby(["rate", "form", "streamed"], sort=False):
        ratios = rows["share"] / rows["by_bytes"]
        worst = rows.loc[ratios.idxmin()]
        shares = f"{worst['share']:.3f} of {worst['by_bytes']:.3f}"
        why = f"The least of all H above 1, at H = {int(worst['steps'])}: {shares}."
        sent = _sent(form, streamed=streamed)
        what = f"{rate:,} Mbit/s, {sent}: computing, of the share that the bytes allow"
        least = f"at least {BY_BYTES_MIN}"
        claims.append(Claim(what, least, f"{ratios.min():.3f}", bool(ratios.min() >= BY_BYTES_MIN), why))
    return claims


# ---- What accuracy it costs


def train_all(lab: Lab) -> pd.DataFrame:
    """Seed by seed: a row for each evaluation, with the batches of each worker so far and the test accuracy."""
    rows = []
    for seed in range(1, 1 + lab.pick(*SEEDS)):
        for training in _trainings(lab):
            for form in _forms(training):
                for mark in _train(lab, training, form, seed):
                    batches = mark["step"] * training.batches_per_push
                    rows.append((training.name, form.name, seed, batches, 100 * mark["accuracy"]))
    return pd.DataFrame(rows, columns=["mode", "form", "seed", "batches", "percent"])


def _trainings(lab: Lab) -> list[Training]:
    return [one for one in TRAININGS if one.local_steps in lab.pick(*LOCAL_STEPS)]


def _forms(training: Training) -> tuple[Form, ...]:
    """Four bits are for differences."""
    return (FLOAT32,) if training.outer is None else (FLOAT32, E3M0)


def _train(lab: Lab, training: Training, form: Form, seed: int) -> list[dict[str, Any]]:
    worker = [f"--model={MODEL}", "--activation=relu", "--dataset=fashion-mnist", f"--batch_size={BATCH}"]
    worker += [f"--epochs={lab.pick(*EPOCHS)}", f"--eval_every={lab.pick(0.5, 0.1)}", "--validation_split=0.1"]
    name = f"{training.name.replace(':', '-').replace(' ', '-')}-{form.folder}-s{seed}"
    server = [*training.server(), *form.flags]
    job = run_job(lab, JobSpec(name, WORKERS, server, [*worker, f"--seed={seed}"], shared_memory=True))
    job.last()  # There must be one.
    return job.evaluations()


def _arrivals(found: pd.DataFrame, goal: float) -> dict[tuple[str, str], float | None]:
    """By mode and form: after how many batches of each worker the mean over the seeds has come to the goal."""
    arrived: dict[tuple[str, str], float | None] = {}
    for key, own in found.groupby(["mode", "form"], sort=False):
        mean = own.groupby("batches")["percent"].mean()
        there = mean[mean >= goal]
        arrived[key] = float(there.index[0]) if len(there) else None
    return arrived


def _crossing(lab: Lab, of_bsp: float | None, of_rounds: float | None, steps: int, share: float) -> str:
    """From which link rate down rounds arrive sooner than bsp: where n_b (c + T) = n_r (c + T · share / H), with T the
    time that a link takes for the model, c that of a step, and share the bytes of an exchange as a part of bsp's.
    """
    if of_bsp is None or of_rounds is None:
        return NONE
    if of_rounds <= of_bsp:
        return "at all rates"
    saved = of_bsp - of_rounds * share / steps
    if saved <= 0:
        return "at none"
    exchange_s = lab.pick(*COMPUTE_MS) / 1e3 * (of_rounds - of_bsp) / saved
    rate = 8 * lab.pick(*MODEL_BYTES) / 1e6 / exchange_s
    # Above it some batches more or less decide, which the seeds do not tell apart.
    return "at all of these rates" if rate > BEYOND * max(lab.pick(*LINK_RATES)) else f"below {rate:,.0f} Mbit/s"


def _times(lab: Lab, found: pd.DataFrame, links: pd.DataFrame, goal: float) -> Table:
    """Minutes until training has arrived, by link rate, if the link table's model were what is trained."""
    rates = lab.pick(*LINK_RATES)
    columns = ["mode", "sent as", "batches", *(f"{rate:,} Mbit/s" for rate in rates), "sooner than bsp"]
    table = Table(f"Minutes until the test accuracy is {goal:.1f} %", columns)
    arrived = _arrivals(found, goal)
    exchange_s = links.set_index(["rate", "form", "streamed", "steps"])["exchange_s"]
    for training in _trainings(lab):
        for form in _forms(training):
            batches = arrived[training.name, form.name]
            row = [training.name, form.name, NONE if batches is None else f"{batches:,.0f}"]
            for rate in rates:
                key = (rate, form.name, training.streamed is not None, training.local_steps)
                step_s = exchange_s[key] / training.batches_per_push
                row.append(NONE if batches is None else f"{batches * step_s / 60:,.1f}")
            share = 1.0 if form is FLOAT32 else 0.5  # Weights come back in two bytes, and more than differences.
            crossing = _crossing(lab, arrived[BSP, FLOAT32.name], batches, training.local_steps, share)
            said = NONE if training.outer is None or training.streamed is not None else crossing
            table.rows.append([*row, said])
    return table


def run(lab: Lab) -> Page:
    check_available()
    links = measure(lab)
    found = train_all(lab)
    last = found.groupby(["mode", "form", "seed"])["percent"].last()
    bsp = last[BSP, FLOAT32.name].to_dict()
    accuracies = {}
    for training in _trainings(lab):
        for form in _forms(training):
            name = BSP if training.outer is None else f"{training.name}, {form.name}"
            accuracies[name] = last[training.name, form.name].to_dict()
    beside = Accuracies(BSP, 2, {(form, "accuracy"): values for form, values in accuracies.items()})
    goal = sum(bsp.values()) / len(bsp) - POINTS_LESS
    slowest, longest = lab.pick(*LINK_RATES)[0], lab.pick(*LOCAL_STEPS)[-2 if not lab.quick else -1]
    share = links[~links["streamed"]].set_index(["rate", "form", "steps"])["share"]
    cost = beside.apart(f"diloco:{longest}, {E3M0.name}", "accuracy").mean
    finding = (
        f"Over {slowest:,} Mbit/s workers compute {share[slowest, FLOAT32.name, 1]:.1%} of the time if they exchange "
        f"at each step, and {share[slowest, E3M0.name, longest]:.1%} with rounds of {longest} and differences in four "
        f"bits, whose accuracy is {signed(cost, 2)} points from bsp's."
    )
    return Page(
        "Slow links: exchanging rarely, and in four bits",
        finding,
        "slow_links.md.j2",
        expected=_by_bytes(links),
        tables={
            "shares": _shares(lab, links),
            "accuracy": beside.table("mode, sent as"),
            "times": _times(lab, found, links, goal),
        },
        figures=[_figure(lab, links)],
        values={
            "model_mib": lab.pick(*MODEL_BYTES) / 2**20,
            "compute_ms": lab.pick(*COMPUTE_MS),
            "streamed": lab.pick(*STREAMED),
        },
    )


def _figure(lab: Lab, links: pd.DataFrame) -> Figure:
    def draw(panels: list[Any], colours: Colours) -> None:
        for axes, rate in zip(panels, lab.pick(*LINK_RATES), strict=True):
            for form, series in zip(FORMS, SERIES, strict=False):
                look = {"color": colours[series], "linewidth": 1.6}
                of_form = links[(links["rate"] == rate) & (links["form"] == form.name)]
                for streamed, own in of_form.groupby("streamed"):
                    marker = "^" if streamed else "o"
                    label = None if streamed else form.name
                    axes.plot(own["steps"], own["share"], marker=marker, **look, label=label)
                    axes.plot(own["steps"], own["by_bytes"], linestyle=DASHED, **look)
            axes.set_title(f"{rate:,} Mbit/s")
            axes.set_xscale("log", base=2)
            axes.set_ylim(0, 1.02)

    caption = "Circles: the whole model at once. Triangles: streamed. Dashed is what the bytes allow."
    panels = len(lab.pick(*LINK_RATES))
    title = "The share of the time that workers compute"
    return Figure(
        "shares", title, caption, "local steps of a round", "share", draw, panels=panels, height_inches=2.6 * panels
    )
