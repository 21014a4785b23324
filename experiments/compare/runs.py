"""What is known of one run: run.json, and what follows from the metrics files of its programs.

Times are on the run's clock: 0 s is the chief's (server 0's) first applied version. Samples are counted when a version
contains them. Evaluations belong to the version whose weights they used, whenever they were computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.compare.comparison import CPU_BOUND_SHARE
from experiments.shared.machine import read_json
from experiments.shared.metrics import Event, Events, lack_of, number, read_events
from experiments.shared.processes import in_parallel

TARGETS = (0.80, 0.85, 0.87)  # Test accuracies; the report says when they are reached.
FLOAT_BYTES = 4
PARTS = ["compute", "idle", "push", "wait", "pull"]  # A batch has them in this order.
REPORTED = ("comparison", "staleness", "reference")
_TIME_LINE_BEGIN = 0.4  # It begins after this share of the run's duration.
_TIME_LINE_BATCHES = 40  # As long as so many of the fastest worker's.
_SETTINGS_END = "marks"  # The first derived field of Run.


def _no_marks() -> pd.DataFrame:
    """Evaluations on the test split, placed at the version whose weights they used: `samples` and `pushes` (which are
    contributions) are those of all versions up to this one; `accuracy` is in [0, 1], and not there for regression.
    """
    return pd.DataFrame(columns=["version", "loss", "accuracy", "time_s", "samples", "pushes"], dtype=float)


@dataclass(slots=True)
class StepTimes:
    """What the batches of a run took, by worker and in order, without each worker's first one."""

    compute_s: list[list[float]]  # Computing and idling of each batch.
    exchange_s: list[list[float]]  # Exposed pushing and pulling of each batch, without waiting.
    samples: float  # A batch has so many.


@dataclass(eq=False)
class Run:
    """A run's settings and outcome, as in run.json, and what the report takes from its metrics files."""

    id: str
    kind: str = "comparison"  # comparison, staleness, reference, tuning; others are not reported.
    mode: str = ""
    condition: str = "even"
    seed: int = 0
    workers: int = 0
    batch_size: int = 0
    epochs: float = 0
    learning_rate: float | None = None
    momentum: float | None = None
    tuned: bool = False
    staleness: int | None = None  # Enforced.
    status: str = "failed"  # Those of run.py.
    reason: str = ""
    began_unix: float = 0
    wall_s: float | None = None
    cpu_s: float | None = None
    cores: int | None = None
    parameters: int | None = None
    weights_hash: str | None = None

    # From here on: derived from the metrics files.
    marks: pd.DataFrame = field(default_factory=_no_marks)
    validation_accuracy: float | None = None  # The last evaluation on that split says it, in [0, 1].
    versions: int = 0
    pushes: int = 0  # Contributions that the chief applied.
    samples_applied: int = 0
    samples_computed: int = 0  # In all batches of all workers.
    dropped_samples: int = 0  # Computed and pushed, but late or stale, so that not every server applied them.
    duration_s: float | None = None  # From the first version to the last.
    samples_per_s: float | None = None  # Applied after the first version, over duration_s.
    shares: dict[str, float] | None = None  # By PARTS, of all workers' time in batches after each one's first.
    push_staleness: list[int] = field(default_factory=list)  # Each contribution's, as the chief saw it; versions.
    clock_gaps: list[int] = field(default_factory=list)  # Each step's; steps.
    step_times: StepTimes | None = None
    time_line: pd.DataFrame | None = None  # The batches of a stretch of the run.

    @property
    def done(self) -> bool:
        return self.status == "done"

    def final(self, name: str) -> float | None:
        """What the last evaluation says."""
        return None if self.marks[name].iloc[-1:].isna().all() else float(self.marks[name].iloc[-1])

    @property
    def final_accuracy(self) -> float | None:
        return self.final("accuracy")

    @property
    def accuracy_percent(self) -> float | None:
        return None if self.final_accuracy is None else 100 * self.final_accuracy

    @property
    def wait_percent(self) -> float | None:
        """Of all workers' time."""
        return 100 * self.shares["wait"] if self.shares else None

    def bytes_pushed(self, pushes: int) -> int | None:
        """What that many pushes of the whole model weigh; about as much comes back in pulls."""
        return None if self.parameters is None else pushes * self.parameters * FLOAT_BYTES

    @property
    def cpu_share(self) -> float | None:
        """Processor time of all processes over wall time and cores."""
        if self.cpu_s is None or not self.wall_s or not self.cores:
            return None
        return self.cpu_s / (self.wall_s * self.cores)

    @property
    def cpu_bound(self) -> bool:
        """Whether the processors may have set the pace, so that times cannot be compared."""
        return self.cpu_share is not None and self.cpu_share > CPU_BOUND_SHARE

    def reached(self, target: float, name: str) -> float | None:
        """`time_s`, or `samples`, at the first evaluation with at least that accuracy."""
        return next(iter(self.marks[name][self.marks["accuracy"] >= target].tolist()), None)


