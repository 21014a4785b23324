"""Reads a run's folder: run.json and the metrics files of its programs."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

from events import Event, named, number, process_start_unix_s, read_events
from gaps import Steps, clock_gaps
from incomplete import lack_of
from parallel import in_parallel
from records import PARTS, Apply, Batch, Mark, Run, StepTimes

_PART_FIELDS = (("forward_s", "backward_s"), ("idle_s",), ("push_s",), ("wait_s",), ("pull_s",))  # By PARTS.
_REPORTED = ("comparison", "staleness", "reference")
_TIME_LINE_BEGIN = 0.4  # Of the run's duration.
_TIME_LINE_BATCHES = 40  # As long as so many of the fastest worker's.
_SETTINGS_END = "marks"  # The first derived field of Run.


def load_run(folder: Path) -> Run:
    """Everything about the run in `folder`. A run.json that is missing or broken makes a run that has failed."""
    run = Run(**_settings(folder))
    workers = {rank: read_events(path) for rank, path in _files(folder, "worker").items()}
    run.validation_accuracy = _validation_accuracy(workers)
    if run.kind not in _REPORTED:
        return run
    chief = read_events(folder / "server0.jsonl")
    zero_t_s = next((t_s for event in named(chief, "apply") if (t_s := number(event, "t")) is not None), 0.0)
    applies = [_apply(event, zero_t_s, run.batch_size) for event in named(chief, "apply")]
    chief_start = process_start_unix_s(chief)
    batches = []
    for rank, events in workers.items():
        start = process_start_unix_s(events)
        shift_s = 0.0 if start is None or chief_start is None else start - chief_start
        batches += [_batch(rank, event, shift_s - zero_t_s) for event in named(events, "step")]
    _add_versions(run, applies)
    _add_batches(run, batches)
    if run.done and (lack := lack_of(chief, workers, run.workers)):
        run.status, run.reason = "failed", f"its metrics are not whole: {lack}"
    run.marks = _marks(workers, applies)
    run.clock_gaps = clock_gaps(_steps_of_workers(batches, applies))
    return run


def load_runs(output: Path) -> list[Run]:
    """All runs of a comparison that have a run.json, in the plan's order, then its trials by name.

    A folder that is in no plan, such as a copy of another, is none of its runs.
    """
    order = {name: place for place, name in enumerate(load_plan(output).get("runs", []))}
    folders = [path.parent for path in (output / "runs").glob("*/run.json")]
    folders.sort(key=lambda each: (order.get(each.name, 1 << 30), each.name))
    runs = in_parallel(load_run, folders)
    planned = [folder.name in order or run.kind == "tuning" for folder, run in zip(folders, runs, strict=True)]
    return [run for run, is_planned in zip(runs, planned, strict=True) if is_planned or not order]


def load_plan(output: Path) -> dict[str, Any]:
    """plan.json of a comparison; empty if there is none. What --tune has found is its "tuning"."""
    return _json_object(output / "plan.json") | {"tuning": _json_object(output / "tuning.json")}


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _settings(folder: Path) -> dict[str, Any]:
    found = _json_object(folder / "run.json")
    if not found:
        return {"id": folder.name, "reason": "run.json is missing or broken"}
    names = [each.name for each in fields(Run)]
    known = names[: names.index(_SETTINGS_END)]
    return {"id": folder.name} | {name: found[name] for name in known if name in found}


def _files(folder: Path, program: str) -> dict[int, Path]:
    """The metrics files of a program by the number in their name, ascending."""
    found = {}
    for path in folder.glob(f"{program}*.jsonl"):
        if match := re.fullmatch(rf"{program}(\d+)\.jsonl", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def _batch(rank: int, event: Event, shift_s: float) -> Batch:
    answer = event.get("answer", "APPLIED")
    answers = answer if isinstance(answer, list) else [answer]
    return Batch(
        rank=rank,
        step=int(number(event, "step") or 0),
        version=int(number(event, "version") or 0),
        samples=int(number(event, "samples") or 0),
        end_s=(number(event, "t") or 0.0) + shift_s,
        parts_s=tuple(sum(number(event, name) or 0.0 for name in names) for names in _PART_FIELDS),
        applied=not {"STALE", "FENCED"}.intersection(map(str, answers)),
    )


def _apply(event: Event, zero_t_s: float, batch_size: int) -> Apply:
    ranks = event.get("ranks") or []
    samples = event.get("samples")
    return Apply(
        version=int(number(event, "version") or 0),
        time_s=(number(event, "t") or zero_t_s) - zero_t_s,
        ranks=list(ranks),
        staleness=list(event.get("staleness") or []),
        # Servers that do not write samples (older ones): every contribution is taken for one whole batch.
        samples=sum(samples) if isinstance(samples, list) else len(ranks) * batch_size,
    )


def _add_versions(run: Run, applies: list[Apply]) -> None:
    if not applies:
        return
    run.versions = len(applies)
    run.pushes = sum(len(apply.ranks) for apply in applies)
    run.samples_applied = sum(apply.samples for apply in applies)
    run.push_staleness = [value for apply in applies for value in apply.staleness]
    run.duration_s = applies[-1].time_s
    if run.duration_s > 0:
        run.samples_per_s = (run.samples_applied - applies[0].samples) / run.duration_s


def _add_batches(run: Run, batches: list[Batch]) -> None:
    """What follows from the batches, of which only the time line's are kept: a comparison has millions."""
    run.samples_computed = sum(batch.samples for batch in batches)
    run.dropped_samples = sum(batch.samples for batch in batches if not batch.applied)
    by_rank: dict[int, list[Batch]] = defaultdict(list)
    for batch in batches:
        by_rank[batch.rank].append(batch)
    # A worker's first batch contains what happens once (compiling kernels, say).
    warm = {rank: own[1:] for rank, own in sorted(by_rank.items()) if len(own) > 1}
    sums = [sum(batch.parts_s[place] for own in warm.values() for batch in own) for place in range(len(PARTS))]
    if sum(sums) > 0:
        run.shares = {part: part_s / sum(sums) for part, part_s in zip(PARTS, sums, strict=True)}
    if warm and len(warm) >= run.workers:
        run.step_times = _step_times(list(warm.values()))
    run.time_line = _time_line(warm, run.duration_s or 0.0)


