"""Computes a report's figures from the folders of its runs, straightforwardly and without the report's modules.

`csv_row(folder)` is what results.csv must say of a run; `tables(output)` are the cells of report.md by heading.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from pathlib import Path
from typing import Any

TARGETS = (0.80, 0.85, 0.87)
T_975 = {1: 12.7062047, 2: 4.3026527, 3: 3.1824463, 4: 2.7764451, 5: 2.5705818, 9: 2.2621572}
DASH = "—"


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a metrics file."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def nearest_rank(values: list[int], share: float) -> int | None:
    """A percentile that occurred."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


def clock_gap_list(workers: list[list[dict[str, Any]]], applies: list[dict[str, Any]]) -> list[int]:
    """By going through the versions one by one: who had how many steps behind him."""
    last_version = {}
    exchanges: dict[int, list[tuple[int, int]]] = {}  # By rank: (version read, step), one an exchange.
    pushed: dict[int, list[int]] = {}
    for steps in workers:
        for line in steps:
            own = exchanges.setdefault(line["rank"], [])
            if not own or own[-1][1] != line["step"]:
                own.append((line["version"], line["step"]))
            refused = line.get("answer") == "STALE"
            taken = pushed.setdefault(line["rank"], [])
            if not refused and line["step"] not in taken[-1:]:
                taken.append(line["step"])
    behind: dict[int, dict[int, int]] = {rank: {} for rank in exchanges}  # By rank and version.
    for rank, own in exchanges.items():
        for version, step in own:
            behind[rank][version] = max(behind[rank].get(version, 0), step)
        last_version[rank] = own[-1][0]
    contributions = dict.fromkeys(exchanges, 0)
    for apply in applies:
        for rank in apply["ranks"]:
            if rank in pushed and contributions[rank] < len(pushed[rank]):
                step = pushed[rank][contributions[rank]]
                behind[rank][apply["version"]] = max(behind[rank].get(apply["version"], 0), step + 1)
                last_version[rank] = max(last_version[rank], apply["version"])
                contributions[rank] += 1
    clock = dict.fromkeys(exchanges, 0)
    reads = sorted((version, rank, step) for rank, own in exchanges.items() for version, step in own)
    gaps, now = [], -1
    for version, _, step in reads:
        while now < version:
            now += 1
            for rank in clock:
                clock[rank] = max(clock[rank], behind[rank].get(now, 0))
        others = [clock[rank] for rank in clock if last_version[rank] >= version]
        gaps.append(max(0, step - min([step, *others])))
    return gaps


def run_facts(folder: Path) -> dict[str, Any]:
    """Everything of one run."""
    facts = json.loads((folder / "run.json").read_text())
    chief = [line for line in lines(folder / "server0.jsonl") if line["event"] == "apply"]
    workers = [lines(path) for path in sorted(folder.glob("worker*.jsonl"))]
    steps = [[line for line in worker if line["event"] == "step"] for worker in workers]
    facts["applied"] = sum(sum(line["samples"]) for line in chief)
    facts["pushes"] = sum(line["contributions"] for line in chief)
    facts["versions"] = len(chief)
    facts["computed"] = sum(line["samples"] for worker in steps for line in worker)
    facts["dropped"] = sum(line["samples"] for worker in steps for line in worker if line.get("answer") == "STALE")
    facts["duration"] = chief[-1]["t"] - chief[0]["t"] if chief else None
    facts["rate"] = (facts["applied"] - sum(chief[0]["samples"])) / facts["duration"] if facts["duration"] else None
    names = ("forward_s", "backward_s", "idle_s", "push_s", "wait_s", "pull_s")
    warm = [line for worker in steps for line in worker[1:]]
    times = {name: sum(line.get(name, 0.0) for line in warm) for name in names}
    total = sum(times.values())
    facts["wait"] = times["wait_s"] / total if total else None
    facts["times"], facts["total"] = times, total
    facts["staleness_list"] = [value for line in chief for value in line["staleness"]]
    facts["gap_list"] = clock_gap_list(steps, chief)
    marks = []
    for line in [line for worker in workers for line in worker if line["event"] == "eval" and line["split"] == "test"]:
        before = [apply for apply in chief if apply["version"] <= line["version"]]
        if before and before[-1]["version"] == line["version"]:
            samples = sum(sum(apply["samples"]) for apply in before)
            marks.append(
                (line["version"], before[-1]["t"] - chief[0]["t"], samples, line.get("accuracy"), line["loss"])
            )
    facts["marks"] = sorted(marks, key=lambda mark: mark[0])
    facts["accuracy"] = facts["marks"][-1][3] if marks else None
    facts["cpu"] = facts["cpu_s"] / (facts["wall_s"] * facts["cores"])
    facts["size"] = facts["pushes"] * facts["parameters"] * 4
    return facts


