"""Writes the report of a comparison: report.html, report.md, results.csv and plots/.

deploy/compare.sh report OUTPUT, or alone: python3 -B experiments/compare/report.py OUTPUT
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import plots
from content import Section, provenance, sections_of
from figures import figures_of
from html_page import page
from markdown import markdown
from metrics import load_plan, load_runs
from progress import print_anywhere
from summary import compare
from tables import write_csv
from verdicts import Verdict, verdicts_of

_TITLE = "Sync and async, compared"
_LEAD = (
    "What is gained and what is lost when workers stop waiting for each other: the same model, data order and number "
    "of samples under each mode."
)


@dataclass
class Written:
    """A report."""

    sections: list[Section]
    verdicts: list[Verdict]


def write_reports(output: Path) -> Written:
    """Writes the report of all runs in `output` that have ended so far. ValueError if there are none."""
    runs = load_runs(output)
    if not runs:
        raise ValueError(f"{output}: there are no runs that have ended (no {output / 'runs'}/*/run.json)")
    plan = load_plan(output)
    comparison = compare(runs)
    verdicts = verdicts_of(comparison, plan.get("settings") or {})
    write_csv(comparison, output / "results.csv")
    can_draw = plots.available()
    figures = figures_of(comparison) if can_draw else []
    drawn = plots.draw_all(figures, output / "plots") if can_draw else []
    sections = sections_of(comparison, plan, figures, verdicts)
    missing = [run for run in plan.get("runs", []) if run not in {each.id for each in runs}]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        sections[0].notes.append(f"{len(missing)} of {len(plan['runs'])} planned runs {verb} still to be made.")
    if not can_draw:
        sections[0].notes.append(_no_plots())
    origin = provenance(plan, comparison)
    _write(output / "report.md", markdown(_TITLE, _LEAD, sections, origin))
    svgs = {each.figure.name: each.svg for each in drawn}
    _write(output / "report.html", page(_TITLE, _LEAD, sections, origin, svgs))
    return Written(sections, verdicts)


def _no_plots() -> str:
    why = plots.why_none() or "matplotlib is missing"
    return f"There are no plots, since {why}: deploy/install-deps.sh --plots installs matplotlib."


def _write(path: Path, text: str) -> None:
    """Whoever has the old file open sees all of it or all of the new one."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def main(arguments: list[str]) -> int:
    """Exit status: 0 written; 1 nothing to report, or a verdict is "no"; 2 wrong usage."""
    print_anywhere()
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: report.py OUTPUT", file=sys.stderr)
        return 2
    try:
        verdicts = write_reports(Path(arguments[0])).verdicts
    except (OSError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1
    print(f"{arguments[0]}/report.html, report.md and results.csv are written")
    if not plots.available():
        print(_no_plots())
    for verdict in verdicts:
        print(verdict)
    return 0 if all(verdict.good for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
