"""The report's tables, as text. Every figure in them is a function of one group of runs."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from records import PARTS, TARGETS, Run
from spread import Interval, Ratio, deviation, interval, mean, percentile
from summary import Comparison, Group, accuracy_percent, reference_name, wait_percent

NONE = "—"
CPU_BOUND = "CPU-bound, not comparable"
OUTCOME = "Gains and losses"  # The caption of outcome().


@dataclass
class Table:
    """Its first column names the row."""

    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


def number(value: float | None, digits: int = 0) -> str:
    """With a thin grouping of thousands left out, so that it can be copied."""
    return NONE if value is None else f"{value:.{digits}f}"


def with_spread(values: Sequence[float], digits: int) -> str:
    """The mean, and the standard deviation over seeds where there are several."""
    found, spread = mean(values), deviation(values)
    return number(found, digits) if spread is None else f"{number(found, digits)} (sd {number(spread, digits)})"


def difference(found: Interval | None, digits: int = 2) -> str:
    """With its 95 % interval."""
    if found is None:
        return NONE
    half = "one seed, no interval" if found.half is None else f"± {found.half:.{digits}f}"
    return f"{found.mean:+.{digits}f} {half}"


def ratio(found: Ratio | None) -> str:
    """With its 95 % interval."""
    if found is None:
        return NONE
    if found.low is None or found.high is None:
        return f"{found.mean:.2f} one seed, no interval"
    return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"


def runs_of(group: Group) -> str:
    """How many of its runs are in the means, and what became of the others."""
    lost = Counter(run.status for run in group.lost)
    counts = f"{len(group.done)} of {len(group.runs)}"
    return counts + "".join(f", {count} {status}" for status, count in sorted(lost.items()))


def outcome(groups: list[Group]) -> Table:
    """What is gained and lost."""
    table = Table(["mode", "runs", "accuracy %", "points from bsp", "samples/s", "times bsp", "waiting %"])
    for group in groups:
        row = [group.mode, runs_of(group), with_spread(group.values(accuracy_percent), 2)]
        row.append(difference(group.accuracy_difference))
        row.append(with_spread(group.values(lambda run: run.samples_per_s), 0))
        row.append(CPU_BOUND if group.cpu_bound else ratio(group.speed_ratio))
        table.rows.append([*row, number(group.mean(wait_percent), 1)])
    return table


def targets(groups: list[Group]) -> Table:
    """Time and samples to each accuracy, over the runs that reached it."""
    table = Table(["mode"])
    for target in TARGETS:
        table.columns += [f"to {100 * target:.0f} %: s", "samples", "runs"]
    for group in groups:
        row = [group.mode + (f" ({CPU_BOUND})" if group.cpu_bound else "")]
        for target in TARGETS:
            marks = group.reached(target)
            row.append(number(mean([mark.time_s for mark in marks]), 2))
            row.append(number(mean([mark.samples for mark in marks])))
            row.append(f"{len(marks)} of {len(group.runs)}")
        table.rows.append(row)
    return table


def _percentiles(values: list[int]) -> str:
    if not values:
        return NONE
    return " / ".join(str(found) for found in (percentile(values, 0.5), percentile(values, 0.99), max(values)))


def inside(groups: list[Group]) -> Table:
    """What the modes did, and whether the machine let them."""
    table = Table(["mode", "staleness p50/p99/max", "clock gap p50/p99/max", "dropped samples"])
    table.columns += ["predicted samples/s", "MB pushed", "processors %"]
    for group in groups:
        dropped, computed = (
            group.pooled(lambda run: [run.dropped_samples]),
            group.pooled(lambda run: [run.samples_computed]),
        )
        share = 100 * sum(dropped) / max(sum(computed), 1)
        processors = group.mean(lambda run: run.cpu_share)
        row = [group.mode, _percentiles(group.pooled(lambda run: run.push_staleness))]
        row.append(_percentiles(group.pooled(lambda run: run.clock_gaps)))
        row.append(f"{sum(dropped)} ({share:.1f} %)")
        row.append(number(mean(list((group.predicted or {}).values()))))
        row.append(
            number(group.mean(lambda run: None if (size := run.bytes_pushed(run.pushes)) is None else size / 1e6), 1)
        )
        text = number(None if processors is None else 100 * processors)
        table.rows.append([*row, f"{text}: {CPU_BOUND}" if group.cpu_bound else text])
    return table


def rates(comparison: Comparison) -> Table:
    """What each mode was trained with."""
    table = Table(["mode", "learning rate", "momentum", "chosen by", "trials"])
    # Those of an enforced staleness are asp's by their mode.
    trials = Counter(run.mode for run in comparison.runs if run.kind == "tuning" and run.staleness is None)
    for mode in comparison.modes:
        runs = [run for group in comparison.groups for run in group.runs if group.mode == mode]
        tuned = all(run.tuned for run in runs)
        row = [mode, _distinct([run.learning_rate for run in runs]), _distinct([run.momentum for run in runs])]
        chosen = "tuning on the validation split" if tuned else "hand, not tuned"
        if all(run.learning_rate is None for run in runs):
            row, chosen = [mode, "the script's", "the script's"], "the script"
        table.rows.append([*row, chosen, str(trials[mode])])
    return table


def _distinct(values: list[float | None]) -> str:
    return ", ".join(dict.fromkeys(NONE if value is None else f"{value:g}" for value in values))


def lost(comparison: Comparison) -> Table:
    """Runs that did not end as they should."""
    table = Table(["run", "mode", "condition", "seed", "what happened", "reason", "last accuracy %"])
    for run in comparison.reported:
        if not run.done:
            row = [run.id, run.mode, run.condition, str(run.seed), run.status, run.reason or NONE]
            table.rows.append([*row, number(accuracy_percent(run), 2)])
    return table


def _single(groups: list[Group], names: list[str], title: str, first: str) -> Table:
    table = Table([title, "runs", "accuracy %", "95 % interval", f"points from {first}", "learning rate", "momentum"])
    for name, group in zip(names, groups, strict=True):
        values = group.values(accuracy_percent)
        found = interval(values)
        row = [name, runs_of(group), with_spread(values, 2)]
        row.append(NONE if found is None or found.half is None else f"± {found.half:.2f}")
        row += [difference(group.accuracy_difference), _distinct([run.learning_rate for run in group.runs])]
        table.rows.append([*row, _distinct([run.momentum for run in group.runs])])
    return table


def staleness(comparison: Comparison) -> Table:
    """Accuracy by enforced staleness."""
    names = [str(each.runs[0].staleness) for each in comparison.staleness]
    return _single(comparison.staleness, names, "staleness", "staleness 0")


def references(comparison: Comparison) -> Table:
    """Accuracy of the reference curves, and of bsp, which must be on that of NxB."""
    groups = list(comparison.references)
    names = [reference_name(each.runs[0]) for each in groups]
    if (bsp := comparison.group("bsp", "even")) is not None:
        groups.append(replace(bsp, reference=comparison.reference("NxB")))
        names.append(f"bsp, {bsp.runs[0].workers} workers")
    return _single(groups, names, "curve", "NxB")


def csv_columns(run: Run, predicted: float | None) -> dict[str, object]:
    """A run's row of results.csv: shares and accuracies in [0, 1], None where there is nothing."""
    final = run.final
    row: dict[str, object] = {
        name: getattr(run, name) for name in ("id", "kind", "condition", "mode", "seed", "workers")
    }
    row |= {name: getattr(run, name) for name in ("batch_size", "epochs", "learning_rate", "momentum", "tuned")}
    row |= {"enforced_staleness": run.staleness, "status": run.status, "reason": run.reason}
    row |= {"final_accuracy": run.final_accuracy, "final_loss": final.loss if final else None}
    row |= {"validation_accuracy": run.validation_accuracy, "versions": run.versions, "pushes": run.pushes}
    row |= {"samples_applied": run.samples_applied, "samples_computed": run.samples_computed}
    row |= {"dropped_samples": run.dropped_samples, "duration_s": run.duration_s, "samples_per_s": run.samples_per_s}
    row |= {"predicted_samples_per_s": predicted}
    row |= {f"{part}_share": run.shares[part] if run.shares else None for part in PARTS}
    for target in TARGETS:
        mark = run.reached(target)
        row[f"time_to_{100 * target:.0f}_s"] = mark.time_s if mark else None
        row[f"samples_to_{100 * target:.0f}"] = mark.samples if mark else None
    for name, values in (("staleness", run.push_staleness), ("clock_gap", run.clock_gaps)):
        row |= {f"{name}_p50": percentile(values, 0.5), f"{name}_p99": percentile(values, 0.99)}
        row[f"{name}_max"] = max(values, default=None)
    row |= {"bytes_pushed": run.bytes_pushed(run.pushes), "cpu_share": run.cpu_share, "cpu_bound": run.cpu_bound}
    return row | {"wall_s": run.wall_s, "weights_hash": run.weights_hash}


def write_csv(comparison: Comparison, path: Path) -> None:
    """One row a run, those of tuning among them."""
    predictions = {
        run.id: (group.predicted or {}).get(run.seed) for group in comparison.groups for run in group.runs if run.done
    }
    rows = [csv_columns(run, predictions.get(run.id)) for run in comparison.runs]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(csv_columns(Run(id=""), None)))
        writer.writeheader()
        writer.writerows(rows)