def reached(facts: dict[str, Any], target: float) -> tuple[float, int] | None:
    """Seconds and samples to an accuracy."""
    return next(((mark[1], mark[2]) for mark in facts["marks"] if mark[3] is not None and mark[3] >= target), None)


def csv_row(facts: dict[str, Any]) -> dict[str, Any]:
    """What results.csv must say, but for predictions."""
    same = ("id", "kind", "condition", "mode", "seed", "workers", "batch_size", "epochs", "learning_rate", "momentum")
    row = {name: facts[name] for name in (*same, "tuned", "status", "reason", "wall_s")}
    row["enforced_staleness"] = facts["staleness"]
    row |= {"final_accuracy": facts["accuracy"], "final_loss": facts["marks"][-1][4] if facts["marks"] else None}
    row |= {"versions": facts["versions"], "pushes": facts["pushes"], "samples_applied": facts["applied"]}
    row |= {"samples_computed": facts["computed"], "dropped_samples": facts["dropped"], "duration_s": facts["duration"]}
    row |= {"samples_per_s": facts["rate"], "bytes_pushed": facts["size"], "cpu_share": facts["cpu"]}
    row["cpu_bound"] = facts["cpu"] > 0.7
    row |= {"validation_accuracy": None, "weights_hash": facts.get("weights_hash")}
    for part, names in {"compute": ("forward_s", "backward_s")}.items():
        row[f"{part}_share"] = sum(facts["times"][name] for name in names) / facts["total"] if facts["total"] else None
    for part in ("idle", "push", "wait", "pull"):
        row[f"{part}_share"] = facts["times"][f"{part}_s"] / facts["total"] if facts["total"] else None
    for target in TARGETS:
        found = reached(facts, target)
        row[f"time_to_{target * 100:.0f}_s"] = found[0] if found else None
        row[f"samples_to_{target * 100:.0f}"] = found[1] if found else None
    for name, values in (("staleness", facts["staleness_list"]), ("clock_gap", facts["gap_list"])):
        row |= {f"{name}_p50": nearest_rank(values, 0.5), f"{name}_p99": nearest_rank(values, 0.99)}
        row[f"{name}_max"] = max(values) if values else None
    return row


def spread_text(values: list[float], digits: int) -> str:
    """Mean and standard deviation."""
    if not values:
        return DASH
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} (sd {statistics.stdev(values):.{digits}f})"


def t_975(count: int) -> float:
    """Student's t for the interval of so many values."""
    return T_975[count - 1]


def paired(own: dict[int, float], other: dict[int, float]) -> tuple[float, float | None] | None:
    """Mean difference by seed and half its interval."""
    found = [own[seed] - other[seed] for seed in own if seed in other]
    if not found:
        return None
    if len(found) < 2:
        return found[0], None
    return statistics.fmean(found), t_975(len(found)) * statistics.stdev(found) / math.sqrt(len(found))


def points(own: dict[int, float], other: dict[int, float] | None) -> str:
    """The cell of a difference."""
    found = None if other is None else paired(own, other)
    if found is None:
        return DASH
    return f"{found[0]:+.2f} " + ("one seed, no interval" if found[1] is None else f"± {found[1]:.2f}")


