"""The report of a comparison: report.html, report.md, results.csv and plots/, and what is printed of it."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.compare import statements
from experiments.compare.comparison import CPU_BOUND_SHARE
from experiments.compare.figures import CONDITION_TITLES, REFERENCES, STALENESS, figures_of
from experiments.compare.groups import PYTORCH, Comparison, Group, compare, did_not_end, reference_name
from experiments.compare.modes import explained
from experiments.compare.runs import PARTS, TARGETS, Run, load_plan, load_runs
from experiments.compare.settings import UsageError
from experiments.shared.charts import Figure, draw_all
from experiments.shared.intervals import Interval, Ratio, deviation, interval, mean, percentile
from experiments.shared.machine import commit, machine, write_json, write_text
from experiments.shared.pages import NONE, Section, Table, number, render

TITLE = "Sync and async, compared"
LEAD = (
    "What is gained and what is lost when workers stop waiting for each other: the same model, data order and number "
    "of samples under each mode."
)
CPU_BOUND = "CPU-bound, not comparable"
OUTCOME = "Gains and losses"  # The caption of the tables that are printed.
_FIRST = ("Who waits for whom", "Throughput", "Accuracy over time")  # Before the tables.
_FEW_SEEDS = 5  # Below it Student's t is 3 and more.
_WIDTH = 110  # What is printed is so wide.
HOW_TO_READ = (
    "Only what the 95 % intervals of these runs allow is said, for this model, these data and this machine. "
    "Samples/s say how fast a mode trains; points are of test accuracy, in percent, more or less than bsp's. "
    "Where an interval (±) has 0 in it, the runs show no difference."
)
DEFINITIONS = [
    "Time is the first server's clock; 0 s is its first applied version.",
    "Samples count when a version contains them. Those that were computed, but came too late or were too stale, are "
    "the column of dropped samples.",
    "Accuracy and loss are of the test split, with the weights at the servers: in local_sgd and easgd the centre, "
    "not a worker's own. They are computed from copies, while the workers go on.",
    "samples/s are the samples applied after the first version over the time from the first version to the last.",
    "Waiting is the workers' time in which a server made them wait, over all their time in batches but each one's "
    "first.",
    "The predicted samples/s follow from the step times of bsp under the same condition with the same seed: bsp "
    "waits for the slowest of N workers, asp and easgd add up the workers' rates, local_sgd waits for the slowest sum "
    "of K batches; ssp and backup are simulated, the latter with late workers that finish their batch before they "
    "begin with the next step. bsp's workers exchange all at once, which takes them longer than those that do not: "
    "the others may be faster than predicted by that.",
    "Staleness is the number of versions by which a push's weights were behind when the first server applied it; the "
    "clock gap of a step is by how many steps its worker was ahead of the slowest.",
    "A run's result is its last evaluation. sd is the standard deviation over seeds. Differences and ratios are "
    "paired by seed, with a 95 % interval of Student's t (ratios by their logarithm). The intervals are not "
    "adjusted for their number: of twenty statements one may be wrong.",
    "Means are over the runs that ended as they should, and the column of runs says how many did.",
    f'Where processes used more than {100 * CPU_BOUND_SHARE:.0f} % of the processors, times are marked "{CPU_BOUND}".',
]


@dataclass
class Written:
    sections: list[Section]
    verdicts: list[statements.Verdict]


def write_reports(output: Path) -> Written:
    """Writes the report of all runs in `output` that have ended so far. ValueError if there are none."""
    runs = load_runs(output)
    if not runs:
        raise ValueError(f"{output}: there are no runs that have ended (no {output / 'runs'}/*/run.json)")
    plan, comparison = load_plan(output), compare(runs)
    verdicts = statements.verdicts_of(comparison, plan.get("settings") or {})
    results(comparison).to_csv(output / "results.csv", index=False, lineterminator="\r\n")
    figures = figures_of(comparison)
    svgs = draw_all(figures, output / "plots")
    sections = _sections(comparison, plan, figures, verdicts)
    missing = [run for run in plan.get("runs", []) if run not in {each.id for each in runs}]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        sections[0].notes.append(f"{len(missing)} of {len(plan['runs'])} planned runs {verb} still to be made.")
    values = {"title": TITLE, "lead": LEAD, "sections": sections, "provenance": _provenance(plan, comparison)}
    write_text(output / "report.md", render("report.md.j2", **values))
    write_text(output / "report.html", render("report.html.j2", **values, svgs=svgs))
    return Written(sections, verdicts)


def summary(sections: list[Section]) -> str:
    """What is printed: what to choose when, and what each mode gains and loses."""
    lines = []
    for bullet in sections[0].bullets:
        lines += textwrap.wrap(bullet, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    lines += [line for note in sections[0].notes for line in textwrap.wrap(note, _WIDTH)]
    for section in sections:
        for table in section.tables:
            if table.caption == OUTCOME:
                rows = [table.columns, *table.rows]
                widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
                lines += ["", section.title]
                for first, *rest in rows:
                    cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
                    lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


# ---- What is in it


def _sections(
    comparison: Comparison, plan: dict[str, Any], figures: list[Figure], verdicts: list[statements.Verdict]
) -> list[Section]:
    pictures: dict[str, Section] = {}
    for figure in figures:
        if figure.section not in (STALENESS, REFERENCES):
            pictures.setdefault(figure.section, Section(figure.section)).figures.append(figure)
    found = [_front(comparison), Section("The modes", bullets=[*filter(None, map(explained, comparison.modes))])]
    if verdicts:
        found.append(Section("Verdicts", bullets=list(map(str, verdicts))))
    found += [section for title, section in pictures.items() if title in _FIRST]
    found += [_condition(comparison, condition) for condition in comparison.conditions]
    found += [section for title, section in pictures.items() if title not in _FIRST]
    found += _single_worker(comparison, plan, figures)
    return [*found, _rates(comparison, plan), _how_measured(plan, comparison)]


def _front(comparison: Comparison) -> Section:
    section = Section("What to choose when", bullets=statements.choices(comparison))
    section.paragraphs.append(HOW_TO_READ if section.bullets else "No modes were compared.")
    lost, seeds = [run for run in comparison.reported if not run.done], len(comparison.seeds)
    if seeds == 1:
        section.notes.append("There is one seed: no interval, and so no statement about differences.")
    elif seeds < _FEW_SEEDS:
        narrow = "the intervals are wide, and few statements can be made: more --seeds narrow them."
        section.notes.append(f"With {seeds} seeds {narrow}")
    if any(run.learning_rate is not None and not run.tuned for run in _compared(comparison)):
        section.notes.append("The learning rates are not tuned: a mode may do better with another one.")
    if lost:
        caption = f"{did_not_end(len(lost))}; no mean contains {'it' if len(lost) == 1 else 'them'}"
        section.tables.append(_table(caption, lost, _LOST))
    return section


def _compared(comparison: Comparison) -> list[Run]:
    return [run for group in comparison.groups for run in group.runs]


def _condition(comparison: Comparison, condition: str) -> Section:
    groups = comparison.under(condition)
    title = CONDITION_TITLES.get(condition, condition)
    return Section(
        title[0].upper() + title[1:],
        bullets=[*filter(None, map(statements.about, groups))],
        tables=[
            _table(OUTCOME, groups, _OUTCOME),
            _table("Time and samples to an accuracy, means over the runs that reached it", groups, _TARGETS),
            _table("Inside", groups, _INSIDE),
        ],
    )


def _single_worker(comparison: Comparison, plan: dict[str, Any], figures: list[Figure]) -> list[Section]:
    found = []
    if groups := comparison.staleness:
        names = [str(group.runs[0].staleness) for group in groups]
        found.append(Section("What staleness costs", bullets=statements.about_staleness(comparison)))
        found[-1].tables.append(_single("staleness", "staleness 0", groups, names))
        found[-1].figures = [figure for figure in figures if figure.section == STALENESS]
    if groups := list(comparison.references):
        names = [reference_name(group.runs[0]) for group in groups]
        if (bsp := comparison.group("bsp", "even")) is not None:  # It must be on the curve of NxB.
            groups.append(replace(bsp, reference=comparison.reference("NxB")))
            names.append(f"bsp, {bsp.runs[0].workers} workers")
        found.append(Section("Reference curves", [statements.WHY_ALIKE], statements.about_references(comparison)))
        found[-1].tables.append(_single("curve", "NxB", groups, names))
        found[-1].figures = [figure for figure in figures if figure.section == REFERENCES]
        if PYTORCH not in names:
            left_out = f"left out: {plan.get('no_pytorch') or 'it was not planned'}"
            planned = PYTORCH in " ".join(plan.get("runs", []))
            found[-1].notes.append(f"PyTorch's curve is {'still to be made' if planned else left_out}.")
    return found


def _rates(comparison: Comparison, plan: dict[str, Any]) -> Section:
    runs = _compared(comparison)
    # Those of an enforced staleness are asp's by their mode.
    trials = Counter(run.mode for run in comparison.runs if run.kind == "tuning" and run.staleness is None)
    table = Table("", ["mode", "learning rate", "momentum", "chosen by", "trials"])
    for mode in comparison.modes:
        own = [run for run in runs if run.mode == mode]
        row = [_distinct(own, "learning_rate"), _distinct(own, "momentum")]
        row.append("tuning on the validation split" if all(run.tuned for run in own) else "hand, not tuned")
        if all(run.learning_rate is None for run in own):
            row = ["the script's", "the script's", "the script"]
        table.rows.append([mode, *row, str(trials[mode])])
    section = Section("Learning rates", tables=[table])
    if all(run.learning_rate is None for run in runs):
        section.paragraphs.append("The script's own, under every mode.")
        return section
    section.paragraphs.append(
        "Each mode, and each enforced staleness, got equally many trials, with a seed that is not reported here."
        if all(run.tuned for run in runs)
        else "Not tuned."
    )
    if edge := [name for name, entry in plan["tuning"].items() if entry.get("at_edge")]:
        beyond = "is at the edge of those tried with its momentum: beyond it may be a better one."
        section.notes.append(f"The best rate of {', '.join(edge)} {beyond}")
    return section


def _how_measured(plan: dict[str, Any], comparison: Comparison) -> Section:
    about = "; ".join(f"{name}: {value}" for name, value in plan.get("machine", {}).items())
    paragraphs = [_provenance(plan, comparison), f"Machine: {about or 'not recorded'}."]
    if plan.get("step_time_s"):
        paragraphs.append(
            f"Every batch was made to last at least {1000 * plan['step_time_s']:g} ms by idling, so that the modes are "
            "compared and not the scheduler; delays are idle time as well."
        )
    return Section("How this was measured", paragraphs, DEFINITIONS)


def _provenance(plan: dict[str, Any], comparison: Comparison) -> str:
    """A line for every figure: command, seeds, machine and commit."""
    on = plan.get("machine", {})
    cores = f", {on['cores']} cores" if on.get("cores") else ""
    return (
        f"Command: {plan.get('command', 'not recorded')}; seeds {', '.join(map(str, comparison.seeds)) or 'none'}; "
        f"{on.get('cpu') or 'machine not recorded'}{cores}; "
        f"commit {str(plan.get('commit') or 'not recorded')[:12]}{' with changes' if plan.get('dirty') else ''}."
    )


# ---- Tables: every figure in them is a function of one group of runs

Columns = Sequence[tuple[str, Callable[[Any], str]]]


def _table(caption: str, each: Iterable[Any], columns: Columns) -> Table:
    return Table(caption, [name for name, _ in columns], [[cell(one) for _, cell in columns] for one in each])


def _with_spread(values: Sequence[float], digits: int) -> str:
    found, spread = mean(values), deviation(values)
    return number(found, digits) if spread is None else f"{number(found, digits)} (sd {number(spread, digits)})"


def _difference(found: Interval | None) -> str:
    if found is None:
        return NONE
    return found.text(sign="+") + (" one seed, no interval" if found.half is None else "")


def _ratio(found: Ratio | None) -> str:
    if found is None:
        return NONE
    return str(found) + ("" if found.range else " one seed, no interval")


def _runs_of(group: Group) -> str:
    """How many of its runs are in the means, and what became of the others."""
    lost = Counter(run.status for run in group.lost)
    counts = f"{len(group.done)} of {len(group.runs)}"
    return counts + "".join(f", {count} {status}" for status, count in sorted(lost.items()))


def _percentiles(values: list[int]) -> str:
    if not values:
        return NONE
    return " / ".join(str(found) for found in (percentile(values, 0.5), percentile(values, 0.99), max(values)))


def _dropped(group: Group) -> str:
    dropped, computed = (
        sum(getattr(run, name) for run in group.runs) for name in ("dropped_samples", "samples_computed")
    )
    return f"{dropped} ({100 * dropped / max(computed, 1):.1f} %)"


def _megabytes(run: Run) -> float | None:
    size = run.bytes_pushed(run.pushes)
    return None if size is None else size / 1e6


def _processors(group: Group) -> str:
    share = group.mean(lambda run: None if run.cpu_share is None else 100 * run.cpu_share)
    return number(share) + (f": {CPU_BOUND}" if group.cpu_bound else "")


def _distinct(runs: list[Run], name: str) -> str:
    values = [getattr(run, name) for run in runs]
    return ", ".join(dict.fromkeys(NONE if value is None else f"{value:g}" for value in values))


def _target_columns(target: float) -> Columns:
    return [
        (f"to {100 * target:.0f} %: s", lambda group: number(mean([*group.reached(target, "time_s").values()]), 2)),
        ("samples", lambda group: number(mean([*group.reached(target, "samples").values()]))),
        ("runs", lambda group: f"{len(group.reached(target, 'time_s'))} of {len(group.runs)}"),
    ]


_OUTCOME: Columns = [
    ("mode", lambda group: group.mode),
    ("runs", _runs_of),
    ("accuracy %", lambda group: _with_spread(group.values("accuracy_percent"), 2)),
    ("points from bsp", lambda group: _difference(group.accuracy_difference)),
    ("samples/s", lambda group: _with_spread(group.values("samples_per_s"), 0)),
    ("times bsp", lambda group: CPU_BOUND if group.cpu_bound else _ratio(group.speed_ratio)),
    ("waiting %", lambda group: number(group.mean("wait_percent"), 1)),
]
_TARGETS: Columns = [
    ("mode", lambda group: group.mode + (f" ({CPU_BOUND})" if group.cpu_bound else "")),
    *(column for target in TARGETS for column in _target_columns(target)),
]
_INSIDE: Columns = [
    ("mode", lambda group: group.mode),
    ("staleness p50/p99/max", lambda group: _percentiles(group.pooled(lambda run: run.push_staleness))),
    ("clock gap p50/p99/max", lambda group: _percentiles(group.pooled(lambda run: run.clock_gaps))),
    ("dropped samples", _dropped),
    ("predicted samples/s", lambda group: number(group.mean_predicted)),
    ("MB pushed", lambda group: number(group.mean(_megabytes), 1)),
    ("processors %", _processors),
]
_LOST: Columns = [
    ("run", lambda run: run.id),
    ("mode", lambda run: run.mode),
    ("condition", lambda run: run.condition),
    ("seed", lambda run: str(run.seed)),
    ("what happened", lambda run: run.status),
    ("reason", lambda run: run.reason or NONE),
    ("last accuracy %", lambda run: number(run.accuracy_percent, 2)),
]


def _single(title: str, first: str, groups: list[Group], names: list[str]) -> Table:
    def half(group: Group) -> str:
        found = interval(group.values("accuracy_percent"))
        return NONE if found is None or found.half is None else f"± {found.half:.2f}"

    columns: Columns = [
        (title, lambda group: names[groups.index(group)]),
        ("runs", _runs_of),
        ("accuracy %", lambda group: _with_spread(group.values("accuracy_percent"), 2)),
        ("95 % interval", half),
        (f"points from {first}", lambda group: _difference(group.accuracy_difference)),
        ("learning rate", lambda group: _distinct(group.runs, "learning_rate")),
        ("momentum", lambda group: _distinct(group.runs, "momentum")),
    ]
    return _table("", groups, columns)


def results(comparison: Comparison) -> pd.DataFrame:
    """A row a run, those of tuning among them: shares and accuracies in [0, 1], None where there is nothing."""
    predicted = {run.id: (group.predicted or {}).get(run.seed) for group in comparison.groups for run in group.done}
    return pd.DataFrame([_row(run, predicted.get(run.id)) for run in comparison.runs], dtype=object)


def _row(run: Run, predicted: float | None) -> dict[str, object]:
    def own(*names: str) -> dict[str, object]:
        return {name: getattr(run, name) for name in names}

    row = own("id", "kind", "condition", "mode", "seed", "workers", "batch_size", "epochs", "learning_rate", "momentum")
    row |= own("tuned") | {"enforced_staleness": run.staleness} | own("status", "reason", "final_accuracy")
    row |= {"final_loss": run.final("loss")} | own("validation_accuracy", "versions", "pushes")
    row |= own("samples_applied", "samples_computed", "dropped_samples", "duration_s", "samples_per_s")
    row["predicted_samples_per_s"] = predicted
    row |= {f"{part}_share": run.shares[part] if run.shares else None for part in PARTS}
    for target in TARGETS:
        row[f"time_to_{100 * target:.0f}_s"] = run.reached(target, "time_s")
        row[f"samples_to_{100 * target:.0f}"] = run.reached(target, "samples")
    for name, values in (("staleness", run.push_staleness), ("clock_gap", run.clock_gaps)):
        row |= {f"{name}_p50": percentile(values, 0.5), f"{name}_p99": percentile(values, 0.99)}
        row[f"{name}_max"] = max(values, default=None)
    row |= {"bytes_pushed": run.bytes_pushed(run.pushes)}
    return row | own("cpu_share", "cpu_bound", "wall_s", "weights_hash")


# ---- The Compose demo: its metrics files as a comparison of sync and async beside a straggler


def verdicts(arguments: Sequence[str]) -> int:
    """`verdicts FOLDER --hash=H --expected_hash=H --killed_hash=H`: FOLDER has each mode's metrics files in a folder of
    its name.

    Makes a comparison in it, writes its report, and prints a line for each verdict. 0 if all are "yes", else 1.
    UsageError.
    """
    parser = argparse.ArgumentParser(prog="verdicts", add_help=False, exit_on_error=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hash", required=True)
    parser.add_argument("--expected_hash", required=True)
    parser.add_argument("--killed_hash", required=True)
    try:
        asked = parser.parse_args(list(arguments))
    except (argparse.ArgumentError, SystemExit):
        raise UsageError("verdicts: expected FOLDER --hash=HASH --expected_hash=HASH --killed_hash=HASH") from None
    folder: Path = asked.folder
    modes = ("bsp", "asp")
    shutil.rmtree(folder / "runs", ignore_errors=True)
    runs = [_make_run(folder, mode, asked.hash if mode == "bsp" else None) for mode in modes]
    revision, dirty = commit()
    hashes = {"expected_weights_hash": asked.expected_hash, "killed_weights_hash": asked.killed_hash}
    settings = {"modes": modes, "workers": runs[0]["workers"], "seeds": 1, **hashes}
    plan = {"command": "deploy/compose-demo.sh", "commit": revision, "dirty": dirty, "machine": machine()}
    write_json(folder / "plan.json", plan | {"settings": settings, "runs": [run["id"] for run in runs]})
    found = write_reports(folder).verdicts
    for verdict in found:
        print(verdict)
    print(f"the report: {folder / 'report.html'}")
    return 0 if found and all(verdict.good for verdict in found) else 1


def _make_run(folder: Path, mode: str, weights_hash: str | None) -> dict[str, Any]:
    """Its run.json, which it writes, beside copies of the metrics files by the names that a comparison has for them."""
    run_folder = folder / "runs" / f"straggler-{mode}-s1"
    run_folder.mkdir(parents=True)
    flags: dict[str, str] = {}
    began_unix, workers = float("inf"), 0
    for path, start in _starts(folder / mode):
        is_worker = "rank" in start
        name = f"worker{start['rank']}" if is_worker else f"server{start['shard']}"
        shutil.copyfile(path, run_folder / f"{name}.jsonl")
        flags |= {flag: text for flag, text in start["flags"].items() if text}
        began_unix = min(began_unix, start["unix_time"])
        workers += is_worker
    if workers == 0:
        raise UsageError(f"verdicts: {folder / mode} has no metrics files of workers")
    run = {
        "id": run_folder.name,
        "kind": "comparison",
        "mode": mode,
        "condition": "straggler",
        "seed": int(flags["seed"]),
        "workers": workers,
        "batch_size": int(flags["batch_size"]),
        "epochs": float(flags["epochs"]),
        "learning_rate": float(flags["learning_rate"]),
        "momentum": float(flags["momentum"]),
        "tuned": False,
        "staleness": None,
        "status": "done",
        "reason": "",
        "began_unix": began_unix,
        "cores": machine()["cores"],
        "weights_hash": weights_hash,
    }
    write_json(run_folder / "run.json", run)
    return run


def _starts(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The metrics files, each with its first line."""
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            yield path, json.loads(file.readline())
