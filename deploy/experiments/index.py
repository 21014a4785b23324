"""The page that lists all experiments, made of what page.py left beside each page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

_LEAD = """Experiments that are often used to teach parallel training, run with this system. Each page has the
parameters as they were published, our figures beside the published ones, and whether they agree. Each is one command,
and `deploy/experiments/all.sh` runs all of them; on a machine without a GPU what needs one says "not measured"."""


def write_index(folder: Path, names: Sequence[str]) -> Path:
    """README.md in the pages' folder: those of `names` that are there, in this order."""
    rows, total_s = [], 0.0
    for name in names:
        try:
            listed = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        total_s += listed["took_s"]
        count = listed["claims"]
        verdicts = ", ".join(f"{count[word]} {word}" for word in count if count[word]) or "—"
        quick = " (quick form)" if listed["quick"] else ""
        rows.append(
            f"| [{listed['title']}]({name}.md) | `{name}.sh`{quick} | {listed['finding']} | {verdicts} "
            f"| {listed['took_s'] / 60:.1f} |"
        )
    table = ["| experiment | command | what it shows | published figures | minutes |", "|:--|:--|:--|:--|--:|", *rows]
    total = f"These {len(rows)} of {len(names)} took {total_s / 60:.0f} minutes together."
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "README.md"
    path.write_text("\n\n".join(["# Experiments", _LEAD, "\n".join(table), total]) + "\n", encoding="utf-8")
    return path
