"""An experiment's page: its template with tables and plots, the published figures beside ours; and the list of all."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.lab import Lab, sources, together
from experiments.shared.charts import Figure, svg
from experiments.shared.machine import machine, read_json
from experiments.shared.pages import Table, render, table_markdown

NOT_MEASURED = "not measured"  # What needs a GPU, until it has run on one.
_VERDICTS = {True: "agrees", False: "contradicts", None: "not comparable"}


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
        return _VERDICTS[self.agrees]


@dataclass
class Page:
    """What an experiment returns. Its template has the lead and the sections, with tables and figures by name."""

    title: str
    finding: str  # One sentence, for the list of all experiments.
    template: str = "page.md.j2"
    claims: list[Claim] = field(default_factory=list)  # Beside published figures.
    # Beside what is expected otherwise: by a formula, of what the system promises. The list of all has them apart.
    expected: list[Claim] = field(default_factory=list)
    expected_column: str = "expected"  # What the column of these is called.
    tables: Mapping[str, Table] = field(default_factory=dict)
    figures: Sequence[Figure] = ()
    values: Mapping[str, Any] = field(default_factory=dict)  # What else the template says; `its` is the module.


def write_page(page: Page, lab: Lab, folder: Path, took_s: float) -> Path:
    """Writes NAME.md, its plots NAME-*.svg, and NAME.json for the list of all, to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {}
    for one in page.figures:
        name = f"{lab.name}-{one.name}.svg"
        (folder / name).write_text(svg(one), encoding="utf-8")
        figures[one.name.replace("-", "_")] = f"![{one.title}]({name})\n\n*{one.caption}*"
    text = render(
        page.template,
        page=page,
        lab=lab,
        claims=table_markdown(_table(page.claims, "published")),
        expected=table_markdown(_table(page.expected, page.expected_column)),
        tables={name: table_markdown(table) for name, table in page.tables.items()},
        figures=figures,
        on=machine(),
        date=time.strftime("%Y-%m-%d"),
        sources=sources(),
        took=_took(lab, took_s),
        its=sys.modules.get(f"experiments.{lab.name}"),
        **page.values,
    )
    path = folder / f"{lab.name}.md"
    path.write_text(text, encoding="utf-8")
    all_s = took_s + sum(made.seconds or 0 for made in lab.made.values() if made.kept)
    listed = {"title": page.title, "finding": page.finding, "took_s": round(all_s, 1), "quick": lab.quick}
    for key, claims in (("claims", page.claims), ("expected", page.expected)):
        listed[key] = {word: sum(claim.verdict == word for claim in claims) for word in _VERDICTS.values()}
    _write_listed(folder, lab.name, listed)
    return path


def _table(claims: Sequence[Claim], column: str) -> Table:
    rows = [[claim.what, claim.published, claim.ours, claim.verdict, claim.why] for claim in claims]
    return Table("", ["what", column, "ours", "verdict", "why"], rows)


def _took(lab: Lab, took_s: float) -> str:
    """The run itself says little where it kept much."""
    made = lab.made.values()
    run = "" if any(one.kept for one in made) else f"It took {took_s / 60:.1f} minutes. "
    return f"{run}{together(made)}"


# ---- The page that lists all experiments, made of what is left beside each page


def mark_earlier(folder: Path, name: str, outcome: str) -> None:
    """Its page, if there is one, is from an earlier run than the last, which "failed", say: the list is to tell."""
    if listed := read_json(folder / f"{name}.json"):
        _write_listed(folder, name, listed | {"earlier": f"from an earlier run: the last one {outcome}"})


def _write_listed(folder: Path, name: str, listed: Mapping[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def write_index(folder: Path, names: Sequence[str]) -> Path:
    """README.md in the pages' folder: those of `names` that are there, in this order."""
    listed = {name: found for name in names if (found := read_json(folder / f"{name}.json"))}
    counted = {name: [_counted(each.get(key, {})) for key in ("claims", "expected")] for name, each in listed.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "README.md"
    text = render("index.md.j2", listed=listed, counted=counted, all=names)
    path.write_text(text, encoding="utf-8")
    return path


def _counted(verdicts: Mapping[str, int]) -> str:
    """As "3 agree, 1 contradicts"."""
    said = [f"{count} {word if count == 1 else word.removesuffix('s')}" for word, count in verdicts.items() if count]
    return ", ".join(said) or "—"