def _step_times(workers: list[list[Batch]]) -> StepTimes:
    return StepTimes(
        compute_s=[[batch.part_s("compute") + batch.part_s("idle") for batch in own] for own in workers],
        exchange_s=[[batch.part_s("push") + batch.part_s("pull") for batch in own] for own in workers],
        samples=sum(batch.samples for own in workers for batch in own) / sum(map(len, workers)),
    )


def _time_line(by_rank: dict[int, list[Batch]], duration_s: float) -> list[Batch]:
    """The batches of all workers that end, or go on, in a stretch of the run."""
    if not by_rank:
        return []
    begin_s = _TIME_LINE_BEGIN * duration_s
    fastest = max(by_rank.values(), key=len)
    end_s = next((batch.end_s for batch in fastest[_first_after(fastest, begin_s) + _TIME_LINE_BATCHES :]), duration_s)
    return [batch for own in by_rank.values() for batch in own if batch.end_s > begin_s and batch.begin_s < end_s]


def _first_after(batches: list[Batch], time_s: float) -> int:
    return next((place for place, batch in enumerate(batches) if batch.end_s > time_s), len(batches))


def _marks(workers: dict[int, list[Event]], applies: list[Apply]) -> list[Mark]:
    """The evaluations on the test split by all workers (the lead may change), at the versions that the chief made."""
    place = {}
    samples = pushes = 0
    for apply in applies:
        samples += apply.samples
        pushes += len(apply.ranks)
        place[apply.version] = (apply.time_s, samples, pushes)
    marks: dict[int, Mark] = {}
    for events in workers.values():
        for event in named(events, "eval"):
            version = int(number(event, "version") or 0)
            if event.get("split", "test") == "test" and version in place:
                marks[version] = Mark(version, *place[version], number(event, "loss"), number(event, "accuracy"))
    return [marks[version] for version in sorted(marks)]


def _validation_accuracy(workers: dict[int, list[Event]]) -> float | None:
    found = [
        event for events in workers.values() for event in named(events, "eval") if event.get("split") == "validation"
    ]
    return number(max(found, key=lambda event: number(event, "version") or 0), "accuracy") if found else None


def _steps_of_workers(batches: list[Batch], applies: list[Apply]) -> dict[int, Steps]:
    """Which steps each worker began on which version, and which of them the chief applied."""
    workers: dict[int, Steps] = defaultdict(Steps)
    pushed: dict[int, list[int]] = defaultdict(list)
    for batch in batches:
        begun = workers[batch.rank].begun
        if not begun or begun[-1][1] < batch.step:
            begun.append((batch.version, batch.step))
        steps = pushed[batch.rank]
        if batch.applied and (not steps or steps[-1] < batch.step):
            steps.append(batch.step)
    contributions: dict[int, int] = defaultdict(int)
    for apply in applies:
        for rank in apply.ranks:
            if contributions[rank] < len(pushed[rank]):
                workers[rank].applied.append((apply.version, pushed[rank][contributions[rank]]))
            contributions[rank] += 1
    return {rank: steps for rank, steps in workers.items() if steps.begun}