def load_plan(output: Path) -> dict[str, Any]:
    """plan.json of a comparison; empty if there is none. What --tune has found is its "tuning"."""
    return read_json(output / "plan.json") | {"tuning": read_json(output / "tuning.json")}


def load_runs(output: Path) -> list[Run]:
    """All runs of a comparison that have a run.json, in the plan's order, then its trials by name.

    A folder that is in no plan, such as a copy of another, is none of its runs.
    """
    order = {name: place for place, name in enumerate(load_plan(output).get("runs", []))}
    folders = [path.parent for path in (output / "runs").glob("*/run.json")]
    folders.sort(key=lambda each: (order.get(each.name, 1 << 30), each.name))
    loaded = zip(folders, in_parallel(load_run, folders), strict=True)
    return [run for folder, run in loaded if not order or folder.name in order or run.kind == "tuning"]


def load_run(folder: Path) -> Run:
    """Everything about the run in `folder`. A run.json that is missing or broken makes a run that has failed."""
    run = Run(**_settings(folder))
    workers = {}
    for path in folder.glob("worker*.jsonl"):
        if match := re.fullmatch(r"worker(\d+)\.jsonl", path.name):
            workers[int(match[1])] = read_events(path)
    workers = dict(sorted(workers.items()))
    evaluations = [event for events in workers.values() for event in events.named("eval")]
    validation = [event for event in evaluations if event.get("split") == "validation"]
    if validation:
        run.validation_accuracy = number(max(validation, key=lambda event: number(event, "version") or 0), "accuracy")
    if run.kind not in REPORTED:
        return run
    chief = read_events(folder / "server0.jsonl")
    applies, batches = _applies(chief, run.batch_size), _batches(workers, chief)
    _add_versions(run, applies)
    _add_batches(run, batches)
    if run.done and (lack := lack_of(chief, workers, run.workers)):
        run.status, run.reason = "failed", f"its metrics are not whole: {lack}"
    run.marks = _marks(evaluations, applies)
    run.clock_gaps = clock_gaps(batches, applies)
    return run


def _settings(folder: Path) -> dict[str, Any]:
    found = read_json(folder / "run.json")
    if not found:
        return {"id": folder.name, "reason": "run.json is missing or broken"}
    names = [each.name for each in fields(Run)]
    known = names[: names.index(_SETTINGS_END)]
    return {"id": folder.name} | {name: found[name] for name in known if name in found}


def _zero_t_s(chief: Events) -> float:
    """When the first version was made, on the chief's clock."""
    return next((t_s for event in chief.named("apply") if (t_s := number(event, "t")) is not None), 0.0)


def _applies(chief: Events, batch_size: int) -> pd.DataFrame:
    zero_t_s, rows = _zero_t_s(chief), []
    for event in chief.named("apply"):
        ranks, samples = list(event.get("ranks") or []), event.get("samples")
        # Servers that do not write samples (older ones): every contribution is taken for one whole batch.
        count = sum(samples) if isinstance(samples, list) else len(ranks) * batch_size
        time_s = (number(event, "t") or zero_t_s) - zero_t_s
        rows.append((int(number(event, "version") or 0), time_s, ranks, event.get("staleness") or [], count))
    return pd.DataFrame(rows, columns=["version", "time_s", "ranks", "staleness", "samples"])


def _batches(workers: dict[int, Events], chief: Events) -> pd.DataFrame:
    """What the workers did for each batch, in order of ranks and times; PARTS in seconds."""
    zero_t_s, rows = _zero_t_s(chief), []
    for rank, events in workers.items():
        zeros = events.start_unix_s, chief.start_unix_s
        shift_s = (0.0 if None in zeros else zeros[0] - zeros[1]) - zero_t_s
        rows += [_batch(rank, event, shift_s) for event in events.named("step")]
    frame = pd.DataFrame(rows, columns=["rank", "step", "version", "samples", "end_s", *PARTS, "applied"])
    frame["begin_s"] = frame["end_s"] - frame[PARTS].sum(axis=1)
    return frame.astype({"applied": bool})


