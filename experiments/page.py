"""An experiment's page: tables, plots, and the published figures beside ours."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import Figure
from machine import machine
from plots import available, svg
from spread import interval

from .lab import Lab
from .made import sources, together

NOT_MEASURED = "not measured"  # What needs a GPU, until it has run on one.
_GENERATED = "<!-- Written by deploy/experiments.sh; what is changed here is lost when it runs again. -->"


@dataclass
class Table:
    """Its first column names the row. Cells are text."""

    caption: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class Claim:
    """A published figure or statement, or one that is expected for another reason, beside ours."""

    what: str
    published: str  # Or expected.
    ours: str
    agrees: bool | None  # None: cannot be compared, or was not measured.
    why: str  # Also where it agrees: what it rests on.

    @property
    def verdict(self) -> str:
        """A word for the table."""
        return {True: "agrees", False: "contradicts", None: "not comparable"}[self.agrees]


@dataclass
class Section:
    """A heading and what is under it, in this order."""

    title: str
    paragraphs: list[str] = field(default_factory=list)  # Markdown.
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # Markdown, after the tables and figures.


@dataclass
class Page:
    """What an experiment returns."""

    title: str
    finding: str  # One sentence, for the list of all experiments.
    lead: str  # What the experiment is, with its parameters. Markdown.
    claims: list[Claim] = field(default_factory=list)  # Beside published figures.
    # Beside what is expected otherwise: by a formula, of what the system promises. The list of all has them apart.
    expected: list[Claim] = field(default_factory=list)
    expected_column: str = "expected"  # What the column of these is called.
    sections: list[Section] = field(default_factory=list)


Draw = Callable[[Any, dict[str, str]], None]


def figure(name: str, title: str, caption: str, x_label: str, y_label: str, draw: Draw, **more: Any) -> Figure:
    """`draw` is called with matplotlib's axes and the colours by name (experiments/compare/palette.py)."""
    return Figure("", name, title, caption, x_label, y_label, draw, **more)


# Names of colours for lines that are no modes, in the order in which they are to be used.
SERIES = ("ssp", "asp", "backup", "local_sgd", "easgd", "other", "bsp")


def spread_text(values: list[float], digits: int = 2) -> str:
    """The mean and half of its 95 % interval, or the one value that there is."""
    found = interval(values)
    if found is None:
        return "—"
    half = "" if found.half is None else f" ± {found.half:.{digits}f}"
    return f"{found.mean:.{digits}f}{half}"


def write_page(page: Page, lab: Lab, folder: Path, took_s: float) -> Path:
    """Writes NAME.md, its plots NAME-*.svg, and NAME.json for the list of all (index.py), to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [_GENERATED, f"# {page.title}", page.lead]
    if page.claims:
        parts += ["## Published and measured", _table(_claims(page.claims, "published"))]
    if page.expected:
        parts += ["## Expected and measured", _table(_claims(page.expected, page.expected_column))]
    for section in page.sections:
        parts += [f"## {section.title}", *section.paragraphs]
        for table in section.tables:
            parts += [f"**{table.caption}**", _table(table)]
        for one in section.figures:
            parts += _drawn(one, lab, folder)
        parts += section.notes
    parts += ["## How this was made", _provenance(lab, took_s)]
    path = folder / f"{lab.name}.md"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    all_s = took_s + sum(made.seconds or 0 for made in lab.made.values() if made.kept)
    listed: dict[str, Any] = {
        "title": page.title,
        "finding": page.finding,
        "took_s": round(all_s, 1),
        "quick": lab.quick,
    }
    for key, claims in (("claims", page.claims), ("expected", page.expected)):
        listed[key] = {word: sum(claim.verdict == word for claim in claims) for word in _VERDICTS}
    (folder / f"{lab.name}.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    return path


_VERDICTS = ("agrees", "contradicts", "not comparable")


def _claims(claims: list[Claim], column: str) -> Table:
    rows = [[claim.what, claim.published, claim.ours, claim.verdict, claim.why] for claim in claims]
    return Table("", ["what", column, "ours", "verdict", "why"], rows)


def _drawn(one: Figure, lab: Lab, folder: Path) -> list[str]:
    if not available():
        return [f"*{one.title}: not drawn, since Matplotlib is missing (`deploy/install-deps.sh --plots`).*"]
    name = f"{lab.name}-{one.name}.svg"
    (folder / name).write_text(svg(one), encoding="utf-8")
    return [f"![{one.title}]({name})", f"*{one.caption}*"]


def _table(table: Table) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [table.columns, *table.rows]]
    rule = "|:--" + "|--:" * (len(table.columns) - 1) + "|"
    if table.columns[-1] == "why":
        rule = "|:--" * len(table.columns) + "|"
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], rule, *lines[1:]])


def _provenance(lab: Lab, took_s: float) -> str:
    on = machine()
    form = " --quick" if lab.quick else ""
    return (
        f"`deploy/experiments.sh {lab.name}{form}`, on {time.strftime('%Y-%m-%d')}: {on['cores']} cores of "
        f"{on['cpu']}, {on['memory_gib']:g} GiB; sources {sources()}. {_took(lab, took_s)}Figures drift from run to "
        "run on a machine that is shared; ratios within one table drift less."
    )


def _took(lab: Lab, took_s: float) -> str:
    """The run itself says little where it kept much."""
    made = lab.made.values()
    run = "" if any(one.kept for one in made) else f"It took {took_s / 60:.1f} minutes. "
    return f"{run}{together(made)} " if made else run
