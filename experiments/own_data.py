"""Data that no machine has whole: Fashion-MNIST cut in four, beside the whole."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.accuracy import Accuracies, signed
from experiments.lab import ExperimentFailed, JobResult, JobSpec, Lab, Skipped, run_job
from experiments.page import Claim, Page
from experiments.shared.charts import SERIES, Colours, Figure
from experiments.shared.data import IdxError, mnist_files, read_idx
from experiments.shared.intervals import Interval
from experiments.shared.pages import Table

MODEL = "mlp:784,128,10"
LEARNING_RATE = 0.1
EPOCHS = 2
RANKS = 4
BATCH = 64  # A worker's batch has so many samples.
SMALL_PART = 20  # In an uneven cut, one worker has a part of so many.
MARGIN = 1.0  # By so many points accuracies of the same samples in another order may differ.
ROUNDING = 1e-5  # Relative, of a step's loss, where statistics are added up in another order.
WHOLE = "the whole"
SHUFFLED = (WHOLE, "quarters", "uneven", "by class")  # What is compared over seeds.
MODES = {"bsp": ["--mode=bsp"], "local_sgd": ["--mode=local_sgd", "--local_steps=8"], "asp": ["--mode=asp"]}
_RANK_COLOURS = ("compute", "idle", "pull", "wait")


# ---- The files, one pair of IDX files for each worker


@dataclass
class Samples:
    """A split: images of bytes, [n, height, width], and labels."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: np.ndarray) -> Samples:
        return Samples(self.images[indices], self.labels[indices])