def times(own: dict[int, float], other: dict[int, float] | None) -> str:
    """The cell of a ratio."""
    if other is None:
        return DASH
    found = paired({seed: math.log(own[seed]) for seed in own}, {seed: math.log(other[seed]) for seed in other})
    if found is None:
        return DASH
    centre, half = found
    if half is None:
        return f"{math.exp(centre):.2f} one seed, no interval"
    return f"{math.exp(centre):.2f} ({math.exp(centre - half):.2f} to {math.exp(centre + half):.2f})"


def counts(group: list[dict[str, Any]]) -> str:
    """The cell of runs."""
    lost: dict[str, int] = {}
    for run in group:
        if run["status"] != "done":
            lost[run["status"]] = lost.get(run["status"], 0) + 1
    done = len(group) - sum(lost.values())
    return f"{done} of {len(group)}" + "".join(f", {lost[status]} {status}" for status in sorted(lost))


def by_seed(group: list[dict[str, Any]], name: str, factor: float = 1) -> dict[int, float]:
    """Values of the runs that are done, by seed."""
    done = [run for run in group if run["status"] == "done" and run[name] is not None]
    return {run["seed"]: factor * run[name] for run in sorted(done, key=lambda run: run["seed"])}


def outcome_row(group: list[dict[str, Any]], bsp: list[dict[str, Any]] | None) -> list[str]:
    """A row of "Gains and losses"."""
    other = None if bsp is None or bsp is group else bsp
    accuracy, rate = by_seed(group, "accuracy", 100), by_seed(group, "rate")
    row = [group[0]["mode"], counts(group), spread_text(list(accuracy.values()), 2)]
    row.append(points(accuracy, other and by_seed(other, "accuracy", 100)))
    row.append(spread_text(list(rate.values()), 0))
    bound = any(run["cpu"] > 0.7 for run in group)
    row.append("CPU-bound, not comparable" if bound else times(rate, other and by_seed(other, "rate")))
    wait = list(by_seed(group, "wait", 100).values())
    return [*row, f"{statistics.fmean(wait):.1f}" if wait else DASH]


def target_row(group: list[dict[str, Any]]) -> list[str]:
    """A row of "Time and samples to an accuracy"."""
    bound = any(run["cpu"] > 0.7 for run in group)
    row = [group[0]["mode"] + (" (CPU-bound, not comparable)" if bound else "")]
    for target in TARGETS:
        marks = [found for run in group if run["status"] == "done" and (found := reached(run, target))]
        row.append(f"{statistics.fmean(mark[0] for mark in marks):.2f}" if marks else DASH)
        row.append(f"{statistics.fmean(mark[1] for mark in marks):.0f}" if marks else DASH)
        row.append(f"{len(marks)} of {len(group)}")
    return row


def three(values: list[int]) -> str:
    """Percentiles."""
    return f"{nearest_rank(values, 0.5)} / {nearest_rank(values, 0.99)} / {max(values)}" if values else DASH


def inside_row(group: list[dict[str, Any]]) -> list[str]:
    """A row of "Inside", with None for what is predicted."""
    done = [run for run in group if run["status"] == "done"]
    dropped, computed = sum(run["dropped"] for run in group), sum(run["computed"] for run in group)
    row = [group[0]["mode"], three([value for run in group for value in run["staleness_list"]])]
    row.append(three([value for run in group for value in run["gap_list"]]))
    row += [f"{dropped} ({100 * dropped / max(computed, 1):.1f} %)", None]
    row.append(f"{statistics.fmean(run['size'] / 1e6 for run in done):.1f}" if done else DASH)
    text = f"{100 * statistics.fmean(run['cpu'] for run in done):.0f}" if done else DASH
    bound = any(run["cpu"] > 0.7 for run in group)
    return [*row, text + ": CPU-bound, not comparable" if bound else text]
