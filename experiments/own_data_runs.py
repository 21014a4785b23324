"""The trainings of the experiment with data that no machine has whole, and what is taken from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from events import named

from .job import JobResult, JobSpec, run_job
from .lab import ExperimentFailed, Lab
from .own_data_cuts import BATCH, CUTS, RANKS, Files, Indices, Samples, read_splits, write_cut, write_files

MODEL = "mlp:784,128,10"
LEARNING_RATE = 0.1
EPOCHS = 2
WHOLE = "the whole"
SHUFFLED = (WHOLE, "quarters", "uneven", "by class")  # What is compared over seeds.
MODES = {
    "bsp": ["--mode=bsp"],
    "local_sgd": ["--mode=local_sgd", "--local_steps=8"],
    "asp": ["--mode=asp"],
}
_SPLIT_RUNS = "ps_worker: "


@dataclass
class Data:
    """What there is on disk."""

    train: Samples
    parts: dict[str, list[Indices]]  # Of each cut, by rank.
    own: dict[str, list[Files]]
    whole: Files
    test: Files


def prepare(lab: Lab) -> Data:
    """Reads Fashion-MNIST and cuts it. Skipped if it is not here."""
    train, test = read_splits(lab)
    folder = lab.folder / "files"
    parts = {name: cut(train.labels) for name, cut in CUTS.items()}
    own = {name: write_cut(folder, train, indices) for name, indices in parts.items()}
    whole = write_files(folder / f"whole-{len(train)}", train)
    return Data(train, parts, own, whole, write_files(folder / f"test-{len(test)}", test))


def seeds(lab: Lab, mode: str) -> range:
    """In bsp, in which equal flags give equal weights, more than elsewhere."""
    return range(1, 1 + lab.pick(5 if mode == "bsp" else 3, 2 if mode == "bsp" else 1))


def train(lab: Lab, data: Data, cut: str, name: str, server: list[str], more: list[str]) -> JobResult:
    """A job of all ranks; the test files are the lead's."""
    settings = [f"--model={MODEL}", f"--batch_size={BATCH}", f"--epochs={EPOCHS}", *more]
    own: Callable[[int], list[str]]
    if cut == WHOLE:
        settings.append(f"--dataset=idx:{data.whole},{data.test}")
        own = lambda rank: []  # noqa: E731
    else:
        settings.append("--data=own")
        own = lambda rank: [dataset_flag(data.own[cut][rank], data.test if rank == 0 else None)]  # noqa: E731
    server = [*server, "--optimizer=sgd", f"--learning_rate={LEARNING_RATE}"]
    return run_job(lab, JobSpec(name, RANKS, server, settings, worker_own=own, shared_memory=True))


def dataset_flag(own: Files, test: Files | None) -> str:
    """For ps_worker."""
    return f"--dataset=idx:{own}" + ("" if test is None else f",{test}")


@dataclass
class Exact:
    """A training of the whole and one of files that hold, in order, what each rank takes of it."""

    normalize: str
    hashes: tuple[str, str]
    apart: float  # The largest difference of a step's loss, relative to the whole's.
    steps: int


def train_exact(lab: Lab, data: Data, normalize: str) -> Exact:
    """Both in the files' order."""
    flags = ["--shuffle=false", f"--normalize={normalize}"]
    jobs = [
        train(lab, data, cut, f"exact-{kind}-{normalize}", MODES["bsp"], flags)
        for cut, kind in ((WHOLE, "whole"), ("as shared", "own"))
    ]
    whole, own = ([[step["loss"] for step in job.steps(rank)] for rank in range(RANKS)] for job in jobs)
    apart = 0.0
    for first, second in zip(whole, own, strict=True):
        # A rank without samples in the last step of an epoch has no loss there, and may write no step.
        if len(first) != len(second):
            raise ExperimentFailed(f"exact-own-{normalize}: {len(second)} steps of a rank, of the whole {len(first)}")
        apart = max(apart, *(abs(b / a - 1) for a, b in zip(first, second, strict=True) if a))
    return Exact(normalize, (jobs[0].weights_hash(), jobs[1].weights_hash()), apart, len(whole[0]))


@dataclass
class Outcome:
    """Test accuracy of a cut in a mode, by seed."""

    cut: str
    mode: str
    accuracy: dict[int, float] = field(default_factory=dict)


def train_shuffled(lab: Lab, data: Data) -> list[Outcome]:
    """All cuts in all modes."""
    found = []
    for mode in MODES:
        outcomes = [Outcome(cut, mode) for cut in SHUFFLED]
        for seed in seeds(lab, mode):
            for one in outcomes:
                job = train(lab, data, one.cut, _name(one.cut, mode, seed), MODES[mode], [f"--seed={seed}"])
                one.accuracy[seed] = job.last()["accuracy"]
        found += outcomes
    return found


def _name(cut: str, mode: str, seed: int) -> str:
    return f"{cut.replace(' ', '-')}-{mode}-s{seed}"


def contributions(lab: Lab, data: Data, cut: str) -> list[list[int]]:
    """Of each step of the first bsp training, the samples by rank."""
    job = train(lab, data, cut, _name(cut, "bsp", 1), MODES["bsp"], ["--seed=1"])
    found = []
    for event in named(job.servers[0], "apply"):
        by_rank = dict(zip(event["ranks"], event["samples"], strict=True))
        found.append([by_rank.get(rank, 0) for rank in range(RANKS)])
    return found


def steps_of_epoch(data: Data, cut: str) -> int:
    """As many as the worker with the most samples needs."""
    return max(-(-len(indices) // BATCH) for indices in data.parts[cut])


def epochs_of(steps: list[list[int]], each: int) -> list[list[list[int]]]:
    """The steps, epoch by epoch."""
    return [steps[begin:end] for begin, end in pairwise(range(0, len(steps) + 1, each))]


def refusal(lab: Lab, data: Data, name: str, more: Callable[[int], list[str]], expected: str) -> str:
    """What the worker says that a job refuses, with the expected words; "" if it is not refused.

    The workers have quarters. ExperimentFailed if it fails for anything else.
    """
    own = data.own["quarters"]
    spec = JobSpec(
        f"refused-{name}",
        RANKS,
        MODES["bsp"],
        [f"--model={MODEL}", "--steps=1"],
        worker_own=lambda rank: [dataset_flag(own[rank], data.test), *more(rank)],
        shared_memory=True,
        limit_s=60,
    )
    try:
        run_job(lab, spec)
    except ExperimentFailed as failed:
        if expected not in str(failed):
            raise
        return _without_folders(str(failed).partition(_SPLIT_RUNS)[2] or str(failed), lab.folder)
    return ""


def _without_folders(text: str, folder: Path) -> str:
    return text.replace(f"{folder}/", "")