def read_splits(lab: Lab) -> list[Samples]:
    """Training and test samples; a twentieth of both in the quick form. Skipped if they are not here."""
    try:
        files = mnist_files("fashion-mnist", "")
        both = [Samples(*map(_read, files[split])) for split in ("train", "t10k")]
    except (IdxError, OSError) as error:
        raise Skipped(f"Fashion-MNIST cannot be read (Debian's package dataset-fashion-mnist): {error}") from None
    return [one.select(np.arange(len(one) // lab.pick(1, 20))) for one in both]


def _read(path: Path) -> np.ndarray:
    shape, data = read_idx(path)
    return np.frombuffer(data, np.uint8).reshape(shape)


def cuts(labels: np.ndarray) -> dict[str, list[np.ndarray]]:
    """By name: the samples of each rank."""
    order, rest = np.arange(len(labels)), len(labels) - len(labels) // SMALL_PART
    classes = np.argsort(-labels.astype(int), kind="stable")  # The highest first.
    quarters = [len(labels) * rank // RANKS for rank in range(1, RANKS)]
    return {
        # What each rank takes of the whole with --shuffle=false, in its order: a run of each global batch.
        "as shared": [order[order // BATCH % RANKS == rank] for rank in range(RANKS)],
        "quarters": np.split(order, quarters),
        "uneven": np.split(order, [rest * rank // (RANKS - 1) for rank in range(1, RANKS)]),
        "by class": np.split(classes, quarters),
    }


def write_files(folder: Path, samples: Samples) -> str:
    """The samples as a pair of files, unless they are there; as a dataset's flag has the pair. A folder's name says
    what is in it, so that it is written once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "images-idx3-ubyte", folder / "labels-idx1-ubyte"
    for path, values in zip(files, (samples.images, samples.labels), strict=True):
        header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
        if not path.exists() or path.stat().st_size != len(header) + values.size:
            path.write_bytes(header + values.tobytes())
    return f"{files[0]},{files[1]}"


@dataclass
class Data:
    """What there is on disk. Files are pairs, as a flag has them."""

    train: Samples
    parts: dict[str, list[np.ndarray]]  # The samples of each rank, by cut.
    own: dict[str, list[str]]
    whole: str
    test: str

    def steps_of_epoch(self, cut: str) -> int:
        """As many as the worker with the most samples needs."""
        return max(-(-len(indices) // BATCH) for indices in self.parts[cut])


def prepare(lab: Lab) -> Data:
    """Reads Fashion-MNIST and cuts it. Skipped if it is not here."""
    train, test = read_splits(lab)
    folder = lab.folder / "files"

    def write(indices: np.ndarray) -> str:
        name = f"{len(indices)}-{zlib.crc32(array('q', indices.tolist())):08x}"
        return write_files(folder / name, train.select(indices))

    parts = cuts(train.labels)
    own = {name: list(map(write, cut)) for name, cut in parts.items()}
    whole = write_files(folder / f"whole-{len(train)}", train)
    return Data(train, parts, own, whole, write_files(folder / f"test-{len(test)}", test))


# ---- The trainings


def seeds(lab: Lab, mode: str) -> range:
    """In bsp, in which equal flags give equal weights, more than elsewhere."""
    return range(1, 1 + lab.pick(5 if mode == "bsp" else 3, 2 if mode == "bsp" else 1))


def train(lab: Lab, data: Data, cut: str, name: str, mode: str, more: list[str]) -> JobResult:
    """A job of all ranks; the test files are the lead's."""
    settings = [f"--model={MODEL}", f"--batch_size={BATCH}", f"--epochs={EPOCHS}", *more]
    settings.append(f"--dataset=idx:{data.whole},{data.test}" if cut == WHOLE else "--data=own")

    def own(rank: int) -> list[str]:
        test = f",{data.test}" if rank == 0 else ""
        return [] if cut == WHOLE else [f"--dataset=idx:{data.own[cut][rank]}{test}"]

    server = [*MODES[mode], "--optimizer=sgd", f"--learning_rate={LEARNING_RATE}"]
    return run_job(lab, JobSpec(name, RANKS, server, settings, worker_own=own, shared_memory=True))


@dataclass
class Exact:
    """A training of the whole and one of files that hold, in order, what each rank takes of it."""

    hashes: tuple[str, str]
    apart: float  # The largest difference of a step's loss, relative to the whole's.
    steps: int

    @property
    def equal(self) -> bool:
        return self.hashes[0] == self.hashes[1]


def train_exact(lab: Lab, data: Data, normalize: str) -> Exact:
    """Both in the files' order."""
    flags = ["--shuffle=false", f"--normalize={normalize}"]
    kinds = ((WHOLE, "whole"), ("as shared", "own"))
    jobs = [train(lab, data, cut, f"exact-{kind}-{normalize}", "bsp", flags) for cut, kind in kinds]
    apart = 0.0
    for rank in range(RANKS):
        # A rank without samples in the last step of an epoch has no loss there, and may write no step.
        first, second = (job.steps["loss"][job.steps["rank"] == rank].to_numpy() for job in jobs)
        if len(first) != len(second):
            raise ExperimentFailed(f"exact-own-{normalize}: {len(second)} steps of a rank, of the whole {len(first)}")
        apart = max(apart, float(np.max(np.abs(second / first - 1), where=first > 0, initial=0.0)))
    steps = int((jobs[0].steps["rank"] == 0).sum())
    return Exact((jobs[0].weights_hash(), jobs[1].weights_hash()), apart, steps)


def train_shuffled(lab: Lab, data: Data) -> Accuracies:
    percent: dict[tuple[str, str], dict[int, float]] = {(cut, mode): {} for mode in MODES for cut in SHUFFLED}
    for mode in MODES:
        for seed in seeds(lab, mode):
            for cut in SHUFFLED:
                job = train(lab, data, cut, _name(cut, mode, seed), mode, [f"--seed={seed}"])
                percent[cut, mode][seed] = 100 * job.last()["accuracy"]
    return Accuracies(WHOLE, 1, percent)


def _name(cut: str, mode: str, seed: int) -> str:
    return f"{cut.replace(' ', '-')}-{mode}-s{seed}"


def contributions(lab: Lab, data: Data, cut: str) -> np.ndarray:
    """The samples of each step of the first bsp training, by rank: [steps, ranks]."""
    job = train(lab, data, cut, _name(cut, "bsp", 1), "bsp", ["--seed=1"])
    events = job.server.named("apply")
    found = np.zeros((len(events), RANKS), int)
    for row, event in zip(found, events, strict=True):
        row[event["ranks"]] = event["samples"]
    return found


def refusal(lab: Lab, data: Data, name: str, expected: str, more: Callable[[int], list[str]]) -> str:
    """What the worker says that a job refuses, with the expected words; "" if it is not refused.

    The workers have quarters. ExperimentFailed if it fails for anything else.
    """
    spec = JobSpec(
        f"refused-{name}",
        RANKS,
        MODES["bsp"],
        [f"--model={MODEL}", "--steps=1"],
        worker_own=lambda rank: [f"--dataset=idx:{data.own['quarters'][rank]},{data.test}", *more(rank)],
        shared_memory=True,
        limit_s=60,
    )
    try:
        run_job(lab, spec)
    except ExperimentFailed as failed:
        if expected not in str(failed):
            raise
        return (str(failed).partition("ps_worker: ")[2] or str(failed)).replace(f"{lab.folder}/", "")
    return ""


def run(lab: Lab) -> Page:
    data = prepare(lab)
    plain, scaled = (train_exact(lab, data, normalize) for normalize in ("none", "standard"))
    accuracies = train_shuffled(lab, data)
    steps, each = contributions(lab, data, "uneven"), data.steps_of_epoch("uneven")
    small = len(data.parts["uneven"][-1])

    def one_scales(rank: int) -> list[str]:
        return ["--data=own", *(["--normalize=standard"] if rank == RANKS - 1 else [])]

    refused = {
        "One worker scales its samples, and the others do not": ("normalize", "to be normalised", one_scales),
        "Workers have different files, and nobody says `--data=own`": (
            "shared",
            "the worker's experiment differs from the job's: --dataset=",
            lambda rank: [],
        ),
    }
    same = "the same weights as" if plain.equal else "OTHER weights than"
    apart = {mode: signed(accuracies.apart("by class", mode).mean, 1) for mode in ("bsp", "asp")}
    return Page(
        "Data that no machine has whole",
        f"Four workers whose files hold what each takes of the whole get {same} from the whole; where each lacks most "
        f"classes, bsp is {apart['bsp']} points from the whole, and asp {apart['asp']}.",
        "own_data.md.j2",
        expected=[*_exactly_equal(plain, scaled), _same_accuracy(accuracies), _all_samples_once(data, steps)],
        tables={"parts": _parts(data), "accuracy": accuracies.table("data")},
        figures=[_accuracy_figure(accuracies.percent), _contributions_figure(steps, each)],
        values={
            "samples": len(data.train),
            "small": small,
            "small_steps": -(-small // BATCH),
            "steps": each,
            "even_steps": data.steps_of_epoch("quarters"),
            "empty": int((steps[:, RANKS - 1] == 0).sum()) // EPOCHS,
            "refused": {what: refusal(lab, data, *case) for what, case in refused.items()},
        },
    )


# ---- What is expected


def _exactly_equal(plain: Exact, scaled: Exact) -> list[Claim]:
    same, hashes = plain.equal, plain.hashes
    said = f"equal, bit for bit: {hashes[0]}" if same else f"{hashes[0]} and {hashes[1]}"
    why = (
        f"In bsp gradients are added in the order of ranks, and in all {plain.steps} steps every rank had the samples "
        "that it takes of the whole."
        if same
        else f"The weights differ; the losses of a step by {plain.apart:.1e} at most. Nothing should differ."
    )
    weights = Claim("weights of files in the ranks' order, and of the whole", "equal, bit for bit", said, same, why)
    close = scaled.apart <= ROUNDING
    why = (
        "Each pixel is scaled by its mean and deviation over all workers' samples, of which each worker tells its "
        f"own part. Losses of a step may differ by {ROUNDING:g} of their value, since what is added up in another "
        f"order may be rounded otherwise; here the weights' {'bits are' if scaled.equal else 'last bits are not'} the "
        "same."
        if close
        else f"The losses differ by more than {ROUNDING:g}, which rounding does not explain."
    )
    ours = f"the losses of a step differ by {scaled.apart:.1e} at most" if scaled.apart else "the losses are equal"
    return [weights, Claim("the same with --normalize=standard", "equal but for rounding", ours, close, why)]


def within_margin(found: Interval, margin: float) -> bool | None:
    """Whether the truth is at most so far from 0; None where the interval has both."""
    if found.low is None or found.high is None:
        return None
    if found.low > margin or found.high < -margin:
        return False
    return True if -margin <= found.low and found.high <= margin else None


def _same_accuracy(accuracies: Accuracies) -> Claim:
    """Decided by the 95 % interval of the difference."""
    found = accuracies.apart("quarters", "bsp")
    agrees = within_margin(found, MARGIN)
    ours, said = f"{signed(found.mean, 1)} points", "One seed has no interval."
    if found.low is not None and found.high is not None:
        ours += f" ({signed(found.low, 1)} to {signed(found.high, 1)})"
        said = {
            True: "All of the interval is within the margin.",
            False: "All of the interval is beyond the margin.",
            None: f"The interval of {found.count} seeds reaches beyond the margin: more of them would be needed.",
        }[agrees]
    why = (
        f"In brackets the 95 % interval, seed by seed; {MARGIN:g} point either way is allowed. {said} Samples come in "
        "another order, since each worker shuffles its own: an update has as many of each quarter."
    )
    return Claim("test accuracy of shuffled quarters, bsp", "the whole's", ours, agrees, why)


def _all_samples_once(data: Data, steps: np.ndarray) -> Claim:
    has, each = [len(indices) for indices in data.parts["uneven"]], data.steps_of_epoch("uneven")
    used = [steps[begin : begin + each].sum(axis=0).tolist() for begin in range(0, len(steps), each)]
    agrees = used == [has] * EPOCHS
    counts = f"{', '.join(f'{samples:,}' for samples in has)} in each of {EPOCHS} epochs"
    why = "By the server's metrics" + (", which list what each update is made of." if agrees else f" they used {used}.")
    what = "samples that each rank contributes in an epoch, uneven parts, bsp"
    return Claim(what, "all that it has, once", counts if agrees else "not those", agrees, why)


# ---- Tables and figures


def _parts(data: Data) -> Table:
    columns = ["cut", *(f"rank {rank}" for rank in range(RANKS)), "steps of an epoch"]
    table = Table("What each worker has: samples, and their classes", columns)
    for cut, indices in data.parts.items():
        cells = [f"{len(own):,}: {_classes(data.train.labels[own])}" for own in indices]
        table.rows.append([cut, *cells, str(data.steps_of_epoch(cut))])
    return table


def _classes(labels: np.ndarray) -> str:
    there = np.unique(labels).tolist()
    whole = there == list(range(there[0], there[-1] + 1)) and len(there) > 2
    return f"{there[0]} to {there[-1]}" if whole else " and ".join(map(str, there))


def _accuracy_figure(percent: dict[tuple[str, str], dict[int, float]]) -> Figure:
    def draw(axes: Any, colours: Colours) -> None:
        shift = 0.8 / len(SHUFFLED)
        for number, (cut, series) in enumerate(zip(SHUFFLED, ("bsp", *SERIES), strict=False)):
            for place, mode in enumerate(MODES):
                values = list(percent[cut, mode].values())
                x = place + shift * (number - (len(SHUFFLED) - 1) / 2)
                look = {"color": colours[series], "label": cut if place == 0 else None}
                axes.plot([x] * len(values), values, "o", **look, markersize=4, alpha=0.6)
                mean = [sum(values) / len(values)] * 2
                axes.plot([x - shift / 3, x + shift / 3], mean, color=colours[series], linewidth=2.2)
        axes.set_xticks(range(len(MODES)), list(MODES))
        axes.grid(False, axis="x")

    caption = "A dot is a seed, a stroke the mean. All workers together have the same samples in each cut."
    return Figure("accuracy", "Accuracy by cut and mode", caption, "", "test accuracy, %", draw, legend_columns=4)


def _contributions_figure(steps: np.ndarray, each: int) -> Figure:
    def draw(axes: Any, colours: Colours) -> None:
        edges, tops = np.arange(len(steps) + 1) + 0.5, steps.cumsum(axis=1).T
        for rank, colour in enumerate(_RANK_COLOURS):
            look = {"fill": True, "color": colours[colour], "label": f"rank {rank}"}
            axes.stairs(tops[rank], edges, baseline=tops[rank] - steps[:, rank], **look)
        for end in range(each, len(steps), each):
            axes.axvline(end + 0.5, color=colours["ink"], linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xlim(0.5, len(steps) + 0.5)

    caption = (
        "What each update of the uneven cut is made of, in bsp, by rank. The dashed line ends an epoch. A rank that "
        "has used its samples contributes empty steps until the others have used theirs."
    )
    title, more = "A worker that runs out of samples", {"height_inches": 2.8, "legend_columns": 4}
    return Figure("contributions", title, caption, "updates", "samples", draw, **more)