def _batch(rank: int, event: Event, shift_s: float) -> tuple[Any, ...]:
    answer = event.get("answer", "APPLIED")
    answers = answer if isinstance(answer, list) else [answer]
    step, version, samples = (int(number(event, name) or 0) for name in ("step", "version", "samples"))
    end_s, forward_s, *rest = (
        number(event, name) or 0.0 for name in ("t", "forward_s", "backward_s", "idle_s", "push_s", "wait_s", "pull_s")
    )
    applied = not {"STALE", "FENCED"}.intersection(map(str, answers))  # By every server.
    return (rank, step, version, samples, end_s + shift_s, forward_s + rest[0], *rest[1:], applied)


def _add_versions(run: Run, applies: pd.DataFrame) -> None:
    if applies.empty:
        return
    run.versions = len(applies)
    run.pushes = int(applies["ranks"].map(len).sum())
    run.samples_applied = int(applies["samples"].sum())
    run.push_staleness = [value for values in applies["staleness"] for value in values]
    run.duration_s = float(applies["time_s"].iloc[-1])
    if run.duration_s > 0:
        run.samples_per_s = float(run.samples_applied - applies["samples"].iloc[0]) / run.duration_s


def _add_batches(run: Run, batches: pd.DataFrame) -> None:
    """What follows from the batches, of which only the time line's are kept: a comparison has millions."""
    run.samples_computed = int(batches["samples"].sum())
    run.dropped_samples = int(batches["samples"][~batches["applied"]].sum())
    # A worker's first batch contains what happens once (compiling kernels, say).
    warm = batches[batches.groupby("rank").cumcount() > 0]
    sums = warm[PARTS].sum()
    if sums.sum() > 0:
        run.shares = (sums / sums.sum()).to_dict()
    own = [each for _, each in warm.groupby("rank")]
    if not own:
        return
    if len(own) >= run.workers:
        compute_s, exchange_s = ([each[parts].sum(axis=1).tolist() for each in own]
                                 for parts in (["compute", "idle"], ["push", "pull"]))  # fmt: skip
        run.step_times = StepTimes(compute_s, exchange_s, float(warm["samples"].mean()))
    duration_s = run.duration_s or 0.0
    begin_s, fastest = _TIME_LINE_BEGIN * duration_s, max(own, key=len)
    later = fastest["end_s"][fastest["end_s"] > begin_s]
    end_s = later.iloc[_TIME_LINE_BATCHES] if len(later) > _TIME_LINE_BATCHES else duration_s
    run.time_line = warm[(warm["end_s"] > begin_s) & (warm["begin_s"] < end_s)]


def _marks(evaluations: list[Event], applies: pd.DataFrame) -> pd.DataFrame:
    """The evaluations on the test split by all workers (the lead may change), at the versions that the chief made."""
    names = ("version", "loss", "accuracy")
    rows = [[number(event, name) for name in names] for event in evaluations if event.get("split", "test") == "test"]
    found = pd.DataFrame(rows, columns=names, dtype=float).fillna({"version": 0})
    made = applies[["version", "time_s"]].astype(float)
    made = made.assign(samples=applies["samples"].cumsum(), pushes=applies["ranks"].map(len).cumsum())
    both = (frame.drop_duplicates("version", keep="last") for frame in (found, made))
    return pd.merge(*both, on="version").sort_values("version")


# ---- The clock gap: by how many steps a worker is ahead of the slowest one. It is counted in versions, not by clocks.


def clock_gaps(batches: pd.DataFrame, applies: pd.DataFrame) -> list[int]:
    """For each step of each worker: its number minus the steps that the slowest worker had behind it by then."""
    made = applies[["version", "ranks"]].explode("ranks")
    clocks = []
    for rank, own in batches.groupby("rank"):
        begun, pushed = _first_of_each(own), _first_of_each(own[own["applied"]])
        contained = made["version"][made["ranks"] == rank].to_numpy()[: len(pushed)]
        done = pushed["step"].to_numpy()[: len(contained)] + 1
        clocks.append((begun["version"].to_numpy(), begun["step"].to_numpy(), contained, done))
    gaps: list[int] = []
    for versions, steps, *_ in clocks:
        least = steps
        for read, begun, contained, done in clocks:
            behind = np.maximum(_last_at(read, begun, versions), _last_at(contained, done, versions))
            heard_of = versions <= max([*read[-1:], *contained[-1:]])  # Nothing more is heard of it later.
            least = np.where(heard_of, np.minimum(least, behind), least)
        gaps += (steps - least).tolist()
    return gaps


def _first_of_each(batches: pd.DataFrame) -> pd.DataFrame:
    """The first batch of each step; of local steps there are several."""
    return batches[batches["step"] > batches["step"].cummax().shift(fill_value=-1)]


def _last_at(versions: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of the last version up to each that is wanted; 0 before the first. Versions ascend."""
    return np.concatenate([[0], values])[np.searchsorted(versions, wanted, side="right")]
