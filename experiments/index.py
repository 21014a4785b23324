"""The page that lists all experiments, made of what page.py left beside each page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LEAD = """Experiments that are often used to teach parallel training, run with this system. Each page has the
parameters as they were published, our figures beside the published ones, and whether they agree; what is expected for
another reason, as by a formula, is counted apart. Each is one command, and `deploy/experiments.sh all` runs all of
them; on a machine without a GPU what needs one says "not measured"."""


def mark_earlier(folder: Path, name: str, outcome: str) -> None:
    """Its page, if there is one, is from an earlier run than the last, which "failed", say: the list is to tell."""
    if listed := _listed(folder, name):
        listed["earlier"] = f"from an earlier run: the last one {outcome}"
        _file(folder, name).write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def write_index(folder: Path, names: Sequence[str]) -> Path:
    """README.md in the pages' folder: those of `names` that are there, in this order."""
    rows, total_s = [], 0.0
    for name in names:
        listed = _listed(folder, name)
        if listed is None:
            continue
        total_s += listed["took_s"]
        quick = " (quick form)" if listed["quick"] else ""
        earlier = f" (**{listed['earlier']}**)" if "earlier" in listed else ""
        counts = (_counted(listed.get(key, {})) for key in ("claims", "expected"))
        rows.append(
            f"| [{listed['title']}]({name}.md){earlier} | `experiments.sh {name}`{quick} | {listed['finding']} "
            f"| {' | '.join(counts)} | {listed['took_s'] / 60:.1f} |"
        )
    columns = ["experiment", "command", "what it shows", "published figures", "expected otherwise", "minutes"]
    table = [f"| {' | '.join(columns)} |", "|" + ":--|" * (len(columns) - 1) + "--:|", *rows]
    total = f"These {len(rows)} of {len(names)} took {total_s / 60:.0f} minutes together."
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "README.md"
    path.write_text("\n\n".join(["# Experiments", _LEAD, "\n".join(table), total]) + "\n", encoding="utf-8")
    return path


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _listed(folder: Path, name: str) -> dict[str, Any] | None:
    """What page.py left; None if there is no page."""
    try:
        return json.loads(_file(folder, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _counted(verdicts: Mapping[str, int]) -> str:
    """As "3 agree, 1 contradicts"."""
    return ", ".join(f"{count} {_verb(word, count)}" for word, count in verdicts.items() if count) or "—"


def _verb(word: str, count: int) -> str:
    return word if count == 1 or not word.endswith("s") else word.removesuffix("s")
